"""The benchmark programs: their arithmetic, their command lines, and short real runs."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent
BENCHMARKS = ROOT / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))

import benchlib  # noqa: E402
import drafters  # noqa: E402
import overhead  # noqa: E402
import stress  # noqa: E402

KINDS = {
    name: SimpleNamespace(name=name, weight=weight, variants=variants, default=name != "c")
    for name, weight, variants in (("a", 90, 3), ("b", 9, 2), ("c", 1, 1), ("rare", 0.001, 1))
}


def run(program: str, *arguments: str, timeout: float = 300) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(BENCHMARKS / program), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout)


# --- benchlib


def test_table_aligns_numbers_right_and_words_left() -> None:
    text = benchlib.table(("name", "count"), [("a", 5), ("long", 12345)])
    assert text.splitlines() == ["name  count", "----  -----", "a         5", "long  12345"]


def test_write_json_names_the_files_of_tracebacks_without_folders(tmp_path: Path) -> None:
    files = [benchlib.__file__, json.__file__, "/venv/site-packages/torch/fx/a.py", "/else/b.py"]
    lines = [f'  File "{file}", line 1, in f' for file in [*files, "<string>"]]
    path = tmp_path / "result.json"
    benchlib.write_json(path, {"errors": [{"examples": ["\n".join(lines)]}]})
    (example,) = json.loads(path.read_text())["errors"][0]["examples"]
    assert re.findall('File "(.*)"', example) == [
        "benchmarks/benchlib.py", "json/__init__.py", "torch/fx/a.py", "b.py", "<string>"
    ]  # fmt: skip


def test_write_json_replaces_the_file_and_leaves_no_part(tmp_path: Path) -> None:
    path = tmp_path / "made" / "out.json"
    benchlib.write_json(path, {"a": 1})
    benchlib.write_json(path, {"a": 2})
    assert json.loads(path.read_text()) == {"a": 2}
    assert list(path.parent.iterdir()) == [path]


def test_command_line_names_no_folder_of_the_machine() -> None:
    argv = [str(BENCHMARKS / "stress.py"), "--json", "/somewhere/else/out.json", "--ops", "5"]
    assert benchlib.command_line(argv) == "python benchmarks/stress.py --json out.json --ops 5"


# --- stress


def test_plan_is_the_same_for_the_same_seed_and_another_for_another() -> None:
    kinds = list(KINDS.values())
    plan = stress.plan(kinds, 1000, 8, 7)
    assert plan == stress.plan(kinds, 1000, 8, 7)
    assert plan != stress.plan(kinds, 1000, 8, 8)


def test_plan_shares_by_weight_and_leaves_out_no_kind() -> None:
    plan = stress.plan(list(KINDS.values()), 1000, 8, 7)
    flat = [kind for part in plan for kind, _ in part]
    assert len(flat) == 1000 and {len(part) for part in plan} == {125}
    assert flat.count("a") == 899 and flat.count("b") == 90
    assert flat.count("c") == 10 and flat.count("rare") == 1
    variants = [v for part in plan for kind, v in part if kind == "a"]
    assert {variants.count(v) for v in range(3)} <= {299, 300}


def test_kinds_are_chosen_by_name_group_and_skip() -> None:
    def names(spec: str, skip: str = "") -> list[str]:
        return [k.name for k in stress.choose_kinds(spec, skip, KINDS)]

    assert names("default") == ["a", "b", "rare"]
    assert names("all", "b") == ["a", "c", "rare"]
    assert names("c,a") == ["a", "c"]
    with pytest.raises(ValueError, match="unknown kind 'x'"):
        names("x")
    with pytest.raises(ValueError, match="no kind of operation left"):
        names("a", "a")


def test_difference_finds_what_differs_and_nothing_else() -> None:
    torch = pytest.importorskip("torch")
    same = ("code\nline", (1, True), [torch.ones(2)])
    assert stress.difference(same, ("code\nline", (1, True), [torch.ones(2)])) is None
    assert "code differs: 'lime'" in stress.difference("code\nline", "code\nlime")
    assert "code differs" in stress.difference("a\nb", "a\nb\nc")
    assert stress.difference((1, True), (1, False)) == "False where True should be"
    assert stress.difference((1,), (1, 2)) is not None
    assert "tensor differs" in stress.difference(torch.ones(2), torch.zeros(2))
    assert "tensor differs" in stress.difference(torch.ones(2), torch.ones(3))
    assert "tensor differs" in stress.difference(torch.ones(2), torch.ones(2).double())
    assert stress.difference(torch.ones(2), 1) is not None


def test_leaks_are_seen_from_this_thread_and_from_a_new_one() -> None:
    torch = pytest.importorskip("torch")
    pytest.importorskip("torch.fx.experimental.proxy_tensor")
    import operations

    before, patched = stress.state(), stress.patched_names()
    assert stress.leaks(before, patched) == []
    original, call = operations.scaled, torch.nn.Module.__call__
    try:
        operations.scaled = torch.fx._symbolic_trace._create_wrapped_func(original)
        torch.nn.Module.__call__ = lambda self, *args, **kwargs: call(self, *args, **kwargs)
        found = "\n".join(stress.leaks(before, patched))
    finally:
        operations.scaled, torch.nn.Module.__call__ = original, call
    assert "operations.scaled: still wrapped" in found
    assert "nn.Module.__call__: " in found and "nn.Module.__call__ (in a new thread): " in found
    assert stress.leaks(before, patched) == []


def test_stress_refuses_bad_usage() -> None:
    pytest.importorskip("torch")
    for arguments, wanted in (
        (("--kinds", "nonsense"), "unknown kind 'nonsense'"),
        (("--threads", "0"), "'0' is not a whole number"),
        (("--device", "nodevice"), "nodevice"),
    ):
        done = run("stress.py", *arguments)
        assert done.returncode == 2 and wanted in done.stderr


@pytest.mark.timeout(600)
def test_a_short_stress_passes(tmp_path: Path) -> None:
    """All kinds but those that need a C++ compiler for minutes, on four threads."""
    pytest.importorskip("torch")
    out = tmp_path / "stress.json"
    done = run(
        "stress.py", "--threads", "4", "--ops", "600", "--seed", "20", "--timeout", "120",
        "--skip", "call_inductor,compile_inductor,call_flex_attention,compile_flex_attention",
        "--json", str(out), timeout=580,
    )  # fmt: skip
    report = json.loads(out.read_text())
    assert done.returncode == 0, done.stdout + done.stderr
    assert report["outcome"] == "passed" and report["done"] == 600 and report["leaks"] == []
    assert sum(k["operations"] for k in report["kinds"].values()) == 600


@pytest.mark.timeout(300)
def test_a_hang_is_told_with_all_stacks(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    out = tmp_path / "stress.json"
    code = (
        "import sys, threading; sys.path.insert(0, sys.argv.pop(1)); import operations, stress\n"
        "lock = threading.Lock()\n"
        "def stuck(device):\n"
        "    calls = iter(range(10**9))\n"
        "    return lambda variant: lock.acquire() if next(calls) > 20 else 'fine'\n"
        "operations.KINDS['stuck'] = operations.Kind('stuck', 1, 1, False, stuck)\n"
        "stress.run()\n"
    )
    command = [sys.executable, "-c", code, str(BENCHMARKS), "--kinds", "stuck", "--threads", "2"]
    command += ["--ops", "50", "--timeout", "2", "--json", str(out)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280)
    assert done.returncode == 3, done.stdout + done.stderr
    assert "HUNG" in done.stdout and "in work" in done.stderr
    report = json.loads(out.read_text())
    assert report["outcome"] == "hung" and report["waiting"]


# --- overhead


def test_arms_are_interpreters_or_trees(tmp_path: Path) -> None:
    (tmp_path / "torch").mkdir()
    python, tree = sys.executable, str(tmp_path)
    there = str(tmp_path.resolve())
    assert overhead.resolve(python, tree, "x") == ((python, None), (python, there))
    assert overhead.resolve(tree, tree, "x") == (("x", there), ("x", there))
    with pytest.raises(ValueError, match="neither a Python interpreter nor a folder"):
        overhead.resolve(python, str(tmp_path / "nothing"), "x")
    with pytest.raises(ValueError, match="without torch/"):
        overhead.resolve(python, str(tmp_path / "torch"), "x")


def test_a_ratio_is_the_median_of_neighbouring_turns() -> None:
    b = overhead.Benchmark("x", lambda: lambda seconds: 0.0, lambda release: 1.02)
    # The machine slowed down by three in the middle: both arms did.
    made = overhead.row(b, [(1.0, 1.01), (3.0, 3.0), (1.0, 1.01), (3.0, 3.03), (1.0, 2.0)], (2, 13))
    assert made["ratio"] == pytest.approx(1.01) and made["holds"]
    assert not overhead.row(b, [(1.0, 1.1)], (2, 13))["holds"]
    assert overhead._call_limit((2, 13)) == 1.02 and overhead._call_limit((2, 15)) == 0.90


def test_overhead_refuses_unpaired_arms() -> None:
    done = run("overhead.py", "--stock", sys.executable)
    assert done.returncode == 2 and "as many --patched arms" in done.stderr


@pytest.mark.timeout(300)
def test_overhead_measures_and_writes(tmp_path: Path) -> None:
    """This interpreter against itself."""
    pytest.importorskip("torch")
    out = tmp_path / "overhead.json"
    done = run(
        "overhead.py", "--stock", sys.executable, "--patched", sys.executable, "--processes", "1",
        "--rounds", "3", "--min-run-time", "0.02", "--only", "compil", "--json", str(out),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    rows = json.loads(out.read_text())["pairs"][0]["benchmarks"]
    assert {"compiled call", "torch.compiler.is_compiling()"} <= {r["name"] for r in rows}
    for row in rows:
        assert len(row["turns"]) == 3 and 0.2 < row["ratio"] < 5


# --- drafters

FORWARD, BACKWARD = (
    "triton_tem_fused_flex_attention_0",
    "triton_tem_fused_flex_attention_backward_1",
)


def profile(**times: float) -> dict[str, Any]:
    kernels = [{"name": name, "calls": 1, "us": us} for name, us in times.items()]
    return {"drafter": 0, "device": "cuda:0", "kernels": kernels, "operators": []}


def test_full_speed_needs_both_fused_kernels_and_no_slower_one() -> None:
    alone = profile(**{FORWARD: 100.0, BACKWARD: 300.0, "gemm": 600.0, "tiny": 1.0})
    renumbered = {"triton_tem_fused_flex_attention_7": 102.0, BACKWARD: 300.0}
    good = profile(**renumbered, gemm=620.0, tiny=5.0)
    assert drafters.full_speed(good, alone)["full_speed"]
    slow = drafters.full_speed(profile(**{FORWARD: 100.0, BACKWARD: 330.0}, gemm=600.0), alone)
    assert not slow["full_speed"] and list(slow["slower"].values()) == [1.1]
    assert not drafters.full_speed(profile(**{FORWARD: 100.0}, gemm=600.0), None)["full_speed"]
    unfused = profile(**{FORWARD: 100.0, BACKWARD: 300.0}, gemm=600.0)
    unfused["operators"] = [{"name": "aten::bmm", "calls": 2, "us": 9.0}]
    assert drafters.full_speed(unfused, alone)["unfused"] == ["aten::bmm"]
    assert not drafters.full_speed(unfused, alone)["full_speed"]
    gone = drafters.full_speed(profile(**{FORWARD: 1.0, BACKWARD: 3.0}), alone)
    assert gone["missing"] == ["gemm"] and not gone["full_speed"]


def metrics(path: Path, *events: dict[str, Any]) -> Path:
    path.write_text("".join(json.dumps(e) + "\n" for e in events))
    return path


def test_outcomes_are_told_from_exit_code_and_metrics(tmp_path: Path) -> None:
    failed = {
        "event": "summary",
        "outcome": "failed",
        "error": "RuntimeError: x",
        "known_bug": True,
    }
    path = metrics(tmp_path / "m", failed)
    assert drafters.outcome_of(path, 1, "")["outcome"] == "crashed"
    assert drafters.outcome_of(path, 1, "")["known_bug"]
    assert drafters.outcome_of(tmp_path / "none", -11, "")["error"] == "signal 11"
    assert drafters.outcome_of(tmp_path / "none", None, "")["outcome"] == "hung"
    usage = drafters.outcome_of(tmp_path / "none", 2, "x\ntrain.py: error: no such preset\n")
    assert usage == {"outcome": "not started", "error": "train.py: error: no such preset"}


def test_figures_add_up_over_drafters(tmp_path: Path) -> None:
    events = []
    for d in (0, 1):
        events.append({"event": "warmup", "drafter": d, "device": "cuda:0", "seconds": 4.0})
        for n in (1, 2, 3, 4):
            events.append(
                {"event": "step", "drafter": d, "at_s": n + d, "step_s": 1.0, "loss": 5 - n}
            )
        events.append({"event": "trained", "drafter": d, "device": "cuda:0", "ktok_s": 70.0 + d,
                       "median_step_s": 1.0, "peak_memory_bytes": 10})  # fmt: skip
    path = metrics(tmp_path / "m", *events)
    threads = drafters.figures_of(path, processes=False)
    assert threads["ktok_s"] == 141.0 and threads["first_step_s"] == 10.0
    assert threads["peak_memory_bytes"] == {"cuda:0": 10}
    assert drafters.figures_of(path, processes=True)["peak_memory_bytes"] == {"cuda:0": 20}


def test_threads_are_held_against_processes() -> None:
    def arm(*rates: float, first: float, devices: str = "01") -> dict[str, Any]:
        found = [{"ktok_s": r, "device": f"cuda:{d}", "kernels": None}
                 for r, d in zip(rates, devices, strict=True)]  # fmt: skip
        return {"ktok_s": sum(rates), "first_step_s": first, "drafters": found}

    arms = {
        "patched-threads": arm(72.9, 70.0, first=12.0),
        "processes": arm(72.7, 74.8, first=11.0),
    }
    made = {c["name"]: c["holds"] for c in drafters.checks(arms, "qwen3-4b", "fresh")}
    assert made == {
        "thread / process, drafter 0": True,
        "thread / process, drafter 1": False,
        "first step, threads / processes": True,
    }
    # An arm's runs find what others left in a cache that they share
    made = {c["name"]: c["holds"] for c in drafters.checks(arms, "qwen3-4b", "shared")}
    assert list(made) == ["thread / process, drafter 0", "thread / process, drafter 1"]
    arms = {
        "patched-threads": arm(72.9, 74.0, 70.0, first=12.0, devices="567"),
        "processes": arm(75.0, 75.0, 75.0, first=11.0, devices="567"),
    }
    made = {c["name"][-1]: c["holds"] for c in drafters.checks(arms, "qwen3-4b", "shared")}
    assert made == {"0": True, "1": True, "2": False}
    arms = {
        "patched-threads": arm(20.0, 30.0, first=9.0, devices="00"),
        "processes": arm(26.0, 24.0, first=9.0, devices="00"),
        "reference": arm(50.0, first=8.0, devices="0"),
    }
    made = {c["name"]: c["holds"] for c in drafters.checks(arms, "qwen2.5-0.5b", "fresh")}
    assert made == {"threads / processes, in all": True, "first step, threads / one alone": True}
    arms["processes"]["ktok_s"] = 51.0  # other than a thread's share of its process, 0.98 misses
    made = {c["name"]: c["holds"] for c in drafters.checks(arms, "qwen2.5-0.5b", "shared")}
    assert made == {"threads / processes, in all": False}


def test_drafters_refuses_a_wrong_torch() -> None:
    pytest.importorskip("torch")
    arguments = ["--stock", sys.executable, "--arms"]
    done = run("drafters.py", *arguments, "nonsense")
    assert done.returncode == 2 and "unknown arm 'nonsense'" in done.stderr
    done = run("drafters.py", *arguments, "patched-threads")
    assert done.returncode == 2 and "name the patched torch" in done.stderr
    done = run("drafters.py", "--stock", sys.executable, "--patched", sys.executable)
    assert done.returncode == 2 and re.search("should be (stock|patched)", done.stderr)
    done = run("drafters.py", "--stock", "/nonexistent/python", "--arms", "processes")
    assert done.returncode == 2 and "/nonexistent/python" in done.stderr


def test_drafters_on_a_host_with_fewer_gpus(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    patched = ["--patched", sys.executable] if benchlib.is_patched() else []
    arm = "patched-threads" if benchlib.is_patched() else "stock-threads"
    out = tmp_path / "out.json"
    for option, devices in (("--drafters", "cuda:95-97"), ("--targets", "cuda:90-94")):
        done = run("drafters.py", *patched, "--arms", arm, option, devices, "--json", str(out),
                   "--quiet")  # fmt: skip
        assert done.returncode == 2 and not out.exists()
        assert done.stderr.count("\n") == 1 and f"{option}: {devices}: this host has" in done.stderr


@pytest.mark.timeout(600)
def test_drafters_runs_and_resumes(tmp_path: Path) -> None:
    """One drafter alone in the tiny preset; a second call finds nothing left to do."""
    pytest.importorskip("torch")
    if benchlib.is_patched():
        arm, python = "patched-threads", ["--patched", sys.executable]
    else:
        arm, python = "reference", ["--stock", sys.executable]
    out = tmp_path / "drafters.json"
    arguments = [*python, "--arms", arm, "--drafters", "cpu", "--steps", "6", "--replay", "2"]
    arguments += ["--repetitions", "1", "--json", str(out), "--resume", "--targets", "cpu,cpu"]
    done = run("drafters.py", *arguments, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(out.read_text())
    (one,) = report["runs"]
    assert one["outcome"] == "trained" and one["ktok_s"] > 0 and one["profile"]
    targets = "cpu" if arm == "reference" else "cpu,cpu"
    assert f"--targets {targets} " in one["options"] and report["targets"] == "cpu,cpu"
    assert report["arms"][arm]["outcomes"] == {"trained": 1}
    again = run("drafters.py", *arguments, timeout=280)
    assert again.returncode == 0 and json.loads(out.read_text())["runs"] == [one]
    other = run("drafters.py", *arguments, "--steps", "7", timeout=280)
    assert other.returncode == 2 and "another steps" in other.stderr
