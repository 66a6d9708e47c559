"""What the benchmark programs share: the facts of a run, JSON files, and tables."""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import re
import shlex
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NoReturn

ROOT = Path(__file__).resolve().parent.parent
TRACEBACK_FILE = re.compile(r'(?<=File ")/[^"]+')


class Parser(argparse.ArgumentParser):
    """An argument parser that shows its program's docstring, and whose errors are one line."""

    def __init__(self, prog: str, description: str | None) -> None:
        super().__init__(
            prog=prog,
            description=description,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {message}\n")


def positive_int(text: str) -> int:
    """An argparse type: a whole number of at least 1."""
    try:
        value = int(text)
    except ValueError:
        value = 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return value


def positive_float(text: str) -> float:
    """An argparse type: a number above 0."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not value > 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number above 0")
    return value


def add_arm_options(parser: argparse.ArgumentParser) -> None:
    """The options of a program that compares stock and patched torch in processes of their own."""
    parser.add_argument(
        "--stock", default=sys.executable, metavar="PY", help="Python with stock torch (this one)"
    )
    parser.add_argument("--patched", metavar="PY", help="Python with patched torch")
    parser.add_argument(
        "--patched-pythonpath",
        metavar="DIR",
        help="folder with a patched torch/ in it, for --patched or else --stock to import",
    )
    parser.add_argument("--arms", help="comma-separated, those above (default: all)")


def chosen_arms(
    parser: argparse.ArgumentParser, args: argparse.Namespace, arms: Sequence[str]
) -> list[str]:
    """Those of ``arms`` that ``--arms`` names; an unknown name is a usage error."""
    chosen = args.arms.split(",") if args.arms else arms
    if unknown := [arm for arm in chosen if arm not in arms]:
        parser.error(f"--arms: unknown arm {unknown[0]!r}; there are {', '.join(arms)}")
    return [arm for arm in arms if arm in chosen]


def check_patched(
    parser: argparse.ArgumentParser, args: argparse.Namespace, patched_arms: bool
) -> None:
    """A usage error where a patched torch is needed and none is named, or has no torch in it."""
    if patched_arms and not (args.patched or args.patched_pythonpath):
        parser.error("name the patched torch: --patched PY or --patched-pythonpath DIR")
    if args.patched_pythonpath and not (Path(args.patched_pythonpath) / "torch").is_dir():
        parser.error(f"--patched-pythonpath {args.patched_pythonpath}: no torch/ in it")


def check_facts(parser: argparse.ArgumentParser, facts: dict[bool, dict[str, Any]]) -> None:
    """A usage error where the torch that should be patched is not, or the other way round."""
    for patched, fact in facts.items():
        if fact["patched"] != patched:
            wanted, found = ("patched", "stock") if patched else ("stock", "patched")
            parser.error(f"the torch that should be {wanted} ({fact['torch']}) is {found}")


def progress(quiet: bool) -> Callable[[str], None]:
    """A function that prints a line to stderr, after the seconds since now."""
    began = time.monotonic()

    def say(text: str) -> None:
        if not quiet:
            print(f"[{time.monotonic() - began:5.0f} s] {text}", file=sys.stderr, flush=True)

    return say


def print_checks(checks: Iterable[dict[str, Any]]) -> None:
    """Each limit, the value, and whether it holds."""
    for c in checks:
        value = "" if c["value"] is None else f" {c['value']:.3f} (limit {c['limit']})"
        print(f"{c['name']}:{value} {'holds' if c['holds'] else 'MISSED'}")


def _cpu_model() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def torch_facts() -> dict[str, Any]:
    """Version and devices of the torch that this process imports."""
    import torch

    gpus = []
    if torch.cuda.is_available():
        gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return {
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "gpus": gpus,
        "patched": is_patched(),
    }


def is_patched() -> bool:
    """Whether this process's torch shares the patches of nn.Module between traces, as the series
    does."""
    from torch.fx import _symbolic_trace

    return hasattr(_symbolic_trace, "_patches_lock")


def machine_facts() -> dict[str, Any]:
    """Processor, cores, Python, date and command line: what a figure needs beside it."""
    return {
        "machine": _cpu_model(),
        "cores": os.cpu_count(),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
        "command": command_line(sys.argv),
    }


def command_line(argv: Sequence[str]) -> str:
    """The command as a reader would type it: the script relative to the repository, no folders
    of the machine that ran it."""
    words = ["python"]
    for word in argv:
        path = Path(word)
        if path.is_absolute():
            path = path.resolve() if path.is_relative_to(ROOT) else path
            word = str(path.relative_to(ROOT)) if path.is_relative_to(ROOT) else path.name
        words.append(shlex.quote(word))
    return " ".join(words)


def without_folders(data: Any) -> Any:
    """``data`` with the files of tracebacks named without the folders of the machine."""
    if isinstance(data, dict):
        return {key: without_folders(value) for key, value in data.items()}
    if isinstance(data, list):
        return [without_folders(value) for value in data]
    return TRACEBACK_FILE.sub(_short_path, data) if isinstance(data, str) else data


def _short_path(found: re.Match[str]) -> str:
    path = Path(found[0])
    for folder in (ROOT, *map(Path, sys.path)):
        if folder.is_absolute() and path.is_relative_to(folder):
            return str(path.relative_to(folder))
    # Of another interpreter
    _, installed, inside = found[0].rpartition("/site-packages/")
    return inside if installed else path.name


def write_json(path: str | os.PathLike[str], data: Any) -> None:
    """Write ``data`` to ``path`` in one step, so that a reader never meets half a file."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.{os.getpid()}")
    part.write_text(json.dumps(without_folders(data), indent=1, sort_keys=False) + "\n")
    part.replace(path)


def table(header: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """A plain-text table; columns whose cells all read as numbers are right-aligned."""
    cells = [[str(c) for c in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(header, *cells, strict=True)]

    def is_number(text: str) -> bool:
        return text in ("", "-") or text.strip("+-%x ").replace(".", "").replace(",", "").isdigit()

    right = [bool(cells) and all(is_number(row[i]) for row in cells) for i in range(len(header))]

    def line(row: Sequence[str]) -> str:
        padded = (
            c.rjust(w) if r else c.ljust(w) for c, w, r in zip(row, widths, right, strict=True)
        )
        return "  ".join(padded).rstrip()

    return "\n".join([line(header), line(["-" * w for w in widths]), *map(line, cells)])
