"""The DFlash trainer's arithmetic and data, held against plain loops."""

from __future__ import annotations

import math
import sys
import threading
from argparse import Namespace
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention.flex_attention import create_mask

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from repro.dflash import data, model, train, worker
from repro.dflash.model import PRESETS, Preset

pytestmark = pytest.mark.timeout(240)

CPU = torch.device("cpu")
TINY = PRESETS["tiny"]
# Half the width of tiny: nothing here needs to learn.
SMALL = replace(TINY, hidden=32, head_dim=8, mlp=64, anchors=6, sequence=48, shortest=24)


def rng(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def random_anchors(p: Preset, length: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Anchors of two rows; the second has two spare blocks, the third nothing but spare ones."""
    g = rng(seed)
    anchors = torch.randint(length, (3, p.anchors), generator=g).sort(-1).values
    valid = torch.ones(3, p.anchors, dtype=torch.bool)
    valid[1, torch.randperm(p.anchors, generator=g)[:2]] = False
    valid[2] = False
    return anchors, valid


def mask_by_the_rules(anchors, valid, length: int, block: int) -> torch.Tensor:
    """[B, N*b, S + N*b], one query and key at a time."""
    batch, n = anchors.shape
    mask = torch.zeros(batch, n * block, length + n * block, dtype=torch.bool)
    for row in range(batch):
        for q in range(n * block):
            own = q // block
            if not valid[row, own]:
                continue
            for kv in range(length + n * block):
                if kv < length:
                    mask[row, q, kv] = kv < anchors[row, own]
                else:
                    mask[row, q, kv] = (kv - length) // block == own
    return mask


def options(*arguments: str) -> Namespace:
    return train.parse(["--drafters", "cpu", "--steps", "8", *arguments])


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> Preset:
    monkeypatch.setitem(PRESETS, "tiny", SMALL)
    return SMALL


def build(o: Namespace, drafter: int = 0) -> tuple[worker.TargetWorker, worker.DrafterWorker]:
    p = worker.resolve_preset(o)
    corpus = worker.load_corpus(o, p)
    target = worker.TargetWorker(o, p, corpus, "target", CPU)
    return target, worker.DrafterWorker(o, p, corpus, drafter, target.target)


@pytest.mark.parametrize("seed", range(5))
def test_mask_follows_the_rules(seed: int) -> None:
    p, length = SMALL, 17 + 7 * seed
    anchors, valid = random_anchors(p, length, seed)
    expected = mask_by_the_rules(anchors, valid, length, p.block)
    queries = p.anchors * p.block
    rule = model.draft_mask_mod(anchors, valid, length, p.block)
    found = create_mask(rule, 3, None, queries, length + queries, device="cpu")
    assert torch.equal(found[:, 0], expected)
    assert torch.equal(model.draft_dense_mask(anchors, valid, length, p.block), expected)
    assert expected.any() and not expected[2].any()


@pytest.mark.parametrize("length", [40, 131, 300])  # within one tile of the mask, and over several
def test_flex_attention_equals_dense_attention(length: int) -> None:
    p = replace(SMALL, anchors=20)
    anchors, valid = random_anchors(p, length, length)
    g = rng(0)
    queries = p.anchors * p.block
    shapes = [(3, 4, queries, 8), (3, 2, length + queries, 8), (3, 2, length + queries, 8)]
    inputs = [torch.randn(s, generator=g).requires_grad_() for s in shapes]
    upstream = torch.randn(shapes[0], generator=g)
    mask = model.draft_block_mask(anchors, valid, length, p.block)
    flex = model._flex_attention_cpu(*inputs, mask)
    dense = model._dense_attention(*inputs, model.draft_dense_mask(anchors, valid, length, p.block))
    torch.testing.assert_close(flex, dense, atol=1e-5, rtol=1e-4)
    for a, b in zip(
        torch.autograd.grad(flex, inputs, upstream),
        torch.autograd.grad(dense, inputs, upstream),
        strict=True,
    ):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("chunk", [7, 4096])
def test_loss_is_that_of_a_plain_loop(chunk: int) -> None:
    p, length = SMALL, 30
    g = rng(1)
    anchors, valid = random_anchors(p, length, 2)
    tokens = torch.randint(1, p.vocab, (3, length), generator=g)
    hidden = torch.randn(3, p.anchors * p.block, p.hidden, generator=g).requires_grad_()
    head = torch.randn(p.vocab, p.hidden, generator=g)

    total, weight_sum, right, counted, accepted, blocks = 0.0, 0.0, 0, 0, 0, 0
    for row in range(3):
        for i in range(p.anchors):
            if not valid[row, i]:
                continue
            run, still = 0, True
            places = [k for k in range(1, p.block) if anchors[row, i] + k < length]
            for k in places:
                label = tokens[row, anchors[row, i] + k]
                logits = head @ hidden[row, i * p.block + k]
                weight = math.exp(-(k - 1) / p.gamma)
                total = total - weight * F.log_softmax(logits, dim=-1)[label]
                weight_sum += weight
                hit = bool(logits.argmax() == label)
                right, counted = right + hit, counted + 1
                still = still and hit
                run += still
            accepted, blocks = accepted + run, blocks + bool(places)

    labels, weights = data.labels_and_weights(tokens, anchors, valid, p.block, p.gamma)
    loss, predicted = model.draft_loss(hidden, head, labels, weights, chunk)
    torch.testing.assert_close(loss, total / weight_sum, atol=1e-5, rtol=1e-5)
    (expected,) = torch.autograd.grad(total / weight_sum, hidden)
    (found,) = torch.autograd.grad(3 * loss, hidden)
    torch.testing.assert_close(found, 3 * expected, atol=1e-6, rtol=1e-4)
    # Make some predictions right, for the scores to have something to count.
    predicted = torch.where(torch.rand(predicted.shape, generator=g) < 0.6, labels, predicted)
    accuracy, prefix = model.draft_scores(predicted, labels, weights, p.block)
    right = counted = run = accepted = blocks = 0
    for row in range(3):
        for i in range(p.anchors):
            places = [
                k for k in range(1, p.block) if valid[row, i] and anchors[row, i] + k < length
            ]
            hits = [bool((predicted == labels)[row, i * p.block + k]) for k in places]
            right, counted = right + sum(hits), counted + len(hits)
            accepted += [*hits, False].index(False)
            blocks += bool(places)
    assert accuracy.item() == pytest.approx(right / counted)
    assert prefix.item() == pytest.approx(accepted / blocks)
    assert 0 < right < counted and accepted > 0


def test_loss_of_a_batch_without_a_valid_block_is_zero_not_nan() -> None:
    p = SMALL
    tokens = torch.ones(2, 20, dtype=torch.long)
    anchors = torch.zeros(2, p.anchors, dtype=torch.long)
    labels, weights = data.labels_and_weights(
        tokens, anchors, torch.zeros_like(anchors).bool(), p.block, p.gamma
    )
    hidden = torch.randn(2, p.anchors * p.block, p.hidden, generator=rng(0)).requires_grad_()
    loss, _ = model.draft_loss(hidden, torch.randn(p.vocab, p.hidden), labels, weights)
    loss.backward()
    assert loss.item() == 0 and not hidden.grad.any()


def test_noise_is_the_anchor_token_and_then_mask() -> None:
    tokens = torch.arange(10, 30)[None].repeat(2, 1)
    ids = data.noise_ids(tokens, torch.tensor([[0, 7], [3, 19]]), 3, 99)
    assert ids.tolist() == [[10, 99, 99, 17, 99, 99], [13, 99, 99, 29, 99, 99]]


def test_anchors_are_drawn_where_own_and_next_token_are_supervised() -> None:
    supervised = torch.zeros(3, 40, dtype=torch.bool)
    supervised[0, 5:] = True
    supervised[1, 10:13] = True  # only 10 and 11 have a supervised successor
    supervised[1, 20] = True
    anchors, valid = data.draw_anchors(supervised, 8, rng(3))
    assert valid.tolist() == [[True] * 8, [True] * 2 + [False] * 6, [False] * 8]
    assert anchors[1, :2].tolist() == [10, 11]
    chosen = anchors[0].tolist()
    assert chosen == sorted(set(chosen)) and min(chosen) >= 5 and max(chosen) <= 38
    everything = torch.stack(
        [data.draw_anchors(supervised, 8, rng(seed))[0][0] for seed in range(60)]
    )
    assert set(everything.flatten().tolist()) == set(range(5, 39))


@pytest.mark.parametrize("mode", model.COMPILE_MODES)
def test_gradients_reach_all_of_the_drafter_and_none_of_the_target(mode: str, small) -> None:
    target, drafter = build(options("--compile", mode))
    batch = target.make(0, "train", 0, CPU)
    drafter.loss(batch)[0].backward()
    for name, parameter in drafter.model.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.isfinite().all() and parameter.grad.any(), name
    for name, parameter in target.target.named_parameters():
        assert not parameter.requires_grad and parameter.grad is None, name
    before = [p.clone() for p in target.target.parameters()]
    drafter.update(batch)
    assert all(map(torch.equal, before, target.target.parameters()))


def test_compile_modes_give_the_same_losses(small) -> None:
    losses = []
    for mode in model.COMPILE_MODES:
        target, drafter = build(options("--compile", mode))
        losses.append([drafter.update(target.make(0, "train", i, CPU))[0] for i in range(4)])
    for other in losses[1:]:
        assert other == pytest.approx(losses[0], abs=1e-4)


def test_drafter_looks_neither_past_its_anchor_nor_into_other_blocks(small) -> None:
    target, drafter = build(options("--compile", "none"))
    p = small
    batch = target.make(0, "train", 1, CPU)
    batch.anchors[0] = torch.tensor([5, 9, 13, 17, 21, 23])[: p.anchors]

    def hidden(features: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
        return drafter.model(noise, features, batch.anchors, batch.valid)[0].detach()

    ids = data.noise_ids(batch.tokens, batch.anchors, p.block, p.mask_id)
    noise = F.embedding(ids, drafter.embed)
    base = hidden(batch.features, noise)
    changed = batch.features.clone()
    changed[0, 9:] += 1.0
    rows = slice(0, 2 * p.block)  # anchors 5 and 9 see the context before 9 at most
    after = hidden(changed, noise)
    torch.testing.assert_close(after[rows], base[rows])
    assert not torch.allclose(after[2 * p.block :], base[2 * p.block :])
    other = noise.clone()
    other[0, : p.block] += 1.0
    after = hidden(batch.features, other)
    torch.testing.assert_close(after[p.block :], base[p.block :])
    assert not torch.allclose(after[: p.block], base[: p.block])


def test_traced_features_equal_the_modules(small) -> None:
    target, _ = build(options("--features", "fx"))
    for length in (24, 32, 24):
        tokens = torch.randint(1, 256, (2, length), generator=rng(length))
        torch.testing.assert_close(target.features(tokens), target.target.features(tokens))
    assert sorted(target.graphs) == [24, 32]


def test_feature_layers() -> None:
    assert model.feature_layers(36) == [1, 9, 17, 25, 33]
    assert model.feature_layers(8) == [1, 2, 3, 4, 5]
    with pytest.raises(ValueError, match="at least 8 layers"):
        model.feature_layers(7)


def test_batches_depend_on_their_place_alone(small) -> None:
    o = options()
    corpus = worker.load_corpus(o, small)
    torch.manual_seed(1)
    state = torch.get_rng_state()
    first = data.draw_batch(corpus, small, 0, 1, "train", 5, True)
    assert torch.equal(torch.get_rng_state(), state), "the global generator was used"
    torch.manual_seed(2)
    data.draw_batch(corpus, small, 0, 0, "train", 9, True)
    again = data.draw_batch(corpus, small, 0, 1, "train", 5, True)
    assert torch.equal(first.tokens, again.tokens) and torch.equal(first.anchors, again.anchors)
    for other in ((1, 1, "train", 5), (0, 2, "train", 5), (0, 1, "held_out", 5)):
        batch = data.draw_batch(corpus, small, *other, True)
        assert not torch.equal(batch.tokens, first.tokens)
    held_out = [data.draw_batch(corpus, small, 0, d, "held_out", 3, True) for d in (0, 1)]
    assert torch.equal(held_out[0].tokens, held_out[1].tokens)
    lengths = {
        data.draw_batch(corpus, small, 0, 0, "train", i, True).tokens.shape[1] for i in range(60)
    }
    assert lengths == set(data.context_lengths(small, True))


def test_held_out_text_is_never_trained_on(small) -> None:
    corpus = data.make_corpus(torch.arange(5000, dtype=torch.int32), small)
    held_out = set(corpus.held_out.tolist())
    for i in range(200):
        batch = data.draw_batch(corpus, small, 0, 0, "train", i, True)
        assert held_out.isdisjoint(batch.tokens.flatten().tolist())


@pytest.mark.parametrize(
    ("drafters", "targets", "extra"),
    [
        (1, 1, []),
        (3, 1, []),
        (3, 2, []),
        (2, 5, []),
        (3, 3, ["--replay", "3"]),
        (2, 3, ["--replay", "4", "--eval-every", "3"]),
        (3, 2, ["--eval-every", "2"]),
    ],
)
@pytest.mark.parametrize("first", [0, 5])
def test_each_drafter_gets_its_batches_in_order(
    drafters: int, targets: int, extra: list[str], first: int, small
) -> None:
    """The loops of the target workers, with batches that only bear their names."""
    o = options("--eval-batches", "3", "--targets", ",".join(["cpu"] * targets), *extra)
    o.drafters = [CPU] * drafters

    class Named:
        def __init__(self) -> None:
            self.options = o

        def prepare(self) -> None: ...

        def make(self, drafter: int, split: str, index: int, to: torch.device) -> tuple:
            return (drafter, split, index)

    stop = threading.Event()
    link = worker.Link(
        stop, stop, threading.Barrier(targets), None, threading.Lock(), lambda e: None
    )
    plans = [worker.Plan(d, CPU, first, o) for d in range(drafters)]
    served = [worker.servers_of(d, drafters, targets) for d in range(drafters)]
    outlets = [
        worker.Outlet([d for d in range(drafters) if t in served[d]], 1, link)
        for t in range(targets)
    ]
    threads = [
        threading.Thread(target=worker.serve, args=(Named(), t, plans, outlets[t], link))
        for t in range(targets)
    ]
    for thread in threads:
        thread.start()
    try:
        # The last drafter first: the bounded queues of the others must not hold it up.
        for d in reversed(range(drafters)):
            feed = worker.QueueFeed(d, [outlets[t] for t in served[d]])
            pulled, seen, held_out = set(), [], False
            for step in range(first, o.steps):
                index = plans[d].index(step)
                if index not in pulled or not o.replay:
                    pulled.add(index)
                    seen.append(feed.next("train", index))
                    assert seen[-1] == (d, "train", index)
                if step + 1 == plans[d].next_eval(step) and not held_out:
                    held_out = True
                    for i in range(3):
                        assert feed.next("held_out", i) == (d, "held_out", i)
            assert held_out
        for thread in threads:
            thread.join(20)
        assert not any(thread.is_alive() for thread in threads)
    finally:
        stop.set()


def test_checkpoint_is_written_whole_or_not_at_all(small, tmp_path, monkeypatch) -> None:
    o = options("--checkpoint", str(tmp_path), "--compile", "none")
    target, drafter = build(o)
    drafter.update(target.make(0, "train", 0, CPU))
    drafter.step = 1
    drafter.save()
    before = worker.checkpoint_path(o, 0).read_bytes()

    def full_disk(state: object, file) -> None:
        file.write(b"half of it")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(torch, "save", full_disk)
    with pytest.raises(OSError, match="No space left"):
        drafter.save()
    assert worker.checkpoint_path(o, 0).read_bytes() == before
    assert [f.name for f in tmp_path.iterdir()] == ["drafter-0.pt"]


def test_checkpoint_brings_everything_back(small, tmp_path) -> None:
    arguments = ["--checkpoint", str(tmp_path), "--compile", "none"]
    target, drafter = build(options(*arguments))
    batches = [target.make(0, "train", i, CPU) for i in range(6)]
    for batch in batches[:3]:
        drafter.update(batch)
        drafter.step += 1
    drafter.save()
    expected = [drafter.update(b) for b in batches[3:]]
    _, again = build(options(*arguments, "--resume"))
    assert again.step == 3
    assert [again.update(b) for b in batches[3:]] == expected


def test_warm_up_leaves_no_trace_in_the_weights(small) -> None:
    target, drafter = build(options("--compile", "none"))
    before = {k: v.clone() for k, v in drafter.model.state_dict().items()}
    target.warm()
    drafter.warm()
    for name, value in drafter.model.state_dict().items():
        assert torch.equal(value, before[name]), name
    assert all(p.grad is None for p in drafter.model.parameters())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--drafters", "tpu:0"], "unknown device 'tpu:0': use cpu, cuda:N or cuda:N-M"),
        (["--drafters", "cpu,"], "unknown device ''"),
        (["--drafters", "cpu:1"], "unknown device 'cpu:1'"),
        (["--drafters", "cuda:4-2"], "the range runs backwards"),
        (["--drafters", "cuda:97"], "cuda:97: this host has "),
        (["--drafters", "cuda:0-97"], "cuda:0-97: this host has "),
        (["--targets", "gpu"], "unknown device 'gpu'"),
        (["--steps", "0"], "'0' is not a whole number, 1 or more"),
        (["--steps", "many"], "'many' is not a whole number"),
        (["--lr", "nan"], "'nan' is not a number above 0"),
        (["--preset", "huge"], "invalid choice: 'huge'"),
        (["--text", "/no/such/file"], "cannot read /no/such/file: No such file or directory"),
        (["--text", "{short}"], "the text has 5 tokens, but sequences of 128 need at least 258"),
        (["--text", "{binary}"], "holds NUL bytes"),
        (["--resume"], "--resume needs --checkpoint DIR"),
        (["--resume", "--checkpoint", "{tmp}/none"], "drafter-0.pt does not exist"),
        (["--resume", "--checkpoint", "{tmp}/broken"], "is not a checkpoint of this program"),
        (["--checkpoint", "{short}"], "File exists"),
        (["--checkpoint-every", "5"], "--checkpoint-every needs --checkpoint DIR"),
        (["--metrics", "/no/such/folder/m"], "the folder does not exist"),
        (["--metrics", "{tmp}"], "Is a directory"),
        (["--target", "hub/model"], "use random or hf:PATH"),
        (["--target", "hf:/no/such"], "no config.json there"),
        (["--backend", "inductor"], "Inductor has no backward of flex_attention on CPU"),
        (["--backend", "nonsense"], "--backend nonsense: unknown"),
        (["--target-depth", "4"], "'4' is not a whole number, 8 or more"),
        (["--no-such-flag"], "unrecognized arguments: --no-such-flag"),
    ],
)
def test_bad_usage_is_one_line_and_exit_2(arguments, message, tmp_path, capsys) -> None:
    short, binary = tmp_path / "short.txt", tmp_path / "binary"
    short.write_text("hello")
    binary.write_bytes(b"\0" * 1000)
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "drafter-0.pt").write_bytes(b"not a checkpoint")
    names = {"short": short, "binary": binary, "tmp": tmp_path}
    arguments = [a.format(**names) for a in arguments]
    try:
        code = train.main(arguments)
    except SystemExit as e:
        code = e.code
    error = capsys.readouterr().err
    assert code == 2
    assert message in error and error.count("\n") == 1, error


def test_resume_refuses_the_checkpoint_of_another_run(small, tmp_path) -> None:
    _, drafter = build(options("--checkpoint", str(tmp_path), "--compile", "none"))
    drafter.save()
    for other, what in (
        (["--seed", "5"], "another seed: 0 there, 5 here"),
        (["--no-vary-length"], "another vary length: True there, False here"),
        (["--lr", "0.5"], "another lr"),
        (["--text", str(Path(train.__file__)), str(Path(data.__file__))], "another text"),
    ):
        o = options("--checkpoint", str(tmp_path), "--resume", *other)
        with pytest.raises(worker.UsageError, match=what):
            build(o)


def test_a_local_checkpoint_serves_as_target(tmp_path) -> None:
    transformers = pytest.importorskip("transformers")
    sizes = dict(
        vocab_size=300, hidden_size=32, intermediate_size=64, num_hidden_layers=8,
        num_attention_heads=4, num_key_value_heads=2, head_dim=16,
    )  # fmt: skip
    transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**sizes)).save_pretrained(tmp_path)
    o = options("--target", f"hf:{tmp_path}", "--compile", "none", "--lr", "0.01")
    target, drafter = build(o)
    assert (drafter.p.hidden, drafter.p.vocab, drafter.p.target_depth) == (32, 300, 8)
    batch = target.make(0, "train", 0, CPU)
    expected = target.target.model(batch.tokens, output_hidden_states=True).hidden_states
    assert torch.equal(batch.features, torch.cat([expected[i] for i in (2, 3, 4, 5, 6)], dim=-1))
    losses = []
    for step in range(8):
        drafter.step = step
        losses.append(drafter.update(batch)[0])
    assert losses[-1] < losses[0]


@pytest.mark.parametrize(
    ("worker_name", "error", "traceback", "known"),
    [
        ("drafter 0 (cpu)", "RuntimeError: Detected that you are using FX to symbolically trace a "
         "dynamo-optimized function. This is not supported at the moment.", "", True),
        ("target 0 (cpu)", "NameError: module is not installed as a submodule", "", True),
        ("target 0 (cpu)", "AssertionError: CURRENT_PATCHER is None in finally block", "", True),
        ("drafter 0 (cpu)", "TypeError: x", "in module_call_wrapper\n", True),
        ("target 0 (cpu)", "TypeError: x", "in module_call_wrapper\n", False),
        ("drafter 0 (cpu)", "torch.OutOfMemoryError: CUDA out of memory", "", False),
    ],
)  # fmt: skip
def test_the_bug_is_told_from_other_errors(
    worker_name, error, traceback, known, small, capsys
) -> None:
    o = options()
    corpus = worker.load_corpus(o, small)
    supervisor = train.Supervisor(o, small, corpus)
    event = {"worker": worker_name, "error": error, "traceback": traceback}
    assert supervisor.fail(event) == 1
    told = capsys.readouterr().err
    assert (train.KNOWN_BUG_LINE in told) == known
    assert f"{worker_name} failed:" in told


def test_device_lists() -> None:
    assert train.parse_devices("cpu, cpu") == [CPU, CPU]
    count = torch.cuda.device_count()
    if count:
        assert train.parse_devices("cuda") == [torch.device("cuda", 0)]
        assert train.parse_devices(f"cuda:0-{count - 1}") == [
            torch.device("cuda", i) for i in range(count)
        ]
        assert train.parse_devices("cuda:0,cpu,cuda:0")[2] == torch.device("cuda", 0)
