"""Fixtures of the tests of build.sh."""

from __future__ import annotations

import shutil
import sys
import venv
from pathlib import Path

import pytest
from small_torch import PATCHED, RELEASE, ROOT, Torch, make_series, make_wheel

sys.path.insert(0, str(ROOT / "tools"))


@pytest.fixture(scope="session")
def small_wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_wheel(tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="session")
def small_patches(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("series") / "patches"
    make_series(folder / f"v{RELEASE}", PATCHED, gone=("torch/fx/old.py",))
    (folder / "VERSION").write_text("1\n")
    return folder


@pytest.fixture
def torch_env(tmp_path: Path, small_wheel: Path, small_patches: Path) -> Torch:
    venv.create(tmp_path / "venv", with_pip=False, symlinks=True)
    made = Torch(tmp_path)
    shutil.copytree(ROOT / "tools", made.repo / "tools")
    for name in ("build.sh", "requirements-test.txt", "requirements-newest.txt"):
        shutil.copy2(ROOT / name, made.repo / name)
    shutil.copytree(small_patches, made.patches)
    done = made.pip("install", "--no-deps", "--no-index", small_wheel)
    assert done.returncode == 0, done.stderr
    return made
