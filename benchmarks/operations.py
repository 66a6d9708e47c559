"""The operations that stress.py mixes: tracing, compiling and running models in every usual way.

A kind builds its models once, from a fixed seed, and returns a function of a variant number. That
function does one operation and returns what it made (graph code, tensors, flags) as nested tuples
of strings, numbers and tensors. Alone in the process it gives the same result every time; that
result is the oracle for the same operation beside others.
"""

import copy
import functools
import itertools
import math
import pickle
import types
from collections.abc import Callable
from dataclasses import dataclass
from math import sqrt
from typing import Any

import torch
import torch.fx as fx
import torch.fx.traceback as fx_traceback
from torch import nn
from torch.fx._symbolic_trace import is_fx_symbolic_tracing
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

Operation = Callable[[int], Any]


@dataclass(frozen=True)
class Kind:
    """One kind of operation.

    ``weight`` is its share in the mix relative to the others, ``variants`` how many different
    models or inputs it has, ``default`` whether it is in the mix when no kinds are named.
    """

    name: str
    weight: float
    variants: int
    default: bool
    build: Callable[[torch.device], Operation]


KINDS: dict[str, Kind] = {}


def kind(
    weight: float, variants: int, default: bool = True
) -> Callable[[Callable[[torch.device], Operation]], Callable[[torch.device], Operation]]:
    """Register the decorated builder under its own name."""

    def register(build: Callable[[torch.device], Operation]) -> Callable[[torch.device], Operation]:
        KINDS[build.__name__] = Kind(build.__name__, weight, variants, default, build)
        return build

    return register


def seeded(device: torch.device, *shape: int, seed: int = 0) -> torch.Tensor:
    """The same random tensor for the same seed on every device."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(device)


def seeded_model(model: Callable[[], nn.Module], device: torch.device, seed: int = 0) -> nn.Module:
    """``model()`` in eval mode with parameters drawn from ``seed``."""
    made = model().eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)
    return made.to(device)


# --- models -----------------------------------------------------------------------------------


class Residual(nn.Module):
    """Traced through, while its Linear layers are leaves."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)
        self.scale = nn.Parameter(torch.ones(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.scale * self.down(torch.relu(self.up(self.norm(x))))


class Stack(nn.Module):
    """``depth`` Residual blocks and a head."""

    def __init__(self, depth: int, width: int = 8) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Residual(width) for _ in range(depth))
        self.head = nn.Linear(width, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Parameters(nn.Module):
    """Uses its parameters and buffers directly, each several times."""

    def __init__(self, count: int, width: int = 8) -> None:
        super().__init__()
        self.weights = nn.ParameterList(nn.Parameter(torch.ones(width)) for _ in range(count))
        self.bias = nn.Parameter(torch.zeros(width))
        self.register_buffer("offset", torch.arange(width, dtype=torch.float32))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for i in range(len(self.weights)):
            x = x * self.weights[i] + self.bias
        return x + self.offset - self.bias


class MLP(nn.Module):
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.a = nn.Linear(width, width)
        self.b = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(torch.nn.functional.gelu(self.a(x)))


# --- names that torch.fx patches during a trace -----------------------------------------------


def scaled(x: torch.Tensor, factor: float) -> torch.Tensor:
    return x * factor


fx.wrap("scaled")
fx.wrap("len")  # a builtin: not in this module's globals until a trace puts it there


def shifted(x: torch.Tensor, by: float) -> torch.Tensor:
    return x + by


def uses_wrapped(x: torch.Tensor) -> torch.Tensor:
    return scaled(x, 2.0) + len(x)


def uses_wrapped_twice(x: torch.Tensor) -> torch.Tensor:
    return scaled(scaled(x, 3.0), 0.5).relu()


def uses_math(x: torch.Tensor) -> torch.Tensor:
    return x / sqrt(x.size(1)) + math.floor(x.size(0))


def uses_shifted(x: torch.Tensor) -> torch.Tensor:
    return shifted(x, 1.5) * sqrt(x.size(0))


def branches_on_value(x: torch.Tensor) -> torch.Tensor:
    return x + 1 if x.sum() > 0 else x - 1


class UsesWrapped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mlp = MLP()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return scaled(self.mlp(x), 2.0) + sqrt(x.size(0)) + len(x)


# --- symbolic_trace ---------------------------------------------------------------------------


@kind(weight=14, variants=4)
def symbolic_trace(device: torch.device) -> Operation:
    models = [seeded_model(functools.partial(Stack, d), device) for d in (1, 2, 3, 4)]
    x = seeded(device, 2, 8)

    def run(variant: int) -> Any:
        gm = fx.symbolic_trace(models[variant])
        return gm.code, gm(x).detach()

    return run


@kind(weight=10, variants=2)
def symbolic_trace_parameters(device: torch.device) -> Operation:
    models = [seeded_model(functools.partial(Parameters, n), device) for n in (4, 12)]
    x = seeded(device, 2, 8)

    def run(variant: int) -> Any:
        gm = fx.symbolic_trace(models[variant])
        return gm.code, gm(x).detach()

    return run


@kind(weight=12, variants=3)
def symbolic_trace_wrap(device: torch.device) -> Operation:
    roots = [uses_wrapped, uses_wrapped_twice, seeded_model(UsesWrapped, device)]
    x = seeded(device, 2, 8)

    def run(variant: int) -> Any:
        gm = fx.symbolic_trace(roots[variant])
        wrapped = tuple(n.name for n in gm.graph.nodes if n.meta.get("is_wrapped"))
        return gm.code, wrapped, gm(x).detach()

    return run


@kind(weight=10, variants=2)
def symbolic_trace_autowrap(device: torch.device) -> Operation:
    x = seeded(device, 2, 8)

    def run(variant: int) -> Any:
        if variant == 0:
            tracer, root = fx.Tracer(), uses_math
        else:
            tracer, root = fx.Tracer(autowrap_functions=(shifted,)), uses_shifted
        gm = fx.GraphModule(tracer.root if hasattr(tracer, "root") else {}, tracer.trace(root))
        return gm.code, gm(x)

    return run


class DeepTracer(fx.Tracer):
    """Traces through every module and notes which it met."""

    def __init__(self) -> None:
        super().__init__()
        self.met: list[str] = []

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return False

    def call_module(self, m: nn.Module, forward: Any, args: Any, kwargs: Any) -> Any:
        self.met.append(self.path_of_module(m))
        return super().call_module(m, forward, args, kwargs)


class BlockTracer(fx.Tracer):
    """Keeps Residual blocks whole."""

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return isinstance(m, Residual) or super().is_leaf_module(m, module_qualified_name)


@kind(weight=6, variants=2)
def symbolic_trace_tracer(device: torch.device) -> Operation:
    model = seeded_model(functools.partial(Stack, 2), device)
    x = seeded(device, 2, 8)

    def run(variant: int) -> Any:
        tracer = DeepTracer() if variant == 0 else BlockTracer()
        gm = fx.GraphModule(model, tracer.trace(model))
        return gm.code, tuple(getattr(tracer, "met", ())), gm(x).detach()

    return run


class TracesInside(nn.Module):
    """Traces another model in the middle of its own forward."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.mlp = MLP()
        self.after = MLP()
        self.seen: list[str] = []
        # Not a submodule: the inner trace has a root of its own.
        object.__setattr__(self, "inner", inner)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.mlp(x)
        code = fx.symbolic_trace(self.inner).code
        return self.after(x) + float(len(code))


@kind(weight=3, variants=1)
def symbolic_trace_nested(device: torch.device) -> Operation:
    model = seeded_model(lambda: TracesInside(UsesWrapped()), device)
    x = seeded(device, 2, 8)

    def run(variant: int) -> Any:
        gm = fx.symbolic_trace(model)
        return gm.code, gm(x).detach()

    return run


class InterruptedTracer(fx.Tracer):
    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        if module_qualified_name.endswith("down"):
            raise KeyboardInterrupt("from is_leaf_module")
        return super().is_leaf_module(m, module_qualified_name)


@kind(weight=4, variants=2)
def symbolic_trace_raises(device: torch.device) -> Operation:
    model = seeded_model(functools.partial(Stack, 1), device)

    def run(variant: int) -> Any:
        try:
            if variant == 0:
                fx.symbolic_trace(branches_on_value)
            else:
                InterruptedTracer().trace(model)
        except (fx.proxy.TraceError, KeyboardInterrupt) as e:
            return type(e).__name__, str(e)
        raise AssertionError("the trace did not raise")

    return run


@kind(weight=3, variants=1)
def replace_pattern(device: torch.device) -> Operation:
    def pattern(a: torch.Tensor) -> torch.Tensor:
        return torch.relu(a)

    def replacement(a: torch.Tensor) -> torch.Tensor:
        return torch.sigmoid(a) * a

    model = seeded_model(functools.partial(Stack, 1), device)
    x = seeded(device, 2, 8)

    def run(variant: int) -> Any:
        gm = fx.symbolic_trace(model)
        matches = fx.replace_pattern(gm, pattern, replacement)
        return gm.code, len(matches), gm(x).detach()

    return run


@kind(weight=4, variants=2)
def node_metadata(device: torch.device) -> Operation:
    """Annotated traces, and plain ones which must not see the annotations of others."""

    def run(variant: int) -> Any:
        if variant == 0:
            gm = fx.symbolic_trace(uses_wrapped)
        else:
            with fx_traceback.preserve_node_meta(), fx_traceback.annotate({"stage": "annotated"}):
                gm = fx.symbolic_trace(uses_wrapped_twice)
        custom = tuple(str(n.meta.get("custom")) for n in gm.graph.nodes)
        return gm.code, custom, fx_traceback.has_preserved_node_meta()

    return run


# --- running and moving graphs ----------------------------------------------------------------


@kind(weight=6, variants=2)
def interpreter(device: torch.device) -> Operation:
    gms = [fx.symbolic_trace(seeded_model(functools.partial(Stack, d), device)) for d in (1, 3)]
    x = seeded(device, 2, 8)
    return lambda variant: fx.Interpreter(gms[variant]).run(x).detach()


@kind(weight=4, variants=2)
def transformer(device: torch.device) -> Operation:
    gms = [fx.symbolic_trace(seeded_model(functools.partial(Stack, d), device)) for d in (1, 3)]
    x = seeded(device, 2, 8)

    def run(variant: int) -> Any:
        gm = fx.Transformer(gms[variant]).transform()
        return gm.code, gm(x).detach()

    return run


@kind(weight=4, variants=2)
def codegen(device: torch.device) -> Operation:
    models = [seeded_model(functools.partial(Stack, d), device) for d in (1, 3)]
    gms = [fx.symbolic_trace(m) for m in models]
    x = seeded(device, 2, 8)

    def run(variant: int) -> Any:
        graph = copy.deepcopy(gms[variant].graph)
        output = next(n for n in reversed(graph.nodes) if n.op == "output")
        with graph.inserting_before(output):
            doubled = graph.call_function(torch.mul, (output.args[0], 2))
        output.args = (doubled,)
        graph.lint()
        gm = fx.GraphModule(models[variant], graph)
        before = gm.code
        gm.graph.eliminate_dead_code()
        gm.recompile()
        return before, gm.code, gm.print_readable(print_output=False), gm(x).detach()

    return run


@kind(weight=4, variants=2)
def pickling(device: torch.device) -> Operation:
    gms = [fx.symbolic_trace(seeded_model(m, device)) for m in (UsesWrapped, MLP)]
    x = seeded(device, 2, 8)

    def run(variant: int) -> Any:
        gm = pickle.loads(pickle.dumps(gms[variant]))
        twin = copy.deepcopy(gm)
        return gm.code, twin.code, gm(x).detach(), twin(x).detach()

    return run


# --- make_fx ----------------------------------------------------------------------------------


def _conditional(x: torch.Tensor) -> torch.Tensor:
    return torch.cond(x.sum() > 0, lambda y: y.sin() + 1, lambda y: y.cos() - 1, (x,))


def _make_fx(device: torch.device, mode: str) -> Operation:
    model = seeded_model(MLP, device)
    parameters = {name: p.detach() for name, p in model.named_parameters()}
    x = seeded(device, 2, 8)

    def run(variant: int) -> Any:
        own = copy.deepcopy(model)  # functional_call puts the parameters into the module

        def forward(parameters: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
            return torch.func.functional_call(own, parameters, (x,))

        def gradient(parameters: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
            x = x.detach().requires_grad_()
            return torch.autograd.grad(forward(parameters, x).square().sum(), x)[0]

        gm = make_fx(gradient if variant else forward, tracing_mode=mode)(parameters, x)
        return gm.code, gm(parameters, x).detach()

    return run


@kind(weight=3, variants=2)
def make_fx_real(device: torch.device) -> Operation:
    return _make_fx(device, "real")


@kind(weight=2, variants=2)
def make_fx_fake(device: torch.device) -> Operation:
    return _make_fx(device, "fake")


@kind(weight=1.5, variants=2)
def make_fx_symbolic(device: torch.device) -> Operation:
    return _make_fx(device, "symbolic")


@kind(weight=1.5, variants=3)
def make_fx_cond(device: torch.device) -> Operation:
    """A higher-order operator, whose branches make_fx traces by entering itself again."""
    x = seeded(device, 2, 8)

    def run(variant: int) -> Any:
        gm = make_fx(_conditional, tracing_mode=("real", "fake", "symbolic")[variant])(x)
        branches = tuple(m.code for _, m in gm.named_children())
        return gm.code, branches, gm(x)

    return run


# --- plain models -----------------------------------------------------------------------------


def _flags() -> tuple[bool, ...]:
    """What a thread that neither traces nor compiles must see: all False."""
    return (
        is_fx_symbolic_tracing(),
        torch.compiler.is_compiling(),
        torch.compiler.is_dynamo_compiling(),
        torch.compiler.is_exporting(),
        fx_traceback.has_preserved_node_meta(),
        bool(fx_traceback.get_current_meta()),
    )


class _Doubled(nn.Module):
    """An attribute found only through nn.Module.__getattr__, and a forward hook."""

    def __init__(self) -> None:
        super().__init__()
        self.mlp = MLP()
        self.mlp.register_forward_hook(lambda module, args, out: out * 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.mlp(x) + self.mlp.a.weight.sum()


@kind(weight=30, variants=5)
def eager(device: torch.device) -> Operation:
    models = [
        seeded_model(functools.partial(Stack, 2), device),
        seeded_model(functools.partial(Parameters, 4), device),
        seeded_model(UsesWrapped, device),
        seeded_model(_Doubled, device),
        seeded_model(
            lambda: nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True), device
        ),
    ]
    x, sequence = seeded(device, 2, 8), seeded(device, 2, 3, 8)

    def run(variant: int) -> Any:
        out = models[variant](sequence if variant == 4 else x)
        return out.detach(), _flags()

    return run


class _Gate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        # On an accelerator this runs on the device's autograd thread.
        return grads[0] * (x > 0) + float(any(_flags()))


@kind(weight=8, variants=2)
def backward(device: torch.device) -> Operation:
    """A training step's forward and backward, with a custom Function, hooks, a checkpoint."""
    model = seeded_model(MLP, device)
    x = seeded(device, 2, 8)

    def run(variant: int) -> Any:
        leaf = x.clone().requires_grad_()
        if variant == 0:
            hidden = _Gate.apply(model(leaf))
            hidden.register_hook(lambda g: g * 2 + float(any(_flags())))
        else:
            hidden = torch.utils.checkpoint.checkpoint(model, leaf, use_reentrant=False)
        (gradient,) = torch.autograd.grad(hidden.square().sum(), leaf)
        return gradient, _flags()

    return run


# --- torch.compile ----------------------------------------------------------------------------

_fresh_names = itertools.count()


def _fresh(fn: Callable[..., Any], name: str) -> Callable[..., Any]:
    """``fn`` with a code object of its own, which Dynamo has therefore never met."""
    code = fn.__code__.replace(co_name=f"{name}_{next(_fresh_names)}")
    made = types.FunctionType(code, fn.__globals__, code.co_name, fn.__defaults__, fn.__closure__)
    made.__kwdefaults__ = fn.__kwdefaults__
    return made


def _fused(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.gelu(x * y) + scaled(x, 2.0).sum() / sqrt(x.shape[-1])


class _Recorder:
    """A backend that keeps the graphs that Dynamo hands it and runs them as they are."""

    def __init__(self) -> None:
        self.codes: list[str] = []

    def __call__(self, gm: fx.GraphModule, example_inputs: Any) -> Callable[..., Any]:
        self.codes.append(gm.code)
        return gm.forward


@kind(weight=0.8, variants=4)
def compile_eager(device: torch.device) -> Operation:
    """A function or module new to Dynamo: its graphs, no break, no later recompile."""
    model = seeded_model(functools.partial(Stack, 1), device)
    x, y = seeded(device, 2, 8), seeded(device, 2, 8, seed=1)

    def run(variant: int) -> Any:
        recorder = _Recorder()
        if variant < 2:
            fn = torch.compile(_fresh(_fused, "fused"), backend=recorder, dynamic=bool(variant))
            outs = fn(x, y), fn(x, y)
        else:

            def through_model(x: torch.Tensor) -> torch.Tensor:
                return model(x) * 2

            fn = torch.compile(
                _fresh(through_model, "through_model"), backend=recorder, dynamic=variant == 3
            )
            outs = fn(x).detach(), fn(x).detach()
        return tuple(recorder.codes), outs

    return run


def _train_step(compiled: Callable[..., Any], *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
    leaves = [t.detach().clone().requires_grad_() for t in inputs]
    out = compiled(*leaves)
    return out.detach(), *torch.autograd.grad(out.square().mean(), leaves)


@kind(weight=0.4, variants=2)
def compile_aot_eager(device: torch.device) -> Operation:
    x, y = seeded(device, 2, 8), seeded(device, 2, 8, seed=1)

    def run(variant: int) -> Any:
        fn = torch.compile(_fresh(_fused, "fused"), backend="aot_eager", dynamic=bool(variant))
        return _train_step(fn, x, y)

    return run


@kind(weight=0.05, variants=2)
def compile_inductor(device: torch.device) -> Operation:
    x, y = seeded(device, 2, 8), seeded(device, 2, 8, seed=1)

    def run(variant: int) -> Any:
        fn = torch.compile(_fresh(_fused, "fused"), backend="inductor", dynamic=bool(variant))
        return _train_step(fn, x, y)

    return run


def _causal(b: Any, h: Any, q: Any, kv: Any) -> Any:
    return q >= kv


def _attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: Any) -> torch.Tensor:
    return flex_attention(q, k, v, block_mask=mask)


def _no_score_mod(score: Any, b: Any, h: Any, q: Any, kv: Any) -> Any:
    return score


def _attend_operator(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: Any) -> torch.Tensor:
    """flex_attention's operator itself, which has a backward on every device."""
    out = torch.ops.higher_order.flex_attention(
        q, k, v, _no_score_mod, mask.as_tuple(), 1 / math.sqrt(q.shape[-1]), {}
    )
    return out[0]


class _Attention:
    """Inputs and block masks of flex_attention at two lengths."""

    lengths = (128, 256)

    def __init__(self, device: torch.device) -> None:
        self.inputs = [
            tuple(seeded(device, 1, 2, n, 16, seed=s) for s in range(3)) for n in self.lengths
        ]
        self.masks = [
            create_block_mask(_causal, None, None, n, n, device=device) for n in self.lengths
        ]


def _attention_step(fn: Callable[..., Any], data: _Attention, variant: int) -> Any:
    """Forward, and backward where flex_attention has one: not on CPU."""
    mask = data.masks[variant]
    if data.masks[variant].kv_indices.device.type == "cpu":
        with torch.no_grad():
            return fn(*data.inputs[variant], mask)
    return _train_step(lambda q, k, v: fn(q, k, v, mask), *data.inputs[variant])


@kind(weight=0.1, variants=2)
def compile_flex_attention_aot_eager(device: torch.device) -> Operation:
    """flex_attention new to Dynamo, with AOTAutograd's joint trace and its own of the backward."""
    data = _Attention(device)

    def run(variant: int) -> Any:
        fn = torch.compile(_fresh(_attend_operator, "attend"), backend="aot_eager", dynamic=False)
        mask = data.masks[variant]
        return _train_step(lambda q, k, v: fn(q, k, v, mask), *data.inputs[variant])

    return run


@kind(weight=0.03, variants=2)
def compile_flex_attention(device: torch.device) -> Operation:
    """flex_attention new to Dynamo, through Inductor."""
    data = _Attention(device)

    def run(variant: int) -> Any:
        fn = torch.compile(_fresh(_attend, "attend"), dynamic=False)
        return _attention_step(fn, data, variant)

    return run


def _called(device: torch.device, backend: str) -> Operation:
    """A function compiled once and then called again and again, at several sizes."""
    fn = torch.compile(_fresh(_fused, f"called_{backend}"), backend=backend, dynamic=False)
    inputs = [(seeded(device, n, 8), seeded(device, n, 8, seed=1)) for n in (2, 3, 5)]
    return lambda variant: _train_step(fn, *inputs[variant])


@kind(weight=8, variants=3)
def call_eager(device: torch.device) -> Operation:
    return _called(device, "eager")


@kind(weight=8, variants=3)
def call_aot_eager(device: torch.device) -> Operation:
    return _called(device, "aot_eager")


@kind(weight=8, variants=3)
def call_inductor(device: torch.device) -> Operation:
    return _called(device, "inductor")


@kind(weight=4, variants=2)
def call_flex_attention(device: torch.device) -> Operation:
    """flex_attention compiled once and then called again and again, at two lengths."""
    data = _Attention(device)
    fn = torch.compile(_fresh(_attend, "called_attend"), dynamic=False)
    return lambda variant: _attention_step(fn, data, variant)


# --- not in the mix unless named --------------------------------------------------------------


@kind(weight=1, variants=2, default=False)
def export(device: torch.device) -> Operation:
    model = seeded_model(MLP, device)
    x = seeded(device, 2, 8)

    def run(variant: int) -> Any:
        own = copy.deepcopy(model)  # export puts fake parameters into the module
        program = torch.export.export(own, (x,), strict=bool(variant))
        return program.graph_module.code, program.module()(x).detach(), _flags()

    return run


@kind(weight=0.05, variants=1, default=False)
def compile_fx(device: torch.device) -> Operation:
    from torch._inductor.compile_fx import compile_fx as inductor

    gm = fx.symbolic_trace(seeded_model(MLP, device))
    x = seeded(device, 2, 8)

    def run(variant: int) -> Any:
        with torch.no_grad():
            out = inductor(copy.deepcopy(gm), [x.clone()])(x)
        return out[0] if isinstance(out, (list, tuple)) else out

    return run


@kind(weight=0.02, variants=1, default=False)
def dynamo_reset(device: torch.device) -> Operation:
    """Throws away every compiled function while others call them."""

    def run(variant: int) -> Any:
        torch._dynamo.reset()
        return "reset"

    return run
