"""Trains DFlash drafters: several at once, in threads of one process as in the bug report.

    python -m repro.dflash.train --preset tiny --drafters cpu,cpu,cpu --steps 60
    python -m repro.dflash.train --preset qwen3-4b --targets cuda:0-4 --drafters cuda:5-7

Target workers run a frozen target and hand batches with context features to the drafters over
bounded queues; each drafter trains its own model. With ``--workers threads`` every worker is a
thread of this process. ``processes`` gives each drafter a process, ``sequential`` trains one
after the other; in both, a drafter computes its features itself, between its steps, so that
nothing in the process runs beside it. All three give the same losses for the same ``--seed``.

Exit codes: 0 trained, or stopped by Ctrl-C; 1 a worker failed; 2 bad usage; 3 hung
(``--hang-timeout``).

``--metrics FILE`` writes JSON lines, each with ``event`` and ``time`` (seconds since the program
began), in the order in which they happened:

``start``       versions, host, devices, all options, preset sizes
``warmup``      drafter or worker (a target), device, seconds (with ``--warmup sequential``)
``step``        drafter, device, step (1 for the first), loss, accuracy, accepted (mean accepted
                prefix), lr, length (S), tokens (B*S), data_s (waiting for or making the batch),
                step_s (forward, backward and update, up to the device being done), ktok_s
                (thousand context tokens a second over data_s + step_s), at_s (since all workers
                were ready; of step 1: the time to the first step)
``eval``        drafter, device, step, loss, accuracy, accepted, on held-out text
``checkpoint``  drafter, device, step, path
``trained``     drafter, device, steps, seconds, ktok_s and median_step_s over the later half of
                the steps, peak_memory_bytes (of the device; of the process on CPU)
``profile``     is not here: ``--profile FILE`` has it
``stopped``     drafter, device, step, checkpoint (a path or null)
``summary``     the last line: outcome (trained, stopped, failed, hung), exit_code, seconds and,
                where there is one, worker, error (one line) and known_bug (true or false)

``--profile FILE`` writes JSON: the fields of ``start`` and ``drafters``, for each: drafter, device,
length, step_s, kernels and operators, both lists of name, calls and us (time itself) a step. Only
the drafter that is profiled runs at that moment; it comes after the last step.

Throughput counts context tokens (B*S), not the noise tokens, and with ``--replay K`` the target
is out of it: each drafter goes round its first K batches, kept on its device.
"""

from __future__ import annotations

import argparse
import faulthandler
import json
import math
import multiprocessing
import os
import platform
import queue
import re
import signal
import sys
import threading
import time
import traceback
from argparse import Namespace
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch._dynamo

from .data import Corpus, DataError
from .model import COMPILE_MODES, PRESETS, Preset, feature_layers
from .worker import (
    DrafterWorker,
    Link,
    LocalFeed,
    Outlet,
    Plan,
    QueueFeed,
    Stopped,
    TargetWorker,
    UsageError,
    checkpoint_path,
    load_checkpoint,
    load_corpus,
    quiet,
    resolve_preset,
    serve,
    servers_of,
)

OK, FAILED, USAGE, HUNG = 0, 1, 2, 3

# What torch says when threads got into each other's traces.
KNOWN_BUG = re.compile(
    "Detected that you are using FX to symbolically trace a dynamo-optimized function"
    "|module is not installed as a submodule"
    "|CURRENT_PATCHER"
    "|_EXPORT_MODULE_HIERARCHY must not be None"
)
# Drafters call modules but never trace one, so theirs is a call that went into another's trace.
KNOWN_BUG_FRAMES = re.compile("in module_call_wrapper|in module_getattr_wrapper")
KNOWN_BUG_LINE = (
    "This is the bug: torch.fx keeps its tracing state for the whole process, and threads got into "
    "each other's traces. Run ./build.sh doctor; ./build.sh makes a torch without it."
)


# ---------------------------------------------------------------------------------------------
# Command line


def parse_devices(text: str) -> list[torch.device]:
    """Reads ``cpu,cpu``, ``cuda:0-4`` or ``cuda:0,cuda:0`` as a list of devices.

    Raises:
        argparse.ArgumentTypeError: not a device, or this host has no such GPU.
    """
    devices = []
    for part in text.split(","):
        found = re.fullmatch(r"\s*(cpu|cuda)(?::(\d+)(?:-(\d+))?)?\s*", part)
        if not found or (found[1] == "cpu" and found[2]):
            raise argparse.ArgumentTypeError(
                f"unknown device {part.strip()!r}: use cpu, cuda:N or cuda:N-M, separated by commas"
            )
        if found[1] == "cpu":
            devices.append(torch.device("cpu"))
            continue
        first = int(found[2] or 0)
        last = int(found[3] or first)
        if last < first:
            raise argparse.ArgumentTypeError(f"{part.strip()}: the range runs backwards")
        count = torch.cuda.device_count()
        if last >= count:
            has = f"cuda:0-{count - 1} only" if count > 1 else "cuda:0 only" if count else "no GPU"
            raise argparse.ArgumentTypeError(f"{part.strip()}: this host has {has}")
        devices += [torch.device("cuda", i) for i in range(first, last + 1)]
    return devices


def number(kind: type, lowest: float, what: str) -> Callable[[str], Any]:
    """An argparse type: a ``kind`` of at least ``lowest``; ``what`` names it in the error."""

    def parse(text: str) -> Any:
        try:
            value = kind(text)
        except ValueError:
            value = math.nan
        if not (value >= lowest and math.isfinite(value)):
            raise argparse.ArgumentTypeError(f"{text!r} is not {what}")
        return value

    return parse


class Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """One line instead of the whole usage."""
        self.exit(USAGE, f"train.py: error: {message}\n")


def parser() -> Parser:
    count = number(int, 0, "a whole number, 0 or more")
    positive = number(int, 1, "a whole number, 1 or more")
    above_zero = number(float, 1e-12, "a number above 0")
    a = Parser(
        prog="python -m repro.dflash.train",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    a.add_argument("--preset", choices=list(PRESETS), default="tiny")
    a.add_argument(
        "--drafters",
        type=parse_devices,
        default="cpu,cpu,cpu",
        metavar="DEVICES",
        help="one drafter for each: cpu,cpu,cpu or cuda:5-7 or cuda:0,cuda:0 (default %(default)s)",
    )
    a.add_argument(
        "--targets",
        type=parse_devices,
        metavar="DEVICES",
        help="one target worker for each (default: one beside each drafter)",
    )
    a.add_argument("--workers", choices=("threads", "processes", "sequential"), default="threads")
    a.add_argument("--steps", type=positive, default=400)
    a.add_argument("--seed", type=count, default=0)
    a.add_argument("--lr", type=above_zero, help="peak learning rate (default: the preset's)")
    a.add_argument(
        "--target",
        default="random",
        metavar="random|hf:PATH",
        help="hf:PATH is a local checkpoint that transformers can load (default %(default)s)",
    )
    a.add_argument(
        "--target-depth",
        type=number(int, 8, "a whole number, 8 or more"),
        metavar="LAYERS",
        help="layers of the random target (default: the preset's)",
    )
    a.add_argument(
        "--features",
        choices=("fx", "eager"),
        help="run the target as a graph that torch.fx traced, one for each context length, or as a "
        "plain module (default: fx; eager with --target hf:)",
    )
    a.add_argument("--text", nargs="+", metavar="FILE", help="default: Python's own sources")
    a.add_argument(
        "--vary-length",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="context lengths vary from batch to batch (default on)",
    )
    a.add_argument(
        "--compile",
        choices=COMPILE_MODES,
        default="attention",
        help="what torch.compile gets: flex_attention, whole drafter layers, or nothing",
    )
    a.add_argument(
        "--backend",
        metavar="NAME",
        help="backend of torch.compile (default: inductor on CUDA, aot_eager on CPU)",
    )
    a.add_argument(
        "--workaround",
        action="store_true",
        help="set torch._dynamo.config.force_compile_during_fx_trace",
    )
    a.add_argument(
        "--recompile-limit",
        type=positive,
        metavar="N",
        help="torch._dynamo.config.recompile_limit (default: Dynamo's own for each drafter of a "
        "process; they share the code of flex_attention, and so its limit)",
    )
    a.add_argument(
        "--warmup",
        choices=("none", "sequential"),
        default="none",
        help="sequential: workers compile and trace one after the other before training starts",
    )
    a.add_argument("--queue", type=positive, default=2, help="batches that may wait for a drafter")
    a.add_argument(
        "--replay",
        type=count,
        default=0,
        metavar="K",
        help="go round the first K batches, to time drafters without the target (default 0: off)",
    )
    a.add_argument(
        "--threads",
        type=count,
        metavar="N",
        help="torch.set_num_threads (default: 1 with a drafter on CPU, else torch's own; 0: that)",
    )
    a.add_argument(
        "--eval-every",
        type=count,
        default=0,
        metavar="STEPS",
        help="held-out loss every so often (default 0: after the last step only)",
    )
    a.add_argument("--eval-batches", type=count, help="default 32 for tiny, else 2; 0: no held-out")
    a.add_argument("--log-every", type=count, help="steps between progress lines; 0: none")
    a.add_argument("--metrics", metavar="FILE", help="JSON lines, see above")
    a.add_argument("--profile", metavar="FILE", help="kernels of a steady step, see above")
    a.add_argument("--checkpoint", metavar="DIR", help="drafter-N.pt goes there")
    a.add_argument(
        "--checkpoint-every",
        type=count,
        default=0,
        metavar="STEPS",
        help="default 0: after the last step and on Ctrl-C only",
    )
    a.add_argument("--resume", action="store_true", help="go on from --checkpoint DIR")
    a.add_argument(
        "--hang-timeout",
        type=above_zero,
        metavar="S",
        help="when a drafter gets no further for S seconds: print all stacks and exit 3",
    )
    return a  # fmt: skip


def parse(arguments: list[str] | None) -> Namespace:
    """Reads and checks the command line; exits 2 with one line when something is wrong."""
    a = parser()
    o = a.parse_args(arguments)
    o.targets = o.targets or o.drafters
    real = o.target != "random"
    if real and not (o.target.startswith("hf:") and o.target[3:]):
        a.error(f"--target {o.target}: use random or hf:PATH")
    if real and not (Path(o.target[3:]) / "config.json").is_file():
        a.error(f"--target {o.target}: no config.json there")
    if real and (o.features == "fx" or o.target_depth):
        a.error("--features fx and --target-depth are for the random target")
    o.features = o.features or ("eager" if real else "fx")
    on_cpu = any(d.type == "cpu" for d in o.drafters)
    if on_cpu and o.backend == "inductor" and o.compile != "none":
        a.error("--backend inductor: Inductor has no backward of flex_attention on CPU")
    if o.backend and o.backend not in torch._dynamo.list_backends(exclude_tags=()):
        a.error(f"--backend {o.backend}: unknown, see torch._dynamo.list_backends()")
    if o.threads is None:
        o.threads = 1 if on_cpu else 0
    if o.eval_batches is None:
        o.eval_batches = 32 if o.preset == "tiny" else 2
    if o.log_every is None:
        o.log_every = max(1, o.steps // 10)
    if o.resume and not o.checkpoint:
        a.error("--resume needs --checkpoint DIR, where the run to go on with was saved")
    if o.checkpoint_every and not o.checkpoint:
        a.error("--checkpoint-every needs --checkpoint DIR")
    if o.workaround and not hasattr(torch._dynamo.config, "force_compile_during_fx_trace"):
        a.error(f"--workaround: torch {torch.__version__} has no such setting")
    for flag, path in (("--metrics", o.metrics), ("--profile", o.profile)):
        if path and not Path(path).absolute().parent.is_dir():
            a.error(f"{flag} {path}: the folder does not exist")
    if o.checkpoint:
        try:
            Path(o.checkpoint).mkdir(parents=True, exist_ok=True)
        except OSError as e:
            a.error(f"--checkpoint {o.checkpoint}: {e.strerror}")
    return o


# ---------------------------------------------------------------------------------------------
# Workers: what runs in the threads or processes


def describe(e: BaseException) -> str:
    """An exception as one line."""
    text = " ".join(str(e).split())
    return f"{type(e).__name__}: {text}" if text else type(e).__name__


def guarded(name: str, link: Link, work: Callable[[], None]) -> None:
    """Runs a worker; an exception is reported with its traceback, and all others are stopped."""
    try:
        work()
    except Stopped:
        link.report({"event": "ended", "worker": name})
    except BaseException as e:
        link.failed.set()
        link.report(
            {
                "event": "failed",
                "worker": name,
                "error": describe(e),
                "traceback": traceback.format_exc(),
            }
        )
        link.stop.set()
        quiet(link.start.abort)
        quiet(link.finish.abort)
    else:
        link.report({"event": "ended", "worker": name})


def train_alone(o: Namespace, p: Preset, corpus: Corpus, drafter: int, link: Link) -> None:
    """Builds one drafter and its target, and trains it with nothing beside it."""
    device = o.targets[drafter % len(o.targets)]
    target = TargetWorker(o, p, corpus, f"target of drafter {drafter}", device)
    worker = DrafterWorker(o, p, corpus, drafter, target.target)
    plan = Plan(drafter, worker.device, worker.step, o)
    if o.warmup == "sequential":
        with link.turn:
            target.prepare()
            target.warm()
    worker.run(LocalFeed(drafter, target, worker.device), plan, link)


def drafter_process(o: Namespace, drafter: int, link: Link) -> None:
    """Main function of a drafter's own process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    faulthandler.enable()
    die_with_parent()

    def work() -> None:
        p = resolve_preset(o)
        train_alone(o, p, load_corpus(o, p), drafter, link)

    guarded(f"drafter {drafter} ({o.drafters[drafter]})", link, work)


def die_with_parent() -> None:
    """Ends this process when the one that started it is gone, however that one ended."""
    parent = multiprocessing.parent_process()

    def watch() -> None:
        parent.join()
        os._exit(FAILED)

    threading.Thread(target=watch, name="parent watch", daemon=True).start()


class Run:
    """Starts the workers of a run and knows whether they are alive."""

    def __init__(self, o: Namespace) -> None:
        self.o = o
        self.alive: set[str] = set()

    def stop(self, failed: bool) -> None:
        """Tells all workers to end; drafters save unless ``failed``."""
        if failed:
            self.link.failed.set()
        self.link.stop.set()
        quiet(self.link.start.abort)
        quiet(self.link.finish.abort)


class ThreadRun(Run):
    """Workers in threads of this process, or one thread for all with ``sequential``."""

    def __init__(self, o: Namespace, p: Preset, corpus: Corpus) -> None:
        super().__init__(o)
        self.events: queue.Queue = queue.Queue()
        together = o.workers == "threads"
        self.link = Link(
            stop=threading.Event(),
            failed=threading.Event(),
            start=threading.Barrier(len(o.drafters) + len(o.targets) if together else 1),
            finish=threading.Barrier(len(o.drafters) if together else 1),
            turn=threading.Lock(),
            report=self.events.put,
        )
        work = self.together(p, corpus) if together else {"worker": self.in_turn(p, corpus)}
        self.threads = [
            threading.Thread(target=guarded, args=(name, self.link, f), name=name, daemon=True)
            for name, f in work.items()
        ]
        self.alive = set(work)

    def together(self, p: Preset, corpus: Corpus) -> dict[str, Callable[[], None]]:
        o, link = self.o, self.link
        targets = [
            TargetWorker(o, p, corpus, f"target {i} ({device})", device)
            for i, device in enumerate(o.targets)
        ]
        served = [servers_of(i, len(o.drafters), len(targets)) for i in range(len(o.drafters))]
        drafters = [
            DrafterWorker(o, p, corpus, i, targets[served[i][0]].target)
            for i in range(len(o.drafters))
        ]
        plans = [Plan(d.drafter, d.device, d.step, o) for d in drafters]
        outlets = [
            Outlet([d for d, by in enumerate(served) if t in by], o.queue, link)
            for t in range(len(targets))
        ]
        work: dict[str, Callable[[], None]] = {}
        for t, worker in enumerate(targets):
            work[worker.name] = lambda t=t, worker=worker: serve(worker, t, plans, outlets[t], link)
        for i, drafter in enumerate(drafters):
            feed = QueueFeed(i, [outlets[t] for t in served[i]])
            work[drafter.name] = lambda drafter=drafter, feed=feed, i=i: drafter.run(
                feed, plans[i], link
            )
        return work

    def in_turn(self, p: Preset, corpus: Corpus) -> Callable[[], None]:
        def work() -> None:
            for drafter in range(len(self.o.drafters)):
                self.link.check()
                train_alone(self.o, p, corpus, drafter, self.link)

        return work

    def begin(self) -> None:
        for thread in self.threads:
            thread.start()

    def lost(self, patience: float = 0.0) -> None:
        """A thread cannot end without a word."""

    def dump(self) -> None:
        faulthandler.dump_traceback(all_threads=True)

    def close(self, patience: float) -> bool:
        """Waits for the threads to end; False if one did not within ``patience`` seconds."""
        deadline = time.monotonic() + patience
        for thread in self.threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        return not any(thread.is_alive() for thread in self.threads)


class ProcessRun(Run):
    """A process for each drafter."""

    def __init__(self, o: Namespace) -> None:
        super().__init__(o)
        context = multiprocessing.get_context("spawn")
        self.events = context.Queue()
        count = len(o.drafters)
        self.link = Link(
            stop=context.Event(),
            failed=context.Event(),
            start=context.Barrier(count),
            finish=context.Barrier(count),
            turn=context.Lock(),
            report=self.events.put,
        )
        self.processes = {
            f"drafter {i} ({device})": context.Process(
                target=drafter_process, args=(o, i, self.link), daemon=True
            )
            for i, device in enumerate(o.drafters)
        }
        self.alive = set(self.processes)
        self.ended: dict[str, float] = {}

    def begin(self) -> None:
        for process in self.processes.values():
            process.start()

    def lost(self, patience: float = 0.0) -> dict[str, Any] | None:
        """The failure of a process that ended without a word, ``patience`` seconds ago or more."""
        for name in self.alive:
            code = self.processes[name].exitcode
            if code is None or (code == 0 and patience):  # its last word may be in the queue
                continue
            now = time.monotonic()
            if now - self.ended.setdefault(name, now) >= patience:
                why = f"signal {-code}" if code < 0 else f"exit code {code}"
                return {
                    "event": "failed",
                    "worker": name,
                    "error": f"its process ended with {why}",
                    "traceback": "",
                }
        return None

    def dump(self) -> None:
        for name, process in self.processes.items():
            if process.is_alive():
                print(f"-- {name}, process {process.pid}:", file=sys.stderr, flush=True)
                os.kill(process.pid, signal.SIGUSR1)
                time.sleep(1.0)  # for it to print, and not into the next one's stacks

    def close(self, patience: float) -> bool:
        deadline = time.monotonic() + patience
        for process in self.processes.values():
            process.join(max(0.0, deadline - time.monotonic()))
        for process in self.processes.values():
            if process.is_alive():
                process.kill()
                process.join()
        return True


# ---------------------------------------------------------------------------------------------
# Supervisor


class Screen:
    """Progress for people: a bar for each drafter on a terminal that has tqdm, else lines."""

    def __init__(self, o: Namespace) -> None:
        self.o = o
        self.bars: dict[int, Any] = {}
        if o.log_every and sys.stderr.isatty():
            try:
                from tqdm import tqdm
            except ImportError:
                return
            for i, device in enumerate(o.drafters):
                self.bars[i] = tqdm(
                    total=o.steps, position=i, desc=f"drafter {i} {device}", unit="step"
                )

    def step(self, e: dict[str, Any]) -> None:
        numbers = (
            f"loss {e['loss']:.3f}  acc {e['accuracy']:.3f}  accepted {e['accepted']:.2f}  "
            f"{e['ktok_s']:.2f} Ktok/s"
        )
        if e["drafter"] in self.bars:
            bar = self.bars[e["drafter"]]
            bar.set_postfix_str(numbers, refresh=False)
            bar.update(e["step"] - bar.n)
        elif self.o.log_every and (e["step"] == 1 or e["step"] % self.o.log_every == 0):
            self.say(f"drafter {e['drafter']} {e['device']}  step {e['step']}  {numbers}")

    def say(self, line: str) -> None:
        if self.bars:
            next(iter(self.bars.values())).write(line, file=sys.stderr)
        else:
            print(line, file=sys.stderr, flush=True)

    def close(self) -> None:
        for bar in self.bars.values():
            bar.close()
        self.bars = {}


class Supervisor:
    """Runs in the main thread: takes the workers' events, writes them, and decides the end."""

    def __init__(self, o: Namespace, p: Preset, corpus: Corpus) -> None:
        self.o, self.p, self.corpus = o, p, corpus
        self.began = time.monotonic()
        self.screen = Screen(o)
        self.metrics = open(o.metrics, "w", encoding="utf-8") if o.metrics else None  # noqa: SIM115
        self.signals = 0
        self.profiles: list[dict[str, Any]] = []
        self.progress: dict[int, float] = {}

    def write(self, event: dict[str, Any]) -> None:
        if self.metrics:
            stamped = {"event": event["event"], "time": time.monotonic() - self.began, **event}
            self.metrics.write(json.dumps(stamped) + "\n")
            self.metrics.flush()

    def header(self) -> dict[str, Any]:
        o = self.o
        devices = {str(d): device_name(d) for d in (*o.targets, *o.drafters)}
        options = {k: v for k, v in vars(o).items() if k not in ("targets", "drafters")}
        return {
            "torch": torch.__version__,
            "cuda": torch.version.cuda,
            "python": platform.python_version(),
            "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            "cores": os.cpu_count(),
            "devices": devices,
            "drafters": [str(d) for d in o.drafters],
            "targets": [str(d) for d in o.targets],
            "options": options,
            "sizes": asdict(self.p),
        }

    def on_signal(self, number: int, _frame: object) -> None:
        self.signals += 1
        if self.signals > 1:
            os._exit(128 + number)

    def run(self) -> int:
        """Trains; returns the exit code."""
        self.write({"event": "start", **self.header()})
        signal.signal(signal.SIGINT, self.on_signal)
        signal.signal(signal.SIGTERM, self.on_signal)
        try:
            run = (
                ThreadRun(self.o, self.p, self.corpus)
                if self.o.workers != "processes"
                else (ProcessRun(self.o))
            )
        except Exception as e:
            return self.fail(
                {"worker": "setup", "error": describe(e), "traceback": traceback.format_exc()}
            )
        run.begin()
        now = time.monotonic()
        self.progress = dict.fromkeys(range(len(self.o.drafters)), now)
        told = stopped = False
        while run.alive:
            if self.signals and not told:
                told = True
                self.screen.say("stopping after the steps in flight; once more to end at once")
                run.stop(failed=False)
            self.arm_watchdog()
            try:
                event = run.events.get(timeout=0.2)
            except queue.Empty:
                event = run.lost()
            else:
                # Where the others keep the queue filled; what it said last has been read by then
                event = run.lost(patience=5.0) or event
            if event is not None:
                if event["event"] == "failed":
                    run.stop(failed=True)
                    code = self.fail(event)
                    self.leave(run.close(10.0), code)
                    return code
                stopped |= event["event"] == "stopped"
                self.handle(event, run)
            if self.is_hung(run):
                return self.hang(run)
        faulthandler.cancel_dump_traceback_later()
        run.close(10.0)
        self.screen.close()
        if self.o.profile and not stopped:
            with open(self.o.profile, "w", encoding="utf-8") as file:
                json.dump({**self.header(), "drafters": self.profiles}, file, indent=1)
        self.end("stopped" if stopped or told else "trained", OK)
        return OK

    def handle(self, event: dict[str, Any], run: Run) -> None:
        kind = event["event"]
        drafter = event.get("drafter")
        if drafter is not None:
            self.progress[drafter] = time.monotonic()
        if kind == "ended":
            run.alive.discard(event["worker"])
            return
        if kind == "profile":
            del event["event"]
            self.profiles.append(event)
            return
        if kind == "warmup":  # one at a time: the others have waited, not hung
            self.progress = dict.fromkeys(self.progress, time.monotonic())
        if kind in ("trained", "done", "stopped"):
            self.progress.pop(drafter, None)
        if kind in ("done", "profiling", "evaluating"):  # signs of life, no results
            return
        self.write(event)
        if kind == "step":
            self.screen.step(event)
        elif kind == "eval":
            self.screen.say(
                f"drafter {drafter} {event['device']}  step {event['step']}  held-out loss "
                f"{event['loss']:.3f}  acc {event['accuracy']:.3f}  "
                f"accepted {event['accepted']:.2f}"
            )
        elif kind == "trained":
            speed = f", {event['ktok_s']:.2f} Ktok/s" if event["ktok_s"] else ""
            self.screen.say(
                f"drafter {drafter} {event['device']}  trained {event['steps']} steps in "
                f"{event['seconds']:.1f} s{speed}"
            )
        elif kind == "stopped":
            where = event["checkpoint"]
            saved = f"saved {where}" if where else "nothing saved (no --checkpoint DIR)"
            self.screen.say(
                f"drafter {drafter} {event['device']}  stopped at step {event['step']}, {saved}"
            )

    def fail(self, event: dict[str, Any]) -> int:
        self.screen.close()
        known = bool(KNOWN_BUG.search(event["error"] + event["traceback"]))
        if self.o.workers == "threads" and event["worker"].startswith("drafter"):
            known |= bool(KNOWN_BUG_FRAMES.search(event["traceback"]))
        text = event["traceback"].rstrip() or event["error"]
        print(f"{event['worker']} failed:\n{text}", file=sys.stderr, flush=True)
        if known:
            print(KNOWN_BUG_LINE, file=sys.stderr, flush=True)
        self.end("failed", FAILED, worker=event["worker"], error=event["error"], known_bug=known)
        return FAILED

    def is_hung(self, run: Run) -> bool:
        if not self.o.hang_timeout or not self.progress:
            return False
        waiting = self.progress
        if self.o.workers == "sequential":  # only the first that is not done is at work
            first = min(waiting)
            if len(waiting) > 1:
                later = time.monotonic()
                waiting.update({d: later for d in waiting if d != first})
        return time.monotonic() - min(waiting.values()) > self.o.hang_timeout

    def hang(self, run: Run) -> int:
        faulthandler.cancel_dump_traceback_later()
        self.screen.close()
        drafter = min(self.progress, key=self.progress.__getitem__)
        line = f"drafter {drafter} has ended no step for {self.o.hang_timeout:g} s"
        print(f"hung: {line}; all stacks:", file=sys.stderr, flush=True)
        run.dump()
        run.stop(failed=True)
        self.end("hung", HUNG, worker=f"drafter {drafter}", error=line, known_bug=False)
        if isinstance(run, ProcessRun):
            run.close(0.0)
        self.leave(False, HUNG)
        return HUNG

    def arm_watchdog(self) -> None:
        """A second watch, for the case that a hung thread never lets this one run again."""
        if self.o.hang_timeout:
            faulthandler.dump_traceback_later(2 * self.o.hang_timeout + 5, exit=True)

    def end(self, outcome: str, code: int, **more: Any) -> None:
        seconds = time.monotonic() - self.began
        self.write(
            {"event": "summary", "outcome": outcome, "exit_code": code, "seconds": seconds, **more}
        )

    def leave(self, clean: bool, code: int) -> None:
        """Ends the process at once if a worker thread cannot be ended."""
        if not clean:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)


def device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return platform.processor() or platform.machine()


def main(arguments: list[str] | None = None) -> int:
    """Runs the command line ``arguments`` (``sys.argv`` if None); returns the exit code."""
    o = parse(arguments)
    try:
        p = resolve_preset(o)
        feature_layers(p.target_depth)
        corpus = load_corpus(o, p)
        if o.resume:
            found = [load_checkpoint(o, p, corpus, i) for i in range(len(o.drafters))]
            if not any(found):
                raise UsageError(
                    f"--resume: {checkpoint_path(o, 0)} does not exist; leave --resume out to "
                    "start afresh"
                )
        supervisor = Supervisor(o, p, corpus)
    except (UsageError, DataError, ValueError, OSError) as e:
        print(f"train.py: error: {' '.join(str(e).split())}", file=sys.stderr)
        return USAGE
    faulthandler.enable()
    if o.threads:
        torch.set_num_threads(o.threads)
    return supervisor.run()


if __name__ == "__main__":
    sys.exit(main())
