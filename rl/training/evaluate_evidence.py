"""Held-out evidence beside pairs: rated answers, answers that people wrote, tests and rewards of generated answers.

Each kind gives one item per prompt or answer with what both sides did there, which a gate reads, and one set of
figures.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rl.agents.base import Agent
from rl.datasets.known_answers import RIGHT
from rl.gates.effects import ConcordanceEffect, Effect, effect_of, items_of
from rl.gates.evidence_kinds import CORRECTIONS, KNOWN, LABELS, OUTCOMES, REWARDS, TESTS
from rl.statistics import mean_interval, wilson_interval
from rl.statistics.calibration import CalibratedProbabilities, cross_fitted
from rl.training.encoding import prompt_messages, response_text
from rl.training.evaluate_answers import AnswerJudge, HeldOutPrompt, prompt_key, slices_of
from rl.training.scoring import ResponseScore

ScoredRow = tuple[str, Mapping[str, Any]]
"""A kind and a row of it whose `completion` is scored."""

Check = Callable[[Sequence[Mapping[str, Any]], Sequence[str]], Sequence[float | None]]
"""(held-out rows, one generated answer each) -> a value each, more is better, or None where nothing can be said."""

MAX_CHECKS = 256
"""Prompts of a kind, at most, that are answered because the answers themselves are the evidence."""


@dataclass(frozen=True)
class OtherEvidence:
    """Items of one kind and its figures."""

    kind: str
    records: list[dict[str, Any]]
    figures: dict[str, Any]
    effect: Effect | None = field(default=None, compare=False)


def rows_scored(rows: Mapping[str, Sequence[Mapping[str, Any]]], agent: Agent) -> list[ScoredRow]:
    """The rows of every kind whose own response is scored: rated answers, and written ones where the agent's answers
    are free text (of a structured agent the greedy answer itself is compared)."""
    kinds = [LABELS, OUTCOMES, *([] if agent.discrete else [CORRECTIONS])]
    return [(kind, row) for kind in kinds for row in rows.get(kind, ())]


def response_of(row: Mapping[str, Any], number: int) -> tuple[list[Any], str]:
    """Prompt and completion as they are scored. Raises ValueError for a completion that is no single text."""
    return prompt_messages(row, number), response_text(row, "completion", number)


def hash_of(row: Mapping[str, Any]) -> str:
    """Identity of a row's prompt: its hash, or the prompt itself where a row has none."""
    return row.get("prompt_hash") or prompt_key(row["prompt"])


def rated_evidence(
    kind: str,
    rows: Sequence[Mapping[str, Any]],
    own: Sequence[ResponseScore],
    other: Sequence[ResponseScore],
    own_reference: Sequence[ResponseScore],
    other_reference: Sequence[ResponseScore],
) -> OtherEvidence:
    """Rated answers: how far the policy moved each from the other side, and how well each side knows what is liked.

    How far a side moved an answer is measured from the reference it was trained against: the base model, or its
    warm-up. Where both have the same, their distance from each other is what remains.
    """
    entries = []
    for row, *scores in zip(rows, own, other, own_reference, other_reference, strict=True):
        mine, theirs, from_mine, from_theirs = (score.mean_logp for score in scores)
        moved, other_moved = mine - from_mine, theirs - from_theirs
        entries.append(
            {
                "prompt_hash": hash_of(row),
                "cluster": row.get("cluster", ""),
                "value": float(row["score"]),
                "shift": moved - other_moved,
                "own": moved,
                "other": other_moved,
                "slices": slices_of(row),
            }
        )
    effect = effect_of(kind, items_of(entries))
    figures: dict[str, Any] = {"responses": len(rows), **_figures(entries, effect)}
    if isinstance(effect, ConcordanceEffect):
        figures["concordance"] = _difference_facts(effect)
    figures["probability_liked"] = _knowledge(entries)
    return OtherEvidence(kind, entries, figures, effect)


def written_evidence(
    rows: Sequence[Mapping[str, Any]], own: Sequence[ResponseScore], other: Sequence[ResponseScore]
) -> OtherEvidence:
    """Free texts that people wrote: log-likelihood per token on either side; of several to a prompt the mean."""
    prompts: dict[str, list[tuple[float, float]]] = {}
    first: dict[str, Mapping[str, Any]] = {}
    for row, mine, theirs in zip(rows, own, other, strict=True):
        prompts.setdefault(hash_of(row), []).append((mine.mean_logp, theirs.mean_logp))
        first.setdefault(hash_of(row), row)
    stored = [
        _case(first[name], *(math.fsum(side) / len(found) for side in zip(*found, strict=True)))
        for name, found in prompts.items()
    ]
    effect = effect_of(CORRECTIONS, items_of(stored))
    return OtherEvidence(CORRECTIONS, stored, _figures(stored, effect), effect)


def answered_evidence(
    kind: str,
    asked: Sequence[HeldOutPrompt],
    own: Sequence[str],
    other: Sequence[str],
    check: Check,
) -> OtherEvidence:
    """Generated answers that a check gives values: tests, rewards, agreement with what people wrote. Prompts where it
    has nothing to say of one side are left out."""
    rows = [prompt.row for prompt in asked]
    values = zip(rows, check(rows, own), check(rows, other), strict=True)
    stored = [
        _case(row, float(mine), float(theirs))
        for row, mine, theirs in values
        if mine is not None and theirs is not None
    ]
    effect = effect_of(kind, items_of(stored))
    return OtherEvidence(kind, stored, _figures(stored, effect), effect)


def agreement_check(asked: Sequence[HeldOutPrompt], judge: AnswerJudge) -> Check:
    """Check that an answer does what one that people wrote does."""
    written = {id(prompt.row): {judge.action(text) for text in prompt.demonstrations} for prompt in asked}

    def check(rows: Sequence[Mapping[str, Any]], answers: Sequence[str]) -> list[float | None]:
        return [
            float(judge.action(text) in written[id(row)]) for row, text in zip(rows, answers, strict=True)
        ]

    return check


def field_figures(
    asked: Sequence[HeldOutPrompt], judge: AnswerJudge, own: Sequence[str], other: Sequence[str] | None
) -> dict[str, Any] | None:
    """Mean share of the fields of what people wrote that either side's answers have, with 95 % intervals; None where
    answers have one field or none. other: None where nothing is compared."""
    sides = [
        [judge.fields_right(text, prompt.demonstrations) for prompt, text in zip(asked, texts, strict=True)]
        for texts in (own, *([other] if other is not None else []))
    ]
    known = [values for values in zip(*sides, strict=True) if None not in values]
    if not judge.agent.structured or not known:
        return None
    found = dict(zip(("own", "against"), map(list, zip(*known, strict=True)), strict=False))
    figures = {side: mean_interval(values, bounds=(0.0, 1.0)).as_dict() for side, values in found.items()}
    if "against" in found:
        gains = [mine - theirs for mine, theirs in zip(found["own"], found["against"], strict=True)]
        figures["difference"] = mean_interval(gains, bounds=(-1.0, 1.0)).as_dict()
    return figures


def right_answer_check(judge: AnswerJudge) -> Check:
    """Check of an answer against the list of right ones of its row (`rl.datasets.known_answers`). An answer on neither
    list is not right."""

    def check(rows: Sequence[Mapping[str, Any]], answers: Sequence[str]) -> list[float | None]:
        return [float(judge.does_one_of(text, row[RIGHT])) for row, text in zip(rows, answers, strict=True)]

    return check


def _case(row: Mapping[str, Any], own: float, other: float) -> dict[str, Any]:
    facts = {"prompt_hash": hash_of(row), "cluster": row.get("cluster", ""), "slices": slices_of(row)}
    return {**facts, "own": own, "other": other}


def _figures(stored: Sequence[Mapping[str, Any]], effect: Effect | None) -> dict[str, Any]:
    """Prompts, the figure of either side, the paired difference with its 95 % interval and two-sided p."""
    figures: dict[str, Any] = {"prompts": len({one["cluster"] or one["prompt_hash"] for one in stored})}
    if effect is None:
        return figures
    own, other = effect.sides
    return figures | {
        "unit": effect.unit,
        "value": own,
        "against_value": other,
        "difference": effect.interval(0.95).as_dict(),
        "p_value": min(1.0, 2 * min(effect.better(), effect.worse())),
    }


def side_figure(kind: str, stored: Sequence[Mapping[str, Any]], side: str) -> dict[str, Any]:
    """The figure of one side alone with its 95 % interval: a share where all are 0 or 1, else a mean."""
    values = [float(one[side]) for one in stored]
    if all(value in (0.0, 1.0) for value in values):
        return wilson_interval(round(sum(values)), len(values)).as_dict()
    return mean_interval(values).as_dict()


def _difference_facts(effect: ConcordanceEffect) -> dict[str, Any]:
    found = effect.interval(0.95)
    return {"value": 0.5 + found.value, "low": 0.5 + found.low, "high": 0.5 + found.high, "n": effect.n}


def _knowledge(stored: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Fit of each side's log-ratio to the base to people's ratings, as a calibrated probability.

    log_loss in nats (0.693 for a coin) and brier, per answer; the differences are the policy's minus the other's, over
    prompts: below 0 it knows better.
    """
    values = [one["value"] for one in stored]
    prompts = [one["prompt_hash"] for one in stored]
    sides = {side: cross_fitted(values, [one[side] for one in stored], prompts) for side in ("own", "other")}
    found: dict[str, Any] = {"log_loss": _mean(sides["own"].log_losses), "brier": _mean(sides["own"].brier)}
    found |= {
        "against_log_loss": _mean(sides["other"].log_losses),
        "against_brier": _mean(sides["other"].brier),
        "log_loss_difference": _pair_facts(sides, prompts, "log_losses"),
        "brier_difference": _pair_facts(sides, prompts, "brier"),
    }
    return found


def _pair_facts(
    sides: Mapping[str, CalibratedProbabilities], prompts: Sequence[str], measure: str
) -> dict[str, Any]:
    by_prompt: dict[str, list[float]] = {}
    own, other = getattr(sides["own"], measure), getattr(sides["other"], measure)
    for prompt, mine, theirs in zip(prompts, own, other, strict=True):
        by_prompt.setdefault(prompt, []).append(mine - theirs)
    return mean_interval([math.fsum(found) / len(found) for found in by_prompt.values()]).as_dict()


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)


GENERATED_KINDS = (TESTS, KNOWN, REWARDS)
"""Kinds whose evidence is what a check says of generated answers."""
