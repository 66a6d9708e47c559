"""The DFlash drafter, the frozen target it drafts for, and the loss.

Shapes: B sequences, S context tokens, N anchors (blocks) a sequence, b positions a block,
Q = N*b queries, D hidden size, H/G query/key-value heads, K head size, V vocabulary.

flex_attention on CPU. ``torch.compile(flex_attention)`` has no backward there in any release
up to 2.15 (the public function refuses tensors that require a gradient), but the operator
underneath, ``torch.ops.higher_order.flex_attention``, has: its forward and backward in plain
tensor operations are the reference that the GPU kernels are tested against. So on CPU this
module compiles the operator itself with the ``aot_eager`` backend. Dynamo, AOTAutograd's joint
trace and flex_attention's own forward-backward trace all run as on a GPU; only Inductor's code
generation is left out. On CUDA it is ``torch.compile(flex_attention)`` with Inductor.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

COMPILE_MODES = ("attention", "block", "none")


@dataclass(frozen=True)
class Preset:
    """Everything that fixes the arithmetic of a run; one instance a model size."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    mlp: int
    vocab: int
    block: int
    anchors: int
    sequence: int  # longest context, tokens
    shortest: int  # shortest context with --vary-length
    length_step: int  # contexts are multiples of this
    batch: int
    target_depth: int
    gamma: float  # decay of the label weights along a block
    mask_id: int  # a token id that no text contains
    lr: float = 6e-4
    head_scale: float = 32.0  # length of the rows of the random LM head
    rope_theta: float = 1e6
    eps: float = 1e-6


PRESETS = {
    # A byte model that learns in a minute on two cores. Text has no NUL byte: 0 is the MASK.
    # The learning rate is far above the recipe's, as is usual for so narrow a model.
    "tiny": Preset(
        hidden=128, layers=2, heads=4, kv_heads=2, head_dim=32, mlp=512, vocab=256,
        block=8, anchors=16, sequence=128, shortest=64, length_step=8, batch=2,
        target_depth=8, gamma=4.0, mask_id=0, lr=1.5e-3,
    ),
    "qwen2.5-0.5b": Preset(
        hidden=896, layers=5, heads=14, kv_heads=2, head_dim=64, mlp=4864, vocab=151936,
        block=16, anchors=512, sequence=3072, shortest=1536, length_step=128, batch=4,
        target_depth=24, gamma=7.0, mask_id=151935,
    ),
    "qwen3-4b": Preset(
        hidden=2560, layers=5, heads=32, kv_heads=8, head_dim=128, mlp=9728, vocab=151936,
        block=16, anchors=512, sequence=3072, shortest=1536, length_step=128, batch=4,
        target_depth=36, gamma=7.0, mask_id=151935,
    ),
}  # fmt: skip


def feature_layers(depth: int) -> list[int]:
    """The five target layers whose outputs are the context features.

    Args:
        depth: number of target layers, at least 8.

    Returns:
        Five layer indices, evenly spread from 1 to ``depth - 3``; ``[1, 9, 17, 25, 33]`` of 36.
    """
    if depth < 8:
        raise ValueError(f"a target needs at least 8 layers to take features from, got {depth}")
    return [round(1 + i * (depth - 4) / 4) for i in range(5)]


def rotary(positions: Tensor, head_dim: int, theta: float) -> tuple[Tensor, Tensor]:
    """Cosine and sine tables for ``positions`` [B, T]; both [B, 1, T, head_dim]."""
    exponent = torch.arange(0, head_dim, 2, device=positions.device, dtype=torch.float32)
    inverse = theta ** (-exponent / head_dim)
    angle = positions[:, None, :, None].float() * inverse  # [B, 1, T, K/2]
    angle = torch.cat((angle, angle), dim=-1)  # [B, 1, T, K]
    return angle.cos(), angle.sin()


def apply_rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotates ``x`` [B, heads, T, K] by tables from :func:`rotary`, keeping its dtype."""
    halves = x.float().chunk(2, dim=-1)
    turned = torch.cat((-halves[1], halves[0]), dim=-1)
    return (x * cos + turned * sin).to(x.dtype)


class RMSNorm(nn.RMSNorm):
    """RMSNorm in the dtype of its input: fp32 weights meet bf16 activations under autocast."""

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.normalized_shape, self.weight.to(x.dtype), self.eps)


class SwiGLU(nn.Module):
    def __init__(self, hidden: int, inner: int) -> None:
        super().__init__()
        self.gate = nn.Linear(hidden, inner, bias=False)
        self.up = nn.Linear(hidden, inner, bias=False)
        self.down = nn.Linear(inner, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


# ---------------------------------------------------------------------------------------------
# Target


class TargetLayer(nn.Module):
    """A causal decoder layer of the frozen target; plain torch, so that FX can trace it."""

    def __init__(self, p: Preset) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = p.heads, p.kv_heads, p.head_dim
        self.norm1 = nn.RMSNorm(p.hidden, eps=p.eps)
        self.q = nn.Linear(p.hidden, p.heads * p.head_dim, bias=False)
        self.k = nn.Linear(p.hidden, p.kv_heads * p.head_dim, bias=False)
        self.v = nn.Linear(p.hidden, p.kv_heads * p.head_dim, bias=False)
        self.o = nn.Linear(p.heads * p.head_dim, p.hidden, bias=False)
        self.norm2 = nn.RMSNorm(p.hidden, eps=p.eps)
        self.mlp = SwiGLU(p.hidden, p.mlp)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        h = self.norm1(x)  # [B, S, D]
        q = self.q(h).unflatten(-1, (self.heads, self.head_dim)).transpose(1, 2)  # [B, H, S, K]
        k = self.k(h).unflatten(-1, (self.kv_heads, self.head_dim)).transpose(1, 2)
        v = self.v(h).unflatten(-1, (self.kv_heads, self.head_dim)).transpose(1, 2)
        q, k = apply_rotary(q, cos, sin), apply_rotary(k, cos, sin)
        a = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + self.o(a.transpose(1, 2).flatten(2))
        return x + self.mlp(self.norm2(x))


class Target(nn.Module):
    """A frozen decoder with random weights: embedding, ``target_depth`` layers, LM head.

    Only what the drafter needs is computed: the layers up to the last feature layer.
    """

    def __init__(self, p: Preset) -> None:
        super().__init__()
        self.p = p
        self.layer_ids = feature_layers(p.target_depth)
        self.embed = nn.Embedding(p.vocab, p.hidden)
        self.layers = nn.ModuleList(TargetLayer(p) for _ in range(self.layer_ids[-1] + 1))
        self.head = nn.Linear(p.hidden, p.vocab, bias=False)

    def hidden_states(self, tokens: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Outputs of the feature layers for ``tokens`` [B, S], side by side: [B, S, 5*D]."""
        x = self.embed(tokens)  # [B, S, D]
        kept = []
        for i, layer in enumerate(self.layers):
            x = layer(x, cos, sin)
            if i in self.layer_ids:
                kept.append(x)
        return torch.cat(kept, dim=-1)

    def features(self, tokens: Tensor) -> Tensor:
        """Context features [B, S, 5*D] of ``tokens`` [B, S], with a plain call of the module."""
        positions = torch.arange(tokens.shape[1], device=tokens.device)[None]
        cos, sin = rotary(positions, self.p.head_dim, self.p.rope_theta)
        return self.hidden_states(tokens, cos, sin)


class FeatureExtractor(nn.Module):
    """The target for one context length, ready for ``torch.fx.symbolic_trace``.

    Traced once a length, it becomes a straight graph up to the last feature layer, with the
    rotary tables as constants; this is how feature extractors are commonly cut out of a model.
    """

    def __init__(self, target: Target, length: int, device: torch.device) -> None:
        super().__init__()
        self.target = target
        positions = torch.arange(length, device=device)[None]
        cos, sin = rotary(positions, target.p.head_dim, target.p.rope_theta)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.target.hidden_states(tokens, self.cos, self.sin)


# ---------------------------------------------------------------------------------------------
# Drafter


def draft_mask_mod(anchors: Tensor, valid: Tensor, context: int, block: int) -> Callable:
    """The visibility rule of a draft, as a ``mask_mod`` for flex_attention.

    A query of block i sees the context before its anchor (strictly) and the noise positions of
    its own block in both directions; a query of an invalid block sees nothing.

    Args:
        anchors: [B, N] positions in the context.
        valid: [B, N] bool.
        context: S, the number of context positions; noise keys start there.
        block: b, positions a block.
    """

    def mask_mod(batch: Tensor, head: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        own = q // block
        seen = (kv < context) & (kv < anchors[batch, own])
        same_block = (kv >= context) & ((kv - context) // block == own)
        return valid[batch, own] & (seen | same_block)

    return mask_mod


def draft_block_mask(anchors: Tensor, valid: Tensor, context: int, block: int) -> BlockMask:
    """:func:`draft_mask_mod` as a BlockMask with Q_LEN = N*b and KV_LEN = S + N*b."""
    batch, n = anchors.shape
    return create_block_mask(
        draft_mask_mod(anchors, valid, context, block),
        B=batch,
        H=None,
        Q_LEN=n * block,
        KV_LEN=context + n * block,
        device=anchors.device,
    )


def draft_dense_mask(anchors: Tensor, valid: Tensor, context: int, block: int) -> Tensor:
    """The same rule as a boolean mask [B, N*b, S + N*b], for attention without flex."""
    batch, n = anchors.shape
    device = anchors.device
    own = torch.arange(n * block, device=device) // block  # [Q]
    seen = torch.arange(context, device=device) < anchors[:, own, None]  # [B, Q, S]
    same_block = (own[:, None] == own[None]).expand(batch, -1, -1)  # [B, Q, Q]
    return torch.cat((seen, same_block), dim=-1) & valid[:, own, None]


def _identity_score(score: Tensor, b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
    return score


def _flex_attention_cpu(q: Tensor, k: Tensor, v: Tensor, mask: BlockMask) -> Tensor:
    """flex_attention with a backward on CPU; see the head of this file."""
    out = torch.ops.higher_order.flex_attention(
        q, k, v, _identity_score, mask.as_tuple(), 1 / math.sqrt(q.shape[-1]), {}
    )
    return out[0]


def _flex_attention(q: Tensor, k: Tensor, v: Tensor, mask: BlockMask) -> Tensor:
    return flex_attention(q, k, v, block_mask=mask, enable_gqa=True)


def _dense_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask[:, None], enable_gqa=True)
    # A row that sees nothing is NaN in some kernels; flex_attention gives zeros there.
    return out.masked_fill(~mask.any(-1)[:, None, :, None], 0.0)


class DraftAttention(nn.Module):
    """Queries from the noise; keys and values from [context ; noise] by the same projections."""

    def __init__(self, p: Preset) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = p.heads, p.kv_heads, p.head_dim
        self.q = nn.Linear(p.hidden, p.heads * p.head_dim, bias=False)
        self.k = nn.Linear(p.hidden, p.kv_heads * p.head_dim, bias=False)
        self.v = nn.Linear(p.hidden, p.kv_heads * p.head_dim, bias=False)
        self.o = nn.Linear(p.heads * p.head_dim, p.hidden, bias=False)
        self.q_norm = RMSNorm(p.head_dim, eps=p.eps)
        self.k_norm = RMSNorm(p.head_dim, eps=p.eps)
        self.attend: Callable = _dense_attention

    def forward(
        self, x: Tensor, context: Tensor, cos: Tensor, sin: Tensor, mask: BlockMask | Tensor
    ) -> Tensor:
        both = torch.cat((context, x), dim=1)  # [B, S+Q, D]
        q = self.q(x).unflatten(-1, (self.heads, self.head_dim))  # [B, Q, H, K]
        k = self.k(both).unflatten(-1, (self.kv_heads, self.head_dim))  # [B, S+Q, G, K]
        v = self.v(both).unflatten(-1, (self.kv_heads, self.head_dim)).transpose(1, 2)
        q, k = self.q_norm(q).transpose(1, 2), self.k_norm(k).transpose(1, 2)
        q = apply_rotary(q, cos[:, :, -x.shape[1] :], sin[:, :, -x.shape[1] :])
        k = apply_rotary(k, cos, sin)
        q, k = q.to(v.dtype), k.to(v.dtype)  # RMSNorm leaves autocast's bf16
        out = self.attend(q, k, v, mask)  # [B, H, Q, K]
        return self.o(out.transpose(1, 2).flatten(2))


class DraftLayer(nn.Module):
    def __init__(self, p: Preset) -> None:
        super().__init__()
        self.norm1 = RMSNorm(p.hidden, eps=p.eps)
        self.attention = DraftAttention(p)
        self.norm2 = RMSNorm(p.hidden, eps=p.eps)
        self.mlp = SwiGLU(p.hidden, p.mlp)

    def forward(
        self, x: Tensor, context: Tensor, cos: Tensor, sin: Tensor, mask: BlockMask | Tensor
    ) -> Tensor:
        x = x + self.attention(self.norm1(x), context, cos, sin, mask)
        return x + self.mlp(self.norm2(x))


class Drafter(nn.Module):
    """The block-diffusion drafter.

    Args:
        p: sizes.
        compile_mode: ``attention`` compiles flex_attention, ``block`` each whole layer (with
            flex_attention inside), ``none`` nothing, and then attention is dense.
        backend: backend of ``torch.compile``; None picks ``inductor`` on CUDA and ``aot_eager``
            on CPU.
        device: where the drafter will live; decides which flex_attention is used.
    """

    def __init__(
        self, p: Preset, compile_mode: str, device: torch.device, backend: str | None = None
    ) -> None:
        super().__init__()
        self.p = p
        self.dense = compile_mode == "none"
        self.project = nn.Linear(5 * p.hidden, p.hidden, bias=False)
        self.context_norm = RMSNorm(p.hidden, eps=p.eps)
        self.layers = nn.ModuleList(DraftLayer(p) for _ in range(p.layers))
        self.norm = RMSNorm(p.hidden, eps=p.eps)

        on_cpu = device.type == "cpu"
        backend = backend or ("aot_eager" if on_cpu else "inductor")
        if not self.dense:
            attend = _flex_attention_cpu if on_cpu else _flex_attention
            if compile_mode == "attention":
                attend = torch.compile(attend, backend=backend)
            for layer in self.layers:
                layer.attention.attend = attend
                if compile_mode == "block":
                    layer.compile(backend=backend)

    def forward(self, noise: Tensor, features: Tensor, anchors: Tensor, valid: Tensor) -> Tensor:
        """One parallel pass over all blocks.

        Args:
            noise: [B, N*b, D] embedded noise ids, from :func:`repro.dflash.data.noise_ids`.
            features: [B, S, 5*D] context features of the target.
            anchors: [B, N] anchor positions.
            valid: [B, N] bool, False for the spare blocks of a row.

        Returns:
            [B, N*b, D] hidden states, ready for the target's LM head.
        """
        batch, length = features.shape[:2]
        make_mask = draft_dense_mask if self.dense else draft_block_mask
        mask = make_mask(anchors, valid, length, self.p.block)
        device = features.device
        context_positions = torch.arange(length, device=device).expand(batch, -1)  # [B, S]
        offsets = torch.arange(self.p.block, device=device)
        noise_positions = (anchors[:, :, None] + offsets).flatten(1)  # [B, Q]
        positions = torch.cat((context_positions, noise_positions), dim=1)  # [B, S+Q]
        cos, sin = rotary(positions, self.p.head_dim, self.p.rope_theta)
        context = self.context_norm(self.project(features))  # [B, S, D]
        x = noise
        for layer in self.layers:
            x = layer(x, context, cos, sin, mask)
        return self.norm(x)


# ---------------------------------------------------------------------------------------------
# Loss


class _FrozenHeadLoss(torch.autograd.Function):
    """Weighted cross-entropy through a frozen LM head, without ever holding all logits.

    With V = 151,936 the logits of a batch are tens of gigabytes. The head takes no gradient, so
    the gradient of the hidden states is worked out chunk by chunk in the forward pass.
    """

    @staticmethod
    def forward(ctx, hidden, head, labels, weights, chunk):
        total = weights.sum().clamp_min(1e-8)
        loss = hidden.new_zeros((), dtype=torch.float32)
        predicted = torch.empty_like(labels)
        grad = torch.empty_like(hidden) if ctx.needs_input_grad[0] else None
        for start in range(0, hidden.shape[0], chunk):
            rows = slice(start, start + chunk)
            logits = hidden[rows].to(head.dtype) @ head.T  # [chunk, V]
            predicted[rows] = logits.argmax(-1)
            target, scale = labels[rows, None], (weights[rows] / total)[:, None]
            log_p = F.log_softmax(logits, dim=-1, dtype=torch.float32)  # [chunk, V]
            loss -= (log_p.gather(1, target) * scale).sum()
            if grad is not None:
                # (softmax - one-hot) * scale, in as few passes over [chunk, V] as may be
                p = torch.mul(log_p.exp_(), scale, out=logits)
                p.scatter_add_(1, target, -scale.to(p.dtype))
                grad[rows] = (p @ head).to(grad.dtype)
        if grad is not None:
            ctx.save_for_backward(grad)
        ctx.mark_non_differentiable(predicted)
        return loss, predicted

    @staticmethod
    def backward(ctx, grad_loss, _):
        (grad,) = ctx.saved_tensors
        return grad * grad_loss, None, None, None, None


def draft_loss(
    hidden: Tensor, head: Tensor, labels: Tensor, weights: Tensor, chunk: int = 4096
) -> tuple[Tensor, Tensor]:
    """Weighted cross-entropy of a draft over the target's frozen LM head.

    Args:
        hidden: [B, N*b, D] from the drafter.
        head: [V, D], frozen.
        labels: [B, N*b] token ids; entries of weight 0 may be any valid id.
        weights: [B, N*b] from :func:`repro.dflash.data.labels_and_weights`.
        chunk: rows whose logits are held at once.

    Returns:
        The loss (sum of weighted cross-entropies over the sum of weights, a scalar) and the
        predicted tokens [B, N*b].
    """
    loss, predicted = _FrozenHeadLoss.apply(
        hidden.flatten(0, 1), head, labels.flatten(), weights.flatten().float(), chunk
    )
    return loss, predicted.view_as(labels)


def draft_scores(
    predicted: Tensor, labels: Tensor, weights: Tensor, block: int
) -> tuple[Tensor, Tensor]:
    """Accuracy over the weighted positions, and the mean accepted prefix of a block.

    Args:
        predicted: [B, N*b]; labels and weights likewise.
        block: b.

    Returns:
        Two scalars: the share of positions with weight that are right; and how many of the
        positions 1.. of a block are right before the first wrong one, averaged over the blocks
        that have any weight.
    """
    counted = weights.unflatten(1, (-1, block))[..., 1:] > 0  # [B, N, b-1]
    right = (predicted == labels).unflatten(1, (-1, block))[..., 1:] & counted
    accuracy = right.sum() / counted.sum().clamp_min(1)
    prefix = right.long().cumprod(-1).sum(-1)  # [B, N]
    accepted = prefix.sum() / counted.any(-1).sum().clamp_min(1)
    return accuracy, accepted


# ---------------------------------------------------------------------------------------------
# Weights


def init_weights(
    module: nn.Module, generator: torch.Generator, residual_scale: float, head_scale: float
) -> None:
    """Fills every parameter of ``module`` in order from ``generator``, never from global state.

    Linear weights are normal with variance 1/fan-in, those that end in a residual stream
    (``o`` and ``down``) scaled by ``residual_scale``. Embeddings have unit variance.
    Rows of the LM head have length ``head_scale``, and a drafter's last norm starts at
    1/(2 * head_scale): an untrained drafter's loss is near ln V, yet it takes small steps of the
    weights, not hundreds, to make logits large. Other norms start at one.
    """
    for name, parameter in module.named_parameters():
        leaf = name.split(".")[-2]
        if parameter.dim() == 1:
            nn.init.constant_(parameter, 0.5 / head_scale if name == "norm.weight" else 1.0)
            continue
        if leaf == "embed":
            std = 1.0
        else:
            std = 1 / math.sqrt(parameter.shape[1])
            if leaf in ("o", "down"):
                std *= residual_scale
            elif leaf == "head":
                std *= head_scale
        with torch.no_grad():
            parameter.normal_(0.0, std, generator=generator)


@torch.no_grad()
def teach_frequencies(
    head: Tensor, tokens: Tensor, generator: torch.Generator, scale: float
) -> None:
    """Gives the random LM head the one property of a trained one that a drafter cannot do without.

    Trained heads hold the frequency of tokens along a direction of their own. Without one, no
    hidden state can make all tokens that the text never uses unlikely at once, and learning to
    avoid them takes longer than all else.

    Args:
        head: [V, D], changed in place.
        tokens: 1-D ids of a text.
        generator: draws the direction, on the device of ``head``.
        scale: a hidden state that is 1/scale along the direction gives the log-frequencies.
    """
    counts = torch.bincount(tokens.long(), minlength=head.shape[0]).to(head.device)
    log_p = ((counts + 0.5) / counts.sum()).log()  # [V]
    direction = torch.randn(head.shape[1], generator=generator, device=head.device)
    direction *= scale / direction.norm()
    head += torch.outer(log_p - log_p.mean(), direction).to(head.dtype)
