"""build.sh wheel: the patched wheel, and what stops it from being made."""

from __future__ import annotations

import base64
import csv
import hashlib
import io
import os
import shutil
import subprocess
import sys
import textwrap
import venv
import zipfile
from pathlib import Path

import pytest
from small_torch import (
    MODULES,
    PATCHED,
    RELEASE,
    Torch,
    make_series,
    make_wheel,
    one_line,
    python_wrapper,
    unzip,
)

pytestmark = pytest.mark.timeout(300)

NATIVE_PATCH = """\
From 0000000000000000000000000000000000000000 Mon Sep 17 00:00:00 2001
From: A <a@example.org>
Date: Sun, 1 Nov 2026 00:00:00 +0000
Subject: [PATCH] [dynamo] Native state belongs to its thread

---
 torch/csrc/dynamo/eval_frame.c | 1 +
 1 file changed, 1 insertion(+)

diff --git a/torch/csrc/dynamo/eval_frame.c b/torch/csrc/dynamo/eval_frame.c
index 1111111..2222222 100644
--- a/torch/csrc/dynamo/eval_frame.c
+++ b/torch/csrc/dynamo/eval_frame.c
@@ -1 +1,2 @@
 static int flag;
+static _Thread_local int other;
"""


@pytest.fixture
def wheels(torch_env: Torch, small_wheel: Path) -> Torch:
    """The small torch's wheel is the one that pip finds; pip is this interpreter's."""
    torch_env.env |= {
        "PYTHON": sys.executable,
        "PIP_NO_INDEX": "1",
        "PIP_FIND_LINKS": str(small_wheel.parent),
        "PIP_CONFIG_FILE": os.devnull,
    }
    return torch_env


def built(done: subprocess.CompletedProcess[str]) -> Path:
    assert done.returncode == 0, done.stderr
    return Path(done.stdout.splitlines()[-1])


def nothing_left(torch: Torch) -> None:
    """A failed run leaves no wheel and no temporary folder."""
    assert not list((torch.repo / "dist").glob("*"))
    assert not list((torch.repo / "build").glob("tmp-*"))


def test_the_wheel(wheels: Torch, small_wheel: Path) -> None:
    path = built(wheels.build("--torch", RELEASE))
    version = f"{RELEASE}+cpu.fxctx.1"
    assert path == wheels.repo / "dist" / f"torch-{version}-py3-none-any.whl"

    before, after = unzip(small_wheel), unzip(path)
    info = f"torch-{version}.dist-info"
    assert f"\nVersion: {version}\n".encode() in after[f"{info}/METADATA"]
    assert f"__version__ = '{version}'\n".encode() in after["torch/version.py"]
    for name, content in PATCHED.items():
        if name.startswith("torch/"):
            assert after.pop(name).decode() == content
    assert not any("test_state" in name for name in after)
    assert "torch/fx/old.py" not in after
    untouched = set(MODULES) - set(PATCHED) - {"torch/version.py", "torch/fx/old.py"}
    assert {name: after[name] for name in untouched} == {name: before[name] for name in untouched}

    rows = list(csv.reader(io.StringIO(after[f"{info}/RECORD"].decode())))
    content = unzip(path)
    assert sorted(row[0] for row in rows) == sorted(content)
    for name, digest, size in rows:
        if not name.endswith("/RECORD"):
            found = base64.urlsafe_b64encode(hashlib.sha256(content[name]).digest())
            assert digest == "sha256=" + found.rstrip(b"=").decode()
            assert int(size) == len(content[name])


def test_it_installs_beside_what_needs_the_release(wheels: Torch) -> None:
    path = built(wheels.build("--torch", RELEASE, "--quiet"))
    info = wheels.site / "vision-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: vision\nVersion: 1.0\nRequires-Dist: torch=={RELEASE}\n"
    )
    (info / "RECORD").write_text("")
    assert wheels.pip("install", "--no-index", "--no-deps", path).returncode == 0
    check = wheels.pip("check")
    assert check.returncode == 0, check.stdout
    assert wheels.evaluate("torch.__version__") == f"{RELEASE}+cpu.fxctx.1"
    wheels.check_record()
    wheels.env["PYTHON"] = str(wheels.python)
    done = wheels.build("apply")
    assert done.returncode == 0 and "patched wheel" in done.stderr


def test_a_version_that_only_torch_itself_states(wheels: Torch, tmp_path: Path) -> None:
    """PyPI's CUDA wheels: the distribution is 2.11.0, torch.__version__ is 2.11.0+cu130."""
    (tmp_path / "cuda").mkdir()
    version = MODULES["torch/version.py"].replace("+cpu", "+cu130")
    make_wheel(tmp_path / "cuda", RELEASE, **{"torch/version.py": version})
    wheels.env["PIP_FIND_LINKS"] = str(tmp_path / "cuda")
    path = built(wheels.build("--torch", RELEASE))
    assert path.name.startswith(f"torch-{RELEASE}+cu130.fxctx.1-")
    content = unzip(path)
    assert b"'2.13.0+cu130.fxctx.1'" in content["torch/version.py"]
    assert f"torch-{RELEASE}+cu130.fxctx.1.dist-info/METADATA" in content


def test_a_second_run_has_nothing_to_do(wheels: Torch) -> None:
    path = built(wheels.build("--torch", RELEASE))
    made = path.stat().st_mtime_ns
    done = wheels.build("--torch", RELEASE)
    assert built(done) == path and "up to date" in done.stderr
    assert path.stat().st_mtime_ns == made
    patch = next(wheels.patches.glob("v*/0001-*.patch"))
    patch.write_text(patch.read_text().replace("default=False", "default=None"))
    assert built(wheels.build("--torch", RELEASE)) == path
    assert b"default=None" in unzip(path)["torch/fx/state/owner.py"]


def test_the_downloaded_wheel_is_kept(wheels: Torch) -> None:
    built(wheels.build("--torch", RELEASE))
    shutil.rmtree(wheels.repo / "dist")
    done = wheels.build("--torch", RELEASE)
    assert built(done).exists() and "fetching" not in done.stderr
    wheels.env["PIP_FIND_LINKS"] = str(wheels.folder)
    one_line(wheels.build("--torch", RELEASE), f"pip finds no torch {RELEASE}")


def test_quiet(wheels: Torch) -> None:
    done = wheels.build("--torch", RELEASE, "--quiet")
    assert done.stderr == "" and len(done.stdout.splitlines()) == 1


def test_index_options_reach_pip(wheels: Torch, small_wheel: Path, tmp_path: Path) -> None:
    index = tmp_path / "index" / "torch"
    index.mkdir(parents=True)
    shutil.copy2(small_wheel, index)
    (index / "index.html").write_text(f'<a href="{small_wheel.name}">{small_wheel.name}</a>')
    for name in ("PIP_NO_INDEX", "PIP_FIND_LINKS"):
        wheels.env[name] = ""
    url = index.parent.as_uri()
    built(wheels.build("--torch", RELEASE, "--index-url", url))
    shutil.rmtree(wheels.repo / "build")
    shutil.rmtree(wheels.repo / "dist")
    wheels.env["PIP_INDEX_URL"] = url
    built(wheels.build("--torch", RELEASE))
    shutil.rmtree(wheels.repo / "build")
    options = ("--no-index", "--find-links", small_wheel.parent)
    built(wheels.build("--torch", RELEASE, *options))


def test_without_a_version_it_is_for_the_installed_torch(wheels: Torch) -> None:
    """The folders for newer releases do not matter then."""
    make_series(wheels.patches / "v2.99.0", PATCHED)
    wrapper = wheels.folder / "python-with-pip"
    wrapper.write_text(
        f'#!/bin/sh\nPYTHONPATH="{wheels.site}:$PYTHONPATH" exec "{sys.executable}" "$@"\n'
    )
    wrapper.chmod(0o755)
    wheels.env["PYTHON"] = str(wrapper)
    path = built(wheels.build())
    assert path.name.startswith(f"torch-{RELEASE}+cpu.fxctx.1-")


def test_without_a_torch_it_is_the_newest_that_pip_gets(wheels: Torch) -> None:
    make_series(wheels.patches / "v2.99.0", PATCHED)
    venv.create(wheels.folder / "empty", with_pip=True, symlinks=True)
    empty = wheels.folder / "empty" / "bin" / "python"
    tool = (wheels.repo / "build" / "wheel-tool" / "bin").resolve()
    tool.mkdir(parents=True)
    (tool / "python").write_text(f'#!/bin/sh\nexec "{sys.executable}" "$@"\n')
    (tool / "python").chmod(0o755)
    wheels.env["PYTHON"] = str(empty)
    path = built(wheels.build())
    assert path.name.startswith(f"torch-{RELEASE}+cpu.fxctx.1-")


def test_native_patches_are_named_as_left_out(wheels: Torch) -> None:
    name = "0003-dynamo-Native-state.patch"
    (wheels.patches / f"v{RELEASE}" / name).write_text(NATIVE_PATCH)
    done = wheels.build("--torch", RELEASE)
    assert built(done).exists()
    assert f"left out, needs a build from source: {name}" in done.stderr


def test_it_works_inside_any_repository(wheels: Torch) -> None:
    """Nothing that the user's git has set up changes how patches apply."""
    subprocess.run(["git", "init", "-q", wheels.repo], check=True)
    wheels.env |= {
        "GIT_DIR": str(wheels.repo / ".git"),
        "GIT_WORK_TREE": str(wheels.repo),
        "GIT_CONFIG_COUNT": "2",
        "GIT_CONFIG_KEY_0": "apply.whitespace",
        "GIT_CONFIG_VALUE_0": "fix",
        "GIT_CONFIG_KEY_1": "core.autocrlf",
        "GIT_CONFIG_VALUE_1": "true",
    }
    content = unzip(built(wheels.build("--torch", RELEASE)))
    assert content["torch/fx/trace.py"].decode() == PATCHED["torch/fx/trace.py"]


def test_a_release_without_a_series(wheels: Torch) -> None:
    one_line(wheels.build("--torch", "2.4.1"), "no patches for torch 2.4.1", RELEASE)
    nothing_left(wheels)


def test_a_release_that_pip_does_not_find(wheels: Torch) -> None:
    make_series(wheels.patches / "v2.99.0", PATCHED)
    done = wheels.build("--torch", "2.99.0")
    one_line(done, "pip finds no torch 2.99.0", "--torch", "--index-url")
    nothing_left(wheels)


def test_no_network(wheels: Torch) -> None:
    """Port 9 of this machine: nobody listens there."""
    for name in ("PIP_NO_INDEX", "PIP_FIND_LINKS"):
        wheels.env[name] = ""
    wheels.env["PIP_RETRIES"] = "1"
    done = wheels.build("--torch", RELEASE, "--index-url", "http://127.0.0.1:9/simple")
    one_line(done, "could not reach the package index", "--find-links")
    nothing_left(wheels)


def test_a_constraint_of_pip(wheels: Torch, tmp_path: Path) -> None:
    (tmp_path / "constraints.txt").write_text("torch<=2.12\n")
    wheels.env["PIP_CONSTRAINT"] = str(tmp_path / "constraints.txt")
    one_line(wheels.build("--torch", RELEASE), "constraints", "torch<=2.12")
    nothing_left(wheels)


def test_a_patch_that_does_not_apply(wheels: Torch) -> None:
    path = built(wheels.build("--torch", RELEASE))
    made = path.read_bytes()
    patch = next(wheels.patches.glob("v*/0001-*.patch"))
    patch.write_text(patch.read_text().replace("-flag = False", "-flag = None"))
    one_line(wheels.build("--torch", RELEASE), patch.name, "does not apply", "torch/fx/trace.py")
    assert [p.name for p in (wheels.repo / "dist").iterdir()] == [path.name]
    assert path.read_bytes() == made
    assert not list((wheels.repo / "build").glob("tmp-*"))


def test_a_damaged_wheel(wheels: Torch, small_wheel: Path, tmp_path: Path) -> None:
    """A file that is not what RECORD says."""
    (tmp_path / "damaged").mkdir()
    with zipfile.ZipFile(tmp_path / "damaged" / small_wheel.name, "w") as archive:
        for name, content in unzip(small_wheel).items():
            archive.writestr(name, content + b"x" if name.endswith("libtorch.so") else content)
    wheels.env["PIP_FIND_LINKS"] = str(tmp_path / "damaged")
    one_line(wheels.build("--torch", RELEASE), "cannot unpack the wheel", "libtorch.so")
    nothing_left(wheels)


def test_a_full_disk_is_seen_before_the_work(wheels: Torch) -> None:
    code = """
    import shutil
    shutil.disk_usage = lambda path: type(shutil.disk_usage("/"))(1, 1, 100)
    """
    code = textwrap.dedent(code).replace('type(shutil.disk_usage("/"))', "shutil._ntuple_diskusage")
    wheels.env["PYTHON"] = str(python_wrapper(wheels.folder, Path(sys.executable), code))
    one_line(wheels.build("--torch", RELEASE), "GB free", "free some space")
    nothing_left(wheels)


def test_a_disk_that_fills_up_on_the_way(wheels: Torch) -> None:
    """The packing tool is the one that meets it, and says so in a traceback."""
    code = """
    import subprocess
    real = subprocess.run
    def run(command, *args, **kwargs):
        if "pack" in command and "--local-version" in command:
            text = "Traceback ...\\nOSError: [Errno 28] No space left on device\\n"
            return subprocess.CompletedProcess(command, 1, stdout=text)
        return real(command, *args, **kwargs)
    subprocess.run = run
    """
    wheels.env["PYTHON"] = str(python_wrapper(wheels.folder, Path(sys.executable), code))
    one_line(wheels.build("--torch", RELEASE), "no space left on device", "free some space")
    nothing_left(wheels)


def test_what_a_killed_run_left_is_removed(wheels: Torch) -> None:
    code = """
    import os, signal, subprocess
    real = subprocess.run
    def run(command, *args, **kwargs):
        if "pack" in command and "--local-version" in command:
            os.kill(os.getpid(), signal.SIGKILL)
        return real(command, *args, **kwargs)
    subprocess.run = run
    """
    python = wheels.env["PYTHON"]
    wheels.env["PYTHON"] = str(python_wrapper(wheels.folder, Path(sys.executable), code))
    assert wheels.build("--torch", RELEASE).returncode != 0
    assert list((wheels.repo / "build").glob("tmp-*"))
    assert not list((wheels.repo / "dist").glob("*"))
    wheels.env["PYTHON"] = python
    assert built(wheels.build("--torch", RELEASE)).exists()
    assert not list((wheels.repo / "build").glob("tmp-*"))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["frobnicate"], ["unknown verb 'frobnicate'", "--help"]),
        (["--frobnicate"], ["--frobnicate", "--help"]),
        (["apply", "--torch", "2.13.0"], ["--torch", "--help"]),
        (["revert", "now"], ["now", "--help"]),
        (["--torch"], ["--torch", "--help"]),
        (["dev"], ["DIR", "--help"]),
        (["refresh"], ["DIR", "--help"]),
        (["doctor", "--fast"], ["--fast", "--help"]),
        (["test", "--upstream"], ["--upstream", "--help"]),
        (["test", "--stock", "--upstream", "x"], ["--upstream", "--stock"]),
        (["test", "--in-order", "--stock"], ["--in-order"]),
        (["test", "--in-order", "--", "-k", "flag"], ["--in-order"]),
    ],
)
def test_wrong_usage_is_one_line(torch_env: Torch, arguments: list[str], words: list[str]) -> None:
    one_line(torch_env.build(*arguments), *words, status=2)


def test_help_names_every_verb(torch_env: Torch) -> None:
    texts = {torch_env.build(*arguments).stdout for arguments in (["--help"], ["apply", "--help"])}
    assert len(texts) == 1
    (text,) = texts
    for verb in ("wheel", "test", "apply", "revert", "doctor", "dev", "refresh"):
        assert f"./build.sh {verb}" in text or f"./build.sh [{verb}]" in text
    assert not text.startswith("#") and "set -euo" not in text


def test_a_missing_tool(torch_env: Torch, tmp_path: Path) -> None:
    torch_env.env["PYTHON"] = str(tmp_path / "nowhere")
    one_line(torch_env.build("apply"), "no Python at", "PYTHON")
    bare = tmp_path / "bin"
    bare.mkdir()
    for name in ("bash", "dirname", "env"):
        (bare / name).symlink_to(shutil.which(name) or "")
    torch_env.env |= {"PYTHON": str(torch_env.python), "PATH": str(bare)}
    one_line(torch_env.build("apply"), "git is not installed")
