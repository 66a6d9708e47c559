"""build.sh test --upstream: how the runs of PyTorch's own tests are held against each other."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import upstream_compare
from small_torch import Torch, one_line

pytestmark = pytest.mark.timeout(300)

TEST_FX = """
import os, threading, time, unittest

together, most = 0, 0
lock = threading.Lock()

class TestFX(unittest.TestCase):
    def test_right(self):
        pass

    def test_lost(self):
        self.assertNotIn("BREAK", os.environ)

    def test_wrong_everywhere(self):
        self.fail()

    def test_skipped(self):
        self.skipTest("no")

    def test_needs_to_be_alone(self):
        global together, most
        with lock:
            together += 1
            most = max(most, together)
        time.sleep(0.2)
        with lock:
            together -= 1
        self.assertEqual(most, 1)
"""
TEST_MISC = """
import os, unittest

class TestMisc(unittest.TestCase):
    def test_a_first(self):
        pass

    def test_b_dies(self):
        if "BREAK" in os.environ:
            os._exit(7)
"""


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    folder = tmp_path / "test"
    (folder / "dynamo").mkdir(parents=True)
    (folder / "test_fx.py").write_text(TEST_FX)
    (folder / "dynamo" / "test_misc.py").write_text(TEST_MISC)
    (folder / "test_other.py").write_text("def test_not_ours():\n    assert False\n")
    return folder


def runner(**env: str) -> upstream_compare.Runner:
    def run(arguments: list[str], folder: Path) -> int:
        command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-c", os.devnull]
        command += [f"--rootdir={folder}", *arguments]
        environment = upstream_compare.environment({**os.environ, **env})
        return subprocess.run(command, cwd=folder, env=environment, timeout=120).returncode

    return run


def test_equal_runs_show_only_what_threads_break(
    checkout: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("pytest_run_parallel")
    assert upstream_compare.compare(checkout, runner(), runner(), []) == 1
    failed = [x for x in capfd.readouterr().out.splitlines() if x.startswith("FAILED")]
    assert len(failed) == 1
    test = "test_fx.py::TestFX::test_needs_to_be_alone"
    assert failed[0].startswith(f"FAILED on four threads: {test}: AssertionError: ")


def test_a_patched_release_that_loses_tests(
    checkout: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("pytest_run_parallel")
    assert upstream_compare.compare(checkout, runner(), runner(BREAK="1"), []) == 1
    text = capfd.readouterr().out
    assert "FAILED one at a time: test_fx.py::TestFX::test_lost" in text
    assert "FAILED one at a time: dynamo/test_misc.py::TestMisc::test_b_dies" in text
    assert "did not finish: dynamo/test_misc.py" in text
    assert "test_wrong_everywhere" not in text.split("FAILED")[1]
    assert "unpatched, one at a time: 5 passed, 1 failed, 1 skipped" in text


def test_no_difference(checkout: Path) -> None:
    pytest.importorskip("pytest_run_parallel")
    options = ["-k", "right or wrong or skipped or first"]
    assert upstream_compare.compare(checkout, runner(), runner(), options) == 0


def test_files_by_name(checkout: Path, capfd: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("pytest_run_parallel")
    options = ["test_fx.py", "-k", "right or wrong or skipped or first"]
    assert upstream_compare.compare(checkout, runner(), runner(), options) == 0
    assert "test_misc.py" not in capfd.readouterr().out


def test_a_folder_without_these_tests(torch_env: Torch, tmp_path: Path) -> None:
    one_line(torch_env.build("test", "--upstream", tmp_path), "test_fx.py", "checkout")
