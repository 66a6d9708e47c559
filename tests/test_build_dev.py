"""build.sh dev and refresh."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from small_torch import MODULES, PATCHED, RELEASE, Torch, git, one_line, snapshot
from test_build_wheel import NATIVE_PATCH

pytestmark = pytest.mark.timeout(300)


@pytest.fixture
def tree(torch_env: Torch, small_wheel: Path) -> Path:
    torch_env.env |= {
        "PYTHON": sys.executable,
        "PIP_NO_INDEX": "1",
        "PIP_FIND_LINKS": str(small_wheel.parent),
        "PIP_CONFIG_FILE": os.devnull,
    }
    folder = torch_env.folder / "tree"
    done = torch_env.build("dev", folder, "--torch", RELEASE)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == str(folder)
    return folder


def content_of(folder: Path) -> dict[str, bytes]:
    return {p.name: p.read_bytes() for p in folder.iterdir() if p.is_file()}


def test_one_commit_a_patch_on_top_of_the_release(tree: Path) -> None:
    subjects = git(tree, "log", "--format=%s", "base..HEAD").splitlines()
    assert subjects == ["[fx] Remove what nobody uses", "[fx] The flag becomes a ContextVar"]
    assert git(tree, "show", "base:torch/fx/trace.py") == MODULES["torch/fx/trace.py"]
    assert (tree / "torch/fx/trace.py").read_text() == PATCHED["torch/fx/trace.py"]
    assert (tree / "test/fx/test_state.py").read_text() == PATCHED["test/fx/test_state.py"]
    tracked = git(tree, "ls-files").splitlines()
    assert all(name.endswith(".py") for name in tracked)
    assert git(tree, "status", "--porcelain") == ""


def test_it_can_be_imported_and_moved(tree: Path) -> None:
    moved = tree.rename(tree.with_name("moved"))
    code = "import torch, torch.fx; print(torch.__file__, torch.fx.is_tracing())"
    env = os.environ | {"PYTHONPATH": str(moved)}
    command = [sys.executable, "-c", code]
    told = subprocess.run(command, env=env, cwd=tree.parent, capture_output=True, text=True)
    assert told.stdout.split() == [str(moved / "torch/__init__.py"), "False"], told.stderr
    assert (moved / "torch/lib/libtorch.so").read_text() == MODULES["torch/lib/libtorch.so"]


def test_refresh_writes_what_was_read(torch_env: Torch, tree: Path) -> None:
    """The second time nothing at all changes, and times stay."""
    folder = torch_env.patches / f"v{RELEASE}"
    assert torch_env.build("refresh", tree).returncode == 0
    first = snapshot(folder)
    before = {name: content.split(b"\n---\n")[0] for name, content in content_of(folder).items()}
    assert torch_env.build("refresh", tree).returncode == 0
    assert snapshot(folder) == first
    again = torch_env.folder / "again"
    assert torch_env.build("dev", again, "--torch", RELEASE).returncode == 0
    assert torch_env.build("refresh", again).returncode == 0
    assert snapshot(folder) == first
    after = {name: content.split(b"\n---\n")[0] for name, content in content_of(folder).items()}
    assert after == before


def test_refresh_writes_new_commits_and_tests(torch_env: Torch, tree: Path) -> None:
    (tree / "torch/fx/new.py").write_text("new = True\n")
    (tree / "test/dynamo").mkdir()
    (tree / "test/dynamo/test_new.py").write_text("# a test\n")
    git(tree, "add", ".")
    git(tree, "commit", "-qm", "[fx] Something new")
    done = torch_env.build("refresh", tree)
    assert done.returncode == 0, done.stderr
    names = sorted(p.name for p in (torch_env.patches / f"v{RELEASE}").iterdir())
    assert names[2] == "0003-fx-Something-new.patch" and len(names) == 3
    tests = torch_env.repo / "torch_tests"
    found = {str(p.relative_to(tests)) for p in tests.rglob("*") if p.is_file()}
    assert found == {"fx/test_state.py", "dynamo/test_new.py"}

    git(tree, "reset", "-q", "--hard", "HEAD~2")
    assert torch_env.build("refresh", tree).returncode == 0
    names = sorted(p.name for p in (torch_env.patches / f"v{RELEASE}").iterdir())
    assert names == ["0001-fx-The-flag-becomes-a-ContextVar.patch"]
    found = {str(p.relative_to(tests)) for p in tests.rglob("*") if p.is_file()}
    assert found == {"fx/test_state.py"}


def test_refresh_writes_the_table_of_releases(torch_env: Torch, tree: Path) -> None:
    readme = torch_env.repo / "README.md"
    readme.write_text("text\n\n| a | b |\n|---|---|\n| 2.1.0 | F3 |\n| 2.0.0 | F9 |\n\ntext\n")
    assert torch_env.build("refresh", tree).returncode == 0
    table = f"| a | b |\n|---|---|\n| {RELEASE} | F1, F2 | applied | - |\n"
    assert readme.read_text() == f"text\n\n{table}\ntext\n"
    # What CI tests and where it ran, as .ci/run and the results say
    (torch_env.repo / ".ci").mkdir()
    (torch_env.repo / ".ci" / "run").write_text(f"FULL=1.0.0\nOTHERS=({RELEASE} 1.1.0)\n")
    results = torch_env.repo / "benchmarks" / "results"
    results.mkdir(parents=True)
    arm = {"torch": f"{RELEASE}+cu130.fxctx.1", "patched": True, "gpus": ["GPU A", "GPU A"]}
    stock = arm | {"patched": False, "gpus": ["GPU B"]}
    (results / "one.json").write_text(json.dumps({"torch": {"stock": stock, "patched": arm}}))
    (results / "two.json").write_text(json.dumps({"torch": "9.9.9"}))
    assert torch_env.build("refresh", tree).returncode == 0
    table = table.replace("applied | -", "CPU tests | GPU A")
    assert readme.read_text() == f"text\n\n{table}\ntext\n"


def test_an_older_release_leaves_torch_tests(torch_env: Torch, tree: Path) -> None:
    newest = torch_env.patches / "v2.99.0"
    newest.mkdir()
    assert torch_env.build("refresh", tree).returncode == 0
    assert not (torch_env.repo / "torch_tests").exists()


def test_native_patches_are_kept_at_the_end(torch_env: Torch, tree: Path) -> None:
    folder = torch_env.patches / f"v{RELEASE}"
    (folder / "0003-native.patch").write_text(NATIVE_PATCH)
    done = torch_env.build("dev", torch_env.folder / "other", "--torch", RELEASE)
    assert "left out, needs a PyTorch checkout: 0003-native.patch" in done.stderr
    git(tree, "commit", "-q", "--allow-empty-message", "--allow-empty", "-m", "")
    git(tree, "reset", "-q", "--hard", "HEAD~2")
    assert torch_env.build("refresh", tree).returncode == 0
    names = sorted(p.name for p in folder.iterdir())
    assert names == ["0001-fx-The-flag-becomes-a-ContextVar.patch", "0002-native.patch"]
    assert (folder / "0002-native.patch").read_text() == NATIVE_PATCH


def refused(torch: Torch, tree: Path, *words: str) -> None:
    before = snapshot(torch.patches)
    one_line(torch.build("refresh", tree), *words)
    assert snapshot(torch.patches) == before


def test_refresh_refuses_what_is_not_committed(torch_env: Torch, tree: Path) -> None:
    (tree / "torch/fx/trace.py").write_text("changed = True\n")
    refused(torch_env, tree, "not committed")
    git(tree, "checkout", "-q", ".")
    (tree / "torch/fx/untracked.py").write_text("new = True\n")
    refused(torch_env, tree, "not committed")


def test_refresh_refuses_other_folders(torch_env: Torch, tree: Path, tmp_path: Path) -> None:
    refused(torch_env, tmp_path, "not a tree that ./build.sh dev made")
    git(tmp_path, "init", "-q")
    refused(torch_env, tmp_path, "not a tree that ./build.sh dev made")
    refused(torch_env, tree / "torch", "not a tree that ./build.sh dev made")


def test_refresh_refuses_another_history(torch_env: Torch, tree: Path) -> None:
    git(tree, "checkout", "-q", "-b", "side", "base")
    git(tree, "commit", "-q", "--allow-empty", "-m", "side")
    git(tree, "merge", "-q", "-m", "merge", "series")
    refused(torch_env, tree, "merge", "rebase")
    git(tree, "checkout", "-q", "--orphan", "lone")
    git(tree, "commit", "-q", "-m", "lone")
    refused(torch_env, tree, "not on top of", "base")


def test_dev_does_not_touch_what_is_there(torch_env: Torch, tree: Path) -> None:
    before = snapshot(tree / "torch")
    one_line(torch_env.build("dev", tree, "--torch", RELEASE), "is there already")
    assert snapshot(tree / "torch") == before


def test_dev_leaves_nothing_when_a_patch_does_not_apply(torch_env: Torch, tree: Path) -> None:
    patch = next(torch_env.patches.glob("v*/0001-*.patch"))
    patch.write_text(patch.read_text().replace("-flag = False", "-flag = None"))
    folder = torch_env.folder / "parent" / "fails"
    one_line(torch_env.build("dev", folder, "--torch", RELEASE), patch.name, "does not apply")
    assert list(folder.parent.iterdir()) == []


def test_dev_for_a_release_without_a_series_starts_one(torch_env: Torch, tree: Path) -> None:
    (torch_env.patches / f"v{RELEASE}").rename(torch_env.patches / "v2.1.0")
    folder = torch_env.folder / "fresh"
    done = torch_env.build("dev", folder, "--torch", RELEASE)
    assert done.returncode == 0, done.stderr
    assert git(folder, "log", "--format=%s").splitlines() == [
        f"torch {RELEASE}, the Python files of its wheel"
    ]
    (folder / "torch/fx/trace.py").write_text("flag = None\n")
    git(folder, "commit", "-qam", "[fx] First")
    assert torch_env.build("refresh", folder).returncode == 0
    names = [p.name for p in (torch_env.patches / f"v{RELEASE}").iterdir()]
    assert names == ["0001-fx-First.patch"]
