#!/usr/bin/env python3
"""The tests of the patches on a machine with GPUs: patched torch first to last, stock test by test.

    gpu_tests.py --patched-pythonpath DIR --json FILE --logs DIR

Patched: a process for each test file; every test passes. Stock: a process for each test, since
tests crash and hang there; every test fails but those of tests/stock_passes/. On a machine with a
GPU the tests that name the CPU are left out of the stock part. Files and tests run side by side,
each with an empty compile cache. The series is that of the release of the stock torch.

Exit code: 0 as expected, 1 not, 2 bad usage.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import contextlib
import itertools
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import benchlib
import drafters

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tools"))

import pytest_report  # noqa: E402
import run_tests  # noqa: E402
import series  # noqa: E402


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = benchlib.Parser("gpu_tests.py", __doc__)
    seconds = benchlib.positive_float
    parser.add_argument(
        "--stock", default=sys.executable, metavar="PY", help="Python with stock torch (this one)"
    )
    parser.add_argument("--patched", metavar="PY", help="Python with patched torch")
    parser.add_argument(
        "--patched-pythonpath", metavar="DIR", help="folder with a patched torch/ in it"
    )
    parser.add_argument("--arms", default="patched,stock", help="default patched,stock")
    parser.add_argument("--select", default="", metavar="REGEX", help="of test files' names")
    parser.add_argument("--tests", default="", metavar="REGEX", help="of names of stock's tests")
    parser.add_argument(
        "--jobs", type=benchlib.positive_int, default=max(1, (os.cpu_count() or 1) // 2),
        help="processes at a time (default: half the cores)",
    )  # fmt: skip
    parser.add_argument(
        "--test-timeout", type=seconds, default=120.0, metavar="S", help="of a test (default 120)"
    )
    parser.add_argument(
        "--file-timeout", type=seconds, default=600.0, metavar="S", help="of a file (default 600)"
    )
    parser.add_argument("--logs", metavar="DIR", help="keep what the tests print there")
    parser.add_argument("--json", metavar="FILE", help="write the results to FILE")
    args = parser.parse_args(argv)
    args.parser = parser
    args.arms = args.arms.split(",")
    if set(args.arms) - {"patched", "stock"}:
        parser.error("--arms: patched, stock or both")
    if "patched" in args.arms and not (args.patched or args.patched_pythonpath):
        parser.error("name the patched torch: --patched PY or --patched-pythonpath DIR")
    return args


class Tests:
    """The test tree of a series, and runs of parts of it."""

    def __init__(self, args: argparse.Namespace, folder: Path, files: dict[str, bytes]) -> None:
        self.args = args
        self.tests = folder / "torch_tests"
        self.scratch = folder
        self.logs = Path(args.logs) if args.logs else folder / "logs"
        self.logs.mkdir(parents=True, exist_ok=True)
        self.pythons = drafters.Runner(args)
        self.running: set[subprocess.Popen[bytes]] = set()
        self.ended = False
        series.write_tree(files, self.tests)

    def command(self, patched: bool, *arguments: str) -> tuple[list[str], dict[str, str]]:
        python, environment = self.pythons.interpreter(patched)
        if patched and self.args.patched_pythonpath:  # keep what the environment adds to torch
            paths = [environment["PYTHONPATH"], os.environ.get("PYTHONPATH", "")]
            environment["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
        environment["PYTHONFAULTHANDLER"] = "1"
        environment.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "4")
        environment.setdefault("OMP_NUM_THREADS", "2")
        command = [python, "-m", "pytest", "-p", "no:cacheprovider", "-c", os.devnull]
        return [*command, f"--rootdir={self.tests}", *arguments], environment

    def collect(self, file: str) -> list[str]:
        """The tests of a file."""
        command, environment = self.command("patched" in self.args.arms, "--collect-only", "-q")
        done = subprocess.run(
            [*command, file], cwd=self.tests, env=environment, capture_output=True, text=True
        )
        found = [line for line in done.stdout.splitlines() if re.match(r"\S+\.py::\S", line)]
        if not found:
            sys.exit(f"gpu_tests.py: no tests in {file}:\n{done.stdout}{done.stderr}")
        return found

    def run(self, patched: bool, what: str, limit: float) -> list[dict[str, Any]]:
        """Run a file or a test: test, outcome, detail and seconds of each test."""
        arm = "patched" if patched else "stock"
        log = self.logs / f"{arm}-{re.sub(r'[^A-Za-z0-9]+', '_', what)}.log"
        with tempfile.TemporaryDirectory(dir=self.scratch, ignore_cleanup_errors=True) as name:
            junit = Path(name, "junit.xml")
            command, environment = self.command(
                patched, "-v", f"--timeout={self.args.test_timeout:g}", "--timeout-method=thread",
                f"--junitxml={junit}", what,
            )  # fmt: skip
            environment["TORCHINDUCTOR_CACHE_DIR"] = str(Path(name, "inductor"))
            environment["TRITON_CACHE_DIR"] = str(Path(name, "triton"))
            began = time.monotonic()
            with log.open("wb") as out:
                process = subprocess.Popen(
                    command, cwd=self.tests, env=environment, stdin=subprocess.DEVNULL,
                    stdout=out, stderr=out, start_new_session=True,
                )  # fmt: skip
                self.running.add(process)
                try:
                    code: int | None = process.wait(limit)
                except subprocess.TimeoutExpired:
                    code = None
                finally:
                    kill(process)
                    self.running.discard(process)
            took = round(time.monotonic() - began, 1)
            found = results_of(junit, what)
        if found:
            return found
        text = log.read_text(errors="replace")
        if code is None:
            detail = f"killed after {limit:.0f} s"
        elif code < 0:
            detail = f"the process died of {signal.Signals(-code).name}"
        elif "Timeout" in text:
            detail = f"hangs: not done after {self.args.test_timeout:.0f} s"
        else:
            detail = f"pytest ended with status {code}"
        return [{"test": what, "outcome": "failed", "detail": detail, "seconds": took}]


def kill(process: subprocess.Popen[bytes]) -> None:
    """End a process and its compile workers."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def results_of(path: Path, what: str) -> list[dict[str, Any]]:
    """The results of one run of pytest, of a file or a test; none where it left none."""
    file = what.partition("::")[0]
    return [
        {
            "test": f"{file}::{r.name}",
            "outcome": r.outcome,
            "detail": r.message[:200] or ("failed" if r.outcome == "failed" else ""),
            "seconds": round(r.seconds, 1),
        }
        for r in pytest_report.read(path) or ()
    ]


def summary(results: list[dict[str, Any]]) -> dict[str, Any]:
    outcomes = [r["outcome"] for r in results]
    counts = {name: outcomes.count(name) for name in ("passed", "failed", "skipped")}
    on_gpu = [r["outcome"] for r in results if "CUDA::" in r["test"]]
    return {
        "counts": counts,
        "counts_cuda": {name: on_gpu.count(name) for name in counts},
        "tests": sorted(results, key=lambda r: r["test"]),
    }


def main(argv: Sequence[str] | None = None) -> int:
    args = parse_arguments(argv)
    pythons = drafters.Runner(args)
    try:
        facts = {arm: pythons.torch_facts(arm == "patched") for arm in args.arms}
    except RuntimeError as e:
        args.parser.error(str(e))
    for arm, fact in facts.items():
        if fact["patched"] != (arm == "patched"):
            args.parser.error(f"the torch that should be {arm} ({fact['torch']}) is not")
    release = series.base_version(next(iter(facts.values()))["torch"]).partition("+")[0]
    chosen = series.find(release)
    has_gpu = bool(next(iter(facts.values()))["gpus"])
    report: dict[str, Any] = {
        "benchmark": "torch_tests",
        **benchlib.machine_facts(),
        "torch": facts,
        "release": release,
        "patches": [patch.name for patch in chosen.python_patches],
    }
    with tempfile.TemporaryDirectory(prefix="gpu-tests-", ignore_cleanup_errors=True) as name:
        tests = Tests(args, Path(name), chosen.tests())
        files = [str(p.relative_to(tests.tests)) for p in sorted(tests.tests.rglob("test_*.py"))]
        files = [file for file in files if re.search(args.select, file)]
        if not files:
            args.parser.error(f"--select: no test file matches {args.select!r}")
        results: dict[str, list[dict[str, Any]]] = {arm: [] for arm in args.arms}
        lock = threading.Lock()

        def one(arm: str, what: str, limit: float) -> None:
            if tests.ended:
                return
            found = tests.run(arm == "patched", what, limit)
            with lock:
                results[arm] += found
                for r in found:
                    if arm == "stock" or r["outcome"] == "failed":
                        print(f"{arm}: {r['outcome']} {r['test']} {r['detail']}"[:240], flush=True)
                    if r["outcome"] == "failed" and arm == "patched":
                        report.setdefault("unexpected", []).append(f"patched: {r['test']}")
                report.update({a: summary(rs) for a, rs in results.items()})
                if args.json:
                    benchlib.write_json(args.json, report)

        signal.signal(signal.SIGTERM, signal.default_int_handler)  # the tests end with this program
        jobs = []
        with concurrent.futures.ThreadPoolExecutor(args.jobs) as pool:
            try:
                if "patched" in args.arms:  # the files first: they take longest
                    jobs += [pool.submit(one, "patched", f, args.file_timeout) for f in files]
                if "stock" in args.arms:
                    found = itertools.chain(*pool.map(tests.collect, files))
                    wanted = [test for test in found if not (has_gpu and "CPU::" in test)]
                    wanted = [test for test in wanted if re.search(args.tests, test)]
                    wanted.sort(key=lambda test: "CUDA::" not in test)  # first what is only here
                    jobs += [
                        pool.submit(one, "stock", test, args.test_timeout + 60) for test in wanted
                    ]
                for job in jobs:
                    job.result()
            except KeyboardInterrupt:
                tests.ended = True
                for process in list(tests.running):
                    kill(process)
                report.setdefault("unexpected", []).append("interrupted: tests are missing")
    unexpected = report.setdefault("unexpected", [])
    if "stock" in args.arms:
        guards = run_tests.read_stock_passes(release)
        for r in results["stock"]:
            if why := run_tests.unexpected(r["test"], r["outcome"], guards):
                unexpected.append(f"stock: {r['test']}: {why}")
    if args.json:
        benchlib.write_json(args.json, report)
    for arm in args.arms:
        for which in ("counts", "counts_cuda"):
            counts = ", ".join(f"{n} {o}" for o, n in report[arm][which].items())
            print(f"{arm}{' on CUDA' if which == 'counts_cuda' else ''}: {counts}")
    for line in unexpected:
        print(f"NOT AS EXPECTED {line}")
    return 1 if unexpected else 0


if __name__ == "__main__":
    sys.exit(main())
