# Owner(s): ["module: inductor"]

import os
import subprocess
import sys
import textwrap
import threading
from unittest import mock

import torch
from torch._dynamo import convert_frame
from torch._inductor import compile_fx
from torch.fx.experimental.proxy_tensor import make_fx
from torch.testing._internal.common_utils import run_tests, TestCase
from torch.testing._internal.inductor_utils import HAS_CPU


# Make the helper files in test/ importable
pytorch_test_dir = os.path.dirname(os.path.dirname(os.path.realpath(__file__)))
sys.path.append(pytorch_test_dir)
from concurrency_utils import HeldThread, TIMEOUT, WorkerThread


class TestCompileFxThreads(TestCase):
    def test_compilations_take_turns(self):
        waiting = threading.Event()

        class ObservedLock:
            _lock = threading.RLock()

            def __enter__(self):
                if not self._lock.acquire(blocking=False):
                    waiting.set()
                    self._lock.acquire()

            def __exit__(self, *args):
                self._lock.release()

        def compile(inner_compile):
            gm = make_fx(lambda x: (x.sin() + 1,))(torch.ones(3))
            return compile_fx.compile_fx(
                gm, [torch.ones(3)], inner_compile=inner_compile
            )

        def compile_and_hold(hold):
            def inner_compile(gm, example_inputs, **kwargs):
                hold()
                return gm

            return compile(inner_compile)

        entered = threading.Event()

        def inner_compile(gm, example_inputs, **kwargs):
            entered.set()
            waiting.set()
            return gm

        with mock.patch.object(convert_frame, "compile_lock", ObservedLock()):
            first = HeldThread(compile_and_hold)
            first.start_and_wait()
            second = WorkerThread(lambda: compile(inner_compile))
            second.start()
            try:
                self.assertTrue(waiting.wait(TIMEOUT))
                self.assertFalse(entered.is_set())
            finally:
                first.release()
                first.result()
                result = second.result()
        self.assertTrue(entered.is_set())
        self.assertEqual(result(torch.ones(3))[0], torch.ones(3).sin() + 1)

    def test_first_compilations_of_a_process(self):
        # The first compilation registers the patterns. One thread is held in the
        # middle of it.
        code = """
            import threading

            import torch
            from torch._inductor import pattern_matcher
            from torch._inductor.compile_fx import compile_fx
            from torch.fx.experimental.proxy_tensor import make_fx

            original = pattern_matcher.check_and_add_duplicate_pattern
            begun, other_done = threading.Event(), threading.Event()
            first = True

            def check_and_add_duplicate_pattern(*args, **kwargs):
                global first
                if first and not kwargs.get("skip_duplicates"):
                    first = False
                    begun.set()
                    # Not set if the other thread waits for this one, as it should
                    other_done.wait(5)
                return original(*args, **kwargs)

            pattern_matcher.check_and_add_duplicate_pattern = (
                check_and_add_duplicate_pattern
            )
            errors = []

            def run(wait_for, then):
                try:
                    wait_for.wait(200)
                    gm = make_fx(lambda x: (x + 1,))(torch.ones(3))
                    result = compile_fx(gm, [torch.ones(3)])
                    assert torch.equal(result(torch.ones(3))[0], torch.full((3,), 2.0))
                except Exception as e:
                    errors.append(e)
                finally:
                    then.set()

            ready = threading.Event()
            ready.set()
            threads = [
                threading.Thread(target=run, args=(ready, threading.Event())),
                threading.Thread(target=run, args=(begun, other_done)),
            ]
            for t in threads:
                t.start()
            for t in threads:
                t.join()
            assert not first, "patterns were not registered"
            if errors:
                raise errors[0]
            print("passed")
        """
        process = subprocess.run(
            [sys.executable, "-c", textwrap.dedent(code)],
            capture_output=True,
            text=True,
            timeout=TIMEOUT,
        )
        self.assertEqual(process.returncode, 0, process.stderr)
        self.assertIn("passed", process.stdout)


if __name__ == "__main__":
    if HAS_CPU:
        run_tests()
