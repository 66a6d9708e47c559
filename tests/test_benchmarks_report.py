"""The tables of README.md say what benchmarks/results say, and report.py's own rules."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "benchmarks"))

import report  # noqa: E402

FACTS = {"machine": "Some CPU", "cores": 2, "python": "3.11.7", "date": "2026-01-02 03:04 UTC"}


def stress_result(torch: str, patched: bool, wrong: int, **more: Any) -> dict[str, Any]:
    return {
        "benchmark": "stress", **FACTS, "command": "python benchmarks/stress.py", "torch": torch,
        "cuda": None, "gpus": [], "patched": patched, "device": "cpu", "threads": 8,
        "operations": 1000, "done": 1000, "wrong": wrong, "leaks": ["x"] * bool(wrong),
        "outcome": "failed" if wrong else "passed", **more,
    }  # fmt: skip


def drafters_result() -> dict[str, Any]:
    kernels = {"forward_us": 10.0, "backward_us": 30.0, "all_us": 100.0, "unfused": [],
               "slower": {}, "full_speed": True}  # fmt: skip
    drafter = {"device": "cuda:0", "ktok_s": 72.9, "ktok_s_all": [72.0, 72.9, 73.0],
               "first_step_s": 8.0, "kernels": kernels}  # fmt: skip
    trained = {"outcomes": {"trained": 3}, "error": None, "ktok_s": 145.8, "first_step_s": 8.0,
               "peak_memory_bytes": 2**31, "drafters": [drafter, drafter]}  # fmt: skip
    crashed = {"outcomes": {"crashed": 3}, "error": "RuntimeError: x", "ktok_s": None,
               "first_step_s": None, "peak_memory_bytes": None, "drafters": []}  # fmt: skip
    facts = {"torch": "2.11.0+cu130", "cuda": "13.0", "gpus": ["NVIDIA H200"] * 2, "patched": False}
    return {
        "benchmark": "drafters", **FACTS, "command": "python benchmarks/drafters.py",
        "torch": {"stock": facts}, "preset": "qwen3-4b", "devices": "cuda:0-1", "steps": 60,
        "arms": {"stock-threads": crashed, "patched-threads": trained, "processes": trained},
        "checks": [{"name": "thread / process, drafter 0", "value": 1.0, "limit": ">= 0.99",
                    "holds": True}],
    }  # fmt: skip


def overhead_result() -> dict[str, Any]:
    facts = {"torch": "2.15.0+cpu", "cuda": None, "gpus": [], "patched": False}
    return {
        "benchmark": "overhead", **FACTS, "command": "python benchmarks/overhead.py",
        "pairs": [{
            "stock": facts, "patched": {**facts, "patched": True},
            "benchmarks": [
                {"name": "compiled call", "stock_seconds": 5e-6, "patched_seconds": 4.4e-6,
                 "ratio": 0.88, "ratio_quartiles": [0.87, 0.89], "limit": 0.9, "holds": True},
                {"name": "make_fx", "stock_seconds": 1e-2, "patched_seconds": 1.1e-2,
                 "ratio": 1.1, "ratio_quartiles": [1.0, 1.2], "limit": 1.03, "holds": False},
            ],
            "trace_elsewhere": [
                {"name": "eager module call, trace elsewhere", "extra_seconds": 2e-7,
                 "limit": 1.5e-6, "holds": True, "failure": None, "turns": []},
            ],
        }],
    }  # fmt: skip


@pytest.fixture
def results(tmp_path: Path) -> Path:
    folder = tmp_path / "results"
    folder.mkdir()
    for name, result in {
        "stress-2.15.0-patched": stress_result("2.15.0+cpu", True, 0),
        "stress-2.15.0-stock": stress_result("2.15.0+cpu", False, 512),
        "stress-2.2.0-stock": stress_result("2.2.0+cpu", False, 3, outcome="died", done=40),
        "drafters-h200x2": drafters_result(),
        "overhead": overhead_result(),
    }.items():
        (folder / f"{name}.json").write_text(json.dumps(result))
    return folder


def test_the_readme_says_what_the_results_say() -> None:
    assert report.main(["--check"]) == 0, "run benchmarks/report.py --tables"


def test_tables_stand_between_their_markers(results: Path, tmp_path: Path) -> None:
    readme = tmp_path / "README.md"
    readme.write_text("before\n<!-- table:stress -->\nstale\n<!-- end -->\nbetween\n"
                      "<!-- table:drafters-h200x2 -->\n<!-- end -->\n<!-- table:overhead -->\n"
                      "<!-- end -->\n<!-- table:kernels -->\n<!-- end -->\nafter\n")  # fmt: skip
    where = ["--readme", str(readme), "--results", str(results)]
    assert report.main([*where, "--check"]) == 1
    assert "stale" in readme.read_text(), "--check changed the file"
    assert report.main([*where, "--tables"]) == 0
    assert report.main([*where, "--check"]) == 0
    text = readme.read_text()
    assert "stale" not in text and text.startswith("before\n") and text.endswith("after\n")
    stress = [line for line in text.splitlines() if line.startswith("| 2.")]
    releases = [line.split("|")[1].strip() for line in stress]
    assert releases == ["2.2.0+cpu", "2.15.0+cpu", "2.15.0+cpu"]
    assert "512" in stress[1] and "died" in stress[0] and "40 of 1,000" in stress[0]
    assert "| 72.9 / 72.9 | 145.8 | 8.0 | 2.0 | yes |" in text and "3 crashed" in text
    assert "2 x NVIDIA H200" in text and "`python benchmarks/drafters.py`" in text
    assert "0.88 (5 µs → 4.4 µs)" in text and "limit 1.03" in text


def test_a_table_without_results_or_end_is_an_error(results: Path, tmp_path: Path) -> None:
    readme = tmp_path / "README.md"
    where = ["--readme", str(readme), "--results", str(results)]
    for text in ("<!-- table:nothing -->\n<!-- end -->\n", "<!-- table:stress -->\n"):
        readme.write_text(text)
        assert report.main([*where, "--tables"]) == 2
        assert readme.read_text() == text


def test_plots_are_written_and_come_out_the_same(results: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    readme = tmp_path / "README.md"
    readme.write_text("nothing marked\n")
    where = ["--readme", str(readme), "--results", str(results)]
    assert report.main(where) == 0
    plots = ["drafters-h200x2", "overhead", "stress"]
    first = {name: (results / f"{name}.svg").read_bytes() for name in plots}
    assert all((results / f"{name}.png").stat().st_size > 5000 for name in plots)
    assert b"crashed" in first["drafters-h200x2"] and b"ideal" in first["drafters-h200x2"]
    assert report.main(where) == 0
    assert first == {name: (results / f"{name}.svg").read_bytes() for name in plots}
