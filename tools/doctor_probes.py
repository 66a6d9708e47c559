"""Small deterministic probes for the faults, one forked child each; prints a line of JSON a probe.

A probe holds one thread at an exact point (inside a traced forward, a backend, a fake kernel) and
lets another one do its work. It says whether the fault shows; no probe needs a GPU unless it says
so. Run by build.sh doctor.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import select
import signal
import sys
import threading
import time
import timeit
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextvars import ContextVar
from unittest import mock

import torch
import torch._dynamo
import torch._dynamo.testing
import torch.fx.traceback
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx

LIMIT = 60.0
TRACED_COMPILED = "symbolically trace a dynamo-optimized function"

# What a probe found: it shows, it does not, or it cannot here; and in which way.
Finding = tuple[str, str]
OK: Finding = ("ok", "")


def affected(how: str) -> Finding:
    return ("affected", how)


def not_here(why: str) -> Finding:
    return ("n.a.", why)


class Hold:
    """A point at which a thread stops until it is released."""

    def __init__(self) -> None:
        self.reached = threading.Event()
        self.released = threading.Event()

    def __call__(self) -> None:
        self.reached.set()
        if not self.released.wait(LIMIT):
            raise TimeoutError("held for too long")


def start(function: Callable[[], object]) -> Future:
    """Run ``function`` on a new thread."""
    pool = ThreadPoolExecutor(1)
    future = pool.submit(function)
    pool.shutdown(wait=False)
    return future


@contextlib.contextmanager
def held(function: Callable[[], object], hold: Hold) -> Iterator[Future]:
    """Run ``function`` on a new thread, stopped at ``hold`` for the body of the block."""
    future = start(function)
    while not hold.reached.wait(0.01):
        if future.done():
            future.result()
            raise RuntimeError("the thread ended before it was held")
    try:
        yield future
    finally:
        hold.released.set()
        future.exception(LIMIT)


def attempt(function: Callable[..., object], *args: object) -> tuple[object, Exception | None]:
    try:
        return function(*args), None
    except Exception as error:
        return None, error


def first_line(error: BaseException) -> str:
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0][:70]}" if text else type(error).__name__


class Held(nn.Module):
    """Traced, it stops at its hold, then calls a submodule."""

    def __init__(self, hold: Hold) -> None:
        super().__init__()
        self.hold = hold
        self.linear = nn.Linear(2, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.hold()
        return self.linear(x)


def trace_held(hold: Hold) -> Callable[[], torch.fx.GraphModule]:
    module = Held(hold)
    return lambda: torch.fx.symbolic_trace(module)


def f1() -> Finding:
    compiled = torch.compile(lambda x: x + 1, backend="eager")
    compiled(torch.ones(2))
    hold = Hold()
    with held(trace_held(hold), hold):
        _, error = attempt(compiled, torch.ones(2))
    if error is None:
        return OK
    if TRACED_COMPILED in str(error):
        return affected(first_line(error))
    raise error


def f2() -> Finding:
    variable: ContextVar[bool] = ContextVar("variable", default=False)

    def by_context() -> bool:
        return variable.get()

    def cost(function: Callable[[], bool]) -> float:
        return timeit.timeit(function, number=1000, timer=time.thread_time) / 1000

    reads = torch.fx._symbolic_trace.is_fx_tracing
    # In turns, so that a moment in which the machine is busy does not fall on one of them alone
    turns = [(cost(by_context), cost(reads)) for _ in range(60)]
    mine, theirs = (min(costs) for costs in zip(*turns, strict=True))
    if theirs > 4 * mine:
        return affected(f"reading the flag takes {theirs * 1e9:.0f} ns, not {mine * 1e9:.0f}")
    return OK


def f3() -> Finding:
    linear = nn.Linear(2, 2)
    hold = Hold()
    with held(trace_held(hold), hold):
        result, error = attempt(linear, torch.ones(2))
    if error is not None:
        return affected(first_line(error))
    return OK if type(result) is torch.Tensor else affected(f"it returns a {type(result).__name__}")


def f4() -> Finding:
    call, getter = nn.Module.__call__, nn.Module.__dict__.get("__getattr__")
    first, second = Hold(), Hold()
    with held(trace_held(first), first) as one, held(trace_held(second), second) as two:
        first.released.set()
        errors = [one.exception(LIMIT)]
        second.released.set()
        errors.append(two.exception(LIMIT))
    if nn.Module.__call__ is not call or nn.Module.__dict__.get("__getattr__") is not getter:
        return affected("nn.Module stays patched after the last trace")
    for error in errors:
        if error is not None:
            return affected(first_line(error))
    return OK


def f5() -> Finding:
    call = nn.Module.__call__
    trace, compile_ = Hold(), Hold()

    def backend(graph_module: torch.fx.GraphModule, inputs: list[object]) -> Callable:
        compile_()
        return graph_module.forward

    compiled = torch.compile(lambda x: x + 1, backend=backend)
    with held(trace_held(trace), trace) as tracing:
        compiling = start(lambda: compiled(torch.ones(2)))
        while not compile_.reached.wait(0.01) and not compiling.done():
            pass
        if compiling.done():
            error = compiling.exception()
            if error is not None and TRACED_COMPILED in str(error):
                return not_here("F1 comes first")
            return affected(first_line(error) if error else "the compile is left out")
        trace.released.set()
        errors = [tracing.exception(LIMIT)]
        compile_.released.set()
        errors.append(compiling.exception(LIMIT))
    for error in errors:
        if error is not None:
            return affected(first_line(error))
    if not any(node.op == "call_module" for node in tracing.result().graph.nodes):
        return affected("a leaf module is traced through instead of recorded")
    return OK if nn.Module.__call__ is call else affected("nn.Module stays patched")


def f6() -> Finding:
    hold = Hold()

    class Constants(nn.Module):
        def __init__(self, count: int, between: Callable[[], object]) -> None:
            super().__init__()
            self.count, self.between = count, between

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for index in range(self.count):
                x = x + torch.ones(2)
                if index == 0:
                    self.between()
            return x

    def names(graph_module: torch.fx.GraphModule) -> list[str]:
        return [node.target for node in graph_module.graph.nodes if node.op == "get_attr"]

    alone = names(torch.fx.symbolic_trace(Constants(2, lambda: None)))
    module = Constants(2, hold)
    with held(lambda: torch.fx.symbolic_trace(module), hold) as future:
        start(lambda: torch.fx.symbolic_trace(Constants(5, lambda: None))).exception(LIMIT)
    if future.exception() is not None:
        return not_here("F4 comes first")
    found = names(future.result())
    return OK if found == alone else affected(f"{found[-1]} where it is {alone[-1]} alone")


def f7() -> Finding:
    hold = Hold()

    def backend(graph_module: torch.fx.GraphModule, inputs: list[object]) -> Callable:
        hold()
        return graph_module.forward

    compiled = torch.compile(lambda x: x + 1, backend=backend)
    with held(lambda: compiled(torch.ones(2)), hold):
        if torch.compiler.is_compiling():
            return affected("is_compiling() is True while another thread compiles")
    hold = Hold()
    module = Held(hold)
    with held(lambda: torch.export.export(module, (torch.ones(2),), strict=False), hold):
        if torch.compiler.is_compiling() or torch.compiler.is_exporting():
            return affected("is_exporting() is True while another thread exports")
    return OK


def f8() -> Finding:
    hold = Hold()

    def preserve() -> None:
        with torch.fx.traceback.preserve_node_meta():
            hold()

    with held(preserve, hold):
        leaks = torch.fx.traceback.has_preserved_node_meta()
    return affected("another thread's setting is seen") if leaks else OK


def f9() -> Finding:
    if not torch.cuda.is_available():
        return not_here("needs a CUDA device")
    threads = set()

    class Identity(torch.autograd.Function):
        @staticmethod
        def forward(ctx: object, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: object, gradient: torch.Tensor) -> torch.Tensor:
            threads.add(threading.get_ident())
            return gradient

    def function(x: torch.Tensor) -> torch.Tensor:
        return torch.autograd.grad(Identity.apply(x).sum(), x)[0]

    make_fx(function)(torch.ones(2, device="cuda", requires_grad=True))
    if threads == {threading.get_ident()}:
        return OK
    return affected("a backward inside a trace waits for the device's autograd thread")


def f10() -> Finding:
    stop: dict[str, Hold] = {}

    @torch._dynamo.disable
    def pause(name: str) -> None:
        if name in stop:
            stop[name]()

    def broken(x: torch.Tensor) -> torch.Tensor:
        x = x + 1
        pause("frames")
        return x * 2

    def other(x: torch.Tensor) -> torch.Tensor:
        x = x - 1
        pause("stance")
        return x * 3

    frames = torch.compile(broken, backend="eager", dynamic=False)
    stance = torch.compile(other, backend="eager", dynamic=False)
    frames(torch.ones(2))
    stance(torch.ones(2))

    def under_stance() -> None:
        with torch.compiler.set_stance("default", skip_guard_eval_unsafe=True):
            stance(torch.ones(2))

    stop = {"frames": Hold(), "stance": Hold()}
    with (
        held(lambda: frames(torch.ones(3)), stop["frames"]) as future,
        held(under_stance, stop["stance"]),
    ):
        stop["frames"].released.set()
        error = future.exception(LIMIT)
    if error is None:
        return OK
    if "skip_guard_eval_unsafe" in str(error):
        return affected(first_line(error))
    raise error


def f11() -> Finding:
    hold = Hold()
    compiles = []

    def backend(graph_module: torch.fx.GraphModule, inputs: list[object]) -> Callable:
        compiles.append(threading.get_ident())
        if len(compiles) == 1:
            hold()
        return graph_module.forward

    compiled = torch.compile(lambda x: x + 1, backend=backend)
    with held(lambda: compiled(torch.ones(2)), hold):
        waiting = threading.Thread(target=compiled, args=(torch.ones(2),), daemon=True)
        waiting.start()
        still_in_one_place(waiting)
    waiting.join(LIMIT)
    if len(compiles) > 1:
        return affected("a thread that waited for a compile compiles the same again")
    return OK


def still_in_one_place(thread: threading.Thread) -> None:
    """Wait until ``thread`` waits for something."""
    place, since = None, time.monotonic()
    deadline = since + LIMIT
    while time.monotonic() < deadline:
        frame = sys._current_frames().get(thread.ident or 0)
        now = (frame.f_code, frame.f_lasti) if frame else None
        if now is None or now != place:
            place, since = now, time.monotonic()
        elif time.monotonic() - since > 0.5:
            return
        time.sleep(0.01)
    raise TimeoutError("the thread never came to wait")


def f12() -> Finding:
    from torch._higher_order_ops.utils import _set_compilation_env

    hold = Hold()
    seen = []

    class Looks(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            hold()
            seen.append(torch.fx._symbolic_trace.is_fx_tracing())
            return x

    module = Looks()
    config = torch._dynamo.config
    value = config.allow_empty_graphs
    with held(lambda: torch.fx.symbolic_trace(module), hold) as future, _set_compilation_env():
        leaks = start(lambda: config.allow_empty_graphs).result(LIMIT) != value
        hold.released.set()
        future.result(LIMIT)
    if seen != [True]:
        return affected("another thread's trace is taken for none")
    return affected("Dynamo's configuration changes for every thread") if leaks else OK


def f13() -> Finding:
    hold = Hold()
    module, inputs = Held(hold), (torch.ones(2),)
    with held(lambda: torch.export.export(module, inputs, strict=False), hold) as future:
        _, error = attempt(lambda: torch.export.export(nn.Linear(2, 2), inputs, strict=False))
    error = error or future.exception()
    return OK if error is None else affected(first_line(error))


def f14() -> Finding:
    """An autograd call nested deeper than 60 runs on another thread, with or without a GPU."""
    setting: dict[str, object] = {}
    here = threading.get_ident()

    class Nested(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x: torch.Tensor, depth: int) -> torch.Tensor:
            ctx.depth = depth
            return x.clone()

        @staticmethod
        def backward(ctx, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
            if threading.get_ident() != here:
                setting["elsewhere"] = torch._dynamo.config.recompile_limit
            elif ctx.depth < 100:
                with torch.enable_grad():
                    leaf = torch.ones(1, requires_grad=True)
                    Nested.apply(leaf, ctx.depth + 1).sum().backward()
            return gradient, None

    with torch._dynamo.config.patch(recompile_limit=77):
        started = start(lambda: torch._dynamo.config.recompile_limit).result(LIMIT)
        Nested.apply(torch.ones(1, requires_grad=True), 0).sum().backward()
    if started == 77:
        return not_here("this release keeps its configuration for the whole process")
    if "elsewhere" not in setting:
        return not_here("autograd used no other thread")
    if setting["elsewhere"] == 77:
        return OK
    return affected("code that autograd runs on its threads sees Dynamo's defaults")


def f15() -> Finding:
    from torch._subclasses.fake_tensor import FakeTensorMode

    if torch.version.cuda is None:
        return not_here("a build without CUDA")
    if torch.cuda.is_available():
        return not_here("there is a GPU")

    def enter() -> None:
        with FakeTensorMode():
            pass

    for _ in range(3):
        thread = threading.Thread(target=enter)
        thread.start()
        thread.join()
    enter()
    return OK


def f16() -> Finding:
    if torch.cuda.device_count() < 2:
        return not_here("needs two CUDA devices")
    model = torch.compile(nn.Linear(2, 2).cuda(), backend="eager")
    _, error = attempt(nn.DataParallel(model), torch.ones(4, 2, device="cuda"))
    return OK if error is None else affected(first_line(error))


def f17() -> Finding:
    from torch._inductor import cudagraph_trees

    local = cudagraph_trees.local
    error = start(lambda: cudagraph_trees.get_obj(local, "tree_manager_containers")).exception()
    if error is not None:
        return affected("a new thread has no CUDA graph trees")
    generation = cudagraph_trees.CUDAGraphTreeManager.get_curr_generation
    before = generation()
    start(torch.compiler.cudagraph_mark_step_begin).result()
    if generation() != before:
        return affected("a step that another thread marks ends this thread's")
    return OK


def f18() -> Finding:
    from torch.utils._python_dispatch import TorchDispatchMode, is_in_torch_dispatch_mode

    hold = Hold()

    def in_mode() -> None:
        with TorchDispatchMode():
            hold()

    with held(in_mode, hold):
        seen = is_in_torch_dispatch_mode()
    return affected("another thread's mode is seen") if seen else OK


def f19() -> Finding:
    try:
        from torch._dynamo import graph_bytecode_inputs as inputs
    except ImportError:
        return OK  # graphs of this release get no such objects
    module = nn.Identity()
    index = inputs.register_graph_created_object(module, lambda index, codegen: None)
    start(lambda: inputs.store_user_object_weakrefs(nn.Identity())).result()
    found, error = attempt(inputs.get_external_object_by_index, index)
    if error is not None or found is not module:
        return affected("what a graph gets by its index is another thread's")
    return OK


def f20() -> Finding:
    from torch._functorch.aot_autograd import aot_function, make_boxed_func

    hold = Hold()

    def function(x: torch.Tensor) -> torch.Tensor:
        hold()
        return x.sin()

    traced = aot_function(function, lambda gm, _: make_boxed_func(gm.forward))
    with (
        held(lambda: traced(torch.ones(2)), hold),
        mock.patch("torch.cuda.random._lazy_call") as set_,
    ):
        torch.cuda.set_rng_state(torch.zeros(16, dtype=torch.uint8))
    return OK if set_.called else affected("it does nothing while another thread is in AOTAutograd")


def f21() -> Finding:
    from torch._dynamo import utils

    region = getattr(torch._dynamo, "error_on_graph_break", None)
    if region is None:
        return OK  # this release has none
    hold = Hold()

    def in_region() -> None:
        with region(True):
            hold()

    with held(in_region, hold):
        seen = utils._get_error_on_graph_break()
    return affected("a graph break is an error in another thread's region") if seen else OK


def f22() -> Finding:
    counter = torch._dynamo.testing.CompileCounter()
    compiled = torch.compile(lambda x: x + 1, backend=counter)
    x = torch.ones(2)
    compiled(x)
    start(lambda: torch.set_default_device("meta")).result()
    compiled(x)
    return affected("one is compiled again") if counter.frame_count > 1 else OK


PROBES = {
    "F1": f1,
    "F2": f2,
    "F3": f3,
    "F4": f4,
    "F5": f5,
    "F6": f6,
    "F7": f7,
    "F8": f8,
    "F9": f9,
    "F10": f10,
    "F11": f11,
    "F12": f12,
    "F13": f13,
    "F14": f14,
    "F15": f15,
    "F16": f16,
    "F17": f17,
    "F18": f18,
    "F19": f19,
    "F20": f20,
    "F21": f21,
    "F22": f22,
}


def run(probe: Callable[[], Finding]) -> Finding:
    """Run a probe in a forked child."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reader)
        # What a faulty torch has to say about its end is no part of the report.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        faulthandler.disable()
        try:
            if probe is not f15 and torch.version.cuda and not torch.cuda.is_available():
                # This thread lives as long as its process: F15 does not end the other probes.
                torch._C._ensureCUDADeviceGuardSet()
            finding = probe()
        except BaseException as error:
            where = traceback.extract_tb(error.__traceback__)[-1]
            finding = ("unknown", f"{first_line(error)} ({os.path.basename(where.filename)})")
        os.write(writer, json.dumps(finding).encode())
        os._exit(0)
    os.close(writer)
    try:
        if not select.select([reader], [], [], 2 * LIMIT)[0]:
            os.kill(child, signal.SIGKILL)
            return ("affected", "it hangs")
        content = os.read(reader, 65536)
    finally:
        os.close(reader)
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if content:
        return tuple(json.loads(content))
    if status < 0:
        return affected(f"the process dies of {signal.Signals(-status).name}")
    return ("unknown", f"the probe ended with status {status}")


def main() -> None:
    print(json.dumps(["torch", torch.__version__, torch.__file__]), flush=True)
    for fault, probe in PROBES.items():
        print(json.dumps([fault, *run(probe)]), flush=True)


if __name__ == "__main__":
    main()
