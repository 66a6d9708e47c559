"""first_step.py and the session on a GPU machine: command lines, results, and short runs on CPU."""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent
BENCHMARKS = ROOT / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))

import first_step  # noqa: E402
import gpu_tests  # noqa: E402

PROGRAM = [sys.executable, str(BENCHMARKS / "first_step.py")]
SMALL = ["--hidden", "32", "--head-dim", "16", "--layers", "1", "--lengths", "128",
         "--backend", "aot_eager", "--repetitions", "1"]  # fmt: skip


def arm_here() -> tuple[str, str]:
    """An arm that the torch of this interpreter can run, and the options that name it."""
    pytest.importorskip("torch")
    import benchlib

    if benchlib.is_patched():
        return "patched-threads", f"--patched={sys.executable}"
    return "stock-threads", "--quiet"


def run(*arguments: str, timeout: float = 280) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*PROGRAM, *arguments], capture_output=True, text=True, timeout=timeout)


@pytest.mark.parametrize(
    ("text", "devices"),
    [
        ("cpu", ["cpu"]),
        ("cpux3", ["cpu"] * 3),
        ("cuda:0-1", ["cuda:0", "cuda:1"]),
        ("cuda:0-1x2", ["cuda:0", "cuda:1"] * 2),
        ("cuda:2,cuda:0x2", ["cuda:2", "cuda:0", "cuda:0"]),
    ],
)
def test_sets_of_devices(text: str, devices: list[str]) -> None:
    assert first_step.parse_devices(text) == devices


@pytest.mark.parametrize("text", ["", "gpu", "cuda", "cuda:1-0", "cpux0", "cuda:0,,cpu", "cpu:0"])
def test_bad_devices_are_refused(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match=r"devices|backwards"):
        first_step.parse_devices(text)


def test_a_set_may_be_for_one_arm() -> None:
    assert first_step.parse_set("processes=cuda:0-1") == ("processes", ("cuda:0", "cuda:1"))
    assert first_step.parse_set("cpu") == (None, ("cpu",))
    with pytest.raises(argparse.ArgumentTypeError, match="unknown arm 'process'"):
        first_step.parse_set("process=cpu")
    args = first_step.parse_arguments(["--devices", "processes=cpu", "stock-threads=cpux2"])
    assert args.arms == ["stock-threads", "processes"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--arms", "stock-threads", "--devices", "tpu"], "unknown devices 'tpu'"),
        (["--arms", "fast"], "unknown arm 'fast'"),
        (["--arms", "patched-threads"], "name the patched torch"),
        (["--arms", "processes", "--lengths", "100"], "multiples of 128"),
        (["--arms", "processes", "--hidden", "30"], "not a multiple of --head-dim"),
    ],
)
def test_bad_usage_is_one_line_and_exit_code_2(arguments: list[str], message: str) -> None:
    done = run(*arguments)
    assert done.returncode == 2 and message in done.stderr
    assert "Traceback" not in done.stderr


def test_caches_of_a_run(tmp_path: Path) -> None:
    args = first_step.parse_arguments(["--devices", "cpux2", "--arms", "processes"])
    runner = first_step.Runner(args, tmp_path / "kept")
    folders = {}
    for caches in ("on", "empty", "off"):
        config = first_step.Config(("cpu", "cpu"), "processes", "own", caches)
        _, environment = runner.environment(config, tmp_path / "run")
        folders[caches] = Path(environment["TORCHINDUCTOR_CACHE_DIR"]).relative_to(tmp_path).parts
        assert (environment.get("TORCHINDUCTOR_FORCE_DISABLE_CACHES") == "1") == (caches == "off")
    assert folders["on"][0] == "kept" and folders["empty"] == folders["off"] == ("run", "inductor")


def a_run(arm: str, devices: list[str], first: float | None, **more: Any) -> dict[str, Any]:
    found = {"devices": devices, "arm": arm, "code": "own", "caches": "off", "repetition": 0,
             "outcome": "ok" if first else "hung", "graphs": 1, "seconds": 1.0, **more}  # fmt: skip
    if first:
        spent = {"_compile.compile_inner": first / 2, "async_compile.wait": first / 4, "gc": 0.1}
        return {"first_step_s": first, "all_steps_s": 2 * first, "compiling_s": [spent], **found}
    return found | {"error": "1 of 3 workers did not end"}


def test_summary_takes_medians_ratios_and_limits() -> None:
    three, two = ["cuda:0"] * 3, ["cuda:0", "cuda:1"]
    runs = [a_run("stock-threads", ["cuda:0"], 10.0, code="shared")]
    runs += [a_run("patched-threads", three, s, code="shared") for s in (11.0, 14.0, 12.0)]
    runs += [a_run("patched-threads", three, 99.0, code="shared", repetition=None)]
    runs += [a_run("processes", two, 10.0), a_run("patched-threads", two, 12.0)]
    rows, checks = first_step.summarize(runs)
    by_arm = {(r["arm"], len(r["devices"])): r for r in rows}
    shared = by_arm["patched-threads", 3]
    assert shared["first_step_s"] == 12.0 and shared["outcomes"] == {"ok": 3}
    assert shared["to_one_alone"] == pytest.approx(1.2) and shared["to_processes"] is None
    assert by_arm["patched-threads", 2]["to_processes"] == pytest.approx(1.2)
    spent = shared["compiling_s"]
    assert spent["_compile.compile_inner"] == 6.0 and spent["async_compile.precompile"] == 0
    held = {c["name"]: c["holds"] for c in checks}
    assert held["cuda:0 x3, shared code, caches off: to one alone"]
    assert not held["cuda:0, cuda:1, own code, caches off: to processes"]
    assert held["cuda:0 x3, shared code, caches off: all 3 runs ok"]


def test_a_hang_among_the_runs_is_told() -> None:
    runs = [a_run("patched-threads", ["cuda:0"] * 3, s) for s in (5.0, None)]
    rows, checks = first_step.summarize(runs)
    assert rows[0]["outcomes"] == {"ok": 1, "hung": 1} and "did not end" in rows[0]["error"]
    assert [c["holds"] for c in checks] == [False]


def test_threads_on_cpu_reach_their_first_step(tmp_path: Path) -> None:
    arm, option = arm_here()
    out = tmp_path / "out.json"
    done = run("--devices", "cpux2", "--arms", arm, option, *SMALL, "--json", str(out))
    assert done.returncode == 0, done.stderr
    report = json.loads(out.read_text())
    (one,) = report["runs"]
    assert one["outcome"] == "ok" and len(one["workers"]) == 2
    assert all(w["first_step_s"] > 0 and w["error_rel"] < 1e-3 for w in one["workers"])
    assert one["first_step_s"] == max(w["first_step_s"] for w in one["workers"])
    assert one["graphs"] == 2  # each thread has code of its own
    assert one["compiling_s"][0]["_compile.compile_inner"] > 0
    assert report["torch"] and "cpu x2" in done.stdout


def run_with_backend(
    name: str, source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *options: str
) -> tuple[dict[str, Any], str]:
    """The report and the output of two threads that compile with a backend of the test's own."""
    arm, option = arm_here()
    (tmp_path / "sitecustomize.py").write_text(source)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    out = tmp_path / "out.json"
    done = run("--devices", "cpux2", "--arms", arm, option, *SMALL, "--backend", name,
               *options, "--json", str(out))  # fmt: skip
    assert done.returncode == 0, done.stderr
    return json.loads(out.read_text()), done.stdout


BACKEND_THAT_LOOKS = """
import sys
if "--worker" in sys.orig_argv:
    import torch._dynamo
    @torch._dynamo.register_backend
    def looks(gm, example_inputs):
        assert sys.getswitchinterval() == 0.00025, sys.getswitchinterval()
        return gm
"""


def test_the_switch_interval_holds_in_the_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    report, _ = run_with_backend(
        "looks", BACKEND_THAT_LOOKS, tmp_path, monkeypatch, "--switch-interval", "0.00025"
    )
    assert report["switch_interval"] == 0.00025
    assert [r["outcome"] for r in report["runs"]] == ["ok"], report["runs"]


HANGING_BACKEND = """
import sys, threading, time
if "--worker" in sys.orig_argv:
    time.sleep(5)  # a start that takes its time
    import torch._dynamo
    @torch._dynamo.register_backend
    def hangs(gm, example_inputs):
        threading.Event().wait()
"""


def test_a_run_that_hangs_is_ended_and_keeps_its_stacks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    report, output = run_with_backend(
        "hangs", HANGING_BACKEND, tmp_path, monkeypatch, "--timeout", "60"
    )
    (one,) = report["runs"]
    assert one["outcome"] == "hung" and one["error"] == "2 of 2 workers did not end"
    assert "in hangs" in one["stacks"] and "in worker_main" in one["stacks"]
    assert report["summary"][0]["first_step_s"] is None and "2 of 2" in output


def test_a_wrong_result_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch")
    spec = {"devices": ["cpu"], "seed": 0, "hidden": 32, "head_dim": 16, "layers": 1, "batch": 1,
            "dtype": "float32", "compile": "model", "backend": "eager", "code": "own",
            "lengths": [128], "backward": False}  # fmt: skip
    assert first_step.Worker(spec, 0, {}).run(0.0)["outcome"] == "ok"
    worker = first_step.Worker(spec, 0, {})
    right = worker.forward
    worker.forward = lambda x, mask: torch.roll(right(x, mask), 1, 1)
    wrong = worker.run(0.0)
    assert wrong["outcome"] == "wrong" and "relative error" in wrong["error"]
    worker = first_step.Worker(spec, 0, {})
    worker.forward = lambda x, mask: right(x, mask) * float("nan")
    assert worker.run(0.0)["outcome"] == "wrong"


def test_junit_results_are_read(tmp_path: Path) -> None:
    path = tmp_path / "junit.xml"
    path.write_text(
        '<testsuites><testsuite><testcase classname="fx.test_a.TestA" name="test_1" time="1.25"/>'
        '<testcase classname="fx.test_a.TestA" name="test_2"><failure message="Boom: x&#10;y"/>'
        '</testcase><testcase classname="fx.test_a.TestA" name="test_3"><skipped/></testcase>'
        '<testcase classname="fx.test_a.TestA" name="test_4"/>'
        '<testcase classname="fx.test_a.TestA" name="test_4"><error message="late"/></testcase>'
        "</testsuite></testsuites>"
    )
    found = gpu_tests.results_of(path, "fx/test_a.py::TestA::test_1")
    assert [r["outcome"] for r in found] == ["passed", "failed", "skipped", "failed"]
    assert found[1]["detail"] == "Boom: x" and found[0]["test"] == "fx/test_a.py::TestA::test_1"
    assert gpu_tests.results_of(tmp_path / "none.xml", "fx/test_a.py") == []


def session(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    script = str(BENCHMARKS / "gpu_session.sh")
    env = os.environ | environment
    return subprocess.run(["bash", script, *arguments], env=env, capture_output=True, text=True)


@pytest.mark.parametrize("group", ["nothing", "stress:x", "stress@a", "tests+nothing", "stress:0"])
def test_the_session_refuses_a_bad_group_before_it_starts(group: str, tmp_path: Path) -> None:
    done = session(group, OUT=str(tmp_path / "out"), SMOKE="1")
    assert done.returncode == 2 and done.stderr.startswith("gpu_session.sh: no")
    assert not (tmp_path / "out").exists()


def test_the_sections_that_the_session_describes_are_those_that_it_has() -> None:
    text = (BENCHMARKS / "gpu_session.sh").read_text()
    described = re.findall(r"^#   ([a-z]+\d?)  +\S", text, re.MULTILINE)
    assert sorted(described) == sorted(re.findall(r"^section_(\w+)\(\)", text, re.MULTILINE))
