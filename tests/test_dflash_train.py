"""The DFlash trainer as a program: worker modes, stopping, failing, hanging, and the bug itself."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parent.parent
PATCHED = os.environ.get("FXCTX_PATCHED", str(int("fxctx" in torch.__version__))) == "1"
# The unpatched torch of the same release, which build.sh test names.
STOCK_PYTHON = os.environ.get("FXCTX_STOCK_PYTHON", "" if PATCHED else sys.executable)
BUG_LINE = "This is the bug: torch.fx keeps its tracing state for the whole process"

pytestmark = pytest.mark.timeout(280)
needs_patch = pytest.mark.skipif(not PATCHED, reason="this torch is not patched")

# No tracing at all: threads are safe on any torch, and a step is short.
PLAIN = ["--compile", "none", "--features", "eager"]

# The trainer with something that goes wrong in the middle of a drafter's step.
BROKEN = """
import os, sys, threading
sys.path.insert(0, {root!r})
from repro.dflash import train, worker
original = worker.DrafterWorker.update
def update(self, batch):
    if self.drafter == 1 and self.step == 2:
        {accident}
    return original(self, batch)
worker.DrafterWorker.update = update
if __name__ == "__main__":
    sys.exit(train.main(sys.argv[1:]))
"""


def environment(python: str = sys.executable) -> dict[str, str]:
    env = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
    if PATCHED and python == STOCK_PYTHON:
        env.pop("PYTHONPATH", None)  # it may hold the patched torch
    return env


def start(*arguments: str, script: Path | None = None, python: str = sys.executable):
    program = [str(script)] if script else ["-m", "repro.dflash.train"]
    return subprocess.Popen(
        [python, *program, *arguments],
        cwd=ROOT,
        env=environment(python),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def end(process: subprocess.Popen, timeout: float) -> tuple[int, str]:
    try:
        output, _ = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGABRT)  # faulthandler prints the stacks
        output, _ = process.communicate(timeout=20)
        pytest.fail(f"not over after {timeout} s:\n{output}")
    return process.returncode, output


def train(*arguments: str, timeout: float = 150, **how) -> tuple[int, str]:
    """Runs the trainer; exit code and what it printed."""
    return end(start(*arguments, **how), timeout)


def events(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def scores(path: Path) -> dict[tuple, tuple]:
    """All that training computed: (event, drafter, step) to loss, accuracy, accepted prefix."""
    return {
        (e["event"], e["drafter"], e["step"]): (e["loss"], e["accuracy"], e["accepted"])
        for e in events(path)
        if e["event"] in ("step", "eval")
    }


def broken(tmp_path: Path, accident: str) -> Path:
    script = tmp_path / "broken.py"
    script.write_text(BROKEN.format(root=str(ROOT), accident=accident))
    return script


@pytest.fixture(scope="module")
def reference(tmp_path_factory) -> Path:
    """Metrics of three drafters that trained one after the other."""
    path = tmp_path_factory.mktemp("reference") / "metrics"
    code, output = train(
        "--workers", "sequential", "--steps", "5", "--eval-batches", "2", "--metrics", str(path)
    )
    assert code == 0, output
    return path


def test_metrics_tell_the_run(reference: Path) -> None:
    told = events(reference)
    assert told[0]["event"] == "start" and told[0]["torch"] == torch.__version__
    assert told[-1]["event"] == "summary" and told[-1]["outcome"] == "trained"
    steps = [e for e in told if e["event"] == "step"]
    assert [(e["drafter"], e["step"]) for e in steps] == [
        (d, s) for d in range(3) for s in range(1, 6)
    ]
    for e in steps:
        assert e["tokens"] == 2 * e["length"]
        seconds = e["data_s"] + e["step_s"]
        assert e["ktok_s"] == pytest.approx(e["tokens"] / seconds / 1e3)
    assert len({e["length"] for e in steps}) > 2, "lengths do not vary"
    assert {e["drafter"] for e in told if e["event"] == "trained"} == {0, 1, 2}


@pytest.mark.parametrize(
    "arguments",
    [
        ["--workers", "processes"],
        pytest.param(["--workers", "threads"], marks=needs_patch),
        pytest.param(["--workers", "threads", "--targets", "cpu,cpu"], marks=needs_patch),
        pytest.param(["--workers", "threads", "--warmup", "sequential"], marks=needs_patch),
    ],
    ids=lambda arguments: "-".join(a.strip("-") for a in arguments[1:]),
)
def test_worker_modes_give_the_same_losses(arguments, reference: Path, tmp_path: Path) -> None:
    path = tmp_path / "metrics"
    code, output = train(*arguments, "--steps", "5", "--eval-batches", "2", "--metrics", str(path))
    assert code == 0, output
    expected, found = scores(reference), scores(path)
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        assert found[key] == pytest.approx(value, abs=1e-5), key


def test_threads_that_trace_nothing_give_the_same_losses_on_any_torch(tmp_path: Path) -> None:
    found = []
    for how in (["--workers", "sequential"], ["--workers", "threads", "--targets", "cpu"]):
        path = tmp_path / "metrics"
        code, output = train(*PLAIN, *how, "--steps", "6", "--metrics", str(path))
        assert code == 0, output
        found.append(scores(path))
    assert found[0] == found[1] and len(found[0]) == 3 * 7


def test_ctrl_c_saves_and_resume_goes_on_with_the_same_losses(tmp_path: Path) -> None:
    common = [*PLAIN, "--steps", "40", "--eval-batches", "2", "--eval-every", "20"]
    code, output = train(*common, "--metrics", str(tmp_path / "whole"))
    assert code == 0, output
    saved = ["--checkpoint", str(tmp_path / "saved")]
    first = tmp_path / "first"
    process = start(*common, *saved, "--metrics", str(first))
    deadline = time.monotonic() + 100
    while not (first.exists() and first.read_text().count('"step", "time"') >= 8):
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    code, output = end(process, 60)
    assert code == 0, output
    assert "Traceback" not in output
    assert events(first)[-1]["outcome"] == "stopped"
    stopped = {e["drafter"]: e for e in events(first) if e["event"] == "stopped"}
    assert stopped and all(Path(e["checkpoint"]).exists() for e in stopped.values())
    assert len(list((tmp_path / "saved").iterdir())) == 3

    second = tmp_path / "second"
    code, output = train(*common, *saved, "--resume", "--metrics", str(second))
    assert code == 0, output
    began = {d: min(s for _, n, s in scores(second) if n == d) for d in stopped}
    assert began == {d: e["step"] + 1 for d, e in stopped.items()}
    assert scores(first) | scores(second) == scores(tmp_path / "whole")

    code, output = train(*common, *saved, "--resume")  # there is nothing left to do
    assert code == 0, output


@pytest.mark.parametrize("workers", ["threads", "processes", "sequential"])
def test_failure_of_one_worker_stops_all_with_one_traceback(workers: str, tmp_path: Path) -> None:
    path = tmp_path / "metrics"
    code, output = train(
        *PLAIN, "--workers", workers, "--steps", "3000", "--drafters", "cpu,cpu",
        "--metrics", str(path), *(["--steps", "6"] if workers == "sequential" else []),
        script=broken(tmp_path, "raise RuntimeError('the disk is on fire')"), timeout=90,
    )  # fmt: skip
    assert code == 1, output
    assert output.count("Traceback (most recent call last)") == 1, output
    assert output.count("RuntimeError: the disk is on fire") == 1
    assert BUG_LINE not in output
    last = events(path)[-1]
    assert last["outcome"] == "failed" and not last["known_bug"]
    assert last["error"] == "RuntimeError: the disk is on fire"


def test_the_bug_is_named_when_it_shows(tmp_path: Path) -> None:
    code, output = train(
        *PLAIN, "--workers", "sequential", "--drafters", "cpu,cpu", "--steps", "3",
        "--eval-batches", "0",
        script=broken(tmp_path, "raise NameError('module is not installed as a submodule')"),
    )  # fmt: skip
    assert code == 1
    assert output.count(BUG_LINE) == 1 and "./build.sh doctor" in output


def test_process_that_dies_without_a_word_is_a_failure(tmp_path: Path) -> None:
    code, output = train(
        *PLAIN, "--workers", "processes", "--drafters", "cpu,cpu", "--steps", "3000",
        script=broken(tmp_path, "os.kill(os.getpid(), 9)"), timeout=90,
    )  # fmt: skip
    assert code == 1
    assert "drafter 1 (cpu) failed:\nits process ended with signal 9" in output


@pytest.mark.parametrize(
    # The time that a process needs to start counts too.
    ("workers", "seconds"),
    [("threads", "12"), ("processes", "30")],
)
def test_hang_is_ended_with_all_stacks(workers: str, seconds: str, tmp_path: Path) -> None:
    path = tmp_path / "metrics"
    code, output = train(
        *PLAIN, "--workers", workers, "--drafters", "cpu,cpu", "--steps", "3000",
        "--hang-timeout", seconds, "--metrics", str(path),
        script=broken(tmp_path, "threading.Event().wait()"), timeout=120,
    )  # fmt: skip
    assert code == 3, output
    assert f"hung: drafter 1 has ended no step for {seconds} s" in output
    assert 'broken.py", line 8 in update' in output, "the stack that hangs is not shown"
    assert events(path)[-1]["outcome"] == "hung"


def test_profile_lists_the_operators_of_each_drafter(tmp_path: Path) -> None:
    path = tmp_path / "profile"
    code, output = train(*PLAIN, "--drafters", "cpu,cpu", "--steps", "2", "--profile", str(path))
    assert code == 0, output
    told = json.loads(path.read_text())
    assert [d["drafter"] for d in sorted(told["drafters"], key=lambda d: d["drafter"])] == [0, 1]
    for drafter in told["drafters"]:
        names = {row["name"]: row for row in drafter["operators"]}
        assert names["aten::mm"]["calls"] > 10 and names["aten::mm"]["us"] > 0


@pytest.mark.skipif(not STOCK_PYTHON, reason="no unpatched torch at hand")
def test_stock_torch_stops_with_the_bug(tmp_path: Path) -> None:
    path = tmp_path / "metrics"
    code, output = train(
        "--steps", "60", "--hang-timeout", "100", "--metrics", str(path),
        python=STOCK_PYTHON, timeout=170,
    )  # fmt: skip
    assert code == 1, output
    assert output.count(BUG_LINE) == 1 and "./build.sh doctor" in output, output
    told = events(path)
    assert told[-1]["known_bug"]
    assert max((e["step"] for e in told if e["event"] == "step"), default=0) < 10


@pytest.mark.parametrize(("limit", "hit"), [([], False), (["--recompile-limit", "1"], True)])
def test_recompile_limit(limit: list[str], hit: bool) -> None:
    short = ["--drafters", "cpu", "--steps", "6", "--eval-batches", "1", "--features", "eager"]
    code, output = train(*short, *limit)
    assert code == 0, output
    assert ("hit config.recompile_limit (1)" in output) == hit, output


@needs_patch
def test_patched_torch_trains_three_drafters_in_threads(tmp_path: Path) -> None:
    path = tmp_path / "metrics"
    began = time.monotonic()
    code, output = train(
        "--steps", "300", "--hang-timeout", "100", "--metrics", str(path), timeout=270
    )
    assert code == 0, output
    told = events(path)
    first = [e["loss"] for e in told if e["event"] == "step" and e["step"] == 1]
    held_out = [e["loss"] for e in told if e["event"] == "eval"]
    print(f"{time.monotonic() - began:.0f} s, first losses {first}, held-out {held_out}")
    assert len(first) == 3 and min(first) > 5.2
    assert len(held_out) == 3 and max(held_out) < 3.0
