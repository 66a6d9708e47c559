# Owner(s): ["module: inductor"]

import contextlib
import contextvars
import os
import random
import re
import signal
import sys
import threading
import time
import types
from concurrent.futures import Future
from unittest import mock

import torch
import torch._dynamo
import torch._inductor.config as inductor_config
from torch._dynamo import compiled_autograd, convert_frame
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.convert_frame import compile_lock
from torch._dynamo.eval_frame import _debug_get_cache_entry_list
from torch._dynamo.variables.torch_function import torch_function_mode_stack_state_mgr
from torch._functorch._aot_autograd import logging_utils
from torch._functorch._aot_autograd.runtime_wrappers import _AutogradBackwardCompiler
from torch._functorch.aot_autograd import make_boxed_func
from torch._inductor import async_compile, debug
from torch._inductor.async_compile import AsyncCompile, CompiledTritonKernels
from torch._inductor.codecache import LambdaFuture
from torch._inductor.compile_fx import compile_fx
from torch._inductor.triton_bundler import TritonBundler
from torch._inductor.utils import fresh_cache
from torch.fx.experimental.proxy_tensor import make_fx
from torch.testing._internal.common_utils import (
    instantiate_parametrized_tests,
    IS_WINDOWS,
    parametrize,
    run_tests,
    TestCase,
)
from torch.testing._internal.inductor_utils import HAS_CPU
from torch.utils._python_dispatch import is_in_torch_dispatch_mode


# Make the helper files in test/ importable
pytorch_test_dir = os.path.dirname(os.path.dirname(os.path.realpath(__file__)))
sys.path.append(pytorch_test_dir)
from concurrency_utils import run_on_threads, WorkerThread


# For what takes a compilation, but waits for ever without the change
TIMEOUT = 100.0

# For a thread to give the lock up once it waits
LOCK_TIMEOUT = 2.0


class GatedThread(WorkerThread):
    """The workers of Inductor start on its kernels when the gate is opened."""

    def __init__(self, fn):
        # With the config of the test
        super().__init__(lambda c=contextvars.copy_context(): c.run(fn))
        self.gate = threading.Event()
        self.submitted = threading.Event()
        self.error = None

    def open(self):
        self.gate.set()
        return self


def lock_count():
    """How often this thread has acquired compile_lock."""
    if not compile_lock._is_owned():
        return 0
    return int(re.search(r"count=(\d+)", repr(compile_lock))[1])


def process_state():
    """What a compilation changes and puts back."""
    return {
        "rng": torch.get_rng_state().tolist(),
        "random": random.getstate(),
        "dtype": torch.get_default_dtype(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "warn_only": torch.is_deterministic_algorithms_warn_only_enabled(),
        "global_state": convert_frame.initial_global_state,
        "disable_ctx": compiled_autograd.active_disable_ctx,
        "mode_stack": list(torch_function_mode_stack_state_mgr.stack),
        "in_mode": is_in_torch_dispatch_mode(),
        "graphs": list(logging_utils.graph_being_compiled),
        "graph_id": debug._pre_grad_graph_id,
        "provenance": [
            dict(debug._inductor_post_to_pre_grad_nodes),
            dict(debug._inductor_triton_kernel_to_post_grad_node_info),
            dict(debug._inductor_pre_grad_node_stack_trace),
            dict(debug._inductor_kernel_stack_trace),
            debug._inductor_kernel_provenance_debug_handle,
        ],
        "bundler": [
            TritonBundler._entries,
            TritonBundler._static_autotuners,
            TritonBundler._winners,
        ],
        "triton_kernels": dict(CompiledTritonKernels._cache),
        "cache_dirs": [
            os.environ.get("TORCHINDUCTOR_CACHE_DIR"),
            os.environ.get("TRITON_CACHE_DIR"),
        ],
    }


def build_nothing(gm, example_inputs):
    """Waits for a worker as Inductor does, but it has nothing to build."""
    future = AsyncCompile.submit(lambda: None)
    AsyncCompile().wait({"kernel": LambdaFuture(future.result, future=future)})
    return make_boxed_func(gm.forward)


waiting_backend = aot_autograd(fw_compiler=build_nothing)


class CountingBackend:
    """With the number of its compilations."""

    def __init__(self, before=None, backend=waiting_backend):
        self.calls = 0
        self.before = before
        self.backend = backend

    def __call__(self, gm, example_inputs):
        self.calls += 1
        if self.before is not None:
            self.before()
        return self.backend(gm, example_inputs)


# Another one in each test: there are no binaries of its kernels
salt = 1.0


def fn_a(x):
    return (x.sin() * salt + 1).cumsum(0)


def fn_b(x):
    return (x.cos() * salt).softmax(0)


class OverlappingCompilesTestCase(TestCase):
    backend = waiting_backend

    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        cls._cache = contextlib.ExitStack()
        cls._cache.enter_context(fresh_cache())

    @classmethod
    def tearDownClass(cls):
        cls._cache.close()
        super().tearDownClass()

    def setUp(self):
        global salt
        salt += 1 / 64
        super().setUp()
        torch._dynamo.reset()
        original_submit = AsyncCompile.submit.__func__

        def submit(cls, task):
            thread = threading.current_thread()
            if not isinstance(thread, GatedThread):
                return original_submit(cls, task)

            def gated_task():
                if not thread.gate.wait(2 * TIMEOUT):
                    raise TimeoutError("the gate was not opened")
                if thread.error is not None:
                    raise thread.error
                return task()

            return original_submit(cls, gated_task)

        original_wait = AsyncCompile._wait_futures

        def wait_futures(async_compile, scope):
            thread = threading.current_thread()
            if isinstance(thread, GatedThread):
                thread.submitted.set()
            return original_wait(async_compile, scope)

        self._patches = contextlib.ExitStack()
        self._patches.enter_context(torch.random.fork_rng(devices=[]))
        self._patches.enter_context(inductor_config.patch(fx_graph_cache=False))
        self._patches.enter_context(inductor_config.patch(compile_threads=4))
        self._patches.enter_context(
            mock.patch.object(AsyncCompile, "submit", classmethod(submit))
        )
        self._patches.enter_context(
            mock.patch.object(AsyncCompile, "_wait_futures", wait_futures)
        )
        self.x = self.randn(8, 8)
        # Makes the process ready
        self.compile(lambda x: x + salt)(self.x)
        self.idle_state = process_state()

    def compile(self, fn, **kwargs):
        return torch.compile(fn, backend=self.backend, **kwargs)

    def randn(self, *size):
        # Without a trace in the state of the process
        with torch.random.fork_rng(devices=[]):
            return torch.randn(*size)

    def tearDown(self):
        self.assertEqual(lock_count(), 0)
        self.assertEqual(process_state(), self.idle_state)
        self._patches.close()
        torch._dynamo.reset()
        super().tearDown()

    @contextlib.contextmanager
    def waiting_thread(self, fn):
        """Run fn() on another thread, until it has only to wait for workers."""
        thread = GatedThread(fn)
        thread.start()
        try:
            while not thread.submitted.wait(0.01):
                if not thread.is_alive():
                    thread.result()
                    raise AssertionError("nothing was compiled")
            self.assertTrue(
                compile_lock.acquire(timeout=LOCK_TIMEOUT), "the lock is held"
            )
            compile_lock.release()
            if not thread.is_alive():
                thread.result()
            yield thread
        finally:
            thread.open().join(TIMEOUT)
        thread.result(0.0)

    def run_on_thread(self, fn):
        return WorkerThread(lambda c=contextvars.copy_context(): c.run(fn))

    def result_meanwhile(self, fn):
        """Run fn() on another thread. Compiles from start to end."""
        thread = self.run_on_thread(fn)
        thread.start()
        return thread.result(TIMEOUT)


class TestOverlappingCompiles(OverlappingCompilesTestCase):
    @parametrize(
        "waits_for",
        ("nothing", "the_same", "other_dtype", "other_code", "copied_code", "to_go_on"),
    )
    @parametrize("backward", (True, False))
    def test_workers_that_are_not_ready(self, backward, waits_for):
        # Kernels are left to them only where another thread can compile meanwhile
        from torch._dynamo import compile_overlap

        compiles, may_go_on = threading.Event(), threading.Event()
        pool = mock.Mock()
        pool.submit.return_value = Future()
        in_process = mock.Mock(side_effect=NotImplementedError)

        def compiler(is_backward):
            def compile_graph(gm, example_inputs):
                thread = threading.current_thread()
                if is_backward == backward and isinstance(thread, GatedThread):
                    compiles.set()
                    self.assertTrue(may_go_on.wait(TIMEOUT))
                    with contextlib.suppress(NotImplementedError):
                        AsyncCompile().triton("kernel", "source")
                    CompiledTritonKernels.cache_clear()
                return make_boxed_func(gm.forward)

            return compile_graph

        fn = torch.compile(
            fn_a,
            backend=aot_autograd(
                fw_compiler=compiler(False), bw_compiler=compiler(True)
            ),
        )
        x = self.x.clone().requires_grad_()
        y = self.x.double().requires_grad_()
        if backward:
            same, other = fn(x).sum().backward, fn(y).sum().backward
            first = fn(x).sum().backward
        else:
            same, other = (lambda: fn(x)), (lambda: fn(y))
            first = same
        # Equal code, but Dynamo keeps a cache for each code object
        copied = types.FunctionType(fn_a.__code__.replace(), fn_a.__globals__)
        others = {
            "nothing": (),
            "the_same": (same,),
            "other_dtype": (other,),
            "other_code": (lambda: self.compile(fn_b)(x),),
            "copied_code": (lambda: torch.compile(copied)(x),),
            "to_go_on": (),
        }
        other_compilation = contextlib.nullcontext()
        if waits_for == "to_go_on":
            other_compilation = self.waiting_thread(lambda: self.compile(fn_b)(x))
        with (
            other_compilation,
            mock.patch.object(AsyncCompile, "_ready_future", Future()),
            mock.patch.object(AsyncCompile, "process_pool", staticmethod(lambda: pool)),
            mock.patch.object(
                async_compile, "_load_triton_kernel_from_source", in_process
            ),
        ):
            threads = [GatedThread(first), *map(self.run_on_thread, others[waits_for])]
            threads[0].start()
            self.assertTrue(compiles.wait(TIMEOUT))
            for thread in threads[1:]:
                thread.start()
                while (
                    thread.is_alive() and thread.ident not in compile_overlap._waiting
                ):
                    time.sleep(0.001)
            may_go_on.set()
            for thread in threads:
                thread.result(TIMEOUT)
        leaves_it = waits_for not in ("nothing", "the_same")
        self.assertEqual(pool.submit.called, leaves_it)
        self.assertEqual(in_process.called, not leaves_it)
        self.assertEqual(compile_overlap._waiting, {})

    def test_traced_state(self):
        # Dynamo sets this while it traces what sets it
        def deterministic(x):
            torch.use_deterministic_algorithms(True)
            x = fn_a(x)
            torch.use_deterministic_algorithms(False)
            return x

        def which(x):
            return fn_b(x) * (2 if torch.are_deterministic_algorithms_enabled() else 3)

        with self.waiting_thread(lambda: self.compile(deterministic)(self.x)) as first:
            result = self.result_meanwhile(lambda: self.compile(which)(self.x))
        self.assertEqual(result, fn_b(self.x) * 3)
        self.assertEqual(first.result(), fn_a(self.x))

    def test_torch_function_mode(self):
        class Mode(torch.overrides.TorchFunctionMode):
            def __torch_function__(self, func, types, args, kwargs=None):
                if func is torch.Tensor.add:
                    func = torch.Tensor.sub
                return func(*args, **(kwargs or {}))

        def add(x):
            return x.add(1).cumsum(0)

        def with_mode():
            with Mode():
                return self.compile(add)(self.x), torch._C._len_torch_function_stack()

        with self.waiting_thread(with_mode) as first:
            result = self.result_meanwhile(lambda: self.compile(fn_b)(self.x))
        self.assertEqual(result, fn_b(self.x))
        self.assertEqual(first.result(), ((self.x - 1).cumsum(0), 1))

    @parametrize("num_threads", (1, 3))
    def test_same_code_is_compiled_once(self, num_threads):
        backend = CountingBackend()
        compiled = torch.compile(fn_a, backend=backend)
        with self.waiting_thread(lambda: compiled(self.x)) as first:
            others = [
                self.run_on_thread(lambda: torch.compile(fn_a, backend=backend)(self.x))
                for _ in range(num_threads)
            ]
            for thread in others:
                thread.start()
            # Who needs something else does not wait with them
            self.result_meanwhile(lambda: self.compile(fn_b)(self.x))
            for thread in others:
                self.assertTrue(thread.is_alive())
        for thread in [first, *others]:
            self.assertEqual(thread.result(TIMEOUT), fn_a(self.x))
        self.assertEqual(backend.calls, 1)
        self.assertEqual(len(_debug_get_cache_entry_list(fn_a)), 1)

    def test_same_code_of_other_shape(self):
        # It may turn out that the first compilation fits
        backend = CountingBackend()
        compiled = torch.compile(fn_a, backend=backend)
        y = self.randn(4, 4)
        with self.waiting_thread(lambda: compiled(self.x)) as first:
            second = self.run_on_thread(lambda: compiled(y))
            second.start()
        self.assertEqual(first.result(), fn_a(self.x))
        self.assertEqual(second.result(TIMEOUT), fn_a(y))
        self.assertEqual(backend.calls, 2)

    @parametrize("what", ("dtype", "module"))
    def test_same_code_for_something_else(self, what):
        # No guards of the first compilation accept what the second one is for
        if what == "dtype":
            fns = [fn_a, fn_a]
            inputs = [self.x, self.x.double()]
        else:
            with torch.random.fork_rng(devices=[]):
                fns = [
                    torch.nn.Sequential(torch.nn.Linear(8, n), torch.nn.Tanh())
                    for n in (4, 5)
                ]
            inputs = [self.x, self.x]

        with self.waiting_thread(lambda: self.compile(fns[0])(inputs[0])) as first:
            result = self.result_meanwhile(lambda: self.compile(fns[1])(inputs[1]))
            self.assertTrue(first.is_alive())
        self.assertEqual(first.result(), fns[0](inputs[0]))
        self.assertEqual(result, fns[1](inputs[1]))

    def test_compilation_that_fails(self):
        class WorkerError(Exception):
            pass

        counts = []
        original = AsyncCompile._wait_futures

        def wait_futures(async_compile, scope):
            counts.append(lock_count())
            try:
                original(async_compile, scope)
            finally:
                counts.append(lock_count())

        backend = CountingBackend()
        compiled = torch.compile(fn_a, backend=backend)
        failed = []

        def run():
            try:
                return compiled(self.x)
            except Exception as e:
                failed.append(e)

        with (
            mock.patch.object(AsyncCompile, "_wait_futures", wait_futures),
            self.waiting_thread(run) as first,
        ):
            second = self.run_on_thread(run)
            second.start()
            first.error = WorkerError("the worker fails")
        # The other one that waited for it tries again
        self.assertIsNone(first.result())
        self.assertEqual(second.result(TIMEOUT), fn_a(self.x))
        self.assertEqual(len(failed), 1)
        self.assertIn("the worker fails", str(failed[0]))
        self.assertEqual(backend.calls, 2)
        self.assertGreater(counts[0], 0)
        self.assertEqual(set(counts), {counts[0]})

    @parametrize("nested", (True, False))
    def test_keyboard_interrupt(self, nested):
        if IS_WINDOWS or threading.current_thread() is not threading.main_thread():
            self.skipTest("needs signals")
        # A shell ignores it for jobs in the background
        handler = signal.signal(signal.SIGINT, signal.default_int_handler)
        self.addCleanup(signal.signal, signal.SIGINT, handler)
        main_thread = threading.main_thread()
        gate = threading.Event()
        submitted = threading.Event()
        counts = []
        original_submit = AsyncCompile.submit.__func__
        original_wait = AsyncCompile._wait_futures

        def submit(cls, task):
            if threading.current_thread() is not main_thread:
                return original_submit(cls, task)
            submitted.set()
            return AsyncCompile.pool().submit(lambda: (gate.wait(TIMEOUT), task())[1])

        def wait_futures(async_compile, scope):
            counts.append(lock_count())
            try:
                original_wait(async_compile, scope)
            finally:
                counts.append(lock_count())

        def interrupt():
            try:
                submitted.wait(TIMEOUT)
                acquired = compile_lock.acquire(timeout=LOCK_TIMEOUT)
                if acquired:
                    compile_lock.release()
                return acquired, (acquired and self.compile(fn_b)(self.x))
            finally:
                signal.pthread_kill(main_thread.ident, signal.SIGINT)

        def before():
            if nested:
                torch.compile(lambda x: x + 2, backend="eager")(self.x)

        thread = self.run_on_thread(interrupt)
        compiled = torch.compile(fn_a, backend=CountingBackend(before))
        with (
            mock.patch.object(AsyncCompile, "submit", classmethod(submit)),
            mock.patch.object(AsyncCompile, "_wait_futures", wait_futures),
        ):
            thread.start()
            with self.assertRaises(KeyboardInterrupt):
                compiled(self.x)
            self.assertEqual(lock_count(), 0)
            gate.set()
            self.assertEqual(thread.result(TIMEOUT), (True, fn_b(self.x)))
            self.assertEqual(compiled(self.x), fn_a(self.x))
        self.assertGreater(counts[0], 0)
        self.assertEqual(set(counts), {counts[0]})

    def test_reset(self):
        # Compilations are over when reset() starts
        compiled = self.compile(fn_a)
        with self.waiting_thread(lambda: compiled(self.x)) as first:
            reset = self.run_on_thread(torch._dynamo.reset)
            reset.start()
            self.result_meanwhile(lambda: self.compile(fn_b)(self.x))
            self.assertTrue(reset.is_alive())
        self.assertEqual(first.result(), fn_a(self.x))
        reset.result(TIMEOUT)
        self.assertEqual(compiled(self.x), fn_a(self.x))

    def test_reset_in_a_compilation(self):
        # Nothing is dropped that the other one works on
        compiled = self.compile(fn_a)

        def reset():
            with compile_lock:
                torch._dynamo.reset()

        with self.waiting_thread(lambda: compiled(self.x)) as first:
            with self.assertRaisesRegex(AssertionError, "in a compilation"):
                self.result_meanwhile(reset)
        self.assertEqual(first.result(), fn_a(self.x))
        self.assertEqual(len(_debug_get_cache_entry_list(fn_a)), 1)

    def test_nested_compilation(self):
        # The inner one waits for workers, and the outer one after that
        counts = []

        def compile_inner():
            counts.append(lock_count())
            self.assertEqual(self.compile(fn_b)(self.x), fn_b(self.x))
            counts.append(lock_count())

        backend = CountingBackend(compile_inner)
        with self.waiting_thread(
            lambda: torch.compile(fn_a, backend=backend)(self.x)
        ) as first:
            self.assertEqual(process_state(), self.idle_state)
            result = self.result_meanwhile(
                lambda: self.compile(lambda x: x.sin().cumsum(1))(self.x)
            )
        self.assertEqual(result, self.x.sin().cumsum(1))
        self.assertEqual(first.result(), fn_a(self.x))
        self.assertEqual(counts[0], counts[1])

    def test_nested_compilation_does_not_wait(self):
        # Two threads, each of which needs in the middle of its compilation what the
        # other one compiles
        def compile_other(fn):
            return lambda: self.assertEqual(self.compile(fn)(self.x), fn(self.x))

        def run(fn, other):
            backend = CountingBackend()

            def compile_after(gm, example_inputs):
                result = backend(gm, example_inputs)
                compile_other(other)()
                return result

            return torch.compile(fn, backend=compile_after)(self.x)

        with (
            self.waiting_thread(lambda: run(fn_a, fn_b)) as first,
            self.waiting_thread(lambda: run(fn_b, fn_a)) as second,
        ):
            first.open()
            second.open()
        self.assertEqual(first.result(), fn_a(self.x))
        self.assertEqual(second.result(), fn_b(self.x))


class TestOverlappingInductorCompiles(OverlappingCompilesTestCase):
    backend = "inductor"

    @parametrize("caches", (True, False))
    def test_other_thread_compiles_meanwhile(self, caches):
        with inductor_config.patch(force_disable_caches=not caches):
            with self.waiting_thread(lambda: torch.compile(fn_a)(self.x)) as first:
                result = self.result_meanwhile(lambda: torch.compile(fn_b)(self.x))
                self.assertTrue(first.is_alive())
        self.assertEqual(result, fn_b(self.x))
        self.assertEqual(first.result(), fn_a(self.x))
        for fn in (fn_a, fn_b):
            self.assertEqual(len(_debug_get_cache_entry_list(fn)), 1)

    @parametrize("caches, first_ends", ((True, "last"), (False, "first")))
    def test_both_wait(self, caches, first_ends):
        with (
            inductor_config.patch(force_disable_caches=not caches),
            self.waiting_thread(lambda: torch.compile(fn_a)(self.x)) as first,
            self.waiting_thread(lambda: torch.compile(fn_b)(self.x)) as second,
        ):
            self.assertEqual(process_state(), self.idle_state)
            order = [first, second] if first_ends == "first" else [second, first]
            for thread in order:
                thread.open().result(TIMEOUT)
        self.assertEqual(first.result(), fn_a(self.x))
        self.assertEqual(second.result(), fn_b(self.x))

    def test_forward_and_backward(self):
        def train(fn):
            x = self.x.clone().requires_grad_()
            fn(x).square().sum().backward()
            return x.grad

        def compiled(fn):
            compiled_fn = torch.compile(fn)
            with torch._functorch.config.patch(force_non_lazy_backward_lowering=False):
                return train(compiled_fn)

        with self.waiting_thread(lambda: compiled(fn_a)) as first:
            self.assertEqual(self.result_meanwhile(lambda: compiled(fn_b)), train(fn_b))
        self.assertEqual(first.result(), train(fn_a))

    def test_lazy_backward(self):
        # The forward pass is compiled, the backward pass waits for workers. Another
        # one of the same graph does not compile it again, one of another graph does.
        compiled_a, compiled_b = torch.compile(fn_a), torch.compile(fn_b)
        inputs = [self.x.clone().requires_grad_() for _ in range(3)]
        calls = []
        original = _AutogradBackwardCompiler._compile

        def compile_backward(compiler, *args):
            calls.append(compiler)
            return original(compiler, *args)

        with (
            torch._functorch.config.patch(force_non_lazy_backward_lowering=False),
            mock.patch.object(_AutogradBackwardCompiler, "_compile", compile_backward),
        ):
            losses = [
                fn(x).square().sum()
                for fn, x in zip((compiled_a, compiled_a, compiled_b), inputs)
            ]
            with self.waiting_thread(losses[0].backward):
                same = self.run_on_thread(losses[1].backward)
                same.start()
                self.result_meanwhile(losses[2].backward)
                self.assertIsNone(inputs[1].grad)
            same.result(TIMEOUT)
        self.assertEqual(len(calls), 2)
        for fn, x in zip((fn_a, fn_a, fn_b), inputs):
            expected = self.x.clone().requires_grad_()
            fn(expected).square().sum().backward()
            self.assertEqual(x.grad, expected.grad)

    def test_flex_attention(self):
        from torch.nn.attention.flex_attention import flex_attention

        inputs = [self.randn(1, 2, 64, 16) for _ in range(3)]

        def attend(*inputs):
            return flex_attention(*inputs, score_mod=lambda score, *_: score * salt)

        with torch.no_grad():
            expected = attend(*inputs)
            with self.waiting_thread(lambda: torch.compile(fn_a)(self.x)):

                def run():
                    with torch.no_grad():
                        return torch.compile(attend)(*inputs)

                self.assertEqual(self.result_meanwhile(run), expected)

    def test_state_is_put_aside(self):
        states = []
        original = AsyncCompile._wait_futures

        def wait_futures(async_compile, scope):
            if not isinstance(threading.current_thread(), GatedThread):
                return original(async_compile, scope)
            states.append((process_state(), lock_count()))
            original(async_compile, scope)
            states.append((process_state(), lock_count()))

        def change_state():
            torch.rand(3)
            random.random()
            torch.use_deterministic_algorithms(True, warn_only=True)
            torch.set_default_dtype(torch.double)

        def compile_a():
            backend = CountingBackend(change_state, compile_fx)
            return torch.compile(fn_a, backend=backend)(self.x)

        with (
            mock.patch.object(AsyncCompile, "_wait_futures", wait_futures),
            inductor_config.patch({"trace.provenance_tracking_level": 1}),
            self.waiting_thread(compile_a) as first,
        ):
            self.assertEqual(process_state(), self.idle_state)
            result = self.result_meanwhile(lambda: torch.compile(fn_b)(self.x))
            self.assertEqual(process_state(), self.idle_state)
        self.assertEqual(result, fn_b(self.x))
        self.assertEqual(first.result(), fn_a(self.x))
        before, after = states
        self.assertEqual(after, before)
        for name in ("rng", "random", "dtype", "deterministic", "warn_only"):
            self.assertNotEqual(before[0][name], self.idle_state[name])

    def test_fresh_cache_belongs_to_the_compilation(self):
        with inductor_config.patch(force_disable_caches=True):
            with self.waiting_thread(lambda: torch.compile(fn_a)(self.x)) as first:
                self.assertEqual(process_state(), self.idle_state)
                torch.manual_seed(0)
            self.assertEqual(first.result(), fn_a(self.x))
        self.assertEqual(process_state()["cache_dirs"], self.idle_state["cache_dirs"])
        self.idle_state = process_state()

    def test_timeout(self):
        backend = CountingBackend(backend=compile_fx)
        compiled = torch.compile(fn_a, backend=backend)

        def run():
            with (
                inductor_config.patch(compile_worker_wait_timeout=1),
                self.assertRaisesRegex(Exception, "did not complete within 1s"),
            ):
                compiled(self.x)
            return lock_count()

        with self.waiting_thread(run) as first:
            self.assertEqual(first.result(TIMEOUT), 0)
        self.assertEqual(compiled(self.x), fn_a(self.x))

    @parametrize("what", ("lock held before", "compile_fx", "compiled autograd"))
    def test_lock_is_kept(self, what):
        def run():
            if what == "lock held before":
                with compile_lock:
                    return torch.compile(fn_a)(self.x)
            if what == "compile_fx":
                gm = make_fx(lambda x: (fn_a(x),))(self.x)
                return compile_fx(gm, [self.x])(self.x)[0]
            with compiled_autograd._enable(torch.compile(backend="eager")):
                return torch.compile(fn_a)(self.x)

        thread = GatedThread(run)
        thread.start()
        try:
            self.assertTrue(thread.submitted.wait(TIMEOUT))
            self.assertFalse(compile_lock.acquire(timeout=1))
        finally:
            thread.open()
            result = thread.result(TIMEOUT)
        self.assertEqual(result, fn_a(self.x))

    def test_stress(self):
        seed = random.SystemRandom().randrange(1000)
        print(f"seed {seed}")
        rng = random.Random(seed)
        fns = [
            lambda x: fn_a(x).tanh(),
            lambda x: fn_b(x) - x.mean(),
            lambda x: (x @ x).relu().softmax(1) * salt,
        ]

        def train(fn, x):
            x = x.clone().requires_grad_()
            y = fn(x)
            y.square().sum().backward()
            return y.detach(), x.grad

        expected = [train(fn, self.x) for fn in fns]
        backend = CountingBackend(backend=compile_fx)

        def run(order):
            for i in order:
                compiled = torch.compile(fns[i], backend=backend)
                self.assertEqual(train(compiled, self.x), expected[i])

        orders = [rng.sample(range(len(fns)), len(fns)) for _ in range(4)]
        contexts = [contextvars.copy_context() for _ in orders]
        run_on_threads(
            *(lambda c=c, o=order: c.run(run, o) for c, order in zip(contexts, orders))
        )
        self.assertEqual(backend.calls, len(fns))


instantiate_parametrized_tests(TestOverlappingCompiles)
instantiate_parametrized_tests(TestOverlappingInductorCompiles)


if __name__ == "__main__":
    if HAS_CPU:
        run_tests()
