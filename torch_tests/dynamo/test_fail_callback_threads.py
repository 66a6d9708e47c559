# Owner(s): ["module: dynamo"]

import os
import sys

import torch
import torch._dynamo
from torch._dynamo.convert_frame import get_fail_callback
from torch._dynamo.testing import CompileCounter
from torch.testing._internal.common_utils import run_tests, TestCase


# Make the helper files in test/ importable
pytorch_test_dir = os.path.dirname(os.path.dirname(os.path.realpath(__file__)))
sys.path.append(pytorch_test_dir)
from concurrency_utils import thread_held_in


class TestFailCallbackThreads(TestCase):
    def setUp(self):
        super().setUp()
        torch._dynamo.reset()
        self.x = torch.randn(3)

    def compile(self):
        counter = CompileCounter()
        result = torch.compile(lambda x: x + 1, backend=counter)(self.x)
        self.assertEqual(result, self.x + 1)
        self.assertEqual(counter.frame_count, 1)

    def test_compile_while_another_thread_may_not(self):
        with thread_held_in(lambda hold: get_fail_callback(lambda: hold())()):
            self.compile()

    def test_callbacks_that_overlap(self):
        def callback(hold):
            get_fail_callback(lambda: hold())()

        with thread_held_in(callback) as first:
            with thread_held_in(callback):
                # Not in the order in which they began
                first.release()
                first.result()
        self.compile()

    def test_compile_in_the_callback(self):
        with self.assertRaisesRegex(RuntimeError, "expected not to compile nested"):
            get_fail_callback(lambda: self.compile())()
        self.compile()


if __name__ == "__main__":
    run_tests()
