#!/usr/bin/env python3
"""Time to the first step of threads that compile flex_attention at once, and how they end.

    first_step.py --devices cuda:0 cuda:0x3 cuda:0-1 --patched-pythonpath DIR --code own shared
    first_step.py --devices cuda:0x6 --arms patched-threads --side-by-side 5 --repetitions 10

A run is a fresh process in which each worker has a model of its own (layers of projections,
flex_attention under a causal block mask and an MLP), runs it forward and backward at several
sequence lengths, and compares outputs and gradients with scaled_dot_product_attention in float32.
--devices takes one or more sets of devices, each set a run's workers: cuda:0-1 is a worker on each
of two GPUs, cuda:0x3 three on one, cuda:0-1x3 three on each of two; ARM=SET is for that arm alone.
Arms, interleaved:

    stock-threads     a thread for each worker, stock torch
    stock-workaround  the same with torch._dynamo.config.force_compile_during_fx_trace
    patched-threads   the same threads, patched torch
    processes         a process for each worker (stock): what threads are compared with

Time to the first step counts from when all workers of a run have torch, their device and their
model, up to the end of the first forward and backward of the last of them. --caches off: nothing
compiled is kept; empty: each run begins with an empty cache that its workers share, as a program
does at its very first start; on: it finds what an earlier run of its arm, not counted, left. --code
shared: all threads call the same code, which is compiled once if they share it; own: each has a
code object of its own. Outcomes: ok, wrong (results differ), raised, crashed (the process died),
hung (--timeout passed; the stacks of all threads are in --json). What a process spent in the phases
of its compilations, as dynamo_timed has it, is in --json too, and of some below the table.

Exit code: 0 all runs done, whatever their outcome, 2 bad usage, 4 stopped by --budget.
"""

from __future__ import annotations

import argparse
import collections
import concurrent.futures
import contextlib
import copy
import faulthandler
import itertools
import json
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import types
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import benchlib
import drafters

ARMS = ("stock-threads", "stock-workaround", "patched-threads", "processes")
WORST_FIRST = ("hung", "crashed", "raised", "wrong", "ok")
# Largest norm of the difference to the reference over the reference's; a wrong mask gives about 1.
TOLERANCE = {"float32": 1e-2, "bfloat16": 5e-2}
STACKS_KEPT = 30_000  # characters
PHASES = {  # some of dynamo_timed's, which lie in one another
    "_compile.compile_inner": "compiling frames",
    "compile_fx.<locals>.bw_compiler": "backwards",
    "async_compile.precompile": "in both, Triton in this process",
    "async_compile.wait": "waiting for workers",
}
# Limits on the time to the first step, as ratios.
ONE_DEVICE_LIMIT = 1.3  # three threads with the same code to one alone, caches off
TWO_DEVICES_LIMIT = 1.15  # two threads on two devices to two processes


def parse_devices(text: str) -> list[str]:
    """``cuda:0-1x2`` is cuda:0, cuda:1, cuda:0, cuda:1; parts are separated by commas.

    Raises:
        argparse.ArgumentTypeError: not a set of devices.
    """
    devices: list[str] = []
    for part in text.split(","):
        found = re.fullmatch(r"(cpu|cuda:(\d+)(?:-(\d+))?)(?:x([1-9]\d*))?", part.strip())
        if not found:
            raise argparse.ArgumentTypeError(
                f"unknown devices {part.strip()!r}: use cpu, cuda:N or cuda:N-M, and x3 for three "
                "workers on each"
            )
        names = ["cpu"]
        if found[2]:
            first, last = int(found[2]), int(found[3] or found[2])
            if last < first:
                raise argparse.ArgumentTypeError(f"{part.strip()}: the range runs backwards")
            names = [f"cuda:{i}" for i in range(first, last + 1)]
        devices += names * int(found[4] or 1)
    return devices


def parse_set(text: str) -> tuple[str | None, tuple[str, ...]]:
    """``ARM=SET`` or ``SET``: the one arm that the set is for, if there is one, and its devices.

    Raises:
        argparse.ArgumentTypeError: not a set of devices, or no such arm.
    """
    arm, separator, devices = text.rpartition("=")
    if separator and arm not in ARMS:
        raise argparse.ArgumentTypeError(f"unknown arm {arm!r}; there are {', '.join(ARMS)}")
    return arm or None, tuple(parse_devices(devices))


def parse_lengths(text: str) -> list[int]:
    lengths = [benchlib.positive_int(part) for part in text.split(",")]
    if any(length % 128 for length in lengths):
        raise argparse.ArgumentTypeError("lengths are multiples of 128, the block mask's block")
    return lengths


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = benchlib.Parser("first_step.py", __doc__)
    number, seconds = benchlib.positive_int, benchlib.positive_float
    parser.add_argument(
        "--devices", nargs="+", default=["cpu", "cpux3"], metavar="SET", help="default: cpu cpux3"
    )
    benchlib.add_arm_options(parser)
    parser.add_argument("--caches", nargs="+", choices=("on", "empty", "off"), default=["off"])
    parser.add_argument("--code", nargs="+", choices=("own", "shared"), default=["own"])
    parser.add_argument(
        "--compile",
        choices=("model", "attention"),
        default="model",
        help="what torch.compile gets: the whole model, or flex_attention alone",
    )
    parser.add_argument("--backend", default="inductor", help="of torch.compile (inductor)")
    parser.add_argument(
        "--forward-only", action="store_true",
        help="no backward; flex_attention has none on CPU, so this holds there anyway",
    )  # fmt: skip
    parser.add_argument("--layers", type=number, default=2, help="default 2")
    parser.add_argument("--hidden", type=number, default=256, help="default 256")
    parser.add_argument("--head-dim", type=number, default=64, help="default 64")
    parser.add_argument("--batch", type=number, default=2, help="default 2")
    parser.add_argument(
        "--lengths", type=parse_lengths, default=[256, 384, 640, 512], metavar="N,N",
        help="sequence length of each step (default 256,384,640,512)",
    )  # fmt: skip
    parser.add_argument("--repetitions", type=number, default=3, help="default 3")
    parser.add_argument(
        "--side-by-side", type=number, default=1, metavar="K",
        help="runs at the same time (default 1; more tells outcomes, not times)",
    )  # fmt: skip
    parser.add_argument(
        "--timeout", type=seconds, default=180.0, metavar="S", help="of a run (default 180)"
    )
    parser.add_argument(
        "--budget", type=seconds, metavar="S", help="start no run after so many seconds"
    )
    parser.add_argument(
        "--switch-interval", type=seconds, default=sys.getswitchinterval(), metavar="S",
        help="after which a thread that computes in Python gives another one its turn; each "
        "operation of PyTorch waits for one (sys.setswitchinterval, Python's own is 0.005)",
    )  # fmt: skip
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", metavar="FILE", help="write the results to FILE")
    parser.add_argument("--quiet", action="store_true", help="no progress lines")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    args.parser = parser
    if args.worker:
        return args
    try:
        args.sets = [parse_set(text) for text in args.devices]
    except argparse.ArgumentTypeError as e:
        parser.error(f"--devices: {e}")
    if args.hidden % args.head_dim:
        parser.error(f"--hidden {args.hidden} is not a multiple of --head-dim {args.head_dim}")
    args.arms = benchlib.chosen_arms(parser, args, list(ARMS))
    if all(only for only, _ in args.sets):
        args.arms = [arm for arm in args.arms if arm in {only for only, _ in args.sets}]
    if not args.arms:
        parser.error("--devices and --arms leave no arm")
    benchlib.check_patched(parser, args, "patched-threads" in args.arms)
    return args


# --- in a run's process -----------------------------------------------------------------------


def own_code(fn: types.FunctionType) -> types.FunctionType:
    """``fn`` with a code object of its own, for which Dynamo keeps a cache of its own."""
    return types.FunctionType(
        fn.__code__.replace(), fn.__globals__, fn.__name__, fn.__defaults__, fn.__closure__
    )


def causal(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return q_idx >= kv_idx


def attend(q: Any, k: Any, v: Any, mask: Any) -> Any:
    from torch.nn.attention.flex_attention import flex_attention

    return flex_attention(q, k, v, block_mask=mask)


def run_model(model: Any, x: Any, mask: Any) -> Any:
    return model(x, mask, attend)


def make_model(spec: dict[str, Any], seed: int, device: str) -> Any:
    """A decoder of ``spec["layers"]`` layers on ``device``."""
    import torch
    from torch import nn
    from torch.nn.functional import scaled_dot_product_attention

    hidden, head_dim = spec["hidden"], spec["head_dim"]

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm_1, self.norm_2 = nn.LayerNorm(hidden), nn.LayerNorm(hidden)
            self.qkv, self.out = nn.Linear(hidden, 3 * hidden), nn.Linear(hidden, hidden)
            self.up, self.down = nn.Linear(hidden, 4 * hidden), nn.Linear(4 * hidden, hidden)

        def forward(self, x: Any, mask: Any, attend: Callable[..., Any] | None) -> Any:
            # [B, S, D] to [B, H, S, D/H] three times
            qkv = self.qkv(self.norm_1(x)).unflatten(-1, (3, -1, head_dim))
            q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind()
            if attend is None:
                y = scaled_dot_product_attention(q, k, v, is_causal=True)
            else:
                y = attend(q, k, v, mask)
            x = x + self.out(y.transpose(1, 2).flatten(-2))
            return x + self.down(nn.functional.gelu(self.up(self.norm_2(x))))

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(Layer() for _ in range(spec["layers"]))

        def forward(self, x: Any, mask: Any, attend: Callable[..., Any] | None) -> Any:
            for layer in self.layers:
                x = layer(x, mask, attend)
            return x

    torch.manual_seed(seed)
    return Model().to(device, getattr(torch, spec["dtype"]))


class Worker:
    """One model on one device, its steps and their check."""

    def __init__(self, spec: dict[str, Any], index: int, classes: dict[str, Any]) -> None:
        import torch

        self.spec, self.index, self.device = spec, index, spec["devices"][index]
        model = make_model(spec, spec["seed"] + index, self.device)
        # All models of a process are of the same classes, as they are in a program.
        first = classes.setdefault("model", model)
        self.model = copy.deepcopy(first)
        self.model.load_state_dict(model.state_dict())
        self.model.to(self.device).requires_grad_(spec["backward"])
        self.generator = torch.Generator(self.device).manual_seed(spec["seed"] + index)
        self.steps: list[tuple[Any, ...]] = []
        fn = attend if spec["compile"] == "attention" else run_model
        fn = own_code(fn) if spec["code"] == "own" else fn
        compiled = torch.compile(fn, backend=spec["backend"])
        if spec["compile"] == "attention":
            self.forward = lambda x, mask: self.model(x, mask, compiled)
        else:
            self.forward = lambda x, mask: compiled(self.model, x, mask)

    def sync(self) -> None:
        import torch

        if self.device != "cpu":
            torch.cuda.synchronize(self.device)

    def run(self, began: float) -> dict[str, Any]:
        """All steps, then their check; what the worker reports."""
        import torch

        if self.device != "cpu":
            torch.cuda.set_device(self.device)
        result: dict[str, Any] = {"worker": self.index, "device": self.device, "step_s": []}
        try:
            last = began
            for length in self.spec["lengths"]:
                self.step(length)
                now = time.monotonic()
                result["step_s"].append(round(now - last, 4))
                result.setdefault("first_step_s", round(now - began, 4))
                last = now
            result["seconds"] = round(last - began, 4)
            result["error_rel"] = max(self.errors())
        except Exception as e:
            text = " ".join(str(e).split())
            result |= {"outcome": "raised", "error": f"{type(e).__name__}: {text}"[:400]}
            return result | {"traceback": traceback.format_exc()[-6000:]}
        right = result["error_rel"] <= TOLERANCE[self.spec["dtype"]]  # False for NaN
        result["outcome"] = "ok" if right else "wrong"
        if not right:
            result["error"] = f"relative error {result['error_rel']:.3g} against the reference"
        return result

    def step(self, length: int) -> None:
        import torch
        from torch.nn.attention.flex_attention import create_block_mask

        size = (self.spec["batch"], length, self.spec["hidden"])
        dtype = getattr(torch, self.spec["dtype"])
        x = torch.randn(size, device=self.device, dtype=dtype, generator=self.generator)
        x.requires_grad_(self.spec["backward"])
        mask = create_block_mask(causal, None, None, length, length, self.device)
        out = self.forward(x, mask)
        grads: list[Any] = []
        if self.spec["backward"]:
            out.float().square().mean().backward()
            grads = [x.grad, *(p.grad for p in self.model.parameters())]
            self.model.zero_grad(set_to_none=True)
        self.sync()
        self.steps.append((x.detach(), out.detach(), grads))

    def errors(self) -> list[float]:
        """Of outputs, of the input's gradient and of all parameters' gradients, at each step."""
        import torch

        reference = copy.deepcopy(self.model).float()
        found = []

        def error(got: list[Any], want: list[Any]) -> float:
            got, want = (torch.cat([t.flatten().float() for t in ts]) for ts in (got, want))
            return ((got - want).norm() / want.norm()).item()

        for x, out, grads in self.steps:
            x = x.float().requires_grad_(self.spec["backward"])
            want = reference(x, None, None)
            found.append(error([out], [want.detach()]))
            if self.spec["backward"]:
                want.square().mean().backward()
                found.append(error(grads[:1], [x.grad]))
                found.append(error(grads[1:], [p.grad for p in reference.parameters()]))
                reference.zero_grad(set_to_none=True)
        # max() would pass over a NaN
        return [float("inf") if e != e else e for e in found]


def worker_main(spec_file: str) -> int:
    """A run's process: its workers in threads; a line of JSON for each as it ends."""
    spec = json.loads(Path(spec_file).read_text())
    folder = Path(spec_file).parent
    stacks = Path(spec["stacks"]).open("w")  # noqa: SIM115
    faulthandler.enable(stacks)
    # A run that is still alive then is about to be ended. The clock is that of the machine, so
    # the time that it took to get here counts.
    left = spec["dump_at"] - time.monotonic()
    faulthandler.dump_traceback_later(max(left, 0.001), file=stacks)
    sys.setswitchinterval(spec["switch_interval"])
    import torch
    import torch._dynamo

    if spec["workaround"]:
        torch._dynamo.config.force_compile_during_fx_trace = True
    if "cpu" in spec["devices"]:
        torch.set_num_threads(1)
    classes: dict[str, Any] = {}
    workers = [Worker(spec, i, classes) for i in range(len(spec["devices"]))]
    for worker in workers:
        worker.sync()
    (folder / f"{spec['name']}.ready").touch()
    while not (folder / "go").exists():
        time.sleep(0.002)
    lock = threading.Lock()

    def report(line: dict[str, Any]) -> None:
        with lock, Path(spec["results"]).open("a") as out:
            out.write(json.dumps(line) + "\n")

    began = time.monotonic()
    threads = [
        threading.Thread(target=lambda w=w: report(w.run(began)), name=f"worker {w.index}")
        for w in workers
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    spent = {k: sum(v) for k, v in torch._dynamo.utils.compilation_time_metrics.items()}
    report({
        "graphs": torch._dynamo.utils.counters["stats"]["unique_graphs"],
        "compiling_s": {k: round(v, 2) for k, v in spent.items() if v >= 0.05},
    })  # fmt: skip
    return 0


# --- the runs ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Config:
    """What is varied from run to run."""

    devices: tuple[str, ...]
    arm: str
    code: str
    caches: str

    def describe(self) -> str:
        return f"{short_devices(self.devices)} {self.arm} {self.code} code, caches {self.caches}"


def short_devices(devices: Sequence[str]) -> str:
    """``cuda:0 x3`` for three workers on a GPU."""
    counts = collections.Counter(devices)
    return ", ".join(name + (f" x{n}" if n > 1 else "") for name, n in counts.items())


class Runner:
    """Starts the processes of a run and reads what they leave."""

    def __init__(self, args: argparse.Namespace, caches: Path) -> None:
        self.args = args
        self.caches = caches
        self.pythons = drafters.Runner(args)
        self.children: set[subprocess.Popen[bytes]] = set()
        self.ended = False

    def environment(self, config: Config, folder: Path) -> tuple[str, dict[str, str]]:
        """The Python of a run and its environment."""
        patched = config.arm == "patched-threads"
        python, environment = self.pythons.interpreter(patched)
        caches = folder
        if config.caches == "on":
            # Stock and patched torch do not share entries; processes and threads of stock do.
            caches = self.caches / ("patched" if patched else config.arm) / config.code
        if config.caches == "off":
            environment["TORCHINDUCTOR_FORCE_DISABLE_CACHES"] = "1"
        else:
            environment.pop("TORCHINDUCTOR_FORCE_DISABLE_CACHES", None)
        environment["TORCHINDUCTOR_CACHE_DIR"] = str(caches / "inductor")
        environment["TRITON_CACHE_DIR"] = str(caches / "triton")
        if self.args.side_by_side > 1:
            each = max(1, (os.cpu_count() or 1) // self.args.side_by_side)
            environment.setdefault("TORCHINDUCTOR_COMPILE_THREADS", str(each))
        return python, environment

    def run(self, config: Config, repetition: int | None) -> dict[str, Any]:
        """One run; ``repetition`` None fills the caches and is not counted."""
        args = self.args
        groups = [list(config.devices)]
        if config.arm == "processes":
            groups = [[device] for device in config.devices]
        cpu = "cpu" in config.devices
        began = time.monotonic()
        spec = {
            "code": config.code,
            "compile": args.compile,
            "backend": args.backend,
            "backward": not (args.forward_only or cpu),
            "workaround": config.arm == "stock-workaround",
            "dtype": "float32" if cpu else "bfloat16",
            "dump_at": began + 0.95 * args.timeout,
            **{key: getattr(args, key) for key in
               ("layers", "hidden", "head_dim", "batch", "lengths", "switch_interval")},
        }  # fmt: skip
        with tempfile.TemporaryDirectory(prefix="first-step-", ignore_cleanup_errors=True) as name:
            folder = Path(name)
            python, environment = self.environment(config, folder)
            children = []
            for i, devices in enumerate(groups):
                own = {
                    "name": f"process-{i}",
                    "devices": devices,
                    "seed": args.seed + 100 * (repetition or 0) + 10 * i,
                    "stacks": str(folder / f"stacks-{i}"),
                    "results": str(folder / f"results-{i}"),
                }
                file = folder / f"process-{i}.json"
                file.write_text(json.dumps(spec | own))
                log = (folder / f"log-{i}").open("wb")
                with log:
                    children.append(
                        subprocess.Popen(
                            [python, str(Path(__file__).resolve()), "--worker", str(file)],
                            env=environment,
                            stdin=subprocess.DEVNULL,
                            stdout=log,
                            stderr=log,
                            start_new_session=True,
                        )
                    )
            self.children.update(children)
            try:
                timed_out = not self.wait(children, folder, began + args.timeout)
            finally:
                for child in children:
                    kill(child)
                self.children.difference_update(children)
            result: dict[str, Any] = {
                "devices": list(config.devices),
                "arm": config.arm,
                "code": config.code,
                "caches": config.caches,
                "repetition": repetition,
                "seconds": round(time.monotonic() - began, 1),
            }
            return result | self.outcome(children, folder, config, timed_out)

    def wait(self, children: list[subprocess.Popen[bytes]], folder: Path, end: float) -> bool:
        """Let the processes go once all are ready, and wait for them; False on time out."""
        go = folder / "go"
        while True:
            if not go.exists():
                ready = [(folder / f"process-{i}.ready").exists() for i in range(len(children))]
                dead = [child.poll() is not None for child in children]
                if all(r or d for r, d in zip(ready, dead, strict=True)):
                    go.touch()
            if all(child.poll() is not None for child in children):
                return True
            if time.monotonic() > end:
                return False
            time.sleep(0.01)

    def outcome(
        self, children: list[subprocess.Popen[bytes]], folder: Path, config: Config, timed_out: bool
    ) -> dict[str, Any]:
        """What happened in a run: outcome, times, errors and, of a hang, stacks."""
        workers: list[dict[str, Any]] = []
        graphs, stacks, errors = 0, "", []
        compiling: list[dict[str, float]] = []  # of each process, by phase as Dynamo names them
        for i, child in enumerate(children):
            lines = []
            if (folder / f"results-{i}").exists():
                lines = [
                    json.loads(line) for line in (folder / f"results-{i}").read_text().splitlines()
                ]
            graphs += sum(line["graphs"] for line in lines if "graphs" in line)
            compiling += [line["compiling_s"] for line in lines if "compiling_s" in line]
            mine = [line for line in lines if "worker" in line]
            if len(children) > 1:
                mine = [line | {"worker": i} for line in mine]
            workers += mine
            stack = folder / f"stacks-{i}"
            if stack.exists():
                stacks += stack.read_text(errors="replace")
            if child.returncode not in (0, -signal.SIGKILL):
                log = (folder / f"log-{i}").read_text(errors="replace").strip().splitlines()
                code = child.returncode
                why = signal.Signals(-code).name if code < 0 else (log or [f"exit code {code}"])[-1]
                errors.append(("crashed", why[:400]))
        workers.sort(key=lambda w: w["worker"])
        errors += [(w["outcome"], w["error"]) for w in workers if w["outcome"] != "ok"]
        outcomes = {o for o, _ in errors} | ({"hung"} if timed_out else set())
        if not outcomes and len(workers) < len(config.devices):
            outcomes, errors = {"crashed"}, [("crashed", "a worker left no result")]
        found: dict[str, Any] = {
            "outcome": next(o for o in WORST_FIRST if o in outcomes or o == "ok"),
            "workers": workers,
            "graphs": graphs,
            "compiling_s": compiling,
        }
        if errors:
            found["error"] = errors[0][1]
        if timed_out and "error" not in found:
            found["error"] = f"{len(config.devices) - len(workers)} of {len(config.devices)} "
            found["error"] += "workers did not end"
        if found["outcome"] == "ok":
            found["first_step_s"] = max(w["first_step_s"] for w in workers)
            found["all_steps_s"] = max(w["seconds"] for w in workers)
        elif stacks:
            found["stacks"] = stacks[:STACKS_KEPT]
        return found

    def end(self) -> None:
        """End all runs; none starts any more."""
        self.ended = True
        for child in list(self.children):
            kill(child)


def kill(child: subprocess.Popen[bytes]) -> None:
    """End a process and its compile workers."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)
    child.wait()


# --- results ----------------------------------------------------------------------------------


def summarize(runs: list[dict[str, Any]]) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Rows, one a configuration, and the limits that these rows are held to."""
    groups: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for run in runs:
        if run["repetition"] is not None:
            key = (tuple(run["devices"]), run["arm"], run["code"], run["caches"])
            groups.setdefault(key, []).append(run)
    medians = {
        key: statistics.median(times)
        for key, found in groups.items()
        if (times := [r["first_step_s"] for r in found if r["outcome"] == "ok"])
    }
    rows, checks = [], []
    for key, found in groups.items():
        devices, arm, code, caches = key
        good = [r for r in found if r["outcome"] == "ok"]
        outcomes = [r["outcome"] for r in found]
        alone = medians.get((devices[:1], "stock-threads", code, caches))
        apart = medians.get((devices, "processes", code, caches))
        mine = medians.get(key)
        row = {
            "devices": list(devices),
            "arm": arm,
            "code": code,
            "caches": caches,
            "outcomes": {o: outcomes.count(o) for o in dict.fromkeys(outcomes)},
            "error": next((r["error"] for r in found if "error" in r), None),
            "first_step_s": mine,
            "first_step_s_all": [r["first_step_s"] for r in good],
            "all_steps_s": statistics.median(r["all_steps_s"] for r in good) if good else None,
            "graphs": max((r["graphs"] for r in good), default=None),
            "compiling_s": phases(good),
            "to_one_alone": mine / alone if mine and alone else None,
            "to_processes": mine / apart if mine and apart else None,
        }
        rows.append(row)
        if arm != "patched-threads":
            continue
        what = f"{short_devices(devices)}, {code} code, caches {caches}"
        same = len(set(devices)) == 1
        if len(devices) == 3 and same and (code, caches) == ("shared", "off") and alone:
            checks.append(check(f"{what}: to one alone", row["to_one_alone"], ONE_DEVICE_LIMIT))
        if len(devices) == 2 and not same and apart:
            checks.append(check(f"{what}: to processes", row["to_processes"], TWO_DEVICES_LIMIT))
        checks.append(
            {"name": f"{what}: all {len(found)} runs ok", "value": None, "limit": None,
             "holds": set(outcomes) == {"ok"}}
        )  # fmt: skip
    return rows, checks


def phases(runs: list[dict[str, Any]]) -> dict[str, float]:
    """Medians of what a process spent in PHASES, the times of its threads added up."""
    found = [process for run in runs for process in run["compiling_s"]]
    return {k: statistics.median(p.get(k, 0.0) for p in found) for k in PHASES if found}


def check(name: str, value: float | None, limit: float) -> dict[str, Any]:
    holds = value is not None and value <= limit
    return {"name": name, "value": value, "limit": f"<= {limit}", "holds": holds}


def show(report: dict[str, Any]) -> None:
    """Print the table."""

    def text(value: float | None, digits: int = 1) -> str:
        return "-" if value is None else f"{value:.{digits}f}"

    rows = []
    for row in report["summary"]:
        times = row["first_step_s_all"]
        rows.append([
            short_devices(row["devices"]), row["arm"], row["code"], row["caches"],
            ", ".join(f"{n} {o}" for o, n in row["outcomes"].items()),
            text(row["first_step_s"]), f"{min(times):.1f}-{max(times):.1f}" if times else "-",
            text(row["to_one_alone"], 2), text(row["to_processes"], 2),
            text(row["all_steps_s"]), "-" if row["graphs"] is None else row["graphs"],
        ])  # fmt: skip
    header = ("devices", "arm", "code", "caches", "outcome", "first step, s", "from-to",
              "to one alone", "to processes", "all steps, s", "graphs")  # fmt: skip
    print(benchlib.table(header, rows))
    for row in report["summary"]:
        if spent := row["compiling_s"]:
            parts = ", ".join(f"{what} {text(spent[name])} s" for name, what in PHASES.items())
            print(f"{short_devices(row['devices'])} {row['arm']}, each process: {parts}")
    for row in report["summary"]:
        if row["error"]:
            print(f"{short_devices(row['devices'])} {row['arm']}: {row['error'][:160]}")
    benchlib.print_checks(report["checks"])


def main(argv: Sequence[str] | None = None) -> int:
    args = parse_arguments(argv)
    if args.worker:
        return worker_main(args.worker)
    began = time.monotonic()
    say = benchlib.progress(args.quiet)
    configs = [
        Config(devices, arm, code, caches)
        for (only, devices), arm, code, caches in itertools.product(
            args.sets, args.arms, args.code, args.caches
        )
        if only in (None, arm)
    ]
    with tempfile.TemporaryDirectory(prefix="first-step-", ignore_cleanup_errors=True) as folder:
        runner = Runner(args, Path(folder))
        signal.signal(signal.SIGTERM, signal.default_int_handler)  # the runs end with this program
        try:
            facts = {
                patched: runner.pythons.torch_facts(patched)
                for patched in sorted({arm == "patched-threads" for arm in args.arms})
            }
        except RuntimeError as e:
            args.parser.error(str(e))
        benchlib.check_facts(args.parser, facts)
        for fact in facts.values():
            if missing := [d for _, s in args.sets for d in s if d != "cpu"
                           and int(d.partition(":")[2]) >= len(fact["gpus"])]:  # fmt: skip
                args.parser.error(f"--devices: torch {fact['torch']} sees no {missing[0]}")
        report: dict[str, Any] = {
            "benchmark": "first_step",
            **benchlib.machine_facts(),
            "torch": {"patched" if p else "stock": f for p, f in facts.items()},
            **{key: getattr(args, key) for key in
               ("compile", "backend", "layers", "hidden", "head_dim", "batch", "lengths",
                "repetitions", "side_by_side", "timeout", "switch_interval")},
            "backward": not args.forward_only,
            "runs": [],
        }  # fmt: skip
        lock = threading.Lock()
        skipped: list[Config] = []

        def one(config: Config, repetition: int | None) -> None:
            if runner.ended or (args.budget and time.monotonic() - began > args.budget):
                skipped.append(config)
                return
            result = runner.run(config, repetition)
            with lock:
                what = "filling caches" if repetition is None else f"run {repetition + 1}"
                ok = "first_step_s" in result
                first = f", first step {result['first_step_s']:.1f} s" if ok else ""
                why = f": {result['error'][:100]}" if "error" in result else ""
                say(f"{config.describe()}, {what}: {result['outcome']}{first} "
                    f"({result['seconds']:.0f} s){why}")  # fmt: skip
                report["runs"].append(result)
                report["summary"], report["checks"] = summarize(report["runs"])
                if args.json:
                    benchlib.write_json(args.json, report)

        fills = {(c.arm, c.code, frozenset(c.devices)): c for c in configs if c.caches == "on"}
        rounds: list[list[tuple[Config, int | None]]] = [
            [(config, None) for config in fills.values()],
            [(c, r) for r in range(args.repetitions) for c in configs],
        ]
        with concurrent.futures.ThreadPoolExecutor(args.side_by_side) as pool:
            try:
                for jobs in rounds:
                    for done in [pool.submit(one, *job) for job in jobs]:
                        done.result()
            except KeyboardInterrupt:
                pool.shutdown(wait=False, cancel_futures=True)
                runner.end()
                print("first_step.py: interrupted; what is done is in --json", file=sys.stderr)
                return 130
    show({"summary": [], "checks": [], **report})
    if skipped:
        print(f"first_step.py: out of time, {len(skipped)} runs missing", file=sys.stderr)
        return 4
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
