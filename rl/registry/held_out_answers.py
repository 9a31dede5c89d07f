"""Answers of a policy and of the side it was judged against to the same held-out prompts: wins, losses and ties.

Read from the stored evidence of an evaluation, from which erasure takes what it takes; nothing is asked of a model.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rl.gates.evidence_kinds import KNOWN, LABELS, OUTCOMES, PAIRS
from rl.models import Evaluation, Policy

WIN, LOSS, TIE = "win", "loss", "tie"

CLOSE = 1e-9
"""Difference of two figures below which they are the same."""


@dataclass(frozen=True)
class HeldOutAnswer:
    """One held-out prompt with both answers."""

    messages: Sequence[Mapping[str, Any]]
    answer: str
    reference_answer: str
    valid: bool
    other_valid: bool
    outcome: str
    """WIN, LOSS or TIE of the policy."""
    words: str
    """Reason for the outcome."""

    @property
    def same(self) -> bool:
        return self.answer.strip() == self.reference_answer.strip()


def evaluation_newest_paired(policy: Policy) -> Evaluation | None:
    """The newest evaluation of a policy in which another side answered too."""
    return policy.evaluations.exclude(against="").exclude(evidence={}).order_by("-pk").first()


def answers_compared(evaluation: Evaluation) -> list[HeldOutAnswer]:
    """Both answers to each prompt, wins first, then losses; within them where the answers differ first.

    Where known answers carried the comparison, a prompt is won where only the policy's answer is right, so that the
    numbers are those of the verdict. Else the answers themselves decide where people, tests or rewards say which is
    better, and elsewhere whether a side finds what people preferred likelier than the other side does.
    """
    leanings = _leanings(evaluation)
    known = evaluation.figures.get("carried_by") == KNOWN
    found = [
        _answer_pair(one, leanings.get(one.get("prompt_hash", "")), known=known)
        for one in evaluation.evidence.get("answers", ())
    ]
    order = {WIN: 0, LOSS: 1, TIE: 2}
    return sorted(found, key=lambda one: (order[one.outcome], one.same))


def _answer_pair(stored: Mapping[str, Any], leaning: float | None, *, known: bool) -> HeldOutAnswer:
    own, other = stored.get("reward"), stored.get("other_reward")
    outcome, words = TIE, "no rating, reward or right answer distinguishes the two"
    if known:
        if leaning:
            outcome = WIN if leaning > 0 else LOSS
            words = "only its answer is right" if leaning > 0 else "only the other answer is right"
    elif stored.get("valid") != stored.get("other_valid"):
        outcome = WIN if stored.get("valid") else LOSS
        words = "only one of the answers is valid"
    elif stored.get("judged") and own is not None and other is not None and abs(own - other) > CLOSE:
        outcome = WIN if own > other else LOSS
        words = f"rated answers: {own:.2g} against {other:.2g}"
    elif leaning:
        outcome = WIN if leaning > 0 else LOSS
        words = (
            "it gives the chosen answer a higher probability than the other policy does"
            if leaning > 0
            else "the other policy gives the chosen answer a higher probability"
        )
    return HeldOutAnswer(
        messages=stored.get("messages", ()),
        answer=str(stored.get("answer", "")),
        reference_answer=str(stored.get("other_answer", "")),
        valid=bool(stored.get("valid")),
        other_valid=bool(stored.get("other_valid")),
        outcome=outcome,
        words=words,
    )


def _leanings(evaluation: Evaluation) -> dict[str, float]:
    """Per prompt with evidence of the kind that carried the comparison, above 0 where it speaks for the policy, below
    where for the other side; prompts where it speaks for neither are left out."""
    kind = evaluation.figures.get("carried_by", PAIRS)
    stored = evaluation.evidence
    items = stored.get("cases", ()) if kind == PAIRS else stored.get("others", {}).get(kind, ())
    sums: dict[str, list[float]] = {}
    for item in items:
        sums.setdefault(item["prompt_hash"], []).append(_preference_strength(kind, item))
    found = {prompt: math.fsum(values) for prompt, values in sums.items()}
    return {prompt: value for prompt, value in found.items() if abs(value) > CLOSE}


def _preference_strength(kind: str, item: Mapping[str, Any]) -> float:
    if kind in (LABELS, OUTCOMES):
        # towards what was rated above the middle, away from what was rated below
        return (float(item["value"]) - 0.5) * float(item["shift"])
    return float(item["own"]) - float(item["other"])


def counts_of(answers: Iterable[HeldOutAnswer]) -> dict[str, int]:
    """Number of wins, losses and ties."""
    counts = dict.fromkeys((WIN, LOSS, TIE), 0)
    for one in answers:
        counts[one.outcome] += 1
    return counts
