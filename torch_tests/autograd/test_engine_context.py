# Owner(s): ["module: autograd"]

import copy
import functools
import inspect
import io
import os
import pickle
import sys
import threading
import warnings
from collections import OrderedDict
from contextvars import ContextVar, copy_context

import torch
import torch._dynamo
from torch.autograd import Variable
from torch.autograd.graph import (
    register_multi_grad_hook,
    save_on_cpu,
    saved_tensors_hooks,
)
from torch.testing._internal.common_device_type import (
    deviceCountAtLeast,
    instantiate_device_type_tests,
    onlyCUDA,
)
from torch.testing._internal.common_utils import (
    instantiate_parametrized_tests,
    parametrize,
    run_tests,
    TestCase,
)
from torch.utils.checkpoint import (
    checkpoint,
    CheckpointPolicy,
    create_selective_checkpoint_contexts,
)


# Make the helper files in test/ importable
pytorch_test_dir = os.path.dirname(os.path.dirname(os.path.realpath(__file__)))
sys.path.append(pytorch_test_dir)
from concurrency_utils import (
    Call,
    call_in_nested_backward,
    MAX_DEPTH,
    run_on_threads,
    TIMEOUT,
)


var: ContextVar[str] = ContextVar("var", default="default")


class CallBoxed(Call):
    boxed_grads_call = True

    @staticmethod
    def backward(ctx, grads):
        ctx.fn()
        return grads[0], None


class Saving(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return grad * x


def backward_on_engine_thread(out, **kwargs):
    """``out.sum().backward()``, launched here and run by a thread of the engine."""
    loss = out.sum()

    def backward():
        torch.autograd.backward(loss, **kwargs)

    if out.device.type == "cpu":
        call_in_nested_backward(backward, MAX_DEPTH)
    else:
        backward()


class CallableHook:
    __name__ = 5

    def __call__(self, grad: torch.Tensor) -> None:
        pass

    def method(self, grad: torch.Tensor) -> None:
        pass


class HasAnyAttribute:
    def __getattr__(self, name):
        return HasAnyAttribute()

    def __call__(self, *args):
        return None


class Recorder:
    """Notes what code sees that autograd calls."""

    def __init__(self):
        self.seen = []

    def __call__(self, *args):
        self.seen.append((threading.get_ident(), var.get()))

    @property
    def threads(self):
        return {thread for thread, _ in self.seen}

    @property
    def values(self):
        return [value for _, value in self.seen]


def with_function(x, record):
    return Call.apply(x, record)


def with_boxed_function(x, record):
    return CallBoxed.apply(x, record)


def with_tensor_hook(x, record):
    out = x * 2
    out.register_hook(record)
    return out


def with_leaf_hook(x, record):
    x.register_hook(record)
    return x * 2


def with_post_accumulate_grad_hook(x, record):
    x.register_post_accumulate_grad_hook(record)
    return x * 2


def with_multi_grad_hook(x, record):
    out = x * 2
    register_multi_grad_hook((out, x), record)
    return out


def with_node_hook(x, record):
    out = x * 2
    out.grad_fn.register_hook(record)
    return out


def with_node_prehook(x, record):
    out = x * 2
    out.grad_fn.register_prehook(record)
    return out


def with_function_node_hook(x, record):
    out = Saving.apply(x)
    out.grad_fn.register_hook(record)
    return out


def with_function_node_prehook(x, record):
    out = Saving.apply(x)
    out.grad_fn.register_prehook(record)
    return out


def with_module_hook(x, record):
    module = torch.nn.Tanh()
    module.register_full_backward_hook(record)
    return module(x)


def with_unpack_hook(x, record):
    def unpack(packed):
        record()
        return packed

    with saved_tensors_hooks(lambda t: t.detach(), unpack):
        return x.exp()


def with_unpack_hook_of_function(x, record):
    def unpack(packed):
        record()
        return packed

    with saved_tensors_hooks(lambda t: t.detach(), unpack):
        return Saving.apply(x)


def with_callback(x, record):
    def queue(*args):
        Variable._execution_engine.queue_callback(record)

    out = x * 2
    out.register_hook(queue)
    return out


def with_checkpoint(x, record, *, use_reentrant):
    first = True

    def fn(x):
        nonlocal first
        if not first:
            record()
        first = False
        return x.exp()

    return checkpoint(fn, x, use_reentrant=use_reentrant)


CALLS = {
    "function": with_function,
    "boxed_function": with_boxed_function,
    "tensor_hook": with_tensor_hook,
    "leaf_hook": with_leaf_hook,
    "post_accumulate_grad_hook": with_post_accumulate_grad_hook,
    "multi_grad_hook": with_multi_grad_hook,
    "node_hook": with_node_hook,
    "node_prehook": with_node_prehook,
    "function_node_hook": with_function_node_hook,
    "function_node_prehook": with_function_node_prehook,
    "module_hook": with_module_hook,
    "unpack_hook": with_unpack_hook,
    "unpack_hook_of_function": with_unpack_hook_of_function,
    "callback": with_callback,
    "checkpoint": functools.partial(with_checkpoint, use_reentrant=False),
    "reentrant_checkpoint": functools.partial(with_checkpoint, use_reentrant=True),
}


class TestEngineContext(TestCase):
    """What is called on a thread of the engine runs in the launching context."""

    def setUp(self):
        super().setUp()
        torch._dynamo.reset()
        token = var.set("launching")
        self.addCleanup(var.reset, token)

    def leaf(self, device):
        return torch.randn(4, device=device, requires_grad=True)

    def check(self, record, device):
        self.assertNotEqual(record.seen, [])
        self.assertEqual(set(record.values), {"launching"})
        self.assertNotIn(threading.get_ident(), record.threads)

    @parametrize("call", list(CALLS))
    def test_context(self, device, call):
        record = Recorder()
        out = CALLS[call](self.leaf(device), record)
        backward_on_engine_thread(out)
        self.assertNotEqual(record.seen, [])
        self.assertEqual(set(record.values), {"launching"})
        # The engine's callbacks run on the thread that finishes last
        if call != "callback" or torch.device(device).type == "cpu":
            self.assertNotIn(threading.get_ident(), record.threads)

    def test_pack_hook(self, device):
        # The hooks are those of the launching thread: they see what the nodes
        # save for a double backward.
        record = Recorder()
        x = self.leaf(device)
        loss = x.exp().sum()

        def pack(tensor):
            record()
            return tensor.detach()

        def backward():
            with saved_tensors_hooks(pack, lambda packed: packed):
                torch.autograd.backward(loss, create_graph=True)

        if torch.device(device).type == "cpu":
            call_in_nested_backward(backward, MAX_DEPTH)
        else:
            backward()
        self.check(record, device)

    def test_is_a_copy(self, device):
        seen = []

        def hook(grad):
            seen.append(var.get())
            var.set("hook")

        out = self.leaf(device) * 2
        out.register_hook(hook)
        backward_on_engine_thread(out)
        self.assertEqual(seen, ["launching"])
        self.assertEqual(var.get(), "launching")

    def test_hooks_of_one_launch_share_it(self, device):
        seen = []
        token = None

        def prehook(grads):
            nonlocal token
            seen.append(var.get())
            token = var.set("prehook")

        def hook(grad_inputs, grad_outputs):
            seen.append(var.get())
            var.reset(token)
            seen.append(var.get())

        out = self.leaf(device) * 2
        out.grad_fn.register_prehook(prehook)
        out.grad_fn.register_hook(hook)
        backward_on_engine_thread(out, retain_graph=True)
        self.assertEqual(seen, ["launching", "prehook", "launching"])
        seen.clear()
        backward_on_engine_thread(out)
        self.assertEqual(seen, ["launching", "prehook", "launching"])

    def test_own_override_holds_for_what_it_calls(self, device):
        # A saved tensor is unpacked in the context of the code that asks for it
        record = Recorder()

        class Unpack(torch.autograd.Function):
            @staticmethod
            def forward(ctx, x):
                ctx.save_for_backward(x)
                return x.clone()

            @staticmethod
            def backward(ctx, grad):
                record()
                var.set("backward")
                (x,) = ctx.saved_tensors
                return grad * x

        def unpack(packed):
            record()
            return packed

        with saved_tensors_hooks(lambda t: t.detach(), unpack):
            out = Unpack.apply(self.leaf(device))
        backward_on_engine_thread(out)
        self.assertEqual(record.values, ["launching", "backward"])

    def test_nested_launch(self, device):
        record = Recorder()

        def nested():
            record()
            var.set("nested")
            with torch.enable_grad():
                loss = Call.apply(self.leaf(device), record).sum()
            loss.backward()

        out = Call.apply(self.leaf(device), nested)
        # Runs after the nested launch, for the same node
        out.grad_fn.register_hook(record)
        before = Call.apply(out, record)
        backward_on_engine_thread(before)
        self.assertEqual(record.values, ["launching", "launching", "nested", "nested"])
        self.assertEqual(var.get(), "launching")

    def test_nested_launch_in_another_context(self, device):
        record = Recorder()

        def nested():
            with torch.enable_grad():
                loss = Call.apply(self.leaf(device), record).sum()
            context = copy_context()
            context.run(var.set, "nested")
            context.run(loss.backward)
            record()

        out = Call.apply(self.leaf(device), nested)
        out.grad_fn.register_hook(record)
        backward_on_engine_thread(out)
        self.assertEqual(record.values, ["nested", "launching", "launching"])

    def test_launches_of_several_threads(self, device):
        # The threads share the threads of the engine
        def launch(name):
            var.set(name)
            for _ in range(20):
                record = Recorder()
                x = self.leaf(device)
                out = x
                for use_reentrant in (True, False):
                    out = with_checkpoint(out, record, use_reentrant=use_reentrant)
                    out = Call.apply(out, record)
                    out.register_hook(record)
                backward_on_engine_thread(out)
                # Not self.assertEqual, which is for the test's own thread
                assert set(record.values) == {name}, record.values

        run_on_threads(*(functools.partial(launch, f"thread {i}") for i in range(4)))

    def test_error_and_after(self, device):
        record = Recorder()

        def fail(grad):
            record()
            raise ValueError("hook")

        x = self.leaf(device)
        out = x * 2
        handle = out.register_hook(fail)
        # SystemError: the engine loses the exceptions of its pool's threads
        with self.assertRaises((ValueError, SystemError)):
            backward_on_engine_thread(out, retain_graph=True)
        self.assertEqual(record.values, ["launching"])
        handle.remove()
        record = Recorder()
        out.register_hook(record)
        token = var.set("later")
        try:
            backward_on_engine_thread(out)
        finally:
            var.reset(token)
        self.assertEqual(record.values, ["later"])

    @parametrize("use_reentrant", [False, True])
    def test_dynamo_config_in_recomputation(self, device, use_reentrant):
        # More shapes than the default recompile_limit
        num_shapes = 10
        compiled = torch.compile(
            lambda x: x.sin() * 2, backend="eager", fullgraph=True, dynamic=False
        )

        def fn(x, length):
            # Only the recomputation compiles
            if recomputing:
                compiled(torch.ones(length))
            return x.exp()

        with torch._dynamo.config.patch(recompile_limit=num_shapes):
            for length in range(2, 2 + num_shapes):
                recomputing = False
                out = checkpoint(
                    fn, self.leaf(device), length, use_reentrant=use_reentrant
                )
                recomputing = True
                backward_on_engine_thread(out)

    def test_dynamo_config_in_compiled_backward(self, device):
        seen = []

        def backend(gm, inputs):
            from functorch.compile import make_boxed_func
            from torch._dynamo.backends.common import aot_autograd

            def bw_compiler(gm, inputs):
                seen.append(torch._dynamo.config.recompile_limit)
                return make_boxed_func(gm.forward)

            return aot_autograd(
                fw_compiler=lambda gm, _: make_boxed_func(gm.forward),
                bw_compiler=bw_compiler,
            )(gm, inputs)

        compiled = torch.compile(lambda x: x.sin(), backend=backend)
        with torch._dynamo.config.patch(recompile_limit=33):
            backward_on_engine_thread(compiled(self.leaf(device)))
        self.assertEqual(seen, [33])

    @onlyCUDA
    @deviceCountAtLeast(2)
    def test_compiled_backwards_of_one_launch_on_two_devices(self, devices):
        # Both are in their backward at the same time, in the same launch
        from functorch.compile import make_boxed_func
        from torch._dynamo.backends.common import aot_autograd

        barrier = threading.Barrier(2)
        record = Recorder()

        def bw_compiler(gm, inputs):
            def run(*args):
                record()
                barrier.wait(TIMEOUT)
                return gm(*args)

            return make_boxed_func(run)

        backend = aot_autograd(
            fw_compiler=lambda gm, _: make_boxed_func(gm.forward),
            bw_compiler=bw_compiler,
        )
        leaves = [self.leaf(device) for device in devices[:2]]
        outs = [torch.compile(lambda x: x.sin(), backend=backend)(x) for x in leaves]
        torch.autograd.backward([out.sum() for out in outs])
        self.assertEqual(record.values, ["launching", "launching"])
        for x in leaves:
            self.assertEqual(x.grad, x.cos())


class TestLaunchingThread(TestCase):
    """On the launching thread the engine calls code in the launching context."""

    def setUp(self):
        super().setUp()
        token = var.set("launching")
        self.addCleanup(var.reset, token)

    @parametrize("call", list(CALLS))
    def test_context_is_not_copied(self, call):
        seen = []

        def hook(*args):
            seen.append(var.get())
            var.set("hook")

        x = torch.randn(4, requires_grad=True)
        context = copy_context()
        context.run(CALLS[call](x, hook).sum().backward)
        self.assertEqual(seen, ["launching"])
        self.assertEqual(context[var], "hook")

    def test_nothing_is_left_behind(self):
        def fail(grad):
            raise ValueError("hook")

        before = dict(copy_context())
        x = torch.randn(4, requires_grad=True)
        call_in_nested_backward(lambda: None, 3)
        handle = x.register_hook(fail)
        with self.assertRaisesRegex(ValueError, "hook"):
            call_in_nested_backward((x * 2).sum().backward, 3)
        handle.remove()
        self.assertEqual(dict(copy_context()), before)
        self.assertFalse(torch._C._is_key_in_tls("context"))

    def test_call_outside_of_backward(self):
        record = Recorder()
        x = torch.randn(4, requires_grad=True)
        out = with_unpack_hook(x, record)
        self.assertEqual(out.grad_fn._saved_result, out)
        self.assertEqual(Call.apply(x, record).grad_fn.apply(x), (x, None))
        self.assertEqual(record.seen, [(threading.get_ident(), "launching")] * 2)

    def test_hook_name_in_errors(self):
        def changes_the_size(grad):
            return grad[:2]

        x = torch.randn(4, requires_grad=True)
        x.register_hook(changes_the_size)
        with self.assertRaisesRegex(RuntimeError, "hook 'changes_the_size'"):
            (x * 2).sum().backward()

    @parametrize("register", ["register_hook", "register_post_accumulate_grad_hook"])
    def test_registered_hook_looks_like_it(self, register):
        def function(grad, *, unused=None):
            """Does nothing"""

        function.tag = "before"
        owner = CallableHook()
        x = torch.randn(4, requires_grad=True)
        for hook in (function, owner, owner.method, functools.partial(function)):
            handle = getattr(x, register)(hook)
            hooks = handle.hooks_dict_ref()
            registered = hooks[handle.id]
            self.assertTrue(registered == hook)
            self.assertTrue(hook == registered)
            self.assertFalse(registered == CallableHook())
            self.assertTrue(hook in hooks.values())
            self.assertTrue(registered in {hook})
            self.assertEqual(repr(registered), repr(hook))
            self.assertEqual(registered.__doc__, hook.__doc__)
            self.assertEqual(registered.__module__, hook.__module__)
            self.assertEqual(inspect.signature(registered), inspect.signature(hook))
            for name in ("__name__", "__qualname__", "__self__", "__func__", "func"):
                self.assertTrue(
                    getattr(registered, name, None) == getattr(hook, name, None)
                )
            handle.remove()
        handle = getattr(x, register)(function)
        registered = handle.hooks_dict_ref()[handle.id]
        self.assertEqual(registered.tag, "before")
        function.tag = "after"
        self.assertEqual(registered.tag, "after")
        with self.assertRaisesRegex(AttributeError, "'function' object .* 'missing'"):
            registered.missing

    @parametrize("register", ["register_hook", "register_post_accumulate_grad_hook"])
    @parametrize("hook_class", [CallableHook, HasAnyAttribute])
    def test_hook_with_odd_attributes(self, register, hook_class):
        x = torch.randn(4, requires_grad=True)
        getattr(x, register)(hook_class())
        (x * 2).sum().backward()
        self.assertEqual(x.grad, torch.full((4,), 2.0))

    def test_top_saved_tensors_hooks_look_like_them(self):
        def pack(tensor):
            return tensor

        def unpack(packed):
            return packed

        with saved_tensors_hooks(pack, unpack):
            pack.tag = "pack"
            top = torch._C._autograd._top_saved_tensors_default_hooks(True)
            self.assertEqual(top[0].tag, "pack")
            self.assertTrue(tuple(top) == (pack, unpack))

    @parametrize("respect", [None, False, True])
    @parametrize("nested", [False, True])
    def test_selective_checkpoint(self, respect, nested):
        # Sees that its own saved tensor hooks are none of the user's
        def policy(ctx, op, *args, **kwargs):
            if op is torch.ops.aten.mm.default:
                return CheckpointPolicy.MUST_SAVE
            return CheckpointPolicy.PREFER_RECOMPUTE

        def fn(x):
            return (x @ x).sin() @ x

        def selective(x):
            return checkpoint(
                fn,
                x,
                use_reentrant=False,
                context_fn=functools.partial(
                    create_selective_checkpoint_contexts, policy
                ),
                respect_saved_tensors_hooks=respect,
            )

        def run(x):
            if nested:
                return checkpoint(selective, x, use_reentrant=False)
            return selective(x)

        x = torch.randn(4, 4, requires_grad=True)
        (expected,) = torch.autograd.grad(fn(x).sum(), x)
        with warnings.catch_warnings():
            warnings.simplefilter("error", FutureWarning)
            (grad,) = torch.autograd.grad(run(x).sum(), x)
        self.assertEqual(grad, expected)
        with saved_tensors_hooks(lambda t: t.clone(), lambda t: t):
            if respect is None:
                with self.assertWarnsRegex(FutureWarning, "saved_tensors_hooks"):
                    out = run(x)
            else:
                out = run(x)
        (grad,) = torch.autograd.grad(out.sum(), x)
        self.assertEqual(grad, expected)

    def test_pickle_and_copy(self):
        x = torch.randn(4, requires_grad=True)
        handle = x.register_hook(torch.neg)
        for other in (pickle.loads(pickle.dumps(handle)), copy.deepcopy(handle)):
            self.assertEqual(other.id, handle.id)
        hooks = x._backward_hooks
        for other in (pickle.loads(pickle.dumps(hooks)), copy.deepcopy(hooks)):
            self.assertTrue(other == {handle.id: torch.neg})
        with self.assertWarnsRegex(UserWarning, "built-in method neg"):
            torch.save(x, io.BytesIO())
        handle.remove()
        self.assertEqual(x._backward_hooks, OrderedDict())
        x.register_hook(torch.utils.hooks.unserializable_hook(lambda grad: grad))
        torch.save(x, io.BytesIO())

    def test_compiled_autograd_sees_the_hooks(self):
        graphs = []

        def backend(gm, inputs):
            graphs.append(gm)
            return gm

        x = torch.randn(4, requires_grad=True)
        x.register_hook(lambda grad: grad * 3)
        with (
            torch._dynamo.compiled_autograd._enable(
                torch.compile(backend=backend, fullgraph=True)
            ),
            saved_tensors_hooks(lambda t: t * 2, lambda t: t / 2),
        ):
            x.exp().sum().backward()
        self.assertEqual(x.grad, 3 * x.exp())
        self.assertEqual(len(graphs), 1)

    @parametrize("fullgraph", [False, True])
    @parametrize("caller", ["hook", "function"])
    def test_compiled_autograd_queues_callbacks(self, fullgraph, caller):
        called = []

        def callback():
            called.append(True)

        def queue(*args):
            Variable._execution_engine.queue_callback(callback)

        torch._dynamo.reset()
        x = torch.randn(4, requires_grad=True)
        if caller == "function":
            out = Call.apply(x, queue)
        else:
            x.register_hook(queue)
            out = x.clone()
        with torch._dynamo.compiled_autograd._enable(
            torch.compile(backend="eager", fullgraph=fullgraph)
        ):
            if fullgraph:
                out.sum().backward()
            else:
                # Not dropped
                with self.assertRaisesRegex(AssertionError, "only supported when"):
                    out.sum().backward()
        self.assertEqual(called, [True] if fullgraph else [])

    def test_compiled_save_on_cpu(self):
        x = torch.randn(4, requires_grad=True)
        with save_on_cpu():
            out = torch.compile(lambda x: x.exp(), backend="aot_eager")(x)
        out.sum().backward()
        self.assertEqual(x.grad, x.exp())


instantiate_device_type_tests(TestEngineContext, globals(), only_for=("cpu", "cuda"))
instantiate_parametrized_tests(TestLaunchingThread)


if __name__ == "__main__":
    run_tests()
