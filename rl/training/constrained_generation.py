"""Generation of answers, under JSON schemas too: tokens that each answer of a batch may go on with, as the gateway has
them."""

from __future__ import annotations

import dataclasses
import inspect
import json
import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from transformers import (
    DynamicCache,
    LogitsProcessor,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
    StaticCache,
)
from transformers.cache_utils import StaticLayer

from packed_forward.packing import AllowedTokens, CompletionTokens, TokenSet
from packed_forward.prefix_attention import ATTENTION, SharedPrompt, running_rows
from rl.decoding.constraint import Constraint, DecodingFailed, GrammarVocabulary, SchemaRefused
from rl.training.result import TrainingRefused

logger = logging.getLogger("rl.training")


def vocabulary_of(
    tokenizer: PreTrainedTokenizerBase, size: int, stop: Sequence[int]
) -> GrammarVocabulary | None:
    """Vocabulary of a fast tokenizer as grammars read it; None of another one, whose bytes nobody tells.

    size: tokens that the model gives logits of; stop: those that end an answer.
    """
    if not isinstance(tokenizer, PreTrainedTokenizerFast) or not stop:
        return None
    from llguidance.hf import from_tokenizer

    read = from_tokenizer(tokenizer, n_vocab=size, eos_token=list(stop))
    known, control = len(tokenizer), {*stop, *tokenizer.all_special_ids}

    def piece(token: int) -> bytes:
        written: bytes = b"" if token >= known or token in control else read.decode_bytes([token])
        return written

    return GrammarVocabulary(read, size, piece)


AnswerForm = Mapping[str, object] | Sequence[str] | None
"""Answers that a prompt may be given: a JSON schema, a closed set of texts, or None, free text."""


class AnswerConstraints:
    """Constraints of the answers of one batch, row by row."""

    def __init__(self, constraints: Sequence[Constraint | None], stop: Collection[int], size: int) -> None:
        """constraints: at the beginning of the answers, None: free text; stop: tokens that end an answer; size: of the
        vocabulary."""
        self._constraints, self._stop, self.size = list(constraints), sorted(stop), size
        self.forced: set[int] = set()
        """Rows whose constraint took away the likeliest token at least once."""

    def __bool__(self) -> bool:
        return any(constraint is not None for constraint in self._constraints)

    def allowed_tokens(self, row: int) -> TokenSet | None:
        """Tokens that the answer of a row may go on with, [size]; None: any, of free text and after its end.

        Where the gateway would give no answer the turn ends, with an answer that no agent can act on.
        """
        constraint = self._constraints[row]
        if constraint is None:
            return None
        try:
            return constraint.allowed_tokens()
        except (DecodingFailed, SchemaRefused):
            end = np.zeros(self.size, bool)
            end[self._stop] = True
            return end

    def accept(self, row: int, token: int) -> None:
        """Go on in a row by a token that was allowed."""
        constraint = self._constraints[row]
        if constraint is not None and token in self._stop:
            self._constraints[row] = None
        elif constraint is not None:
            constraint.accept(token)

    def mask_logits(self, logits: torch.Tensor, rows: Sequence[int]) -> torch.Tensor:
        """Logits [n, size] of so many rows, minus infinity for every token that its answer may not go on with."""
        sets = [self.allowed_tokens(row) for row in rows]
        if all(one is None for one in sets):
            return logits
        every = np.ones(self.size, bool)
        mask = torch.from_numpy(np.stack([every if one is None else one for one in sets])).to(logits.device)
        taken = ~mask.gather(1, logits.argmax(-1, keepdim=True))[:, 0]
        self.forced |= {row for row, gone in zip(rows, taken.tolist(), strict=True) if gone}
        return logits.masked_fill(~mask, -torch.inf)


class SchemaMask(LogitsProcessor):
    """Logits of one batch with every token at minus infinity that an answer's constraint does not take."""

    def __init__(self, constraints: AnswerConstraints) -> None:
        self._constraints = constraints
        self._begun = False

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        rows = range(len(input_ids))
        if self._begun:
            for row, token in zip(rows, input_ids[:, -1].tolist(), strict=True):
                self._constraints.accept(row, token)
        self._begun = True
        return self._constraints.mask_logits(scores, rows)


class AnswerForms:
    """Forms of the answers to the prompts of a run, by the prompts' tokens: where answers are sampled within them, they
    tell afterwards which tokens each token was sampled among."""

    def __init__(
        self, constraint: Callable[[AnswerForm], Constraint | None], stop: Collection[int], size: int
    ) -> None:
        """constraint: a form's, at the beginning of an answer, None where it cannot be enforced; stop and size as
        `AnswerConstraints` takes them."""
        self._constraint, self._stop, self._size = constraint, stop, size
        self._forms: dict[tuple[int, ...], AnswerForm] = {}
        self._beginnings: dict[tuple[int, ...], Constraint | None] = {}
        """Constraints by prompt, each at the beginning of an answer, once they were asked for."""

    def __bool__(self) -> bool:
        return any(form is not None for form in self._forms.values())

    def add(self, prompt_ids: Sequence[int], form: AnswerForm) -> None:
        """Add a prompt. Answers to one that was added with another form are free: its tokens do not say which."""
        key = tuple(prompt_ids)
        self._forms[key] = form if self._forms.get(key, form) == form else None
        self._beginnings.pop(key, None)

    def form_of(self, prompt_ids: Sequence[int]) -> str:
        """The form of answers to a prompt as text, to tell it from others; empty for free text."""
        form = self._forms.get(tuple(prompt_ids))
        return "" if form is None else json.dumps(form, sort_keys=True)

    def start(self, prompts: Sequence[Sequence[int]]) -> AnswerConstraints:
        """Constraints of one answer to each prompt, at its beginning."""
        return AnswerConstraints([self._begin(tuple(prompt)) for prompt in prompts], self._stop, self._size)

    def _begin(self, prompt: tuple[int, ...]) -> Constraint | None:
        if prompt not in self._beginnings:
            self._beginnings[prompt] = self._constraint(self._forms.get(prompt))
        beginning = self._beginnings[prompt]
        return None if beginning is None else beginning.copy()

    def permits(self, item: CompletionTokens) -> bool:
        """True of an answer that could have been sampled within its form; of free text always."""
        constraints = self.start([item.prompt_ids])
        for token in item.response_ids:
            allowed = constraints.allowed_tokens(0)
            if allowed is not None and not allowed[token]:
                return False
            constraints.accept(0, token)
        return True

    def allowed_tokens(self, items: Sequence[CompletionTokens]) -> AllowedTokens | None:
        """Tokens that each token of sampled answers was sampled among, one answer behind the other; None where all of
        them are free."""
        constraints = self.start([item.prompt_ids for item in items])
        if not constraints:
            return None
        places = []
        for row, item in enumerate(items):
            for token in item.response_ids:
                places.append(constraints.allowed_tokens(row))
                constraints.accept(row, token)
        return AllowedTokens.of(places, self._size)


@dataclass(frozen=True)
class Sampling:
    """Sampling parameters of a token. Temperature 0 takes the likeliest; top_k 0 and top_p 1 leave all tokens in."""

    max_new_tokens: int
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0


LAUNCHED = 2
"""Steps that are launched kernel by kernel before one is captured: a capture may allocate and wait for nothing."""

LEAST_STEPS = 8
"""Steps from which a capture pays: it costs about three."""


def is_captured(model: torch.nn.Module, steps: int) -> bool:
    """True if so many steps of answers run as a CUDA graph."""
    return (
        model.device.type == "cuda"
        and steps >= LEAST_STEPS
        and model.config._attn_implementation == ATTENTION
    )


class CapturedSteps:
    """Steps of a batch of answers, one token to each row: captured as a CUDA graph at the third one and replayed.

    A step has thousands of launches and little work, so a GPU waits for them. The keys of the answers lie in tensors of
    their full length, which a graph can write to. What cannot be captured is launched.
    """

    def __init__(
        self, model: torch.nn.Module, shared: SharedPrompt, position: Tensor, cache: StaticCache, steps: int
    ) -> None:
        """position: of the rows' next tokens, [rows, 1]; cache: with room for `steps` tokens."""
        self.model, self.cache, self.position = model, cache, position.clone()
        bias = shared.attention_bias.new_full((1, 1, 1, steps), -torch.inf)
        self.shared = dataclasses.replace(shared, own_bias=bias)
        self.tokens = torch.zeros_like(self.position)
        self.mask = torch.ones(1, 1, 1, 1, dtype=torch.bool, device=position.device)
        self.done, self.captures = 0, position.device.type == "cuda"
        self.graph: torch.cuda.CUDAGraph | None = None
        self.logits = torch.empty(0)

    def step(self, tokens: Tensor) -> Tensor:
        """Logits [rows, vocabulary] after one more token of each row, valid until the next step."""
        self.tokens.copy_(tokens[:, None])
        assert self.shared.own_bias is not None
        self.shared.own_bias[..., self.done] = 0
        if self.captures and self.done == LAUNCHED:
            self._capture()
        if self.graph is None:
            self.logits = self._launch()
        else:
            self.graph.replay()
        self.done += 1
        self.position += 1
        return self.logits

    def _launch(self) -> Tensor:
        output = self.model(
            input_ids=self.tokens,
            attention_mask=self.mask,
            position_ids=self.position,
            past_key_values=self.cache,
            use_cache=True,
            prefix=self.shared,
        )
        logits: Tensor = output.logits[:, -1]
        return logits

    def _capture(self) -> None:
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph):
                self.logits = self._launch()
        except RuntimeError as error:
            self.captures = False
            logger.warning("answers are launched kernel by kernel: %s", str(error).partition("\n")[0])
            return
        self.graph = graph


def is_answered_by_position(model: torch.nn.Module) -> bool:
    """True of a model that takes positions, and so left-padded prompts with a key-value cache."""
    return "position_ids" in inspect.signature(type(model).forward).parameters


@torch.no_grad()
def generate_tokens(
    model: torch.nn.Module,
    prompts: Sequence[Sequence[int]],
    samples: int,
    sampling: Sampling,
    stop_ids: Sequence[int],
    pad_token_id: int,
    generator: torch.Generator,
    constraints: AnswerConstraints | None = None,
) -> Tensor:
    """Tokens [prompts * samples, at most max_new_tokens], int64; what follows a row's first stop token is padding.
    Rows with a constraint stay within it.

    The prompts are computed once. A model with our attention (`packed.prefix_attention`, by its self-test) reads their
    keys and values where they are, all samples together; for others they are repeated for the samples. Rows that have
    ended leave the batch when they are half of it, so that one long answer does not make all others wait. On a CUDA
    device they stay, and the steps are a graph.
    """
    if not is_answered_by_position(model):
        raise TrainingRefused(
            f"{model.config.model_type} cannot be asked with left-padded prompts and a key-value cache, which sampling "
            f"needs; choose a base of another architecture"
        )
    device = model.device
    width = max(len(prompt) for prompt in prompts)
    ids = torch.full((len(prompts), width), pad_token_id, device=device)
    mask = torch.zeros((len(prompts), width), dtype=torch.long, device=device)
    for row, prompt in enumerate(prompts):
        ids[row, width - len(prompt) :] = torch.tensor(list(prompt), device=device)
        mask[row, width - len(prompt) :] = 1
    output = model(
        input_ids=ids,
        attention_mask=mask,
        position_ids=(mask.cumsum(1) - 1).clamp(min=0),
        use_cache=True,
        logits_to_keep=1,
    )
    cache, logits = output.past_key_values, output.logits[:, -1].repeat_interleave(samples, 0)
    shared, steps = None, sampling.max_new_tokens - 1
    fixed = StaticCache(model.config, max_cache_len=steps) if is_captured(model, steps) else None
    if fixed is not None and any(type(layer) is not StaticLayer for layer in fixed.layers):
        fixed = None  # a sliding window writes where it pleases
    if fixed is not None or (samples > 1 and model.config._attn_implementation == ATTENTION):
        shared, cache = SharedPrompt.of(cache, mask, samples), DynamicCache()
    elif samples > 1:
        cache.batch_repeat_interleave(samples)
    mask = mask.repeat_interleave(samples, 0)
    position = mask.sum(1, keepdim=True)
    captured = CapturedSteps(model, shared, position, fixed, steps) if fixed and shared else None
    tokens = torch.full((len(logits), sampling.max_new_tokens), pad_token_id, device=device)
    stops = torch.tensor(sorted(stop_ids), device=device)
    # the rows still in the batch, by their place in `tokens`, and which of them have not ended
    alive = torch.arange(len(logits), device=device)
    running = torch.ones(len(logits), dtype=torch.bool, device=device)
    own_mask = torch.ones(
        1, 1, 1, 1, dtype=torch.bool, device=device
    )  # 4-D: transformers makes no mask of its own
    for column in range(sampling.max_new_tokens):
        if constraints:
            logits = constraints.mask_logits(logits, alive.tolist())
        samples_drawn = draw(logits, sampling, generator)
        tokens[alive[running], column] = samples_drawn[running]
        if constraints:
            for row, token in zip(alive[running].tolist(), samples_drawn[running].tolist(), strict=True):
                constraints.accept(row, token)
        running = running & ~torch.isin(samples_drawn, stops)
        left = int(running.sum())
        if left == 0 or column + 1 == sampling.max_new_tokens:
            return tokens[:, : column + 1]
        if captured is not None:
            logits = captured.step(samples_drawn)
            continue
        if 2 * left <= len(running):
            kept, prompts, most = running_rows(running, shared.samples if shared else 1)
            if len(kept) < len(running):
                cache.batch_select_indices(kept)
                shared = shared.select(prompts, most) if shared else None
                alive, mask, position = alive[kept], mask[kept], position[kept]
                samples_drawn, running = samples_drawn[kept], running[kept]
        mask = torch.cat([mask, mask.new_ones(len(mask), 1)], 1)
        output = model(
            input_ids=samples_drawn[:, None],
            attention_mask=mask if shared is None else own_mask,
            position_ids=position,
            past_key_values=cache,
            use_cache=True,
            **({} if shared is None else {"prefix": shared}),
        )
        position = position + 1
        cache, logits = output.past_key_values, output.logits[:, -1]
    return tokens


def draw(logits: Tensor, sampling: Sampling, generator: torch.Generator) -> Tensor:
    """One token per row of logits [rows, vocabulary]: temperature, then top_k, then top_p (Holtzman et al. 2020).

    top_p keeps the likeliest tokens up to and including the one with which their sum reaches p: never none.
    """
    if sampling.temperature == 0:
        return logits.argmax(-1)
    logits = logits.float() / sampling.temperature
    if 0 < sampling.top_k < logits.shape[-1]:
        smallest = logits.topk(sampling.top_k, dim=-1).values[:, -1:]
        logits = logits.masked_fill(logits < smallest, -torch.inf)
    if sampling.top_p < 1:
        ordered, order = logits.sort(dim=-1, descending=True)
        probs = ordered.softmax(-1)
        beyond = probs.cumsum(-1) - probs >= sampling.top_p  # the sum of those before it suffices already
        logits = torch.empty_like(logits).scatter_(-1, order, ordered.masked_fill(beyond, -torch.inf))
    return torch.multinomial(logits.softmax(-1), 1, generator=generator)[:, 0]
