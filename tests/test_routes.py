"""Routing by confidence: the own model where it is sure, the champion elsewhere, by a threshold with a guarantee."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import openai
import pytest
from django.core.exceptions import ValidationError
from django.test import Client

from feedback.models import Decision, shadow_id
from rl.models import JudgedPair, JudgingRound, PairJudgement, Policy, ServingSettings
from rl.serving import endpoint, fallback, routes, routing
from rl.serving.shadow import shadows_due
from rl.statistics.routing import log_evidence, route_curve, route_threshold
from tests.support.hosted import answer_of, ask, hosted, model_server, recorded  # noqa: F401
from tests.support.serving import COUNTS, Parrot, openai_client, parrot_only, policy_made  # noqa: F401
from tests.support.stub_openai import ModelServer

database = pytest.mark.django_db(transaction=True)
SURE = COUNTS["confidence"]
"""The parrot's confidence."""


# --- The threshold ------------------------------------------------------------------------------------------------


def test_the_threshold_is_the_lowest_whose_loss_is_shown() -> None:
    confidences = [n / 1000 for n in range(1000)]
    worse = [n < 300 for n in range(1000)]
    point = route_threshold(confidences, worse, loss=0.02, alpha=0.05)
    assert point is not None
    assert 0.285 < point.threshold < 0.3  # some of the errors below 0.3 are allowed
    assert point.loss < 0.02
    assert point.high < 0.02
    everything = route_threshold(confidences, [False] * 1000, loss=0.02, alpha=0.05)
    assert everything is not None
    assert everything.local > 0.99


@pytest.mark.parametrize(("judged", "found"), [(0, False), (170, False), (171, True)])
def test_too_few_judgements_show_nothing(judged: int, found: bool) -> None:
    point = route_threshold([0.9] * judged, [False] * judged, loss=0.02, alpha=0.05)
    assert (point is not None and point.local == 1) is found


def test_looks_after_every_judgement_set_a_wrong_threshold_in_at_most_5_percent_of_worlds() -> None:
    n = np.arange(1, 1001)
    lost = np.cumsum(np.random.default_rng(0).random((1000, 1000)) < 0.0201, axis=1)
    assert (log_evidence(lost, n, 0.02) > math.log(20)).any(axis=1).mean() < 0.05  # type: ignore[arg-type]


def test_equal_confidences_stand_or_fall_together() -> None:
    assert route_threshold([0.5] * 400, [n < 40 for n in range(400)], loss=0.02, alpha=0.05).local == 0  # type: ignore[union-attr]


def test_the_curve_goes_from_few_to_all() -> None:
    draw = np.random.default_rng(1)
    confidences = draw.random(400).tolist()
    curve = route_curve(confidences, [one < 0.2 for one in confidences], alpha=0.05)
    assert [round(point.local, 3) for point in curve] == [n / 8 for n in range(1, 9)]
    assert all(point.low <= point.loss <= point.high for point in curve)
    assert curve[-1].loss == pytest.approx(0.2, abs=0.05)
    assert route_curve([], [], alpha=0.05) == []


# --- Serving --------------------------------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endpoint, "FIRST_PAUSE_S", 0.001)


@pytest.fixture
def champion(stub: ModelServer, parrot: Parrot, db: None) -> Policy:
    policy_made("bot-own", agent="bot", stage="candidate")
    return hosted(stub.url)


def routed(threshold: float | None, explore: float = 0.0) -> ServingSettings:
    row = ServingSettings(
        agent="bot", route_policy="bot-own", route_threshold=threshold, route_explore=explore
    )
    row.route_report = routing.route_basis(row, "bot-hosted")
    row.save()
    return row


@database
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("threshold", "policy"), [(SURE - 0.01, "bot-own"), (SURE + 0.01, "bot-hosted")])
def test_the_own_model_answers_where_it_is_sure(
    client: openai.OpenAI, champion: Policy, stream: bool, threshold: float, policy: str
) -> None:
    routed(threshold)
    said = ask(client, stream=True) if stream else [ask(client)]
    assert {one.model for one in said} == {policy}
    (row,) = recorded()
    assert row.policy == row.metadata["serving"]["meant"] == policy
    route = row.metadata["serving"]["route"]
    assert route["confidence"] == pytest.approx(SURE)
    assert (route["explored"], route["propensity"]) == (False, 1.0)


@database
def test_an_explored_request_gets_the_champions_answer_and_keeps_the_own_one_beside(
    client: openai.OpenAI, champion: Policy, parrot: Parrot
) -> None:
    routed(SURE - 0.01, explore=1.0)
    assert ask(client).model == "bot-hosted"
    row, beside = sorted(recorded(), key=lambda one: one.source)
    assert (beside.pk, beside.source, beside.policy) == (shadow_id(row.pk), "shadow", "bot-own")
    assert beside.response == parrot.said
    assert beside.metadata["serving"]["confidence"] == SURE
    assert row.metadata["serving"]["route"]["explored"] is True


@database
def test_without_a_threshold_or_an_answer_the_champion_answers(
    client: openai.OpenAI, champion: Policy, parrot: Parrot
) -> None:
    row = routed(None)
    assert ask(client).model == "bot-hosted"
    assert parrot.asked == []
    ServingSettings.objects.filter(pk=row.pk).update(route_threshold=0.0)
    fallback_cache_clear()
    parrot.failing = {"bot-own": fallback.BackendFailed("the machine is away")}
    assert ask(client).model == "bot-hosted"
    assert recorded()[-1].metadata["serving"]["route"]["confidence"] is None


def fallback_cache_clear() -> None:
    from feedback.cache import forget_all

    forget_all()


@database
def test_an_empty_answer_is_not_sure(client: openai.OpenAI, champion: Policy, parrot: Parrot) -> None:
    routed(0.0)
    parrot.said = ""
    assert ask(client).model == "bot-hosted"


@database
@pytest.mark.parametrize(
    "changed", [{"route_policy": "bot-next"}, {"route_loss": 0.01}, {"route_report": {"champion": "before"}}]
)
def test_a_threshold_holds_for_the_policy_champion_and_loss_it_was_set_for(
    champion: Policy, changed: dict[str, Any]
) -> None:
    policy_made("bot-next", agent="bot", stage="candidate")
    row = routed(0.5)
    assert routing.target_of("bot").route.threshold == 0.5  # type: ignore[union-attr]
    ServingSettings.objects.filter(pk=row.pk).update(**changed)
    fallback_cache_clear()
    assert routing.target_of("bot").route.threshold is None  # type: ignore[union-attr]


@database
def test_only_an_own_policy_can_be_routed_to(champion: Policy) -> None:
    for name in ("bot-hosted", "nobody"):
        with pytest.raises(ValidationError, match="route_policy"):
            ServingSettings(agent="bot", route_policy=name).full_clean()
    ServingSettings(agent="bot", route_policy="bot-own").full_clean()


# --- The scheduler ----------------------------------------------------------------------------------------------------


def judged(champion: Policy, count: int, worse: Any) -> None:
    """Judged pairs of the own policy's shadow answers, whose confidence falls from 1."""
    own = Policy.objects.get(name="bot-own")
    judging = JudgingRound.objects.create(
        agent="bot",
        policy=own,
        opponent=champion,
        status="running",
        prompts=count,
        raters=1,
        attempt=1,
        alpha=0.03,
    )
    for n in range(count):
        row = answer_of(0.002, agent="bot", messages=f"question {n}", response="theirs", policy=champion.name)
        beside = answer_of(
            None, id=shadow_id(row.pk), agent="bot", messages=f"question {n}", response="ours", policy="bot-own",
            source="shadow", tokens_out=1,
        )  # fmt: skip
        beside.metadata["serving"]["confidence"] = 1 - n / count
        Decision.objects.filter(pk=beside.pk).update(metadata=beside.metadata)
        pair = JudgedPair.objects.create(
            round=judging, decision=row.pk, answer="ours", other_answer="theirs", same=False
        )
        preference = "opponent" if worse(n) else "tie"
        PairJudgement.objects.create(pair=pair, rater="ann", preference=preference)


@database
def test_the_scheduler_sets_the_threshold_from_judgements_and_takes_it_back(
    champion: Policy, admin_client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[Any] = []
    monkeypatch.setattr(
        routes, "notify", lambda event, text, **facts: told.append((event, facts["threshold"]))
    )
    made: list[str] = []
    monkeypatch.setattr(routes, "policy_files_make", lambda policy: made.append(policy.name))
    row = routed(None)
    assert routes.routes_reset() == []
    assert made == ["bot-own"]
    judged(champion, 200, lambda n: n >= 120)
    (line,) = routes.routes_reset()
    row.refresh_from_db()
    assert row.route_threshold == pytest.approx(0.4, abs=0.01)
    assert "will answer about 60\N{NO-BREAK SPACE}% of the prompts" in line
    assert row.route_report["usd_per_1000"] == pytest.approx(2.0)
    assert routes.routes_reset() == []
    page = admin_client.get("/savings/")
    ((agent, _, shown),) = page.context["agents"]
    assert (agent, shown.judged) == ("bot", 200)
    assert len(shown.curve.rows) == 8
    PairJudgement.objects.update(preference="opponent")
    routes.routes_reset()
    row.refresh_from_db()
    assert row.route_report["point"] is None or row.route_report["point"]["local"] == 0
    assert [event for event, _ in told] == ["route_reset"] * len(told)
    assert told[0][1] == pytest.approx(0.4, abs=0.01)


@database
def test_equal_answers_count_in_the_share_in_which_others_were_judged(champion: Policy) -> None:
    own = Policy.objects.get(name="bot-own")
    judged(champion, 40, lambda n: n < 4)
    JudgedPair.objects.filter(pk__in=JudgedPair.objects.values("pk")[:20]).update(same=True)
    unequal = PairJudgement.objects.filter(pair__same=False)
    PairJudgement.objects.filter(pair__same=True).delete()
    assert len(routes.routes_judged(own, champion)) == 40
    PairJudgement.objects.filter(pk__in=list(unequal.values_list("pk", flat=True)[:15])).delete()
    assert len(routes.routes_judged(own, champion)) == 10
    JudgingRound.objects.update(raters=2)
    assert routes.routes_judged(own, champion) == []


@database
def test_a_shadow_leaves_out_what_only_the_unsure_route_answered(champion: Policy) -> None:
    from rl.experiments.traffic import experiment_draft, experiment_start

    own = Policy.objects.get(name="bot-own")
    draft = experiment_draft("try", ["bot-own"], agent="bot", actor="ann", shadow=100)
    experiment = experiment_start(draft, actor="ann")
    rows = [
        answer_of(0.0, agent="bot", messages=f"q {n}", response="r", policy="bot-hosted") for n in range(3)
    ]
    for row, route in zip(rows, ({"explored": False}, {"explored": True}, None), strict=True):
        row.metadata["serving"] |= {"route": route} if route else {}
        row.save(update_fields=["metadata"])
    assert {row.pk for row in shadows_due(experiment, own)} == {rows[1].pk, rows[2].pk}
