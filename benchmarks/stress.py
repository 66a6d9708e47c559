#!/usr/bin/env python3
"""Trace, compile and run models on many threads at once; compare each result with its serial one.

Every kind of operation (operations.py) is first done alone, twice, which gives its oracle. Then
--threads threads share --ops operations, mixed by weight. --seed fixes how many of each kind and
variant there are, their order, and which thread does which. With --cold the oracle comes from a
process of its own, so that the threads meet each operator, pass and cache for the first time
together. At the end nothing may be left behind: no name that torch.fx patched, no flag, no
metadata, no tracer; and each operation, done alone again, must still give its oracle.

Exit code: 0 all right, 1 something wrong or left behind, 2 bad usage, 3 no operation ended for
--timeout seconds (the stacks of all threads are printed).
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import faulthandler
import itertools
import os
import random
import shutil
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import types
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import benchlib

EXAMPLES_KEPT = 3  # tracebacks kept of each distinct error


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = benchlib.Parser("stress.py", __doc__)
    number = benchlib.positive_int
    parser.add_argument("--threads", type=number, default=8, help="threads (default 8)")
    parser.add_argument(
        "--ops", type=number, default=20_000, help="operations of all threads (default 20000)"
    )
    parser.add_argument("--seed", type=int, help="seed of the mix (default: drawn, and printed)")
    parser.add_argument(
        "--kinds",
        default="default",
        help="comma-separated kinds of operation: names, 'default' or 'all' (default: default)",
    )
    parser.add_argument("--skip", default="", metavar="KINDS", help="kinds to leave out")
    parser.add_argument("--list", action="store_true", help="list the kinds and their weights")
    parser.add_argument("--device", default="cpu", help="cpu, cuda or cuda:N (default cpu)")
    parser.add_argument(
        "--timeout",
        type=benchlib.positive_float,
        default=300.0,
        metavar="S",
        help="seconds without a finished operation that count as a hang (default 300)",
    )
    parser.add_argument(
        "--switch-interval",
        type=benchlib.positive_float,
        default=1e-5,
        metavar="S",
        help="sys.setswitchinterval, in seconds (default 1e-5)",
    )
    parser.add_argument("--cold", action="store_true", help="make the oracle in another process")
    parser.add_argument("--oracle", metavar="FILE", help=argparse.SUPPRESS)  # write it, and stop
    parser.add_argument("--label", default="", help="name of this run in the JSON file")
    parser.add_argument("--json", metavar="FILE", help="write the results to FILE")
    parser.add_argument("--quiet", action="store_true", help="no progress lines")
    args = parser.parse_args(argv)
    args.parser = parser
    return args


# --- the mix ----------------------------------------------------------------------------------


def choose_kinds(spec: str, skip: str, known: dict[str, Any]) -> list[Any]:
    """The kinds that ``--kinds`` names less those of ``--skip``; ValueError for an unknown name."""

    def named(text: str) -> set[str]:
        chosen: set[str] = set()
        for name in filter(None, (w.strip() for w in text.split(","))):
            if name == "all":
                chosen |= set(known)
            elif name == "default":
                chosen |= {k.name for k in known.values() if k.default}
            elif name in known:
                chosen.add(name)
            else:
                raise ValueError(f"unknown kind {name!r}; --list shows them")
        return chosen

    chosen = named(spec) - named(skip)
    if not chosen:
        raise ValueError("no kind of operation left")
    return [k for k in known.values() if k.name in chosen]


def plan(kinds: Sequence[Any], ops: int, threads: int, seed: int) -> list[list[tuple[str, int]]]:
    """Which operations each thread does, in order: ``(kind, variant)`` pairs.

    Each kind gets its share of ``ops`` by weight, but at least one where there is room; its
    variants follow one another. The same arguments give the same plan.
    """
    total = sum(k.weight for k in kinds)
    shares = {k.name: k.weight / total * ops for k in kinds}
    counts = {name: int(share) for name, share in shares.items()}
    by_remainder = sorted(shares, key=lambda n: shares[n] - counts[n], reverse=True)
    for name in by_remainder[: ops - sum(counts.values())]:
        counts[name] += 1
    for name in [n for n, c in counts.items() if c == 0]:
        largest = max(counts, key=lambda n: counts[n])
        if counts[largest] > 1:
            counts[largest] -= 1
            counts[name] = 1
    rng = random.Random(seed)
    mixed = []
    for k in kinds:
        first = rng.randrange(k.variants)
        mixed += [(k.name, (first + i) % k.variants) for i in range(counts[k.name])]
    rng.shuffle(mixed)
    return [mixed[t::threads] for t in range(threads)]


# --- comparing --------------------------------------------------------------------------------


def difference(want: Any, got: Any) -> str | None:
    """What is different, in one line; None where the results agree.

    Strings and numbers must be equal, tensors close (dtype and shape equal).
    """
    import torch

    if isinstance(want, torch.Tensor):
        if not isinstance(got, torch.Tensor):
            return f"{type(got).__name__} where a tensor should be"
        try:
            torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
        except AssertionError as e:
            return "tensor differs: " + str(e).splitlines()[0]
        return None
    if isinstance(want, (tuple, list)):
        if not isinstance(got, (tuple, list)) or len(want) != len(got):
            return f"{_short(got)} where {_short(want)} should be"
        for w, g in zip(want, got, strict=True):
            if found := difference(w, g):
                return found
        return None
    if want != got:
        if isinstance(want, str) and isinstance(got, str) and "\n" in want:
            for w, g in itertools.zip_longest(want.splitlines(), got.splitlines(), fillvalue=""):
                if w != g:
                    return f"code differs: {_short(g.strip())} where {_short(w.strip())} should be"
        return f"{_short(got)} where {_short(want)} should be"
    return None


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 90 else text[:87] + "..."


# --- what may not be left behind --------------------------------------------------------------


def state() -> dict[str, Any]:
    """The process-wide and per-thread state that tracing and compiling change, by name."""
    import math

    import operations
    import torch
    import torch.fx.traceback
    from torch.fx import _symbolic_trace
    from torch.utils import _python_dispatch

    missing = "(not there)"
    found: dict[str, Any] = {
        "nn.Module.__call__": torch.nn.Module.__call__,
        "nn.Module.__getattr__": torch.nn.Module.__getattr__,
        "is_fx_symbolic_tracing()": _symbolic_trace.is_fx_symbolic_tracing(),
        "compiler.is_compiling()": torch.compiler.is_compiling(),
        "compiler.is_dynamo_compiling()": torch.compiler.is_dynamo_compiling(),
        "compiler.is_exporting()": torch.compiler.is_exporting(),
        "traceback.has_preserved_node_meta()": torch.fx.traceback.has_preserved_node_meta(),
        "traceback.get_current_meta()": dict(torch.fx.traceback.get_current_meta()),
        "length of the dispatch mode stack": _python_dispatch._len_torch_dispatch_stack(),
        "length of the function mode stack": torch._C._len_torch_function_stack(),
        "grad enabled": torch.is_grad_enabled(),
        "autograd multithreading": torch._C._is_multithreading_enabled(),
    }
    optional: list[tuple[str, Any, str]] = [
        ("fx tracing flag", _symbolic_trace, "_is_fx_tracing_flag"),
        ("fx.CURRENT_PATCHER", _symbolic_trace, "CURRENT_PATCHER"),
        ("compiler._is_compiling_flag", torch.compiler, "_is_compiling_flag"),
        ("compiler._is_exporting_flag", torch.compiler, "_is_exporting_flag"),
        ("compiler._is_non_strict_tracing_flag", torch.compiler, "_is_non_strict_tracing_flag"),
        ("traceback.current_meta", torch.fx.traceback, "current_meta"),
        ("traceback.current_replay_node", torch.fx.traceback, "current_replay_node"),
        ("traceback.should_preserve_node_meta", torch.fx.traceback, "should_preserve_node_meta"),
        ("make_fx tracer", sys.modules["torch.fx.experimental.proxy_tensor"],
         "_CURRENT_MAKE_FX_TRACER"),
    ]  # fmt: skip
    for label, owner, name in optional:
        value = getattr(owner, name, missing)
        found[label] = dict(value) if isinstance(value, dict) else value
    for (number, name), namespace in _symbolic_trace._wrapped_fns_to_patch.copy().items():
        # The code of a GraphModule registers names too, in a namespace without a name.
        owner = namespace.get("__name__") or f"namespace {number:#x}"
        found[f"wrapped {owner}.{name}"] = namespace.get(name, missing)
    for cls, name in _symbolic_trace._wrapped_methods_to_patch:
        found[f"wrapped {cls.__name__}.{name}"] = getattr(cls, name)
    for namespace in (vars(math), vars(operations)):
        for name, value in list(namespace.items()):
            if callable(value):
                found[f"{namespace['__name__']}.{name}"] = value
    return found


def patched_names() -> list[str]:
    """Names of loaded modules that hold one of torch.fx's wrappers: none, while nobody traces."""
    from torch.fx import _symbolic_trace

    found = []
    for module_name, module in sys.modules.copy().items():
        for name, value in list(getattr(module, "__dict__", {}).items()):
            if not isinstance(value, types.FunctionType):
                continue
            code = value.__code__
            if code.co_filename == _symbolic_trace.__file__ and code.co_name == "wrapped":
                found.append(f"{module_name}.{name}")
    return found


def leaks(before: dict[str, Any], before_patched: list[str]) -> list[str]:
    """What differs from ``before``, seen from this thread and from a fresh one."""
    seen: list[tuple[str, dict[str, Any]]] = [("", state())]
    fresh = threading.Thread(target=lambda: seen.append((" (in a new thread)", state())))
    fresh.start()
    fresh.join()
    found = []
    for where, now in seen:
        for name in before:
            was, is_now = before[name], now[name]
            if was is not is_now and not (type(was) is type(is_now) and was == is_now):
                found.append(f"{name}{where}: {_short(is_now)}, was {_short(was)}")
    found += [f"{n}: still wrapped" for n in patched_names() if n not in before_patched]
    return sorted(found)


# --- the run ----------------------------------------------------------------------------------


@dataclass
class Outcome:
    """What one thread did; only that thread writes to it."""

    done: int = 0
    current: str = ""
    wrong: collections.Counter[str] = field(default_factory=collections.Counter)
    errors: collections.Counter[tuple[str, str]] = field(default_factory=collections.Counter)
    examples: dict[tuple[str, str], list[str]] = field(default_factory=dict)

    def record(self, kind: str, variant: int, index: int, message: str, stack: str) -> None:
        self.wrong[kind] += 1
        self.errors[kind, message] += 1
        kept = self.examples.setdefault((kind, message), [])
        if len(kept) < EXAMPLES_KEPT:
            kept.append(f"variant {variant}, operation {index} of its thread\n{stack}")


def first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0][:160]}" if lines else type(error).__name__


class WrappedNames(dict):
    """torch.fx's table of the names that ``fx.wrap`` registered, which can forget an operation's.

    Each ``forward`` that torch.fx generates registers the leaf functions that it calls, for good,
    and each trace patches every name of the table. After some thousand operations a trace would
    do little else, with one thread as with many.
    """

    def __init__(self, names: dict[tuple[int, str], dict[str, Any]]) -> None:
        super().__init__(names)
        self.added = threading.local()

    def __setitem__(self, key: tuple[int, str], namespace: dict[str, Any]) -> None:
        if key not in self and hasattr(self.added, "keys"):
            self.added.keys.append(key)
        super().__setitem__(key, namespace)

    @contextlib.contextmanager
    def forgotten(self) -> Iterator[None]:
        """What this thread adds in the body of the ``with`` statement goes at its end."""
        self.added.keys = []
        try:
            yield
        finally:
            for key in self.added.keys:
                self.pop(key, None)


def work(
    todo: Sequence[tuple[str, int]],
    operations: dict[str, Callable[[int], Any]],
    oracle: dict[tuple[str, int], Any],
    outcome: Outcome,
    stop: threading.Event,
    names: WrappedNames,
) -> None:
    """Do ``todo`` and compare each result; a wrong one is recorded and the next follows."""
    for index, (kind, variant) in enumerate(todo):
        if stop.is_set():
            return
        outcome.current = f"{kind} variant {variant}"
        try:
            with names.forgotten():
                got = operations[kind](variant)
            found = difference(oracle[kind, variant], got)
            if found:
                outcome.record(kind, variant, index, found, "")
        except BaseException as e:
            outcome.record(kind, variant, index, first_line(e), traceback.format_exc())
        outcome.done += 1
    outcome.current = ""


Oracle = dict[tuple[str, int], Any]


def serial_results(
    kinds: Sequence[Any], built: dict[str, Callable[[int], Any]], say: Callable[[str], None]
) -> tuple[Oracle, dict[str, float]]:
    """Do each variant of each kind twice; return the oracle and the seconds that each kind takes.

    Raises RuntimeError where an operation does not give the same result twice: such a one could
    not tell a fault of threads from its own.
    """
    oracle, seconds = {}, {}
    for k in kinds:
        say(f"serial results: {k.name}")
        taken = 0.0
        for variant in range(k.variants):
            oracle[k.name, variant] = built[k.name](variant)
            start = time.perf_counter()
            again = built[k.name](variant)
            taken += time.perf_counter() - start
            if found := difference(oracle[k.name, variant], again):
                raise RuntimeError(f"{k.name} variant {variant} gives two results alone: {found}")
        seconds[k.name] = taken / k.variants
    return oracle, seconds


def oracle_of_another_process(args: argparse.Namespace) -> tuple[Oracle, dict[str, float]]:
    """serial_results, from a process of its own."""
    import torch

    with tempfile.TemporaryDirectory(prefix="stress-oracle-") as folder:
        path = os.path.join(folder, "oracle.pt")
        command = [sys.executable, os.path.abspath(__file__), "--oracle", path]
        command += ["--kinds", args.kinds, "--skip", args.skip, "--device", args.device]
        command += ["--quiet"] * args.quiet
        subprocess.run(command, check=True)
        return torch.load(path, weights_only=False)


def watch(
    threads: Sequence[threading.Thread],
    outcomes: Sequence[Outcome],
    ops: int,
    timeout: float,
    say: Callable[[str], None],
    save: Callable[[], None],
) -> bool:
    """Wait for the threads, show progress; False where none finished anything for ``timeout``."""
    start = last_change = last_said = last_saved = time.monotonic()
    last_done = 0
    while any(t.is_alive() for t in threads):
        next(t for t in threads if t.is_alive()).join(0.5)
        now, done = time.monotonic(), sum(o.done for o in outcomes)
        # Should a thread hold the GIL for ever, this fires from C.
        faulthandler.dump_traceback_later(2 * timeout, exit=True)
        if done != last_done:
            last_done, last_change = done, now
        elif now - last_change > timeout:
            return False
        if now - last_said >= 5 or done == ops:
            last_said = now
            wrong = sum(sum(o.wrong.values()) for o in outcomes)
            say(f"{done}/{ops} operations, {wrong} wrong, {done / (now - start):.0f}/s")
        if now - last_saved >= 30:
            last_saved = now
            save()
    return True


def summary(outcomes: Sequence[Outcome]) -> list[dict[str, Any]]:
    """The distinct errors of all threads, most frequent first, each with some tracebacks."""
    counts: collections.Counter[tuple[str, str]] = collections.Counter()
    examples: dict[tuple[str, str], list[str]] = {}
    for o in outcomes:
        for error, count in list(o.errors.items()):
            counts[error] += count
            examples.setdefault(error, []).extend(o.examples[error])
    return [
        {"kind": k, "message": m, "count": n, "examples": examples[k, m][:EXAMPLES_KEPT]}
        for (k, m), n in counts.most_common()
    ]


def main(argv: Sequence[str] | None = None) -> int:
    args = parse_arguments(argv)
    if args.seed is None:
        args.seed = random.SystemRandom().randrange(2**31)
    try:
        import torch
    except ImportError as e:
        args.parser.error(f"this Python has no torch ({e}); run it with one that has")
    import warnings

    import operations as library
    import torch._dynamo
    import torch._functorch.config
    import torch._inductor.config
    import torch.fx.experimental.proxy_tensor

    warnings.simplefilter("ignore")
    if args.list:
        rows = [(k.name, k.weight, k.variants, "default" if k.default else "") for k in
                library.KINDS.values()]  # fmt: skip
        print(benchlib.table(("kind", "weight", "variants", "in the mix"), rows))
        return 0
    try:
        kinds = choose_kinds(args.kinds, args.skip, library.KINDS)
        device = torch.device(args.device)
        torch.zeros(1, device=device)
    except (ValueError, RuntimeError, AssertionError) as e:
        args.parser.error(str(e).splitlines()[0])

    # Compile for real each time: a cache that is hit skips the traces that are to meet.
    torch._inductor.config.fx_graph_cache = False
    torch._functorch.config.enable_autograd_cache = False
    torch._dynamo.config.cache_size_limit = 64
    if device.type == "cpu":
        torch.set_num_threads(1)  # the threads under test are the load
    faulthandler.enable()

    shown = sys.stderr.isatty()

    def say(text: str) -> None:
        if not args.quiet:
            print(f"\r\033[K{text}" if shown else text, end="" if shown else "\n",
                  file=sys.stderr, flush=True)  # fmt: skip

    if not args.oracle:
        print(
            f"stress: torch {torch.__version__}, {args.threads} threads, {args.ops} operations, "
            f"seed {args.seed}, device {args.device}",
            flush=True,
        )
    built = {k.name: k.build(device) for k in kinds}
    names = WrappedNames(torch.fx._symbolic_trace._wrapped_fns_to_patch)
    torch.fx._symbolic_trace._wrapped_fns_to_patch = names
    if args.cold:
        oracle, seconds = oracle_of_another_process(args)
    else:
        oracle, seconds = serial_results(kinds, built, say)
    if args.oracle:
        torch.save((oracle, seconds), args.oracle)
        return 0
    todo = plan(kinds, args.ops, args.threads, args.seed)
    counts = collections.Counter(kind for part in todo for kind, _ in part)
    before, before_patched = state(), patched_names()

    outcomes = [Outcome() for _ in range(args.threads)]
    stop = threading.Event()
    threads = [
        threading.Thread(
            target=work, args=(t, built, oracle, o, stop, names), name=f"stress-{i}", daemon=True
        )
        for i, (t, o) in enumerate(zip(todo, outcomes, strict=True))
    ]
    report: dict[str, Any] = {
        "benchmark": "stress",
        "label": args.label,
        **benchlib.machine_facts(),
        **benchlib.torch_facts(),
        "device": args.device,
        "threads": args.threads,
        "operations": args.ops,
        "seed": args.seed,
        "cold": args.cold,
        "switch_interval": args.switch_interval,
        "outcome": "died",  # what stays in the file should the process crash
    }
    start = time.monotonic()

    def save() -> None:
        errors = summary(outcomes)
        wrong: collections.Counter[str] = collections.Counter()
        for o in outcomes:
            wrong.update(dict(o.wrong))
        report.update(
            seconds=round(time.monotonic() - start, 1),
            done=sum(o.done for o in outcomes),
            wrong=sum(wrong.values()),
            kinds={
                k.name: {
                    "operations": counts[k.name],
                    "wrong": wrong[k.name],
                    "serial_ms": round(seconds[k.name] * 1e3, 3),
                }
                for k in kinds
            },
            errors=errors,
        )
        if args.json:
            benchlib.write_json(args.json, report)

    save()
    old_interval = sys.getswitchinterval()
    sys.setswitchinterval(args.switch_interval)
    try:
        for t in threads:
            t.start()
        alive = watch(threads, outcomes, args.ops, args.timeout, say, save)
    except KeyboardInterrupt:
        stop.set()
        report["outcome"] = "interrupted"
        save()
        print("\nstress: interrupted", file=sys.stderr)
        return 130
    finally:
        sys.setswitchinterval(old_interval)
        faulthandler.cancel_dump_traceback_later()
    if shown:
        say("")
    if not alive:
        report["outcome"] = "hung"
        report["waiting"] = {t.name: o.current for t, o in zip(threads, outcomes, strict=True)
                             if t.is_alive()}  # fmt: skip
        save()
        print(f"stress: HUNG: no operation ended in {args.timeout:g} s; still running: "
              f"{report['waiting']}", flush=True)  # fmt: skip
        faulthandler.dump_traceback(all_threads=True)
        return 3

    report["leaks"] = leaks(before, before_patched)
    save()
    after = Outcome()
    again = [(k.name, v) for k in kinds for v in range(k.variants)]
    work(again, built, oracle, after, threading.Event(), names)
    report["wrong_alone_afterwards"] = summary([after])
    failed = bool(report["wrong"] or report["leaks"] or report["wrong_alone_afterwards"])
    report["outcome"] = "failed" if failed else "passed"
    save()
    show(report)
    return int(failed)


def show(report: dict[str, Any]) -> None:
    """Print the table, the errors and what was left behind."""
    rows = [(name, f["operations"], f["wrong"], f"{f['serial_ms']:.2f}") for name, f in
            report["kinds"].items()]  # fmt: skip
    rows.append(("all", report["done"], report["wrong"], ""))
    print(benchlib.table(("kind", "operations", "wrong", "alone, ms"), rows))
    for error in report["errors"][:20]:
        print(f"{error['count']:6} x {error['kind']}: {error['message']}")
    if len(report["errors"]) > 20:
        print(f"       and {len(report['errors']) - 20} more kinds of error")
    for leak in report["leaks"][:20]:
        print(f"left behind: {leak}")
    for error in report["wrong_alone_afterwards"][:20]:
        print(f"wrong alone afterwards: {error['kind']}: {error['message']}")
    print(f"stress: {report['outcome']}: {report['wrong']} of {report['done']} operations wrong, "
          f"{len(report['leaks'])} names or flags left behind, seed {report['seed']}, "
          f"{report['seconds']:.0f} s")  # fmt: skip


def run() -> None:
    """Run main with Inductor's caches in a folder of its own; do not join hung threads."""
    cache = tempfile.mkdtemp(prefix="stress-")
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = cache
    try:
        code = main()
    except SystemExit as e:
        code = e.code if isinstance(e.code, int) else 2
    except Exception:
        traceback.print_exc()
        code = 1
    finally:
        shutil.rmtree(cache, ignore_errors=True)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    run()
