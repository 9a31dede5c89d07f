"""Preference pairs from evidence: merged, decided by majority, capped and split. Pure.

Everything depends on the content of the evidence, never on its order: the same feedback makes the same dataset.
"""

from __future__ import annotations

import bisect
import math
import uuid
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar

from rl.datasets.feedback_types import (
    NEUTRAL,
    SOURCES,
    ComparisonEvidence,
    Completion,
    CorrectionEvidence,
    DemonstrationEvidence,
    Evidence,
    RatingEvidence,
    RewardEvidence,
    Spellings,
    Split,
    SplitOf,
    bare,
    completion_key,
    digest_of,
)
from rl.recipes import RecipeError

ENDS = 32
"""Of a prompt with more than twice as many rated responses, only this many best and worst are paired.

All pairs of 10,000 responses would be 50 million, of which the cap keeps a handful."""

HELD_OUT_PAIRS = 10
"""Most pairs of a held-out prompt (all pairs of five responses). They share one vote."""

_TOLERANCE = 1e-9
"""Floating-point tolerance of the margin: 0.35 - 0.1 is slightly under 0.25."""


@dataclass(frozen=True, slots=True)
class Pair:
    """One preference: `chosen` over `rejected`, on the prompt with this hash."""

    prompt_hash: str
    chosen: Completion
    rejected: Completion
    source: str
    """Its strongest kind of evidence, one of SOURCES."""
    margin: float
    """Strength of the preference, in (0, 1]: see `docs/datasets.md`."""
    votes: int
    """Human or simulated judgements for it; 0 if only scores of candidates support it."""
    split: Split
    tags: tuple[str, ...]
    simulated: bool
    """True if any judgement behind it is simulated."""
    preferred: tuple[Completion, ...] = ()
    """Eval and holdout only: responses that beat another and lose to none."""
    dispreferred: tuple[Completion, ...] = ()
    """Eval and holdout only: responses that lose to another and beat none."""
    feedback: tuple[uuid.UUID, ...] = ()
    """Ids of the feedback for and against it; not written to the row."""

    @property
    def digest(self) -> str:
        """SHA-256 of prompt, chosen and rejected; orders equals and draws samples."""
        return digest_of(self.prompt_hash, completion_key(self.chosen), completion_key(self.rejected))


R = TypeVar("R", bound="DatasetRow")


class DatasetRow(Protocol):
    """What rows of all kinds have in common."""

    @property
    def prompt_hash(self) -> str: ...

    @property
    def split(self) -> Split: ...

    @property
    def digest(self) -> str: ...


@dataclass(frozen=True)
class RowSet(Generic[R]):
    """Rows in order of prompt hash; pairs strongest first within a prompt."""

    rows: tuple[R, ...]
    left_out: dict[str, int]
    """Reason -> evidence that made no row."""


REASONS: dict[str, str] = {
    "tie": "comparisons that called both responses equally good",
    "both_bad": "comparisons that called both responses bad",
    "no_verdict": "ratings without thumb, stars or score",
    "same_response": "preferences between responses that differ only in white space or the order of keys",
    "correction_invalid": "corrections that the agent could not act on",
    "below_margin": "pairs of rated responses closer than the rating margin",
    "conflict": "pairs of responses with as many judgements for as against",
    "outvoted": "judgements against the majority on a kept pair",
    "duplicate": "judgements that repeat another on the same pair",
    "single_response": "prompts with verdicts on one response only: nothing to compare",
    "over_cap": "training pairs beyond the limit per prompt",
    "held_out_extra": f"pairs beyond one per eval prompt and {HELD_OUT_PAIRS} per held-out prompt",
    "not_replayed": "rows of older feedback that the replay share did not draw",
    "over_max_samples": "pairs beyond the requested sample",
}
"""Reason for leaving evidence out -> what its number counts."""


def _in_counting_order(counts: Counter[str], order: Iterable[str]) -> dict[str, int]:
    return {name: counts[name] for name in order if counts[name]}


# --- From evidence to pairs -------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Claim:
    """Evidence that `better` beats `worse`, two completion keys."""

    better: str
    worse: str
    votes: int
    margin: float
    source: str
    simulated: bool = False
    tags: tuple[str, ...] = ()
    feedback: tuple[uuid.UUID, ...] = ()


@dataclass(slots=True)
class _Case:
    """All evidence on one prompt, by completion key."""

    claims: list[_Claim] = field(default_factory=list)
    values: dict[str, list[float]] = field(default_factory=dict)
    rewards: dict[str, list[float]] = field(default_factory=dict)
    """Used for responses without ratings."""
    rating_ids: dict[str, list[uuid.UUID]] = field(default_factory=dict)
    reward_ids: dict[str, list[uuid.UUID]] = field(default_factory=dict)
    scores: dict[str, list[float]] = field(default_factory=dict)
    ranks: set[tuple[str, tuple[str, ...]]] = field(default_factory=set)
    simulated_sources: set[str] = field(default_factory=set)
    tags: dict[str, set[str]] = field(default_factory=dict)
    spellings: Spellings = field(default_factory=Spellings)

    def tag(self, key: str, tags: Iterable[str]) -> None:
        if tags := tuple(tags):
            self.tags.setdefault(key, set()).update(tags)


def pairs_from_evidence(
    evidence: Iterable[Evidence],
    split_of: SplitOf,
    *,
    rating_margin: float = 0.25,
    max_pairs_per_prompt: int = 4,
    implied: bool = False,
) -> RowSet[Pair]:
    """Preference pairs from all evidence on an agent's prompts. Raises RecipeError.

    Per prompt: comparisons and corrections; responses whose mean verdicts (or measured rewards, without verdicts)
    differ by at least `rating_margin`, in (0, 1]; candidates whose mean scores do. With `implied`, prompts without any
    of these give the pairs of `_implied_claims`. Claims on the same two responses are decided by majority; a tie gives
    no pair.

    A train prompt gives at most `max_pairs_per_prompt` pairs, an eval prompt one, a held-out prompt HELD_OUT_PAIRS.
    The latter share one vote in evaluations (`rl.gates.effects`), because pairs of one prompt are not independent.
    """
    if not 0 < rating_margin <= 1:
        raise RecipeError(f"rating_margin must be in (0, 1], found {rating_margin!r}")
    if max_pairs_per_prompt < 1:
        raise RecipeError(f"max_pairs_per_prompt must be at least 1, found {max_pairs_per_prompt!r}")
    left_out: Counter[str] = Counter()
    cases: dict[str, _Case] = {}
    for item in evidence:
        _collect(cases.setdefault(item.prompt_hash, _Case()), item, left_out)
    rows: list[Pair] = []
    for prompt_hash in sorted(cases):
        # pop frees each case after use.
        case = cases.pop(prompt_hash)
        rows += _prompt_pairs(
            prompt_hash, case, split_of(prompt_hash), rating_margin, max_pairs_per_prompt, implied, left_out
        )
    return RowSet(tuple(rows), _in_counting_order(left_out, REASONS))


def rows_sampled(made: RowSet[R], max_samples: int | None) -> RowSet[R]:
    """At most `max_samples` rows, drawn by hash; a larger sample contains a smaller one. None: all rows.

    All pairs of an eval or held-out prompt count as one.
    """
    if max_samples is None:
        return made
    if max_samples < 1:
        raise RecipeError(f"max_samples must be at least 1, found {max_samples!r}")
    firsts: dict[str, str] = {}
    heads = [
        firsts.setdefault(row.prompt_hash, row.digest)
        if isinstance(row, Pair) and row.split != "train"
        else row.digest
        for row in made.rows
    ]
    sample = set(sorted(set(heads))[:max_samples])
    rows = tuple(row for row, head in zip(made.rows, heads, strict=True) if head in sample)
    over = len(made.rows) - len(rows)
    return RowSet(rows, {**made.left_out, "over_max_samples": over}) if over else made


def _collect(case: _Case, item: Evidence, left_out: Counter[str]) -> None:
    if isinstance(item, RatingEvidence):
        key = case.spellings.key(item.response)
        case.values.setdefault(key, []).append(item.value)
        case.rating_ids.setdefault(key, []).extend(item.feedback)
        case.tag(key, item.tags)
        if item.simulated:
            case.simulated_sources.add(key)
    elif isinstance(item, ComparisonEvidence):
        left, right = case.spellings.key(item.left), case.spellings.key(item.right)
        if item.preference in ("tie", "both_bad"):
            left_out[item.preference] += 1
        elif item.preference not in ("left", "right"):
            raise ValueError(f"a preference is left, right, tie or both_bad; found {item.preference!r}")
        else:
            better, worse = (left, right) if item.preference == "left" else (right, left)
            claim = _Claim(better, worse, 1, 1.0, "comparison", item.simulated, item.tags, item.feedback)
            _claim_add(case, claim, left_out)
    elif isinstance(item, CorrectionEvidence):
        better, worse = case.spellings.key(item.correction), case.spellings.key(item.response)
        if not item.valid:
            left_out["correction_invalid"] += 1
        else:
            claim = _Claim(better, worse, 1, 1.0, "correction", item.simulated, item.tags, item.feedback)
            _claim_add(case, claim, left_out)
    elif isinstance(item, DemonstrationEvidence):
        pass  # A demonstration compares nothing.
    elif isinstance(item, RewardEvidence):
        if item.measured:
            key = case.spellings.key(item.response)
            case.rewards.setdefault(key, []).append(item.value)
            case.reward_ids.setdefault(key, []).extend(item.feedback)
            case.tag(key, item.tags)
            if item.simulated:
                case.simulated_sources.add(key)
    else:
        key = case.spellings.key(item.response)
        options = [case.spellings.key(text) for text, _ in item.candidates]
        case.ranks.add((key, tuple(sorted(options))))
        case.tag(key, item.tags)
        for option, (_, score) in zip(options, item.candidates, strict=True):
            if score is not None:
                case.scores.setdefault(option, []).append(score)


def _claim_add(case: _Case, claim: _Claim, left_out: Counter[str]) -> None:
    if bare(claim.better) == bare(claim.worse):
        left_out["same_response"] += 1
    else:
        case.claims.append(claim)


def _prompt_pairs(
    prompt_hash: str,
    case: _Case,
    split: Split,
    rating_margin: float,
    cap: int,
    implied: bool,
    left_out: Counter[str],
) -> list[Pair]:
    """The pairs of one prompt, strongest first."""
    # fsum: the mean does not depend on the order of ratings.
    means = {key: math.fsum(values) / len(values) for key, values in (case.rewards | case.values).items()}
    scores = {key: math.fsum(values) / len(values) for key, values in case.scores.items()}
    claims = list(case.claims)
    claims += _claims_by_rank(
        means, rating_margin, left_out, lambda a, b: _rating_claim(case, a, b, means[a] - means[b])
    )
    claims += _claims_by_rank(
        scores, rating_margin, left_out, lambda a, b: _Claim(a, b, 0, scores[a] - scores[b], "candidates")
    )
    majority = _majority(claims, case, left_out)
    if implied and not majority:
        majority = _majority(_implied_claims(prompt_hash, case, means, rating_margin), case, left_out)
    if not majority and len(means) == 1 and not claims:
        left_out["single_response"] += 1
    majority.sort(key=lambda claim: _strength(prompt_hash, claim))
    room = {"train": cap, "eval": 1, "holdout": HELD_OUT_PAIRS}[split]
    if len(majority) > room:
        left_out["over_cap" if split == "train" else "held_out_extra"] += len(majority) - room
    best, worst = ((), ()) if split == "train" else _ends(majority, case.spellings)
    return [
        Pair(
            prompt_hash=prompt_hash,
            chosen=case.spellings.completion(claim.better),
            rejected=case.spellings.completion(claim.worse),
            source=claim.source,
            margin=round(claim.margin, 6),
            votes=claim.votes,
            split=split,
            tags=claim.tags,
            simulated=claim.simulated,
            preferred=best,
            dispreferred=worst,
            feedback=claim.feedback,
        )
        for claim in majority[:room]
    ]


def _strength(prompt_hash: str, claim: _Claim) -> tuple[bool, float, int, str]:
    """Sort key, strongest first: judged, largest margin, most votes, hash."""
    return (
        claim.votes == 0,
        -round(claim.margin, 6),
        -claim.votes,
        digest_of(prompt_hash, claim.better, claim.worse),
    )


def _rating_claim(case: _Case, better: str, worse: str, margin: float) -> _Claim:
    # Votes: the smaller number of ratings of the two. A reward is no vote.
    votes = min(len(case.values.get(key, ())) for key in (better, worse))
    simulated = better in case.simulated_sources or worse in case.simulated_sources
    source = "ratings" if votes else "reward"
    return _Claim(better, worse, votes, margin, source, simulated, (), _feedback_of(case, better, worse))


def _feedback_of(case: _Case, *keys: str) -> tuple[uuid.UUID, ...]:
    """Ids of the feedback behind the means of these responses."""
    return tuple(
        pk for key in keys for pk in (case.rating_ids if key in case.values else case.reward_ids).get(key, ())
    )


def _claims_by_rank(
    values: dict[str, float], margin: float, left_out: Counter[str], claim: Callable[[str, str], _Claim]
) -> Iterator[_Claim]:
    """A claim for every two responses whose values are at least `margin` apart; counts the others."""
    order = sorted(values, key=lambda key: (values[key], key))
    levels = [values[key] for key in order]
    if len(order) <= 2 * ENDS:
        low, high = order, order
    else:
        low, high = order[:ENDS], order[-ENDS:]
    apart = sum(bisect.bisect_right(levels, level - margin + _TOLERANCE) for level in levels)
    left_out["below_margin"] += len(order) * (len(order) - 1) // 2 - apart
    made = 0
    for better in high:
        for worse in low:
            if values[better] - values[worse] < margin - _TOLERANCE:
                break  # `low` is ascending: the rest is closer.
            made += 1
            if bare(better) == bare(worse):
                left_out["same_response"] += 1
            else:
                yield claim(better, worse)
    left_out["over_cap"] += apart - made


def _implied_claims(
    prompt_hash: str, case: _Case, means: dict[str, float], margin: float
) -> Iterator[_Claim]:
    """Preferences implied by a verdict on the chosen one of several listed options.

    A liked choice beats one option that is not liked, drawn by hash. A disliked choice between exactly two loses to the
    other, unless that is disliked too. Options without a verdict count as neutral. Nobody judged the other option: in a
    simulation 32 % of the responses rejected this way were liked.
    """
    for choice, options in sorted(case.ranks):
        if choice not in means or choice not in options:
            continue
        value, votes = means[choice], len(case.values.get(choice, ()))
        simulated = choice in case.simulated_sources
        feedback = _feedback_of(case, choice)
        alternatives = sorted({option for option in options if bare(option) != bare(choice)})
        if value - NEUTRAL >= margin - _TOLERANCE:
            unliked = [option for option in alternatives if means.get(option, NEUTRAL) <= NEUTRAL]
            if unliked:
                drawn = min(unliked, key=lambda option: digest_of(prompt_hash, option))
                yield _Claim(choice, drawn, votes, value - NEUTRAL, "implied", simulated, (), feedback)
        elif (
            NEUTRAL - value >= margin - _TOLERANCE
            and len(alternatives) == 1
            and means.get(alternatives[0], NEUTRAL) >= NEUTRAL
        ):
            yield _Claim(alternatives[0], choice, votes, NEUTRAL - value, "implied", simulated, (), feedback)


def _majority(claims: Iterable[_Claim], case: _Case, left_out: Counter[str]) -> list[_Claim]:
    """Claims on the same two responses, merged into one for the side with more votes."""
    sides: dict[tuple[str, str], list[_Claim]] = {}
    for claim in claims:
        sides.setdefault((claim.better, claim.worse), []).append(claim)
    majority: list[_Claim] = []
    for (better, worse), pro in sides.items():
        contra = sides.get((worse, better), [])
        votes, against = _votes(pro), _votes(contra)
        if votes < against or (votes == against and contra):
            # The other side wins, or neither: count a tie once.
            if votes == against and better < worse:
                left_out["conflict"] += 1
            continue
        left_out["duplicate"] += len(pro) - 1
        left_out["outvoted"] += len(contra)
        weight = math.fsum(max(claim.votes, 1) for claim in pro)
        margin = math.fsum(max(claim.votes, 1) * claim.margin for claim in pro) / weight
        unity = (votes - against) / (votes + against) if votes else 1.0
        tags = {tag for claim in pro for tag in claim.tags}
        tags |= case.tags.get(better, set()) | case.tags.get(worse, set())
        majority.append(
            _Claim(
                better=better,
                worse=worse,
                votes=votes,
                margin=margin * unity,
                source=min((claim.source for claim in pro), key=SOURCES.index),
                simulated=any(claim.simulated for claim in pro),
                tags=tuple(sorted(tags)),
                feedback=tuple(sorted({pk for claim in (*pro, *contra) for pk in claim.feedback})),
            )
        )
    return majority


def _votes(claims: Iterable[_Claim]) -> int:
    return sum(claim.votes for claim in claims)


def _ends(
    claims: list[_Claim], spellings: Spellings
) -> tuple[tuple[Completion, ...], tuple[Completion, ...]]:
    """(responses that beat another and lose to none, responses that lose to another and beat none)."""
    winners, losers = {claim.better for claim in claims}, {claim.worse for claim in claims}
    return (
        tuple(spellings.completion(key) for key in sorted(winners - losers)),
        tuple(spellings.completion(key) for key in sorted(losers - winners)),
    )
