"""Evidence on single responses becomes labels, scores, demonstrations, prompts and groups: the datasets beside
pairs. Pure.

As in `rl.pairs`, everything depends on the content of the evidence and never on its order.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from rl.judgements import (
    NEUTRAL,
    Completion,
    Corrected,
    Evidence,
    Judged,
    Split,
    SplitOf,
    completion_key,
    completion_of,
    digest_of,
)
from rl.recipes import RecipeError

GOOD = 0.75
"""Mean verdict from which a response serves as a demonstration: four stars, or three thumbs up of four."""

EXAMPLE_REASONS: dict[str, str] = {
    "undecided": "responses whose verdicts are as good as bad",
    "not_good_enough": f"responses with a mean verdict under {GOOD}, which demonstrate nothing",
    "correction_invalid": "corrections that the agent could not act on",
    "single_response": "prompts with verdicts on one response only: a group needs two",
    "same_reward": "groups whose responses all have one mean verdict: nothing to tell apart",
    "no_verdict": "ratings without thumb, stars or score",
    "not_replayed": "rows of older feedback that the replay share left for another time",
    "over_balance": "training labels of the kind there is more of, beyond four for each three of the other",
    "over_max_samples": "rows beyond the sample asked for",
}
"""Why something made no row, and what its number counts."""


@dataclass(frozen=True, slots=True)
class Rewarded:
    """What a response that nobody gave a verdict on earned by its outcomes; value in [0, 1]."""

    prompt_hash: str
    response: Completion
    value: float
    simulated: bool = False
    tags: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Example:
    """One row of a dataset other than pairs; `content` is what its kind adds to the prompt."""

    prompt_hash: str
    content: Mapping[str, Any]
    source: str
    """`ratings`, `correction`, `reward` or `decision`."""
    votes: int
    split: Split
    tags: tuple[str, ...] = ()
    simulated: bool = False

    @property
    def digest(self) -> str:
        """SHA-256 of prompt and content: what a sample is drawn by."""
        return digest_of(
            self.prompt_hash, *(f"{name}={value!r}" for name, value in sorted(self.content.items()))
        )


@dataclass(frozen=True)
class ExampleSet:
    """Examples in the order of their prompt hashes."""

    rows: tuple[Example, ...]
    left_out: dict[str, int]


@dataclass(slots=True)
class _Verdicts:
    """What was said of one response."""

    values: list[float] = field(default_factory=list)
    rewards: list[float] = field(default_factory=list)
    """What it earned where nobody gave a verdict; what people say goes before it."""
    corrections: int = 0
    simulated: bool = False
    tags: set[str] = field(default_factory=set)

    @property
    def mean(self) -> float:
        known = sorted(self.values or self.rewards)
        return sum(known) / len(known)


REWARDED = ("scores", "groups")
"""Kinds in which the reward of a response stands in for a verdict."""

Responses = dict[str, _Verdicts]
"""Completion key -> what was said of it."""


def examples_from_evidence(
    evidence: Iterable[Evidence | Rewarded], kind: str, split_of: SplitOf
) -> ExampleSet:
    """The rows of a kind: `labels`, `scores`, `corrections` or `groups`. Raises RecipeError for another.

    labels: {"completion", "label"}, true where the mean verdict on a response is above neutral. scores: {"completion",
    "score"}, the mean itself, in [0, 1]. corrections: {"completion"}, a valid correction, or a response whose mean
    is at least GOOD. groups: {"completions", "rewards"}, the rated responses to one prompt and their means. For scores
    and groups a response without a verdict counts by its reward, where evidence of one is given (Rewarded).
    """
    if kind not in BUILDERS:
        raise RecipeError(f"a dataset's kind is one of {', '.join(BUILDERS)}; found {kind!r}")
    left_out: Counter[str] = Counter()
    prompts: dict[str, Responses] = {}
    for item in evidence:
        if isinstance(item, Judged):
            _note(prompts, item.prompt_hash, item.response, item).values.append(item.value)
        elif isinstance(item, Rewarded):
            if kind in REWARDED:
                _note(prompts, item.prompt_hash, item.response, item).rewards.append(item.value)
        elif isinstance(item, Corrected) and kind == "corrections":
            if item.valid:
                _note(prompts, item.prompt_hash, item.correction, item).corrections += 1
            else:
                left_out["correction_invalid"] += 1
    rows: list[Example] = []
    for prompt_hash in sorted(prompts):
        split = split_of(prompt_hash)
        rows += BUILDERS[kind](prompt_hash, split, prompts[prompt_hash], left_out)
    return ExampleSet(tuple(rows), {name: left_out[name] for name in EXAMPLE_REASONS if left_out[name]})


def prompt_examples(prompt_hashes: Iterable[str], split_of: SplitOf) -> ExampleSet:
    """One row for each prompt that was ever asked, rated or not."""
    rows = tuple(
        Example(prompt_hash, {}, "decision", 0, split_of(prompt_hash))
        for prompt_hash in sorted(set(prompt_hashes))
    )
    return ExampleSet(rows, {})


def examples_sampled(examples: ExampleSet, max_samples: int) -> ExampleSet:
    """At most `max_samples` of the rows, drawn by their hash: always the same."""
    if max_samples < 1:
        raise RecipeError(f"max_samples must be at least 1, found {max_samples!r}")
    over = len(examples.rows) - max_samples
    if over <= 0:
        return examples
    kept = set(sorted(row.digest for row in examples.rows)[:max_samples])
    rows = tuple(row for row in examples.rows if row.digest in kept)
    return ExampleSet(rows, {**examples.left_out, "over_max_samples": over})


BALANCED = 4 / 3
"""Most training labels of one kind for each of the other: Ethayarajh et al. 2024 (arXiv 2402.01306), eq. 9."""


def examples_balanced(examples: ExampleSet) -> ExampleSet:
    """Labels with no more of one kind in the train split than BALANCED allows; drawn by hash, held-out rows stay.

    Where only one kind is there, nothing is left out: there is nothing to balance it with.
    """
    train = [row for row in examples.rows if row.split == "train"]
    kinds = [[row for row in train if row.content["label"] is kind] for kind in (False, True)]
    many = max(kinds, key=len)
    allowed = int(BALANCED * min(map(len, kinds)))
    if not allowed or len(many) <= allowed:
        return examples
    out = {row.digest for row in sorted(many, key=lambda row: row.digest)[allowed:]}
    rows = tuple(row for row in examples.rows if row.split != "train" or row.digest not in out)
    return ExampleSet(rows, {**examples.left_out, "over_balance": len(many) - allowed})


def _note(
    prompts: dict[str, Responses], prompt_hash: str, response: Completion, item: Judged | Corrected | Rewarded
) -> _Verdicts:
    verdicts = prompts.setdefault(prompt_hash, {}).setdefault(completion_key(response), _Verdicts())
    verdicts.simulated |= item.simulated
    verdicts.tags.update(item.tags)
    return verdicts


def _example(
    prompt_hash: str,
    split: Split,
    content: Mapping[str, Any],
    verdicts: Iterable[_Verdicts],
    source: str = "ratings",
) -> Example:
    all_verdicts = list(verdicts)
    return Example(
        prompt_hash=prompt_hash,
        content=content,
        source=source,
        votes=sum(len(v.values) + v.corrections for v in all_verdicts),
        split=split,
        tags=tuple(sorted(set().union(*(v.tags for v in all_verdicts)))),
        simulated=any(v.simulated for v in all_verdicts),
    )


def _labels(prompt_hash: str, split: Split, responses: Responses, left_out: Counter[str]) -> list[Example]:
    rows = []
    for key, verdicts in sorted(responses.items()):
        if verdicts.mean == NEUTRAL:
            left_out["undecided"] += 1
            continue
        content = {"completion": completion_of(key), "label": verdicts.mean > NEUTRAL}
        rows.append(_example(prompt_hash, split, content, [verdicts]))
    return rows


def _scores(prompt_hash: str, split: Split, responses: Responses, left_out: Counter[str]) -> list[Example]:
    return [
        _example(
            prompt_hash,
            split,
            {"completion": completion_of(key), "score": round(verdicts.mean, 6)},
            [verdicts],
            "ratings" if verdicts.values else "reward",
        )
        for key, verdicts in sorted(responses.items())
    ]


def _demonstrations(
    prompt_hash: str, split: Split, responses: Responses, left_out: Counter[str]
) -> list[Example]:
    rows = []
    for key, verdicts in sorted(responses.items()):
        content = {"completion": completion_of(key)}
        if verdicts.corrections:
            rows.append(_example(prompt_hash, split, content, [verdicts], "correction"))
        elif verdicts.mean >= GOOD:
            rows.append(_example(prompt_hash, split, content, [verdicts]))
        else:
            left_out["not_good_enough"] += 1
    # what a person wrote themselves is a better answer than one they only did not mind
    written = [row for row in rows if row.source == "correction"]
    left_out["not_good_enough"] += len(rows) - len(written) if written else 0
    return written or rows


def _groups(prompt_hash: str, split: Split, responses: Responses, left_out: Counter[str]) -> list[Example]:
    if len(responses) < 2:
        left_out["single_response"] += 1
        return []
    keys = sorted(responses)
    rewards = [round(responses[key].mean, 6) for key in keys]
    if len(set(rewards)) == 1:
        left_out["same_reward"] += 1
        return []
    content = {"completions": [completion_of(key) for key in keys], "rewards": rewards}
    source = "ratings" if any(verdicts.values for verdicts in responses.values()) else "reward"
    return [_example(prompt_hash, split, content, responses.values(), source)]


BUILDERS: dict[str, Callable[[str, Split, Responses, Counter[str]], list[Example]]] = {
    "labels": _labels,
    "scores": _scores,
    "corrections": _demonstrations,
    "groups": _groups,
}
