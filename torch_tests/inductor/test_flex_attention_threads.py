# Owner(s): ["module: flex attention"]

import functools
import os
import sys

import torch
import torch._dynamo
from torch._inductor.test_case import run_tests, TestCase
from torch.fx import symbolic_trace
from torch.fx._symbolic_trace import is_fx_tracing
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.nn.functional import scaled_dot_product_attention
from torch.testing import assert_close
from torch.testing._internal.common_device_type import (
    instantiate_device_type_tests,
    onlyCUDA,
)


# Make the helper files in test/ importable
pytorch_test_dir = os.path.dirname(os.path.dirname(os.path.realpath(__file__)))
sys.path.append(pytorch_test_dir)
from concurrency_utils import run_on_threads, thread_held_in


NUM_THREADS = 3


def causal(b, h, q_idx, kv_idx):
    return q_idx >= kv_idx


def make_qkv(device, seed, length=128, requires_grad=False):
    generator = torch.Generator(device).manual_seed(seed)
    # [B, H, S, D]
    return [
        torch.randn(
            1, 2, length, 16, device=device, generator=generator
        ).requires_grad_(requires_grad)
        for _ in range(3)
    ]


def compile_flex_attention(device, through=None):
    """A compiled causal flex_attention(q, k, v); its query goes ``through`` first."""

    # A code object of its own: the threads share no entry of Dynamo's cache
    def attention(q, k, v, block_mask):
        if through is not None:
            q = through(q)
        return flex_attention(q, k, v, block_mask=block_mask)

    attention.__code__ = attention.__code__.replace()
    compiled = torch.compile(attention)

    def run(q, k, v):
        length = q.shape[-2]
        block_mask = create_block_mask(causal, None, None, length, length, device)
        return compiled(q, k, v, block_mask)

    return run


class TestFlexAttentionThreads(TestCase):
    def setUp(self):
        super().setUp()
        torch._dynamo.reset()

    def check(self, attention, device, seed, length=128, backward=False):
        q, k, v = make_qkv(device, seed, length, requires_grad=backward)
        out = attention(q, k, v)
        want = scaled_dot_product_attention(q, k, v, is_causal=True)
        tolerance = {"atol": 2e-2, "rtol": 2e-2} if out.is_cuda else {}
        # self.assertEqual reads its tolerances from the test's own thread
        assert_close(out, want, **tolerance)
        if backward:
            grads = torch.autograd.grad(out.square().sum(), (q, k, v))
            want_grads = torch.autograd.grad(want.square().sum(), (q, k, v))
            assert_close(grads, want_grads, **tolerance)

    def test_three_threads_compile_at_once(self, device):
        def worker(seed):
            attention = compile_flex_attention(device)
            for length in (128, 256, 384):
                self.check(attention, device, seed, length)

        run_on_threads(*(functools.partial(worker, i) for i in range(NUM_THREADS)))

    @onlyCUDA
    def test_three_threads_compile_forward_and_backward_at_once(self, device):
        def worker(seed):
            attention = compile_flex_attention(device)
            for length in (128, 256, 384):
                self.check(attention, device, seed, length, backward=True)

        run_on_threads(*(functools.partial(worker, i) for i in range(NUM_THREADS)))

    def test_calls_while_another_thread_is_in_its_trace(self, device):
        # The fake implementation of an operator runs inside of the trace that
        # AOTAutograd makes of the graph with flex_attention in it.
        with torch.library._scoped_library("test_flex_threads", "FRAGMENT") as lib:
            lib.define("through(Tensor x) -> Tensor")
            lib.impl("through", torch.clone, "CompositeExplicitAutograd")
            hold_in_trace = None

            def through_fake(x):
                if is_fx_tracing():
                    hold_in_trace()
                return torch.empty_like(x)

            torch.library.register_fake("test_flex_threads::through", lib=lib)(
                through_fake
            )
            others = [compile_flex_attention(device) for _ in range(NUM_THREADS - 1)]
            for seed, attention in enumerate(others):
                self.check(attention, device, seed)

            def first(hold):
                nonlocal hold_in_trace
                hold_in_trace = hold
                op = torch.ops.test_flex_threads.through
                self.check(compile_flex_attention(device, op), device, NUM_THREADS)

            with thread_held_in(first):
                run_on_threads(
                    *(
                        functools.partial(self.check, attention, device, seed)
                        for seed, attention in enumerate(others)
                    )
                )

    def test_three_threads_call_while_another_traces(self, device):
        def trace(hold):
            def fn(x):
                hold()
                return x + 1

            return symbolic_trace(fn)

        attentions = [compile_flex_attention(device) for _ in range(NUM_THREADS)]
        for seed, attention in enumerate(attentions):
            self.check(attention, device, seed)
        # What they have compiled goes on to fit, math.log that the trace wraps included
        with (
            thread_held_in(trace) as thread,
            torch.compiler.set_stance("fail_on_recompile"),
        ):
            run_on_threads(
                *(
                    functools.partial(self.check, attention, device, seed)
                    for seed, attention in enumerate(attentions)
                )
            )
        x = torch.randn(3, device=device)
        self.assertEqual(thread.result()(x), x + 1)


instantiate_device_type_tests(
    TestFlexAttentionThreads, globals(), only_for=("cpu", "cuda")
)


if __name__ == "__main__":
    run_tests()
