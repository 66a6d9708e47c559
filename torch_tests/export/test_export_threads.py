# Owner(s): ["oncall: export"]

import builtins
import inspect
import io
import math
import operator
import os
import pickle
import random
import sys
import tempfile
import threading
from unittest import mock

import torch
from functorch.compile import make_boxed_func
from torch._dynamo import convert_frame, guards, trace_rules
from torch._dynamo.aot_compile_types import GraphModuleSerializableCallable
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.testing import EagerAndRecordGraphs
from torch._dynamo.variables import BuiltinVariable, TorchInGraphFunctionVariable
from torch._export.serde import serialize
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.export import default_decompositions, export
from torch.fx._graph_pickler import GraphPickler, Options
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.nn.modules import module as module_hooks
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
# An export replaces the names of these for the process
MAX, MIN, POW = builtins.max, builtins.min, math.pow


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


class BuiltinsModel(torch.nn.Module):
    """Calls max, min and math.pow, which mean something else in an export."""

    def __init__(self, hook=None):
        super().__init__()
        self.hook = hook

    def forward(self, x):
        def power(y):
            return math.pow(y, 2)

        y = max(x, x + 1) + min(x, 2) + power(x)
        if self.hook is not None:
            self.hook()
        n, m = x.shape
        y = min(x, y) + max(n, m) + max([n, m, 1]) + max((1, -2), key=abs)
        return y + min(n, 3) + max(2, 3) + power(n) + max((), default=1)


def builtins_fn(x):
    """What Dynamo compiles."""
    n, m = x.shape
    y = max(x, x + 1) + min(x, 2) + max(n, m) + min([n, m])
    return y + max((1, -2), key=abs) + math.pow(2, 3) + math.pow(x.dim(), 2)


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

    def test_buffers_of_another_thread(self):
        # An export watches the buffers of its module with a hook for all modules
        def export_and_hold(hold):
            def hold_in_trace():
                if hooks:
                    hold()

            return export(Model(5, hold_in_trace), (torch.ones(2, 4),))

        def end_export(module, name, buffer):
            thread.release()
            thread.result()

        hooks = module_hooks._global_buffer_registration_hooks
        register_hook = module_hooks.register_module_buffer_registration_hook
        with thread_held_in(export_and_hold) as thread:
            handles = [register_hook(end_export), register_hook(lambda *args: None)]
            for handle in handles:
                self.addCleanup(handle.remove)
            torch.nn.BatchNorm1d(3)
        self.assertEqual(list(hooks), [handle.id for handle in handles])

    def save_and_load(self, program):
        buffer = io.BytesIO()
        torch.export.save(program, buffer)
        buffer.seek(0)
        return str(torch.export.load(buffer))

    def test_load_while_another_thread_loads(self):
        def load_and_hold(hold):
            def held(*args, **kwargs):
                hold()
                return deserialize_graph(*args, **kwargs)

            with mock.patch.object(deserializer, "deserialize_graph", held):
                return self.save_and_load(program)

        program = export(Model(5), (torch.ones(2, 4),))
        expected = self.save_and_load(program)
        deserializer = serialize.GraphModuleDeserializer
        deserialize_graph = deserializer.deserialize_graph
        with thread_held_in(load_and_hold) as thread:
            self.assertEqual(self.save_and_load(program), expected)
        self.assertEqual(thread.result(), expected)

    def test_save_while_another_thread_saves(self):
        def save_and_hold(hold):
            def held(*args, **kwargs):
                hold()
                return torch_save(*args, **kwargs)

            with mock.patch.object(torch, "save", held):
                return self.save_and_load(program)

        def serialize_artifact(*args, **kwargs):
            reached.set()
            return serialize_torch_artifact(*args, **kwargs)

        reached = threading.Event()
        program = export(Model(5), (torch.ones(2, 4),))
        expected = self.save_and_load(program)
        torch_save = torch.save
        serialize_torch_artifact = serialize.serialize_torch_artifact
        with (
            thread_held_in(save_and_hold) as thread,
            mock.patch.object(serialize, "serialize_torch_artifact", serialize_artifact),
        ):
            other = WorkerThread(lambda: self.save_and_load(program))
            other.start()
            self.assertTrue(reached.wait(TIMEOUT))
            # It waits, and does not get further until the first is done
            other.join(1)
            thread.release()
            self.assertEqual(other.result(), expected)
        self.assertEqual(thread.result(), expected)

    def export_builtins(self, hook=None):
        shapes = ({0: torch.export.Dim("n", min=4)},)
        args = (torch.ones(5, 4),)
        return str(export(BuiltinsModel(hook), args, dynamic_shapes=shapes))

    def compile_builtins(self):
        torch._dynamo.reset()
        backend = EagerAndRecordGraphs()
        compiled = torch.compile(
            builtins_fn, backend=backend, fullgraph=True, dynamic=True
        )
        compiled(torch.ones(2, 4))
        graphs = [gm.print_readable(print_output=False) for gm in backend.graphs]
        return compiled, graphs

    def test_builtins_belong_to_the_export(self):
        a, b = torch.ones(1), torch.zeros(1)

        def check_original():
            self.assertIs(max(a, b), a)
            self.assertIs(min([a, b]), b)
            self.assertEqual(max((1, -2), key=abs), -2)
            self.assertEqual(min((), default=3), 3)
            with self.assertRaisesRegex(TypeError, "at least 1 argument"):
                max()
            self.assertIs(type(math.pow(2, 3)), float)

        def check_overridden():
            self.assertIsNot(max(a, b), a)
            self.assertIs(type(math.pow(2, 3)), int)

        def export_and_check(hold):
            def hook():
                check_overridden()
                hold()
                check_overridden()

            return self.export(Model(5, hook))

        with thread_held_in(export_and_check):
            check_original()
            # They look like what they replace
            for fn, original in ((max, MAX), (min, MIN), (math.pow, POW)):
                self.assertEqual(fn.__name__, original.__name__)
                self.assertIs(inspect.unwrap(fn), original)
                self.assertIs(pickle.loads(pickle.dumps(fn)), fn)
            replacements = (max, min, math.pow)
            # An export begins and ends on this thread
            self.export(Model(6, check_overridden))
            check_original()
        self.assertEqual((max, min, math.pow), (MAX, MIN, POW))
        check_original()
        with thread_held_in(lambda hold: self.export(Model(5, hold))):
            self.assertEqual((max, min, math.pow), replacements)

    def test_nested_export(self):
        class Error(Exception):
            pass

        def check():
            self.assertIs(type(math.pow(2, 3)), int)

        def fail():
            check()
            raise Error

        def nested():
            self.export(Model(6, check))
            check()
            with self.assertRaises(Error):
                self.export(Model(7, fail))
            check()

        self.export_builtins(nested)
        self.assertEqual((max, min, math.pow), (MAX, MIN, POW))

    def test_builtins_in_branches_of_cond(self):
        # Dynamo captures the branches, inside of the export
        class Cond(torch.nn.Module):
            def __init__(self, hook):
                super().__init__()
                self.hook = hook

            def forward(self, x):
                def true_fn(x):
                    n, m = x.shape
                    y = max(x, x + 1) + math.pow(n, 2)
                    return y + 10 * max(n, m) + 100 * min(n, m)

                self.hook()
                return torch.cond(x.sum() > 0, true_fn, lambda x: x.clone(), (x,))

        def export_cond(hook):
            shapes = ({0: torch.export.Dim("n", min=4)},)
            return export(Cond(hook), (torch.ones(5, 7),), dynamic_shapes=shapes)

        def check(program):
            for n in (5, 8):
                out = program.module()(torch.ones(n, 7))
                value = 2 + n**2 + 10 * max(n, 7) + 100 * min(n, 7)
                self.assertEqual(out, torch.full((n, 7), float(value)))
            return [module.code for module in program.graph_module.modules()]

        expected = check(export_cond(lambda: None))
        with thread_held_in(export_cond) as thread:
            self.assertEqual(check(export_cond(lambda: None)), expected)
            self.compile_builtins()
        self.assertEqual(check(thread.result()), expected)

    def test_compile_during_export(self):
        x = torch.ones(2, 4)
        compiled_before, expected = self.compile_builtins()
        want = compiled_before(x)
        with thread_held_in(self.export_builtins):
            with torch.compiler.set_stance("fail_on_recompile"):
                self.assertEqual(compiled_before(x), want)
            compiled, graphs = self.compile_builtins()
            self.assertEqual(graphs, expected)
            self.assertEqual(compiled(x), want)
        with torch.compiler.set_stance("fail_on_recompile"):
            self.assertEqual(compiled(x), want)
        self.assertEqual(self.compile_builtins()[1], expected)

    def test_tables_built_during_export(self):
        # Dynamo builds them when it first needs them, and keeps them
        def tables():
            with mock.patch.object(guards, "_CLOSURE_VARS", None):
                isnan = guards._get_closure_vars()["__math_isnan"]
            return (
                trace_rules._builtin_function_ids.lazy_initializer(),
                trace_rules.get_torch_obj_rule_map.__wrapped__(),
                BuiltinVariable._constant_fold_functions.__wrapped__(),
                TorchInGraphFunctionVariable._get_handlers.__wrapped__().keys(),
                isnan,
            )

        expected = tables()
        with (
            thread_held_in(lambda hold: self.export(Model(5, hold))),
            thread_held_in(lambda hold: torch.fx.symbolic_trace(Model(5, hold))),
        ):
            for table, expected_table in zip(tables(), expected):
                self.assertTrue(table == expected_table)

    def test_functions_looked_up_during_export(self):
        # Code that compares functions with what their names stand for
        def module(fn):
            graph = torch.fx.Graph()
            graph.output(graph.call_function(fn, (graph.placeholder("x"), 2)))
            return torch.fx.GraphModule(torch.nn.Module(), graph)

        def fn(x: float):
            return math.pow(x, 2.0)

        expected = module(MAX).code, module(POW).code
        options = Options(ops_filter=None)
        fake_mode = FakeTensorMode(shape_env=ShapeEnv())
        with thread_held_in(lambda hold: self.export(Model(5, hold))):
            self.assertEqual((module(MAX).code, module(POW).code), expected)
            self.assertEqual(torch.jit.script(fn)(3.0), 9.0)
            # fx.wrap of a builtin function
            namespace = {"wrap": torch.fx.wrap}
            exec("wrap('max')\ndef fn(x): return max(x, 2)", namespace)
            loaded = [torch.fx.symbolic_trace(namespace["fn"])]
            del torch.fx._symbolic_trace._wrapped_fns_to_patch[id(namespace), "max"]
            loaded += [pickle.loads(pickle.dumps(module(POW)))]
            for function in (MAX, POW):
                data = GraphPickler.dumps(module(function), options)
                loaded.append(GraphPickler.loads(data, fake_mode))
        nodes = [node for gm in loaded for node in gm.graph.nodes]
        targets = [node.target for node in nodes if node.op == "call_function"]
        self.assertEqual(targets, [MAX, POW, MAX, POW])

    def test_saved_guards_during_export(self):
        def fn(x):
            return x + max(x.shape[0], 3)

        def keep(entries):
            return [entry.guard_type == "BUILTIN_MATCH" for entry in entries]

        x = torch.ones(2)
        compiled = torch.compile(
            fn,
            fullgraph=True,
            backend=lambda gm, inputs: GraphModuleSerializableCallable(gm),
            options={"guard_filter_fn": keep},
        )
        with tempfile.TemporaryDirectory() as folder:
            path = os.path.join(folder, "compiled")
            compiled.aot_compile(((x,), {})).save_compiled_function(path)
            with open(path, "rb") as file:
                compiled = torch.compiler.load_compiled_function(
                    file, f_globals=fn.__globals__
                )
        with thread_held_in(lambda hold: self.export(Model(5, hold))):
            self.assertEqual(compiled(x), fn(x))
        self.assertEqual(compiled(x), fn(x))

    @parametrize("begins", ("export", "trace"))
    @parametrize("ends", ("export", "trace"))
    def test_symbolic_trace_overlaps(self, begins, ends):
        # Both replace math.pow
        def trace(hold=lambda: None):
            def fn(x):
                y = math.pow(x, 2)
                hold()
                return math.pow(y, max(2, 3)) + math.sqrt(x)

            return str(torch.fx.symbolic_trace(fn).graph)

        run = {"export": self.export_builtins, "trace": trace}
        expected = {name: fn() for name, fn in run.items()}
        threads = {name: HeldThread(fn) for name, fn in run.items()}
        other = {"export": "trace", "trace": "export"}
        for name in (begins, other[begins]):
            self.addCleanup(threads[name].release)
            threads[name].start_and_wait()
        self.assertEqual(math.pow(2, 3), 8.0)
        self.assertIs(type(math.pow(2, 3)), float)
        threads[ends].release()
        self.assertEqual(threads[ends].result(), expected[ends])
        # What the other one needs is still there
        self.assertEqual(run[ends](), expected[ends])
        self.assertIs(type(math.pow(2, 3)), float)
        threads[other[ends]].release()
        self.assertEqual(threads[other[ends]].result(), expected[other[ends]])
        self.assertEqual((max, min, math.pow), (MAX, MIN, POW))

    def test_symbolic_trace_and_export_in_each_other(self):
        def fn(x):
            return math.sqrt(x) + math.pow(x, 2)

        def traced(x):
            y = math.pow(x, 2)
            self.assertEqual(self.export_builtins(), expected)
            return math.pow(y, 2)

        def trace_in_export():
            graph = torch.fx.symbolic_trace(fn).graph
            targets = [n.target for n in graph.nodes if n.op == "call_function"]
            self.assertEqual(targets, [math.sqrt, operator.pow, operator.add])
            self.assertIs(type(math.pow(2, 3)), int)

        expected = self.export_builtins()
        self.assertEqual(self.export_builtins(trace_in_export), expected)
        graph = torch.fx.symbolic_trace(traced).graph
        targets = [n.target for n in graph.nodes if n.op == "call_function"]
        self.assertEqual(targets, [POW, POW])
        self.assertEqual((max, min, math.pow), (MAX, MIN, POW))

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

    def test_strict_export_keeps_compiled_code(self):
        backend = EagerAndRecordGraphs()
        fn = torch.compile(lambda x: x.sin(), backend=backend)
        inputs = [torch.randn(n) for n in (3, 4, 5)]
        for x in inputs[:2]:
            fn(x)
        thread = WorkerThread(lambda: self.export(Model(5), strict=True))
        thread.start()
        thread.result()
        # The second graph is for any length
        for x in inputs:
            self.assertEqual(fn(x), x.sin())
        self.assertEqual(len(backend.graphs), 2)

    @torch._dynamo.config.patch(install_free_tensors_for_export=False)
    def test_strict_export_does_not_depend_on_compiled_code(self):
        class Changes(Model):
            def forward(self, x):
                self.head.count = self.head.__dict__.get("count", 0) + 1
                return super().forward(x)

        def export_models():
            with torch.random.fork_rng():
                torch.manual_seed(0)
                models = [Model(5), Changes(5)]
                return [str(self.export(model, strict=True)) for model in models]

        torch._dynamo.reset()
        expected = export_models()
        x = torch.ones(2, 4)
        for cls in Model, Changes:
            torch.compile(cls(5), backend="eager")(x)
            # As if a compiled function had made it
            torch.compile(lambda x: x + 1, backend="eager")(x)
            self.assertEqual(export_models(), expected)

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
