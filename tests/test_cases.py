"""Public reports of models on several threads, re-made so that the threads overlap for certain.

Each report became a test that holds a thread at the point where the others did the harm: in the
middle of a trace, of a compile, of a first use. Each fails on the stock releases every time. Each
runs in a process of its own, since what a failure leaves behind would spoil the next one.
"""

from __future__ import annotations

import copy
import threading
import traceback
from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch")
from thread_cases import (  # noqa: E402
    ConvNet,
    Gate,
    Threads,
    in_own_process,
    nothing_left_behind,
    reach,
    run_asked_body,
)
from torch import nn  # noqa: E402


@in_own_process
def test_traced_models_in_several_threads() -> None:
    """Four threads trace a model each; all are inside at once, and the first in is the first out.

    Reported: inference servers that trace a model for each worker get
    "module is not installed as a submodule".
    """
    count = 4
    models = [ConvNet().eval() for _ in range(count)]
    x = torch.rand(1, 3, 8, 8)
    want = [(torch.fx.symbolic_trace(m).code, m(x)) for m in models]
    inside = [threading.Event() for _ in range(count)]
    ended = [threading.Event() for _ in range(count)]
    threads = Threads()

    def trace(i: int) -> None:
        def stop() -> None:
            inside[i].set()
            reach(inside[-1], "the last trace")
            if i:
                reach(ended[i - 1], f"the end of trace {i - 1}")

        models[i].gate.stops[threading.get_ident()] = stop
        try:
            traced = torch.fx.symbolic_trace(models[i])
        finally:
            ended[i].set()
        assert traced.code == want[i][0]
        torch.testing.assert_close(traced(x), want[i][1])

    with nothing_left_behind():
        for i in range(count):
            threads.start(trace, i)
            reach(inside[i], f"trace {i}")
        threads.join()
    for model, (code, out) in zip(models, want, strict=True):
        assert torch.fx.symbolic_trace(model).code == code
        torch.testing.assert_close(model(x), out)


@in_own_process
def test_plain_inference_while_another_thread_traces() -> None:
    """Models that nobody traces are called, trained and scripted while a trace is under way.

    Reported: a request that arrives while another thread exports or quantizes a model fails, with
    module_call_wrapper in the stack of the plain model.
    """
    traced, plain = ConvNet().eval(), ConvNet().eval()
    x = torch.rand(2, 3, 8, 8)
    code, want = torch.fx.symbolic_trace(traced).code, plain(x)
    inside, done = threading.Event(), threading.Event()
    threads = Threads()

    def trace() -> None:
        def stop() -> None:
            inside.set()
            reach(done, "the end of the plain calls")

        traced.gate.stops[threading.get_ident()] = stop
        assert torch.fx.symbolic_trace(traced).code == code

    def infer() -> None:
        try:
            torch.testing.assert_close(plain(x), want)
            torch.testing.assert_close(traced(x), copy.deepcopy(traced)(x))
            assert not torch.fx._symbolic_trace.is_fx_symbolic_tracing()
            trained = copy.deepcopy(plain).train()
            optimizer = torch.optim.SGD(trained.parameters(), lr=0.1)
            trained(x).square().mean().backward()
            assert all(p.grad is not None for p in trained.parameters())
            optimizer.step()
        finally:
            done.set()

    with nothing_left_behind():
        threads.start(trace)
        reach(inside, "the trace")
        threads.start(infer)
        threads.join()


@in_own_process
def test_make_fx_and_compile_in_threads() -> None:
    """make_fx, symbolic_trace and torch.compile side by side give the graphs that they give alone.

    Reported: make_fx in threads numbers its constants differently from run to run, and compiling
    in one thread changes what another one traces.
    """
    from torch.fx.experimental.proxy_tensor import make_fx

    model = nn.Sequential(nn.Linear(4, 4), Gate(), nn.Linear(4, 4))
    net = ConvNet().eval()
    x, image = torch.randn(2, 4), torch.rand(1, 3, 8, 8)
    other = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
    graphs: list[str] = []

    def record(gm: torch.fx.GraphModule, inputs: Any) -> Callable[..., Any]:
        graphs.append(gm.code)
        return gm.forward

    made, traced = make_fx(model)(x).code, torch.fx.symbolic_trace(net).code
    torch.compile(copy.deepcopy(other), backend=record)(x)
    alone = graphs.copy()
    torch._dynamo.reset()
    graphs.clear()
    compiled = torch.compile(copy.deepcopy(other), backend="aot_eager")
    want = compiled(x)

    making, tracing, done = threading.Event(), threading.Event(), threading.Event()
    threads = Threads()

    def make() -> None:
        def stop() -> None:
            making.set()
            reach(done, "the end of the compiles")

        model[1].stops[threading.get_ident()] = stop
        assert make_fx(model)(x).code == made

    def trace() -> None:
        def stop() -> None:
            tracing.set()
            reach(done, "the end of the compiles")

        net.gate.stops[threading.get_ident()] = stop
        assert torch.fx.symbolic_trace(net).code == traced

    def compile_and_call() -> None:
        try:
            torch.testing.assert_close(compiled(x), want)
            torch.compile(copy.deepcopy(other), backend=record)(x)
            assert graphs == alone
            assert make_fx(copy.deepcopy(model))(x).code == made
            torch.testing.assert_close(net(image), copy.deepcopy(net)(image))
        finally:
            done.set()

    with nothing_left_behind():
        threads.start(make)
        reach(making, "make_fx")
        threads.start(trace)
        reach(tracing, "symbolic_trace")
        threads.start(compile_and_call)
        threads.join()


@pytest.mark.parametrize("dynamic", ["True", "False"])
@in_own_process
def test_compiled_model_with_other_batch_sizes(dynamic: str) -> None:
    """A compiled model is called in one thread while another compiles it for a new batch size.

    Reported: a model compiled with dynamic=True, or dynamic=False, raises "FX to symbolically
    trace a dynamo-optimized function", or takes the branch meant for the compiler, when threads
    call it with other batch sizes.
    """
    from torch._dynamo.backends.debugging import aot_eager

    held, done = threading.Event(), threading.Event()
    holding = threading.local()

    @torch.library.custom_op("test_cases::passes", mutates_args=())
    def passes(x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @passes.register_fake
    def _(x: torch.Tensor) -> torch.Tensor:
        # Inside Dynamo's trace, then inside AOTAutograd's: only there is an FX trace alive.
        if getattr(holding, "here", False) and any(
            frame.name == "dispatch_trace" for frame in traceback.extract_stack()
        ):
            holding.here = False
            held.set()
            reach(done, "the calls beside the compile")
        return torch.empty_like(x)

    sizes: set[str] = set()
    compiling: list[bool] = []

    def backend(gm: torch.fx.GraphModule, inputs: Any) -> Callable[..., Any]:
        for value in inputs:
            if isinstance(value, torch.Tensor):
                sizes.update(type(s).__name__ for s in value.shape)
        return aot_eager(gm, inputs)

    @torch._dynamo.disable
    def at_run_time(x: torch.Tensor) -> torch.Tensor:
        compiling.append(torch.compiler.is_compiling())
        return x

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(8, 16), nn.Linear(16, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.b(at_run_time(passes(torch.nn.functional.gelu(self.a(x)))))

    model = Model().requires_grad_(False)
    compiled = torch.compile(copy.deepcopy(model), backend=backend, dynamic=dynamic == "True")
    compiled(torch.randn(3, 8))
    threads = Threads()

    def new_size() -> None:
        holding.here = True
        x = torch.randn(1, 8)  # a batch of one is compiled anew, dynamic or not
        torch.testing.assert_close(compiled(x), model(x))

    def known_sizes() -> None:
        try:
            for n in (3, 3) if dynamic == "False" else (3, 7, 5):
                x = torch.randn(n, 8)
                torch.testing.assert_close(compiled(x), model(x))
        finally:
            done.set()

    with nothing_left_behind():
        threads.start(new_size)
        reach(held, "the trace under the compile")
        threads.start(known_sizes)
        threads.join()
        for n in (1, 3, 11):
            x = torch.randn(n, 8)
            torch.testing.assert_close(compiled(x), model(x))
    assert compiling and not any(compiling), "is_compiling() was True where nothing compiled"
    if dynamic == "False":
        assert sizes == {"int"}, "a symbolic size under dynamic=False"


@in_own_process
def test_compile_fx_in_threads() -> None:
    """Inductor's own entry point from many threads at once, as the first thing that they do.

    Reported: "Duplicate pattern", "already in dispatch cache" and "CURRENT_PATCHER is None" when
    several threads call compile_fx.
    """
    from torch._inductor.compile_fx import compile_fx
    from torch._inductor.fx_passes import misc_patterns

    # Inductor registers its patterns at the first compile: hold the one that does so until a
    # second thread joins in, which none may, or long enough for all to be waiting.
    register = misc_patterns._misc_patterns_init
    first, second = threading.Event(), threading.Event()
    entries: list[str] = []

    def held(*args: Any, **kwargs: Any) -> Any:
        entries.append(threading.current_thread().name)
        if len(entries) > 1:
            second.set()
        first.set()
        second.wait(2)
        return register(*args, **kwargs)

    misc_patterns._misc_patterns_init = held
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)).requires_grad_(False)
    gm = torch.fx.symbolic_trace(model)
    x = torch.randn(3, 4)
    want = gm(x)
    threads = Threads()

    def compile_and_run() -> None:
        out = compile_fx(copy.deepcopy(gm), [x.clone()])(x)
        out = out[0] if isinstance(out, (list, tuple)) else out
        torch.testing.assert_close(out, want, rtol=1e-4, atol=1e-5)

    with nothing_left_behind():
        for _ in range(6):
            threads.start(compile_and_run)
        reach(first, "the registration of patterns")
        threads.join()
    assert len(entries) == 1, "the patterns were registered twice"


if __name__ == "__main__":
    run_asked_body()
