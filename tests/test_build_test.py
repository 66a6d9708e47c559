"""build.sh test: which tests run, and how runs on an unpatched release are judged."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import releases
import run_tests
import series
from small_torch import PATCHED, RELEASE, ROOT, make_series

pytestmark = pytest.mark.timeout(300)


def judge(
    results: dict[str, str], guards: set[str], partial: bool = False
) -> tuple[run_tests.Counts, str]:
    counts = run_tests.Counts()
    run_tests.judge({k: (v, "detail") for k, v in results.items()}, guards, counts, partial)
    return counts, "\n".join(counts.failures)


def test_regression_tests_must_fail_and_guards_must_pass() -> None:
    results = {"a::T::fails": "failed", "a::T::guard": "passed", "a::T::gpu": "skipped"}
    counts, failures = judge(results, {"a::T::guard"})
    assert (counts.passed, counts.failed, counts.skipped) == (2, 0, 1) and not failures


def test_a_regression_test_that_passes_proves_nothing() -> None:
    counts, failures = judge({"a::T::passes": "passed"}, set())
    assert counts.failed == 1 and "a::T::passes: passes on the unpatched release" in failures


def test_a_guard_that_fails() -> None:
    counts, failures = judge({"a::T::guard": "failed"}, {"a::T::guard"})
    assert counts.failed == 1 and "a::T::guard: should pass" in failures


def test_a_guard_has_more_than_one_try() -> None:
    asked = []

    def run_tests_once(tests: list[str]) -> dict[str, tuple[str, str]]:
        asked.append(tests)
        outcomes = {"races": "passed" if len(asked) == 2 else "failed", "guard": "failed"}
        if len(asked) == 1:
            outcomes |= {"regression": "failed", "passes": "passed"}
            return {test: (outcome, "") for test, outcome in outcomes.items()}
        return {test: (outcomes[test], "") for test in tests}

    results = run_tests.run_with_retries(run_tests_once, ["a"], {"races", "guard", "passes"})
    assert asked == [["a"], ["races", "guard"], ["guard"]]
    assert {test: outcome for test, (outcome, _) in results.items()} == {
        "races": "passed",
        "guard": "failed",
        "regression": "failed",
        "passes": "passed",
    }


@pytest.mark.parametrize("outcome", ["passed", "failed"])
def test_a_test_that_is_left_to_chance(outcome: str) -> None:
    counts, failures = judge({"a::T::chance": outcome}, {"? a::T::chance"})
    assert (counts.passed, counts.failed) == (1, 0) and not failures


def test_a_guard_that_is_gone() -> None:
    counts, failures = judge({"a::T::fails": "failed"}, {"a::T::gone"})
    assert counts.failed == 1 and "no such test" in failures
    counts, _ = judge({"a::T::fails": "failed"}, {"a::T::gone"}, partial=True)
    assert counts.failed == 0
    counts, _ = judge({"a::TCPU::t": "failed"}, {"a::TCUDA::gone"})
    assert counts.failed == 0
    counts, _ = judge({"a::TCUDA::t": "failed"}, {"a::TCUDA::gone"})
    assert counts.failed == 1


def test_arguments_for_pytest() -> None:
    paths, others = run_tests.split_arguments(
        ["torch_tests/fx/test_x.py::T::t", "-k", "flag", "tests", "-x", "testsomething"]
    )
    assert paths == ["torch_tests/fx/test_x.py::T::t", "tests"]
    assert others == ["-k", "flag", "-x", "testsomething"]


def test_selection(tmp_path: Path) -> None:
    for name in ("fx/test_a.py", "fx/test_b.py", "dynamo/test_a.py", "helper.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()

    def select(*paths: str) -> dict[str, list[str]]:
        return dict(run_tests.select(list(paths), "torch_tests", tmp_path))

    assert list(select()) == ["dynamo/test_a.py", "fx/test_a.py", "fx/test_b.py"]
    assert list(select("torch_tests/fx")) == ["fx/test_a.py", "fx/test_b.py"]
    assert select("torch_tests/fx/test_a.py::T::t") == {"fx/test_a.py": ["fx/test_a.py::T::t"]}
    assert not select("tests")


IN_ORDER = """
import importlib.util
import torch.fx.state.owner

def test_as_it_is_now():
    assert importlib.util.find_spec("torch.fx.old")

def test_too_early():
    assert not importlib.util.find_spec("torch.fx.old")
"""


def test_each_patch_is_tested_without_those_after_it(small_wheel: Path, tmp_path: Path) -> None:
    """The second patch removes torch.fx.old."""
    folder = tmp_path / f"v{RELEASE}"
    make_series(folder, PATCHED | {"test/fx/test_order.py": IN_ORDER}, gone=("torch/fx/old.py",))
    counts = run_tests.test_in_order(
        run_tests.Environment(Path(sys.prefix)), series.load(folder), releases.Wheel(small_wheel)
    )
    assert counts.failures == ["0001: test/fx/test_order.py: test_order.test_too_early"]
    assert counts.passed == 1


SOURCE = """
import os, signal, threading, time, unittest
import pytest

left_behind = []

class Test(unittest.TestCase):
    def test_a_crash(self):
        os.kill(os.getpid(), signal.SIGSEGV)

    def test_b_hang(self):
        lock = threading.Lock()
        lock.acquire()
        lock.acquire()

    def test_c_leaks(self):
        left_behind.append(1)

    def test_d_sees_no_leak(self):
        self.assertEqual(left_behind, [])

    def test_e_fails(self):
        self.assertEqual(1, 2)

    def test_f_skips(self):
        self.skipTest("no")

    def test_g_exits(self):
        os._exit(3)

    def test_h_interrupts(self):
        raise KeyboardInterrupt
"""


def test_one_process_a_test(tmp_path: Path) -> None:
    """What a test does to its process ends neither the run nor the next test."""
    (tmp_path / "test_all.py").write_text(SOURCE)
    results = tmp_path / "results"
    command = [sys.executable, "-m", "pytest", "-p", "isolate_plugin", "-p", "no:timeout"]
    command += ["-p", "no:cacheprovider", "--isolate-timeout=3", f"--isolate-results={results}"]
    command += ["-c", os.devnull, f"--rootdir={tmp_path}"]
    env = os.environ | {"PYTHONPATH": str(ROOT / "tools")}
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True)
    lines = [json.loads(line) for line in results.read_text().splitlines()]
    outcomes = {name.rpartition("::")[2]: (outcome, detail) for name, outcome, detail in lines}
    assert {name: outcome for name, (outcome, _) in outcomes.items()} == {
        "test_a_crash": "failed",
        "test_b_hang": "failed",
        "test_c_leaks": "passed",
        "test_d_sees_no_leak": "passed",
        "test_e_fails": "failed",
        "test_f_skips": "skipped",
        "test_g_exits": "failed",
        "test_h_interrupts": "failed",
    }
    assert "SIGSEGV" in outcomes["test_a_crash"][1]
    assert "1 != 2" in outcomes["test_e_fails"][1]
    assert "status 3" in outcomes["test_g_exits"][1]
    # The stacks of a test that hangs are shown.
    assert "Timeout" in done.stderr + done.stdout and "test_b_hang" in done.stderr + done.stdout
    assert done.returncode == 1


INTERRUPTED = """
import os
import sys

import common
import run_tests

TEST = "import os, time; print(os.getpid(), flush=True); time.sleep(200)"
common.main(lambda argv: run_tests.run_pytest([sys.executable, "-c", TEST], ".", os.environ, 200))
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_tests_end_with_the_run(number: int) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", INTERRUPTED],
        env=os.environ | {"PYTHONPATH": str(ROOT / "tools")},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # Ignored where the tests run in the background of a shell, and that is inherited
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    ) as run:
        test = int(run.stdout.readline())
        run.send_signal(number)
        assert run.wait(60) == 130
        assert "interrupted" in run.stderr.read()
    with pytest.raises(ProcessLookupError):
        os.kill(test, 0)
