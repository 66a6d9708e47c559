# Owner(s): ["module: dynamo"]

import os
import sys
import threading
import time
import traceback
from unittest import mock

import torch
import torch._dynamo
from torch._dynamo import convert_frame, eval_frame
from torch._dynamo.convert_frame import compile_lock
from torch._dynamo.eval_frame import _debug_get_cache_entry_list
from torch._dynamo.testing import CompileCounter
from torch.testing._internal.common_utils import run_tests, TestCase


# Make the helper files in test/ importable
pytorch_test_dir = os.path.dirname(os.path.dirname(os.path.realpath(__file__)))
sys.path.append(pytorch_test_dir)
from concurrency_utils import HeldThread, thread_held_in, TIMEOUT, WorkerThread


class TestResetThreads(TestCase):
    def setUp(self):
        super().setUp()
        torch._dynamo.reset()
        self.counter = CompileCounter()

    def tearDown(self):
        torch._dynamo.reset()
        super().tearDown()

    def start_waiting(self, fn):
        """Start a thread that calls fn() and waits for compile_lock, which we hold."""
        thread = WorkerThread(fn)
        thread.start()
        end = time.monotonic() + TIMEOUT
        while time.monotonic() < end and thread.is_alive():
            frame = sys._current_frames().get(thread.ident)
            if any(
                frame.f_code.co_filename == convert_frame.__file__
                for frame, _ in traceback.walk_stack(frame)
            ):
                break
            time.sleep(0.001)
        # From there to the lock
        time.sleep(0.2)
        return thread

    def test_while_another_thread_waits(self):
        @torch.compile(backend=self.counter)
        def fn(x):
            return x.sin() + 1

        x = torch.randn(3)
        with compile_lock:
            thread = self.start_waiting(lambda: fn(x))
            torch._dynamo.reset()
        self.assertEqual(thread.result(), x.sin() + 1)
        # What it compiled is there
        self.assertEqual(fn(x), x.sin() + 1)
        self.assertEqual(self.counter.frame_count, 1)

    def test_entries_go_while_another_thread_waits(self):
        @torch.compile(backend=self.counter, dynamic=False)
        def fn(x):
            return x.sin() + 1

        x, y = torch.randn(3), torch.randn(4)
        fn(x)
        with compile_lock:
            thread = self.start_waiting(lambda: fn(y))
            torch._dynamo.reset()
        self.assertEqual(thread.result(), y.sin() + 1)
        self.assertEqual(self.counter.frame_count, 2)
        self.assertEqual(fn(y), y.sin() + 1)
        self.assertEqual(self.counter.frame_count, 2)
        self.assertEqual(fn(x), x.sin() + 1)
        self.assertEqual(self.counter.frame_count, 3)

    def test_before_the_entry_is_there(self):
        # The other thread has compiled it, but its callback has not returned
        class Codes(list):
            def remove(self, code):
                thread = threading.current_thread()
                if isinstance(thread, HeldThread):
                    thread.hold()
                super().remove(code)

        @torch.compile(backend=self.counter, dynamic=False)
        def fn(x):
            return x.sin() + 1

        x, y = torch.randn(3), torch.randn(4)
        codes = Codes()
        with (
            mock.patch.object(convert_frame, "codes_in_callback", codes),
            mock.patch.object(eval_frame, "codes_in_callback", codes),
        ):
            with thread_held_in(lambda hold: fn(x)) as thread:
                torch._dynamo.reset()
        self.assertEqual(thread.result(), x.sin() + 1)
        # Tells why the entry does not fit
        self.assertEqual(fn(y), y.sin() + 1)
        self.assertEqual(self.counter.frame_count, 2)

    def test_reset_in_a_compilation(self):
        def backend(gm, example_inputs):
            torch._dynamo.reset_code_caches()
            return self.counter(gm, example_inputs)

        @torch.compile(backend=backend)
        def fn(x):
            return x.sin() + 1

        x = torch.randn(3)
        for _ in range(2):
            self.assertEqual(fn(x), x.sin() + 1)
        self.assertEqual(self.counter.frame_count, 1)

    def test_nothing_is_kept_otherwise(self):
        def fn(x):
            return x.sin() + 1

        compiled = torch.compile(fn, backend=self.counter)
        x = torch.randn(3)
        compiled(x)
        self.assertEqual(len(_debug_get_cache_entry_list(fn)), 1)
        torch._dynamo.reset()
        self.assertEqual(_debug_get_cache_entry_list(fn), [])
        compiled(x)
        self.assertEqual(self.counter.frame_count, 2)

    def test_code_is_let_go_of(self):
        # Whatever became of its compilation
        def fails(gm, example_inputs):
            raise NotImplementedError

        def fn(x):
            return x.sin() + 1

        with self.assertRaises(torch._dynamo.exc.BackendCompilerFailed):
            torch.compile(fn, backend=fails)(torch.randn(3))
        self.assertEqual(eval_frame.codes_in_callback, [])


if __name__ == "__main__":
    run_tests()
