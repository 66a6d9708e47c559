"""The patched torch of ./build.sh test and the unpatched one beside it: installed right, mended.

Runs in the environment that ./build.sh test makes, for each release.
"""

from __future__ import annotations

import base64
import csv
import hashlib
import importlib.metadata
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import venv
from collections.abc import Iterator
from pathlib import Path

import pytest
import releases
import series
from small_torch import ROOT

STOCK = os.environ.get("FXCTX_STOCK_PYTHON", "")
pytestmark = [
    pytest.mark.timeout(600),
    pytest.mark.skipif(not STOCK, reason="needs the environments of ./build.sh test"),
]


def build(verb: str, python: str | Path) -> subprocess.CompletedProcess[str]:
    env = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"} | {"PYTHON": str(python)}
    command = [str(ROOT / "build.sh"), verb]
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=500)


def run(python: str | Path, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
    command = [str(python), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=300)


def torch_version(python: str | Path) -> str:
    return run(python, "-c", "import torch; print(torch.__version__)").stdout.strip()


@pytest.fixture(scope="module")
def installed() -> importlib.metadata.Distribution:
    return importlib.metadata.distribution("torch")


@pytest.fixture(scope="module")
def release(installed: importlib.metadata.Distribution) -> str:
    return installed.version.partition("+")[0]


def test_versions_agree(installed: importlib.metadata.Distribution) -> None:
    version = torch_version(sys.executable)
    assert version == installed.version
    assert version.endswith(f"fxctx.{series.fxctx_version()}")
    assert series.base_version(version) == torch_version(STOCK)


def test_pip_check_is_clean() -> None:
    done = run(sys.executable, "-m", "pip", "check")
    assert done.returncode == 0, done.stdout


def test_every_hash_in_record_is_right(installed: importlib.metadata.Distribution) -> None:
    count = 0
    for name, digest, size in csv.reader((installed.read_text("RECORD") or "").splitlines()):
        if digest:
            content = Path(str(installed.locate_file(name))).read_bytes()
            found = base64.urlsafe_b64encode(hashlib.sha256(content).digest())
            assert digest == "sha256=" + found.rstrip(b"=").decode(), name
            assert int(size) == len(content), name
            count += 1
    assert count > 10000


def test_only_what_the_series_changes_differs(
    installed: importlib.metadata.Distribution, release: str
) -> None:
    """Every other file has the hash that the official wheel gives it."""

    def hashes(text: str) -> dict[str, str]:
        rows = csv.reader(text.splitlines())
        return {r[0]: r[1] for r in rows if len(r) == 3 and r[1] and r[0][:2] != ".."}

    code = "import importlib.metadata as m; print(m.distribution('torch').read_text('RECORD'))"
    stock = hashes(run(STOCK, "-c", code).stdout)
    patched = hashes(installed.read_text("RECORD") or "")
    changed = {n for n in stock.keys() | patched.keys() if stock.get(n) != patched.get(n)}
    changed = {name for name in changed if ".dist-info/" not in name}
    patches = series.find(release).python_patches
    paths = {path for patch in patches for path in patch.paths if series.in_wheel(path)}
    assert changed == paths | {"torch/version.py"}


def test_tests_are_not_in_the_wheel(
    installed: importlib.metadata.Distribution, release: str
) -> None:
    names = {Path(name).name for name in series.find(release).tests()}
    assert names and not names & {Path(str(file)).name for file in installed.files or []}


def test_the_doctor_finds_the_patched_torch_healthy() -> None:
    done = build("doctor", sys.executable)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "patched from its wheel" in done.stdout and "all is well" in done.stdout


def test_the_doctor_finds_the_official_torch_affected(release: str) -> None:
    done = build("doctor", STOCK)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "not patched" in done.stdout and "./build.sh apply" in done.stdout
    mends = {f for p in series.find(release).python_patches for f in p.faults}
    affected = {line.split()[0] for line in done.stdout.splitlines() if " AFFECTED " in line}
    assert affected & mends


def test_the_crash_in_a_few_lines(release: str) -> None:
    """From 2.14 on the official release does not crash."""
    example = ROOT / "repro" / "minimal.py"
    done = run(sys.executable, example)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.startswith(f"torch {release}") and "OK" in done.stdout
    done = run(STOCK, example)
    crashes = tuple(map(int, release.split("."))) < (2, 14)
    assert done.returncode == crashes, done.stdout + done.stderr
    assert ("symbolically trace a dynamo-optimized function" in done.stdout) == crashes


@pytest.fixture
def stock_copy(tmp_path: Path) -> Iterator[Path]:
    """An environment of its own with the official torch; files are linked where possible."""
    code = "import sysconfig; print(sysconfig.get_paths()['purelib'])"
    source = Path(run(STOCK, "-c", code).stdout.strip())
    # Beside the other one, so that the files can be linked.
    folder = Path(STOCK).parent.parent.with_name(f"copy-{os.getpid()}")
    shutil.rmtree(folder, ignore_errors=True)
    venv.create(folder, with_pip=False, symlinks=True)
    target = next(folder.glob("lib/python3*/site-packages"))

    def link(source: str, target: str) -> None:
        try:
            os.link(source, target)
        except OSError:
            shutil.copy2(source, target)

    for entry in source.iterdir():
        if entry.name in ("torch", "functorch", "torchgen") or entry.name.startswith("torch-"):
            shutil.copytree(entry, target / entry.name, copy_function=link, symlinks=True)
        else:
            (target / entry.name).symlink_to(entry)
    yield folder / "bin" / "python"
    shutil.rmtree(folder)


def state(python: Path) -> dict[str, tuple[str, int, int]]:
    """Hash of each text file of torch, and size and time of all."""
    site = next(python.parent.parent.glob("lib/python3*/site-packages"))
    found = {}
    for top in site.glob("torch*"):
        for path in top.rglob("*"):
            if path.is_file():
                small = path.stat().st_size < 1_000_000
                digest = hashlib.sha256(path.read_bytes()).hexdigest() if small else ""
                found[str(path.relative_to(site))] = (
                    digest,
                    path.stat().st_size,
                    path.stat().st_mtime_ns,
                )
    return found


def test_apply_and_revert(stock_copy: Path, release: str) -> None:
    before = state(stock_copy)
    stock_before = state(Path(STOCK))
    stock = torch_version(STOCK)

    done = build("apply", stock_copy)
    assert done.returncode == 0, done.stderr
    version = torch_version(stock_copy)
    assert series.base_version(version) == stock and "fxctx." in version
    manifest = next(stock_copy.parent.parent.rglob("fxctx/manifest.json"))
    patched = json.loads(manifest.read_text())
    for name, digest in patched["files"].items():
        if digest:
            content = (manifest.parent.parent.parent / name).read_bytes()
            assert releases.record_hash(content) == digest
    done = build("doctor", stock_copy)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "patched in place" in done.stdout
    assert "nothing to do" in build("apply", stock_copy).stderr

    done = build("revert", stock_copy)
    assert done.returncode == 0, done.stderr
    assert state(stock_copy) == before
    assert torch_version(stock_copy) == stock
    # What is linked from elsewhere, as uv does it, is never written to.
    assert state(Path(STOCK)) == stock_before
