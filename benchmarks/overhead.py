#!/usr/bin/env python3
"""What the patches cost or save: stock against patched torch, side by side in one run.

    overhead.py --stock PY --patched PY [--stock PY --patched PY ...]

PY is a Python interpreter, or a folder with torch/ in it, to put first on PYTHONPATH of the pair's
other interpreter, or of --python where both are folders. Each pair must have the same release.
Compare like with like: two environments, or two folders. A folder against an environment differs
by some percent already where the two hold the same files.

For each pair, --processes times: one worker process of each arm is started, and for each benchmark
the two take turns, --rounds times, the first one changing each time, while the other one waits.
Each turn is one torch.utils.benchmark measurement, in CPU time of the measured thread. A ratio is
the median of the ratios of turns that are next to each other, so a machine that slows down for a
while slows both arms.

Exit code: 0, or with --check 1 where a threshold is missed; 2 bad usage or a worker died.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import benchlib

# --- the benchmarks: each returns a function that measures one turn, in seconds a call ----------

Measure = Callable[[float], float]


@dataclass(frozen=True)
class Benchmark:
    """``limit(release)`` is the highest allowed ratio patched / stock, None where there is none."""

    name: str
    build: Callable[[], Measure]
    limit: Callable[[tuple[int, int]], float | None]


def _no_limit(release: tuple[int, int]) -> float | None:
    return None


def timer(stmt: str, names: dict[str, Any]) -> Measure:
    from torch.utils.benchmark import Timer

    # The thread's own CPU time: whatever else the machine does meanwhile is not counted.
    made = Timer(stmt, globals=names, timer=time.thread_time)
    return lambda seconds: made.blocked_autorange(min_run_time=seconds).median


def in_new_thread(measure: Measure) -> Measure:
    """The same on a thread that has never traced or compiled anything, as workers are."""

    def run(seconds: float) -> float:
        result: list[float] = []
        thread = threading.Thread(target=lambda: result.append(measure(seconds)))
        thread.start()
        thread.join()
        return result[0]

    return run


def _compiled_nothing() -> Callable[[Any], Any]:
    """A compiled function whose graph does nothing: the cost of the call alone."""
    import torch

    @torch.compile(backend=lambda gm, inputs: lambda *args: args)
    def fn(x: Any) -> Any:
        return x + 1

    return fn


def compiled_call() -> Measure:
    import torch

    fn, x = _compiled_nothing(), torch.zeros(1)
    fn(x)
    return in_new_thread(timer("fn(x)", {"fn": fn, "x": x}))


def compiled_call_after_trace() -> Measure:
    import torch

    fn, x = _compiled_nothing(), torch.zeros(1)
    fn(x)
    measure = timer("fn(x)", {"fn": fn, "x": x})

    def run(seconds: float) -> float:
        torch.fx.symbolic_trace(torch.nn.Linear(1, 1))
        return measure(seconds)

    return in_new_thread(run)


def is_fx_symbolic_tracing() -> Measure:
    from torch.fx._symbolic_trace import is_fx_symbolic_tracing

    return in_new_thread(timer("f()", {"f": is_fx_symbolic_tracing}))


def is_compiling() -> Measure:
    import torch

    return in_new_thread(timer("f()", {"f": torch.compiler.is_compiling}))


def _traced(model: Any) -> Measure:
    import torch.fx

    return timer("trace(model)", {"trace": torch.fx.symbolic_trace, "model": model})


def trace_small() -> Measure:
    from torch import nn

    return _traced(nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4)))


def trace_120_modules() -> Measure:
    from torch import nn

    return _traced(nn.Sequential(*(nn.Linear(4, 4) for _ in range(120))))


def trace_200_parameters() -> Measure:
    import torch
    from torch import nn

    class Parameters(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            for i in range(200):
                self.register_parameter(f"p{i}", nn.Parameter(torch.zeros(2)))

        def forward(self, x: Any) -> Any:
            for i in range(200):
                x = x + getattr(self, f"p{i}")
            return x

    return _traced(Parameters())


def make_fx() -> Measure:
    import torch
    from torch import nn
    from torch.fx.experimental.proxy_tensor import make_fx

    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
    return timer("make_fx(model)(x)", {"make_fx": make_fx, "model": model, "x": torch.zeros(2, 4)})


def eager_call() -> Measure:
    import torch

    return timer("m(x)", {"m": torch.nn.Identity(), "x": torch.zeros(1)})


def eager_linear() -> Measure:
    import torch

    return timer("m(x)", {"m": torch.nn.Linear(4, 4), "x": torch.zeros(1, 4)})


def backward_custom_functions() -> Measure:
    import torch

    class Plus(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Any) -> Any:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, *grads: Any) -> Any:
            return grads[0]

    leaf = torch.zeros(1, requires_grad=True)
    out = leaf
    for _ in range(1000):
        out = Plus.apply(out)
    return timer("grad(out, leaf, retain_graph=True)", {"grad": torch.autograd.grad,
                 "out": out, "leaf": leaf})  # fmt: skip


@contextlib.contextmanager
def trace_alive_elsewhere() -> Iterator[None]:
    """Another thread is in the middle of a symbolic_trace and stays there."""
    import torch
    from torch import nn

    inside, release = threading.Event(), threading.Event()

    class Held(nn.Module):
        def forward(self, x: Any) -> Any:
            inside.set()
            release.wait()
            return x + 1

    thread = threading.Thread(target=lambda: torch.fx.symbolic_trace(Held()), daemon=True)
    thread.start()
    inside.wait()
    try:
        yield
    finally:
        release.set()
        thread.join()


def trace_elsewhere_extra(build: Callable[[], Measure]) -> Callable[[], Measure]:
    """What a call costs more while another thread traces than with no trace alive, in turns."""

    def built() -> Measure:
        measure = build()

        def run(seconds: float) -> float:
            extra = []
            for _ in range(3):
                alone = measure(seconds / 6)
                with trace_alive_elsewhere():
                    extra.append(measure(seconds / 6) - alone)
            return statistics.median(extra)

        return run

    return built


def _call_limit(release: tuple[int, int]) -> float | None:
    # From 2.14 on, the flag was a threading.local whose read costs more than half a microsecond.
    return 0.90 if release >= (2, 14) else 1.02


BENCHMARKS = [
    Benchmark("compiled call", compiled_call, _call_limit),
    Benchmark("compiled call, thread has traced", compiled_call_after_trace, _no_limit),
    Benchmark("is_fx_symbolic_tracing()", is_fx_symbolic_tracing, _no_limit),
    Benchmark("torch.compiler.is_compiling()", is_compiling, _no_limit),
    Benchmark("symbolic_trace, 3 modules", trace_small, _no_limit),
    Benchmark("symbolic_trace, 120 modules", trace_120_modules, lambda release: 1.03),
    Benchmark("symbolic_trace, 200 parameters", trace_200_parameters, lambda release: 1.03),
    Benchmark("make_fx", make_fx, _no_limit),
    Benchmark("eager module call", eager_call, _no_limit),
    Benchmark("eager nn.Linear call", eager_linear, _no_limit),
    Benchmark("backward, 1000 custom Functions", backward_custom_functions, lambda release: 1.02),
]

# On the patched arm only: on stock torch such a call goes into the other thread's trace and raises.
EXTRA_LIMIT = 1.5e-6
EXTRAS = [
    Benchmark("eager module call, trace elsewhere", trace_elsewhere_extra(eager_call), _no_limit),
    Benchmark(
        "eager nn.Linear call, trace elsewhere", trace_elsewhere_extra(eager_linear), _no_limit
    ),
]


# --- worker -----------------------------------------------------------------------------------


def worker() -> None:
    """Serve measurements: one JSON request a line on stdin, one JSON reply a line on stdout."""
    reply_to = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what torch prints must not mix with the replies
    import warnings

    import torch
    import torch._dynamo

    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    known = {b.name: b for b in [*BENCHMARKS, *EXTRAS]}
    built: dict[str, Measure] = {}
    module_call = torch.nn.Module.__call__
    print(json.dumps(benchlib.torch_facts()), file=reply_to)
    for line in sys.stdin:
        request = json.loads(line)
        name = request["name"]
        try:
            if name not in built:
                built[name] = known[name].build()
                built[name](0.01)  # warm up
            reply: dict[str, Any] = {"seconds": built[name](request["min_run_time"])}
            if torch.nn.Module.__call__ is not module_call:
                reply = {"error": "nn.Module.__call__ is not the original object any more"}
        except Exception as e:
            reply = {"error": f"{type(e).__name__}: {str(e).splitlines()[0] if str(e) else ''}"}
        print(json.dumps(reply), file=reply_to)


class Arm:
    """A worker process of one arm."""

    def __init__(self, python: str, pythonpath: str | None) -> None:
        environment = dict(os.environ)
        if pythonpath:
            environment["PYTHONPATH"] = pythonpath
        self.process = subprocess.Popen(
            [python, str(Path(__file__).resolve()), "--worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
            cwd="/",  # a torch/ folder beside the caller is not to be imported
        )
        self.facts: dict[str, Any] = self._read()

    def _read(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            assert self.process.stderr is not None
            tail = self.process.stderr.read().strip().splitlines()[-1:]
            raise WorkerDied(f"{self.process.args[0]}: worker died: {' '.join(tail)}")
        return json.loads(line)

    def measure(self, name: str, min_run_time: float) -> float:
        """Seconds a call; Failed where the benchmark raises, WorkerDied where the process ends."""
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            print(
                json.dumps({"name": name, "min_run_time": min_run_time}),
                file=self.process.stdin,
                flush=True,
            )
        reply = self._read()
        if "error" in reply:
            raise Failed(reply["error"])
        return reply["seconds"]

    def close(self) -> None:
        self.process.kill()
        self.process.communicate()


class WorkerDied(Exception):
    pass


class Failed(Exception):
    pass


# --- parent -----------------------------------------------------------------------------------


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = benchlib.Parser("overhead.py", __doc__)
    parser.add_argument("--stock", action="append", metavar="PY", help="a stock arm; may repeat")
    parser.add_argument("--patched", action="append", metavar="PY", help="its patched arm")
    parser.add_argument(
        "--python", default=sys.executable, metavar="PY", help="for two folders (default: this one)"
    )
    number = benchlib.positive_int
    parser.add_argument("--processes", type=number, default=3, help="of each arm (default 3)")
    parser.add_argument(
        "--rounds", type=number, default=5, help="turns a process and benchmark (default 5)"
    )
    parser.add_argument(
        "--min-run-time",
        type=benchlib.positive_float,
        default=0.3,
        metavar="S",
        help="seconds of one measurement (default 0.3)",
    )
    parser.add_argument("--only", metavar="WORD", help="only benchmarks whose name holds WORD")
    parser.add_argument("--check", action="store_true", help="exit 1 where a threshold is missed")
    parser.add_argument("--json", metavar="FILE", help="write the results to FILE")
    parser.add_argument("--quiet", action="store_true", help="no progress lines")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    args.parser = parser
    if not args.worker and (
        not args.stock or not args.patched or len(args.stock) != len(args.patched)
    ):
        parser.error("name as many --patched arms as --stock arms, and at least one of each")
    return args


Runnable = tuple[str, str | None]  # an interpreter and its PYTHONPATH


def resolve(stock: str, patched: str, python: str) -> tuple[Runnable, Runnable]:
    """The two arms of a pair; ``python`` runs two folders. ValueError where one is neither."""

    def one(name: str, other: str) -> Runnable:
        if Path(name).is_dir():
            if not (Path(name) / "torch").is_dir():
                raise ValueError(f"{name}: a folder without torch/ in it")
            return python if Path(other).is_dir() else other, str(Path(name).resolve())
        if not os.access(name, os.X_OK):
            raise ValueError(f"{name}: neither a Python interpreter nor a folder")
        return name, None

    return one(stock, patched), one(patched, stock)


def release_of(version: str) -> tuple[int, int]:
    major, minor = version.split(".")[:2]
    return int(major), int(minor)


def measure_pair(
    arms: tuple[Runnable, Runnable],
    args: argparse.Namespace,
    say: Callable[[str], None],
) -> dict[str, Any]:
    """All benchmarks of one pair: the facts of both arms and every measurement."""
    turns: dict[str, list[tuple[float, float]]] = {}
    extras: dict[str, list[float]] = {}
    failures: dict[str, str] = {}
    facts: list[dict[str, Any]] = []
    chosen = [b for b in BENCHMARKS if not args.only or args.only in b.name]
    chosen_extras = [b for b in EXTRAS if not args.only or args.only in b.name]
    for p in range(args.processes):
        pair: list[Arm] = []
        try:
            pair += [Arm(*arms[0])]
            pair += [Arm(*arms[1])]
            facts = [a.facts for a in pair]
            versions = [f["torch"] for f in facts]
            if versions[0].split("+")[0] != versions[1].split("+")[0]:
                raise WorkerDied(f"two releases in one pair: {versions[0]} and {versions[1]}")
            for b in chosen:
                say(f"torch {versions[0]}, process {p + 1} of {args.processes}: {b.name}")
                for r in range(args.rounds):
                    first = (p + r) % 2
                    seconds = [0.0, 0.0]
                    for i in (first, 1 - first):
                        seconds[i] = pair[i].measure(b.name, args.min_run_time)
                    turns.setdefault(b.name, []).append((seconds[0], seconds[1]))
            for b in chosen_extras:
                say(f"torch {versions[0]}, process {p + 1} of {args.processes}: {b.name}")
                try:
                    for _ in range(args.rounds):
                        seconds_more = pair[1].measure(b.name, args.min_run_time)
                        extras.setdefault(b.name, []).append(seconds_more)
                except Failed as e:
                    failures[b.name] = str(e)
        finally:
            for a in pair:
                a.close()
    release = release_of(facts[0]["torch"])
    return {
        "stock": facts[0],
        "patched": facts[1],
        "benchmarks": [row(b, turns[b.name], release) for b in chosen],
        "trace_elsewhere": [
            extra_row(b, extras.get(b.name, []), failures.get(b.name)) for b in chosen_extras
        ],
    }


def extra_row(b: Benchmark, values: list[float], failure: str | None) -> dict[str, Any]:
    extra = None if failure else statistics.median(values)
    return {
        "name": b.name,
        "extra_seconds": extra,
        "limit": EXTRA_LIMIT,
        "holds": extra is not None and extra <= EXTRA_LIMIT,
        "failure": failure,
        "turns": values,
    }


def row(b: Benchmark, turns: list[tuple[float, float]], release: tuple[int, int]) -> dict[str, Any]:
    ratios = sorted(patched / stock for stock, patched in turns)
    quarters = statistics.quantiles(ratios, n=4) if len(ratios) > 1 else [ratios[0]] * 3
    limit = b.limit(release)
    ratio = statistics.median(ratios)
    return {
        "name": b.name,
        "stock_seconds": statistics.median(s for s, _ in turns),
        "patched_seconds": statistics.median(p for _, p in turns),
        "ratio": ratio,
        "ratio_quartiles": [quarters[0], quarters[2]],
        "limit": limit,
        "holds": None if limit is None else ratio <= limit,
        "turns": turns,
    }


def readable(seconds: float) -> str:
    for unit, scale in (("s", 1.0), ("ms", 1e3), ("us", 1e6)):
        if abs(seconds) * scale >= 1:
            return f"{seconds * scale:.3g} {unit}"
    return f"{seconds * 1e9:.0f} ns"


def show(pair: dict[str, Any]) -> None:
    """Print the table of one pair."""
    verdict = {None: "", True: "holds", False: "MISSED"}
    print(f"\ntorch {pair['stock']['torch']} against {pair['patched']['torch']}")
    rows = [
        (
            b["name"],
            readable(b["stock_seconds"]),
            readable(b["patched_seconds"]),
            f"{b['ratio']:.3f}",
            f"{b['ratio_quartiles'][0]:.3f}-{b['ratio_quartiles'][1]:.3f}",
            "" if b["limit"] is None else f"{b['limit']:.2f}",
            verdict[b["holds"]],
        )
        for b in pair["benchmarks"]
    ]
    for e in pair["trace_elsewhere"]:
        extra = "raises" if e["failure"] else f"+{readable(e['extra_seconds'])}"
        limit = f"+{readable(e['limit'])}"
        rows.append((e["name"], "raises", extra, "", "", limit, verdict[e["holds"]]))
    header = ("benchmark", "stock", "patched", "ratio", "quartiles", "limit", "")
    print(benchlib.table(header, rows))


def main(argv: Sequence[str] | None = None) -> int:
    args = parse_arguments(argv)
    if args.worker:
        worker()
        return 0
    try:
        arms = [resolve(s, p, args.python) for s, p in zip(args.stock, args.patched, strict=True)]
    except ValueError as e:
        args.parser.error(str(e))
    start = time.monotonic()

    def say(text: str) -> None:
        if not args.quiet:
            print(f"[{time.monotonic() - start:5.0f} s] {text}", file=sys.stderr, flush=True)

    facts = benchlib.machine_facts()
    report = {"benchmark": "overhead", **facts, "pairs": []}
    for pair in arms:
        try:
            report["pairs"].append(measure_pair(pair, args, say))
        except (WorkerDied, Failed) as e:
            print(f"overhead.py: {e}", file=sys.stderr)
            return 2
        if args.json:
            benchlib.write_json(args.json, report)
    print(f"{facts['machine']}, {facts['cores']} cores, Python {facts['python']}, {facts['date']}")
    for pair in report["pairs"]:
        show(pair)
    missed = [
        x["name"]
        for pair in report["pairs"]
        for x in [*pair["benchmarks"], *pair["trace_elsewhere"]]
        if x["holds"] is False
    ]
    return int(bool(missed) and args.check)


if __name__ == "__main__":
    sys.exit(main())
