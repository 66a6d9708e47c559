# Owner(s): ["module: dynamo"]

import os
import sys
import unittest
from unittest import mock

import torch
import torch.nn as nn
from torch._dynamo.utils import counters
from torch.nn.parallel.replicate import replicate
from torch.testing._internal.common_cuda import TEST_MULTIGPU
from torch.testing._internal.common_utils import (
    instantiate_parametrized_tests,
    parametrize,
    run_tests,
    TestCase,
)


# Make the helper files in test/ importable
pytorch_test_dir = os.path.dirname(os.path.dirname(os.path.realpath(__file__)))
sys.path.append(pytorch_test_dir)
from concurrency_utils import run_on_threads


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 3))
        self.register_buffer("scale", torch.tensor(2.0))

    def forward(self, x):
        return self.body(x) * self.scale


def compile(module, in_place, **kwargs):
    if in_place:
        module.compile(**kwargs)
        return module
    return torch.compile(module, **kwargs)


def replicate_on_cpu(module, n):
    """What DataParallel does, with copies on the CPU instead of n GPUs."""

    def broadcast(tensors, devices, detach=False):
        # Differentiable, as Broadcast.apply is
        return [
            [t.detach().clone() if detach else t.clone() for t in tensors]
            for _ in devices
        ]

    name = "torch.nn.parallel.replicate."
    with (
        mock.patch(name + "_broadcast_coalesced_reshape", broadcast),
        mock.patch(name + "_get_device_index", lambda device, optional: device),
    ):
        return replicate(module, range(n))


class TestDataParallel(TestCase):
    def setUp(self):
        super().setUp()
        torch._dynamo.reset()
        counters.clear()

    def test_replicate_leaves_the_module_alone(self):
        model = Model()
        compiled = torch.compile(model, backend="eager")
        before = {k: dict(m.__dict__) for k, m in model.named_modules()}
        parameters = dict(compiled.named_parameters())
        replicate_on_cpu(compiled, 2)
        after = {k: dict(m.__dict__) for k, m in model.named_modules()}
        self.assertEqual(after, before)
        self.assertEqual(dict(compiled.named_parameters()), parameters)
        x = torch.randn(2, 4)
        self.assertEqual(compiled(x), model(x))

    def check_replicas(self, module, model):
        """Replicas of module, which calls model, use their own parameters."""
        replicas = replicate_on_cpu(module, 2)
        x = torch.randn(2, 4)
        expected = model(x)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.zero_()
        for replica in replicas:
            self.assertIsInstance(replica, type(module))
            self.assertEqual(replica(x), expected)

    @parametrize("in_place", (False, True))
    def test_replicas_use_their_own_parameters(self, in_place):
        model = Model()
        self.check_replicas(compile(model, in_place, backend="eager"), model)
        self.assertEqual(counters["stats"]["unique_graphs"], 2 if in_place else 1)

    def test_replicas_of_a_compiled_submodule(self):
        model = Model()
        model.body.compile(backend="eager")
        self.check_replicas(model, model)

    def test_replicas_of_a_module_compiled_with_disable(self):
        model = Model()
        model.compile(disable=True)
        self.check_replicas(model, model)

    @parametrize("in_place", (False, True))
    @parametrize("backend", ("eager", "aot_eager"))
    def test_training_in_threads(self, backend, in_place):
        # A new set of replicas for each step, one thread for each replica
        torch.manual_seed(0)
        model = Model()
        compiled = compile(model, in_place, backend=backend)
        x = torch.randn(6, 4)
        for _ in range(3):
            model.forward(x).square().sum().backward()
            expected = [p.grad for p in model.parameters()]
            model.zero_grad()
            replicas = replicate_on_cpu(compiled, 3)
            outputs = run_on_threads(
                *(
                    lambda replica=replica, part=part: replica(part)
                    for replica, part in zip(replicas, x.chunk(3))
                )
            )
            torch.cat(outputs).square().sum().backward()
            self.assertEqual([p.grad for p in model.parameters()], expected)
            model.zero_grad()
        # One compilation serves all of them
        self.assertEqual(counters["stats"]["unique_graphs"], 1)

    @unittest.skipIf(not TEST_MULTIGPU, "needs two GPUs")
    @parametrize("in_place", (False, True))
    @parametrize("backend", ("aot_eager", "inductor"))
    def test_data_parallel(self, backend, in_place):
        model = Model().cuda()
        compiled = nn.DataParallel(compile(model, in_place, backend=backend), [0, 1])
        x = torch.randn(6, 4, device="cuda")
        for _ in range(3):
            model.forward(x).square().sum().backward()
            expected = [p.grad for p in model.parameters()]
            model.zero_grad()
            compiled(x).square().sum().backward()
            self.assertEqual([p.grad for p in model.parameters()], expected)
            model.zero_grad()


instantiate_parametrized_tests(TestDataParallel)


if __name__ == "__main__":
    run_tests()
