"""build.sh test --upstream: PyTorch's own FX tests, one at a time and on four threads at once.

Every test that passes on the unpatched release, one at a time, has to pass on the patched one, one
at a time and on four threads at once. Those that cannot pass on four threads, since they depend on
state of the process themselves, are listed in tests/upstream_process_wide.txt.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest_report
from common import ROOT, Fail, say

FILES = ("test_fx.py", "test_proxy_tensor.py", "fx/test_*.py", "dynamo/test_misc.py")
PROCESS_WIDE = ROOT / "tests" / "upstream_process_wide.txt"
THREADS = ("-p", "ast_plugin", "--parallel-threads=4", "--iterations=2")
TIMEOUT = 120
FILE_TIMEOUT = 3600

# Runs pytest with these arguments in a folder; its exit status, None when it had to be killed.
Runner = Callable[[list[str], Path], "int | None"]


@dataclass
class Results:
    """The outcome of each test of one run, passed, failed or skipped, and why it failed."""

    tests: dict[str, str] = field(default_factory=dict)
    errors: dict[str, str] = field(default_factory=dict)
    unfinished: list[str] = field(default_factory=list)

    def count(self, outcome: str) -> int:
        return sum(found == outcome for found in self.tests.values())

    def __str__(self) -> str:
        text = ", ".join(f"{self.count(o)} {o}" for o in ("passed", "failed", "skipped"))
        return text + (f"; did not finish: {', '.join(self.unfinished)}" * bool(self.unfinished))


def find_files(folder: Path) -> list[str]:
    """The test files that there are in ``folder``, a checkout's test/.

    Raises:
        Fail: none.
    """
    found = [str(p.relative_to(folder)) for glob in FILES for p in sorted(folder.glob(glob))]
    if not found:
        raise Fail(f"{folder} has none of {', '.join(FILES)}; name the test/ folder of a checkout")
    return found


def run_all(folder: Path, files: list[str], runner: Runner, options: list[str]) -> Results:
    """Run each file in a process of its own."""
    results = Results()
    for file in files:
        say(f"--- {file} {' '.join(options)}".rstrip())
        with tempfile.TemporaryDirectory(prefix="fxctx-") as name:
            report = Path(name) / "junit.xml"
            arguments = [f"--junitxml={report}", "-q", "--tb=no", "-rN", *options, file]
            status = runner(arguments, folder)
            found = pytest_report.read(report)
        if found is None or status not in (0, 1, 5):
            results.unfinished.append(file)
        for test in found or ():
            results.tests[f"{file}::{test.name}"] = test.outcome
            if test.outcome == "failed":
                results.errors[f"{file}::{test.name}"] = test.message
    return results


def worse(before: Results, after: Results) -> list[str]:
    """The tests that passed before and do not afterwards."""
    return [
        test
        for test, outcome in before.tests.items()
        if outcome == "passed" and after.tests.get(test) != "passed"
    ]


def read_process_wide() -> set[str]:
    """The tests that are not expected to pass on four threads at once."""
    lines = (line.partition("#")[0].strip() for line in PROCESS_WIDE.read_text().splitlines())
    return {line for line in lines if line}


def compare(folder: Path, stock: Runner, patched: Runner, arguments: list[str]) -> int:
    """Run upstream's tests three times, show what differs, and give the exit status.

    ``arguments`` are pytest's; files of ``folder`` among them are run instead of ``FILES``.
    """
    files = [a for a in arguments if a.endswith(".py") and (folder / a).is_file()]
    arguments = [a for a in arguments if a not in files]
    files = files or find_files(folder)
    alone = run_all(folder, files, stock, arguments)
    if not alone.count("passed"):
        raise Fail(f"no test of {folder} passes on the unpatched release: {alone}")
    runs = {
        "one at a time": run_all(folder, files, patched, arguments),
        "on four threads": run_all(folder, files, patched, [*THREADS, *arguments]),
    }
    lost = {name: worse(alone, results) for name, results in runs.items()}
    process_wide = read_process_wide()
    for test in process_wide & set(lost["on four threads"]):
        lost["on four threads"].remove(test)
        print(f"depends on state of the process, left out on four threads: {test}")
    for name, tests in lost.items():
        for test in tests:
            error = runs[name].errors.get(test, "did not finish")
            print(f"FAILED {name}: {test}: {error}")
    print(f"unpatched, one at a time: {alone}")
    for name, results in runs.items():
        print(f"patched, {name}: {results}")
        print(f"  of those that pass unpatched, {len(lost[name])} do not pass")
    return 1 if any(lost.values()) else 0


def environment(env: dict[str, str]) -> dict[str, str]:
    """What upstream's tests and our plugins find around them; nothing is written there."""
    return (
        env
        | {"PYTHONDONTWRITEBYTECODE": "1", "PYTORCH_TEST_WITH_SLOW": "0"}
        | {"PYTHONPATH": str(ROOT / "tools")}
        | {key: value for key, value in os.environ.items() if key.startswith("PYTORCH_TEST_")}
    )
