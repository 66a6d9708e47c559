"""The series of 2.6.0 on PyTorch's real sources: they apply, and the changed C++ compiles.

The sources are Debian's source package, 27 MB through apt-get; the newest release that can be had
so. Nothing of PyTorch is built.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
from pathlib import Path

import pytest
import series
from small_torch import ROOT, git

RELEASE = "2.6.0"
KEYRING = "/usr/share/keyrings/debian-archive-keyring.gpg"
KEPT = re.compile(
    r"[^/]+/(torch/|test/|setup\.py$|version\.txt$|CMakeLists\.txt$|pyproject\.toml$)"
)

pytestmark = pytest.mark.timeout(600)


def mirrors() -> list[str]:
    """The Debian mirrors of this machine's own apt settings."""
    found: list[str] = []
    for path in (Path("/etc/apt/sources.list"), Path("/etc/apt/sources.list.d/debian.sources")):
        text = path.read_text() if path.exists() else ""
        found += re.findall(r"^URIs: *(\S+)", text, re.M)
        found += re.findall(r"^deb +(?:\[[^]]*\] +)?(\S+)", text, re.M)
    return found


def fetch(folder: Path) -> Path:
    """The archive of the sources as PyTorch released them, less its third_party folder."""
    lists = folder / "lists"
    (lists / "partial").mkdir(parents=True)
    sources = folder / "trixie.list"
    sources.write_text(f"deb-src [signed-by={KEYRING}] {mirrors()[0]} trixie main\n")
    settings = {
        "Dir::Etc::sourcelist": sources,
        "Dir::Etc::sourceparts": "-",
        "Dir::State::lists": lists,
        "APT::Sandbox::User": "root",
        "Acquire::Retries": "3",
    }
    apt = ["apt-get", "-qq", *(f"-o{name}={value}" for name, value in settings.items())]
    subprocess.run([*apt, "update"], check=True, timeout=300)
    subprocess.run(
        [*apt, "source", "--download-only", "pytorch"], cwd=folder, check=True, timeout=300
    )
    (archive,) = folder.glob("pytorch_*.orig.tar.xz")
    assert archive.name.startswith(f"pytorch_{RELEASE}+"), archive.name
    return archive


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if not (shutil.which("apt-get") and Path(KEYRING).exists() and mirrors()):
        pytest.skip("needs apt-get with a Debian mirror")
    folder = tmp_path_factory.mktemp("debian")
    with tarfile.open(fetch(folder)) as archive:
        members = [entry for entry in archive if KEPT.match(entry.name) and entry.isfile()]
        for entry in members:
            entry.name = entry.name.partition("/")[2]
            archive.extract(entry, folder / "src", set_attrs=False)
    done = subprocess.run(
        [ROOT / "build.sh", "source", "--src", folder / "src", "--apply-only"],
        env=os.environ | {"PYTHON": sys.executable},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return folder / "src"


def changed(tree: Path) -> list[str]:
    base = git(tree, "rev-list", "--max-parents=0", "HEAD").strip()
    return git(tree, "diff", "--name-only", base, "HEAD").split()


def test_series_applies(tree: Path) -> None:
    subjects = git(tree, "log", "--format=%s").splitlines()
    expected = [patch.subject for patch in series.find(RELEASE).patches]
    assert subjects[-2::-1] == expected
    assert git(tree, "status", "--porcelain", "--untracked-files=no") == ""


def test_python_files_compile(tree: Path) -> None:
    for name in changed(tree):
        if name.endswith(".py"):
            compile((tree / name).read_text(), name, "exec")


def test_changed_c_compiles(tree: Path) -> None:
    """The C files have no need of generated headers, so this takes a second."""
    sources = [name for name in changed(tree) if name.endswith(".c")]
    assert sources == ["torch/csrc/dynamo/eval_frame.c"]
    include = sysconfig.get_path("include")
    for name in sources:
        command = ["cc", "-c", "-o", tree / "out.o", "-I", tree, "-I", include]
        command += ["-Wall", "-Werror=implicit-function-declaration", "-Wno-unused-function"]
        done = subprocess.run([*command, tree / name], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        symbols = subprocess.run(
            ["nm", tree / "out.o"], check=True, capture_output=True, text=True
        ).stdout
        # The flag of the process is gone from the object file, its key is local to it.
        assert not re.search(r"\bis_skip_guard_eval_unsafe\b", symbols)
        assert re.search(r" b skip_guard_eval_unsafe_key$", symbols, re.M)
