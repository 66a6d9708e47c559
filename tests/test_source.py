"""build.sh source, on a small tree that builds in no time."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from small_torch import ROOT, git, one_line, snapshot, unzip, write

pytestmark = pytest.mark.timeout(300)

RELEASE = "2.6.0"
# A build backend in the tree's own place; what setup.py and ninja do is not under test here.
BACKEND = """
import os, pathlib, sys, time
from wheel.wheelfile import WheelFile

VERSION = os.environ["PYTORCH_BUILD_VERSION"] + os.environ.get("SUFFIX", "")
INFO = f"torch-{VERSION}.dist-info"
METADATA = f"Metadata-Version: 2.1\\nName: torch\\nVersion: {VERSION}\\n"

def prepare_metadata_for_build_wheel(folder, config_settings=None):
    pathlib.Path(folder, INFO).mkdir()
    pathlib.Path(folder, INFO, "METADATA").write_text(METADATA)
    return INFO

def build_wheel(folder, config_settings=None, metadata_directory=None):
    build = pathlib.Path("build")
    build.mkdir(exist_ok=True)
    (build / "CMakeCache.txt").touch()
    with open(build / "log", "w") as log:
        for name in ("PYTORCH_BUILD_VERSION", "USE_CUDA", "MAX_JOBS", "USE_MKLDNN"):
            print(name, os.environ.get(name), file=log)
    print("[1/2] Building C object eval_frame.c.o", flush=True)
    if os.environ.get("HANG"):
        (build / "hangs").touch()
        time.sleep(100)
    if os.environ.get("BREAK"):
        sys.exit("FAILED: eval_frame.c.o")
    tag = "Wheel-Version: 1.0\\nRoot-Is-Purelib: false\\nTag: py3-none-any\\n"
    name = f"torch-{VERSION}-py3-none-any.whl"
    with WheelFile(pathlib.Path(folder, name), "w") as wheel:
        wheel.write("torch/__init__.py")
        wheel.writestr("torch/version.py", f"__version__ = '{VERSION}'\\n")
        wheel.write("torch/csrc/dynamo/eval_frame.c", "torch/lib/libtorch.so")
        wheel.writestr(f"{INFO}/METADATA", METADATA)
        wheel.writestr(f"{INFO}/WHEEL", tag)
    return name
"""
SOURCES = {
    "setup.py": "",
    "version.txt": "2.6.0a0\n",
    "CMakeLists.txt": "",
    "pyproject.toml": (
        '[build-system]\nrequires = [\n    "pip",  # here\n    "cmake", "ninja"\n]\n'
        'build-backend = "backend"\nbackend-path = ["."]\n\n[tool.other]\nrequires = ["no"]\n'
    ),
    "backend.py": BACKEND,
    "torch/__init__.py": "from .version import __version__\nflag = False\n",
    "torch/csrc/dynamo/eval_frame.c": "bool flag = false;\n",
    "torch/csrc/other.cpp": "int other;\n",
}


@dataclass
class Sources:
    """A source tree, build.sh with a series for it, and programs of the names it looks for."""

    folder: Path
    env: dict[str, str] = field(default_factory=dict)

    @property
    def tree(self) -> Path:
        return self.folder / "src"

    @property
    def repo(self) -> Path:
        return self.folder / "repo"

    @property
    def series(self) -> Path:
        return self.repo / "patches" / f"v{RELEASE}"

    @property
    def programs(self) -> Path:
        return self.folder / "bin"

    @property
    def environment(self) -> dict[str, str]:
        kept = {k: v for k, v in os.environ.items() if not k.startswith(("USE_", "BUILD_", "C"))}
        path = f"{self.programs}{os.pathsep}{self.folder / 'git'}"
        return kept | {"PYTHON": sys.executable, "PATH": path} | self.env

    def build(self, *args: str | Path) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [str(self.repo / "build.sh"), "source", *map(str, args)],
            env=self.environment,
            cwd=self.folder,
            capture_output=True,
            text=True,
            timeout=200,
        )

    def make(self, *args: str) -> subprocess.CompletedProcess[str]:
        return self.build("--src", self.tree, *args)

    def log(self) -> dict[str, str]:
        lines = (self.tree / "build" / "log").read_text().splitlines()
        return dict(line.split(" ", 1) for line in lines)

    def as_checkout(self) -> None:
        git(self.tree, "init", "-q")
        git(self.tree, "add", ".")
        git(self.tree, "commit", "-qm", "PyTorch 2.6.0")

    def subjects(self) -> list[str]:
        return git(self.tree, "log", "--format=%s").splitlines()


def native_series(folder: Path, more: str = "") -> None:
    """A patch to the Python files with a test, and one to the C file and to ``more``."""
    tree = folder.parent / "series-tree"
    write(tree, SOURCES)
    git(tree, "init", "-q")
    git(tree, "add", ".")
    git(tree, "commit", "-qm", "base")
    write(tree, {"torch/__init__.py": "from .version import __version__\nflag = True\n"})
    write(tree, {"test/test_flag.py": '# Owner(s): ["module: fx"]\n'})
    git(tree, "add", ".")
    git(tree, "commit", "-qm", "[fx] The Python part\n\nFaults: F1")
    write(tree, {"torch/csrc/dynamo/eval_frame.c": "thread_local bool flag = false;\n"})
    if more:
        write(tree, {more: "int more;\n"})
    git(tree, "commit", "-qam", "[dynamo] The native part\n\nFaults: F10")
    git(tree, "format-patch", "-q", "--zero-commit", "-N", "-2", "-o", str(folder))
    shutil.rmtree(tree)


@pytest.fixture
def sources(tmp_path: Path) -> Sources:
    made = Sources(tmp_path)
    write(made.tree, SOURCES)
    shutil.copytree(ROOT / "tools", made.repo / "tools")
    shutil.copy2(ROOT / "build.sh", made.repo / "build.sh")
    native_series(made.series)
    (made.repo / "patches" / "VERSION").write_text("3\n")
    made.programs.mkdir()
    # PATH holds what is here and nothing else.
    for name in ("cmake", "ninja", "cc", "c++"):
        (made.programs / name).symlink_to(shutil.which("true"))
    (made.folder / "git").mkdir()
    for name in ("git", "bash", "env", "dirname", "awk"):
        (made.folder / "git" / name).symlink_to(shutil.which(name))
    return made


def test_archive(sources: Sources) -> None:
    before = snapshot(sources.tree)
    done = sources.make()
    assert done.returncode == 0, done.stderr
    path = Path(done.stdout.splitlines()[-1])
    assert path.parent == sources.repo / "dist"
    assert path.name == "torch-2.6.0+fxctx.3-py3-none-any.whl"
    # The progress of the build itself.
    assert "[1/2] Building C object" in done.stderr
    files = unzip(path)
    assert files["torch/lib/libtorch.so"] == b"thread_local bool flag = false;\n"
    assert b"flag = True" in files["torch/__init__.py"]
    assert files["torch/version.py"] == b"__version__ = '2.6.0+fxctx.3'\n"
    info = "torch-2.6.0+fxctx.3.dist-info"
    assert b"fxctx/manifest.json,sha256=" in files[f"{info}/RECORD"]
    manifest = json.loads(files[f"{info}/fxctx/manifest.json"])
    assert manifest["kind"] == "source" and manifest["left_out"] == []
    assert [patch["faults"] for patch in manifest["patches"]] == [["F1"], ["F10"]]
    assert not any(name.startswith("test/") for name in files)
    # The repository has the touched files alone, and all others are as they were.
    assert sources.subjects()[:2] == ["[dynamo] The native part", "[fx] The Python part"]
    tracked = git(sources.tree, "ls-files").split()
    touched = ["test/test_flag.py", "torch/__init__.py", "torch/csrc/dynamo/eval_frame.c"]
    assert tracked == touched
    after = snapshot(sources.tree)
    assert {n: s for n, s in before.items() if n not in touched}.items() <= after.items()


def test_checkout(sources: Sources) -> None:
    sources.as_checkout()
    done = sources.make()
    assert done.returncode == 0, done.stderr
    assert sources.subjects() == [
        "[dynamo] The native part",
        "[fx] The Python part",
        "PyTorch 2.6.0",
    ]
    assert git(sources.tree, "status", "--porcelain", "--untracked-files=no") == ""


def test_local_version_of_the_tree_is_kept(sources: Sources) -> None:
    # Debian's tree names its wheels so, whatever PYTORCH_BUILD_VERSION says.
    sources.env["SUFFIX"] = "+debian"
    done = sources.make()
    assert done.returncode == 0, done.stderr
    assert Path(done.stdout.strip()).name == "torch-2.6.0+debian.fxctx.3-py3-none-any.whl"


def test_second_call_goes_on(sources: Sources) -> None:
    sources.env["BREAK"] = "1"
    done = sources.make()
    one_line(done, "the build failed", "the lines above say why")
    assert "FAILED: eval_frame.c.o" in done.stderr
    assert not (sources.repo / "dist").exists()
    head = git(sources.tree, "rev-parse", "HEAD")
    before = snapshot(sources.tree / "torch")
    del sources.env["BREAK"]
    done = sources.make()
    assert done.returncode == 0, done.stderr
    assert "applied already" in done.stderr
    # Nothing that ninja would take for changed.
    assert snapshot(sources.tree / "torch") == before
    assert git(sources.tree, "rev-parse", "HEAD") == head


def test_interrupt_and_go_on(sources: Sources) -> None:
    sources.env["HANG"] = "1"
    process = subprocess.Popen(
        [sources.repo / "build.sh", "source", "--src", sources.tree],
        env=sources.environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        # Ignored where the tests run in the background of a shell, and that is inherited
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    deadline = time.monotonic() + 100
    while not (sources.tree / "build" / "hangs").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    os.killpg(process.pid, signal.SIGINT)
    _, stderr = process.communicate(timeout=100)
    assert process.returncode != 0
    assert not [line for line in stderr.splitlines() if "source_build.py" in line], stderr
    assert list((sources.repo / "build").glob("tmp-*")) == []
    del sources.env["HANG"]
    assert sources.make().returncode == 0


def test_settings_pass_through(sources: Sources) -> None:
    sources.env |= {"USE_CUDA": "1", "MAX_JOBS": "7"}
    assert sources.make().returncode == 0
    assert sources.log() == {
        "PYTORCH_BUILD_VERSION": RELEASE,
        "USE_CUDA": "1",
        "MAX_JOBS": "7",
        "USE_MKLDNN": "None",
    }


def test_minimal(sources: Sources) -> None:
    sources.env["USE_MKLDNN"] = "ON"
    assert sources.make("--minimal").returncode == 0
    log = sources.log()
    assert log["USE_CUDA"] == "OFF"
    assert log["MAX_JOBS"] == str(os.cpu_count())
    # The user's own settings come first.
    assert log["USE_MKLDNN"] == "ON"


def test_other_settings_than_configured(sources: Sources) -> None:
    assert sources.make("--minimal").returncode == 0
    one_line(sources.make(), "was configured with another", "remove that folder")
    sources.env["MAX_JOBS"] = "1"  # Says nothing about what is built.
    assert sources.make("--minimal").returncode == 0


@pytest.mark.parametrize("missing", ["cmake", "ninja", "cc", "c++"])
def test_program_is_missing(sources: Sources, missing: str) -> None:
    (sources.programs / missing).unlink()
    before = snapshot(sources.folder)
    one_line(sources.make(), missing, "install")
    assert snapshot(sources.folder) == before


def test_compiler_from_the_environment(sources: Sources) -> None:
    for name in ("cc", "c++"):
        (sources.programs / name).rename(sources.programs / f"my-{name}")
    sources.env |= {"CC": "my-cc -m64", "CXX": "my-c++"}
    done = sources.make()
    assert done.returncode == 0, done.stderr


def test_python_package_is_missing(sources: Sources) -> None:
    write(sources.tree, {"pyproject.toml": SOURCES["pyproject.toml"].replace('"pip"', '"nix"')})
    one_line(sources.make(), "-m pip install nix")
    assert not (sources.tree / ".git").exists()


def test_not_a_tree(sources: Sources) -> None:
    one_line(sources.build("--src", sources.folder), "is not a PyTorch source tree", "setup.py")
    one_line(sources.build("--src", sources.folder / "none"), "is not a PyTorch source tree")
    one_line(sources.build(), "--src", status=2)


def test_release_without_a_series(sources: Sources) -> None:
    write(sources.tree, {"version.txt": "2.7.0a0\n"})
    one_line(sources.make(), "no patches for torch 2.7.0", RELEASE)
    write(sources.tree, {"version.txt": "main\n"})
    one_line(sources.make(), "version.txt")


def test_changed_checkout(sources: Sources) -> None:
    sources.as_checkout()
    write(sources.tree, {"torch/csrc/other.cpp": "int mine;\n"})
    before = snapshot(sources.tree)
    one_line(sources.make(), "not committed", "torch/csrc/other.cpp")
    after = snapshot(sources.tree)
    assert {n: s for n, s in after.items() if ".git" not in n} == {
        n: s for n, s in before.items() if ".git" not in n
    }


@pytest.mark.parametrize("checkout", [True, False], ids=["checkout", "archive"])
def test_patch_does_not_apply(sources: Sources, checkout: bool) -> None:
    # The Python patch applies, the native one does not: neither stays.
    write(sources.tree, {"torch/csrc/dynamo/eval_frame.c": "int other;\n"})
    if checkout:
        sources.as_checkout()
    before = snapshot(sources.tree / "torch")
    one_line(sources.make(), "0002-", "does not apply", "eval_frame.c")
    after = snapshot(sources.tree / "torch")
    assert {n: s[0] for n, s in after.items()} == {n: s[0] for n, s in before.items()}
    assert not (sources.tree / "test").exists() or not any((sources.tree / "test").iterdir())
    if checkout:
        assert sources.subjects() == ["PyTorch 2.6.0"]
        assert not (sources.tree / ".git" / "rebase-apply").exists()
    else:
        assert not (sources.tree / ".git").exists()


def test_another_state_of_the_series(sources: Sources) -> None:
    sources.as_checkout()
    assert sources.make("--apply-only").returncode == 0
    (sources.repo / "patches" / "VERSION").write_text("4\n")
    done = sources.make("--apply-only")
    one_line(done, "another state of the series", "reset --hard")
    command = done.stderr.split("'")[1].split()
    subprocess.run(command, check=True, capture_output=True)
    assert sources.subjects() == ["PyTorch 2.6.0"]
    assert sources.make("--apply-only").returncode == 0
    assert len(sources.subjects()) == 3


def test_new_series_touches_more_files(sources: Sources) -> None:
    """In a repository that build.sh made of an archive, with the files of the old series."""
    assert sources.make("--apply-only").returncode == 0
    shutil.rmtree(sources.series)
    native_series(sources.series, more="torch/csrc/other.cpp")
    done = sources.make("--apply-only")
    one_line(done, "another state of the series", "reset --hard")
    subprocess.run(done.stderr.split("'")[1].split(), check=True, capture_output=True)
    done = sources.make("--apply-only")
    assert done.returncode == 0, done.stderr
    assert (sources.tree / "torch/csrc/other.cpp").read_text() == "int more;\n"
    assert (sources.tree / "torch/__init__.py").read_text().endswith("flag = True\n")


def test_apply_only_needs_no_compiler(sources: Sources) -> None:
    for program in sources.programs.iterdir():
        program.unlink()
    done = sources.make("--apply-only")
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == str(sources.tree)
    assert not (sources.tree / "build").exists()
    assert (sources.tree / "test" / "test_flag.py").exists()


def test_quiet(sources: Sources) -> None:
    done = sources.make("--quiet")
    assert done.returncode == 0
    assert done.stderr == ""
    assert len(done.stdout.splitlines()) == 1
