"""Labels, scores, demonstrations and prompts from evidence on single responses; mixed sets; replay. Pure.

As in `rl.datasets.pairs`, everything depends on the content of the evidence, never on its order.
"""

from __future__ import annotations

import hashlib
import uuid
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from rl.agents.base import answer_plain
from rl.datasets.feedback_types import (
    NEUTRAL,
    Completion,
    CorrectionEvidence,
    DemonstrationEvidence,
    Evidence,
    RatingEvidence,
    RewardEvidence,
    Spellings,
    Split,
    SplitOf,
    completion_key,
    digest_of,
)
from rl.datasets.pairs import Pair, R, RowSet, pairs_from_evidence
from rl.recipes import DATASET_CONFIG, RecipeError
from rl.recipes.sft import ANSWER, EXAMPLE_SOURCES, FEEDBACK_SOURCES

GOOD = 0.75
"""Lowest mean verdict (or reward without verdicts) of a demonstration: four stars, or three of four thumbs up."""

MOST_OF_CLUSTER = 3
"""Most unrated answers to near-identical prompts that are shown: frequent questions would drown the rare ones."""

EXAMPLE_REASONS: dict[str, str] = {
    "undecided": "responses with as many good as bad verdicts",
    "not_good_enough": f"responses with a mean verdict or reward under {GOOD}, too low for a demonstration",
    "disliked": "corrections and demonstrations that raters call bad",
    "outranked": "demonstrations on a prompt that has some from a stronger source",
    "other_source": "demonstrations from a source that was not requested",
    "correction_invalid": "corrections that the agent could not act on",
    "no_verdict": "ratings without thumb, stars or score",
    "in_a_pair": "verdicts that made a pair with another verdict, in a dataset of pairs and scores",
    "not_replayed": "rows of older feedback that the replay share did not draw",
    "near_identical_answer": f"unrated answers beyond {MOST_OF_CLUSTER} to near-identical prompts",
    "over_max_samples": "rows beyond the requested sample",
}
"""Reason why evidence makes no row -> what its number counts."""


@dataclass(frozen=True, slots=True)
class Example:
    """One row of a dataset other than pairs; `content` holds the columns of its kind."""

    prompt_hash: str
    content: Mapping[str, Any]
    source: str
    """`ratings`, `correction`, `demonstration`, `teacher`, `reward` or `decision`."""
    votes: int
    split: Split
    tags: tuple[str, ...] = ()
    simulated: bool = False
    feedback: tuple[uuid.UUID, ...] = ()
    """Ids of the feedback behind it; not written to the row."""

    @property
    def digest(self) -> str:
        """SHA-256 of prompt and content; samples are drawn by it."""
        return digest_of(
            self.prompt_hash, *(f"{name}={value!r}" for name, value in sorted(self.content.items()))
        )


@dataclass(slots=True)
class _Verdicts:
    """Verdicts on one response."""

    values: list[float] = field(default_factory=list)
    rewards: list[float] = field(default_factory=list)
    """Used only if nobody rated the response."""
    corrections: int = 0
    sources: set[str] = field(default_factory=set)
    """Which of DEMONSTRATIONS it is, or ANSWER."""
    simulated: bool = False
    tags: set[str] = field(default_factory=set)
    feedback: dict[str, set[uuid.UUID]] = field(default_factory=dict)
    """Source -> ids of its feedback."""

    def feedback_ids(self, *sources: str) -> set[uuid.UUID]:
        return set().union(*(self.feedback.get(source, ()) for source in sources))

    @property
    def verdict(self) -> str:
        """Source of the mean: `ratings`, `reward` if nobody rated it, or empty."""
        return "ratings" if self.values else "reward" if self.rewards else ""

    @property
    def mean(self) -> float:
        known = sorted(self.values or self.rewards)
        return sum(known) / len(known)


REWARD_KINDS = ("scores",)
"""Kinds that also use rewards based on comparisons alone; pairs use the comparisons themselves."""


class Responses(dict[str, _Verdicts]):
    """Verdicts on the responses to one prompt, by a key shared by all spellings of a response."""

    def __init__(self) -> None:
        super().__init__()
        self.spellings = Spellings()

    def verdicts(self, response: Completion) -> _Verdicts:
        return self.setdefault(self.spellings.key(response), _Verdicts())


def examples_from_evidence(
    evidence: Iterable[Evidence],
    kind: str,
    split_of: SplitOf,
    *,
    threshold: float = DATASET_CONFIG["reward_threshold"],
    sources: Collection[str] = FEEDBACK_SOURCES,
) -> RowSet[Example]:
    """Rows of a kind: `labels`, `scores` or `corrections`. Raises RecipeError for another kind.

    labels: {"completion", "label"}; true if the mean verdict is above neutral, or without verdicts if the reward is at
        least `threshold`, in (0, 1).
    scores: {"completion", "score"}; the mean verdict or reward, in [0, 1].
    corrections: {"completion"}; a valid correction, a demonstration, or a response with a mean or reward of at least
        GOOD. Per prompt, only those of the strongest of `sources` (of EXAMPLE_SOURCES).
    """
    if kind not in BUILDERS:
        raise RecipeError(f"a dataset's kind is one of {', '.join(BUILDERS)}; found {kind!r}")
    if not 0 < threshold < 1:
        raise RecipeError(f"reward_threshold must be between 0 and 1, found {threshold!r}")
    if unknown := sorted(set(sources) - set(EXAMPLE_SOURCES)):
        raise RecipeError(f"sources are some of {', '.join(EXAMPLE_SOURCES)}; found {', '.join(unknown)}")
    left_out: Counter[str] = Counter()
    prompts: dict[str, Responses] = {}
    for item in evidence:
        if isinstance(item, RatingEvidence):
            _note(prompts, item.prompt_hash, item.response, item, "ratings").values.append(item.value)
        elif isinstance(item, RewardEvidence):
            if item.measured or kind in REWARD_KINDS:
                _note(prompts, item.prompt_hash, item.response, item, "reward").rewards.append(item.value)
        elif isinstance(item, DemonstrationEvidence) and kind == "corrections":
            _note(prompts, item.prompt_hash, item.response, item, item.source).sources.add(item.source)
        elif isinstance(item, CorrectionEvidence) and kind == "corrections":
            if item.valid:
                _note(prompts, item.prompt_hash, item.correction, item, "correction").corrections += 1
            else:
                left_out["correction_invalid"] += 1
    request = _ExampleRequest(
        threshold, tuple(source for source in EXAMPLE_SOURCES if source in sources), left_out
    )
    rows: list[Example] = []
    for prompt_hash in sorted(prompts):
        split = split_of(prompt_hash)
        rows += BUILDERS[kind](prompt_hash, split, prompts[prompt_hash], request)
    return RowSet(tuple(rows), {name: left_out[name] for name in EXAMPLE_REASONS if left_out[name]})


@dataclass(frozen=True)
class _ExampleRequest:
    threshold: float
    sources: tuple[str, ...]
    left_out: Counter[str]


def prompt_examples(prompt_hashes: Iterable[str], split_of: SplitOf) -> RowSet[Example]:
    """One row per prompt, with or without feedback."""
    rows = tuple(
        Example(prompt_hash, {}, "decision", 0, split_of(prompt_hash))
        for prompt_hash in sorted(set(prompt_hashes))
    )
    return RowSet(rows, {})


def answers_thinned(examples: RowSet[Example], clusters: Mapping[str, str]) -> RowSet[Example]:
    """At most MOST_OF_CLUSTER unrated answers of each cluster of near-identical prompts, by hash. clusters: prompt ->
    cluster, or ""."""
    kept: Counter[str] = Counter()
    out: set[str] = set()
    for row in sorted(examples.rows, key=lambda row: row.digest):
        if row.source == ANSWER and (name := clusters.get(row.prompt_hash)):
            kept[name] += 1
            if kept[name] > MOST_OF_CLUSTER:
                out.add(row.digest)
    if not out:
        return examples
    rows = tuple(row for row in examples.rows if row.source != ANSWER or row.digest not in out)
    return RowSet(rows, {**examples.left_out, "near_identical_answer": len(out)})


def _note(
    prompts: dict[str, Responses],
    prompt_hash: str,
    response: Completion,
    item: RatingEvidence | CorrectionEvidence | DemonstrationEvidence | RewardEvidence,
    source: str,
) -> _Verdicts:
    responses = prompts.setdefault(prompt_hash, Responses())
    verdicts = responses.verdicts(response)
    verdicts.simulated |= item.simulated
    verdicts.tags.update(item.tags)
    verdicts.feedback.setdefault(source, set()).update(item.feedback)
    return verdicts


def _example(
    prompt_hash: str,
    split: Split,
    content: Mapping[str, object],
    verdicts: Iterable[_Verdicts],
    source: str = "",
) -> Example:
    """A row of these responses; `source` defaults to the source of their means."""
    all_verdicts = list(verdicts)
    behind = [v.feedback_ids(source or v.verdict) for v in all_verdicts]
    return Example(
        prompt_hash=prompt_hash,
        content=content,
        source=source or ("ratings" if any(v.values for v in all_verdicts) else "reward"),
        votes=sum(len(v.values) + v.corrections for v in all_verdicts),
        split=split,
        tags=tuple(sorted(set().union(*(v.tags for v in all_verdicts)))),
        simulated=any(v.simulated for v in all_verdicts),
        feedback=tuple(sorted(set().union(*behind))),
    )


def _labels(prompt_hash: str, split: Split, responses: Responses, asked: _ExampleRequest) -> list[Example]:
    rows = []
    for key, verdicts in sorted(responses.items()):
        mean = verdicts.mean
        if verdicts.values and mean == NEUTRAL:
            asked.left_out["undecided"] += 1
            continue
        good = mean > NEUTRAL if verdicts.values else mean >= asked.threshold
        rows.append(
            _example(
                prompt_hash,
                split,
                {"completion": responses.spellings.completion(key), "label": good},
                [verdicts],
            )
        )
    return rows


def _scores(prompt_hash: str, split: Split, responses: Responses, _: _ExampleRequest) -> list[Example]:
    return [
        _example(
            prompt_hash,
            split,
            {"completion": responses.spellings.completion(key), "score": round(verdicts.mean, 6)},
            [verdicts],
        )
        for key, verdicts in sorted(responses.items())
    ]


def _demonstrations(
    prompt_hash: str, split: Split, responses: Responses, asked: _ExampleRequest
) -> list[Example]:
    by_source: dict[str, list[Example]] = {}
    for key, verdicts in sorted(responses.items()):
        written = [*(["correction"] if verdicts.corrections else []), *verdicts.sources]
        if written == [ANSWER] and verdicts.verdict:
            written = []  # somebody judged the same text elsewhere
        if written and verdicts.values and verdicts.mean < NEUTRAL:
            asked.left_out["disliked"] += 1
        elif not written and verdicts.mean < GOOD:
            asked.left_out["not_good_enough"] += 1
        else:
            source = min(written or [verdicts.verdict], key=EXAMPLE_SOURCES.index)
            row = _example(
                prompt_hash, split, {"completion": responses.spellings.completion(key)}, [verdicts], source
            )
            by_source.setdefault(source, []).append(row)
    for source in [source for source in by_source if source not in asked.sources]:
        asked.left_out["other_source"] += len(by_source.pop(source))
    # A written answer is stronger evidence than a liked one.
    strongest = min(by_source, key=asked.sources.index, default="")
    asked.left_out["outranked"] += sum(len(rows) for source, rows in by_source.items() if source != strongest)
    return by_source.get(strongest, [])


BUILDERS: dict[str, Callable[[str, Split, Responses, _ExampleRequest], list[Example]]] = {
    "labels": _labels,
    "scores": _scores,
    "corrections": _demonstrations,
}


VERDICT_SOURCES = ("ratings", "reward")
"""Sources of pairs made from verdicts on both responses."""

ANSWERED_BY_SCORES = ("single_response", "below_margin")
"""Reasons of pairs that do not apply here, because these responses are scored."""


def judgements_from_evidence(
    evidence: Iterable[Evidence],
    split_of: SplitOf,
    *,
    rating_margin: float = 0.25,
    max_pairs_per_prompt: int = 4,
) -> RowSet[Pair | Example]:
    """Pairs, and scores of the responses whose verdicts made no pair, pairs first within a prompt. Raises RecipeError.

    For methods that learn from both (`rl.linear.fit`): with either kind alone, an agent with half preferences and half
    single thumbs would lose half of its feedback. Verdicts that made a pair with another verdict (sources `ratings` and
    `reward`) are not scored again. Implied pairs are not made.
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
    return RowSet(tuple(rows), counted)


NOT_REPLAYED = "not_replayed"
"""Reason for leaving rows out: older feedback that was not drawn."""


@dataclass(frozen=True)
class Replay:
    """Keeps all rows of prompts with new feedback and a share of the other prompts' training rows."""

    share: float
    """Share of other prompts, in [0, 1]."""
    new: frozenset[str]
    """Hashes of prompts with feedback that no run has read."""

    def keeps(self, prompt_hash: str, salt: str) -> bool:
        """True for a new prompt; for others with probability `share`, fixed by the salt."""
        if prompt_hash in self.new:
            return True
        drawn = hashlib.sha256(f"replay:{salt}:{prompt_hash}".encode()).digest()
        return int.from_bytes(drawn[:8]) < self.share * 2**64

    def draw(self, rows: RowSet[R], salt: str) -> RowSet[R]:
        """The drawn rows and all held-out ones. A `salt` per retrain gives other rows their turn."""
        sample = tuple(row for row in rows.rows if row.split != "train" or self.keeps(row.prompt_hash, salt))
        out = len(rows.rows) - len(sample)
        left_out = {**rows.left_out, NOT_REPLAYED: out} if out else rows.left_out
        return RowSet(sample, left_out)

    def query(self, salt: str, rows: Iterable[Any]) -> dict[str, object]:
        """Record of the draw for the snapshot: training rows of prompts with new and with older feedback."""
        train = [row.prompt_hash in self.new for row in rows if row.split == "train"]
        return {
            "share": self.share,
            "salt": salt,
            "new_prompts": len(self.new),
            "train_rows_new": sum(train),
            "train_rows_replayed": len(train) - sum(train),
        }
