# Owner(s): ["module: dynamo"]

import asyncio
import contextvars
import os
import pickle
import sys
from unittest import mock

import torch
import torch._dynamo
from torch._dynamo.eval_frame import _is_in_optimized_module
from torch.distributed._tools.mod_tracker import ModTracker
from torch.testing._internal.common_utils import run_tests, TestCase


# Make the helper files in test/ importable
pytorch_test_dir = os.path.dirname(os.path.dirname(os.path.realpath(__file__)))
sys.path.append(pytorch_test_dir)
from concurrency_utils import run_on_thread, thread_held_in


FLAGS = ("_is_compiling_flag", "_is_exporting_flag")


def flags():
    return (torch.compiler.is_compiling(), torch.compiler.is_exporting())


def compile_and_hold(hold):
    seen = []

    def backend(gm, example_inputs):
        hold()
        seen.append(torch.compiler.is_compiling())
        return gm.forward

    torch.compile(lambda x: x + 1, backend=backend)(torch.zeros(3))
    return seen


def run_compiled_and_hold(hold):
    def backend(gm, example_inputs):
        def run(*args):
            hold()
            return gm.forward(*args)

        return run

    return torch.compile(torch.nn.ReLU(), backend=backend)(torch.zeros(3))


def export_and_hold(hold):
    seen = []

    class Model(torch.nn.Module):
        def forward(self, x):
            hold()
            seen.append(flags())
            return x + 1

    torch.export.export(Model(), (torch.zeros(3),), strict=False)
    return seen


class TestCompilingFlags(TestCase):
    def setUp(self):
        super().setUp()
        torch._dynamo.reset()

    def test_modules_are_tracked_while_a_compiled_one_runs(self):
        # ModTracker passes over what runs in a compiled module
        model = torch.nn.Sequential(torch.nn.Linear(3, 3))
        seen = []
        model[0].register_forward_pre_hook(
            lambda module, args: seen.append(set(tracker.parents))
        )
        with thread_held_in(run_compiled_and_hold) as first:
            with thread_held_in(run_compiled_and_hold) as second:
                with ModTracker() as tracker:
                    model(torch.zeros(3))
                # Not in the order in which they began
                first.release()
                first.result()
            second.result()
        self.assertEqual(seen, [{"Global", "Sequential", "Sequential.0"}])
        self.assertFalse(_is_in_optimized_module())

    def test_model_runs_while_another_thread_compiles(self):
        with thread_held_in(compile_and_hold) as thread:
            self.assertEqual(flags(), (False, False))
            self.assertEqual(run_on_thread(flags), (False, False))
        thread.result()
        self.assertEqual(flags(), (False, False))

    def test_model_runs_while_another_thread_exports(self):
        with thread_held_in(export_and_hold) as thread:
            self.assertEqual(flags(), (False, False))
            self.assertEqual(run_on_thread(flags), (False, False))
        self.assertTrue(all(seen == (True, True) for seen in thread.result()))

    def test_non_strict_tracing(self):
        if not hasattr(torch.compiler, "_non_strict_tracing_context"):
            self.skipTest("this release has no such flag")

        def trace(hold):
            with torch.compiler._non_strict_tracing_context():
                hold()
                return torch.compiler._is_non_strict_tracing()

        with thread_held_in(trace) as thread:
            self.assertFalse(torch.compiler._is_non_strict_tracing())
        self.assertTrue(thread.result())

    def test_overlapping_contexts_leave_nothing_behind(self):
        from torch._export.utils import _compiling_state_context

        def export(hold):
            with _compiling_state_context():
                hold()
                return flags()

        with thread_held_in(export) as first:
            with thread_held_in(export) as second:
                first.release()
                first.result()
        self.assertEqual(second.result(), (True, True))
        self.assertEqual(flags(), (False, False))
        self.assertEqual(run_on_thread(flags), (False, False))

    def test_old_attributes(self):
        for name in FLAGS:
            self.assertFalse(getattr(torch.compiler, name))
            # Saved and restored by hand, as code outside of PyTorch does
            old = getattr(torch.compiler, name)
            try:
                setattr(torch.compiler, name, True)
                self.assertTrue(getattr(torch.compiler, name))
                self.assertEqual(flags()[FLAGS.index(name)], True)
                self.assertFalse(run_on_thread(lambda: getattr(torch.compiler, name)))
            finally:
                setattr(torch.compiler, name, old)
            with mock.patch.object(torch.compiler, name, True):
                self.assertEqual(flags()[FLAGS.index(name)], True)
            self.assertEqual(flags(), (False, False))
        # cloudpickle does this for functions that use the module
        self.assertIs(pickle.loads(pickle.dumps(torch.compiler)), torch.compiler)

    def test_context_on_another_thread_and_later(self):
        # Threads inherit the context where sys.flags.thread_inherit_context is set
        seen = {}

        def backend(gm, example_inputs):
            context = contextvars.copy_context()
            seen["thread"] = run_on_thread(lambda: context.run(flags))
            contexts.append(context)
            return gm.forward

        class Model(torch.nn.Module):
            def forward(self, x):
                context = contextvars.copy_context()
                seen["exporting"] = context.run(flags)
                seen["thread of export"] = run_on_thread(lambda: context.run(flags))
                contexts.append(context)
                return x + 1

        contexts = []
        torch.compile(lambda x: x + 1, backend=backend)(torch.zeros(3))
        torch.export.export(Model(), (torch.zeros(3),), strict=False)
        self.assertEqual(seen["thread"], (False, False))
        self.assertEqual(seen["exporting"], (True, True))
        self.assertEqual(seen["thread of export"], (False, False))
        self.assertEqual([c.run(flags) for c in contexts], [(False, False)] * 2)

    def test_asyncio_task_inherits(self):
        from torch._export.utils import _compiling_state_context

        async def inside():
            return flags()

        with _compiling_state_context():
            self.assertEqual(asyncio.run(inside()), (True, True))
        self.assertEqual(asyncio.run(inside()), (False, False))

    def test_flags_in_compiled_and_exported_code(self):
        def fn(x):
            if torch.compiler.is_exporting():
                return x + 2
            return x + 1 if torch.compiler.is_compiling() else x

        class Model(torch.nn.Module):
            def forward(self, x):
                return fn(x)

        x = torch.zeros(3)
        self.assertEqual(fn(x), x)
        compiled = torch.compile(fn, backend="eager", fullgraph=True)
        self.assertEqual(compiled(x), x + 1)
        for strict in (False, True):
            exported = torch.export.export(Model(), (x,), strict=strict)
            self.assertEqual(exported.module()(x), x + 2)

    def test_scripting(self):
        @torch.jit.script
        def fn(x):
            return x if torch.compiler.is_compiling() else x + 1

        self.assertEqual(fn(torch.zeros(3)), torch.ones(3))


if __name__ == "__main__":
    run_tests()
