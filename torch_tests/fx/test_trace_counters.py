# Owner(s): ["module: fx"]

import contextvars
import linecache
import os
import sys

import torch
import torch._dynamo
from torch.fx import symbolic_trace
from torch.fx._lazy_graph_module import (
    _force_skip_lazy_graph_module,
    _get_graph_module_cls,
    _LazyGraphModule,
    _use_lazy_graph_module,
)
from torch.fx.experimental.proxy_tensor import make_fx
from torch.testing._internal.common_utils import run_tests, TestCase


# Make the helper files in test/ importable
pytorch_test_dir = os.path.dirname(os.path.dirname(os.path.realpath(__file__)))
sys.path.append(pytorch_test_dir)
from concurrency_utils import run_on_thread, thread_held_in


# Each stops its own thread in the fake implementation of nonzero()
holds = []


@torch.library.custom_op("test_trace_counters::nonzero", mutates_args=())
def nonzero(x: torch.Tensor) -> torch.Tensor:
    return x.nonzero()


@nonzero.register_fake
def _(x):
    for hold in holds:
        hold()
    size = torch.library.get_ctx().new_dynamic_size()
    return x.new_empty([size, x.dim()], dtype=torch.int64)


class TestTraceCounters(TestCase):
    def test_names_of_constants(self):
        def constants(num_before, num_after, hold=lambda: None):
            def fn(x):
                for _ in range(num_before):
                    x = x + torch.zeros(3)
                hold()
                for _ in range(num_after):
                    x = x + torch.ones(3)
                return x

            return fn

        want = str(symbolic_trace(constants(1, 2)).graph)
        with thread_held_in(
            lambda hold: symbolic_trace(constants(1, 2, hold))
        ) as thread:
            symbolic_trace(constants(4, 0))
        self.assertEqual(str(thread.result().graph), want)

    def test_names_of_constants_of_nested_trace(self):
        def inner(x):
            return x + torch.zeros(3) + torch.zeros(3) + torch.zeros(3)

        def outer(x):
            x = x + torch.ones(3)
            symbolic_trace(inner)
            return x + torch.ones(3)

        names = [
            n.target for n in symbolic_trace(outer).graph.nodes if n.op == "get_attr"
        ]
        self.assertEqual(names, ["_tensor_constant0", "_tensor_constant1"])

    def test_source_of_generated_code(self):
        # Stop one thread between the two halves of taking a number
        loader = torch.fx.graph_module._loader
        seen = {}

        def empty_graph():
            graph = torch.fx.Graph()
            graph.output(graph.placeholder("x"))
            return graph

        def generate(name):
            gm = torch.fx.GraphModule({}, empty_graph())
            seen[name] = gm.forward.__code__.co_filename

        def hold_in_loader(hold):
            def on_line(frame, event, arg):
                if event == "line" and frame.f_lineno > frame.f_code.co_firstlineno + 1:
                    hold()
                return on_line

            def on_call(frame, event, arg):
                if frame.f_code is type(loader)._get_key.__code__:
                    return on_line

            sys.settrace(on_call)
            try:
                generate("held")
            finally:
                sys.settrace(None)
            hold()  # if a number is taken in one step

        with thread_held_in(hold_in_loader):
            generate("other")
        self.assertNotEqual(seen["held"], seen["other"])
        self.assertTrue(linecache.getlines(seen["held"]))

    def test_lazy_graph_module(self):
        def use(hold):
            with _use_lazy_graph_module(True):
                hold()
                return _get_graph_module_cls()

        with thread_held_in(use) as thread:
            self.assertIsNot(_get_graph_module_cls(), _LazyGraphModule)
            self.assertIsNot(run_on_thread(_get_graph_module_cls), _LazyGraphModule)
        self.assertIs(thread.result(), _LazyGraphModule)

    def test_lazy_graph_module_overlapping(self):
        def use(hold):
            with _use_lazy_graph_module(True):
                hold()
                return _get_graph_module_cls()

        def skip(hold):
            with _force_skip_lazy_graph_module():
                hold()

        with thread_held_in(skip):
            with thread_held_in(use) as first:
                with thread_held_in(use) as second:
                    first.release()
                    first.result()
        self.assertIs(first.result(), _LazyGraphModule)
        self.assertIs(second.result(), _LazyGraphModule)
        self.assertIsNot(_get_graph_module_cls(), _LazyGraphModule)

    def test_graph_module_made_while_another_thread_compiles(self):
        # Dynamo has the code that FX generates skipped while it compiles
        torch._dynamo.reset()

        def compile_and_hold(hold):
            def backend(gm, example_inputs):
                hold()
                return gm.forward

            return torch.compile(lambda x: x + 1, backend=backend)(torch.zeros(3))

        forward_from_src = torch.fx.graph_module._forward_from_src
        with thread_held_in(compile_and_hold) as thread:
            # That is not for the code that other threads generate
            self.assertIs(torch.fx.graph_module._forward_from_src, forward_from_src)
        self.assertEqual(thread.result(), torch.ones(3))


class TestMakeFXTracer(TestCase):
    def test_subgraph_while_another_thread_traces(self):
        def fn(x):
            return torch.cond(x.sum() > 0, lambda x: x.sin(), lambda x: x.cos(), (x,))

        def trace(hold=None):
            def with_hold(x):
                if hold is not None:
                    hold()
                return fn(x) + 1

            return make_fx(with_hold, tracing_mode="fake")(torch.randn(3))

        want = trace().print_readable(print_output=False)
        with thread_held_in(trace) as first:
            with thread_held_in(trace) as second:
                # Not traced here: it must not take a tracer of the other threads
                x = torch.ones(3)
                self.assertEqual(run_on_thread(lambda: fn(x)), x.sin())
                first.release()
                first.result()
        for thread in (first, second):
            graph = thread.result().print_readable(print_output=False)
            self.assertEqual(graph, want)

    def test_context_on_another_thread_and_later(self):
        def tracer():
            return torch.fx.experimental.proxy_tensor._CURRENT_MAKE_FX_TRACER

        seen = []

        def fn(x):
            context = contextvars.copy_context()
            seen.append(context.run(tracer) is not None)
            seen.append(run_on_thread(lambda: context.run(tracer)))
            contexts.append(context)
            return x + 1

        contexts = []
        make_fx(fn)(torch.randn(3))
        self.assertEqual(seen, [True, None])
        self.assertIsNone(contexts[0].run(tracer))

    def test_tracer_is_gone_after_overlapping_traces(self):
        def trace(hold):
            def fn(x):
                hold()
                return x + 1

            return make_fx(fn)(torch.randn(3))

        with thread_held_in(trace) as first:
            with thread_held_in(trace):
                first.release()
                first.result()
        self.assertIsNone(torch.fx.experimental.proxy_tensor._CURRENT_MAKE_FX_TRACER)

    def test_ctx_of_fake_implementations(self):
        def trace_and_hold(hold):
            holds.append(hold)
            return trace()

        def trace():
            return make_fx(nonzero, tracing_mode="symbolic")(torch.ones(3)).code

        self.addCleanup(holds.clear)
        want = trace()
        with thread_held_in(trace_and_hold) as first:
            with thread_held_in(trace_and_hold) as second:
                first.release()
                first.result()
        for thread in (first, second):
            self.assertEqual(thread.result(), want)


if __name__ == "__main__":
    run_tests()
