"""What the tools behind build.sh share: errors, progress, processes, command lines."""

from __future__ import annotations

import argparse
import contextlib
import errno
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NoReturn

ROOT = Path(__file__).resolve().parent.parent
BUILD = ROOT / "build"
DIST = ROOT / "dist"
VENVS = ROOT / ".venvs"

# Git as it is installed, whatever the user's configuration, and blind to any repository around.
GIT_ENV = {
    "GIT_CONFIG_GLOBAL": os.devnull,
    "GIT_CONFIG_NOSYSTEM": "1",
    "GIT_TERMINAL_PROMPT": "0",
    "LC_ALL": "C",
}

quiet = False


class Fail(Exception):
    """Something that the user has to act on: one line, and the exit status."""

    def __init__(self, message: str, status: int = 1) -> None:
        super().__init__(message)
        self.status = status


def say(message: str) -> None:
    """Show progress on standard error, unless --quiet was given."""
    if not quiet:
        print(message, file=sys.stderr, flush=True)


def warn(message: str) -> None:
    print(f"build.sh: {message}", file=sys.stderr, flush=True)


class Parser(argparse.ArgumentParser):
    """An argument parser whose errors are one line, with exit status 2."""

    def __init__(self, verb: str) -> None:
        super().__init__(prog=f"./build.sh {verb}", add_help=False, allow_abbrev=False)
        self.add_argument("--quiet", action="store_true")

    def error(self, message: str) -> NoReturn:
        raise Fail(f"{message} (./build.sh --help shows the options)", 2)

    def parse(self, argv: Sequence[str]) -> argparse.Namespace:
        args = self.parse_args(argv)
        global quiet
        quiet = args.quiet
        return args


def main(function: Callable[[list[str]], int]) -> NoReturn:
    """Run a tool and turn what stops it into one line and an exit status."""
    # What it has started or half written is ended and put away as after Ctrl-C.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        status = function(sys.argv[1:])
        sys.stdout.flush()
    except Fail as failure:
        warn(str(failure))
        status = failure.status
    except KeyboardInterrupt:
        warn("interrupted")
        status = 130
    except BrokenPipeError:
        # The reader of standard output is gone; keep Python from complaining about it at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        status = 1
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        hint = {
            errno.ENOSPC: "; free some space and run again",
            errno.EDQUOT: "; free some space and run again",
        }.get(error.errno or 0, "")
        warn(f"{where}{error.strerror or error}{hint}")
        status = 1
    sys.exit(status)


@contextlib.contextmanager
def scratch(prefix: str) -> Iterator[Path]:
    """A temporary folder under build/, so that what is made in it can be moved, not copied."""
    BUILD.mkdir(parents=True, exist_ok=True)
    sweep()
    path = Path(tempfile.mkdtemp(prefix=f"tmp-{prefix}-{os.getpid()}-", dir=BUILD))
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


def sweep() -> None:
    """Remove the temporary folders of runs that were killed."""
    for path in BUILD.glob("tmp-*-*-*"):
        try:
            os.kill(int(path.name.split("-")[2]), 0)
        except ProcessLookupError:
            shutil.rmtree(path, ignore_errors=True)
        except (PermissionError, ValueError):
            pass  # Another user's run, or no folder of ours.


def git_env(directory: Path) -> dict[str, str]:
    """The environment that ties git to ``directory`` and to nothing else."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith("GIT_") or k == "GIT_EXEC_PATH"}
    return {**kept, **GIT_ENV, "GIT_CEILING_DIRECTORIES": str(directory.resolve().parent)}


def git(
    directory: Path, *args: str | Path, check: bool = True, **kwargs
) -> subprocess.CompletedProcess:
    """Run git in ``directory``, isolated from the user's configuration; output is captured."""
    done = subprocess.run(
        ["git", *map(str, args)],
        cwd=directory,
        env=git_env(directory) | kwargs.pop("env", {}),
        capture_output=True,
        **{"text": True, **kwargs},
    )
    if check and done.returncode:
        raise Fail(f"git {args[0]} failed in {directory}: {last_line(done.stderr)}")
    return done


def last_line(text: str | bytes) -> str:
    """The last line that says something, for messages of one line."""
    if isinstance(text, bytes):
        text = text.decode(errors="replace")
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else "no message"


def run_logged(command: Sequence[str | Path], what: str, **kwargs) -> str:
    """Run a command with its output captured; on failure say ``what`` and its last line."""
    done = subprocess.run(
        [str(part) for part in command],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        **kwargs,
    )
    if done.returncode:
        if "No space left on device" in done.stdout or "Disk quota exceeded" in done.stdout:
            raise Fail(f"{what}: no space left on device; free some space and run again")
        raise Fail(f"{what}: {last_line(done.stdout)}")
    return done.stdout


def read_or_none(path: Path) -> bytes | None:
    return path.read_bytes() if path.is_file() else None
