#!/usr/bin/env python3
"""DFlash drafters in threads, stock and patched, beside one process a drafter: the headline.

    drafters.py --patched PY --preset qwen3-4b --drafters cuda:0-1
    drafters.py --patched-pythonpath DIR --preset tiny --drafters cpu,cpu --steps 20
    drafters.py --patched PY --preset qwen3-4b --targets cuda:0-4 --drafters cuda:5-7

Runs repro/dflash/train.py in these arms, interleaved, --repetitions times, each in a fresh process
with empty compile caches:

    reference             one drafter alone (stock): what its kernels take undisturbed
    stock-threads         a thread for each drafter, stock torch
    stock-workaround      the same with torch._dynamo.config.force_compile_during_fx_trace
    patched-threads       the same threads, patched torch
    patched-threads-warm  and the drafters compile one after the other before they start
    processes             a process for each drafter (stock), all at once: the ideal

The drafters go round --replay batches kept on their device, so that their own speed is measured and
not the target's. Throughput is context tokens (batch times sequence) a second over the later half
of the steps, in Ktok/s. Time to the first step counts from when all workers are ready, warm-up
included. A steady step of each drafter is profiled at the end of each run, which tells whether
attention ran in its fused kernels and how long each kernel took.

Results are written to --json after each run, and --resume goes on with what is missing there. With
--budget S no run starts that would not end in time. An arm that hung is not repeated, unless
--repeat-hangs.

Exit code: 0 all runs done, 2 bad usage, 4 stopped by --budget with runs missing.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import benchlib

ROOT = Path(__file__).resolve().parent.parent
KERNEL_TOLERANCE = 0.05
KERNEL_SHARE = 0.01  # of the step's time on the device: kernels below it are not compared
# Operators of attention that is not fused; the loss uses _log_softmax, the layers mm.
UNFUSED = {"aten::softmax", "aten::_softmax", "aten::_safe_softmax", "aten::bmm", "aten::baddbmm"}
# The lowest share of its process's throughput that a thread may have, by preset.
THREAD_TO_PROCESS = {"qwen3-4b": 0.99, "qwen2.5-0.5b": 0.90}
# The same with more devices than two.
MANY_DEVICES_TO_PROCESSES = 0.97
# Of drafters that have one device, all together.
ONE_DEVICE_TO_PROCESSES = 0.99


@dataclass(frozen=True)
class Arm:
    name: str
    patched: bool
    options: tuple[str, ...]


ARMS = [
    Arm("reference", False, ("--workers", "sequential")),
    Arm("stock-threads", False, ("--workers", "threads")),
    Arm("stock-workaround", False, ("--workers", "threads", "--workaround")),
    Arm("patched-threads", True, ("--workers", "threads")),
    Arm("patched-threads-warm", True, ("--workers", "threads", "--warmup", "sequential")),
    Arm("processes", False, ("--workers", "processes")),
]


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = benchlib.Parser("drafters.py", __doc__)
    number, seconds = benchlib.positive_int, benchlib.positive_float
    benchlib.add_arm_options(parser)
    parser.add_argument("--preset", default="tiny", help="of the trainer (default tiny)")
    parser.add_argument(
        "--drafters", default="cpu,cpu", metavar="DEVICES", help="as the trainer's (cpu,cpu)"
    )
    parser.add_argument(
        "--targets", metavar="DEVICES", help="as the trainer's (default: each beside its drafter)"
    )
    parser.add_argument(
        "--features",
        choices=("eager", "fx"),
        default="eager",
        help="how targets run; with fx, they trace while drafters compile, which no stock arm "
        "survives (default eager)",
    )
    parser.add_argument("--steps", type=number, default=60, help="of a run (default 60)")
    parser.add_argument("--replay", type=number, default=8, help="batches to go round (default 8)")
    parser.add_argument("--repetitions", type=number, default=3, help="default 3")
    parser.add_argument(
        "--train-options", default="", metavar="WORDS", help="more options for the trainer, quoted"
    )
    parser.add_argument(
        "--hang-timeout", type=seconds, default=90.0, metavar="S",
        help="a run whose drafters end no step for so long hung (default 90)",
    )  # fmt: skip
    parser.add_argument(
        "--run-timeout", type=seconds, default=300.0, metavar="S", help="of a run (default 300)"
    )
    parser.add_argument("--budget", type=seconds, metavar="S", help="seconds for everything")
    parser.add_argument("--repeat-hangs", action="store_true", help="repeat an arm that hung")
    parser.add_argument(
        "--shared-caches", action="store_true", help="all runs share one compile cache"
    )
    parser.add_argument("--json", metavar="FILE", help="write the results to FILE")
    parser.add_argument("--resume", action="store_true", help="go on with --json FILE")
    parser.add_argument("--quiet", action="store_true", help="no progress lines")
    args = parser.parse_args(argv)
    args.parser = parser
    chosen = benchlib.chosen_arms(parser, args, [a.name for a in ARMS])
    args.arms = [a for a in ARMS if a.name in chosen]
    benchlib.check_patched(parser, args, any(a.patched for a in args.arms))
    if args.resume and not args.json:
        parser.error("--resume needs --json FILE")
    return args


# --- one run ----------------------------------------------------------------------------------


class Runner:
    """Starts the trainer for an arm and reads what it leaves."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.child: subprocess.Popen[str] | None = None

    def interpreter(self, patched: bool) -> tuple[str, dict[str, str]]:
        """The Python of an arm and its environment."""
        environment = dict(os.environ)
        if not patched:
            return self.args.stock, environment
        if self.args.patched_pythonpath:
            environment["PYTHONPATH"] = str(Path(self.args.patched_pythonpath).resolve())
        return self.args.patched or self.args.stock, environment

    def torch_facts(self, patched: bool) -> dict[str, Any]:
        """benchlib.torch_facts() of an arm's Python; RuntimeError where that fails."""
        python, environment = self.interpreter(patched)
        code = "import json, sys; sys.path.insert(0, sys.argv[1]); import benchlib; "
        code += "print(json.dumps(benchlib.torch_facts()))"
        try:
            done = subprocess.run(
                [python, "-c", code, str(Path(__file__).parent)],
                env=environment, cwd="/", capture_output=True, text=True,
            )  # fmt: skip
        except OSError as e:
            raise RuntimeError(f"{python}: {e.strerror}") from None
        if done.returncode:
            raise RuntimeError(f"{python}: {(done.stderr.strip().splitlines() or ['failed'])[-1]}")
        return json.loads(done.stdout.splitlines()[-1])

    def run(self, arm: Arm, repetition: int, timeout: float) -> dict[str, Any]:
        """One run of an arm: its outcome and figures."""
        args = self.args
        python, environment = self.interpreter(arm.patched)
        drafters, targets = args.drafters, args.targets
        if arm.name == "reference":
            drafters, targets = first_device(drafters), targets and first_device(targets)
        with tempfile.TemporaryDirectory(prefix="drafters-") as folder:
            metrics, profile = Path(folder) / "metrics.jsonl", Path(folder) / "profile.json"
            caches = Path(tempfile.gettempdir(), "drafters-caches") if args.shared_caches else None
            for name in ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"):
                environment[name] = str((caches or Path(folder)) / name.split("_")[0].lower())
            command = [python, "-m", "repro.dflash.train", "--preset", args.preset,
                       "--drafters", drafters, *(["--targets", targets] if targets else []),
                       "--steps", str(args.steps),
                       "--replay", str(args.replay), "--features", args.features,
                       "--eval-batches", "0", "--log-every", "0", "--hang-timeout",
                       str(args.hang_timeout), "--metrics", str(metrics), "--profile",
                       str(profile), *arm.options, *args.train_options.split()]  # fmt: skip
            log = Path(folder) / "log"
            start = time.monotonic()
            with log.open("w") as out:
                self.child = subprocess.Popen(
                    command, cwd=ROOT, env=environment, stdout=out, stderr=out, text=True,
                    start_new_session=True,
                )  # fmt: skip
                try:
                    code: int | None = self.child.wait(timeout)
                except subprocess.TimeoutExpired:
                    code = None
                finally:
                    self.kill()
            result = {
                "arm": arm.name,
                "repetition": repetition,
                "exit_code": code,
                "seconds": round(time.monotonic() - start, 1),
                "options": " ".join(command[3:]).replace(folder, "TMP"),
            }
            result |= outcome_of(metrics, code, log.read_text(errors="replace"))
            if result["outcome"] == "trained":
                result |= figures_of(metrics, processes="processes" in arm.options)
                if profile.exists():
                    result["profile"] = json.loads(profile.read_text())["drafters"]
                    for one in result["profile"]:
                        one["kernels"] = one["kernels"][:60]
                        one["operators"] = one["operators"][:60]
            return result

    def kill(self) -> None:
        """End the run's processes, all of them: compile workers and drafters too."""
        if self.child is None:
            return
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.child.pid, signal.SIGKILL)
        self.child.wait()


def first_device(devices: str) -> str:
    """``cuda:0-1`` is ``cuda:0``; ``cpu,cpu`` is ``cpu``."""
    return re.sub(r"-\d+$", "", devices.split(",")[0].strip())


def read_lines(metrics: Path) -> list[dict[str, Any]]:
    if not metrics.exists():
        return []
    lines = metrics.read_text().splitlines()
    return [json.loads(line) for line in lines if line.endswith("}")]


def outcome_of(metrics: Path, code: int | None, log: str) -> dict[str, Any]:
    """``outcome`` (trained, crashed, hung, not started) and, where there is one, ``error``."""
    last = ([e for e in read_lines(metrics) if e["event"] == "summary"] or [{}])[-1]
    tail = [line for line in log.strip().splitlines() if line.strip()][-1:] or [""]
    if code == 0:
        return {"outcome": "trained"}
    if code == 3 or code is None:
        return {"outcome": "hung", "error": last.get("error", "it did not end in time")}
    if code == 2:
        return {"outcome": "not started", "error": tail[0][:300]}
    error = last.get("error") or (f"signal {-code}" if code < 0 else tail[0])
    return {"outcome": "crashed", "error": error[:300], "known_bug": last.get("known_bug", False)}


def figures_of(metrics: Path, processes: bool) -> dict[str, Any]:
    """Throughput, time to the first step and memory, from the trainer's metrics."""
    events = read_lines(metrics)
    warmup = sum(e["seconds"] for e in events if e["event"] == "warmup")
    drafters = []
    memory: dict[str, int] = {}
    for e in events:
        if e["event"] != "trained":
            continue
        steps = [s for s in events if s["event"] == "step" and s["drafter"] == e["drafter"]]
        drafters.append(
            {
                "drafter": e["drafter"],
                "device": e["device"],
                "ktok_s": e["ktok_s"],
                "median_step_s": e["median_step_s"],
                "first_step_s": warmup + steps[0]["at_s"],
                "loss": steps[-1]["loss"],
                "slow_steps": slow_steps(steps),
            }
        )
        seen, device = e["peak_memory_bytes"], e["device"]
        # Threads share their device's allocator; of processes each has its own.
        memory[device] = memory.get(device, 0) + seen if processes else max(
            memory.get(device, 0), seen
        )  # fmt: skip
    drafters.sort(key=lambda d: d["drafter"])
    return {
        "drafters": drafters,
        "ktok_s": sum(d["ktok_s"] for d in drafters),
        "first_step_s": max(d["first_step_s"] for d in drafters),
        "warmup_s": warmup,
        "peak_memory_bytes": memory,
    }


def slow_steps(steps: list[dict[str, Any]]) -> int:
    """Steps of the later half that took more than three times their median: recompiles, stalls."""
    later = [s["step_s"] for s in steps[len(steps) // 2 :]]
    return sum(s > 3 * statistics.median(later) for s in later)


# --- kernels ----------------------------------------------------------------------------------


def kernel_times(rows: list[dict[str, Any]]) -> dict[str, float]:
    """Microseconds a step by kernel, without the numbers that Inductor appends to a name."""
    times: dict[str, float] = {}
    for row in rows:
        name = re.sub(r"(_\d+)+$", "", row["name"])
        times[name] = times.get(name, 0.0) + row["us"]
    return times


def is_attention(name: str, backward: bool) -> bool:
    """Whether an Inductor kernel is flex_attention's fused forward or backward template."""
    return name.startswith("triton_tem_") and "flex_attention" in name and (
        ("backward" in name) == backward
    )  # fmt: skip


def full_speed(profile: dict[str, Any], reference: dict[str, Any] | None) -> dict[str, Any]:
    """Whether a drafter's steady step ran at full speed, and the figures that say so.

    It did if flex_attention's fused forward and backward kernels are there, no operator of unfused
    attention is, and each kernel of more than 1 % of the step takes at most 5 % more than in the
    reference.
    """
    times = kernel_times(profile["kernels"])
    forward = sum(us for name, us in times.items() if is_attention(name, backward=False))
    backward = sum(us for name, us in times.items() if is_attention(name, backward=True))
    unfused = sorted(o["name"] for o in profile["operators"] if o["name"] in UNFUSED)
    result: dict[str, Any] = {
        "drafter": profile["drafter"],
        "device": profile["device"],
        "forward_us": forward,
        "backward_us": backward,
        "all_us": sum(times.values()),
        "unfused": unfused,
        "slower": {},
    }
    if reference is not None:
        wanted = kernel_times(reference["kernels"])
        floor = KERNEL_SHARE * sum(wanted.values())
        result["compared"] = sum(us >= floor for us in wanted.values())
        result["slower"] = {
            name: round(times.get(name, 0.0) / us, 3)
            for name, us in wanted.items()
            if us >= floor and not times.get(name, 0.0) <= us * (1 + KERNEL_TOLERANCE)
        }
        result["missing"] = sorted(n for n, us in wanted.items() if us >= floor and n not in times)
    result["full_speed"] = bool(
        forward and backward and not unfused and not result["slower"] and not result.get("missing")
    )
    return result


# --- what the runs say together ---------------------------------------------------------------


def median_of(runs: list[dict[str, Any]], read: Any) -> float | None:
    values = [read(r) for r in runs]
    return statistics.median(values) if values else None


def median_profile(runs: list[dict[str, Any]], drafter: int) -> dict[str, Any] | None:
    """A drafter's profile over the repetitions: each kernel's median time."""
    profiles = [p for r in runs for p in r.get("profile", []) if p["drafter"] == drafter]
    if not profiles:
        return None
    times = [kernel_times(p["kernels"]) for p in profiles]
    names = dict.fromkeys(name for t in times for name in t)
    kernels = [{"name": n, "us": statistics.median(t.get(n, 0.0) for t in times)} for n in names]
    operators = [o for p in profiles for o in p["operators"]]
    return {**profiles[0], "kernels": kernels, "operators": operators}


def summarize(report: dict[str, Any]) -> None:
    """Add ``arms``, medians and proofs by arm, and ``checks``, the thresholds, to ``report``."""
    arms: dict[str, Any] = {}
    by_arm = {a.name: [r for r in report["runs"] if r["arm"] == a.name] for a in ARMS}
    trained = {n: [r for r in runs if r["outcome"] == "trained"] for n, runs in by_arm.items()}
    reference = median_profile(trained["reference"], 0)
    for name, runs in by_arm.items():
        if not runs:
            continue
        good = trained[name]
        outcomes = [r["outcome"] for r in runs]
        arm: dict[str, Any] = {
            "outcomes": {o: outcomes.count(o) for o in dict.fromkeys(outcomes)},
            "error": next((r["error"] for r in runs if "error" in r), None),
            "ktok_s": median_of(good, lambda r: r["ktok_s"]),
            "first_step_s": median_of(good, lambda r: r["first_step_s"]),
            "peak_memory_bytes": median_of(good, lambda r: sum(r["peak_memory_bytes"].values())),
            "drafters": [],
        }
        for i in range(len(good[0]["drafters"]) if good else 0):
            mine = [r["drafters"][i] for r in good]
            profile = median_profile(good, i)
            arm["drafters"].append(
                {
                    "device": mine[0]["device"],
                    "ktok_s": median_of(mine, lambda d: d["ktok_s"]),
                    "ktok_s_all": [d["ktok_s"] for d in mine],
                    "first_step_s": median_of(mine, lambda d: d["first_step_s"]),
                    "kernels": full_speed(profile, reference)
                    if profile and profile["kernels"]
                    else None,
                }
            )
        arms[name] = arm
    report["arms"] = arms
    report["checks"] = checks(arms, report["preset"], report["caches"])


def checks(arms: dict[str, Any], preset: str, caches: str) -> list[dict[str, Any]]:
    """The thresholds of threads against processes: name, value, limit, holds."""
    found = []
    # Runs that share caches find what earlier ones left there, each arm something else: stock and
    # patched torch have entries of their own, and so has the drafter that compiles second.
    cold = caches == "fresh"
    threads, ideal = arms.get("patched-threads"), arms.get("processes")
    if threads and ideal and threads["ktok_s"] and ideal["ktok_s"]:
        devices = {d["device"] for d in ideal["drafters"]}
        # How drafters on one GPU divide it between them is the scheduler's affair.
        if len(devices) < len(ideal["drafters"]):
            found.append(at_least("threads / processes, in all", threads["ktok_s"] /
                                  ideal["ktok_s"], ONE_DEVICE_TO_PROCESSES))  # fmt: skip
        else:
            many = len(devices) > 2
            limit = MANY_DEVICES_TO_PROCESSES if many else THREAD_TO_PROCESS.get(preset, 0.90)
            found += [
                at_least(f"thread / process, drafter {i}", t["ktok_s"] / p["ktok_s"], limit)
                for i, (t, p) in enumerate(zip(threads["drafters"], ideal["drafters"], strict=True))
            ]
            if cold:
                ratio = threads["first_step_s"] / ideal["first_step_s"]
                found.append(at_most("first step, threads / processes", ratio, 1.15))
    alone = arms.get("reference")
    if cold and threads and alone and threads["first_step_s"] and alone["first_step_s"]:
        devices = {d["device"] for d in threads["drafters"]}
        if len(devices) == 1:
            ratio = threads["first_step_s"] / alone["first_step_s"]
            found.append(at_most("first step, threads / one alone", ratio, 1.3))
    for name in ("patched-threads", "patched-threads-warm"):
        proofs = [d["kernels"] for d in arms.get(name, {}).get("drafters", [])]
        if proofs and all(proofs):
            found.append({"name": f"kernels at full speed, {name}", "value": None, "limit": None,
                          "holds": all(p["full_speed"] for p in proofs)})  # fmt: skip
    return found


def at_least(name: str, value: float, limit: float) -> dict[str, Any]:
    return {"name": name, "value": value, "limit": f">= {limit:.2f}", "holds": value >= limit}


def at_most(name: str, value: float, limit: float) -> dict[str, Any]:
    return {"name": name, "value": value, "limit": f"<= {limit:.2f}", "holds": value <= limit}


def show(report: dict[str, Any]) -> None:
    """Print the tables."""
    rows = []
    for name, arm in report["arms"].items():
        outcome = ", ".join(f"{n} {o}" for o, n in arm["outcomes"].items())
        each = " ".join(f"{d['ktok_s']:.1f}" for d in arm["drafters"])
        kernels = [d["kernels"] for d in arm["drafters"] if d["kernels"]]
        speed = ("yes" if all(k["full_speed"] for k in kernels) else "no") if kernels else "-"
        figures = ["-"] * 4
        if arm["ktok_s"]:
            memory = arm["peak_memory_bytes"] / 2**30
            figures = [each, f"{arm['ktok_s']:.1f}", f"{arm['first_step_s']:.1f}", f"{memory:.1f}"]
        rows.append([name, outcome, *figures, speed])
    header = ("arm", "outcome", "Ktok/s each", "in all", "first step, s", "memory, GiB",
              "full-speed kernels")  # fmt: skip
    print(benchlib.table(header, rows))
    for name, arm in report["arms"].items():
        if arm["error"]:
            print(f"{name}: {arm['error'][:160]}")
        for d in arm["drafters"]:
            if k := d["kernels"]:
                print(f"{name}, {d['device']}: flex_attention forward {k['forward_us']:.0f} us, "
                      f"backward {k['backward_us']:.0f} us, all kernels {k['all_us']:.0f} us a "
                      f"step; unfused: {', '.join(k['unfused']) or 'none'}; more than 5 % slower "
                      f"than alone: {k['slower'] or 'none'}; missing: "
                      f"{k.get('missing') or 'none'}")  # fmt: skip
    benchlib.print_checks(report["checks"])


# --- everything -------------------------------------------------------------------------------


def earlier_runs(args: argparse.Namespace, settings: dict[str, Any]) -> list[dict[str, Any]]:
    """The runs of --json FILE, for --resume; none where the file is not there yet."""
    path = Path(args.json)
    if not args.resume or not path.exists():
        return []
    try:
        found = json.loads(path.read_text())
        other = next((k for k, v in settings.items() if found[k] != v), None)
    except (OSError, ValueError, KeyError) as e:
        args.parser.error(f"--resume: {path} is not a results file of this program ({e})")
    if other:
        args.parser.error(f"--resume: {path} was made with another {other}: {found[other]}")
    return found["runs"]


def main(argv: Sequence[str] | None = None) -> int:
    args = parse_arguments(argv)
    began = time.monotonic()
    say = benchlib.progress(args.quiet)
    runner = Runner(args)
    settings: dict[str, Any] = {
        "preset": args.preset,
        "devices": args.drafters,
        "targets": args.targets,
        "steps": args.steps,
        "replay": args.replay,
        "features": args.features,
        "caches": "shared" if args.shared_caches else "fresh",
        "train_options": args.train_options,
    }
    try:
        facts = {p: runner.torch_facts(p) for p in sorted({a.patched for a in args.arms})}
    except RuntimeError as e:
        args.parser.error(str(e))
    benchlib.check_facts(args.parser, facts)
    report: dict[str, Any] = {
        "benchmark": "drafters",
        **benchlib.machine_facts(),
        "torch": {"patched" if p else "stock": f for p, f in facts.items()},
        **settings,
        "runs": earlier_runs(args, settings) if args.json else [],
    }

    def done(arm: Arm, repetition: int) -> bool:
        mine = [r for r in report["runs"] if r["arm"] == arm.name]
        if any(r["outcome"] == "hung" for r in mine) and not args.repeat_hangs:
            return True
        return any(r["repetition"] == repetition for r in mine)

    out_of_time = False
    try:
        for repetition in range(args.repetitions):
            for arm in args.arms:
                if done(arm, repetition) or out_of_time:
                    continue
                timeout = args.run_timeout
                if args.budget:
                    left = args.budget - (time.monotonic() - began)
                    took = [r["seconds"] for r in report["runs"] if r["arm"] == arm.name]
                    took = took or [r["seconds"] for r in report["runs"]]
                    if left < max([10.0, *took]):
                        out_of_time = True
                        continue
                    timeout = min(timeout, left)
                say(f"{arm.name}, repetition {repetition + 1} of {args.repetitions}")
                result = runner.run(arm, repetition, timeout)
                if result["exit_code"] is None and timeout < args.run_timeout:
                    out_of_time = True  # cut short by the budget: says nothing of the arm
                    continue
                rate = f", {result['ktok_s']:.1f} Ktok/s" if "ktok_s" in result else ""
                why = f": {result['error'][:100]}" if "error" in result else ""
                say(f"    {result['outcome']} in {result['seconds']:.0f} s{rate}{why}")
                if result["outcome"] == "not started":
                    args.parser.error(f"the trainer did not start: {result['error']}")
                report["runs"].append(result)
                summarize(report)
                if args.json:
                    benchlib.write_json(args.json, report)
    except KeyboardInterrupt:
        runner.kill()
        print("drafters.py: interrupted; what is done is in --json", file=sys.stderr)
        return 130
    summarize(report)
    show(report)
    if out_of_time:
        print("drafters.py: out of time; --resume does the runs that are missing", file=sys.stderr)
        return 4
    return 0


if __name__ == "__main__":
    sys.exit(main())
