# Owner(s): ["module: fx"]

import os
import pickle
import sys

import torch
from torch.fx import GraphModule, symbolic_trace, Tracer
from torch.testing._internal.common_utils import run_tests, TestCase


# Make the helper files in test/ importable
pytorch_test_dir = os.path.dirname(os.path.dirname(os.path.realpath(__file__)))
sys.path.append(pytorch_test_dir)
from concurrency_utils import thread_held_in


def scaled(x):
    return x * 2


ORIGINAL = scaled
torch.fx.wrap("scaled")


def trace_and_hold(hold):
    def fn(x):
        hold()
        return scaled(x)

    return symbolic_trace(fn)


class HoldingTracer(Tracer):
    hold = None

    def trace(self, root, concrete_args=None):
        if HoldingTracer.hold is not None:
            HoldingTracer.hold()
        return super().trace(root, concrete_args)


class TestSerializeThreads(TestCase):
    def test_pickle_while_another_thread_traces(self):
        gm = symbolic_trace(lambda x: scaled(x) + 1)
        want = pickle.dumps(gm)
        with thread_held_in(trace_and_hold):
            self.assertIsNot(scaled, ORIGINAL)
            self.assertEqual(pickle.dumps(gm), want)
            loaded = pickle.loads(want)
        self.assertEqual(loaded(torch.ones(3)), torch.full((3,), 3.0))
        # What it calls is the function, not what replaced it for the trace
        self.assertIn(ORIGINAL, loaded.forward.__globals__.values())
        self.assertIn(ORIGINAL, [n.target for n in loaded.graph.nodes])

    def test_two_threads_unpickle(self):
        def pickled(fn):
            graph = HoldingTracer().trace(fn)
            return pickle.dumps(GraphModule(torch.nn.Module(), graph))

        first = pickled(lambda x: x.sin())
        second = pickled(lambda x: x.cos())
        x = torch.randn(3)

        def unpickle(hold):
            HoldingTracer.hold = staticmethod(hold)
            return pickle.loads(first)

        try:
            # Held between the source and the trace of what it was made into
            with thread_held_in(unpickle) as thread:
                self.assertEqual(pickle.loads(second)(x), x.cos())
            self.assertEqual(thread.result()(x), x.sin())
        finally:
            HoldingTracer.hold = None


if __name__ == "__main__":
    run_tests()
