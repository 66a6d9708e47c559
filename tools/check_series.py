"""Every series applies to its release, patch by patch, and torch_tests/ is what the newest adds."""

from __future__ import annotations

import sys
from pathlib import Path

import releases
import series
from common import ROOT, Fail, Parser, main, say


def check(chosen: series.Series, wheel: releases.Wheel) -> None:
    """Apply the patches one after the other; what they leave must be Python each time.

    Raises:
        Fail: a patch does not apply, or leaves a file that does not compile.
    """
    for count in range(1, len(chosen.patches) + 1):
        part = series.Series(chosen.folder, chosen.patches[:count])
        for path, content in part.patched(wheel.read).items():
            if content is not None and path.endswith(".py"):
                try:
                    compile(content, path, "exec")
                except SyntaxError as error:
                    name = chosen.patches[count - 1].name
                    raise Fail(f"{chosen.folder.name}/{name} breaks {path}: {error}") from None
        part.tests()
    say(f"{chosen.folder.name}: {len(chosen.patches)} patches apply to torch {wheel.version}")


def check_torch_tests(newest: series.Series, folder: Path) -> None:
    """Hold torch_tests/ against the test/ part of the newest series.

    Raises:
        Fail: they differ.
    """
    here = {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    added = newest.tests()
    different = sorted(n for n in here.keys() | added.keys() if here.get(n) != added.get(n))
    if different:
        raise Fail(
            f"torch_tests/ and the tests in patches/{newest.folder.name} differ in "
            f"{', '.join(different)}; write both with ./build.sh refresh"
        )


def run(argv: list[str]) -> int:
    parser = Parser("check")
    releases.add_release_options(parser)
    args = parser.parse(argv)
    known = [series.find(args.torch)] if args.torch else series.all_series()
    for chosen in known:
        check(chosen, releases.fetch(chosen.release, releases.index_options(args)))
    check_torch_tests(series.all_series()[0], ROOT / "torch_tests")
    print(f"{len(known)} series apply to their releases on Python {sys.version.split()[0]}")
    return 0


if __name__ == "__main__":
    main(run)
