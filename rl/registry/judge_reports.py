"""A judge's verdicts measured on people's, and a round as the API and the command show it.

People judge pairs in random order, so the pairs they judged are a random sample of the round: the audit.
"""

from __future__ import annotations

import math
import uuid
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Literal

import scipy
from pydantic import Field

from backend.bodies import Answer, Time
from rl.models import JudgingRound, PairJudgement
from rl.registry.judging import WORTH, Preference, pairs_standing, round_standing
from rl.statistics.intervals import Interval, wilson_interval
from rl.statistics.prediction_powered import FEWEST_LABELS, powered_mean


@dataclass(frozen=True)
class JudgeReport:
    """A judge's verdicts beside people's. `share`: prompts won minus lost among pairs with different answers."""

    judge: str
    pairs: int
    """Pairs it judged."""
    audited: int
    """Pairs that people judged too, drawn at random."""
    sampled: float
    """Probability with which a pair was drawn for people."""
    agrees: Interval
    """Share of audited pairs with a winner by both in which both name the same."""
    helps: bool
    """True if its verdicts are used: it agrees more often than chance, narrows the interval, and does not drift."""
    share: Interval
    """By both where it helps, else by people alone; 95 %, for a number of ratings fixed beforehand."""
    people: Interval
    """By people alone."""
    why: str
    """Why it is not used; empty if it is."""

    @property
    def words(self) -> str:
        agrees = f"{self.judge} agrees with people in {100 * (self.agrees.value or 0):.0f} % of {self.agrees.n} pairs"
        if not self.helps:
            return f"{agrees}; its verdicts are not used: {self.why}."
        value, low, high = (100 * (one or 0) for one in (self.share.value, self.share.low, self.share.high))
        alone = [100 * (one or 0) for one in (self.people.low, self.people.high)]
        return (
            f"{agrees}. With its verdicts on {self.pairs} pairs the policy wins {value:+.0f} of 100 prompts more than "
            f"it loses [{low:+.0f}, {high:+.0f}]; by people alone [{alone[0]:+.0f}, {alone[1]:+.0f}]."
        )


def round_judge_report(judging: JudgingRound) -> JudgeReport | None:
    """The judge of a round measured on what people said; None without a judge, or with fewer than FEWEST_LABELS pairs
    that both judged."""
    if judging.judge is None:
        return None
    people = _people_said(judging)
    said = dict(pairs_standing(judging).exclude(judged=None).order_by("id").values_list("pk", "judged"))
    rows = {pk: float(value or 0) for pk, value in said.items()}
    audited = [(float(value), rows[pk]) for pk, value in people.items() if pk in rows]
    alone = [value for pk, value in rows.items() if pk not in people]
    if len(audited) < FEWEST_LABELS or not alone:
        return None
    labels, predictions = ([one[side] for one in audited] for side in (0, 1))
    found = powered_mean(labels, predictions, alone)
    told = [(y > 0) == (f > 0) for y, f in audited if y and f]
    agrees = wilson_interval(sum(told), len(told))
    why = ""
    if agrees.low is None or agrees.low <= 0.5:
        why = "people do not agree with it more often than by chance"
    elif drifts(audited):
        why = "it agreed with people less on the later pairs than on the earlier ones"
    elif not found.helps:
        why = "they do not narrow the interval"
    low, high = found.labels_alone
    by_people = Interval(math.fsum(labels) / len(labels), low, high, len(labels))
    by_both = Interval(found.value, found.low, found.high, len(rows))
    return JudgeReport(
        judging.judge.name,
        len(rows),
        len(audited),
        len(audited) / len(rows),
        agrees,
        not why,
        by_people if why else by_both,
        by_people,
        why,
    )


def drifts(audited: Sequence[tuple[float, float]]) -> bool:
    """True if the judge agrees with people less on the later half of the pairs (Fisher's exact test, 5 %)."""
    told = [(y > 0) == (f > 0) for y, f in audited if y and f]
    halves = told[: len(told) // 2], told[len(told) // 2 :]
    table = [[sum(half), len(half) - sum(half)] for half in halves]
    return float(scipy.stats.fisher_exact(table, alternative="greater").pvalue) <= 0.05


def _people_said(judging: JudgingRound) -> dict[uuid.UUID, int]:
    """Pair -> 1, 0 or -1, of the pairs with all their judgements, in the order in which people judged."""
    votes: dict[uuid.UUID, list[int]] = {}
    rows = PairJudgement.objects.filter(pair__round=judging).order_by("id")
    for pair, preference in rows.values_list("pair", "preference"):
        votes.setdefault(pair, []).append(WORTH[Preference(preference)])
    totals = {pk: sum(given[: judging.raters]) for pk, given in votes.items() if len(given) >= judging.raters}
    return {pk: (total > 0) - (total < 0) for pk, total in totals.items()}


# --- For the API and the command ---


class RoundShown(Answer):
    """A round as the API and the command return it."""

    id: int
    agent: str
    policy: str
    against: str = Field(validation_alias="opponent_name")
    status: Literal["waiting", "answering", "running", "ended", "failed"]
    prompts: int
    pairs: int
    raters_each: int
    margin: float
    not_inferior: bool
    """True if "not worse" ends the round."""
    attempt: int
    verdict: Literal["better", "not_worse", "worse", "open"]
    words: str
    """The verdict in a sentence, with its figures."""
    wins: int
    losses: int
    ties: int
    same: int
    """Prompts with equal answers, which nobody is asked about."""
    both_bad: int
    waiting: int
    """Pairs that need further judgements."""
    judgements: int
    raters: int
    share: Interval
    confidence: float
    further: int | None
    """Answers of people until a verdict, about."""
    judge: str | None
    """A judge's verdicts beside people's, in a sentence; null without one, or with few pairs that both judged."""
    reason: str
    address: str
    created_at: Time
    ended_at: Time | None


def round_represent(judging: JudgingRound) -> dict[str, object]:
    standing = round_standing(judging)
    judge = round_judge_report(judging)
    return RoundShown.of(
        judging,
        judge=judge.words if judge else None,
        **asdict(standing.counts),
        policy=judging.policy.name,
        raters_each=judging.raters,
        pairs=judging.pairs.count(),
        verdict=standing.verdict,
        words=standing.words(judging.policy.name, judging.opponent_name),
        share=standing.interval,
        confidence=standing.share.confidence,
        further=standing.further,
        address=f"/rate/pairs/?round={judging.pk}",
    )
