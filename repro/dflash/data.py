"""Text, sequences, anchors and labels.

Nothing here touches global random state. Every random number of a batch comes from a generator
seeded with (seed, drafter, split, index), so a batch depends on its place in the run alone: not on
which worker makes it, when, or what ran before. That is also why a checkpoint needs to keep no
more than the seed and the position.
"""

from __future__ import annotations

import hashlib
import sysconfig
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from .model import Preset

HELD_OUT = 20  # every 20th stretch of the text is never trained on
STRETCH = 4096  # tokens
DEFAULT_BYTES = 6_000_000


class DataError(Exception):
    """The text cannot be used; the message is one line that says why and what to do."""


@dataclass(frozen=True)
class Corpus:
    """Token ids of a text, cut into a part to train on and a held-out part (both 1-D)."""

    train: Tensor
    held_out: Tensor
    fingerprint: str  # of all tokens; a checkpoint is only resumed on the same text


@dataclass
class Batch:
    """What a drafter consumes in one step; all tensors on the drafter's device.

    tokens: [B, S]; features: [B, S, 5*D]; anchors: [B, N]; valid: [B, N] bool.
    """

    index: int
    tokens: Tensor
    anchors: Tensor
    valid: Tensor
    features: Tensor | None = None

    def to(self, device: torch.device) -> Batch:
        """The same batch with every tensor on ``device``."""
        return Batch(
            self.index,
            self.tokens.to(device, non_blocking=True),
            self.anchors.to(device, non_blocking=True),
            self.valid.to(device, non_blocking=True),
            None if self.features is None else self.features.to(device, non_blocking=True),
        )


def default_files() -> list[Path]:
    """Python sources that every machine has: the top level of the standard library."""
    return sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))


def load_bytes(files: Sequence[Path] | None) -> bytes:
    """The bytes of ``files`` one after the other (the standard library's sources if None).

    Raises:
        DataError: a file cannot be read, or holds NUL bytes and so is no text.
    """
    parts, size = [], 0
    for path in default_files() if files is None else files:
        try:
            data = path.read_bytes()
        except OSError as e:
            raise DataError(f"cannot read {path}: {e.strerror}") from None
        if b"\0" in data:
            raise DataError(f"{path} holds NUL bytes: give text files to --text")
        parts.append(data)
        size += len(data)
        if files is None and size >= DEFAULT_BYTES:
            break
    return b"\n".join(parts)


def make_corpus(tokens: Tensor, p: Preset) -> Corpus:
    """Cuts 1-D ``tokens`` into train and held-out parts, both from all over the text.

    Raises:
        DataError: the text is too short for a sequence in each part.
    """
    need = p.sequence + 1
    if len(tokens) < 2 * need:
        raise DataError(
            f"the text has {len(tokens)} tokens, but sequences of {p.sequence} need at least "
            f"{2 * need} (one to train on, one held out): give more --text or a smaller preset"
        )
    stretch = max(need, min(STRETCH, len(tokens) // HELD_OUT))
    number = torch.arange(len(tokens)) // stretch
    every = min(HELD_OUT, len(tokens) // stretch)
    held_out = number % every == every - 1
    digest = hashlib.sha256(tokens.to(torch.int32).numpy().tobytes()).hexdigest()[:16]
    return Corpus(tokens[~held_out], tokens[held_out], digest)


def generator_for(*key: object) -> torch.Generator:
    """A CPU generator whose stream depends on ``key`` alone."""
    digest = hashlib.sha256(repr(key).encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)


def context_lengths(p: Preset, vary: bool) -> list[int]:
    """The context lengths that batches may have, longest last."""
    if not vary:
        return [p.sequence]
    return list(range(p.shortest, p.sequence + 1, p.length_step))


def draw_anchors(supervised: Tensor, n: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Draws up to ``n`` anchors a row among the positions that may be one.

    Args:
        supervised: [B, S] bool. A position may be an anchor when it and the next one are True.
        n: N, anchors a row.
        generator: source of the draw.

    Returns:
        anchors [B, N], sorted within the valid part of each row, and valid [B, N] bool. A row
        with fewer candidates than ``n`` is padded with anchor 0 and valid False.
    """
    batch = supervised.shape[0]
    anchors = torch.zeros(batch, n, dtype=torch.long)
    valid = torch.zeros(batch, n, dtype=torch.bool)
    for row in range(batch):
        candidates = (supervised[row, :-1] & supervised[row, 1:]).nonzero()[:, 0]
        order = torch.randperm(len(candidates), generator=generator)
        chosen = candidates[order[:n]].sort().values
        anchors[row, : len(chosen)] = chosen
        valid[row, : len(chosen)] = True
    return anchors, valid


def draw_batch(
    corpus: Corpus, p: Preset, seed: int, drafter: int, split: str, index: int, vary: bool
) -> Batch:
    """Batch ``index`` of one drafter, on CPU and without features yet.

    All sequences of a batch have one length. The head of each row, up to a quarter, plays the
    prompt: it is context, but not supervised, so no anchor falls there.

    Args:
        split: ``train`` or ``held_out``; held-out batches are the same for all drafters.
    """
    generator = generator_for(seed, drafter if split == "train" else split, split, index)
    text = corpus.train if split == "train" else corpus.held_out
    lengths = context_lengths(p, vary)
    length = lengths[int(torch.randint(len(lengths), (), generator=generator))]
    starts = torch.randint(len(text) - length, (p.batch, 1), generator=generator)
    positions = torch.arange(length)
    tokens = text[starts + positions].long()  # [B, S]
    prompt = torch.randint(length // 4 + 1, (p.batch, 1), generator=generator)
    anchors, valid = draw_anchors(positions >= prompt, p.anchors, generator)
    return Batch(index, tokens, anchors, valid)


def noise_ids(tokens: Tensor, anchors: Tensor, block: int, mask_id: int) -> Tensor:
    """Noise of every block: the real token at the anchor, then MASK.

    Args:
        tokens: [B, S]; anchors: [B, N]; block: b.

    Returns:
        [B, N*b] token ids.
    """
    ids = tokens.new_full((*anchors.shape, block), mask_id)
    ids[..., 0] = tokens.gather(1, anchors)
    return ids.flatten(1)


def labels_and_weights(
    tokens: Tensor, anchors: Tensor, valid: Tensor, block: int, gamma: float
) -> tuple[Tensor, Tensor]:
    """What each noise position must predict, and how much that counts.

    Position k of a block predicts the token at ``anchor + k`` with weight exp(-(k-1)/gamma).
    Position 0 (the anchor's own token is given), positions past the sequence and invalid blocks
    have weight 0; their label is a token of the row that nobody looks at.

    Returns:
        labels [B, N*b] and weights [B, N*b] (float32).
    """
    length = tokens.shape[1]
    k = torch.arange(block, device=tokens.device)
    where = anchors[:, :, None] + k  # [B, N, b]
    decay = torch.exp(-(k - 1).float() / gamma)
    counted = (k > 0) & (where < length) & valid[:, :, None]
    labels = tokens.gather(1, where.clamp_max(length - 1).flatten(1))
    return labels, (counted * decay).flatten(1)
