# Owner(s): ["module: __torch_dispatch__"]

import os
import sys

import torch
import torch._dynamo
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.aot_autograd import make_boxed_func
from torch.testing._internal.common_utils import (
    instantiate_parametrized_tests,
    parametrize,
    run_tests,
    TestCase,
)
from torch.utils._python_dispatch import (
    is_in_any_mode_without_ignore_compile_internals,
    is_in_torch_dispatch_mode,
    TorchDispatchMode,
)


# Make the helper files in test/ importable
pytorch_test_dir = os.path.dirname(os.path.realpath(__file__))
sys.path.append(pytorch_test_dir)
from concurrency_utils import (
    call_in_nested_backward,
    MAX_DEPTH,
    run_on_thread,
    thread_held_in,
)


class Mode(TorchDispatchMode):
    """Calls a function on the way."""

    def __init__(self, fn=lambda: None):
        super().__init__()
        self.fn = fn

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.fn()
        return func(*args, **(kwargs or {}))


class InfraMode(Mode):
    @classmethod
    def is_infra_mode(cls):
        return True

    @classmethod
    def ignore_compile_internals(cls):
        return True


def flags():
    return (
        is_in_torch_dispatch_mode(),
        is_in_torch_dispatch_mode(include_infra_modes=False),
        is_in_any_mode_without_ignore_compile_internals(),
    )


NONE = (False, False, False)
# A mode, infra or not, and the flags in it
MODES = {False: (Mode, (True, True, True)), True: (InfraMode, (True, False, False))}


class TestDispatchModeThreads(TestCase):
    def tearDown(self):
        self.assertEqual(flags(), NONE)
        super().tearDown()

    @parametrize("infra", (False, True))
    def test_mode_of_another_thread(self, infra):
        mode, expected = MODES[infra]

        def run(hold):
            with mode():
                hold()
                return flags()

        with thread_held_in(run) as thread:
            self.assertEqual(flags(), NONE)
        self.assertEqual(thread.result(), expected)

    @parametrize("infra", (False, True))
    def test_modes_overlap(self, infra):
        mode, expected = MODES[infra]

        def run(hold):
            with mode():
                hold()

        with thread_held_in(run) as thread:
            with mode():
                thread.release()
                thread.result()
                self.assertEqual(flags(), expected)
            self.assertEqual(flags(), NONE)

    @parametrize("infra", (False, True))
    def test_modes_overlap_the_other_ends_last(self, infra):
        mode, expected = MODES[infra]

        def run(hold):
            with mode():
                hold()

        here = mode()
        here.__enter__()
        with thread_held_in(run):
            here.__exit__(None, None, None)
            self.assertEqual(flags(), NONE)
        self.assertEqual(run_on_thread(flags), NONE)

    def test_first_calls_of_compiled_functions_overlap(self):
        # AOTAutograd runs these in a mode
        def compiled_call(hold):
            def compiler(gm, example_inputs):
                def run(args):
                    self.assertTrue(is_in_torch_dispatch_mode())
                    hold()
                    return gm.forward(*args)

                return make_boxed_func(lambda *args: run(args))

            fn = torch.compile(
                lambda x: x + 1, backend=aot_autograd(fw_compiler=compiler)
            )
            return fn(torch.ones(2))

        with thread_held_in(compiled_call) as first:
            with thread_held_in(compiled_call) as second:
                first.release()
                first.result()
        self.assertEqual(second.result(), torch.ones(2) + 1)
        self.assertEqual(flags(), NONE)

    @torch._dynamo.config.patch(inline_torch_dispatch_torch_compile=False)
    def test_compile_while_another_thread_is_in_a_mode(self):
        graphs = []

        def backend(gm, example_inputs):
            graphs.append(gm)
            return gm

        @torch.compile(backend=backend)
        def fn(x):
            return x.sin() + 1

        def run(hold):
            with Mode():
                hold()

        x = torch.randn(3)
        with thread_held_in(run):
            self.assertEqual(fn(x), x.sin() + 1)
        self.assertEqual(len(graphs), 1)

    @parametrize("infra", (False, True))
    def test_inside_of_torch_dispatch(self, infra):
        mode, expected = MODES[infra]

        seen = []
        with mode(lambda: seen.append(flags())):
            torch.ones(3)
        self.assertEqual(seen, [expected])

    @parametrize("infra", (False, True))
    def test_backward_on_a_thread_of_the_engine(self, infra):
        mode, expected = MODES[infra]

        seen = []
        with mode():
            call_in_nested_backward(lambda: seen.append(flags()), MAX_DEPTH + 1)
        self.assertEqual(seen, [expected])


instantiate_parametrized_tests(TestDispatchModeThreads)


if __name__ == "__main__":
    run_tests()
