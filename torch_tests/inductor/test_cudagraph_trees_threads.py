# Owner(s): ["module: cuda graphs"]

import functools
import os
import sys
import threading
import unittest
import weakref
from unittest import mock

import torch
import torch._dynamo
from torch._dynamo.mutation_guard import GenerationTracker
from torch._inductor import cudagraph_trees
from torch.testing._internal.common_utils import run_tests, TestCase
from torch.testing._internal.inductor_utils import HAS_CUDA_AND_TRITON


# Make the helper files in test/ importable
pytorch_test_dir = os.path.dirname(os.path.dirname(os.path.realpath(__file__)))
sys.path.append(pytorch_test_dir)
from concurrency_utils import (
    Call,
    call_in_nested_backward,
    MAX_DEPTH,
    run_on_thread,
    run_on_threads,
    TIMEOUT,
)


class TestCudagraphTreesThreads(TestCase):
    def test_nothing_is_left_of_a_thread(self):
        # When the thread local state is destroyed, the interpreter may be gone
        keys = []

        class EndOfThread:
            def __init__(self):
                self.is_key_in_tls = torch._C._is_key_in_tls

            def __del__(self):
                left.append([key for key in keys if self.is_key_in_tls(key)])

        def use_containers():
            cudagraph_trees.get_container(0)
            keys.extend(
                key
                for key in cudagraph_trees.local.__dict__
                if torch._C._is_key_in_tls(key)
            )
            # Goes after all that is there by now
            cudagraph_trees.local.end_of_thread = EndOfThread()
            return keys

        left = []
        self.assertIn("tree_manager_containers", run_on_thread(use_containers))
        self.assertEqual(left, [[]])


def generation():
    return cudagraph_trees.CUDAGraphTreeManager.get_curr_generation()


class TestGenerations(TestCase):
    """A thread's managers end an iteration when that thread begins a new one."""

    def setUp(self):
        super().setUp()
        self.addCleanup(cudagraph_trees.reset_cudagraph_trees)

    def test_steps_of_another_thread(self):
        def step():
            torch.compiler.cudagraph_mark_step_begin()
            return generation()

        self.assertNotEqual(run_on_thread(step), generation())
        self.assertFalse(cudagraph_trees.CUDAGraphTreeManager.user_invoked_mark_step())
        before = step()
        run_on_thread(step)
        self.assertEqual(generation(), before)
        self.assertNotEqual(step(), before)

    def test_pending_backward(self):
        # All of a manager that decides whether outputs may be freed
        manager = object.__new__(cudagraph_trees.CUDAGraphTreeManager)
        manager.running_forwards_with_pending_backwards = True
        manager.update_generation()
        run_on_thread(torch.compiler.cudagraph_mark_step_begin)
        self.assertFalse(manager.can_start_new_generation())
        torch.compiler.cudagraph_mark_step_begin()
        self.assertTrue(manager.can_start_new_generation())

    def test_reset_on_another_thread(self):
        torch.compiler.cudagraph_mark_step_begin()
        before = generation()

        def reset():
            cudagraph_trees.get_container(0)
            cudagraph_trees.reset_cudagraph_trees()

        run_on_thread(reset)
        self.assertEqual(generation(), before)

    def test_calls_of_another_thread(self):
        fn = torch.compile(lambda x: x + 1, backend="eager")
        x = torch.ones(2)
        fn(x)
        before = generation()
        run_on_thread(lambda: fn(x))
        run_on_thread(lambda: torch._dynamo.run(fn)(x))
        self.assertEqual(generation(), before)
        fn(x)
        self.assertNotEqual(generation(), before)

    def test_backward_belongs_to_the_iteration(self):
        def look():
            found.append((threading.get_ident(), generation()))

        for mark in (False, True):
            if mark:
                torch.compiler.cudagraph_mark_step_begin()
            found = []
            look()
            call_in_nested_backward(look, MAX_DEPTH + 1)  # on a thread of the engine
            (here, before), (there, inside) = found
            self.assertNotEqual(here, there)
            self.assertEqual(before, inside)

    def test_module_made_on_another_thread(self):
        # On each thread in its first call
        def make():
            fn = torch.compile(lambda x: x + 1, backend="eager")
            fn(torch.ones(2))
            module = torch.nn.Linear(2, 2)
            self.assertTrue(GenerationTracker.check(module))
            return module

        def check():
            make()
            return GenerationTracker.check(module)

        module = run_on_thread(make)
        self.assertFalse(run_on_thread(check))

    @unittest.skipIf(not HAS_CUDA_AND_TRITON, "needs a GPU")
    def test_call_between_two_graphs(self):
        other = torch.compile(lambda x: x + 1, backend="eager")

        @torch._dynamo.disable
        def call_on_another_thread():
            run_on_thread(lambda: other(torch.ones(2)))

        def fn(x):
            y = x.sin()
            call_on_another_thread()
            return y + 1

        x = torch.randn(3, device="cuda")
        compiled = torch.compile(fn, mode="reduce-overhead")
        for _ in range(4):
            self.assertEqual(compiled(x), fn(x))

    @unittest.skipIf(not HAS_CUDA_AND_TRITON, "needs a GPU")
    def test_step_before_the_backward(self):
        def fn(x):
            return (x @ x).sin()  # the product is kept for the backward

        compiled = torch.compile(fn, mode="reduce-overhead")
        for _ in range(4):
            x = torch.randn(3, 3, device="cuda", requires_grad=True)
            (expected,) = torch.autograd.grad(fn(x).sum(), x)
            out = compiled(x).sum()
            run_on_thread(torch.compiler.cudagraph_mark_step_begin)
            (grad,) = torch.autograd.grad(out, x)
            self.assertEqual(grad, expected)


class TestFunctions(TestCase):
    """What a thread calls was recorded by its own managers."""

    def setUp(self):
        super().setUp()
        self.addCleanup(cudagraph_trees.reset_cudagraph_trees)

    def cudagraphify(self):
        """A function that returns the containers it was recorded with."""

        def record(model, *args, **kwargs):
            containers = cudagraph_trees.get_obj(
                cudagraph_trees.local, "tree_manager_containers"
            )

            def fn(inputs):
                return containers

            self.recorded.append(weakref.ref(fn))
            return fn, fn([])

        self.recorded = []
        patch = mock.patch.object(cudagraph_trees, "cudagraphify", record)
        patch.start()
        self.addCleanup(patch.stop)
        return cudagraph_trees.cudagraphify_impl(lambda inputs: inputs, [], ())

    def test_each_thread_records(self):
        def call_twice():
            own = cudagraph_trees.local.__dict__["tree_manager_containers"]
            self.assertIs(fn([]), own)
            self.assertIs(fn([]), own)

        def on_thread():
            cudagraph_trees.get_container(0)
            call_twice()

        fn = self.cudagraphify()
        call_twice()
        run_on_thread(on_thread)
        call_twice()
        self.assertEqual(len(self.recorded), 2)

    def test_backward_uses_what_its_thread_has(self):
        def call_in_backward():
            containers = []
            call_in_nested_backward(lambda: containers.append(fn([])), MAX_DEPTH + 1)
            return containers

        def on_thread():
            cudagraph_trees.get_container(0)
            own = cudagraph_trees.local.__dict__["tree_manager_containers"]
            for found in (*call_in_backward(), fn([]), *call_in_backward()):
                self.assertIs(found, own)

        fn = self.cudagraphify()
        for _ in range(2):
            run_on_thread(on_thread)
        self.assertEqual(len(self.recorded), 2)

    def test_function_goes_with_the_thread(self):
        fn = self.cudagraphify()
        run_on_thread(lambda: fn([]))
        self.assertIsNone(self.recorded[0]())

    def test_function_goes_with_the_model(self):
        fn = self.cudagraphify()
        fn([])
        self.assertIsNotNone(self.recorded[0]())
        del fn
        self.assertIsNone(self.recorded[0]())

    def test_what_autograd_hands_over_comes_first(self):
        # An engine's thread has its own if the first backward came from a thread
        # without any
        def on_thread():
            cudagraph_trees.get_container(0)
            torch._C._stash_obj_in_tls("tree_manager_containers", {0: container})
            return cudagraph_trees.get_container(0)

        container = cudagraph_trees.get_container(0)
        self.assertIs(run_on_thread(on_thread), container)

    @unittest.skipIf(not HAS_CUDA_AND_TRITON, "needs a GPU")
    def test_backward_of_a_thread_without_containers(self):
        def container_in_backward():
            x = torch.ones(2, device="cuda", requires_grad=True)
            Call.apply(x, look).sum().backward()
            return found.pop()

        def look():
            found.append(cudagraph_trees.get_container(0))

        found = []
        other = run_on_thread(container_in_backward)
        container = cudagraph_trees.get_container(0)
        self.assertIsNot(other, container)
        self.assertIs(container_in_backward(), container)

    @unittest.skipIf(not HAS_CUDA_AND_TRITON, "needs a GPU")
    def test_outputs_of_several_threads(self):
        # They call the same code at the same time and keep what they got
        def call(n):
            x = torch.full((64, 64), float(n), device="cuda")
            for _ in range(6):
                barrier.wait(TIMEOUT)
                out = compiled(x)
                barrier.wait(TIMEOUT)
                self.assertEqual(out, fn(x))
                del out

        def fn(x):
            return (x @ x).sin() + x

        compiled = torch.compile(fn, mode="reduce-overhead")
        barrier = threading.Barrier(3)
        run_on_threads(*(functools.partial(call, n) for n in range(3)))

    @unittest.skipIf(not HAS_CUDA_AND_TRITON, "needs a GPU")
    def test_training_on_several_threads(self):
        # The engine has one thread for the device, which runs the backwards of all
        def train(n):
            for step in range(6):
                x = torch.full((8, 8), n + step / 8, device="cuda", requires_grad=True)
                (expected,) = torch.autograd.grad(fn(x).sum(), x)
                barrier.wait(TIMEOUT)
                out = compiled(x).sum()
                barrier.wait(TIMEOUT)
                (grad,) = torch.autograd.grad(out, x)
                barrier.wait(TIMEOUT)
                self.assertEqual(grad, expected)
                del out, grad

        def fn(x):
            return (x @ x).sin()

        compiled = torch.compile(fn, mode="reduce-overhead")
        barrier = threading.Barrier(3)
        run_on_threads(*(functools.partial(train, n) for n in range(3)))


if __name__ == "__main__":
    run_tests()
