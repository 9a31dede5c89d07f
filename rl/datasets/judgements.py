"""Pairs and scored responses in one dataset: preferences, and every verdict that made none of them. Pure.

For what learns from both at once (`rl.linear.fit`): an agent whose feedback is half preferences and half single thumbs
would lose one half with either kind alone.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from rl.agents.base import answer_plain
from rl.datasets.examples import Example, ExampleSet, examples_from_evidence
from rl.datasets.feedback_types import Evidence, SplitOf, completion_key
from rl.datasets.pairs import Pair, PairSet, pairs_from_evidence
from rl.recipes import RecipeError

VERDICT_SOURCES = ("ratings", "reward")
"""Sources of pairs that are made of verdicts on both of their responses."""

ANSWERED_BY_SCORES = ("single_response", "below_margin")
"""Reasons why pairs leave verdicts out that are none here: such responses are scored."""


@dataclass(frozen=True)
class JudgementSet:
    """Pairs and scores in the order of their prompt hashes, pairs first within a prompt."""

    rows: tuple[Pair | Example, ...]
    left_out: dict[str, int]


RowSet = PairSet | ExampleSet | JudgementSet
"""Rows of any kind of dataset."""


def judgements_from_evidence(
    evidence: Iterable[Evidence],
    split_of: SplitOf,
    *,
    rating_margin: float = 0.25,
    max_pairs_per_prompt: int = 4,
) -> JudgementSet:
    """The pairs of `pairs_from_evidence`, and the scores of `examples_from_evidence`. Raises RecipeError.

    A verdict whose own pair with another verdict is among the rows (sources `ratings` and `reward`) is left out: it was
    counted there. Beside a comparison, a correction or scores of candidates it is evidence of its own. Pairs that a
    verdict merely implies are not made.
    """
    known = list(evidence)
    pairs = pairs_from_evidence(
        known, split_of, rating_margin=rating_margin, max_pairs_per_prompt=max_pairs_per_prompt
    )
    paired = {
        (pair.prompt_hash, answer_plain(completion_key(side)))
        for pair in pairs.rows
        if pair.source in VERDICT_SOURCES
        for side in (pair.chosen, pair.rejected)
    }
    scores = examples_from_evidence(known, "scores", split_of).rows
    singles = [
        row
        for row in scores
        if (row.prompt_hash, answer_plain(completion_key(row.content["completion"]))) not in paired
    ]
    left_out = Counter({**pairs.left_out, "in_a_pair": len(scores) - len(singles)})
    rows: list[Pair | Example] = sorted([*pairs.rows, *singles], key=lambda row: row.prompt_hash)
    counted = {name: count for name, count in left_out.items() if count and name not in ANSWERED_BY_SCORES}
    return JudgementSet(tuple(rows), counted)


def judgements_sampled(judgements: JudgementSet, max_samples: int) -> JudgementSet:
    """At most `max_samples` of the rows, drawn by their hash: always the same."""
    if max_samples < 1:
        raise RecipeError(f"max_samples must be at least 1, found {max_samples!r}")
    over = len(judgements.rows) - max_samples
    if over <= 0:
        return judgements
    kept = set(sorted(row.digest for row in judgements.rows)[:max_samples])
    rows = tuple(row for row in judgements.rows if row.digest in kept)
    return JudgementSet(rows, {**judgements.left_out, "over_max_samples": over})
