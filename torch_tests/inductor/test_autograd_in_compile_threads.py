# Owner(s): ["module: flex attention"]

import faulthandler
import functools
import importlib.util
import os
import subprocess
import sys
import tempfile
import threading
from unittest import mock, skipIf

import torch
import torch._dynamo
import torch.utils._pytree as pytree
from torch._dynamo.convert_frame import compile_lock
from torch._higher_order_ops.scan import scan
from torch.autograd import Variable
from torch.fx import symbolic_trace
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.nn.functional import scaled_dot_product_attention
from torch.testing import assert_close
from torch.testing._internal.common_device_type import (
    deviceCountAtLeast,
    instantiate_device_type_tests,
    onlyCPU,
    onlyCUDA,
)
from torch.testing._internal.common_utils import parametrize, run_tests, TestCase
from torch.utils.checkpoint import checkpoint


# Make the helper files in test/ importable
pytorch_test_dir = os.path.dirname(os.path.dirname(os.path.realpath(__file__)))
sys.path.append(pytorch_test_dir)
from concurrency_utils import run_on_threads, WorkerThread


HAS_TRANSFORMERS = importlib.util.find_spec("transformers") is not None

# For a step that would otherwise wait for ever
STEP_TIMEOUT = 30.0
# For a child process, after which it dumps its stacks and exits
CHILD_TIMEOUT = 300.0


def copy_code(fn):
    """fn with a code object of its own, and so with none of Dynamo's cache."""
    copy = functools.update_wrapper(
        type(fn)(
            fn.__code__.replace(),
            fn.__globals__,
            fn.__name__,
            fn.__defaults__,
            fn.__closure__,
        ),
        fn,
    )
    copy.__kwdefaults__ = fn.__kwdefaults__
    return copy


class EngineCalls:
    """Stands for the engine, and notes for each launch what matters to a deadlock."""

    def __init__(self):
        self.engine = Variable._execution_engine
        self.under_compile_lock = []
        self.all = []

    def __getattr__(self, name):
        return getattr(self.engine, name)

    def run_backward(self, *args, **kwargs):
        multithreading = torch.autograd.is_multithreading_enabled()
        self.all.append(multithreading)
        if compile_lock._is_owned():
            self.under_compile_lock.append(multithreading)
        return self.engine.run_backward(*args, **kwargs)


def score_mod(score, b, h, q_idx, kv_idx):
    return score * 2


def compile_flex_attention(device, backend):
    q, k, v = torch.randn(3, 1, 1, 128, 16, device=device).unbind()

    def attention(q, k, v):
        return flex_attention(q, k, v, score_mod=score_mod)

    # There is no backward to run on a CPU, but the graph of it is made
    with mock.patch("torch.nn.attention.flex_attention._validate_device"):
        torch.compile(attention, backend=backend)(q.requires_grad_(), k, v)


def compile_scan(device, backend):
    def fn(init, xs):
        return scan(lambda carry, x: (carry + x.sin(), carry * x), init, xs)[1]

    init = torch.randn(4, device=device, requires_grad=True)
    xs = torch.randn(3, 4, device=device)
    torch.compile(fn, backend=backend, fullgraph=True)(init, xs)


def compile_func_grad(device, backend):
    fn = torch.func.grad(lambda x: x.sin().sum())
    torch.compile(fn, backend=backend, fullgraph=True)(torch.randn(4, device=device))


def compile_jacrev(device, backend):
    fn = torch.func.jacrev(torch.sin)
    torch.compile(fn, backend=backend, fullgraph=True)(torch.randn(4, device=device))


def compile_autograd_grad(device, backend):
    def fn(x):
        return torch.autograd.grad(x.sin().sum(), x)[0]

    x = torch.randn(4, device=device, requires_grad=True)
    with torch._dynamo.config.patch(trace_autograd_ops=True):
        torch.compile(fn, backend=backend, fullgraph=True)(x)


def compile_with_backend_that_launches(device, backend):
    def launches(gm, inputs):
        x = torch.randn(4, device=device, requires_grad=True)
        x.sin().sum().backward()
        return gm

    torch.compile(torch.sin, backend=launches)(torch.randn(4, device=device))


COMPILES = {
    "flex_attention": compile_flex_attention,
    "scan": compile_scan,
    "func_grad": compile_func_grad,
    "jacrev": compile_jacrev,
    "backend": compile_with_backend_that_launches,
}
if hasattr(torch._dynamo.config, "trace_autograd_ops"):
    COMPILES["autograd_grad"] = compile_autograd_grad


def grad_of_sin(x):
    with torch.enable_grad():
        x = x.detach().requires_grad_()
        return torch.autograd.grad(x.sin().sum(), x)[0]


class TestBackwardWhileTracing(TestCase):
    def setUp(self):
        super().setUp()
        torch._dynamo.reset()

    @parametrize("backend", ["eager", "aot_eager"])
    @parametrize("name", list(COMPILES))
    def test_under_compile_lock(self, device, name, backend):
        # A thread that holds the lock must not wait for one of the engine's
        calls = EngineCalls()
        with mock.patch.object(Variable, "_execution_engine", calls):
            COMPILES[name](device, backend)
        self.assertNotEqual(calls.under_compile_lock, [])
        self.assertEqual(set(calls.under_compile_lock), {False})
        self.assertTrue(torch.autograd.is_multithreading_enabled())

    @parametrize("tracing_mode", ["real", "fake", "symbolic"])
    def test_in_make_fx(self, device, tracing_mode):
        calls = EngineCalls()
        x = torch.randn(4, device=device)
        with mock.patch.object(Variable, "_execution_engine", calls):
            gm = make_fx(grad_of_sin, tracing_mode=tracing_mode)(x)
        self.assertEqual(calls.all, [False])
        self.assertEqual(gm(x), x.cos())

    def test_in_symbolic_trace(self, device):
        calls = EngineCalls()
        x = torch.randn(4, device=device)
        with mock.patch.object(Variable, "_execution_engine", calls):
            gm = symbolic_trace(lambda y: y + grad_of_sin(x))
        self.assertEqual(calls.all, [False])
        self.assertEqual(gm(x), x + x.cos())

    def test_score_mod(self, device):
        # What the backward itself sees while flex_attention traces its joint graph
        seen = []

        def backward(ctx, grad):
            seen.append(
                (threading.get_ident(), torch.autograd.is_multithreading_enabled())
            )
            return grad * 2

        with torch.library._scoped_library("test_autograd_in_compile", "DEF") as lib:
            lib.define("double(Tensor x) -> Tensor")
            lib.impl("double", lambda x: x * 2, "CompositeExplicitAutograd")
            name = "test_autograd_in_compile::double"
            torch.library.register_fake(name, torch.empty_like, lib=lib)
            torch.library.register_autograd(name, backward, lib=lib)
            op = torch.ops.test_autograd_in_compile.double

            def fn(score, b, h, q_idx, kv_idx):
                return op(score)

            q, k, v = torch.randn(3, 1, 1, 128, 16, device=device).unbind()
            with mock.patch("torch.nn.attention.flex_attention._validate_device"):
                torch.compile(
                    lambda q, k, v: flex_attention(q, k, v, score_mod=fn),
                    backend="eager",
                )(q.requires_grad_(), k, v)
        self.assertNotEqual(seen, [])
        self.assertEqual(set(seen), {(threading.get_ident(), False)})

    def test_disabled_by_the_caller_stays_disabled(self, device):
        x = torch.randn(4, device=device)
        with torch.autograd.set_multithreading_enabled(False):
            make_fx(grad_of_sin)(x)
            self.assertFalse(torch.autograd.is_multithreading_enabled())

    def test_error_restores_multithreading(self, device):
        def fn(x):
            x.register_hook(lambda grad: 1 / 0)
            return torch.autograd.grad((x * 2).sum(), x)[0]

        x = torch.randn(4, device=device, requires_grad=True)
        calls = EngineCalls()
        with (
            mock.patch.object(Variable, "_execution_engine", calls),
            self.assertRaises(ZeroDivisionError),
        ):
            make_fx(fn)(x)
        self.assertEqual(calls.all, [False])
        self.assertTrue(torch.autograd.is_multithreading_enabled())

    def test_outside_of_traces(self, device):
        # Another thread's compile is none of this one's business
        calls = EngineCalls()
        x = torch.randn(4, device=device)

        def backend(gm, inputs):
            self.assertTrue(compile_lock._is_owned())
            run_on_threads(functools.partial(grad_of_sin, x))
            return gm

        with mock.patch.object(Variable, "_execution_engine", calls):
            torch.compile(torch.sin, backend=backend)(x)
        self.assertEqual(calls.all, [True])
        self.assertEqual(calls.under_compile_lock, [])


# The rest runs in child processes: a deadlock leaves the engine's threads useless.
# A child does what one of the functions below says, see run_child.


class PythonDevice(torch.Tensor):
    """A tensor of a device that is written in Python and computes on the CPU."""

    @staticmethod
    def __new__(cls, elem):
        return torch.Tensor._make_wrapper_subclass(
            cls, elem.size(), dtype=elem.dtype, device="python_device:0"
        )

    def __init__(self, elem):
        self.elem = elem

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        args, kwargs = pytree.tree_map_only(cls, lambda t: t.elem, (args, kwargs or {}))
        if "device" in kwargs:
            kwargs["device"] = "cpu"
        return pytree.tree_map_only(torch.Tensor, cls, func(*args, **kwargs))


class CompileInBackward(torch.autograd.Function):
    """What a lazy compile of a backward does on its thread, at a known moment."""

    @staticmethod
    def forward(ctx, x, about_to_compile):
        ctx.about_to_compile = about_to_compile
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        ctx.about_to_compile()
        # Waits for compile_lock
        torch.compile(lambda x: x + 1, backend="eager")(torch.ones(3))
        return grad * 2, None


def check_compile_while_engine_compiles(to_device, launch_under_lock):
    """
    One thread compiles and launches a backward in the middle of it. The thread of
    the engine that would run it waits for compile_lock, in another backward.
    """
    locked = threading.Event()
    engine_is_busy = threading.Event()

    def wait(event):
        if not event.wait(STEP_TIMEOUT):
            raise TimeoutError

    def compile():
        def while_compiling():
            if not locked.is_set():
                locked.set()
                wait(engine_is_busy)

        return launch_under_lock(while_compiling)

    def backward():
        wait(locked)
        x = to_device(torch.ones(3)).requires_grad_()
        out = CompileInBackward.apply(x, engine_is_busy.set)
        out.backward(to_device(torch.ones(3)))

    run_on_threads(compile, backward, timeout=2 * STEP_TIMEOUT)


def child_python_device():
    from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

    # Before the first backward: the engine then starts a thread for the device
    _setup_privateuseone_for_python_backend("python_device")

    def launch_under_lock(while_compiling):
        def backend(gm, inputs):
            while_compiling()
            x = PythonDevice(torch.ones(3)).requires_grad_()
            (x * 2).backward(PythonDevice(torch.ones(3)))
            return gm

        torch.compile(torch.sin, backend=backend)(torch.ones(3))

    check_compile_while_engine_compiles(PythonDevice, launch_under_lock)


def child_flex_attention_deadlock(device):
    # score_mod is called first in the compile, and then for its joint graph, which
    # is what is launched
    lib = torch.library.Library("test_autograd_in_compile_threads", "DEF")
    lib.define("hold(Tensor x) -> Tensor")
    lib.impl("hold", torch.clone, "CompositeExplicitAutograd")
    while_compiling = None

    def hold_fake(x):
        if compile_lock._is_owned():
            while_compiling()
        return torch.empty_like(x)

    name = "test_autograd_in_compile_threads::hold"
    torch.library.register_fake(name, hold_fake, lib=lib)
    torch.library.register_autograd(name, lambda ctx, grad: grad, lib=lib)
    op = torch.ops.test_autograd_in_compile_threads.hold

    def launch_under_lock(hold):
        nonlocal while_compiling
        while_compiling = hold

        def fn(score, b, h, q_idx, kv_idx):
            return op(score)

        q, k, v = torch.randn(3, 1, 1, 128, 16, device=device).unbind()
        torch.compile(
            lambda q, k, v: flex_attention(q, k, v, score_mod=fn), backend="eager"
        )(q.requires_grad_(), k, v)

    check_compile_while_engine_compiles(
        functools.partial(torch.Tensor.to, device=device), launch_under_lock
    )


def causal(b, h, q_idx, kv_idx):
    return q_idx >= kv_idx


class Attention(torch.nn.Module):
    """Causal self-attention; ``compiled``, with flex_attention in a compiled region."""

    def __init__(self, dim=64, num_heads=2, compiled=False):
        super().__init__()
        self.num_heads = num_heads
        self.qkv = torch.nn.Linear(dim, 3 * dim)
        self.out = torch.nn.Linear(dim, dim)
        self.compiled = compiled

        def attention(q, k, v, block_mask):
            return flex_attention(q, k, v, block_mask=block_mask)

        self.attention = torch.compile(copy_code(attention)) if compiled else None

    def forward(self, x):
        # [B, S, 3 * D] -> 3 x [B, H, S, D / H]
        q, k, v = (
            t.unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
            for t in self.qkv(x).chunk(3, dim=-1)
        )
        if self.compiled:
            length = x.shape[-2]
            block_mask = create_block_mask(causal, None, None, length, length, x.device)
            out = self.attention(q, k, v, block_mask)
        else:
            out = scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(out.transpose(1, 2).flatten(-2))


def train(seed, device, num_steps=3, use_checkpoint=False):
    """A few steps of a compiled model, each compared with the eager one."""
    torch.manual_seed(0)  # of this thread's work the same in each
    if torch.device(device).type == "cuda":
        torch.cuda.set_device(device)
    eager = Attention().to(device)
    model = Attention(compiled=True).to(device)
    model.load_state_dict(eager.state_dict())
    generator = torch.Generator().manual_seed(seed)
    for step in range(num_steps):
        # Each step has another length
        x = torch.randn(2, 128 * (step + 1), 64, generator=generator).to(device)
        if use_checkpoint:
            loss = checkpoint(model, x, use_reentrant=False).square().mean()
        else:
            loss = model(x).square().mean()
        want = eager(x).square().mean()
        loss.backward()
        want.backward()
        assert_close(loss, want, atol=2e-3, rtol=2e-2)
        for p, want_p in zip(model.parameters(), eager.parameters()):
            assert_close(p.grad, want_p.grad, atol=2e-3, rtol=2e-2)
            p.grad = want_p.grad = None


def child_threads(device, num_devices, threads_per_device, use_checkpoint):
    devices = [
        device if num_devices == 1 else f"cuda:{i}" for i in range(num_devices)
    ] * threads_per_device
    run_on_threads(
        *(
            functools.partial(train, seed, d, use_checkpoint=use_checkpoint)
            for seed, d in enumerate(devices)
        ),
        timeout=CHILD_TIMEOUT,
    )


def check_data_parallel(make_parallel):
    torch.manual_seed(0)
    eager = torch.nn.Sequential(
        torch.nn.Linear(64, 64), torch.nn.GELU(), torch.nn.Linear(64, 8)
    ).cuda()
    model = torch.nn.Sequential(
        torch.nn.Linear(64, 64), torch.nn.GELU(), torch.nn.Linear(64, 8)
    ).cuda()
    model.load_state_dict(eager.state_dict())
    parallel = make_parallel(model)
    for batch in (8, 8, 12):
        x = torch.randn(batch, 64, device="cuda")
        out = parallel(x)
        want = eager(x)
        assert_close(out, want, atol=2e-3, rtol=2e-2)
        out.square().sum().backward()
        want.square().sum().backward()
        for p, want_p in zip(model.parameters(), eager.parameters()):
            assert_close(p.grad, want_p.grad, atol=2e-2, rtol=2e-2)
            p.grad = want_p.grad = None


def child_compiled_data_parallel():
    check_data_parallel(
        lambda model: torch.compile(torch.nn.DataParallel(model, device_ids=[0, 1]))
    )


def child_data_parallel_of_compiled_in_place():
    def make_parallel(model):
        model.compile()
        return torch.nn.DataParallel(model, device_ids=[0, 1])

    check_data_parallel(make_parallel)


def child_qwen3(device, num_threads, attn_implementation):
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        vocab_size=128,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=1024,
        use_cache=False,
        attn_implementation=attn_implementation,
    )

    def run(seed):
        model = Qwen3ForCausalLM(config).to(device).train()
        model.gradient_checkpointing_enable({"use_reentrant": False})
        generator = torch.Generator().manual_seed(seed)
        for step in range(2):
            tokens = torch.randint(
                config.vocab_size, (1, 128 * (step + 1)), generator=generator
            ).to(device)
            loss = model(input_ids=tokens, labels=tokens).loss
            loss.backward()
            assert torch.isfinite(loss), loss
            for name, p in model.named_parameters():
                assert p.grad is not None, name
                assert torch.isfinite(p.grad).all(), name
                p.grad = None

    run_on_threads(
        *(functools.partial(run, seed) for seed in range(num_threads)),
        timeout=CHILD_TIMEOUT,
    )


def run_child(name, *args):
    """
    Run ``child_<name>(*args)`` in a process of its own, with fresh caches of the
    compilers. When it hangs, the error has the stacks of its threads.
    """
    with tempfile.TemporaryDirectory() as cache_dir:
        result = subprocess.run(
            [sys.executable, os.path.realpath(__file__), "--child", name]
            + [repr(arg) for arg in args],
            env={
                **os.environ,
                "TORCHINDUCTOR_CACHE_DIR": os.path.join(cache_dir, "inductor"),
                "TRITON_CACHE_DIR": os.path.join(cache_dir, "triton"),
            },
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=CHILD_TIMEOUT + 60,
        )
    if result.returncode != 0:
        raise AssertionError(
            f"child process exited with {result.returncode}:\n{result.stdout[-20000:]}"
        )


def main_of_child(name, *args):
    import ast

    faulthandler.dump_traceback_later(CHILD_TIMEOUT, exit=True)
    fn = functools.partial(
        globals()[f"child_{name}"], *(ast.literal_eval(arg) for arg in args)
    )
    thread = WorkerThread(fn)
    thread.start()
    try:
        thread.result(CHILD_TIMEOUT)
    except BaseException:
        import traceback

        traceback.print_exc()
        sys.stderr.flush()
        # The threads that hang would keep the process alive
        os._exit(1)
    os._exit(0)


class TestAutogradInCompileThreads(TestCase):
    @onlyCPU
    def test_no_deadlock_with_python_device(self, device):
        run_child("python_device")

    @onlyCUDA
    def test_no_deadlock_with_flex_attention(self, device):
        run_child("flex_attention_deadlock", device)

    @onlyCUDA
    @parametrize("use_checkpoint", [False, True])
    def test_three_threads_on_one_device(self, device, use_checkpoint):
        run_child("threads", device, 1, 3, use_checkpoint)

    @onlyCUDA
    @deviceCountAtLeast(2)
    @parametrize("threads_per_device", [1, 3])
    def test_threads_on_several_devices(self, devices, threads_per_device):
        run_child("threads", devices[0], len(devices), threads_per_device, False)

    @onlyCUDA
    @deviceCountAtLeast(2)
    def test_compiled_data_parallel(self, devices):
        run_child("compiled_data_parallel")

    @onlyCUDA
    @deviceCountAtLeast(2)
    def test_data_parallel_of_module_compiled_in_place(self, devices):
        run_child("data_parallel_of_compiled_in_place")

    @onlyCUDA
    @skipIf(not HAS_TRANSFORMERS, "needs transformers")
    def test_qwen3_with_gradient_checkpointing(self, device):
        run_child("qwen3", device, 3, "flex_attention")


instantiate_device_type_tests(
    TestBackwardWhileTracing, globals(), only_for=("cpu", "cuda")
)
instantiate_device_type_tests(
    TestAutogradInCompileThreads, globals(), only_for=("cpu", "cuda")
)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        main_of_child(*sys.argv[2:])
    run_tests()
