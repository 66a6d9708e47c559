# Owner(s): ["module: dynamo"]

import importlib
import os
import sys
from unittest import mock

import torch
import torch._dynamo
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.decorators import leaf_function
from torch._dynamo.graph_bytecode_inputs import (
    get_external_object_by_index,
    register_graph_created_object,
)
from torch._functorch.aot_autograd import make_boxed_func
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


# torch._higher_order_ops has the operator under this name
invoke_leaf_function = importlib.import_module(
    "torch._higher_order_ops.invoke_leaf_function"
)


class Scale(torch.nn.Module):
    """What the graph gets by its index, since it is no tensor."""

    def __init__(self, factor):
        super().__init__()
        self.factor = factor


@leaf_function
def scale(module, x):
    return (x * module.factor,)


@scale.register_fake
def scale_fake(module, x):
    return (torch.empty_like(x),)


hold_in_graph = None


@leaf_function
def hold_here(x):
    if hold_in_graph is not None:
        hold_in_graph()
    return (x.clone(),)


@hold_here.register_fake
def hold_here_fake(x):
    return (torch.empty_like(x),)


def held(module, x):
    return scale(module, hold_here(x)[0])[0]


def plain(module, x):
    return scale(module, x)[0] + 1


class TestUserObjectThreads(TestCase):
    def setUp(self):
        super().setUp()
        torch._dynamo.reset()
        self.x = torch.ones(3)

    @parametrize("backend", ("eager", "aot_eager"))
    @parametrize("compiles", (True, False))
    def test_graph_gets_the_objects_of_its_thread(self, compiles, backend):
        compiled, other = (torch.compile(f, backend=backend) for f in (held, plain))
        module, other_module = Scale(2.0), Scale(3.0)
        self.assertEqual(compiled(module, self.x), self.x * 2)
        if not compiles:
            other(other_module, self.x)

        def run(hold):
            global hold_in_graph
            hold_in_graph = hold
            try:
                return compiled(module, self.x)
            finally:
                hold_in_graph = None

        with thread_held_in(run) as thread:
            self.assertEqual(other(other_module, self.x), self.x * 3 + 1)
        self.assertEqual(thread.result(), self.x * 2)

    def test_compilation_on_another_thread(self):
        def run(hold):
            index = register_graph_created_object(Scale(2.0), lambda index, cg: None)
            hold()
            return get_external_object_by_index(index).factor

        with thread_held_in(run) as thread:
            torch.compile(lambda x: x + 1, backend="eager")(self.x)
        self.assertEqual(thread.result(), 2.0)

    def test_backward(self):
        seen = []

        def compile_backward(gm, example_inputs):
            def run(args):
                seen.append(get_external_object_by_index(0).factor)
                return gm.forward(*args)

            run._boxed_call = True
            return run

        def forward(module, x):
            return scale(module, x)[0].sin()

        compiled = torch.compile(
            forward,
            backend=aot_autograd(
                fw_compiler=lambda gm, _: make_boxed_func(gm.forward),
                bw_compiler=compile_backward,
            ),
        )
        losses = [
            compiled(Scale(factor), torch.ones(3, requires_grad=True)).sum()
            for factor in (2.0, 3.0)
        ]
        for loss in losses:
            run_on_thread(loss.backward)
        self.assertEqual(seen, [2.0, 3.0])

    def test_backward_after_an_object_is_gone(self):
        @torch.compile(backend="aot_eager")
        def scale_twice(modules, x):
            return scale(modules[1], scale(modules[0], x)[0])[0]

        @torch.compile(backend="aot_eager")
        def sin(x):
            return x.sin()

        x = torch.ones(3, requires_grad=True)
        sin(x)
        modules = [Scale(2.0), Scale(3.0)]
        self.assertEqual(scale_twice(modules, self.x), self.x * 6)
        del modules[0]
        loss = sin(x).sum()
        run_on_thread(loss.backward)
        self.assertEqual(x.grad, self.x.cos())

    def test_modules_of_make_fx(self):
        module = Scale(2.0)

        def trace(hold):
            class Storage(dict):
                def __setitem__(self, index, module):
                    super().__setitem__(index, module)
                    hold()

            with mock.patch.object(
                invoke_leaf_function, "_makefx_module_storage", Storage()
            ):
                return invoke_leaf_function.store_makefx_modules([module])

        with thread_held_in(trace) as thread:
            storage = invoke_leaf_function._makefx_module_storage
            make_fx(lambda x: scale(Scale(3.0), x)[0])(self.x)
        (index,) = thread.result()
        self.assertIs(storage[index], module)


instantiate_parametrized_tests(TestUserObjectThreads)


if __name__ == "__main__":
    run_tests()
