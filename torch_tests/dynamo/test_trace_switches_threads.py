# Owner(s): ["module: dynamo"]

import asyncio
import contextlib
import os
import sys
import unittest

import torch
import torch._dynamo
from torch._dynamo import trace_rules, utils
from torch._dynamo.exc import Unsupported
from torch.testing._internal.common_utils import (
    instantiate_parametrized_tests,
    parametrize,
    run_tests,
    TestCase,
)


# Make the helper files in test/ importable
pytorch_test_dir = os.path.dirname(os.path.dirname(os.path.realpath(__file__)))
sys.path.append(pytorch_test_dir)
from concurrency_utils import thread_held_in


def breaks(x):
    x = x + 1
    torch._dynamo.graph_break()
    return x * 2


class TestErrorOnGraphBreakThreads(TestCase):
    def setUp(self):
        super().setUp()
        torch._dynamo.reset()
        utils._set_error_on_graph_break(False)
        self.x = torch.ones(3)

    def compile(self):
        torch._dynamo.reset_code(breaks.__code__)
        self.assertEqual(torch.compile(breaks, backend="eager")(self.x), self.x * 4)

    def in_region(self, hold):
        with torch._dynamo.error_on_graph_break(True):
            hold()
            with self.assertRaises(Unsupported):
                self.compile()

    def test_region_of_another_thread(self):
        with thread_held_in(self.in_region):
            self.compile()

    def test_regions_that_overlap(self):
        with thread_held_in(self.in_region) as first:
            with thread_held_in(self.in_region):
                # Not in the order in which they began
                first.release()
                first.result()
                self.compile()
        self.compile()

    def test_region_in_the_middle_of_a_trace(self):
        def backend(gm, example_inputs):
            # The rest of the frame is traced afterwards
            if not threads:
                threads.append(stack.enter_context(thread_held_in(self.in_region)))
            return gm.forward

        def fn(x):
            x = breaks(x)
            torch._dynamo.graph_break()
            return x - 1

        threads = []
        with contextlib.ExitStack() as stack:
            compiled = torch.compile(fn, backend=backend)
            self.assertEqual(compiled(self.x), self.x * 3)

    def test_running_region_of_another_thread(self):
        def run_and_hold(hold):
            def backend(gm, example_inputs):
                def compiled(*args):
                    hold()
                    return gm(*args)

                return compiled

            def fn(x):
                return x + 1

            optimize = torch._dynamo.optimize(backend, error_on_graph_break=True)
            return optimize(fn)(self.x)

        with thread_held_in(run_and_hold):
            self.compile()

    def test_decorated_function_on_several_threads(self):
        @torch._dynamo.error_on_graph_break(False)
        def decorated(hold):
            hold()

        def in_outer_region(hold):
            with torch._dynamo.error_on_graph_break(True):
                decorated(hold)
                return utils._get_error_on_graph_break()

        with thread_held_in(in_outer_region) as first:
            with thread_held_in(decorated):
                first.release()
                self.assertTrue(first.result())
        self.assertFalse(utils._get_error_on_graph_break())

    def test_tasks_of_one_thread(self):
        async def region(value):
            with torch._dynamo.error_on_graph_break(value):
                await asyncio.sleep(0)
                return utils._get_error_on_graph_break()

        async def gather():
            return await asyncio.gather(region(True), region(False))

        self.assertEqual(asyncio.run(gather()), [True, False])

    def test_region_holds_for_what_it_calls(self):
        def fn(x):
            with torch._dynamo.error_on_graph_break(True):
                return breaks(x)

        with self.assertRaises(Unsupported):
            torch.compile(fn, backend="eager")(self.x)
        self.compile()


class TestOtherSwitches(TestCase):
    def test_force_inline_of_another_thread(self):
        def force_inline(hold):
            with trace_rules._force_inline():
                hold()
                return trace_rules.check(unittest.TestCase.run)

        self.assertTrue(trace_rules.check(unittest.TestCase.run))
        with thread_held_in(force_inline) as thread:
            self.assertTrue(trace_rules.check(unittest.TestCase.run))
        self.assertFalse(thread.result())

    @parametrize("decorated", [False, True])
    def test_override_cudagraphs_of_another_thread(self, decorated):
        override = torch._dynamo.override_cudagraphs(fwd=False)

        def in_override(hold):
            with torch._dynamo.override_cudagraphs(fwd=True):
                if decorated:
                    override(hold)()
                else:
                    hold()
                return utils._get_cudagraph_override()

        with thread_held_in(in_override) as first:
            self.assertIsNone(utils._get_cudagraph_override())
            with thread_held_in(in_override):
                first.release()
                self.assertEqual(first.result(), (True, None))
            self.assertIsNone(utils._get_cudagraph_override())


instantiate_parametrized_tests(TestOtherSwitches)

if __name__ == "__main__":
    run_tests()
