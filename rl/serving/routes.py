"""Routing by confidence: an agent's own model answers where it is sure, its hosted champion where it is not.

The confidence of an answer is the geometric mean probability of its tokens. A random share of the requests is explored:
both models answer, the user gets the champion's answer, and the own one is recorded as a shadow. Judged pairs of these
set the threshold (`rl.statistics.routing`).
"""

from __future__ import annotations

import dataclasses
import uuid
from collections import defaultdict
from collections.abc import Iterable
from functools import partial

from django.db.models import Avg

from backend.isolation import agent_isolated
from backend.notifications import notify
from feedback.explorer.bulk_readers import COST
from feedback.models import Decision, shadow_id
from feedback.selectors import decisions_of
from feedback.storage.sql import chunks
from rl.charts.intervals import Forest, ForestLine, forest_of
from rl.models import JudgedPair, PairJudgement, Policy, ServingSettings
from rl.registry.judging import WORTH
from rl.registry.service import champion_of
from rl.serving.files import policy_files_make
from rl.serving.routing import route_basis
from rl.statistics.routing import RoutePoint, route_curve, route_threshold

ALPHA = 0.05
"""Probability that more quality is lost than allowed."""
PRICED = 500
"""Newest answers of the champion whose mean cost prices an answer."""


@dataclasses.dataclass(frozen=True)
class JudgedRoute:
    """A judged prompt that both models answered."""

    confidence: float
    worse: bool
    """People prefer the champion's answer."""


def routes_judged(policy: Policy, champion: Policy) -> list[JudgedRoute]:
    """People's judgements of a policy's shadow answers against the champion's answers to the same prompts.

    Equal answers are known before anybody judges. They count in the same share as the others have been judged: all of
    them beside few judgements would hide the losses still to come.
    """
    pairs = JudgedPair.objects.filter(round__policy=policy, round__opponent=champion).order_by("round", "pk")
    known = {row[0]: row[1:] for row in pairs.values_list("decision", "pk", "same", "round__raters")}
    votes: dict[uuid.UUID, list[int]] = defaultdict(list)
    judgements = PairJudgement.objects.filter(pair__in=pairs.order_by()).order_by("pk")
    for pair, preference in judgements.values_list("pair", "preference"):
        votes[pair].append(WORTH[PairJudgement.Preference(preference)])
    sure = _confidences(policy, known)
    equal, judged, unequal = [], [], 0
    for decision, (pk, same, raters) in known.items():
        if decision not in sure:
            continue
        if same:
            equal.append(JudgedRoute(sure[decision], worse=False))
            continue
        unequal += 1
        if len(votes[pk]) >= raters:
            judged.append(JudgedRoute(sure[decision], worse=sum(votes[pk][:raters]) < 0))
    return [*judged, *equal[: len(equal) * len(judged) // unequal if unequal else None]]


def _confidences(policy: Policy, decisions: Iterable[uuid.UUID]) -> dict[uuid.UUID, float]:
    """Confidence of a policy's standing shadow answers beside these decisions, where it is known."""
    answered = {shadow_id(decision): decision for decision in decisions}
    found = {}
    for chunk in chunks(list(answered)):
        rows = Decision.objects.filter(pk__in=chunk, policy=policy.name, withdrawal=None).order_by()
        for pk, sure in rows.values_list("pk", "metadata__serving__confidence"):
            if sure is not None:
                found[answered[pk]] = sure
    return found


def routes_reset() -> list[str]:
    """Set each routed agent's threshold anew from its judgements. Returns a line per threshold that changed."""
    done: list[str] = []
    for row in ServingSettings.objects.exclude(route_policy=""):
        done += agent_isolated(f"route {row.pk}", row.agent, partial(route_reset, row))
    return done


def route_reset(row: ServingSettings) -> list[str]:
    """Set one agent's threshold anew; without a champion or enough judgements the champion answers everything."""
    policy, champion = Policy.objects.filter(name=row.route_policy).first(), champion_of(row.agent)
    if policy is not None:
        policy_files_make(policy)
    judged = [] if policy is None or champion is None else routes_judged(policy, champion)
    confidences, worse = [one.confidence for one in judged], [one.worse for one in judged]
    point = route_threshold(confidences, worse, loss=row.route_loss, alpha=ALPHA)
    threshold = None if point is None else point.threshold
    newest = decisions_of(row.agent).filter(policy=champion.name if champion else "").order_by("-created_at")
    price = Decision.objects.filter(pk__in=newest.values("pk")[:PRICED]).aggregate(mean=Avg(COST))["mean"]
    report = {
        **route_basis(row, champion.name if champion else ""),
        "judged": len(judged),
        "usd_per_1000": None if price is None else 1000 * price,
        "point": None if point is None else dataclasses.asdict(point),
        "curve": [dataclasses.asdict(one) for one in route_curve(confidences, worse, alpha=ALPHA)],
    }
    if report == row.route_report and threshold == row.route_threshold:
        return []
    ServingSettings.objects.filter(pk=row.pk).update(route_threshold=threshold, route_report=report)
    if threshold == row.route_threshold:
        return []
    words = f"agent {row.agent}: {route_words(row.route_policy, point, row.route_loss)}"
    notify("route_reset", words, agent=row.agent, threshold=threshold)
    return [words]


def route_words(policy: str, point: RoutePoint | None, loss: float) -> str:
    """What a threshold is expected to come to, in a sentence. A figure is not broken from its unit."""
    if point is None:
        words = f"{policy} answers nothing yet: too few judgements show that at most {100 * loss:g} % become worse"
    else:
        words = (
            f"By the judged answers, {policy} will answer about {100 * point.local:.0f} % of the prompts, where it is "
            f"surest; of all prompts {100 * point.loss:.1f} % will become worse, with 95 % certainty at most "
            f"{100 * loss:g} %"
        )
    return words.replace(" %", "\N{NO-BREAK SPACE}%")


@dataclasses.dataclass(frozen=True)
class RouteShown:
    """An agent's route on the page of savings."""

    words: str
    judged: int
    curve: Forest | None


def route_shown(agent: str) -> RouteShown | None:
    """The route of an agent with its curve: quality lost against the share answered here; None without a route."""
    row = ServingSettings.objects.filter(agent=agent).exclude(route_policy="").first()
    if row is None:
        return None
    report = row.route_report
    point = RoutePoint(**report["point"]) if report.get("point") else None
    price = report.get("usd_per_1000")
    lines = []
    for one in [RoutePoint(**point) for point in report.get("curve", ())]:
        cost = "" if price is None else f", {price * (1 - one.local):.2f} USD per 1,000 answers"
        words = f"{100 * one.loss:.1f} % worse [{100 * one.low:.1f} to {100 * one.high:.1f}]"
        state = "better" if one.high <= row.route_loss else "undecided"
        label = f"{100 * one.local:.0f} % answered here{cost}"
        lines.append(ForestLine(label, words, one.loss, one.low, one.high, state))
    curve = forest_of(
        "Answers that become worse", lines, lambda value: f"{100 * value:.4g} %", zero=False, share=True
    )
    return RouteShown(route_words(row.route_policy, point, row.route_loss), report.get("judged", 0), curve)
