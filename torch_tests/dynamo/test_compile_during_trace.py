# Owner(s): ["module: dynamo"]

import functools
import math
import os
import sys
from unittest import mock

import torch
import torch._dynamo
from torch.fx import symbolic_trace
from torch.fx.experimental.proxy_tensor import make_fx
from torch.testing._internal.common_utils import (
    instantiate_parametrized_tests,
    parametrize,
    run_tests,
    TestCase,
)


# Make the helper files in test/ importable
pytorch_test_dir = os.path.dirname(os.path.dirname(os.path.realpath(__file__)))
sys.path.append(pytorch_test_dir)
from concurrency_utils import run_on_thread, thread_held_in


def double(x, factor=2.0):
    return x * factor


torch.fx.wrap("double")


class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(3, 3)
        self.scale = torch.nn.Parameter(torch.ones(3))

    def forward(self, x):
        return double(self.linear(x)) * self.scale + math.sqrt(x.shape[1])


class BlockWithGetattr(Block):
    def __getattr__(self, name):
        if name == "extra":
            return 3.0
        return super().__getattr__(name)

    def forward(self, x):
        return super().forward(x) + self.extra


class BlockWithCall(Block):
    def __call__(self, x):
        return super().__call__(x) + 1


class Outer(torch.nn.Module):
    def __init__(self, block):
        super().__init__()
        self.block = block

    def forward(self, x):
        return self.block(x).relu()


def with_hooks(model):
    model.block.register_forward_hook(lambda mod, args, out: out + 1)
    model.block.register_forward_pre_hook(lambda mod, args: (args[0] * 2,))
    return model


def call_through_class(model):
    def fn(x):
        return torch.nn.Module.__call__(model, x)

    return fn


MODELS = {
    "plain": lambda: Outer(Block()),
    "hooks": lambda: with_hooks(Outer(Block())),
    "getattr": lambda: Outer(BlockWithGetattr()),
    "call": lambda: Outer(BlockWithCall()),
    "through_class": lambda: call_through_class(Outer(Block())),
    "top_level_hooks": lambda: with_hooks(Outer(Block())).block,
}


def trace_and_hold(tracer, hold):
    # A trace that patches the names of this file as well
    class Traced(Block):
        def forward(self, x):
            hold()
            return super().forward(x)

    if tracer == "symbolic_trace":
        return symbolic_trace(Outer(Traced()))
    return make_fx(Outer(Traced()), tracing_mode=tracer)(torch.randn(2, 3))


class GraphCounter:
    """A backend that keeps the code of the graphs that it gets."""

    def __init__(self):
        self.graphs = []

    def __call__(self, gm, example_inputs):
        self.graphs.append(gm.print_readable(print_output=False))
        return gm.forward


class TestCompileDuringTrace(TestCase):
    def setUp(self):
        super().setUp()
        torch._dynamo.reset()

    def compile_alone(self, make_model, x):
        backend = GraphCounter()
        torch.manual_seed(0)
        model = make_model()
        out = torch.compile(model, backend=backend)(x)
        torch._dynamo.reset()
        return out, backend.graphs

    @parametrize("model", list(MODELS))
    @parametrize("tracer", ["symbolic_trace", "real"])
    def test_compile_while_another_thread_traces(self, model, tracer):
        x = torch.randn(2, 3)
        want, want_graphs = self.compile_alone(MODELS[model], x)

        backend = GraphCounter()
        torch.manual_seed(0)
        compiled_before = MODELS[model]()
        with thread_held_in(lambda hold: trace_and_hold(tracer, hold)) as thread:
            compiled = torch.compile(compiled_before, backend=backend)
            self.assertEqual(compiled(x), want)
            self.assertEqual(backend.graphs, want_graphs)
            # Its guards hold while the other trace is alive
            self.assertEqual(compiled(x), want)
            self.assertEqual(run_on_thread(lambda: compiled(x)), want)
        # and after it has ended
        self.assertEqual(compiled(x), want)
        self.assertEqual(backend.graphs, want_graphs)
        thread.result()

    @parametrize("model", list(MODELS))
    def test_compiled_before_called_while_another_thread_traces(self, model):
        backend = GraphCounter()
        compiled = torch.compile(MODELS[model](), backend=backend)
        x = torch.randn(2, 3)
        want = compiled(x)
        num_graphs = len(backend.graphs)
        with thread_held_in(lambda hold: trace_and_hold("symbolic_trace", hold)):
            self.assertEqual(compiled(x), want)
        self.assertEqual(compiled(x), want)
        self.assertEqual(len(backend.graphs), num_graphs)

    @parametrize("warm", [False, True])
    def test_compiled_module_called_on_other_threads(self, warm):
        model, x = MODELS["plain"](), torch.randn(2, 3)
        want = model(x)
        compiled = torch.compile(model, backend="eager")
        if warm:
            compiled(x)
        with thread_held_in(lambda hold: trace_and_hold("symbolic_trace", hold)):
            self.assertEqual(run_on_thread(lambda: compiled(x)), want)
            self.assertEqual(compiled(x), want)
        self.assertEqual(compiled(x), want)

    def test_compile_in_place_while_another_thread_traces(self):
        x = torch.randn(2, 3)
        want, want_graphs = self.compile_alone(MODELS["plain"], x)
        backend = GraphCounter()
        torch.manual_seed(0)
        model = MODELS["plain"]()
        with thread_held_in(lambda hold: trace_and_hold("symbolic_trace", hold)):
            model.compile(backend=backend)
            self.assertEqual(model(x), want)
        self.assertEqual(model(x), want)
        self.assertEqual(backend.graphs, want_graphs)

    def test_name_is_wrapped_after_dynamo_has_read_it(self):
        from torch.fx._symbolic_trace import _may_be_patched

        # What the guard on the name asks for, while it holds another thread's wrapper
        read = double
        with thread_held_in(lambda hold: trace_and_hold("symbolic_trace", hold)):
            self.assertIsNot(double, read)
            self.assertTrue(_may_be_patched(read))

    def test_leaf_module_is_recorded_after_another_thread_compiled(self):
        want = str(symbolic_trace(Outer(Block())).graph)
        compiled = torch.compile(Outer(Block()), backend="eager")

        class Traced(Block):
            def forward(self, x):
                hold_in_trace()
                return super().forward(x)

        def trace(hold):
            nonlocal hold_in_trace
            hold_in_trace = hold
            return symbolic_trace(Outer(Traced()))

        hold_in_trace = None
        with thread_held_in(trace) as thread:
            compiled(torch.randn(2, 3))
        self.assertEqual(str(thread.result().graph), want)

    def test_graph_break_while_another_thread_traces(self):
        model = Outer(Block())

        def fn(x):
            x = model(x)
            torch._dynamo.graph_break()
            return model(x)

        x = torch.randn(2, 3)
        _, want_graphs = self.compile_alone(lambda: fn, x)
        backend = GraphCounter()
        with thread_held_in(lambda hold: trace_and_hold("symbolic_trace", hold)):
            out = torch.compile(fn, backend=backend)(x)
        self.assertEqual(out, fn(x))
        self.assertEqual(backend.graphs, want_graphs)

    @parametrize("method", ["__call__", "__getattr__"])
    def test_replaced_module_method(self, method):
        # Code outside of PyTorch may replace it after torch._dynamo is imported
        x = torch.randn(2, 3)
        want, want_graphs = self.compile_alone(MODELS["plain"], x)

        def export(model):
            graph = torch.export.export(model, (x,), strict=True).graph
            stacks = [
                list(node.meta.get("nn_module_stack", {}).values())
                for node in graph.nodes
            ]
            return str(graph), stacks

        torch.manual_seed(0)
        model = MODELS["plain"]()
        _, want_stacks = export(model)
        orig_method = getattr(torch.nn.Module, method)

        @functools.wraps(orig_method)
        def replacement(*args, **kwargs):
            return orig_method(*args, **kwargs)

        backend = GraphCounter()
        compiled = torch.compile(model, backend=backend, fullgraph=True)
        with mock.patch.object(torch.nn.Module, method, replacement):
            exported = export(model)
            self.assertEqual(exported[1], want_stacks)
            torch._dynamo.reset()
            self.assertEqual(compiled(x), want)
            num_graphs = len(backend.graphs)
            with thread_held_in(lambda hold: trace_and_hold("symbolic_trace", hold)):
                self.assertEqual(compiled(x), want)
                if method == "__call__":
                    self.assertEqual(len(backend.graphs), num_graphs)
                self.assertEqual(export(model), exported)
            self.assertIs(getattr(torch.nn.Module, method), replacement)

    def test_compile_inside_own_trace(self):
        # Dynamo sees modules and functions as they are outside of the trace
        x = torch.randn(2, 3)
        model = MODELS["plain"]()

        def call_model(x):
            return model(x)

        want, want_graphs = self.compile_alone(lambda: call_model, x)
        backend = GraphCounter()
        compiled = torch.compile(call_model, backend=backend)

        def fn(y):
            self.assertEqual(compiled(x), want)
            self.assertEqual(compiled(x), want)
            return y + 1

        with torch._dynamo.config.patch(force_compile_during_fx_trace=True):
            symbolic_trace(fn)
        self.assertEqual(backend.graphs, want_graphs)


instantiate_parametrized_tests(TestCompileDuringTrace)


if __name__ == "__main__":
    run_tests()
