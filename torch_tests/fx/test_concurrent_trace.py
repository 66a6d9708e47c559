# Owner(s): ["module: fx"]

import contextvars
import copy
import functools
import gc
import inspect
import math
import os
import pickle
import sys
from types import ModuleType

import torch
from torch.fx import symbolic_trace, Tracer
from torch.fx._symbolic_trace import _autowrap_check, _Patcher, is_fx_symbolic_tracing
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
from concurrency_utils import run_on_thread, thread_held_in


ORIGINAL = {
    "__call__": torch.nn.Module.__call__,
    "__getattr__": torch.nn.Module.__getattr__,
}
sqrt = math.sqrt


class Block(torch.nn.Module):
    def forward(self, x):
        return x + 1


class Pair:
    def __init__(self, first, second):
        self.first, self.second = first, second


def leaf(x, scale=2):
    return x * scale


ORIGINAL_LEAF = leaf
ORIGINAL_SQRT = math.sqrt
torch.fx.wrap("leaf")
torch.fx.wrap("len")


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(3, 3)
        self.weight = torch.nn.Parameter(torch.ones(3))
        self.on_forward = None

    def forward(self, x):
        if self.on_forward is not None:
            self.on_forward()
        x = leaf(self.linear(x)) * self.weight
        return x + math.sqrt(len(x)) + sqrt(x.shape[0])


def hold_in_forward(hold, trace=symbolic_trace):
    model = Model()
    model.on_forward = hold
    return trace(model)


class TestConcurrentTrace(TestCase):
    def setUp(self):
        super().setUp()
        self.want = symbolic_trace(Model())
        self.want_graph = str(self.want.graph)

    def tearDown(self):
        try:
            self.assertUnpatched()
        finally:
            # Do not take the tests that follow down as well
            for name, fn in ORIGINAL.items():
                setattr(torch.nn.Module, name, fn)
            globals().update(leaf=ORIGINAL_LEAF, sqrt=ORIGINAL_SQRT)
            globals().pop("len", None)
            math.sqrt = ORIGINAL_SQRT
        super().tearDown()

    def assertUnpatched(self):
        for name, fn in ORIGINAL.items():
            self.assertIs(torch.nn.Module.__dict__[name], fn)
        self.assertIs(leaf, ORIGINAL_LEAF)
        self.assertIs(math.sqrt, ORIGINAL_SQRT)
        self.assertIs(sqrt, ORIGINAL_SQRT)
        self.assertNotIn("len", globals())

    @parametrize("tracer", ["symbolic_trace", "real", "fake", "symbolic"])
    def test_modules_called_while_another_thread_traces(self, tracer):
        def trace(model):
            if tracer == "symbolic_trace":
                return symbolic_trace(model)
            return make_fx(model, tracing_mode=tracer, _allow_non_fake_inputs=True)(
                torch.randn(2, 3)
            )

        want_graph = str(trace(Model()).graph)
        model, x = Model(), torch.randn(2, 3)
        want = model(x)
        with thread_held_in(lambda hold: hold_in_forward(hold, trace)) as thread:
            self.assertEqual(model(x), want)
            self.assertIs(model.weight, dict(model.named_parameters())["weight"])
            self.assertEqual(run_on_thread(lambda: model(x)), want)
            with self.assertRaises(AttributeError):
                model.missing
        self.assertEqual(str(thread.result().graph), want_graph)

    @parametrize("first_ends", ["first", "last"])
    def test_overlapping_traces(self, first_ends):
        with thread_held_in(hold_in_forward) as first:
            with thread_held_in(hold_in_forward) as second:
                if first_ends == "first":
                    first.release()
                    first.result()
                x = torch.randn(2, 3)
                model = Model()
                self.assertEqual(model(x), symbolic_trace(model)(x))
        for thread in (first, second):
            self.assertEqual(str(thread.result().graph), self.want_graph)
            targets = [n.target for n in thread.result().graph.nodes]
            self.assertIn(ORIGINAL_LEAF, targets)
            self.assertIn(ORIGINAL_SQRT, targets)
            self.assertIn(len, targets)

    def test_flag_outlives_a_trace_that_began_earlier_and_ended_first(self):
        seen = []

        def second(hold):
            def fn(x):
                hold()
                seen.append(is_fx_symbolic_tracing())
                return x

            return symbolic_trace(fn)

        with thread_held_in(hold_in_forward) as first:
            with thread_held_in(second):
                first.release()
                first.result()
        self.assertEqual(seen, [True])
        self.assertFalse(is_fx_symbolic_tracing())

    def test_patcher_with_functions_of_its_own(self):
        # As tracers outside of PyTorch use it
        called = []

        @functools.wraps(torch.nn.Module.__call__)
        def module_call(mod, *args, **kwargs):
            called.append(mod)
            return original(mod, *args, **kwargs)

        def sqrt(x):
            return "sqrt"

        original = torch.nn.Module.__call__
        names = {"sqrt": math.sqrt}
        module = torch.nn.Identity()
        with _Patcher() as patcher:
            patcher.patch_method(
                torch.nn.Module, "__call__", module_call, deduplicate=False
            )
            patcher.patch(names, "sqrt", sqrt)
            patcher.patch(names, "len", lambda x: "len")
            torch.fx._symbolic_trace._patch_wrapped_functions(patcher)
            _autowrap_check(patcher, {}, {id(math.sqrt)})
            self.assertEqual(module(1), 1)
            self.assertEqual(called, [module])
            self.assertEqual(names["sqrt"](4), "sqrt")
            self.assertEqual(names["len"](4), "len")
        self.assertIs(torch.nn.Module.__call__, original)
        self.assertEqual(names, {"sqrt": math.sqrt})

    def test_tracer_made_while_another_thread_traces(self):
        # The ids of the functions to wrap are collected when a Tracer is made
        with thread_held_in(hold_in_forward):
            tracer = Tracer(autowrap_functions=(sqrt,))
        self.assertEqual(str(tracer.trace(Model())), self.want_graph)

    def test_name_imported_while_another_thread_traces(self):
        # The wrapper goes on to work as the function does
        with thread_held_in(hold_in_forward):
            imported = math.sqrt

        self.assertEqual(imported(4.0), 2.0)
        namespace = {"imported": imported}
        exec("def fn(x):\n    return imported(x.shape[0])\n", namespace)
        graph = symbolic_trace(namespace["fn"]).graph
        self.assertIn(ORIGINAL_SQRT, [n.target for n in graph.nodes])
        self.assertEqual(namespace["imported"](4.0), 2.0)

    def test_namespace_changes_while_it_is_searched(self):
        # Traces on other threads put wrapped builtins into globals and take them out.
        # A collection runs wherever one of them could.
        module = ModuleType("module")
        module.__dict__.update((f"name{i}", len) for i in range(5000))

        def change(phase, info):
            if phase == "start" and module.__dict__.pop("other", None) is None:
                module.other = len

        threshold = gc.get_threshold()
        gc.freeze()  # so that collections are short
        gc.callbacks.append(change)
        gc.set_threshold(1)
        try:
            tracer = Tracer(autowrap_modules=(module,))
            with _Patcher() as patcher:
                _autowrap_check(patcher, module.__dict__, {id(abs)})
        finally:
            gc.set_threshold(*threshold)
            gc.callbacks.remove(change)
            gc.unfreeze()
        self.assertIn(id(len), tracer._autowrap_function_ids)

    def test_wrapped_class_while_another_thread_traces(self):
        blocks = ModuleType("blocks")
        blocks.Block, blocks.Pair = Block, Pair

        class BlockTracer(Tracer):
            def __init__(self):
                super().__init__(autowrap_modules=(blocks,))
                self.leaves = tuple(
                    c for c in vars(blocks).values() if inspect.isclass(c)
                )

            def is_leaf_module(self, m, module_qualified_name):
                return isinstance(m, self.leaves)

        model = torch.nn.Sequential(Block(), torch.nn.ReLU())
        want = str(BlockTracer().trace(model))
        self.assertIn("call_module[target=0]", want)
        graphs = []

        def trace(hold):
            def forward(x):
                hold()
                return blocks.Pair(x, 1)

            graphs.append(BlockTracer().trace(forward))

        with thread_held_in(trace):
            self.assertIsNot(vars(blocks)["Block"], Block)
            self.assertEqual(str(BlockTracer().trace(model)), want)
            self.assertIsInstance(blocks.Block(), Block)
            self.assertIsInstance(model[0], blocks.Block)
            self.assertNotIsInstance(model[1], blocks.Block)
            self.assertTrue(issubclass(blocks.Block, torch.nn.Module))
            self.assertTrue(issubclass(Block, blocks.Block))
            self.assertEqual(blocks.Block, Block)
            self.assertIs(blocks.Block.forward, Block.forward)
            self.assertIs(copy.deepcopy(blocks.Block), blocks.Block)

            class Derived(blocks.Block):
                pass

            imported = blocks.Block
        self.assertEqual(Derived.__bases__, (Block,))
        self.assertIs(type(imported()), Block)
        self.assertIs(blocks.Block, Block)
        targets = [n.target for n in graphs[0].nodes]
        self.assertIn(Pair, targets)

    def test_nested_trace(self):
        inner = []
        model = Model()
        model.on_forward = lambda: inner.append(symbolic_trace(Model()))
        graph = symbolic_trace(model).graph
        self.assertEqual(str(graph), self.want_graph)
        self.assertEqual(str(inner[0].graph), self.want_graph)
        # The inner one records the function, not the wrapper of the outer one
        self.assertIn(ORIGINAL_LEAF, [n.target for n in inner[0].graph.nodes])

    @parametrize("where", ["forward", "is_leaf_module", "create_arg", "getattr"])
    @parametrize("exception", [ValueError, KeyboardInterrupt])
    def test_trace_that_raises(self, where, exception):
        class Raises(Tracer):
            pass

        model = Model()

        def raises(*args, **kwargs):
            raise exception(where)

        if where == "forward":
            model.on_forward = raises
        else:
            setattr(Raises, where, raises)
        with thread_held_in(hold_in_forward) as thread:
            with self.assertRaises(exception):
                Raises().trace(model)
            x = torch.randn(2, 3)
            self.assertEqual(Model().linear(x).shape, x.shape)
        with self.assertRaises(exception):
            Raises().trace(model)
        self.assertEqual(str(thread.result().graph), self.want_graph)
        self.assertUnpatched()

    def test_tracer_subclasses(self):
        class Subclass(Tracer):
            # No super().__init__
            def __init__(self):
                self.__dict__.update(Tracer().__dict__)
                self.calls, self.attrs = [], []

            def path_of_module(self, mod):
                return super().path_of_module(mod)

            def call_module(self, m, forward, args, kwargs):
                self.calls.append(type(m).__name__)
                return super().call_module(m, forward, args, kwargs)

            def getattr(self, attr, attr_val, parameter_proxy_cache):
                self.attrs.append(attr)
                return super().getattr(attr, attr_val, parameter_proxy_cache)

            def trace(self, root, concrete_args=None):
                return super().trace(root, concrete_args)

        alone = Subclass()
        want = str(alone.trace(Model()))

        def trace(hold):
            model = Model()
            model.on_forward = hold
            tracer = Subclass()
            return tracer, str(tracer.trace(model))

        with thread_held_in(trace) as thread:
            other = Model()
            other(torch.randn(2, 3))
            self.assertEqual(str(Subclass().trace(Model())), want)
        tracer, graph = thread.result()
        self.assertEqual(graph, want)
        self.assertEqual(tracer.calls, alone.calls)
        self.assertEqual(tracer.attrs, alone.attrs)

    @parametrize("when", ["before", "during"])
    def test_foreign_patch_of_module_call(self, when):
        # Profilers and quantization tools replace nn.Module.__call__ as well
        called = []
        model, x = Model(), torch.randn(2, 3)

        def put_on():
            prior = torch.nn.Module.__call__

            @functools.wraps(prior)
            def foreign(mod, *args, **kwargs):
                called.append(type(mod).__name__)
                return prior(mod, *args, **kwargs)

            torch.nn.Module.__call__ = foreign
            return prior, foreign

        if when == "before":
            prior, foreign = put_on()
        with thread_held_in(hold_in_forward) as thread:
            if when == "during":
                prior, foreign = put_on()
            model(x)
            self.assertEqual(called, ["Model", "Linear"])
            self.assertEqual(str(symbolic_trace(Model()).graph), self.want_graph)
        self.assertEqual(str(thread.result().graph), self.want_graph)
        # Theirs is not taken away
        self.assertIs(torch.nn.Module.__call__, foreign)
        called.clear()
        model(x)
        self.assertEqual(called, ["Model", "Linear"])
        self.assertEqual(str(symbolic_trace(Model()).graph), self.want_graph)
        self.assertIs(torch.nn.Module.__call__, foreign)
        # They put back what they found: a dispatcher, if it was during a trace
        torch.nn.Module.__call__ = prior
        self.assertEqual(str(symbolic_trace(Model()).graph), self.want_graph)

    def test_foreign_patch_taken_off_during_a_trace(self):
        prior = torch.nn.Module.__call__

        @functools.wraps(prior)
        def foreign(mod, *args, **kwargs):
            return prior(mod, *args, **kwargs)

        torch.nn.Module.__call__ = foreign
        with thread_held_in(hold_in_forward):
            torch.nn.Module.__call__ = prior
            # A trace that begins now records modules all the same
            self.assertEqual(str(symbolic_trace(Model()).graph), self.want_graph)
        self.assertIs(torch.nn.Module.__call__, prior)

    def test_names_replaced_between_traces(self):
        # One trace after the other uses a replacement, while the name is what it was
        def other_leaf(x):
            return x

        def other_sqrt(x):
            return x

        globals().update(leaf=other_leaf, sqrt=other_sqrt)
        math.sqrt = other_sqrt
        graph = symbolic_trace(Model()).graph
        self.assertIs(leaf, other_leaf)
        self.assertIs(math.sqrt, other_sqrt)
        targets = {node.target for node in graph.nodes}
        self.assertTrue({other_leaf, other_sqrt} <= targets)
        self.assertFalse({ORIGINAL_LEAF, ORIGINAL_SQRT} & targets)

        globals().update(leaf=ORIGINAL_LEAF, sqrt=ORIGINAL_SQRT)
        math.sqrt = ORIGINAL_SQRT
        self.assertEqual(str(symbolic_trace(Model()).graph), self.want_graph)

    def test_tracer_is_copied_and_pickled_during_its_trace(self):
        class Subclass(Tracer):
            def is_leaf_module(self, m, module_qualified_name):
                copies.append(copy.deepcopy(self))
                return super().is_leaf_module(m, module_qualified_name)

        copies = []
        with thread_held_in(hold_in_forward):
            graph = Subclass().trace(Model())
            tracer = Tracer(autowrap_modules=())
            self.assertIsInstance(pickle.loads(pickle.dumps(tracer)), Tracer)
        self.assertEqual(str(graph), self.want_graph)
        self.assertEqual(str(copies[0].trace(Model())), self.want_graph)

    def test_thread_started_inside_a_trace_calls_modules(self):
        model, x = Model(), torch.randn(2, 3)
        want = model(x)
        results = []
        traced = Model()

        def on_forward():
            results.append(run_on_thread(lambda: model(x)))
            results.append(run_on_thread(lambda: traced.linear(x)))
            context = contextvars.copy_context()
            results.append(run_on_thread(lambda: context.run(model, x)))
            contexts.append(contextvars.copy_context())

        contexts = []
        traced.on_forward = on_forward
        graph = symbolic_trace(traced).graph
        self.assertEqual(results[0], want)
        self.assertEqual(results[1].shape, x.shape)
        self.assertEqual(results[2], want)
        self.assertEqual(str(graph), self.want_graph)
        # A context outlives its trace, on a thread that inherits it or in a task
        with thread_held_in(hold_in_forward) as thread:
            self.assertEqual(contexts[0].run(model, x), want)
            self.assertEqual(contexts[0].run(model.linear, x).shape, x.shape)
        self.assertEqual(str(thread.result().graph), self.want_graph)

    @parametrize("forking", ["other", "tracing"])
    def test_fork_while_a_trace_is_alive(self, forking):
        def in_child():
            # Exit code: 0 if nothing is patched
            try:
                self.assertUnpatched()
                self.assertEqual(Model()(torch.ones(2, 3)).shape, (2, 3))
                graph = str(symbolic_trace(Model()).graph)
                self.assertEqual(graph, self.want_graph)
                self.assertUnpatched()
            except BaseException:
                return 1
            return 0

        def fork_and_wait(in_child):
            pid = os.fork()
            if pid == 0:
                os._exit(in_child())
            return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])

        with thread_held_in(hold_in_forward):
            if forking == "other":
                self.assertEqual(fork_and_wait(in_child), 0)
                return
            # The trace of the thread that forks goes on in the child

            def fork_inside():
                nonlocal pid
                pid = os.fork()

            pid = None
            model = Model()
            model.on_forward = fork_inside
            graph = symbolic_trace(model).graph
            if pid == 0:
                same = str(graph) == self.want_graph
                os._exit(in_child() if same else 2)
            exit_code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
            self.assertEqual(exit_code, 0)
            self.assertEqual(str(graph), self.want_graph)

    def test_no_cost_without_a_trace(self):
        self.assertUnpatched()
        symbolic_trace(Model())
        self.assertUnpatched()


instantiate_parametrized_tests(TestConcurrentTrace)


if __name__ == "__main__":
    run_tests()
