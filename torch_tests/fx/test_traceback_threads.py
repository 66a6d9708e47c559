# Owner(s): ["module: fx"]

import contextvars
import os
import pickle
import sys
from unittest import mock

import torch
import torch.fx.traceback as fx_traceback
from torch.fx import Interpreter, symbolic_trace
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


def annotated(hold=lambda: None, tag="a"):
    def fn(x):
        with fx_traceback.annotate({"tag": tag}):
            x = x.sin()
            hold()
            return x.cos() + 1

    with fx_traceback.preserve_node_meta():
        return make_fx(fn)(torch.randn(3))


def metadata(gm):
    return [
        (n.name, n.meta.get("custom"), n.meta.get("stack_trace") is not None)
        for n in gm.graph.nodes
    ]


class TestTracebackThreads(TestCase):
    def test_trace_while_another_thread_annotates(self):
        def trace():
            return make_fx(lambda x: x.sin() + 1)(torch.randn(3))

        want = metadata(trace())
        with thread_held_in(annotated):
            self.assertFalse(fx_traceback.has_preserved_node_meta())
            self.assertEqual(fx_traceback.get_current_meta().get("custom"), None)
            self.assertEqual(metadata(trace()), want)
            self.assertEqual(run_on_thread(lambda: metadata(trace())), want)

    def test_overlapping_annotations(self):
        want = {tag: metadata(annotated(tag=tag)) for tag in "ab"}
        with thread_held_in(lambda hold: annotated(hold, "a")) as first:
            with thread_held_in(lambda hold: annotated(hold, "b")) as second:
                first.release()
                first.result()
        self.assertEqual(metadata(first.result()), want["a"])
        self.assertEqual(metadata(second.result()), want["b"])
        self.assertFalse(fx_traceback.has_preserved_node_meta())
        self.assertNotIn("custom", fx_traceback.get_current_meta())

    def test_interpreter_while_another_thread_runs_one(self):
        gm = symbolic_trace(lambda x: x.sin() + 1)
        for node in gm.graph.nodes:
            node.meta["stack_trace"] = f"trace of {node.name}"

        def run(hold=None):
            class Run(Interpreter):
                def run_node(self, n):
                    if hold is not None and n.op == "call_method":
                        with fx_traceback.set_current_meta(n):
                            hold()
                    return super().run_node(n)

            with fx_traceback.preserve_node_meta():
                return make_fx(Run(gm).run)(torch.randn(3))

        def stacks(gm):
            return [n.meta.get("stack_trace") for n in gm.graph.nodes]

        want = stacks(run())
        with thread_held_in(run) as thread:
            self.assertEqual(fx_traceback.get_current_meta().get("stack_trace"), None)
            self.assertEqual(stacks(run()), want)
        self.assertEqual(stacks(thread.result()), want)

    def test_grad_fn_seq_nr(self):
        def backward(hold):
            with fx_traceback.preserve_node_meta():
                fx_traceback.set_grad_fn_seq_nr(1)
                hold()
                fx_traceback.reset_grad_fn_seq_nr()
                return dict(fx_traceback.get_current_meta())

        with thread_held_in(backward) as first:
            with thread_held_in(backward) as second:
                first.release()
                self.assertNotIn("in_grad_fn", first.result())
        self.assertNotIn("in_grad_fn", second.result())

    def test_replay_node_and_seq_nr_flag(self):
        node = next(iter(symbolic_trace(lambda x: x).graph.nodes))

        def replay(hold):
            with (
                fx_traceback.set_current_replay_node(node),
                fx_traceback._preserve_node_seq_nr(),
            ):
                hold()
                return (
                    fx_traceback.get_current_replay_node(),
                    fx_traceback._is_preserving_node_seq_nr(),
                )

        with thread_held_in(replay) as thread:
            self.assertIsNone(fx_traceback.get_current_replay_node())
            self.assertFalse(fx_traceback._is_preserving_node_seq_nr())
        self.assertEqual(thread.result(), (node, True))

    def test_context_on_another_thread_has_a_copy(self):
        with fx_traceback.preserve_node_meta(), fx_traceback.annotate({"tag": 1}):
            context = contextvars.copy_context()

            def other():
                with fx_traceback.annotate({"other": 2}):
                    fx_traceback.get_current_meta()["key"] = 3
                    return dict(fx_traceback.get_current_meta()["custom"])

            seen = run_on_thread(lambda: context.run(other))
            self.assertEqual(seen, {"tag": 1, "other": 2})
            # What the trace of this thread asks for is not for traces of others
            preserved = fx_traceback.has_preserved_node_meta
            self.assertTrue(context.copy().run(preserved))
            self.assertFalse(run_on_thread(lambda: context.run(preserved)))
            self.assertEqual(fx_traceback.get_current_meta()["custom"], {"tag": 1})
            self.assertNotIn("key", fx_traceback.get_current_meta())

    def test_annotate_around_preserve_node_meta(self):
        with fx_traceback.annotate({"outer": 1}):
            with fx_traceback.preserve_node_meta():
                with fx_traceback.annotate({"inner": 2}):
                    meta = fx_traceback.get_current_meta()["custom"]
                    self.assertEqual(meta, {"outer": 1, "inner": 2})
            self.assertEqual(fx_traceback.get_current_meta()["custom"], {"outer": 1})
        self.assertNotIn("custom", fx_traceback.get_current_meta())

    def test_contexts_left_on_another_thread(self):
        node = symbolic_trace(lambda x: x.sin()).graph.find_nodes(op="placeholder")[0]
        node.meta["key"] = 1
        for context in (
            fx_traceback.preserve_node_meta(),
            fx_traceback.annotate({"key": 1}),
            fx_traceback.set_current_replay_node(node),
            fx_traceback.set_current_meta(node),
        ):
            context.__enter__()
            run_on_thread(lambda: context.__exit__(None, None, None))
            self.assertFalse(fx_traceback.has_preserved_node_meta())
            self.assertIsNone(fx_traceback.get_current_replay_node())
            self.assertNotIn("custom", fx_traceback.get_current_meta())

    @parametrize("strict", [False, True])
    def test_dynamo_traces_readers(self, strict):
        @fx_traceback.preserve_node_meta()
        def decorated(x):
            fx_traceback.set_grad_fn_seq_nr(1)
            fx_traceback.reset_grad_fn_seq_nr()
            return x + 10 if fx_traceback.has_preserved_node_meta() else x

        class Model(torch.nn.Module):
            def forward(self, x):
                fx_traceback.set_stack_trace(["trace"])
                with fx_traceback.preserve_node_meta():
                    if fx_traceback.has_preserved_node_meta():
                        x = x + 20
                with fx_traceback._preserve_node_seq_nr():
                    if fx_traceback._is_preserving_node_seq_nr():
                        x = x + 40
                if fx_traceback.get_current_replay_node() is None:
                    x = x + 80
                x = decorated(x) + len(fx_traceback.get_current_meta())
                return x + 1 if fx_traceback.has_preserved_node_meta() else x + 2

        x = torch.randn(3)
        model = Model()
        with thread_held_in(annotated):
            if strict:
                ep = torch.export.export(model, (x,), strict=True)
                self.assertEqual(ep.module()(x), x + 152)
                return
            compiled = torch.compile(model, backend="eager", fullgraph=True)
            self.assertEqual(compiled(x), x + 152)
            with fx_traceback.preserve_node_meta():
                want = model(x)
                self.assertEqual(compiled(x), want)
                self.assertTrue(fx_traceback.has_preserved_node_meta())
                self.assertEqual(
                    fx_traceback.get_current_meta(), {"stack_trace": "trace"}
                )
            self.assertEqual(compiled(x), x + 152)
        self.assertFalse(fx_traceback.has_preserved_node_meta())
        self.assertFalse(fx_traceback._is_preserving_node_seq_nr())

    def test_old_attributes(self):
        self.assertFalse(fx_traceback.should_preserve_node_meta)
        self.assertIsNone(fx_traceback.current_replay_node)
        with fx_traceback.preserve_node_meta():
            self.assertTrue(fx_traceback.should_preserve_node_meta)
            fx_traceback.current_meta["key"] = 1
            self.assertEqual(fx_traceback.get_current_meta()["key"], 1)
            self.assertFalse(
                run_on_thread(lambda: fx_traceback.should_preserve_node_meta)
            )
            context = contextvars.Context()
            self.assertEqual(
                run_on_thread(lambda: context.run(lambda: dict(fx_traceback.current_meta))),
                {},
            )
            fx_traceback.current_meta = {"key": 2}
            self.assertEqual(fx_traceback.get_current_meta(), {"key": 2})
        fx_traceback.should_preserve_node_meta = True
        try:
            self.assertTrue(fx_traceback.has_preserved_node_meta())
        finally:
            fx_traceback.should_preserve_node_meta = False
        for name, value in (
            ("should_preserve_node_meta", True),
            ("current_meta", {"key": 3}),
            ("current_replay_node", object()),
        ):
            before = getattr(fx_traceback, name)
            with mock.patch.object(fx_traceback, name, value):
                self.assertIs(getattr(fx_traceback, name), value)
            self.assertEqual(getattr(fx_traceback, name), before)
        # cloudpickle does this for functions that use the module
        self.assertIs(pickle.loads(pickle.dumps(fx_traceback)), fx_traceback)


instantiate_parametrized_tests(TestTracebackThreads)


if __name__ == "__main__":
    run_tests()
