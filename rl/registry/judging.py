"""Judging rounds: which pair a rater sees next, what is stored of an answer, and the state of a round.

A prompt is the unit: it counts once it has as many judgements as the round asks for, by the sign of their sum. The
round ends with the first verdict that answers its question, or when all its prompts are judged.
"""

from __future__ import annotations

import math
import uuid
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass

from django.db import IntegrityError, transaction
from django.db.models import Count, Exists, OuterRef, Q, QuerySet
from django.utils import timezone
from django.utils.crypto import salted_hmac

from feedback.explorer.previews import turns_of
from feedback.models import Decision
from rl.gates.report import JudgingEvidence
from rl.models import JudgedPair, JudgingRound, PairJudgement, Policy, ServingSettings
from rl.statistics.assignment import BASE
from rl.statistics.intervals import Interval
from rl.statistics.sequential import BETTER, NOT_WORSE, OPEN, WORSE, WinShare

SECONDS_PER_ANSWER = 10
"""Estimated time of a side-by-side judgement."""

Preference = PairJudgement.Preference
Status = JudgingRound.Status

WORTH = {Preference.POLICY: 1, Preference.OPPONENT: -1, Preference.TIE: 0, Preference.BOTH_BAD: 0}


class JudgingRefused(ValueError):
    """An impossible round or judgement; the message says why, and what to do."""

    code = "conflict"


@dataclass(frozen=True)
class RoundCounts:
    """Counts of a round, in prompts."""

    wins: int = 0
    losses: int = 0
    ties: int = 0
    """Prompts that raters called equal or both bad, or disagreed on evenly."""
    same: int = 0
    """Prompts with equal answers, which are not shown."""
    both_bad: int = 0
    """Ties that every rater called both bad."""
    waiting: int = 0
    """Prompts that need more judgements."""
    judgements: int = 0
    raters: int = 0
    """Number of people who judged."""


@dataclass(frozen=True)
class RoundStanding:
    """State of a round: counts, interval of the win share, verdict."""

    counts: RoundCounts
    share: WinShare
    verdict: str
    raters_each: int
    is_over: bool = False

    @property
    def further(self) -> int | None:
        """About how many more answers bring a verdict, at most those left; None if the prompts left cannot."""
        decided = self.share.further
        if decided is None:
            return None
        counts = self.counts
        # one more prompt of each kind than judged, so that no rate is 0
        rate = (self.share.decided + 2) / (self.share.decided + counts.ties + 2)
        prompts = math.ceil(decided / rate)
        return min(prompts, counts.waiting) * self.raters_each if prompts <= 2 * counts.waiting else None

    @property
    def interval(self) -> Interval:
        """Win share among decided prompts."""
        return Interval(self.share.value, self.share.low, self.share.high, self.share.decided)

    def dump(self) -> dict[str, object]:
        """Counts and interval, as stored at the end."""
        return {**asdict(self.counts), "share": asdict(self.interval)}

    @property
    def minutes(self) -> int:
        """About how many minutes they take."""
        return minutes_of(self.further or 0)

    def words(self, policy: str, opponent: str) -> str:
        """The verdict in a sentence, with its figures."""
        counts, share = self.counts, self.share
        if share.value is None and counts.ties + counts.same:
            found = (
                f"{counts.ties} of the judged prompts have no winner, and {counts.same} had equal answers."
            )
        elif share.value is None:
            found = "No prompt was judged." if self.is_over else "No prompt is decided yet."
        else:
            interval = (
                f"{100 * share.confidence:.3g} % interval {100 * share.low:.0f} to {100 * share.high:.0f} %"
            )
            found = (
                f"{policy} was preferred in {counts.wins} of {share.decided} decided prompts "
                f"({100 * share.value:.0f} %, {interval})."
            )
        verdict = VERDICT_WORDS[self.verdict].format(
            opponent=opponent, margin=100 * share.margin, yet="" if self.is_over else " yet"
        )
        return f"{verdict} {found}"


VERDICT_WORDS = {
    BETTER: "Better than {opponent}.",
    NOT_WORSE: "Not worse than {opponent} by more than {margin:.0f} points, and not shown to be better.",
    WORSE: "Worse than {opponent}.",
    OPEN: "No verdict against {opponent}{yet}.",
}


def minutes_of(answers: int) -> int:
    return max(1, round(answers * SECONDS_PER_ANSWER / 60))


# --- Rounds ---------------------------------------------------------------------------------------------------


def round_get(pk: int) -> JudgingRound:
    """The round of a number. Raises JudgingRefused."""
    found = (
        JudgingRound.objects.select_related("policy", "opponent").filter(pk=pk).first()
        if pk < 2**63
        else None
    )
    if found is None:
        raise JudgingRefused(f"there is no judging round {pk}; `judging_round list` shows those there are")
    return found


def rounds_of(policy: Policy) -> QuerySet[JudgingRound]:
    """The rounds of a policy, newest first."""
    return JudgingRound.objects.filter(policy=policy).select_related("opponent").order_by("-pk")


def round_standing(judging: JudgingRound) -> RoundStanding:
    """Counts and verdict of a round: stored if it ended, else of the judgements so far."""
    counts = (
        RoundCounts(**{name: judging.result[name] for name in asdict(RoundCounts())})
        if judging.status == Status.ENDED and judging.result
        else _counts(judging)
    )
    share = WinShare(
        counts.wins, counts.losses, counts.ties, judging.alpha, judging.margin, judging.not_inferior
    )
    is_over = judging.status == Status.ENDED
    return RoundStanding(counts, share, judging.verdict or share.verdict, judging.raters, is_over)


def _counts(judging: JudgingRound) -> RoundCounts:
    votes: dict[uuid.UUID, list[str]] = {}
    raters: set[str] = set()
    rows = PairJudgement.objects.filter(pair__round=judging).order_by("id")
    for pair, rater, preference in rows.values_list("pair", "rater", "preference"):
        votes.setdefault(pair, []).append(preference)
        raters.add(rater)
    found: Counter[str] = Counter()
    shown = set(pairs_standing(judging).values_list("pk", flat=True))
    for pair, same in judging.pairs.order_by().values_list("pk", "same"):
        # two raters may judge the last place of a prompt at once: the first judgement counts
        given = votes.get(pair, [])[: judging.raters]
        if same:
            found["same"] += 1
        elif len(given) < judging.raters:
            found["waiting"] += pair in shown
        else:
            total = sum(WORTH[Preference(one)] for one in given)
            found["wins" if total > 0 else "losses" if total < 0 else "ties"] += 1
            found["both_bad"] += set(given) == {Preference.BOTH_BAD.value}
    return RoundCounts(**found, judgements=sum(map(len, votes.values())), raters=len(raters))


def round_close_if_settled(judging: JudgingRound) -> bool:
    """Ends a round that has its verdict, or nothing left to judge. Returns True if it has ended.

    A round that sets a route goes on after its verdict: each judgement tells more of the threshold.
    """
    with transaction.atomic():
        row = JudgingRound.objects.select_for_update().get(pk=judging.pk)
        if not row.is_open:
            return row.status == Status.ENDED
        standing = round_standing(row)
        routed = ServingSettings.objects.filter(agent=row.agent, route_policy=row.policy.name)
        settled = standing.share.settled and not routed.exists()
        used_up = row.status == Status.RUNNING and not standing.counts.waiting
        if settled or used_up:
            _end(row, standing, "a verdict is reached" if settled else "all prompts are judged")
        return settled or used_up


def round_stop(judging: JudgingRound, *, actor: str, reason: str = "") -> JudgingRound:
    """Ends a round with its present verdict, which is valid at any time. Raises JudgingRefused."""
    with transaction.atomic():
        row = JudgingRound.objects.select_for_update().get(pk=judging.pk)
        if row.status in (Status.ENDED, Status.FAILED):
            raise JudgingRefused(f"judging round {row.pk} is {row.status} already")
        _end(row, round_standing(row), f"stopped by {actor}{f': {reason}' if reason else ''}")
    return round_get(judging.pk)


def _end(row: JudgingRound, standing: RoundStanding, reason: str) -> None:
    row.status, row.verdict, row.result = Status.ENDED, standing.verdict, standing.dump()
    row.ended_at = timezone.now()
    row.reason = "; ".join(filter(None, (row.reason, reason)))
    row.save(update_fields=["status", "verdict", "result", "ended_at", "reason"])


def rounds_end(policy: Policy, why: str) -> None:
    """End every open round of a policy that left service, and every one against it, with the verdict each has now."""
    rows = JudgingRound.objects.select_for_update().filter(Q(policy=policy) | Q(opponent=policy))
    for row in rows.exclude(status__in=(Status.ENDED, Status.FAILED)):
        _end(row, round_standing(row), f"{policy.name} {why}")


def rounds_state(policy: Policy) -> str:
    """Text that changes whenever a round of the policy changes."""
    newest = rounds_of(policy).values_list("pk", "status", "ended_at").first()
    return f"{newest} {PairJudgement.objects.filter(pair__round__policy=policy).count()}"


def round_evidence(policy: Policy, rival: str) -> JudgingEvidence | None:
    """The policy's newest round against the rival, for the gate; an ended round comes before running ones."""
    opponent = {"opponent": None} if rival == BASE else {"opponent__name": rival}
    rows = rounds_of(policy).filter(**opponent).exclude(status=Status.FAILED)
    judging = rows.filter(status=Status.ENDED, result__judgements__gt=0).first() or rows.first()
    if judging is None:
        return None
    standing = round_standing(judging)
    return JudgingEvidence(
        round=judging.pk,
        verdict=standing.verdict,
        share=standing.share,
        words=standing.words(policy.name, rival),
        ended=judging.status == Status.ENDED,
        further=standing.further,
        minutes=standing.minutes,
    )


# --- Pairs ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ShownPair:
    """A pair as one rater sees it: the prompt's decision, and the answers on their sides."""

    pair: JudgedPair
    decision: Decision
    left: str
    right: str


def pair_next(judging: JudgingRound, rater: str, skip: Collection[str] = ()) -> ShownPair | None:
    """The next pair for a rater: not judged by them, and not complete.

    Pairs that others began come first, so that prompts become complete; otherwise raters start at different pairs.
    """
    if not judging.is_open:
        return None
    passed = set(skip)
    rows = pairs_standing(judging).exclude(judgements__rater=rater).annotate(given=Count("judgements"))
    waiting = [
        (-given, _secret(rater, pk, "turn"), pk)
        for pk, given in rows.filter(given__lt=judging.raters).order_by().values_list("pk", "given")
        if str(pk) not in passed
    ]
    return pair_shown(judging.pairs.get(pk=min(waiting)[2]), rater) if waiting else None


def pairs_standing(judging: JudgingRound) -> QuerySet[JudgedPair]:
    """Pairs to judge: different answers, and a decision that was not withdrawn."""
    standing = Decision.objects.filter(pk=OuterRef("decision"), withdrawal=None)
    return judging.pairs.filter(Exists(standing), same=False)


def pair_get(judging: JudgingRound, pk: str, rater: str) -> ShownPair | None:
    """A pair of the round by id; None if there is none."""
    try:
        pair = judging.pairs.filter(pk=uuid.UUID(pk), same=False).first()
    except ValueError:
        return None
    return pair_shown(pair, rater) if pair is not None else None


def pair_shown(pair: JudgedPair, rater: str) -> ShownPair | None:
    """The pair with the sides this rater sees; None if its decision was withdrawn or erased."""
    decision = Decision.objects.filter(pk=pair.decision, withdrawal=None).first()
    if decision is None:
        return None
    answers = (pair.answer, pair.other_answer)
    left, right = reversed(answers) if _swapped(pair.pk, rater) else answers
    return ShownPair(pair, decision, left, right)


@dataclass(frozen=True)
class ComparedPair:
    """A judged pair with its outcome for the policy: win, loss or tie."""

    turns: Sequence[object]
    answer: str
    other_answer: str
    outcome: str


def pairs_judged(judging: JudgingRound) -> list[ComparedPair]:
    """Pairs with all their judgements, losses first."""
    found = []
    for pair in judging.pairs.filter(same=False).prefetch_related("judgements"):
        given = [WORTH[Preference(row.preference)] for row in pair.judgements.all()][: judging.raters]
        decision = Decision.objects.filter(pk=pair.decision, withdrawal=None).first()
        if len(given) == judging.raters and decision is not None:
            outcome = "win" if sum(given) > 0 else "loss" if sum(given) < 0 else "tie"
            turns = turns_of(decision.messages)
            found.append(ComparedPair(turns, pair.answer, pair.other_answer, outcome))
    return sorted(found, key=lambda one: ("loss", "win", "tie").index(one.outcome))


def judgement_submit(pair: JudgedPair, rater: str, preference: str) -> PairJudgement:
    """Stores a rater's judgement: left, right, tie or both_bad, by the sides they saw.

    Ends the round if that settles it. Raises JudgingRefused for a second judgement, and for an ended round.
    """
    judging = pair.round
    if preference not in ("left", "right", "tie", "both_bad"):
        raise JudgingRefused(f"expected left, right, tie or both_bad, found {preference[:40]!r}")
    if not judging.is_open:
        raise JudgingRefused("this judging round has ended; your answer was not needed any more")
    if preference in ("left", "right"):
        first = (preference == "left") != _swapped(pair.pk, rater)
        preference = Preference.POLICY if first else Preference.OPPONENT
    try:
        with transaction.atomic():
            judgement = PairJudgement.objects.create(pair=pair, rater=rater, preference=preference)
    except IntegrityError as error:
        raise JudgingRefused("you judged this pair already") from error
    round_close_if_settled(judging)
    return judgement


def judgement_undo(judging: JudgingRound, rater: str) -> JudgedPair | None:
    """Withdraws the rater's newest judgement of an open round. Returns its pair, or None."""
    if not judging.is_open:
        return None
    rows = PairJudgement.objects.filter(pair__round=judging, rater=rater).select_related("pair")
    newest = rows.order_by("-id").first()
    if newest is None:
        return None
    newest.delete()
    return newest.pair


def _swapped(pair: uuid.UUID, rater: str) -> bool:
    """True if this rater sees the opponent's answer on the left, by a keyed hash that raters cannot compute."""
    return _secret(rater, pair, "side") % 2 == 1


def _secret(rater: str, pair: uuid.UUID, use: str) -> int:
    return int(salted_hmac(f"judging {use}", f"{rater}\n{pair}", algorithm="sha256").hexdigest()[:12], 16)
