# Owner(s): ["oncall: pt2"]

import os
import sys
from unittest import mock

import torch
from torch._decomp.decompositions_for_rng import PhiloxStateTracker
from torch._functorch._aot_autograd.graph_capture_wrappers import (
    create_functionalized_rng_ops_wrapper,
)
from torch._functorch.aot_autograd import aot_function, make_boxed_func
from torch._prims_common import CUDARngStateHelper
from torch.testing._internal.common_utils import run_tests, TestCase


# Make the helper files in test/ importable
pytorch_test_dir = os.path.dirname(os.path.dirname(os.path.realpath(__file__)))
sys.path.append(pytorch_test_dir)
from concurrency_utils import run_on_thread, thread_held_in


def sets_rng_state():
    """Whether torch.cuda.set_rng_state() does so. Needs no GPU."""
    with mock.patch.object(torch.cuda.random, "_lazy_call") as lazy_call:
        torch.cuda.set_rng_state(torch.zeros(16, dtype=torch.uint8))
    return lazy_call.called


def gets_rng_state():
    """The same for torch.cuda.get_rng_state()."""

    class Asked(Exception):
        pass

    with mock.patch.object(torch.cuda.random, "_lazy_init", side_effect=Asked):
        try:
            torch.cuda.get_rng_state()
        except Asked:
            return True
    return False


def trace_and_hold(hold):
    seen = []

    def fn(x):
        # Metadata are collected first
        hold()
        seen.append(sets_rng_state())
        return x.sin()

    aot_function(fn, lambda gm, _: make_boxed_func(gm.forward))(torch.randn(3))
    return seen[0]


def functionalize_and_hold(hold):
    seen = []

    def fn(x):
        hold()
        seen.extend([gets_rng_state(), sets_rng_state()])
        return (x,), (None,)

    state = (torch.tensor(1), torch.tensor(0))
    with (
        mock.patch.object(
            CUDARngStateHelper, "get_torch_state_as_tuple", return_value=state
        ),
        PhiloxStateTracker(),
    ):
        traced, args, _ = create_functionalized_rng_ops_wrapper(
            fn, [torch.randn(3)], [None], trace_joint=False
        )
        with mock.patch.object(PhiloxStateTracker, "set_state_from_tensor"):
            traced(*args)
    return seen


class TestAOTRngThreads(TestCase):
    def test_set_state_while_another_thread_traces(self):
        with thread_held_in(trace_and_hold):
            self.assertTrue(sets_rng_state())
        self.assertTrue(sets_rng_state())

    def test_traces_overlap(self):
        with thread_held_in(trace_and_hold) as first:
            with thread_held_in(trace_and_hold) as second:
                # Not in the order in which they began
                first.release()
                self.assertFalse(first.result())
            self.assertFalse(second.result())
        self.assertTrue(sets_rng_state())

    def test_set_state_in_a_trace(self):
        self.assertFalse(run_on_thread(lambda: trace_and_hold(lambda: None)))
        self.assertTrue(sets_rng_state())

    def test_functionalized_rng_ops(self):
        with thread_held_in(functionalize_and_hold) as thread:
            self.assertTrue(gets_rng_state())
            self.assertTrue(sets_rng_state())
        self.assertEqual(thread.result(), [False, False])
        self.assertTrue(gets_rng_state())

    def test_offsets_belong_to_the_trace(self):
        def track(seed, hold=lambda: None):
            with PhiloxStateTracker():
                PhiloxStateTracker.record_state(
                    torch.tensor(seed), torch.tensor(0), "forward"
                )
                PhiloxStateTracker.advance_offset(seed)
                hold()
                return [
                    *map(int, PhiloxStateTracker.get_state_as_tuple()),
                    int(PhiloxStateTracker.get_updated_fwd_offset()),
                ]

        with thread_held_in(lambda hold: track(4, hold)) as thread:
            self.assertEqual(track(8), [8, 8, 8])
        self.assertEqual(thread.result(), [4, 4, 4])


if __name__ == "__main__":
    run_tests()
