"""Agreement of an exported model with its original: KL divergence, top-1 agreement, equal answers, verdict.

Both models read the same texts. KL(original || exported) in nats per token is what llama.cpp's `--kl-divergence`
reports. A mean difference of log-probabilities over the vocabulary would be dominated by tokens that no model says.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import numpy as np
import numpy.typing as npt
from pydantic import BaseModel, ConfigDict

FloatArray = npt.NDArray[np.float32]

LogProbabilities: TypeAlias = Callable[[Sequence[int], int], FloatArray]
"""(token ids, n) -> log-probabilities after each of the last n tokens, (n, vocabulary)."""

Verdict: TypeAlias = Literal["same", "close", "changed"]

SAME_KL, SAME_TOP1, SAME_ANSWERS = 0.01, 0.98, 0.9
"""Models within this KL divergence, top-1 agreement and share of equal held-out answers are hard to tell apart; 8-bit
files are."""
SAME_TOP1_TEXTS = 0.95
"""Top-1 agreement on the check texts alone, many of whose tokens are nearly tied: SmolLM2's own Q4_1 file reaches 97.9
% there, its q8_0 file 96.3 %, at a KL divergence of 0.005 and 0.008."""
CLOSE_KL, CLOSE_TOP1 = 0.1, 0.9
"""Usual cost of 4 or 5 bits."""


@dataclass(frozen=True)
class Expected:
    """The original's output on one text."""

    ids: list[int]
    """Tokens of the prompt; of a held-out prompt also of the answer, except its last token."""
    top: list[int]
    """Most likely token at each of the last positions; of a held-out prompt at the answer's."""
    log_probs: FloatArray
    """(positions, vocabulary), natural logarithm, of the last positions, as many as memory holds."""
    held_out: bool = False


_shared: ContextVar[dict[object, object] | None] = ContextVar("references", default=None)


@contextmanager
def references_shared() -> Iterator[None]:
    """Inside the block exports of one policy share the original's outputs, kept in memory."""
    token = _shared.set({})
    try:
        yield
    finally:
        _shared.reset(token)


def references_kept() -> dict[object, Any] | None:
    """Kept outputs by (original, texts); None outside `references_shared`."""
    return _shared.get()


class Closeness(BaseModel):
    """Agreement of one exported model with its original on one kind of text."""

    model_config = ConfigDict(frozen=True)

    prompts: int
    positions: int
    """Number of compared positions."""
    kl: float
    """Mean KL(original || exported), nats per token."""
    top1_agreement: float
    """Share of positions with the same most likely token."""
    same_answers: int | None = None
    """Held-out prompts only: number of equal greedy answers."""


class Measured(BaseModel):
    """Agreement of one exported model on each kind of text."""

    model_config = ConfigDict(frozen=True)

    texts: Closeness
    """On a fixed set of texts in several scripts."""
    held_out: Closeness | None = None
    """On answers to held-out prompts; None without any."""

    @property
    def leading(self) -> Closeness:
        """The leading figures: of held-out answers, if there are any."""
        return self.held_out or self.texts


class ExportAgreement(BaseModel):
    """The check of an export, stored as `agreement` in an artifact's `checked`."""

    model_config = ConfigDict(frozen=True)

    policy: Measured
    base: Measured | None = None
    """Of the base model alone, converted the same way: the cost of conversion."""

    @property
    def verdict(self) -> Verdict:
        found = self.policy.leading
        answers = 1.0 if found.same_answers is None else found.same_answers / found.prompts
        top1 = SAME_TOP1 if self.policy.held_out else SAME_TOP1_TEXTS
        if found.kl <= SAME_KL and found.top1_agreement >= top1 and answers >= SAME_ANSWERS:
            return "same"
        return "close" if found.kl <= CLOSE_KL and found.top1_agreement >= CLOSE_TOP1 else "changed"

    def as_dict(self) -> dict[str, object]:
        """JSON for `checked`, with the verdict."""
        return {**self.model_dump(exclude_none=True), "verdict": self.verdict}

    def words(self) -> list[str]:
        """The policy's figures beside the base's, in sentences."""
        found, base = self.policy.leading, self.base.leading if self.base else None
        lines = []
        if found.same_answers is not None:
            beside = f" (base model: {base.same_answers})" if base and base.same_answers is not None else ""
            lines.append(
                f"Same answer as the trained model to {found.same_answers} of {found.prompts} held-out prompts{beside}."
            )
        beside = f" (base model: {base.kl:.2g} and {100 * base.top1_agreement:.1f} %)" if base else ""
        where = (
            "its answers" if found.same_answers is not None else f"{found.positions:,} tokens of test texts"
        )
        lines.append(
            f"On {where}: KL divergence {found.kl:.2g} nats per token, same most likely token at "
            f"{100 * found.top1_agreement:.1f} %{beside}."
        )
        return [*lines, VERDICTS[self.verdict]]


VERDICTS: dict[Verdict, str] = {
    "same": "Hard to tell apart from the trained model.",
    "close": "Close to the trained model: what quantising to 4 or 5 bits usually costs.",
    "changed": "Answers differ from the trained model's more often than 4-bit files usually do.",
}


def measured(expected: Sequence[Expected], exported: LogProbabilities) -> Measured:
    """Agreement of an exported model with the original's outputs."""
    held_out = [text for text in expected if text.held_out]
    return Measured(
        texts=closeness([text for text in expected if not text.held_out], exported),
        held_out=closeness(held_out, exported) if held_out else None,
    )


def closeness(expected: Iterable[Expected], exported: LogProbabilities) -> Closeness:
    """Agreement on one kind of text. An iterator of texts saves memory: a row of logits is as long as
    the vocabulary."""
    divergence, agreements, kl_positions, top_positions, same = 0.0, 0, 0, 0, 0
    prompts, held_out = 0, False
    for text in expected:
        prompts, held_out = prompts + 1, text.held_out
        found = exported(text.ids, len(text.top))
        tops = found.argmax(-1) == np.array(text.top)
        agreements += int(tops.sum())
        same += bool(tops.all())
        top_positions += len(text.top)
        rows = len(text.log_probs)
        shares = np.exp(text.log_probs.astype(np.float64))
        divergence += float((shares * (text.log_probs - found[len(found) - rows :])).sum())
        kl_positions += rows
    return Closeness(
        prompts=prompts,
        positions=kl_positions,
        kl=max(divergence / kl_positions, 0.0) if np.isfinite(divergence) else float("inf"),
        top1_agreement=agreements / top_positions,
        same_answers=same if held_out else None,
    )
