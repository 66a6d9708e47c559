# Owner(s): ["module: fx"]

import asyncio
import contextlib
import contextvars
import os
import sys
import threading

import torch
import torch._dynamo
from torch._higher_order_ops.utils import _set_compilation_env
from torch.fx import symbolic_trace
from torch.fx._symbolic_trace import is_fx_symbolic_tracing
from torch.fx.experimental.proxy_tensor import make_fx
from torch.testing._internal.common_utils import (
    instantiate_parametrized_tests,
    parametrize,
    run_tests,
    TestCase,
)
from torch.utils.checkpoint import checkpoint


# Make the helper files in test/ importable
pytorch_test_dir = os.path.dirname(os.path.dirname(os.path.realpath(__file__)))
sys.path.append(pytorch_test_dir)
from concurrency_utils import run_on_thread, thread_held_in, TIMEOUT


NESTED_TRACE_ERROR = "using FX to symbolically trace a dynamo-optimized function"


def trace_and_hold(tracer, hold):
    def fn(x):
        hold()
        return x + 1

    if tracer == "symbolic_trace":
        return symbolic_trace(fn)
    return make_fx(fn, tracing_mode=tracer)(torch.randn(3))


class TestTracingFlag(TestCase):
    def setUp(self):
        super().setUp()
        torch._dynamo.reset()

    @parametrize("tracer", ["symbolic_trace", "real", "fake", "symbolic"])
    def test_compiled_call_while_another_thread_traces(self, tracer):
        compiled = torch.compile(lambda x: x.sin() + 1, backend="eager")
        x = torch.randn(3)
        want = x.sin() + 1
        self.assertEqual(compiled(x), want)
        with thread_held_in(lambda hold: trace_and_hold(tracer, hold)) as thread:
            self.assertEqual(compiled(x), want)
            self.assertEqual(run_on_thread(lambda: compiled(x)), want)
        self.assertEqual(thread.result()(x), x + 1)

    def test_dynamo_traces_flag(self):
        def fn(x):
            with torch.fx._symbolic_trace._is_fx_tracing_context(False):
                x = x.sin()
            return x if torch.fx._symbolic_trace._get_is_fx_tracing() else x + 1

        x = torch.randn(3)
        compiled = torch.compile(fn, backend="eager", fullgraph=True)
        with thread_held_in(lambda hold: trace_and_hold("symbolic_trace", hold)):
            self.assertEqual(compiled(x), x.sin() + 1)

    def test_flag_while_another_thread_traces(self):
        with thread_held_in(lambda hold: trace_and_hold("symbolic_trace", hold)):
            self.assertFalse(is_fx_symbolic_tracing())
            self.assertFalse(run_on_thread(is_fx_symbolic_tracing))
        self.assertFalse(is_fx_symbolic_tracing())

    def test_compiled_call_does_not_ask_for_the_flag(self):
        # Each compiled call pays for what compile_wrapper does. Outside of a
        # trace that is one call into C, which sys.setprofile reports as c_call.
        compiled = torch.compile(lambda x: x + 1, backend="eager")
        x = torch.randn(3)
        compiled(x)
        called = set()

        def profile(frame, event, arg):
            if event == "call":
                called.add(frame.f_code.co_name)

        sys.setprofile(profile)
        try:
            compiled(x)
        finally:
            sys.setprofile(None)
        self.assertIn("compile_wrapper", called)
        self.assertNotIn("is_fx_symbolic_tracing", called)
        self.assertNotIn("_get_is_fx_tracing", called)

    def test_nested_trace_restores_the_flag(self):
        seen = []

        def inner(x):
            seen.append(is_fx_symbolic_tracing())
            return x.relu()

        def outer(x):
            seen.append(is_fx_symbolic_tracing())
            symbolic_trace(inner)
            seen.append(is_fx_symbolic_tracing())
            return x + 1

        symbolic_trace(outer)
        self.assertEqual(seen, [True, True, True])
        self.assertFalse(is_fx_symbolic_tracing())

    @parametrize("exception", [ValueError, RuntimeError, KeyboardInterrupt])
    def test_trace_that_raises_restores_the_flag(self, exception):
        def inner(x):
            raise exception("from the traced function")

        def outer(x):
            with self.assertRaises(exception):
                symbolic_trace(inner)
            self.assertTrue(is_fx_symbolic_tracing())
            return x + 1

        with self.assertRaises(exception):
            symbolic_trace(inner)
        self.assertFalse(is_fx_symbolic_tracing())
        symbolic_trace(outer)
        self.assertFalse(is_fx_symbolic_tracing())

    def test_context_is_inherited_on_the_tracing_thread_only(self):
        seen = {}

        async def task(name):
            seen[name] = is_fx_symbolic_tracing()

        async def tasks():
            await asyncio.gather(task("task"), asyncio.create_task(task("child")))

        def fn(x):
            context = contextvars.copy_context()
            seen["copied"] = context.run(is_fx_symbolic_tracing)
            asyncio.run(tasks())
            # A trace belongs to the thread that opened it
            seen["thread"] = run_on_thread(is_fx_symbolic_tracing)
            seen["copied, thread"] = run_on_thread(
                lambda: contextvars.copy_context().run(is_fx_symbolic_tracing)
            )
            other = contextvars.copy_context()
            seen["moved"] = run_on_thread(lambda: other.run(is_fx_symbolic_tracing))
            # And ends with it
            seen["later"] = context
            return x

        def outer(x):
            symbolic_trace(fn)
            seen["in the outer"] = seen["later"].run(is_fx_symbolic_tracing)
            return x

        symbolic_trace(outer)
        seen["later"] = seen["later"].run(is_fx_symbolic_tracing)
        self.assertEqual(
            seen,
            {
                "copied": True,
                "task": True,
                "child": True,
                "thread": False,
                "copied, thread": False,
                "moved": False,
                "in the outer": True,
                "later": False,
            },
        )

    def test_trace_context_left_in_another_context(self):
        # Two asyncio tasks, another thread, or in another order than entered
        context = torch.fx._symbolic_trace._is_fx_tracing_context
        is_tracing = torch.fx._symbolic_trace._get_is_fx_tracing

        async def enter_and_leave():
            with contextlib.ExitStack() as stack:

                async def enter():
                    stack.enter_context(context(True))

                await asyncio.create_task(enter())

        asyncio.run(enter_and_leave())
        self.assertFalse(is_tracing())

        stack = contextlib.ExitStack()
        stack.enter_context(context(True))
        self.assertTrue(is_tracing())
        run_on_thread(stack.close)
        self.assertFalse(is_tracing())

        with context(True):
            first, second = contextlib.ExitStack(), contextlib.ExitStack()
            first.enter_context(context(False))
            second.enter_context(context(False))
            first.close()
            second.close()
            self.assertTrue(is_tracing())
        self.assertFalse(is_tracing())

    def test_compiled_call_on_a_thread_started_inside_a_trace(self):
        compiled = torch.compile(lambda x: x + 1, backend="eager")
        x = torch.zeros(3)
        results, contexts = [], []

        def fn(y):
            context = contextvars.copy_context()
            results.append(run_on_thread(lambda: compiled(x)))
            results.append(run_on_thread(lambda: context.run(compiled, x)))
            contexts.append(context)
            return y

        symbolic_trace(fn)
        self.assertEqual(results, [x + 1, x + 1])
        # Nor does a task that outlives the trace
        self.assertEqual(contexts[0].run(compiled, x), x + 1)

    @parametrize("tracer", ["symbolic_trace", "real"])
    def test_compiled_function_in_own_trace_raises(self, tracer):
        compiled = torch.compile(lambda x: x + 1, backend="eager")

        def trace():
            if tracer == "symbolic_trace":
                return symbolic_trace(lambda x: compiled(x))
            return make_fx(lambda x: compiled(x))(torch.randn(3))

        with self.assertRaisesRegex(RuntimeError, NESTED_TRACE_ERROR):
            trace()
        with torch._dynamo.config.patch(error_on_nested_fx_trace=False):
            self.assertEqual(trace()(torch.zeros(3)), torch.ones(3))

    def test_force_compile_during_fx_trace(self):
        compiled_graphs = []

        def backend(gm, example_inputs):
            compiled_graphs.append(gm)
            return gm.forward

        compiled = torch.compile(lambda x: x + 1, backend=backend)

        def fn(x):
            compiled(torch.zeros(3))
            return x

        with torch._dynamo.config.patch(force_compile_during_fx_trace=True):
            symbolic_trace(fn)
        self.assertEqual(len(compiled_graphs), 1)

    @parametrize("use_reentrant", [False, True])
    def test_checkpoint_recomputed_inside_a_trace(self, use_reentrant):
        seen = []

        def body(x):
            seen.append(is_fx_symbolic_tracing())
            return x.cos().sin()

        def fn(x):
            x = x.detach().requires_grad_()
            checkpoint(body, x, use_reentrant=use_reentrant).sum().backward()
            return x.grad

        x = torch.randn(2, 3)
        want = fn(x)
        seen.clear()
        graph = make_fx(fn)(x)
        self.assertEqual(seen, [True, True])
        self.assertEqual(graph(x), want)

        # The same while another thread traces: not tracing here
        seen.clear()
        with thread_held_in(lambda hold: trace_and_hold("symbolic_trace", hold)):
            self.assertEqual(fn(x), want)
        self.assertEqual(seen, [False, False])

    def test_control_flow_compiles_itself_inside_a_trace(self):
        # cond calls torch.compile inside of make_fx with the flag turned off
        seen = []

        def true_fn(x):
            return x.sin()

        def false_fn(x):
            return x.cos()

        def fn(x):
            out = torch.cond(x.sum() > 0, true_fn, false_fn, (x,))
            seen.append(is_fx_symbolic_tracing())
            return out

        x = torch.ones(3)
        graph = make_fx(fn, tracing_mode="real")(x)
        self.assertEqual(seen, [True])
        self.assertEqual(graph(x), x.sin())
        self.assertEqual(graph(-x), x.cos())

    def test_compilation_env_does_not_end_the_trace_of_another_thread(self):
        ask, answered, done = (threading.Event() for _ in range(3))
        seen = []

        def other(hold):
            def fn(x):
                hold()
                ask.wait(TIMEOUT)
                seen.append(is_fx_symbolic_tracing())
                answered.set()
                done.wait(TIMEOUT)
                return x

            return symbolic_trace(fn)

        def fn(x):
            with _set_compilation_env():
                seen.append(is_fx_symbolic_tracing())
                ask.set()
                answered.wait(TIMEOUT)
            seen.append(is_fx_symbolic_tracing())
            return x

        with thread_held_in(other) as thread:
            thread.release()
            symbolic_trace(fn)
            done.set()
        self.assertEqual(seen, [False, True, True])
        self.assertFalse(is_fx_symbolic_tracing())


instantiate_parametrized_tests(TestTracingFlag)


if __name__ == "__main__":
    run_tests()
