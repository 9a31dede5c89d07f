"""Profiler of a training step: time and memory of micro-batches here and now.

A base model of at most ASKABLE parameters is measured itself, once per machine; of a larger one, a few random layers of
its shape.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import itertools
import json
import math
import random
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel, get_peft_model
from transformers import AutoModel, AutoModelForCausalLM

from packed_forward.forward import packed_logps
from packed_forward.logps import causal_model, collate, head_logps
from packed_forward.packing import pack
from packed_forward.row_cache import RowCache, row_key
from packed_forward.selection import strategy_select
from packed_forward.selftest_cache import packed_code
from packed_forward.strategies import Strategy
from rl.checksums import base_hash
from rl.recipes import GRPORecipe, PPORecipe, Recipe
from rl.training.constrained_generation import AnswerForms, Sampling, generate_tokens
from rl.training.encoding import EncodedResponse, Encoder
from rl.training.hardware import Hardware
from rl.training.loading import load_shape, model_located
from rl.training.policy import FINDINGS, LoadedPolicy, load_policy, lora_config, matmul

ASKABLE = 1_000_000_000
"""Parameters up to which a base model is loaded before a training, to be measured and asked."""

WHOLE_LAYERS = 4
"""A model of at most so many layers is profiled whole; a deeper one through one and three, and the rest is
multiplied."""

WIDEST_HEAD = 32768
"""Vocabulary of the random model, at most: a larger head would take memory here and little time there."""

MAX_TIMED_BATCHES = 6
"""Micro-batches timed, twice each: the first time its lengths may be new to the machine, as they are in a run."""

FEWEST, TIMED_S = 4, 2.0
"""Timings after which no further one is made once they took so many seconds."""


@dataclass(frozen=True)
class MicroBatchProfile:
    """Cost of one micro-batch on the whole model, on average."""

    train_s: float
    """Forward, backward and the optimiser's step."""
    forward_s: float
    """Forward alone, as a reference takes it."""
    sample_s: float
    """Answering a batch of prompts; 0 where none was asked for."""
    setup_s: float
    """Finding how rows can be computed, once a run."""
    saved_bytes: float
    """Bytes saved for the backward pass of the largest micro-batch."""
    checkpoint_bytes: float
    """The same where only each layer's input is kept, and one layer whole."""
    strategy: str

    def of_tokens(self, share: float) -> MicroBatchProfile:
        """The times of micro-batches with `share` times as many tokens."""
        return dataclasses.replace(self, train_s=share * self.train_s, forward_s=share * self.forward_s)


class MeasuredBase:
    """A base model on this machine, loaded once and only where something has to be measured or asked."""

    def __init__(
        self,
        base_model: str,
        hardware: Hardware,
        *,
        quantization: str = "none",
        cache_dir: Path | None = None,
    ) -> None:
        self.base_model, self.hardware, self.quantization = base_model, hardware, quantization
        self.cache_dir = cache_dir
        self.findings = RowCache(cache_dir / FINDINGS, max_rows=10_000) if cache_dir is not None else None

    @functools.cached_property
    def parameters(self) -> int:
        return load_shape(self.base_model)[2]

    @functools.cached_property
    def policy(self) -> LoadedPolicy:
        return load_policy(
            self.base_model, hardware=self.hardware, quantization=self.quantization, cache_dir=self.cache_dir
        )

    def key(self, what: str, *parts: str) -> bytes:
        """Key of a finding about this base on this machine by this version of the code."""
        source = model_located(self.base_model)
        hardware = self.hardware
        machine = f"{hardware.device_name} {hardware.cores} {hardware.threads} {hardware.dtype}"
        return row_key(what, base_hash(source), self.quantization, machine, packed_code(), *parts)

    def find(self, key: bytes) -> Any:
        """What was stored under a key; None where nothing was."""
        stored = self.findings.get([key]).get(key) if self.findings is not None else None
        return json.loads(stored) if stored is not None else None

    def store(self, key: bytes, finding: Any) -> None:
        if self.findings is not None:
            self.findings.put({key: json.dumps(finding).encode()})


@dataclass(frozen=True)
class GenerationLoad:
    """Prompts to be answered as a run answers them."""

    prompts: list[list[int]]
    samples: int
    sampling: Sampling


Micro = Sequence[EncodedResponse]


def profile_base(
    base: MeasuredBase, recipe: Recipe, micros: Sequence[Micro], *, packed: bool
) -> MicroBatchProfile:
    """Measure two micro-batches of a run, the longest and a middle one, on the base model itself.

    What was measured on micro-batches about as long is taken from the cache. The self-test of packed rows is kept
    there too: the training need not repeat it. A speed that was measured beside other work is not stored.
    """
    shared = Strategy.LAST_LAYER if packed else Strategy.STOCK
    tokens = statistics.fmean(_tokens(micro, shared) for micro in micros)
    # times grow evenly with the tokens within a factor of two
    bucket = str(round(math.log2(tokens)))
    longest = str(round(math.log2(max(_tokens(micro, Strategy.STOCK) for micro in micros))))
    key = base.key("speed", str(packed), str(recipe.lora_r), bucket, longest)
    known = base.find(key)
    if known is None:
        policy = base.policy
        began, used = time.perf_counter(), time.process_time()
        profile, measured = _measure_base(policy, recipe, micros, packed)
        wall, cpu = time.perf_counter() - began, time.process_time() - used
        known = {"profile": dataclasses.asdict(profile), "tokens": measured}
        if base.hardware.device != "cpu" or cpu >= QUIET_SHARE * wall * torch.get_num_threads():
            base.store(key, known)
    return MicroBatchProfile(**known["profile"]).of_tokens(tokens / known["tokens"])


def _measure_base(
    policy: LoadedPolicy, recipe: Recipe, micros: Sequence[Micro], packed: bool
) -> tuple[MicroBatchProfile, int]:
    """The profile of a middle micro-batch, with the memory of the longest, and its tokens."""
    if not isinstance(policy.model, PeftModel):
        policy.model = get_peft_model(policy.model, lora_config(recipe, policy.model)).eval()
    strategy = Strategy.STOCK
    with matmul(policy.hardware):
        if packed:
            items = [item for micro in micros for item in micro]
            strategy = strategy_select(policy, items, gradients=True).strategy
        run = _runner(policy, strategy, causal=True)
        ordered = sorted(micros, key=lambda micro: _tokens(micro, strategy))
        longest, middle = _cut(ordered[-1]), _cut(ordered[len(ordered) // 2])
        saved_bytes, inputs = _saved_bytes(policy, lambda: run(longest))
        whole = _tokens(ordered[-1], strategy) / _tokens(longest, strategy)
        saved_bytes, inputs = whole * saved_bytes, whole * inputs
        optimizer = torch.optim.AdamW([p for p in policy.model.parameters() if p.requires_grad])
        began = _clock(policy.hardware)
        run(middle).backward()
        optimizer.step()
        optimizer.zero_grad()
        between = _clock(policy.hardware)
        with torch.no_grad():
            run(middle)
        end = _clock(policy.hardware)
    layers = int(policy.model.config.get_text_config().num_hidden_layers)
    profile = MicroBatchProfile(
        train_s=between - began,
        forward_s=end - between,
        sample_s=0.0,
        setup_s=0.0,
        saved_bytes=saved_bytes,
        checkpoint_bytes=inputs * layers + saved_bytes / layers,
        strategy=str(strategy),
    )
    return profile, _tokens(middle, Strategy.LAST_LAYER if packed else Strategy.STOCK)


QUIET_SHARE = 0.6
"""Share of its threads' time that a measurement has on a machine with nothing else to do, at least."""

MEASURED_TOKENS = 384
"""Tokens of a micro-batch, cut to whole rows, that are measured: time and memory grow evenly beyond."""


def _cut(micro: Micro) -> Micro:
    """The first rows of a micro-batch, as many as MEASURED_TOKENS hold."""
    size = next(
        (n for n in range(len(micro), 1, -1) if _tokens(micro[:n], Strategy.STOCK) <= MEASURED_TOKENS), 1
    )
    return micro[:size]


def profile_micro_batches(
    config: Any,
    encoder: Encoder,
    recipe: Recipe,
    hardware: Hardware,
    micros: Sequence[Micro],
    *,
    packed: bool,
    causal: bool = True,
    generation: GenerationLoad | None = None,
) -> MicroBatchProfile:
    """Measure micro-batches on random weights: `packed` as rows that share their prompt, else padded side by side.

    A model deeper than WHOLE_LAYERS is measured with one and three layers, and each figure taken to grow evenly.
    """
    layers = int(config.get_text_config().num_hidden_layers)

    def measure(depth: int) -> MicroBatchProfile:
        return _measure(config, encoder, recipe, hardware, micros, depth, packed, causal, generation)

    if layers <= WHOLE_LAYERS:
        return measure(layers)
    one, three = measure(1), measure(3)
    figures: dict[str, Any] = {}
    for field in dataclasses.fields(MicroBatchProfile):
        low, high = getattr(one, field.name), getattr(three, field.name)
        grown = low if isinstance(low, str) else low + max(high - low, 0.0) / 2 * (layers - 1)
        figures[field.name] = high if isinstance(low, str) else grown
    return MicroBatchProfile(**figures)


def _measure(
    config: Any,
    encoder: Encoder,
    recipe: Recipe,
    hardware: Hardware,
    micros: Sequence[Micro],
    layers: int,
    packed: bool,
    causal: bool,
    generation: GenerationLoad | None,
) -> MicroBatchProfile:
    with torch.random.fork_rng(devices=[]), matmul(hardware):
        policy = _random_policy(config, encoder, recipe, hardware, layers, causal)
        vocabulary = policy.model.config.get_text_config().vocab_size
        micros = [[_random_words(item, vocabulary) for item in micro] for micro in micros]
        began = time.perf_counter()
        strategy = Strategy.STOCK
        if packed and causal:
            strategy = strategy_select(
                policy, [item for micro in micros for item in micro], gradients=True
            ).strategy
        setup = time.perf_counter() - began
        run = _runner(policy, strategy, causal)
        largest = max(micros, key=lambda micro: _tokens(micro, strategy))
        saved_bytes, inputs = _saved_bytes(policy, lambda: run(largest))
        optimizer = torch.optim.AdamW([p for p in policy.model.parameters() if p.requires_grad])
        train_times, forwards = [], []
        for number, micro in enumerate(2 * _spread(micros, MAX_TIMED_BATCHES), 1):
            began = _clock(hardware)
            run(micro).backward()
            optimizer.step()
            optimizer.zero_grad()
            between = _clock(hardware)
            with torch.no_grad():
                run(micro)
            train_times.append(between - began)
            forwards.append(_clock(hardware) - between)
            if number >= FEWEST and sum(train_times) + sum(forwards) > TIMED_S:
                break
        sample_s = 0.0
        if generation is not None:
            policy.model.eval()
            generator = torch.Generator(policy.device).manual_seed(0)
            prompts = [[token % vocabulary for token in prompt] for prompt in generation.prompts]
            began = _clock(hardware)
            generate_tokens(
                causal_model(policy.model),
                prompts,
                generation.samples,
                generation.sampling,
                [],
                encoder.tokenizer.pad_token_id % vocabulary,
                generator,
            )
            sample_s = _clock(hardware) - began
    return MicroBatchProfile(
        train_s=statistics.fmean(train_times),
        forward_s=statistics.fmean(forwards),
        sample_s=sample_s,
        setup_s=setup,
        saved_bytes=saved_bytes,
        checkpoint_bytes=inputs * layers + saved_bytes / layers,
        strategy=str(strategy),
    )


def _random_policy(
    config: Any, encoder: Encoder, recipe: Recipe, hardware: Hardware, layers: int, causal: bool
) -> LoadedPolicy:
    small = copy.deepcopy(config)
    text = small.get_text_config()
    text.num_hidden_layers = layers
    text.vocab_size = min(text.vocab_size, WIDEST_HEAD)
    for special in ("pad_token_id", "bos_token_id", "eos_token_id"):
        setattr(text, special, None)
    if getattr(text, "layer_types", None):
        text.layer_types = (list(text.layer_types) * layers)[:layers]
    kind = AutoModelForCausalLM if causal else AutoModel
    model = kind.from_config(small, dtype=getattr(torch, hardware.dtype)).to(hardware.device)
    model.requires_grad_(False)
    lora = lora_config(recipe, model)
    if not causal:
        lora.task_type = None
    model = get_peft_model(model, lora)
    return LoadedPolicy(
        model=model.eval(),
        tokenizer=encoder.tokenizer,
        encoder=encoder,
        base_model="a profile",
        base_model_hash="",
        device=torch.device(hardware.device),
        hardware=hardware,
    )


def _random_words(item: EncodedResponse, vocabulary: int) -> EncodedResponse:
    """The same lengths in words the random model knows."""
    return EncodedResponse(
        [token % vocabulary for token in item.prompt_ids], [token % vocabulary for token in item.response_ids]
    )


def _runner(policy: LoadedPolicy, strategy: Strategy, causal: bool) -> Callable[[Micro], torch.Tensor]:
    model, pad = causal_model(policy.model), policy.tokenizer.pad_token_id
    pad %= model.config.get_text_config().vocab_size

    def run(micro: Micro) -> torch.Tensor:
        if strategy is not Strategy.STOCK:
            rows = pack([i.prompt_ids for i in micro], [i.response_ids for i in micro], pad_token_id=pad)
            logps: torch.Tensor = packed_logps(model, rows.to(policy.device), strategy)[0]
            return -logps.sum()
        batch = {name: tensor.to(policy.device) for name, tensor in collate(micro, pad).items()}
        if causal:
            # as in training, the head computes the responses alone
            inner = model.base_model(
                batch["input_ids"], attention_mask=batch["attention_mask"], use_cache=False
            )
            said = batch["completion_mask"][:, 1:].bool()
            hidden, targets = inner.last_hidden_state[:, :-1][said], batch["input_ids"][:, 1:][said]
            return -head_logps(model, hidden, targets)[0].sum()
        hidden = policy.model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"])
        loss: torch.Tensor = hidden.last_hidden_state.float().square().mean()
        return loss

    return run


def _tokens(micro: Micro, strategy: Strategy) -> int:
    """Positions that are computed, padding included."""
    if strategy is Strategy.STOCK:
        return len(micro) * max(len(item.prompt_ids) + len(item.response_ids) for item in micro)
    rows = pack([item.prompt_ids for item in micro], [item.response_ids for item in micro], pad_token_id=0)
    return rows.prompt_ids.numel() + rows.suffix_ids.numel()


def _saved_bytes(policy: LoadedPolicy, run: Callable[[], torch.Tensor]) -> tuple[float, float]:
    """Bytes that autograd keeps of one forward, weights aside, and those of one layer's input. Its backward pass is
    made too: the first one packs weights and wakes the allocator."""
    weights = {p.untyped_storage().data_ptr() for p in policy.model.parameters()}
    storage_bytes: dict[int, int] = {}
    widest = 0

    def note(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            storage_bytes[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        with _record_hidden_bytes(policy.model) as inputs:
            loss = run()
        widest = max(inputs, default=0)
        # while the graph still holds them: a freed address may come again
        total = float(sum(storage_bytes.values()))
    loss.backward()
    policy.model.zero_grad(set_to_none=True)
    return total, float(widest)


@contextmanager
def _record_hidden_bytes(model: Any) -> Iterator[list[int]]:
    """Bytes of the hidden states that come out of the embedding."""
    sizes: list[int] = []
    embedding = causal_model(model).get_input_embeddings()
    hook = embedding.register_forward_hook(lambda _m, _i, out: sizes.append(out.numel() * out.element_size()))
    try:
        yield sizes
    finally:
        hook.remove()


def _spread(micros: Sequence[Micro], count: int) -> list[Micro]:
    """Choose `count` micro-batches, evenly apart."""
    step = max(1, len(micros) // count)
    return list(micros[step // 2 :: step])[:count] or list(micros[:1])


def _clock(hardware: Hardware) -> float:
    if hardware.device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


ANSWER_SHARE = 0.5
"""Share of `max_new_tokens` that an answer of a model too large to ask is taken to use."""

TRIAL_BATCHES = 16
"""Batches of prompts that are answered, at most: the longest answer decides how long a batch takes, and one is luck."""

TRIED_S = 3.0
"""Seconds after which no further batch is."""


@dataclass(frozen=True)
class SampledBatches:
    """Answers to a few batches of prompts, as tokens, and the seconds of a batch; None: left to the profiler."""

    items: list[EncodedResponse]
    sample_s: float | None
    generation: GenerationLoad


def answers_sampled(
    base_model: str,
    shape: tuple[Any, Encoder, int],
    recipe: PPORecipe | GRPORecipe,
    asked: Sequence[list[int]],
    at_once: int,
    samples: int,
    hardware: Hardware,
    base: MeasuredBase | None,
    forms_of: Callable[[LoadedPolicy], AnswerForms] | None,
) -> SampledBatches:
    """Answers of the base to `at_once` prompts at a time, `samples` to each, with an adapter as a run has it.

    forms_of: of the answers, where they are sampled within them.
    """
    from rl.training.rollout import sample_responses

    order = itertools.cycle(random.Random(recipe.seed).sample(asked, len(asked)))
    batches = [list(itertools.islice(order, at_once)) for _ in range(TRIAL_BATCHES)]
    sampling = Sampling(recipe.max_new_tokens, recipe.temperature, recipe.top_k, recipe.top_p)
    if shape[2] > ASKABLE:
        length = max(1, round(ANSWER_SHARE * recipe.max_new_tokens))
        items = [EncodedResponse(prompt, [0] * length) for prompt in batches[0] for _ in range(samples)]
        half = Sampling(length, recipe.temperature, recipe.top_k, recipe.top_p)
        return SampledBatches(items, None, GenerationLoad(batches[0], samples, half))
    base = base or MeasuredBase(base_model, hardware, quantization=recipe.quantization)
    policy = base.policy
    if not isinstance(policy.model, PeftModel):
        policy.model = get_peft_model(policy.model, lora_config(recipe, policy.model))
    model = policy.model.eval()
    forms = forms_of(policy) if forms_of is not None else None
    generator = torch.Generator(policy.device).manual_seed(recipe.seed)
    sampled_items: list[EncodedResponse] = []
    seconds: list[float] = []
    with matmul(hardware):
        # the first one wakes it
        sample_responses(causal_model(model), policy.encoder, batches[0], 1, sampling, generator, forms)
        for prompts in batches:
            began = time.perf_counter()
            rollouts = sample_responses(
                causal_model(model), policy.encoder, prompts, samples, sampling, generator, forms
            )
            seconds.append(time.perf_counter() - began)
            sampled_items += [rollout.item for rollout in rollouts]
            if sum(seconds) > TRIED_S:
                break
    return SampledBatches(
        sampled_items, statistics.fmean(seconds), GenerationLoad(batches[0], samples, sampling)
    )
