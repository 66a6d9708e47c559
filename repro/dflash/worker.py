"""Target workers, drafter workers, what runs between them, and checkpoints."""

from __future__ import annotations

import contextlib
import os
import resource
import statistics
import threading
import time
from argparse import Namespace
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch._dynamo
import torch.nn.functional as F
from torch import Tensor, nn

from .data import (
    Batch,
    Corpus,
    DataError,
    context_lengths,
    draw_anchors,
    draw_batch,
    generator_for,
    labels_and_weights,
    load_bytes,
    make_corpus,
    noise_ids,
)
from .model import (
    PRESETS,
    Drafter,
    FeatureExtractor,
    Preset,
    Target,
    draft_loss,
    draft_scores,
    feature_layers,
    init_weights,
    teach_frequencies,
)

PROFILED_STEPS = 3


class UsageError(Exception):
    """What was asked for cannot be done; the message is one line that says what to change."""


class Stopped(Exception):
    """Another worker failed or the user asked to stop."""


@dataclass
class Link:
    """What ties a worker to its siblings and to the supervisor, in threads and in processes alike.

    stop: event, set when everybody must end; failed: event, set too when the reason is an error.
    start: barrier of all workers; finish: barrier of the drafters; turn: lock for what drafters
    do one at a time (warm-up, profiling). report: takes an event, a dict, to the supervisor.
    """

    stop: Any
    failed: Any
    start: Any
    finish: Any
    turn: Any
    report: Callable[[dict[str, Any]], None]

    def check(self) -> None:
        if self.stop.is_set():
            raise Stopped

    def meet(self, barrier: Any) -> None:
        """Waits at ``barrier``; Stopped if it is broken because all must end."""
        try:
            barrier.wait()
        except threading.BrokenBarrierError:
            raise Stopped from None


# ---------------------------------------------------------------------------------------------
# What a run is made of


def resolve_preset(options: Namespace) -> Preset:
    """The preset of ``options``, with the sizes of the real target where ``--target`` names one."""
    p = PRESETS[options.preset]
    if options.target_depth:
        p = replace(p, target_depth=options.target_depth)
    if options.target == "random":
        return p
    config = _transformers().AutoConfig.from_pretrained(options.target[3:], local_files_only=True)
    rope = getattr(config, "rope_theta", None)
    if rope is None:
        rope = (getattr(config, "rope_parameters", None) or {}).get("rope_theta", p.rope_theta)
    return replace(
        p,
        hidden=config.hidden_size,
        heads=config.num_attention_heads,
        kv_heads=config.num_key_value_heads,
        head_dim=getattr(config, "head_dim", None)
        or config.hidden_size // config.num_attention_heads,
        mlp=config.intermediate_size,
        vocab=config.vocab_size,
        target_depth=config.num_hidden_layers,
        mask_id=config.vocab_size - 1,
        rope_theta=rope,
        head_scale=0.5,  # a trained head: the drafter's last norm starts at one
    )


def _transformers() -> Any:
    try:
        import transformers
    except ImportError:
        raise UsageError("--target hf:PATH needs transformers: pip install transformers") from None
    return transformers


def load_corpus(options: Namespace, p: Preset) -> Corpus:
    """Tokens of the text: bytes, or those of the real target's tokenizer where it has one.

    Raises:
        DataError: see :mod:`repro.dflash.data`.
    """
    data = load_bytes([Path(f) for f in options.text] if options.text else None)
    if options.target != "random" and (Path(options.target[3:]) / "tokenizer.json").exists():
        tokenizer = _transformers().AutoTokenizer.from_pretrained(
            options.target[3:], local_files_only=True
        )
        tokens = torch.tensor(tokenizer.encode(data.decode("utf-8", "replace")), dtype=torch.int32)
    else:
        tokens = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    if len(tokens) and (largest := int(tokens.max())) >= p.vocab:
        raise DataError(f"the text has token {largest}, but the target knows only {p.vocab}")
    return make_corpus(tokens, p)


def device_generator(device: torch.device, *key: object) -> torch.Generator:
    """A generator on ``device`` whose stream depends on ``key`` alone."""
    seed = generator_for(*key).initial_seed()
    return torch.Generator(device).manual_seed(seed)


def materialise(module: nn.Module, device: torch.device, dtype: torch.dtype) -> nn.Module:
    """Gives a module that was built on the meta device memory on ``device``."""
    return module.to(dtype).to_empty(device=device)


class _HFTarget:
    """A local checkpoint behind the interface of :class:`repro.dflash.model.Target`."""

    def __init__(self, path: str, device: torch.device, dtype: torch.dtype) -> None:
        model = _transformers().AutoModelForCausalLM.from_pretrained(
            path, local_files_only=True, dtype=dtype
        )
        self.model = model.to(device).eval().requires_grad_(False)
        self.layer_ids = feature_layers(model.config.num_hidden_layers)
        self.embed = model.get_input_embeddings()
        self.head = model.get_output_embeddings()

    def features(self, tokens: Tensor) -> Tensor:
        states = self.model.base_model(
            tokens, output_hidden_states=True, use_cache=False
        ).hidden_states
        return torch.cat([states[i + 1] for i in self.layer_ids], dim=-1)


class TargetWorker:
    """Holds the frozen target on one device and makes batches with context features.

    With ``--features fx`` the target is traced by torch.fx once for each context length, when
    that length first comes up; with ``eager`` it is called as a module.
    """

    def __init__(
        self, options: Namespace, p: Preset, corpus: Corpus, name: str, device: torch.device
    ) -> None:
        self.options, self.p, self.corpus = options, p, corpus
        self.name, self.device = name, device
        dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
        self.target: Target | _HFTarget
        if options.target == "random":
            with torch.device("meta"):
                target = Target(p)
            materialise(target, device, dtype)
            # One seed for all workers: they stand for one and the same target.
            generator = device_generator(device, options.seed, "target")
            init_weights(target, generator, (2 * p.target_depth) ** -0.5, p.head_scale)
            teach_frequencies(target.head.weight, corpus.train, generator, p.head_scale / 16)
            self.target = target.eval().requires_grad_(False)
        else:
            self.target = _HFTarget(options.target[3:], device, dtype)
        self.graphs: dict[int, nn.Module] = {}

    def prepare(self) -> None:
        """Sets up the calling thread."""
        prepare_thread(self.options, self.device)

    def features(self, tokens: Tensor) -> Tensor:
        """Context features [B, S, 5*D] of ``tokens`` [B, S]."""
        if self.options.features == "eager":
            return self.target.features(tokens)
        length = tokens.shape[1]
        if length not in self.graphs:
            extractor = FeatureExtractor(self.target, length, self.device)
            self.graphs[length] = torch.fx.symbolic_trace(extractor)
        return self.graphs[length](tokens)

    @torch.no_grad()
    def make(self, drafter: int, split: str, index: int, to: torch.device) -> Batch:
        """Batch ``index`` of a drafter with its features, on device ``to``."""
        o = self.options
        batch = draw_batch(self.corpus, self.p, o.seed, drafter, split, index, o.vary_length)
        batch = batch.to(self.device)
        batch.features = self.features(batch.tokens)
        return batch.to(to)

    @torch.no_grad()
    def warm(self) -> None:
        """Runs every context length once."""
        for length in context_lengths(self.p, self.options.vary_length):
            self.features(torch.ones(self.p.batch, length, dtype=torch.long, device=self.device))


RECOMPILE_LIMIT = 8  # Dynamo's default in all releases


def prepare_thread(options: Namespace, device: torch.device) -> None:
    """Settings that torch keeps for each thread; those of Dynamo in some releases."""
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if options.threads:
        torch.set_num_threads(options.threads)
    if options.workaround:
        torch._dynamo.config.force_compile_during_fx_trace = True
    # Past the limit, Dynamo runs a function's code without compiling it. The drafters of a process
    # share that of flex_attention, of which each device takes three (counted on the CPU): for the
    # first length, for all lengths, and without gradients. Three devices need nine.
    together = len(options.drafters) if options.workers == "threads" else 1
    torch._dynamo.config.recompile_limit = options.recompile_limit or RECOMPILE_LIMIT * together


# ---------------------------------------------------------------------------------------------
# From targets to drafters


@dataclass
class Plan:
    """Which batches a drafter takes in this run, in which order."""

    drafter: int
    device: torch.device
    first_step: int  # more than 0 when resumed
    options: Namespace

    def items(self) -> Iterator[tuple[str, int]]:
        """(split, index) of each batch that must be made, in the order of use."""
        o = self.options
        made = o.steps - self.first_step
        if o.replay:
            made = min(made, o.replay)
        first_eval = self.next_eval(self.first_step) - self.first_step
        for n in range(o.steps - self.first_step + 1):
            if n == first_eval:
                for i in range(o.eval_batches):
                    yield "held_out", i
            if n < made:
                yield "train", self.index(self.first_step + n)

    def index(self, step: int) -> int:
        return step % self.options.replay if self.options.replay else step

    def next_eval(self, step: int) -> int:
        """The first step count above ``step`` after which the held-out loss is due."""
        every = self.options.eval_every
        return min((step // every + 1) * every, self.options.steps) if every else self.options.steps


def servers_of(drafter: int, drafters: int, targets: int) -> list[int]:
    """Which target workers serve a drafter; several take turns, batch by batch."""
    if targets <= drafters:
        return [drafter % targets]
    return [t for t in range(targets) if t % drafters == drafter]


class Outlet:
    """The bounded queues of one target worker, one for each drafter that it serves."""

    def __init__(self, drafters: list[int], depth: int, link: Link) -> None:
        self.depth, self.link = depth, link
        self.queues: dict[int, deque[Batch]] = {d: deque() for d in drafters}
        self.changed = threading.Condition()

    def wait_for_room(self, drafters: list[int]) -> int:
        """One of ``drafters`` whose queue has room, the emptiest first."""
        with self.changed:
            while True:
                self.link.check()
                drafter = min(drafters, key=lambda d: len(self.queues[d]))
                if len(self.queues[drafter]) < self.depth:
                    return drafter
                self.changed.wait(0.2)

    def put(self, drafter: int, batch: Batch) -> None:
        with self.changed:
            self.queues[drafter].append(batch)
            self.changed.notify_all()

    def get(self, drafter: int) -> Batch:
        with self.changed:
            while not self.queues[drafter]:
                self.link.check()
                self.changed.wait(0.2)
            batch = self.queues[drafter].popleft()
            self.changed.notify_all()
            return batch


def serve(worker: TargetWorker, target: int, plans: list[Plan], outlet: Outlet, link: Link) -> None:
    """The loop of a target worker: fills the queues of the drafters that it serves."""
    targets = len(worker.options.targets)
    pending = {}
    for plan in plans:
        turns = servers_of(plan.drafter, len(plans), targets)
        if target in turns:
            mine = [x for n, x in enumerate(plan.items()) if turns[n % len(turns)] == target]
            pending[plan.drafter] = deque(mine)
    worker.prepare()
    if worker.options.warmup == "sequential":
        with link.turn:
            link.check()
            began = time.perf_counter()
            worker.warm()
            told = {"event": "warmup", "worker": worker.name, "device": str(worker.device)}
            link.report(told | {"seconds": time.perf_counter() - began})
    link.meet(link.start)
    while pending := {d: items for d, items in pending.items() if items}:
        drafter = outlet.wait_for_room(list(pending))
        split, index = pending[drafter].popleft()
        outlet.put(drafter, worker.make(drafter, split, index, plans[drafter].device))


class QueueFeed:
    """Batches of one drafter from the outlets of the target workers that serve it."""

    def __init__(self, drafter: int, outlets: list[Outlet]) -> None:
        self.drafter, self.outlets, self.taken = drafter, outlets, 0

    def next(self, split: str, index: int) -> Batch:
        batch = self.outlets[self.taken % len(self.outlets)].get(self.drafter)
        self.taken += 1
        return batch


class LocalFeed:
    """Batches that the drafter's own thread makes when it needs them."""

    def __init__(self, drafter: int, worker: TargetWorker, device: torch.device) -> None:
        self.drafter, self.worker, self.device = drafter, worker, device

    def next(self, split: str, index: int) -> Batch:
        return self.worker.make(self.drafter, split, index, self.device)


# ---------------------------------------------------------------------------------------------
# Drafter


class DrafterWorker:
    """Trains one drafter on one device."""

    def __init__(
        self,
        options: Namespace,
        p: Preset,
        corpus: Corpus,
        drafter: int,
        target: Target | _HFTarget,
    ) -> None:
        self.options, self.p, self.corpus, self.drafter = options, p, corpus, drafter
        self.device = device = options.drafters[drafter]
        self.name = f"drafter {drafter} ({device})"
        self.step = 0
        # The target's own tensors where it lives on this device, else a copy.
        self.embed = target.embed.weight.detach().to(device)  # [V, D]
        self.head = target.head.weight.detach().to(device)  # [V, D]
        with torch.device("meta"):
            model = Drafter(p, options.compile, device, options.backend)
        materialise(model, device, torch.float32)
        generator = device_generator(device, options.seed, drafter, "drafter")
        init_weights(model, generator, 1.0, p.head_scale)
        self.model = model
        self.optimizer = torch.optim.AdamW(
            model.parameters(), lr=options.lr or p.lr, fused=device.type == "cuda"
        )
        self.held_out: list[Batch] = []
        self.replayed: dict[int, Batch] = {}
        if options.resume and (state := load_checkpoint(options, p, corpus, drafter)):
            self.restore(state)

    # -- checkpoints

    def save(self) -> Path:
        """Writes the checkpoint of this drafter: whole or not at all."""
        path = checkpoint_path(self.options, self.drafter)
        temporary = path.with_name(f".{path.name}.{os.getpid()}")
        state = {
            "format": 1,
            "identity": identity(self.options, self.p, self.corpus, self.drafter),
            "step": self.step,
            # Every random number follows from these, see data.py; the step is the data position.
            "rng": {"seed": self.options.seed, "drafter": self.drafter, "next_batch": self.step},
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
        }
        try:
            with open(temporary, "wb") as file:
                torch.save(state, file)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)
        return path

    def restore(self, state: dict[str, Any]) -> None:
        self.step = state["step"]
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])

    # -- arithmetic

    def loss(self, batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
        """Loss, accuracy and mean accepted prefix of a batch, all scalars."""
        p = self.p
        ids = noise_ids(batch.tokens, batch.anchors, p.block, p.mask_id)  # [B, N*b]
        labels, weights = labels_and_weights(
            batch.tokens, batch.anchors, batch.valid, p.block, p.gamma
        )
        noise = F.embedding(ids, self.embed)  # [B, N*b, D]
        with torch.autocast(self.device.type, torch.bfloat16, self.device.type == "cuda"):
            hidden = self.model(noise, batch.features, batch.anchors, batch.valid)
        loss, predicted = draft_loss(hidden, self.head, labels, weights)
        return loss, *draft_scores(predicted, labels, weights, p.block)

    def learning_rate(self, step: int) -> float:
        """Linear warm-up over the first 4 % of the steps, then linear decay towards zero."""
        steps = self.options.steps
        rise = (step + 1) / max(1, round(0.04 * steps))
        return (self.options.lr or self.p.lr) * min(1.0, rise) * (1 - step / steps)

    def update(self, batch: Batch) -> tuple[float, float, float]:
        """One training step; returns loss, accuracy and accepted prefix before the update."""
        for group in self.optimizer.param_groups:
            group["lr"] = self.learning_rate(self.step)
        loss, accuracy, accepted = self.loss(batch)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        # Waits for the device, so that the step's wall time is that of its work.
        return tuple(torch.stack((loss.detach(), accuracy, accepted)).tolist())

    @torch.no_grad()
    def evaluate(self, link: Link) -> tuple[float, float, float]:
        """Loss, accuracy and accepted prefix over the held-out batches."""
        scores = []
        for batch in self.held_out:
            scores.append(torch.stack(self.loss(batch)))
            self.report(link, "evaluating")
        return tuple(torch.stack(scores).mean(0).tolist())

    def warm(self) -> None:
        """Compiles what training needs, on made-up batches, leaving the weights as they are."""
        lengths = context_lengths(self.p, self.options.vary_length)
        generator = generator_for(self.options.seed, self.drafter, "warm")
        # Two lengths make Dynamo compile for a dynamic length; the third one finds that code.
        for length in dict.fromkeys((lengths[-1], lengths[0], lengths[len(lengths) // 2])):
            shape = (self.p.batch, length)
            anchors, valid = draw_anchors(torch.ones(shape) > 0, self.p.anchors, generator)
            tokens = torch.ones(shape, dtype=torch.long)
            features = torch.zeros(*shape, 5 * self.p.hidden, dtype=self.embed.dtype)
            batch = Batch(0, tokens, anchors, valid, features).to(self.device)
            self.loss(batch)[0].backward()
            if self.options.eval_batches:
                with torch.no_grad():
                    self.loss(batch)
        self.optimizer.zero_grad(set_to_none=True)

    # -- the loop

    def run(self, feed: QueueFeed | LocalFeed, plan: Plan, link: Link) -> None:
        """Trains to the last step, reporting each; see train.py for the events."""
        prepare_thread(self.options, self.device)
        if self.options.warmup == "sequential":
            with link.turn:
                link.check()
                began = time.perf_counter()
                self.warm()
                self.report(link, "warmup", seconds=time.perf_counter() - began)
        link.meet(link.start)
        try:
            self.train(feed, plan, link)
        except Stopped:
            saved = None
            if self.options.checkpoint and not link.failed.is_set():
                saved = str(self.save())
            self.report(link, "stopped", step=self.step, checkpoint=saved)
            return
        if self.options.profile:
            link.meet(link.finish)
            with link.turn:
                link.check()
                self.report(link, "profiling")
                self.report(link, "profile", **self.profile())
        self.report(link, "done", step=self.step)

    def train(self, feed: QueueFeed | LocalFeed, plan: Plan, link: Link) -> None:
        o = self.options
        began = time.perf_counter()
        speeds: list[tuple[int, float]] = []
        first = self.step
        while self.step < o.steps:
            link.check()
            start = time.perf_counter()
            batch = self.take(feed, plan)
            got = time.perf_counter()
            loss, accuracy, accepted = self.update(batch)
            end = time.perf_counter()
            self.step += 1
            tokens = batch.tokens.numel()
            speeds.append((tokens, end - start))
            self.report(
                link,
                "step",
                step=self.step,
                loss=loss,
                accuracy=accuracy,
                accepted=accepted,
                lr=self.optimizer.param_groups[0]["lr"],
                length=batch.tokens.shape[1],
                tokens=tokens,
                data_s=got - start,
                step_s=end - got,
                ktok_s=tokens / (end - start) / 1e3,
                at_s=end - began,
            )
            if o.eval_batches and self.step == plan.next_eval(self.step - 1):
                while len(self.held_out) < o.eval_batches:
                    self.held_out.append(feed.next("held_out", len(self.held_out)))
                loss, accuracy, accepted = self.evaluate(link)
                self.report(
                    link, "eval", step=self.step, loss=loss, accuracy=accuracy, accepted=accepted
                )
            if o.checkpoint and (
                self.step == o.steps or (o.checkpoint_every and self.step % o.checkpoint_every == 0)
            ):
                self.report(link, "checkpoint", step=self.step, path=str(self.save()))
        half = speeds[len(speeds) // 2 :]  # the later half: compiling is over
        cuda = self.device.type == "cuda"
        self.report(
            link,
            "trained",
            steps=self.step - first,
            seconds=time.perf_counter() - began,
            ktok_s=sum(t for t, _ in half) / sum(s for _, s in half) / 1e3 if half else None,
            median_step_s=statistics.median(s for _, s in half) if half else None,
            peak_memory_bytes=torch.cuda.max_memory_allocated(self.device)
            if cuda
            else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        )

    def take(self, feed: QueueFeed | LocalFeed, plan: Plan) -> Batch:
        """The batch of the next step."""
        index = plan.index(self.step)
        if index in self.replayed:
            return self.replayed[index]
        batch = feed.next("train", index)
        if batch.index != index:
            raise RuntimeError(f"{self.name} needs batch {index} but was handed {batch.index}")
        if self.options.replay:
            self.replayed[index] = batch
        return batch

    def profile(self) -> dict[str, Any]:
        """Profiles a few more steps while the other drafters rest; the run's results stand."""
        from torch.profiler import ProfilerActivity, profile

        cuda = self.device.type == "cuda"
        generator = generator_for(self.options.seed, self.drafter, "profile")
        shape = (self.p.batch, self.p.sequence)
        anchors, valid = draw_anchors(torch.ones(shape) > 0, self.p.anchors, generator)
        tokens = torch.randint(1, 127, shape, generator=generator)
        features = torch.randn(*shape, 5 * self.p.hidden, generator=generator)
        batch = Batch(0, tokens, anchors, valid, features.to(self.embed.dtype)).to(self.device)
        self.update(batch)
        activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * cuda
        began = time.perf_counter()
        with profile(activities=activities) as profiler:
            for _ in range(PROFILED_STEPS):
                self.update(batch)
        seconds = time.perf_counter() - began
        kernels, operators = [], []
        for event in profiler.key_averages():
            on_device = "CPU" not in str(event.device_type)
            row = {
                "name": event.key,
                "calls": event.count / PROFILED_STEPS,
                "us": (event.self_device_time_total if on_device else event.self_cpu_time_total)
                / PROFILED_STEPS,
            }
            (kernels if on_device else operators).append(row)
        for rows in (kernels, operators):
            rows.sort(key=lambda row: -row["us"])
        return {
            "length": self.p.sequence,
            "step_s": seconds / PROFILED_STEPS,
            "kernels": kernels,
            "operators": operators[:60],
        }

    def report(self, link: Link, event: str, **fields: Any) -> None:
        link.report({"event": event, "drafter": self.drafter, "device": str(self.device), **fields})


# ---------------------------------------------------------------------------------------------
# Checkpoints


def checkpoint_path(options: Namespace, drafter: int) -> Path:
    return Path(options.checkpoint) / f"drafter-{drafter}.pt"


def identity(options: Namespace, p: Preset, corpus: Corpus, drafter: int) -> dict[str, Any]:
    """What must be equal for a run to go on from a checkpoint with the same numbers."""
    return {
        "sizes": asdict(p),
        "seed": options.seed,
        "drafter": drafter,
        "text": corpus.fingerprint,
        "vary_length": options.vary_length,
        "target": options.target,
        "lr": options.lr or p.lr,
        "steps": options.steps,  # the learning rate follows from it
    }


def load_checkpoint(
    options: Namespace, p: Preset, corpus: Corpus, drafter: int
) -> dict[str, Any] | None:
    """Reads the checkpoint of a drafter; None if it has none, since it never came to a step.

    Raises:
        UsageError: it is not readable, or belongs to another run.
    """
    path = checkpoint_path(options, drafter)
    if not path.exists():
        return None
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
        found = state["identity"]
    except Exception as e:
        first = str(e).splitlines()[0] if str(e) else type(e).__name__
        raise UsageError(f"--resume: {path} is not a checkpoint of this program: {first}") from None
    wanted = identity(options, p, corpus, drafter)
    for key, value in wanted.items():
        if found.get(key) != value:
            raise UsageError(
                f"--resume: {path} is from a run with another {key.replace('_', ' ')}: "
                f"{short(found.get(key))} there, {short(value)} here"
            )
    return state


def short(value: object) -> str:
    text = str(value)
    return text if len(text) <= 60 else text[:57] + "..."


def quiet(function: Callable[[], None]) -> None:
    """Calls ``function``, a clean-up whose own failure must not hide the first one."""
    with contextlib.suppress(Exception):
        function()
