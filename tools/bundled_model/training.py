"""Training of the bundled base: trees of answers, the whole distribution of each next token, and checkpoints.

A prompt is read once and all its answers branch off from it, each token seeing the prompt and the tokens before it in
its own answer.
"""

from __future__ import annotations

import json
import os
import shutil
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from rl.training.hardware import Hardware, detect
from tools.bundled_model.corpus import MIXTURE, MIXTURE_OF_DRILLS, Mixture, example_random
from tools.bundled_model.examples import BaseExample, TargetAnswer

BATCHES = 8
"""Batches that are drawn together, so that each holds examples of one length."""

LONGEST = 300
"""Tokens of an example with all its answers; longer ones are left out."""

GROWING = 400
"""Step from which examples of all lengths are learnt from: short ones first."""

NORM_RATE = 4.0
"""Learning rate of the norms' weights, as a multiple of the others'."""

COOLING = 0.35
"""Share of the steps after which the learning rate falls to nothing."""


COMPILED_FROM = 2_000
"""Steps from which the layers are compiled, on a CPU with a C++ compiler."""


@dataclass(frozen=True)
class Curriculum:
    """Examples of one round of training."""

    mixtures: tuple[tuple[int, Mixture], ...]
    """Shares of the examples, each with the step from which they hold; the first from step 0."""
    shortest: int = LONGEST
    """Tokens of the longest example at the first step; it grows to LONGEST over GROWING steps."""

    def mixture(self, step: int) -> Mixture:
        """Shares in force at a step, from 0."""
        return next(shares for start, shares in reversed(self.mixtures) if step >= start)

    def longest(self, step: int) -> int:
        return min(LONGEST, self.shortest + step * (LONGEST - self.shortest) // GROWING)


CURRICULUM = Curriculum(((0, MIXTURE_OF_DRILLS), (6_000, MIXTURE)), shortest=100)
"""Names to copy first, then all kinds of examples."""
FURTHER = Curriculum(((0, MIXTURE),))
"""All kinds of examples from the first step: of a model that copies already."""


@dataclass(frozen=True)
class Tree:
    """A prompt and the answers that branch off from it, as one sequence of T tokens."""

    tokens: list[int]
    parents: list[int]
    """Place of the token before, -1 for none: T numbers, each less than its own place."""
    depths: list[int]
    """Position in its own chat."""
    targets: dict[int, dict[int, float]]
    """Place -> next token -> probability, for the places from which something is taught."""


def tree_of(tokenizer: Any, example: BaseExample) -> Tree:
    """The tree of an example; an answer ends with the end-of-sequence token, which nothing follows."""
    backend, end = tokenizer.backend_tokenizer, tokenizer.eos_token_id
    prompt: list[int] = []
    if example.messages:
        text = tokenizer.apply_chat_template(
            list(example.messages), tokenize=False, add_generation_prompt=True
        )
        prompt = backend.encode(text, add_special_tokens=False).ids
    tree = Tree(list(prompt), list(range(-1, len(prompt) - 1)), list(range(len(prompt))), {})
    children: dict[tuple[int, int], int] = {}
    for answer in example.answers:
        node = len(prompt) - 1
        for token, shares in token_shares(backend, answer, end):
            if node >= 0:
                tree.targets.setdefault(node, shares)
            if token == end:
                break
            place = children.setdefault((node, token), len(tree.tokens))
            if place == len(tree.tokens):
                tree.tokens.append(token)
                tree.parents.append(node)
                tree.depths.append(tree.depths[node] + 1 if node >= 0 else 0)
            node = place
    return tree


def token_shares(backend: Any, answer: TargetAnswer, end: int) -> list[tuple[int, dict[int, float]]]:
    """Each token of an answer and of its end, with the distribution it was drawn from: token -> probability."""

    def ids_of(text: str) -> list[int]:
        return [*backend.encode(text, add_special_tokens=False).ids, end]

    path = ids_of(answer.text)
    shares: list[dict[int, float]] = [{token: 1.0} for token in path]
    for choice in answer.choices:
        possible = [(ids_of(text), share) for text, share in choice]
        for place in range(len(path)):
            if len(possible) < 2:
                break
            total = sum(share for _, share in possible)
            nexts: dict[int, float] = defaultdict(float)
            for ids, share in possible:
                nexts[ids[place]] += share / total
            if len(nexts) > 1:
                shares[place] = dict(nexts)
            possible = [
                (ids, share) for ids, share in possible if ids[place] == path[place] and len(ids) > place + 1
            ]
    return list(zip(path, shares, strict=True))


def chunk_of(
    tokenizer: Any,
    seed: int,
    number: int,
    batch_size: int,
    longest: int = LONGEST,
    mixture: Mixture = MIXTURE,
) -> list[list[Tree]]:
    """BATCHES batches of `batch_size` examples on average and of about as many tokens each; the same for a seed."""
    random = Random(f"examples/{seed}/{number}")
    trees: list[Tree] = []
    while len(trees) < BATCHES * batch_size:
        tree = tree_of(tokenizer, example_random(random, mixture))
        if len(tree.tokens) <= longest and tree.targets:
            trees.append(tree)
    trees.sort(key=lambda tree: len(tree.tokens))
    whole = sum(len(tree.tokens) for tree in trees)
    batches: list[list[Tree]] = [[] for _ in range(BATCHES)]
    before = 0
    for tree in trees:
        batches[before * BATCHES // whole].append(tree)
        before += len(tree.tokens)
    random.shuffle(batches)
    return [batch for batch in batches if batch]


@dataclass(frozen=True)
class Chunks(torch.utils.data.Dataset[list[list[Tree]]]):
    """Batches by the number of their chunk: chunk 0 holds those of the first `BATCHES` steps."""

    tokenizer: Any
    seed: int
    batch_size: int
    curriculum: Curriculum = CURRICULUM

    def __getitem__(self, number: int) -> list[list[Tree]]:
        step = number * BATCHES
        longest, mixture = self.curriculum.longest(step), self.curriculum.mixture(step)
        return chunk_of(self.tokenizer, self.seed, number, self.batch_size, longest, mixture)


def batches(
    tokenizer: Any,
    seed: int,
    batch_size: int,
    *,
    start: int,
    steps: int,
    workers: int = 0,
    curriculum: Curriculum = CURRICULUM,
) -> Iterator[list[Tree]]:
    """The batches of the steps from `start` (the first is 0) to the last of `steps`, drawn by so many processes beside.

    What a step reads depends on its number alone, so that a training that goes on reads the same.
    """
    numbers = range(start // BATCHES, -(-steps // BATCHES))
    loader = torch.utils.data.DataLoader(
        Chunks(tokenizer, seed, batch_size, curriculum),
        sampler=numbers,
        batch_size=None,
        num_workers=workers,
        multiprocessing_context="spawn" if workers else None,
        prefetch_factor=4 if workers else None,
    )
    for number, drawn in zip(numbers, loader, strict=True):
        for step in range(max(start, number * BATCHES), min(steps, (number + 1) * BATCHES)):
            yield drawn[(step - number * BATCHES) % len(drawn)]


def loss_of(model: Any, batch: Sequence[Tree], pad: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Cross-entropy to the shares, and how much of it is above their own entropy (0: perfect); nats per token. On the
    model's device."""
    device = next(model.parameters()).device
    width = max(len(tree.tokens) for tree in batch)
    ids = torch.full((len(batch), width), pad)
    positions = torch.zeros((len(batch), width), dtype=torch.long)
    visibility = torch.eye(width, dtype=torch.bool).repeat(len(batch), 1, 1)
    rows: list[int] = []
    targets: list[dict[int, float]] = []
    for number, tree in enumerate(batch):
        ids[number, : len(tree.tokens)] = torch.tensor(tree.tokens)
        positions[number, : len(tree.tokens)] = torch.tensor(tree.depths)
        chain = next((i for i, parent in enumerate(tree.parents) if parent != i - 1), len(tree.parents))
        visibility[number, :chain, :chain] = torch.ones(chain, chain, dtype=torch.bool).tril()
        for place in range(chain, len(tree.tokens)):
            if tree.parents[place] >= 0:
                visibility[number, place] |= visibility[number, tree.parents[place]]
        rows += [number * width + place for place in tree.targets]
        targets += tree.targets.values()
    # what a place must not see is taken off its score: eager attention knows no masks of truth values
    hidden_from = torch.zeros(visibility.shape).masked_fill(~visibility, torch.finfo(torch.bfloat16).min)
    hidden = model.model(
        input_ids=ids.to(device),
        position_ids=positions.to(device),
        attention_mask=hidden_from[:, None].to(device),
    ).last_hidden_state
    logits = model.lm_head(hidden.flatten(0, 1)[torch.tensor(rows).to(device)]).float()
    wanted = torch.zeros_like(logits)
    where = [(row, token) for row, shares in enumerate(targets) for token in shares]
    shares = torch.tensor([share for every in targets for share in every.values()]).to(device)
    wanted[tuple(torch.tensor(where).T.to(device))] = shares
    loss = torch.nn.functional.cross_entropy(logits, wanted)
    return loss, loss.detach() + (shares * shares.log()).sum() / len(targets)


@dataclass
class BaseTrainingState:
    """State of a training."""

    step: int
    losses: list[float]
    """Of each step, nats per answer token above the least possible."""


def train(
    model: Any,
    tokenizer: Any,
    *,
    seed: int,
    steps: int,
    batch_size: int,
    learning_rate: float,
    curriculum: Curriculum = CURRICULUM,
    state: Path | None = None,
    save_every: int = 100,
    hardware: Hardware | None = None,
    progress: Callable[[int, int, float], None] | None = None,
) -> list[float]:
    """Train to the last step and return the losses; goes on from `state` where that holds a training of these numbers.

    Warm-up over 50 steps, a constant rate, and from `COOLING` of the steps on a linear fall to nothing. `steps` may be
    another number when a training goes on before it cools. On a GPU where there is one, which `workers` draw
    examples for: one core makes about 400 a second.
    """
    hardware = hardware or detect()
    device = torch.device("cuda" if hardware.device == "cuda" else "cpu")
    model.to(device)
    named = list(model.named_parameters())
    matrices = [p for name, p in named if p.ndim > 1 and "embed" not in name]
    embeddings = [p for name, p in named if "embed" in name]
    norms = [p for name, p in named if p.ndim == 1]
    # a norm's weights move together, by the rate a step at most: they decide how sure the model can be
    optimizer = torch.optim.AdamW(
        [
            {"params": matrices, "times": 1.0, "weight_decay": 0.05},
            {"params": embeddings, "times": 1.0},
            {"params": norms, "times": NORM_RATE},
        ],
        lr=learning_rate,
        betas=(0.9, 0.95),
        weight_decay=0.0,
    )
    kind = {"seed": seed, "batch_size": batch_size, "learning_rate": learning_rate}
    checkpoint = _load(state, model, optimizer, kind) if state is not None else BaseTrainingState(0, [])
    cooling = int(COOLING * steps)
    # on a processor that multiplies it natively only: elsewhere bfloat16 is emulated, and many times slower
    bfloat16 = hardware.dtype == "bfloat16"
    workers = max(1, (os.cpu_count() or 1) - 2) if device.type == "cuda" else 0
    drawn_batches = batches(
        tokenizer,
        seed,
        batch_size,
        start=checkpoint.step,
        steps=steps,
        workers=workers,
        curriculum=curriculum,
    )
    model.train()
    if device.type == "cpu":
        # backwards through the fused attention of processors takes half of a step
        model.set_attn_implementation("eager")
    layers = model.model
    if device.type == "cpu" and steps - checkpoint.step >= COMPILED_FROM and shutil.which("c++"):
        # not on a GPU, where nobody tried it; three quarters of the time of a step; compiling takes about that of 150
        layers.forward = torch.compile(layers.forward, dynamic=True)
    for step, batch in enumerate(drawn_batches, checkpoint.step + 1):
        for group in optimizer.param_groups:
            cooled = (steps + 1 - step) / (steps + 1 - cooling)
            group["lr"] = group["times"] * learning_rate * min(step / 50, 1.0, cooled)
        with torch.autocast(device.type, torch.bfloat16, enabled=bfloat16):
            loss, above = loss_of(model, batch, tokenizer.pad_token_id)
        model.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        checkpoint.losses.append(float(above))
        if progress is not None:
            progress(step, steps, checkpoint.losses[-1])
        if state is not None and step % save_every == 0:
            _save(state, model, optimizer, kind, BaseTrainingState(step, checkpoint.losses))
    vars(layers).pop("forward", None)
    model.eval().to("cpu")
    return checkpoint.losses


def _tensors(model: Any, optimizer: Any) -> dict[str, torch.Tensor]:
    """Weights and what the optimiser remembers of them, by name."""
    names = {parameter: name for name, parameter in model.named_parameters()}
    kept = {f"weight/{name}": parameter.detach().cpu() for parameter, name in names.items()}
    for parameter, state in optimizer.state.items():
        kept |= {f"{key}/{names[parameter]}": value.cpu() for key, value in state.items()}
    return {name: tensor.contiguous() for name, tensor in kept.items()}


def _save(state: Path, model: Any, optimizer: Any, kind: dict[str, Any], trained: BaseTrainingState) -> None:
    half = state.with_suffix(".half")
    about = {"kind": json.dumps(kind), "step": str(trained.step), "losses": json.dumps(trained.losses)}
    save_file(_tensors(model, optimizer), half, metadata=about)
    half.replace(state)


def _load(state: Path, model: Any, optimizer: Any, kind: dict[str, Any]) -> BaseTrainingState:
    """Put a saved training back; one of other numbers is left alone, and the training starts anew."""
    if not state.is_file():
        return BaseTrainingState(0, [])
    with safe_open(state, "pt") as state_file:
        about = state_file.metadata()
        if json.loads(about["kind"]) != kind:
            return BaseTrainingState(0, [])
        parameters = dict(model.named_parameters())
        for name in state_file.keys():  # noqa: SIM118  # no dict: it cannot be iterated over
            key, _, owner = name.partition("/")
            parameter = parameters[owner]
            if key == "weight":
                with torch.no_grad():
                    parameter.copy_(state_file.get_tensor(name))
            else:
                # the optimiser counts its steps on the CPU
                value = state_file.get_tensor(name)
                optimizer.state[parameter][key] = value if value.ndim == 0 else value.to(parameter.device)
    return BaseTrainingState(int(about["step"]), json.loads(about["losses"]))
