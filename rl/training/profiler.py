"""Time and memory of a training step on this machine.

A base model of at most ASKABLE parameters is loaded and measured, once per machine. The step of a larger one is
counted: the products of its weights and tokens, at the rate of one product of matrices timed here.

What loads or measures a model imports PEFT, TRL and the models of transformers, which takes seconds, inside functions:
a dry run whose figures are known loads none of them.
"""

from __future__ import annotations

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
from typing import TYPE_CHECKING, Any

import torch

from packed_forward.packing import Strategy, pack
from packed_forward.row_cache import RowCache, packed_code, row_key
from rl.checksums import base_hash
from rl.recipes import Recipe
from rl.recipes.base import SampledRecipe
from rl.recipes.fit import ModelShape, kept_bytes
from rl.training.encoding import EncodedResponse, Encoder
from rl.training.hardware import Hardware
from rl.training.loading import (
    FINDINGS,
    TOKENS,
    config_load,
    encoder_made,
    model_located,
    model_shape,
    text_limits,
    tokenizer_load,
)

if TYPE_CHECKING:
    from rl.training.constrained_generation import AnswerForms
    from rl.training.policy import LoadedPolicy

ASKABLE = 1_000_000_000
"""Parameters up to which a base model is loaded before a training, to be measured and asked."""

Micro = Sequence[EncodedResponse]


@dataclass(frozen=True)
class MicroBatchProfile:
    """Cost of one micro-batch of mean length."""

    train_s: float
    """Forward, backward and the optimiser's step."""
    forward_s: float
    """Forward alone, as a reference takes it."""
    saved_bytes: float
    """Bytes kept for the backward pass of the largest micro-batch."""
    checkpoint_bytes: float
    """The same with gradient checkpointing: each layer's input, and one layer whole."""
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
        self._found: dict[bytes, object] = {}

    @functools.cached_property
    def encoder(self) -> Encoder:
        """The base's encoder, with the tokens that earlier runs made."""
        source = model_located(self.base_model)
        key = self.key("encoder")
        if (known := self.find(key)) is None:
            limits = text_limits(config_load(self.base_model, source))
            tokenizer = tokenizer_load(self.base_model, source)
            self.store(key, [type(tokenizer).__name__, *limits], lasting=Path(source).is_dir())
        else:  # a configuration takes a second to load
            kind, *limits = known
            tokenizer = tokenizer_load(self.base_model, source, kind)
        encoder = encoder_made(self.base_model, tokenizer, *limits)
        if self.cache_dir is not None:
            encoder.cache = RowCache(self.cache_dir / TOKENS)
        return encoder

    @functools.cached_property
    def shape(self) -> ModelShape:
        """Shape of a causal base. Raises PolicyLoadError."""
        key = self.key("shape")
        if (known := self.find(key)) is None:
            known = dataclasses.asdict(model_shape(self.base_model))
            self.store(key, known, lasting=Path(model_located(self.base_model)).is_dir())
        return ModelShape(**known)

    @property
    def parameters(self) -> int:
        return self.shape.parameters

    @functools.cached_property
    def policy(self) -> LoadedPolicy:
        from rl.training.policy import load_policy

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
        """What was found under a key, by this object or stored by an earlier one; None where nothing was."""
        if key in self._found:
            return self._found[key]
        stored = self.findings.get([key]).get(key) if self.findings is not None else None
        return json.loads(stored) if stored is not None else None

    def store(self, key: bytes, finding: object, *, lasting: bool = True) -> None:
        """Keep a finding; `lasting` ones for later runs too."""
        self._found[key] = finding
        if lasting and self.findings is not None:
            self.findings.put({key: json.dumps(finding).encode()})


# --- Measured -----------------------------------------------------------------------------------------------

QUIET_SHARE = 0.6
"""Share of its threads' time that a measurement has on a machine with nothing else to do, at least."""

MEASURED_TOKENS = 384
"""Tokens of a micro-batch, cut to whole rows, that are measured: time and memory grow evenly beyond."""


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
        profile, measured = _measure(policy, recipe, micros, packed)
        wall, cpu = time.perf_counter() - began, time.process_time() - used
        known = {"profile": dataclasses.asdict(profile), "tokens": measured}
        quiet = base.hardware.device != "cpu" or cpu >= QUIET_SHARE * wall * torch.get_num_threads()
        base.store(key, known, lasting=quiet)
    return MicroBatchProfile(**known["profile"]).of_tokens(tokens / known["tokens"])


def _measure(
    policy: LoadedPolicy, recipe: Recipe, micros: Sequence[Micro], packed: bool
) -> tuple[MicroBatchProfile, int]:
    """The profile of a middle micro-batch, with the memory of the longest, and its tokens."""
    from packed_forward.selection import strategy_select
    from rl.training.policy import matmul

    _adapter_ensure(policy, recipe)
    strategy = Strategy.STOCK
    with matmul(policy.hardware):
        if packed:
            items = [item for micro in micros for item in micro]
            strategy = strategy_select(policy, items, gradients=True).strategy
        run = _runner(policy, strategy)
        ordered = sorted(micros, key=lambda micro: _tokens(micro, strategy))
        longest, middle = _cut(ordered[-1]), _cut(ordered[len(ordered) // 2])
        saved_bytes, inputs = _saved_bytes(policy, lambda: run(longest))
        whole = _tokens(ordered[-1], strategy) / _tokens(longest, strategy)
        saved_bytes, inputs = whole * saved_bytes, whole * inputs
        optimizer = torch.optim.AdamW([p for p in policy.model.parameters() if p.requires_grad])
        # kernels of a GPU are compiled when a shape comes for the first time, which takes seconds
        for _ in range(1 if policy.hardware.device == "cpu" else 2):
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
        saved_bytes=saved_bytes,
        checkpoint_bytes=inputs * layers + saved_bytes / layers,
        strategy=str(strategy),
    )
    return profile, _tokens(middle, Strategy.LAST_LAYER if packed else Strategy.STOCK)


def _adapter_ensure(policy: LoadedPolicy, recipe: Recipe) -> None:
    """Give the base a fresh adapter, which changes none of its answers."""
    from peft import PeftModel, get_peft_model

    from rl.training.policy import lora_config

    if not isinstance(policy.model, PeftModel):
        policy.model = get_peft_model(policy.model, lora_config(recipe, policy.model)).eval()


def _cut(micro: Micro) -> Micro:
    """The first rows of a micro-batch, as many as MEASURED_TOKENS hold."""
    size = next(
        (n for n in range(len(micro), 1, -1) if _tokens(micro[:n], Strategy.STOCK) <= MEASURED_TOKENS), 1
    )
    return micro[:size]


def _runner(policy: LoadedPolicy, strategy: Strategy) -> Callable[[Micro], torch.Tensor]:
    from packed_forward.forward import packed_logps
    from packed_forward.logps import causal_model, collate, head_logps

    model, pad = causal_model(policy.model), policy.tokenizer.pad_token_id

    def run(micro: Micro) -> torch.Tensor:
        if strategy is not Strategy.STOCK:
            rows = pack([i.prompt_ids for i in micro], [i.response_ids for i in micro], pad_token_id=pad)
            logps: torch.Tensor = packed_logps(model, rows.to(policy.device), strategy)[0]
            return -logps.sum()
        batch = {name: tensor.to(policy.device) for name, tensor in collate(micro, pad).items()}
        # as in training, the head computes the responses alone
        inner = model.base_model(batch["input_ids"], attention_mask=batch["attention_mask"], use_cache=False)
        said = batch["completion_mask"][:, 1:].bool()
        hidden, targets = inner.last_hidden_state[:, :-1][said], batch["input_ids"][:, 1:][said]
        return -head_logps(model, hidden, targets)[0].sum()

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
def _record_hidden_bytes(model: torch.nn.Module) -> Iterator[list[int]]:
    """Bytes of the hidden states that come out of the embedding."""
    from packed_forward.logps import causal_model

    sizes: list[int] = []
    embedding = causal_model(model).get_input_embeddings()
    hook = embedding.register_forward_hook(lambda _m, _i, out: sizes.append(out.numel() * out.element_size()))
    try:
        yield sizes
    finally:
        hook.remove()


def _clock(hardware: Hardware) -> float:
    if hardware.device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


# --- Counted ------------------------------------------------------------------------------------------------

EFFICIENCY = {"cpu": 0.7, "cuda": 0.6, "mps": 0.7}
"""Rate of a whole step by that of one large product, by device: norms, attention and the head run more slowly. Measured
on an H200: 0.51 to 0.68 (docs/performance.md)."""

BACKWARD = 2.0
"""Work of forward and backward by that of forward alone where the weights are frozen; the optimiser's is small."""

FEWEST_ROWS = 16
"""Rows from which a product runs at its full rate; answers of fewer prompts at once take as long."""


PRODUCT = {"cpu": (512, 2048, 3), "cuda": (4096, 4096, 20)}
"""Rows, width and repetitions of the product that is timed, by device: on a GPU it takes longer than its launch."""


def product_rate(hardware: Hardware) -> float:
    """Operations a second of one product [rows, width] @ [width, width] in the machine's dtype, timed here."""
    from rl.training.policy import matmul

    rows, width, times = PRODUCT.get(hardware.device, PRODUCT["cpu"])
    dtype = getattr(torch, hardware.dtype)
    generator = torch.Generator(hardware.device).manual_seed(0)  # products of zeros and ones run faster
    one = torch.randn(rows, width, dtype=dtype, device=hardware.device, generator=generator)
    other = torch.randn(width, width, dtype=dtype, device=hardware.device, generator=generator)
    with torch.inference_mode(), matmul(hardware):
        one @ other  # the first use loads kernels
        began = _clock(hardware)
        for _ in range(times):
            one @ other
        seconds = (_clock(hardware) - began) / times
    return 2 * rows * width * width / seconds


def profile_counted(
    shape: ModelShape, hardware: Hardware, micros: Sequence[Micro], *, packed: bool
) -> MicroBatchProfile:
    """The cost of a micro-batch by arithmetic: two operations for each weight and token in a forward pass."""
    shared = Strategy.LAST_LAYER if packed else Strategy.STOCK
    tokens = statistics.fmean(_tokens(micro, shared) for micro in micros)
    forward_s = 2 * shape.parameters * tokens / (EFFICIENCY[hardware.device] * product_rate(hardware))
    longest = max(micros, key=lambda micro: _tokens(micro, shared))
    answered = sum(len(item.response_ids) for item in longest)
    size = 4.0 if hardware.dtype == "float32" else 2.0
    fused = packed and hardware.device == "cuda"
    kept, sparing = (
        kept_bytes(shape, _tokens(longest, shared), answered, size, sparing=sparing, fused=fused)
        for sparing in (False, True)
    )
    return MicroBatchProfile(BACKWARD * forward_s, forward_s, kept, sparing, "counted")


# --- Sampling -----------------------------------------------------------------------------------------------

ANSWER_SHARE = 0.5
"""Share of `max_new_tokens` that an answer of a model too large to ask is taken to use."""

TRIAL_BATCHES = 16
"""Batches of prompts that are answered, at most: the longest answer decides how long a batch takes, and one is luck."""

TRIED_S = 3.0
"""Seconds after which no further batch is."""


@dataclass(frozen=True)
class SampledBatches:
    """Answers to a few batches of prompts, as tokens, and the seconds of a batch."""

    items: list[EncodedResponse]
    sample_s: float


def answers_sampled(
    base: MeasuredBase,
    recipe: SampledRecipe,
    asked: Sequence[list[int]],
    at_once: int,
    samples: int,
    forms_of: Callable[[LoadedPolicy], AnswerForms] | None,
) -> SampledBatches:
    """Answers of the base to `at_once` prompts at a time, `samples` to each, with an adapter as a run has it.

    forms_of: of the answers, where they are sampled within them.
    """
    order = itertools.cycle(random.Random(recipe.seed).sample(asked, len(asked)))
    batches = [list(itertools.islice(order, at_once)) for _ in range(TRIAL_BATCHES)]
    if base.parameters > ASKABLE:
        length = max(1, round(ANSWER_SHARE * recipe.max_new_tokens))
        items = [EncodedResponse(prompt, [0] * length) for prompt in batches[0] for _ in range(samples)]
        prompt_tokens = sum(map(len, batches[0]))
        passes = prompt_tokens + length * max(len(items), FEWEST_ROWS)
        seconds = (
            2 * base.parameters * passes / (EFFICIENCY[base.hardware.device] * product_rate(base.hardware))
        )
        return SampledBatches(items, seconds)
    from packed_forward.logps import causal_model
    from rl.training.constrained_generation import Sampling
    from rl.training.policy import matmul
    from rl.training.rollout import sample_responses

    policy = base.policy
    _adapter_ensure(policy, recipe)
    model = causal_model(policy.model.eval())
    sampling = Sampling(recipe.max_new_tokens, recipe.temperature, recipe.top_k, recipe.top_p)
    forms = forms_of(policy) if forms_of is not None else None
    generator = torch.Generator(policy.device).manual_seed(recipe.seed)
    sampled_items: list[EncodedResponse] = []
    times: list[float] = []
    with matmul(base.hardware):
        # the first one wakes it
        sample_responses(model, policy.encoder, batches[0], 1, sampling, generator, forms)
        for prompts in batches:
            began = _clock(base.hardware)
            rollouts = sample_responses(model, policy.encoder, prompts, samples, sampling, generator, forms)
            times.append(_clock(base.hardware) - began)
            sampled_items += [rollout.item for rollout in rollouts]
            if sum(times) > TRIED_S:
                break
    return SampledBatches(sampled_items, statistics.fmean(times))
