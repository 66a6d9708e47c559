"""What people use torch.fx through, on several threads: quantization, vision, transformers, export.

Each test takes the results of one thread at a time first, then has the same done on several
threads that stand inside their traces at once, and compares. Each fails on the unpatched releases
every time, which the ``stock`` half of it shows under ``./build.sh test``.

Clients outside of torch are optional, a test whose package is missing is skipped.
"""

from __future__ import annotations

import copy
import importlib.util
from collections.abc import Callable, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

torch = pytest.importorskip("torch")
from thread_cases import (  # noqa: E402
    ConvNet,
    Gate,
    here_and_stock,
    run_asked_body,
    side_by_side,
)
from torch import nn  # noqa: E402


def needs(package: str, why: str = "") -> pytest.MarkDecorator:
    """Skip a test where ``package`` (or this module of a package) is not installed."""
    try:
        found = importlib.util.find_spec(package) is not None
    except ModuleNotFoundError:
        found = False
    return pytest.mark.skipif(not found, reason=why or f"pip install {package} to run it")


def as_alone(
    held: list[Callable[[], Any]], free: list[Callable[[], Any]] | None = None
) -> tuple[Any, Any]:
    """The results of functions, called one by one and then side by side."""
    works = [*held, *(free or [])]
    return [work() for work in works], side_by_side(held, free or [])


def trace(model: nn.Module) -> str:
    return torch.fx.symbolic_trace(model).code


def parts(gm: torch.fx.GraphModule) -> list[tuple[str, str]]:
    """Its submodules: name and class of each."""
    return [(n, f"{type(m).__module__}.{type(m).__name__}") for n, m in gm.named_modules()]


def same(together: Sequence[Any], alone: Sequence[Any]) -> None:
    """Check results that are tuples of what must be equal and, as the last, tensors."""
    for got, want in zip(together, alone, strict=True):
        assert got[:-1] == want[:-1]
        torch.testing.assert_close(got[-1], want[-1])


@here_and_stock()
def test_quantization_fx() -> None:
    """Static, dynamic and quantization-aware models are prepared, calibrated and converted."""
    from torch.ao.quantization import get_default_qat_qconfig_mapping, get_default_qconfig_mapping
    from torch.ao.quantization.qconfig_mapping import QConfigMapping
    from torch.ao.quantization.quantize_fx import convert_fx, prepare_fx, prepare_qat_fx

    torch.manual_seed(0)
    image = torch.rand(2, 3, 8, 8)
    net = ConvNet()
    net(image)  # statistics for the batch norms
    mlp = nn.Sequential(nn.Linear(8, 16), Gate(), nn.ReLU(), nn.Linear(16, 4)).eval()
    x = torch.randn(4, 8)
    dynamic = QConfigMapping().set_global(torch.ao.quantization.default_dynamic_qconfig)

    def quantize(
        prepare: Callable[..., Any], model: nn.Module, mapping: QConfigMapping, x: torch.Tensor
    ) -> tuple[Any, ...]:
        prepared = prepare(copy.deepcopy(model), mapping, (x,))
        prepared_code, observers = prepared.code, parts(prepared)
        prepared(x)
        quantized = convert_fx(prepared.eval())
        return prepared_code, observers, quantized.code, parts(quantized), quantized(x)

    def static() -> tuple[Any, ...]:
        return quantize(prepare_fx, copy.deepcopy(net).eval(), get_default_qconfig_mapping(), image)

    def dynamically() -> tuple[Any, ...]:
        return quantize(prepare_fx, mlp, dynamic, x)

    def aware() -> tuple[Any, ...]:
        mapping = get_default_qat_qconfig_mapping()
        return quantize(prepare_qat_fx, copy.deepcopy(net).train(), mapping, image)

    alone, together = as_alone([static, dynamically, aware])
    same(together, alone)
    assert all(any(".quantized" in kind for _, kind in result[3]) for result in together)


@here_and_stock()
def test_graph_passes() -> None:
    """Fusing, folding of constants and normalizing, each of which traces the model first."""
    from torch.fx.experimental.const_fold import split_const_subgraphs
    from torch.fx.experimental.normalize import NormalizeArgs
    from torch.fx.experimental.optimization import fuse

    class Folds(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Parameter(torch.rand(4)), nn.Parameter(torch.rand(4))
            self.gate, self.linear = Gate(), nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.linear(self.gate(x) * (self.a + self.b).sqrt())

    torch.manual_seed(0)
    net, folds = ConvNet().eval(), Folds()
    image, x = torch.rand(2, 3, 8, 8), torch.rand(2, 4)

    def fused() -> tuple[Any, ...]:
        gm = fuse(net)
        assert not any(isinstance(module, nn.BatchNorm2d) for module in gm.modules())
        return gm.code, parts(gm), gm(image)

    def folded() -> tuple[Any, ...]:
        gm = split_const_subgraphs(folds)
        gm.run_folding()
        return gm.code, parts(gm), gm(x)

    def normalized() -> tuple[Any, ...]:
        gm = NormalizeArgs(torch.fx.symbolic_trace(net)).transform()
        return gm.code, parts(gm), gm(image)

    alone, together = as_alone([fused, folded, normalized])
    same(together, alone)


@here_and_stock()
def test_functorch_compile() -> None:
    """AOTAutograd's own interface, with a compiler that keeps the graphs; forward and backward."""
    from functorch.compile import aot_module, make_boxed_func

    torch.manual_seed(0)
    mlp = nn.Sequential(nn.Linear(4, 8), Gate(), nn.Tanh(), nn.Linear(8, 2))
    x = torch.randn(3, 4)

    def compiled() -> tuple[Any, ...]:
        graphs = []

        def keep(gm: torch.fx.GraphModule, inputs: Any) -> Callable[..., Any]:
            graphs.append(gm.code)
            return make_boxed_func(gm.forward)

        model = copy.deepcopy(mlp)
        out = aot_module(model, fw_compiler=keep, bw_compiler=keep)(x)
        out.square().sum().backward()
        return graphs, [out.detach(), *(p.grad for p in model.parameters())]

    net, image = ConvNet().eval(), torch.rand(2, 3, 8, 8)

    def traced() -> tuple[Any, ...]:
        return trace(net), net(image)

    alone, together = as_alone([traced, compiled, traced, compiled])
    same(together, alone)
    assert all(len(together[i][0]) == 2 for i in (1, 3))


def export(model: nn.Module, x: torch.Tensor, strict: bool) -> tuple[Any, ...]:
    # One of its own, since export puts fake tensors in a model's place meanwhile.
    model = copy.deepcopy(model)
    batch = torch.export.Dim("batch", min=2, max=16)
    program = torch.export.export(
        model, (x,), dynamic_shapes=({0: batch},), strict=strict
    ).run_decompositions()
    more = torch.cat([x, x])
    return program.graph_module.code, str(program.graph_signature), program.module()(more)


def small_mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.GELU(), nn.Linear(8, 2)).eval()


def exporters() -> list[Callable[[], tuple[Any, ...]]]:
    """Functions that export strictly, export loosely, and trace; models are the same each time."""
    torch.manual_seed(0)
    net, image = ConvNet().eval(), torch.rand(2, 3, 8, 8)
    mlp, x = small_mlp(), torch.randn(3, 4)

    def strictly() -> tuple[Any, ...]:
        return export(mlp, x, strict=True)

    def loosely() -> tuple[Any, ...]:
        return export(net, image, strict=False)

    def traced() -> tuple[Any, ...]:
        return trace(net), net(image)

    return [strictly, loosely, traced]


@here_and_stock(240)
def test_exports() -> None:
    """Programs are exported, decomposed and run, strictly or not, beside each other."""
    strictly, loosely, _ = exporters()
    alone, together = as_alone([loosely, loosely, loosely], [strictly])
    same(together, alone)


@here_and_stock(240)
def test_exports_and_traces() -> None:
    """Programs are exported while other threads trace with torch.fx, and the other way round."""
    strictly, loosely, traced = exporters()
    alone, together = as_alone([traced, loosely, traced], [strictly])
    same(together, alone)


@here_and_stock(400)
def test_aot_inductor() -> None:
    """A model is compiled ahead of time, packed, loaded and run while others are traced."""
    from torch._inductor import aoti_compile_and_package, aoti_load_package

    torch.manual_seed(0)
    net, image = ConvNet().eval(), torch.rand(2, 3, 8, 8)
    plain = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)).eval()
    x = torch.randn(3, 4)

    def packed() -> torch.Tensor:
        with TemporaryDirectory() as folder:
            program = torch.export.export(plain, (x,))
            path = aoti_compile_and_package(program, package_path=str(Path(folder, "model.pt2")))
            with torch.no_grad():
                return aoti_load_package(path)(x)

    def exported() -> str:
        return torch.export.export(net, (image,), strict=False).graph_module.code

    def traced() -> str:
        return trace(net)

    alone, together = as_alone([traced, exported], [packed])
    assert together[:2] == alone[:2]
    torch.testing.assert_close(together[2], alone[2])
    torch.testing.assert_close(together[2], plain(x))


def extract(model: nn.Module, nodes: dict[str, str], image: torch.Tensor) -> tuple[Any, ...]:
    from torchvision.models.feature_extraction import create_feature_extractor

    # A copy, since it is put in training mode meanwhile.
    extractor = create_feature_extractor(copy.deepcopy(model), nodes)
    return extractor.code, parts(extractor), extractor(image)


@needs("torchvision")
@here_and_stock()
def test_torchvision_feature_extractor() -> None:
    """Intermediate features of a convolutional network, while others trace it and run it."""
    from torchvision.models import resnet18

    torch.manual_seed(0)
    resnet = resnet18(num_classes=10).eval()
    resnet.maxpool = nn.Sequential(resnet.maxpool, Gate())
    image = torch.rand(2, 3, 32, 32)

    def low() -> tuple[Any, ...]:
        return extract(resnet, {"layer1": "low", "layer3.1.bn2": "high"}, image)

    def last() -> tuple[Any, ...]:
        return extract(resnet, {"flatten": "last"}, image)

    def called() -> tuple[Any, ...]:
        return (resnet(image),)

    alone, together = as_alone([low, last, low], [called, last])
    same(together, alone)


@needs("torchvision")
@here_and_stock()
def test_torchvision_leaf_modules() -> None:
    """Features of networks whose blocks torchvision takes for leaves by their class."""
    from torchvision.models import VisionTransformer, mobilenet_v3_small

    torch.manual_seed(0)
    vit = VisionTransformer(32, 16, 2, 2, 32, 64, num_classes=10).eval()
    vit.encoder.dropout = Gate()
    mobile = mobilenet_v3_small(num_classes=10).eval()
    mobile.avgpool = nn.Sequential(Gate(), mobile.avgpool)
    image = torch.rand(2, 3, 32, 32)

    def of_vit() -> tuple[Any, ...]:
        nodes = {"encoder.layers.encoder_layer_0.add_1": "low", "encoder.ln": "high"}
        return extract(vit, nodes, image)

    def of_mobile() -> tuple[Any, ...]:
        return extract(mobile, {"features.3": "low", "features.11": "high"}, image)

    alone, together = as_alone([of_vit, of_mobile, of_vit], [of_mobile])
    same(together, alone)


def small_qwen3(attention: str, seed: int) -> Any:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=97,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=512,
        use_cache=False,
        attn_implementation=attention,
    )
    return Qwen3ForCausalLM(config)


@needs("transformers")
@here_and_stock(400)
def test_transformers_qwen3_flex_attention() -> None:
    """Three small Qwen3 with compiled flex_attention are trained for two steps, one a thread."""
    device = "cuda" if torch.cuda.is_available() else "cpu"

    models = [small_qwen3("flex_attention", seed).to(device).train() for seed in range(3)]

    def train(seed: int) -> list[torch.Tensor]:
        model = copy.deepcopy(models[seed])
        if device == "cpu":
            # flex_attention has no backward there: train what comes after the last one.
            model.requires_grad_(False)
            last = model.model.layers[-1]
            for part in (last.post_attention_layernorm, last.mlp, model.model.norm, model.lm_head):
                part.requires_grad_(True)
        weights = [p for p in model.parameters() if p.requires_grad]
        optimizer = torch.optim.SGD(weights, lr=0.1)
        random = torch.Generator().manual_seed(seed)
        losses = []
        for length in (128, 192):
            ids = torch.randint(97, (2, length), generator=random).to(device)
            loss = model(input_ids=ids, labels=ids).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach())
        return [*losses, *(w.detach() for w in weights)]

    net = ConvNet()
    alone = [trace(net), *(train(seed) for seed in range(3))]
    torch.compiler.reset()  # so that the threads compile as well
    together = side_by_side(
        [lambda: trace(net)], [lambda seed=seed: train(seed) for seed in range(3)]
    )
    assert together[0] == alone[0]
    torch.testing.assert_close(together[1:], alone[1:])


@needs("transformers.utils.fx", "pip install 'transformers<5' to run it: later ones do not trace")
@here_and_stock()
def test_transformers_symbolic_trace() -> None:
    """A model is traced by transformers while others run and trace theirs.

    Two of transformers' own traces at once would need changes there: its tracer is kept in a
    global and it replaces functions such as torch.arange for the process.
    """
    from transformers import BertConfig, BertForSequenceClassification
    from transformers.utils.fx import symbolic_trace

    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=97,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=64,
        attn_implementation="eager",
    )
    bert = BertForSequenceClassification(config).eval()
    bert.dropout = Gate()
    net, image = ConvNet().eval(), torch.rand(2, 3, 8, 8)
    ids = torch.randint(97, (2, 12))
    mask = torch.ones_like(ids)

    def traced() -> tuple[Any, ...]:
        gm = symbolic_trace(bert, input_names=["input_ids", "attention_mask"])
        return gm.code, gm(input_ids=ids, attention_mask=mask)["logits"]

    def fx_traced() -> tuple[Any, ...]:
        return trace(net), net(image)

    def called() -> tuple[Any, ...]:
        return "", bert(input_ids=ids, attention_mask=mask).logits

    alone, together = as_alone([traced, fx_traced], [called, fx_traced])
    same(together, alone)


if __name__ == "__main__":
    run_asked_body()
