"""What the benchmark programs share: the facts of a run, JSON files, and tables."""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import shlex
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any


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
    """Whether this process's torch keeps the tracing flag in a ContextVar, as the series does."""
    import contextvars

    from torch.fx import _symbolic_trace

    return any(
        isinstance(value, contextvars.ContextVar) for value in vars(_symbolic_trace).values()
    )


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
    root = Path(__file__).resolve().parent.parent
    words = ["python"]
    for word in argv:
        path = Path(word)
        if path.is_absolute():
            path = path.resolve() if path.is_relative_to(root) else path
            word = str(path.relative_to(root)) if path.is_relative_to(root) else path.name
        words.append(shlex.quote(word))
    return " ".join(words)


def write_json(path: str | os.PathLike[str], data: Any) -> None:
    """Write ``data`` to ``path`` in one step, so that a reader never meets half a file."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.{os.getpid()}")
    part.write_text(json.dumps(data, indent=1, sort_keys=False) + "\n")
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
