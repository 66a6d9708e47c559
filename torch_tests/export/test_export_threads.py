# Owner(s): ["oncall: export"]

import builtins
import math
import os
import random
import sys
import threading
from unittest import mock

import torch
from functorch.compile import make_boxed_func
from torch._dynamo import convert_frame
from torch._dynamo.backends.common import aot_autograd
from torch.export import default_decompositions, export
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
from concurrency_utils import (
    HeldThread,
    run_on_threads,
    thread_held_in,
    TIMEOUT,
    WorkerThread,
)


aten = torch.ops.aten


class Model(torch.nn.Module):
    """Calls `hook` in the middle of forward, i.e. of the trace."""

    def __init__(self, width, hook=None):
        super().__init__()
        self.body = torch.nn.Sequential(torch.nn.Linear(4, width), torch.nn.ReLU())
        self.head = torch.nn.Linear(width, 3)
        self.hook = hook

    def forward(self, x):
        x = self.body(x)
        if self.hook is not None:
            self.hook()
        return self.head(x)


def process_state():
    return (
        torch.backends.mkldnn.is_available() and torch._C._get_mkldnn_enabled(),
        torch._C._get_nnpack_enabled(),
        torch._C._get_cudnn_enabled(),
        builtins.max,
        builtins.min,
        math.pow,
    )


class TestExportThreads(TestCase):
    def export(self, model, strict=False):
        return export(model, (torch.ones(2, 4),), strict=strict)

    def export_in_turn(self, *models):
        return [str(self.export(model)) for model in models]

    def test_export_during_export(self):
        expected = self.export_in_turn(Model(5), Model(6))
        with thread_held_in(lambda hold: self.export(Model(5, hold))) as thread:
            self.assertEqual(str(self.export(Model(6))), expected[1])
        self.assertEqual(str(thread.result()), expected[0])

    def test_export_during_symbolic_trace(self):
        class Split(torch.nn.Module):
            def forward(self, x):
                # operator.getitem is checked against a list that has math.ceil,
                # which a symbolic trace replaces for the process
                return x.chunk(2)[0]

        expected = self.export_in_turn(Split())
        with thread_held_in(lambda hold: torch.fx.symbolic_trace(Model(5, hold))):
            self.assertEqual(self.export_in_turn(Split()), expected)

    def test_pre_dispatch_make_fx(self):
        def fn(x):
            return torch.nn.functional.linear(x, x).relu()

        x = torch.ones(2, 2)
        expected = make_fx(fn, pre_dispatch=True)(x).code

        def trace_and_hold(hold):
            def held(x):
                hold()
                return fn(x)

            return make_fx(held, pre_dispatch=True)(x).code

        with thread_held_in(trace_and_hold) as thread:
            self.assertEqual(make_fx(fn, pre_dispatch=True)(x).code, expected)
            # Eager calls are not in the trace either
            self.assertEqual(fn(x), torch.full((2, 2), 2.0))
        self.assertEqual(thread.result(), expected)

    def test_process_state_is_restored(self):
        # The export that begins first ends first
        before = process_state()
        first = HeldThread(lambda hold: self.export(Model(5, hold)))
        second = HeldThread(lambda hold: self.export(Model(6, hold)))
        first.start_and_wait()
        second.start_and_wait()
        first.release()
        first.result()
        self.assertNotEqual(process_state(), before)
        second.release()
        second.result()
        self.assertEqual(process_state(), before)

    def test_export_that_raises_during_export(self):
        class Error(Exception):
            pass

        def fail():
            raise Error

        before = process_state()
        expected = self.export_in_turn(Model(5))
        with thread_held_in(lambda hold: self.export(Model(5, hold))) as thread:
            with self.assertRaises(Error):
                self.export(Model(6, fail))
        self.assertEqual(str(thread.result()), expected[0])
        self.assertEqual(process_state(), before)

    def test_strict_exports_take_turns(self):
        # Dynamo's state belongs to the process, compile_lock protects it
        entered = threading.Event()
        waiting = threading.Event()

        class ObservedLock:
            _lock = threading.RLock()

            def __enter__(self):
                if not self._lock.acquire(blocking=False):
                    waiting.set()
                    self._lock.acquire()

            def __exit__(self, *args):
                self._lock.release()

        hooks = {}

        @torch.library.custom_op("test_export_threads::op", mutates_args=())
        def op(x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @op.register_fake
        def _(x):
            hooks.get(threading.get_ident(), lambda: None)()
            return torch.empty_like(x)

        class CustomOpModel(Model):
            def forward(self, x):
                return super().forward(op(x))

        def export_with(hook, model):
            hooks[threading.get_ident()] = hook
            return str(self.export(model, strict=True))

        models = [CustomOpModel(5), CustomOpModel(6)]
        expected = [str(self.export(m, strict=True)) for m in models]

        def enter():
            entered.set()
            waiting.set()

        with mock.patch.object(convert_frame, "compile_lock", ObservedLock()):
            with thread_held_in(lambda hold: export_with(hold, models[0])) as first:
                second = WorkerThread(lambda: export_with(enter, models[1]))
                second.start()
                self.assertTrue(waiting.wait(TIMEOUT))
                self.assertFalse(entered.is_set())
            results = [first.result(), second.result()]
        self.assertEqual(results, expected)
        self.assertTrue(entered.is_set())

    def test_overlapping_decompositions(self):
        # Each thread decomposes linear in its own way, and the one that begins
        # first ends first
        programs = [self.export(Model(5)), self.export(Model(6))]
        kernels = dict(aten.linear.default.py_kernels)

        def decompose(program, op, hook):
            def linear(x, weight, bias):
                hook()
                return op(torch.addmm(bias, x, weight.t()))

            table = default_decompositions()
            table[aten.linear.default] = linear
            return str(program.run_decompositions(table))

        ops = (torch.sin, torch.cos)
        expected = [
            decompose(program, op, lambda: None) for program, op in zip(programs, ops)
        ]
        threads = [
            HeldThread(lambda hold, p=p, op=op: decompose(p, op, hold))
            for p, op in zip(programs, ops)
        ]
        for thread in threads:
            thread.start_and_wait()
        for thread, result in zip(threads, expected):
            thread.release()
            self.assertEqual(thread.result(), result)
        self.assertEqual(aten.linear.default.py_kernels, kernels)

    def test_compile_during_decompositions(self):
        # What an export keeps or decomposes is its own affair
        program = self.export(Model(5))
        held_in = {**dict(default_decompositions().items())}
        held_in.pop(aten.linear.default, None)

        def step(model):
            graphs = []

            def capture(gm, inputs):
                graphs.append(gm.code)
                return make_boxed_func(gm)

            torch._dynamo.reset()
            backend = aot_autograd(fw_compiler=capture, bw_compiler=capture)
            compiled = torch.compile(model, backend=backend)
            compiled(torch.ones(2, 4)).sum().backward()
            return graphs, [p.grad for p in model.parameters()]

        torch.manual_seed(0)
        expected = step(Model(7))

        def decompose_and_hold(hold):
            def relu(x):
                hold()
                return aten.clamp_min.default(x, 0)

            held_in[aten.relu.default] = relu
            return program.run_decompositions(held_in)

        with thread_held_in(decompose_and_hold):
            torch.manual_seed(0)
            self.assertEqual(step(Model(7)), expected)

    def test_dispatch_cache_filled_by_another_thread(self):
        # Two threads that miss the cache both compute the entry
        key = torch._C.DispatchKey.AutogradCPU
        op = aten.sin.default
        op._uncache_dispatch(key)
        handler = op._get_dispatch(key)
        self.assertEqual(op._get_dispatch(key), handler)

    @parametrize("strict", (False, True))
    @parametrize("seed", range(2))
    def test_stress(self, strict, seed):
        print(f"seed {seed}")
        rng = random.Random(seed)
        models = [Model(5), Model(6), Model(7)]
        before = process_state()

        def run(model, decompose):
            program = self.export(model, strict=strict)
            if decompose:
                program = program.run_decompositions()
            return str(program)

        plan = [(i, d) for i in range(len(models)) for d in (False, True)]
        expected = {(i, d): run(models[i], d) for i, d in plan}

        def work(index, decompositions):
            return [run(models[index], d) for d in decompositions]

        orders = [rng.choices((False, True), k=4) for _ in models]
        interval = sys.getswitchinterval()
        sys.setswitchinterval(1e-5)
        try:
            results = run_on_threads(
                *(lambda i=i: work(i, orders[i]) for i in range(len(models)))
            )
        finally:
            sys.setswitchinterval(interval)
        for i, result in enumerate(results):
            self.assertEqual(result, [expected[i, d] for d in orders[i]])
        self.assertEqual(process_state(), before)


instantiate_parametrized_tests(TestExportThreads)


if __name__ == "__main__":
    run_tests()
