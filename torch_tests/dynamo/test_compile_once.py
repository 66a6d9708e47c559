# Owner(s): ["module: dynamo"]

import contextlib
import contextvars
import gc
import os
import random
import sys
import threading
import weakref
from unittest import mock

import torch
import torch._dynamo
import torch.utils._pytree as pytree
from functorch.compile import make_boxed_func
from torch._dynamo import convert_frame
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.eval_frame import _debug_get_cache_entry_list
from torch._dynamo.guards import GuardManagerWrapper
from torch._dynamo.utils import counters
from torch.testing._internal.common_utils import (
    instantiate_parametrized_tests,
    parametrize,
    run_tests,
    TestCase,
)


# Make the helper files in test/ importable
pytorch_test_dir = os.path.dirname(os.path.dirname(os.path.realpath(__file__)))
sys.path.append(pytorch_test_dir)
from concurrency_utils import run_on_threads, thread_held_in, TIMEOUT, WorkerThread


def run_in_context(*fns):
    """run_on_threads() with this thread's config on each of the threads."""
    contexts = [contextvars.copy_context() for _ in fns]
    return run_on_threads(
        *(lambda c=c, fn=fn: c.run(fn) for c, fn in zip(contexts, fns))
    )


class ObservedLock(type(threading.RLock())):
    """Stands in for compile_lock and tells how many threads had to wait for it."""

    def __init__(self):
        self._waiters = threading.Semaphore(0)
        self.after_release = None

    def __enter__(self):
        if not self.acquire(blocking=False):
            self._waiters.release()
            self.acquire()

    def __exit__(self, *args):
        self.release()
        if self.after_release is not None:
            self.after_release()

    def wait_for_waiters(self, n):
        for _ in range(n):
            if not self._waiters.acquire(timeout=TIMEOUT):
                raise TimeoutError("no thread waits for compile_lock")


class CountingBackend:
    """Runs graphs as they are. The first compilation waits for `waiters` threads."""

    def __init__(self, lock, waiters):
        self.lock = lock
        self.waiters = waiters
        self.calls = 0

    def __call__(self, gm, example_inputs):
        self.calls += 1
        waiters, self.waiters = self.waiters, 0
        self.lock.wait_for_waiters(waiters)
        return gm.forward


class TestCompileOnce(TestCase):
    def setUp(self):
        super().setUp()
        torch._dynamo.reset()
        counters.clear()
        self.lock = ObservedLock()
        self._patches = contextlib.ExitStack()
        self._patches.enter_context(
            mock.patch.object(convert_frame, "compile_lock", self.lock)
        )
        # One compilation for each shape, so that they can be counted
        self._patches.enter_context(
            torch._dynamo.config.patch(automatic_dynamic_shapes=False)
        )

    def tearDown(self):
        self._patches.close()
        torch._dynamo.reset()
        super().tearDown()

    @parametrize("num_threads", (2, 3, 6))
    def test_waiting_threads_use_the_first_compilation(self, num_threads):
        def fn(x):
            return x.sin() + 1

        backend = CountingBackend(self.lock, waiters=num_threads - 1)
        inputs = [torch.randn(3) for _ in range(num_threads)]
        # Each thread has a torch.compile of its own, as several models would
        results = run_in_context(
            *(
                lambda x=x: torch.compile(fn, backend=backend, fullgraph=True)(x)
                for x in inputs
            )
        )
        self.assertEqual(results, [fn(x) for x in inputs])
        self.assertEqual(backend.calls, 1)
        self.assertEqual(len(_debug_get_cache_entry_list(fn)), 1)

        # The one entry serves whoever comes later
        self.assertEqual(
            torch.compile(fn, backend=backend)(inputs[0] + 1), fn(inputs[0] + 1)
        )
        self.assertEqual(backend.calls, 1)

    def test_waiting_threads_do_not_use_up_the_recompile_limit(self):
        def fn(x):
            return x.sin() + 1

        backend = CountingBackend(self.lock, waiters=3)
        compiled = torch.compile(fn, backend=backend)
        with torch._dynamo.config.patch(
            recompile_limit=2,
            accumulated_recompile_limit=2,
            fail_on_recompile_limit_hit=True,
        ):
            run_in_context(*[lambda: compiled(torch.randn(3))] * 4)
            compiled(torch.randn(4))
            self.assertEqual(backend.calls, 2)
            with self.assertRaises(torch._dynamo.exc.FailOnRecompileLimitHit):
                compiled(torch.randn(5))

    def test_code_without_cache_entry_is_found(self):
        # The entry is made after compile_lock was released. Hold the first
        # thread in between.
        def fn(x):
            return x.sin() + 1

        backend = CountingBackend(self.lock, waiters=0)
        compiled = torch.compile(fn, backend=backend)

        context = contextvars.copy_context()

        def compile_and_hold(hold):
            self.lock.after_release = hold
            return context.run(compiled, torch.ones(3))

        with thread_held_in(compile_and_hold) as thread:
            self.assertEqual(_debug_get_cache_entry_list(fn), [])
            self.assertEqual(compiled(torch.zeros(3)), fn(torch.zeros(3)))
            self.assertEqual(backend.calls, 1)
            # ... by the guards, as an entry would be
            self.assertEqual(compiled(torch.zeros(4)), fn(torch.zeros(4)))
            self.assertEqual(backend.calls, 2)
        self.assertEqual(thread.result(), fn(torch.ones(3)))
        self.assertEqual(len(_debug_get_cache_entry_list(fn)), 2)
        compiled(torch.zeros(3)), compiled(torch.zeros(4))
        self.assertEqual(backend.calls, 2)

    def test_entry_made_before_the_callback_starts(self):
        # The other thread may have the interpreter between the lookup and the
        # first instruction of the callback
        def fn(x):
            return x.sin() + 1

        backend = CountingBackend(self.lock, waiters=0)
        compiled = torch.compile(fn, backend=backend)
        compiled(torch.ones(3))
        original = convert_frame.CatchErrorsWrapper.__call__
        context = contextvars.copy_context()

        def run_and_hold(hold):
            def callback(wrapper, frame, *args):
                if frame.f_code is fn.__code__:
                    hold()
                return original(wrapper, frame, *args)

            patch = mock.patch.object(
                convert_frame.CatchErrorsWrapper, "__call__", callback
            )
            with patch:
                return context.run(compiled, torch.ones(4))

        with thread_held_in(run_and_hold) as thread:
            compiled(torch.ones(4))
            self.assertEqual(backend.calls, 2)
        self.assertEqual(thread.result(), fn(torch.ones(4)))
        self.assertEqual(backend.calls, 2)
        self.assertEqual(len(_debug_get_cache_entry_list(fn)), 2)

    def test_entry_moved_during_the_lookup(self):
        # Two lookups for the last entry of the list: one has got there, the other
        # stands at the first. Then the one moves the last entry to the front.
        class Mode:
            def __init__(self, value):
                self.value = value

            def __eq__(self, other):
                if hold := holds.pop(frozenset((self.value, other.value)), None):
                    hold()
                return self.value == other.value

            def __hash__(self):
                return hash(self.value)

        pytree.register_constant(Mode)
        holds = {}

        def fn(x, mode):
            return x + mode.value

        backend = CountingBackend(self.lock, waiters=0)
        compiled = torch.compile(fn, backend=backend)
        x = torch.ones(3)
        for value in range(3):
            compiled(x, Mode(value))

        def look_up(entry):
            context = contextvars.copy_context()

            def run(hold):
                holds[frozenset((0, entry))] = hold
                return context.run(compiled, x, Mode(0))

            return run

        with thread_held_in(look_up(0)) as first, thread_held_in(look_up(2)) as second:
            first.release()
            self.assertEqual(first.result(), x)
        self.assertEqual(second.result(), x)
        self.assertEqual(backend.calls, 3)
        self.assertEqual(len(_debug_get_cache_entry_list(fn)), 3)

    def test_recompilation(self):
        def fn(x):
            return x.sin() + 1

        backend = CountingBackend(self.lock, waiters=0)
        compiled = torch.compile(fn, backend=backend)
        compiled(torch.ones(3))
        backend.waiters = 2
        run_in_context(*[lambda: compiled(torch.ones(4))] * 3)
        self.assertEqual(backend.calls, 2)
        self.assertEqual(len(_debug_get_cache_entry_list(fn)), 2)

    def test_resumed_frames(self):
        # All threads have run the first graph when one compiles the second
        barrier = threading.Barrier(3)

        @torch._dynamo.disable
        def meet():
            barrier.wait(TIMEOUT)

        def fn(x):
            x = x.sin()
            meet()
            return x.cos()

        class Backend(CountingBackend):
            second = False

            def __call__(self, gm, example_inputs):
                if not self.second and "cos" in gm.code:
                    self.second = True
                    self.waiters = 2
                return super().__call__(gm, example_inputs)

        backend = Backend(self.lock, waiters=2)
        compiled = torch.compile(fn, backend=backend)
        x = torch.randn(3)
        results = run_in_context(*[lambda: compiled(x)] * 3)
        self.assertEqual(results, [x.sin().cos()] * 3)
        self.assertEqual(backend.calls, 2)

    def test_skipped_frames(self):
        # Dynamo cannot resume in the middle of this, and says so to all threads
        # at the price of one trace
        def fn(x):
            with contextlib.nullcontext(), torch.no_grad():
                for _ in range(2):
                    torch._dynamo.graph_break()
                    x = x + 1
            return x

        traced = []
        original = convert_frame.ConvertFrameAssert.__call__

        def convert(converter, frame, *args, **kwargs):
            if frame.f_code is fn.__code__:
                traced.append(frame)
                if len(traced) == 1:
                    self.lock.wait_for_waiters(2)
            return original(converter, frame, *args, **kwargs)

        compiled = torch.compile(fn, backend="eager")
        with mock.patch.object(convert_frame.ConvertFrameAssert, "__call__", convert):
            results = run_in_context(*[lambda: compiled(torch.ones(3))] * 3)
        self.assertEqual(results, [torch.full((3,), 3.0)] * 3)
        self.assertEqual(len(traced), 1)

    def test_lazy_backward(self):
        calls = []

        def bw_compiler(gm, example_inputs):
            calls.append(gm)
            if len(calls) == 1:
                arrived.wait(TIMEOUT)
            else:
                arrived.set()
            return make_boxed_func(gm.forward)

        arrived = threading.Event()
        backend = aot_autograd(
            fw_compiler=lambda gm, _: make_boxed_func(gm.forward),
            bw_compiler=bw_compiler,
        )

        @torch.compile(backend=backend)
        def fn(x):
            return x.sin()

        inputs = [torch.randn(3, requires_grad=True) for _ in range(2)]
        losses = [fn(x).sum() for x in inputs]

        def wait_for_waiter():
            self.lock.wait_for_waiters(1)
            arrived.set()

        watcher = WorkerThread(wait_for_waiter)
        watcher.start()
        with torch._functorch.config.patch(force_non_lazy_backward_lowering=False):
            run_in_context(*(loss.backward for loss in losses))
        for x in inputs:
            self.assertEqual(x.grad, x.detach().cos())
        self.assertEqual(len(calls), 1)
        watcher.result()

    def test_invalidated_entry(self):
        # The code goes with the entry that owns it
        def fn(x, cls):
            return x * 2 if cls is torch.Tensor else x * 3

        backend = CountingBackend(self.lock, waiters=2)
        compiled = torch.compile(fn, backend=backend)
        cls = type("Guarded", (), {})
        run_in_context(*[lambda: compiled(torch.ones(3), cls)] * 3)
        self.assertEqual(backend.calls, 1)
        (entry,) = _debug_get_cache_entry_list(fn)
        code = weakref.ref(entry.code)
        del entry
        cls = None
        gc.collect()
        self.assertIsNone(code())

        for _ in range(2):
            result = compiled(torch.ones(3), torch.Tensor)
            self.assertEqual(result, torch.full((3,), 2.0))
        self.assertEqual(backend.calls, 2)

    def test_skip_guard_eval_unsafe(self):
        def fn(x):
            return x.sin() + x.shape[0]

        backend = CountingBackend(self.lock, waiters=2)
        compiled = torch.compile(fn, backend=backend)
        inputs = [torch.ones(3), torch.ones(4)]
        run_in_context(*[lambda: compiled(inputs[0])] * 3)
        compiled(inputs[1])
        self.assertEqual(backend.calls, 2)
        with torch.compiler.set_stance("default", skip_guard_eval_unsafe=True):
            for x in inputs + inputs:
                self.assertEqual(compiled(x), fn(x))

    # The following must not share what another thread compiled

    def test_other_guards(self):
        def fn(x):
            return x.sin() + x.shape[0]

        backend = CountingBackend(self.lock, waiters=2)
        compiled = torch.compile(fn, backend=backend)
        inputs = [torch.ones(3), torch.ones(4), torch.ones(3, dtype=torch.double)]
        results = run_in_context(*(lambda x=x: compiled(x) for x in inputs))
        self.assertEqual(results, [fn(x) for x in inputs])
        self.assertEqual(backend.calls, 3)

    def test_other_global_state(self):
        def fn(x):
            return x * 2 if torch.is_grad_enabled() else x * 3

        backend = CountingBackend(self.lock, waiters=1)
        compiled = torch.compile(fn, backend=backend)

        def no_grad():
            with torch.no_grad():
                return compiled(torch.ones(3))

        results = run_in_context(lambda: compiled(torch.ones(3)), no_grad)
        self.assertEqual(results, [torch.full((3,), 2.0), torch.full((3,), 3.0)])
        self.assertEqual(backend.calls, 2)

    def test_other_torch_function_mode(self):
        class Mode(torch.overrides.TorchFunctionMode):
            def __torch_function__(self, func, types, args, kwargs=None):
                if func is torch.add:
                    func = torch.sub
                return func(*args, **(kwargs or {}))

        def fn(x):
            return torch.add(x, 1)

        backend = CountingBackend(self.lock, waiters=1)
        compiled = torch.compile(fn, backend=backend)

        def with_mode():
            with Mode():
                return compiled(torch.ones(3))

        results = run_in_context(lambda: compiled(torch.ones(3)), with_mode)
        self.assertEqual(results, [torch.full((3,), 2.0), torch.zeros(3)])

    def test_other_backend(self):
        def fn(x):
            return x.sin() + 1

        class Backend(CountingBackend):
            def __call__(self, gm, example_inputs):
                result = super().__call__(gm, example_inputs)
                # The other one comes last, nobody waits for compile_lock then
                for backend in backends:
                    backend.waiters = 0
                return result

        backends = [Backend(self.lock, waiters=1) for _ in range(2)]
        run_in_context(
            *(
                lambda backend=backend: torch.compile(fn, backend=backend)(torch.ones(3))
                for backend in backends
            )
        )
        self.assertEqual([b.calls for b in backends], [1, 1])
        self.assertEqual(len(_debug_get_cache_entry_list(fn)), 2)

    def test_failed_compilation(self):
        def fn(x):
            return x.sin() + 1

        class Backend(CountingBackend):
            def __call__(self, gm, example_inputs):
                result = super().__call__(gm, example_inputs)
                if self.calls == 1:
                    raise RuntimeError("the first compilation fails")
                return result

        backend = Backend(self.lock, waiters=2)
        compiled = torch.compile(fn, backend=backend)
        failed = []

        def run():
            try:
                return compiled(torch.ones(3))
            except torch._dynamo.exc.BackendCompilerFailed as e:
                failed.append(e)

        results = run_in_context(run, run, run)
        self.assertEqual(len(failed), 1)
        self.assertEqual([r for r in results if r is not None], [fn(torch.ones(3))] * 2)

    def test_guards_that_raise(self):
        def fn(x):
            return x.sin() + 1

        class Backend(CountingBackend):
            def __call__(self, gm, example_inputs):
                self.thread = threading.get_ident()
                return super().__call__(gm, example_inputs)

        backend = Backend(self.lock, waiters=1)
        compiled = torch.compile(fn, backend=backend)
        original = GuardManagerWrapper.check

        def check(manager, x):
            # Threads check the guards that they have just built, too
            if backend.thread != threading.get_ident():
                raise RuntimeError("a guard raises")
            return original(manager, x)

        def run():
            return compiled(torch.ones(3))

        with mock.patch.object(GuardManagerWrapper, "check", check):
            results = run_in_context(run, run)
        self.assertEqual(results, [fn(torch.ones(3))] * 2)
        self.assertEqual(backend.calls, 2)

    @parametrize("other_thread", (False, True))
    def test_forced_recompilation(self, other_thread):
        # An entry that fits this rank, but another rank has to compile
        def fn(x):
            return x.sin() + 1

        class Group:
            def size(self):
                return 2

        def all_gather_object(results, result, group):
            results[:] = [result, False]

        backend = CountingBackend(self.lock, waiters=0)
        compiled = torch.compile(fn, backend=backend)

        def run():
            compiled(torch.ones(3))

        with (
            mock.patch("torch._dynamo.distributed.get_guard_pg", Group),
            mock.patch("torch.distributed.all_gather_object", all_gather_object),
        ):
            torch.compiler.set_enable_guard_collectives(True)
            try:
                for _ in range(3):
                    run_in_context(run) if other_thread else run()
            finally:
                torch.compiler.set_enable_guard_collectives(False)
        self.assertEqual(backend.calls, 3)

    @parametrize("seed", range(3))
    def test_stress(self, seed):
        # As many compilations as there are shapes, whoever comes first
        print(f"seed {seed}")
        rng = random.Random(seed)

        def fn(x):
            x = x.sin() + x.shape[0]
            torch._dynamo.graph_break()
            return x.cos()

        backend = CountingBackend(self.lock, waiters=0)
        inputs = [torch.randn(n) for n in range(2, 6)]
        expected = [fn(x) for x in inputs]

        def run(order):
            compiled = torch.compile(fn, backend=backend)
            for i in order:
                self.assertEqual(compiled(inputs[i]), expected[i])

        orders = [rng.sample(range(len(inputs)), len(inputs)) * 2 for _ in range(6)]
        run_in_context(*(lambda order=order: run(order) for order in orders))
        self.assertEqual(backend.calls, 2 * len(inputs))


instantiate_parametrized_tests(TestCompileOnce)


if __name__ == "__main__":
    run_tests()
