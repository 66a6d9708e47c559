# Owner(s): ["module: dynamo"]

import contextlib
import os
import pickle
import sys

import torch
import torch._dynamo
from torch._dynamo.testing import CompileCounter
from torch.testing._internal.common_utils import run_tests, TestCase
from torch.utils import _device


# Make the helper files in test/ importable
pytorch_test_dir = os.path.dirname(os.path.dirname(os.path.realpath(__file__)))
sys.path.append(pytorch_test_dir)
from concurrency_utils import run_on_thread, thread_held_in


@contextlib.contextmanager
def default_device(device):
    torch.set_default_device(device)
    try:
        yield
    finally:
        torch.set_default_device(None)


class TestDefaultDeviceThreads(TestCase):
    def setUp(self):
        super().setUp()
        torch._dynamo.reset()
        _device.CURRENT_DEVICE = None
        self.x = torch.ones(3)
        self.counter = CompileCounter()

    def compile(self, fn):
        return torch.compile(fn, backend=self.counter)

    def test_default_devices_of_other_threads(self):
        # More of them than entries that a function may have
        compiled = self.compile(lambda x: x + 1)
        compiled(self.x)
        for n in range(torch._dynamo.config.recompile_limit + 1):
            run_on_thread(lambda: torch.set_default_device(f"cuda:{n}"))
            compiled(self.x)
        self.assertEqual(self.counter.frame_count, 1)

    def test_compiled_while_another_thread_has_one(self):
        def set_and_hold(hold):
            with default_device("meta"):
                hold()

        compiled = self.compile(lambda x: x + 1)
        with thread_held_in(set_and_hold):
            compiled(self.x)
        compiled(self.x)
        self.assertEqual(self.counter.frame_count, 1)

    def test_threads_with_different_ones(self):
        def call(device, hold):
            with default_device(device):
                found = [compiled(self.x)]
                hold()
                found.append(compiled(self.x))
            return [(made.device.type, out) for made, out in found]

        compiled = self.compile(lambda x: (torch.ones(2), x + 1))
        with thread_held_in(lambda hold: call("meta", hold)) as first:
            with thread_held_in(lambda hold: call("cpu", hold)) as second:
                first.release()
                first.result()
        for thread, device in ((first, "meta"), (second, "cpu")):
            self.assertEqual(thread.result(), [(device, self.x + 1)] * 2)
        self.assertEqual(self.counter.frame_count, 2)

    def test_other_device_of_the_same_thread(self):
        compiled = self.compile(lambda x: x + 1)
        for count, device in enumerate(("meta", "cpu", None), 1):
            with default_device(device):
                for _ in range(2):
                    compiled(self.x)
            self.assertEqual(self.counter.frame_count, count)
        with default_device("meta"):
            compiled(self.x)
        self.assertEqual(self.counter.frame_count, 3)

    def test_set_in_compiled_code(self):
        @torch.compile(backend="eager", fullgraph=True)
        def compiled(x):
            torch.set_default_device("meta")
            y = torch.ones(2)
            torch.set_default_device(None)
            return y, x + 1

        @torch.compile(backend="eager", fullgraph=True)
        def compiled_set(x):
            torch.set_default_device("meta")
            return x + 1

        def on_thread():
            self.assertEqual(compiled(self.x)[0].device.type, "meta")
            self.assertIsNone(_device.CURRENT_DEVICE)
            with default_device(None):
                compiled_set(self.x)
                self.assertEqual(_device.CURRENT_DEVICE, torch.device("meta"))
                self.assertEqual(torch.ones(2).device.type, "meta")
            self.assertIsNone(_device.CURRENT_DEVICE)

        for _ in range(2):
            on_thread()
            run_on_thread(on_thread)

    def test_current_device(self):
        def current_device():
            return _device.CURRENT_DEVICE

        with default_device("meta"):
            self.assertEqual(current_device(), torch.device("meta"))
            self.assertIsNone(run_on_thread(current_device))
        self.assertIsNone(current_device())
        self.assertIs(pickle.loads(pickle.dumps(_device)), _device)


if __name__ == "__main__":
    run_tests()
