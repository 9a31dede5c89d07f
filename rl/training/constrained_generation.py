"""Generation under JSON schemas: tokens that each answer of a batch may go on with, as the gateway has them."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import torch
from transformers import LogitsProcessor, PreTrainedTokenizerFast

from rl.decoding.constraint import Constraint, DecodingFailed, GrammarVocabulary
from rl.decoding.grammar import SchemaRefused


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


class SchemaMask(LogitsProcessor):
    """Logits of one batch with every token at minus infinity that an answer's constraint does not take."""

    def __init__(self, constraints: Sequence[Constraint | None], stop: Collection[int]) -> None:
        """constraints: of the rows, at the beginning of their answers; None: free text."""
        self._constraints, self._stop = list(constraints), sorted(stop)
        self._begun = False

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        rows = scores.float().cpu().numpy()
        for row, constraint in enumerate(self._constraints):
            if constraint is None:
                continue
            if self._begun and int(input_ids[row, -1]) in self._stop:
                self._constraints[row] = None
                continue
            try:
                if self._begun:
                    constraint.accept(int(input_ids[row, -1]))
                scores[row] = torch.from_numpy(constraint.mask_logits(rows[row])).to(scores)
            except (DecodingFailed, SchemaRefused):
                # the gateway gives no answer here: this one ends unfinished, which no agent can act on
                scores[row] = -torch.inf
                scores[row, self._stop] = 0.0
        self._begun = True
        return scores
