"""A small torch to try build.sh on: a wheel, a series for it and an environment that has it."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import textwrap
import zipfile
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
RELEASE = "2.13.0"

MODULES = {
    "torch/__init__.py": "from .version import __version__\n",
    "torch/version.py": (
        "from typing import Optional\n\n"
        "__all__ = ['__version__', 'debug']\n__version__ = '2.13.0+cpu'\ndebug = False\n"
    ),
    "torch/fx/__init__.py": "from .trace import flag, is_tracing\n",
    "torch/fx/trace.py": "flag = False\n\n\ndef is_tracing():\n    return flag\n",
    "torch/fx/old.py": "gone = True\n",
    "torch/lib/libtorch.so": "\x7fELF\n",
}
PATCHED = {
    "torch/fx/trace.py": (
        "from .state.owner import flag\n\n\ndef is_tracing():\n    return flag.get()\n"
    ),
    "torch/fx/state/__init__.py": "",
    "torch/fx/state/owner.py": (
        "from contextvars import ContextVar\n\nflag = ContextVar('flag', default=False)\n"
    ),
    "test/fx/test_state.py": '# Owner(s): ["module: fx"]\n',
}


def git(folder: Path, *args: str) -> str:
    env = os.environ | {
        "GIT_CONFIG_GLOBAL": os.devnull,
        "GIT_AUTHOR_NAME": "A",
        "GIT_AUTHOR_EMAIL": "a@example.org",
        "GIT_COMMITTER_NAME": "A",
        "GIT_COMMITTER_EMAIL": "a@example.org",
    }
    command = ["git", "-c", "init.defaultBranch=main", *args]
    return subprocess.run(
        command, cwd=folder, env=env, check=True, capture_output=True, text=True
    ).stdout


def write(folder: Path, files: dict[str, str]) -> None:
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(content)


def make_series(folder: Path, patched: dict[str, str], gone: tuple[str, ...] = ()) -> None:
    """Write the series that turns MODULES into ``patched``, one patch for torch, one for more."""
    tree = folder.parent / f"{folder.name}-tree"
    tree.mkdir(parents=True)
    git(tree, "init", "-q")
    write(tree, MODULES)
    git(tree, "add", ".")
    git(tree, "commit", "-qm", "base")
    write(tree, patched)
    git(tree, "add", ".")
    git(tree, "commit", "-qm", "[fx] The flag becomes a ContextVar\n\nFaults: F1, F2")
    if gone:
        git(tree, "rm", "-q", *gone)
        git(tree, "commit", "-qm", "[fx] Remove what nobody uses")
    count = str(2 if gone else 1)
    git(
        tree,
        "format-patch",
        "-q",
        "--zero-commit",
        "-N",
        "--no-signature",
        f"-{count}",
        "-o",
        str(folder),
    )
    shutil.rmtree(tree)


def make_wheel(folder: Path, version: str = f"{RELEASE}+cpu", **files: str) -> Path:
    """A wheel of the small torch."""
    tree = folder / f"torch-{version}"
    shutil.rmtree(tree, ignore_errors=True)
    write(tree, MODULES | files)
    write(
        tree / f"torch-{version}.dist-info",
        {
            "METADATA": f"Metadata-Version: 2.1\nName: torch\nVersion: {version}\n\nText.\n",
            "WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: false\n"
            "Tag: py3-none-any\n",
        },
    )
    subprocess.run(
        [sys.executable, "-m", "wheel", "pack", "-d", folder, tree], check=True, capture_output=True
    )
    shutil.rmtree(tree)
    return folder / f"torch-{version}-py3-none-any.whl"


def snapshot(folder: Path) -> dict[str, tuple[str, int, int]]:
    """Hash, modification time and mode of every file."""
    found = {}
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            state = path.stat()
            digest = hashlib.sha256(path.read_bytes()).hexdigest()
            found[str(path.relative_to(folder))] = (digest, state.st_mtime_ns, state.st_mode)
    return found


@dataclass
class Torch:
    """An environment with the small torch, and a series for it."""

    folder: Path
    env: dict[str, str] = field(default_factory=dict)

    @property
    def python(self) -> Path:
        return self.folder / "venv" / "bin" / "python"

    @property
    def site(self) -> Path:
        return next((self.folder / "venv" / "lib").glob("python3*/site-packages"))

    @property
    def repo(self) -> Path:
        """A copy of build.sh and what it needs, with the small series."""
        return self.folder / "repo"

    @property
    def patches(self) -> Path:
        return self.repo / "patches"

    @property
    def dist_info(self) -> Path:
        return next(self.site.glob("torch-*.dist-info"))

    @property
    def environment(self) -> dict[str, str]:
        kept = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
        return (
            kept
            | {
                "PYTHON": str(self.python),
                # The small torch is imported in between, as a user's would be.
                "PYTHONDONTWRITEBYTECODE": "",
            }
            | self.env
        )

    def build(
        self, *args: str | Path, prefix: tuple[str, ...] = (), timeout: float = 120
    ) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [*prefix, str(self.repo / "build.sh"), *map(str, args)],
            env=self.environment,
            cwd=self.folder,
            capture_output=True,
            text=True,
            timeout=timeout,
        )

    def pip(self, *args: str | Path) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "pip", "--python", str(self.python), *map(str, args)]
        return subprocess.run(command, capture_output=True, text=True, timeout=120)

    def evaluate(self, expression: str) -> str:
        code = f"import torch, torch.fx, torch.fx.trace; print({expression})"
        done = subprocess.run(
            [self.python, "-c", code],
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    def check_record(self) -> None:
        """Every row of RECORD is true, and every file of torch has a row."""
        import base64
        import csv

        rows = {r[0]: r for r in csv.reader((self.dist_info / "RECORD").open()) if r}
        for name, digest, size in rows.values():
            if digest:
                content = (self.site / name).read_bytes()
                kind, _, value = digest.partition("=")
                found = base64.urlsafe_b64encode(hashlib.new(kind, content).digest())
                assert (value, int(size)) == (found.rstrip(b"=").decode(), len(content)), name
        for folder in (self.site / "torch", self.dist_info):
            for path in folder.rglob("*"):
                if path.is_file() and path.suffix != ".pyc":
                    assert str(path.relative_to(self.site)) in rows


def one_line(done: subprocess.CompletedProcess[str], *words: str, status: int = 1) -> None:
    """The run failed with one line that has ``words``, and wrote nothing else."""
    assert done.returncode == status, (done.stdout, done.stderr)
    lines = [line for line in done.stderr.splitlines() if line.startswith("build.sh: ")]
    assert len(lines) == 1, done.stderr
    assert "Traceback" not in done.stderr
    for word in words:
        assert word in lines[0]


def unzip(path: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(path) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def python_wrapper(folder: Path, python: Path, code: str) -> Path:
    """An interpreter for $PYTHON that runs ``code`` before a tool's own file."""
    script = folder / "wrapper.py"
    script.write_text(
        "import runpy, sys\n"
        "sys.argv = sys.argv[1:]\n"
        "sys.path[0] = sys.argv[0].rpartition('/')[0]\n" + textwrap.dedent(code) + "\n"
        "runpy.run_path(sys.argv[0], run_name='__main__')\n"
    )
    wrapper = folder / "wrapped-python"
    wrapper.write_text(
        "#!/bin/sh\n"
        f'case "$1" in *.py) exec "{python}" "{script}" "$@";; *) exec "{python}" "$@";; esac\n'
    )
    wrapper.chmod(0o755)
    return wrapper
