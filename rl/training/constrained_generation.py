"""Generation under JSON schemas: tokens that each answer of a batch may go on with, as the gateway has them."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from transformers import LogitsProcessor, PreTrainedTokenizerFast

from packed_forward.allowed_tokens import AllowedTokens, TokenSet
from packed_forward.packing import CompletionTokens
from rl.decoding.constraint import Constraint, DecodingFailed, GrammarVocabulary, SchemaRefused


def vocabulary_of(tokenizer: Any, size: int, stop: Sequence[int]) -> GrammarVocabulary | None:
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


AnswerForm = Mapping[str, Any] | Sequence[str] | None
"""Answers that a prompt may be given: a JSON schema, a closed set of texts, or None, free text."""


class AnswerConstraints:
    """Constraints of the answers of one batch, row by row."""

    def __init__(self, constraints: Sequence[Constraint | None], stop: Collection[int], size: int) -> None:
        """constraints: at the beginning of the answers, None: free text; stop: tokens that end an answer; size: of the
        vocabulary."""
        self._constraints, self._stop, self.size = list(constraints), sorted(stop), size

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
        mask = torch.from_numpy(np.stack([every if one is None else one for one in sets]))
        return logits.masked_fill(~mask.to(logits.device), -torch.inf)


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
