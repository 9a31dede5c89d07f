"""The rule `compared`: likelihoods open the challenger stage; a champion's answers were compared."""

import dataclasses
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
from django.core.management import call_command
from django.core.management.base import CommandError
from django.test import Client

from rl.gates.answers import needs_judging, rule_compared
from rl.gates.evidence_kinds import CORRECTIONS, KNOWN, LABELS, PAIRS, REWARDS, TESTS
from rl.gates.report import Case, Evidence, GateBounds, JudgingEvidence, RatedAnswer
from rl.gates.rules import CHALLENGER, CHAMPION, gate_judge
from rl.models import JudgingRound, Policy
from rl.registry import service as registry
from rl.registry.checklist import gate_checklists
from rl.registry.judging import judgement_submit, round_evidence, round_stop
from rl.statistics.sequential import BETTER, NOT_WORSE, OPEN, WORSE, WinShare
from tests.support.evaluations import judged, round_ended
from tests.support.experiments import policy_of
from tests.support.judging import AGENT, decision_of, preference, round_of

BOUNDS = GateBounds()
CASES = [Case(1, 0)] * 20 + [Case(1, 1)] * 20


def round_with(wins: int, losses: int, *, ended: bool = True) -> JudgingEvidence:
    share = WinShare(wins, losses, 0, 1 / 30, 0.1)
    return JudgingEvidence(7, share.verdict, share, "words", ended, 25, 4)


def found(to: str = CHAMPION, against: str = "old", **facts: Any) -> Any:
    return rule_compared(Evidence(against, facts.pop("cases", CASES), **facts), BOUNDS, to)


@pytest.mark.parametrize(
    ("judging", "outcome", "waits"),
    [
        (None, "refused", True),
        (round_with(3, 2, ended=False), "refused", True),
        (round_with(12, 0, ended=False), "refused", True),
        (round_with(20, 18), "refused", True),
        (round_with(250, 240), "refused", True),
        (round_with(40, 12), "passed", False),
        (round_with(2, 20), "refused", False),
    ],
    ids=["none", "open", "not ended", "no verdict", "not worse", "better", "worse"],
)
def test_a_champion_needs_a_won_round(judging: JudgingEvidence | None, outcome: str, waits: bool) -> None:
    result = found(judging=judging)
    assert (result.outcome, result.waits) == (outcome, waits)
    assert result.figures.get("round") == (7 if judging else None)


def test_verdicts_of_rounds() -> None:
    # the rounds have the verdicts they stand for
    verdicts = [round_with(*counts).verdict for counts in ((20, 18), (250, 240), (40, 12), (2, 20))]
    assert verdicts == [OPEN, NOT_WORSE, BETTER, WORSE]
    # a challenger and a first champion need none
    assert found(CHALLENGER).outcome == found(against="base").outcome == "not_applicable"
    assert found(CHALLENGER, judging=round_with(2, 20)).outcome == "refused"


@pytest.mark.parametrize(
    ("kind", "discrete", "needed"),
    [
        (KNOWN, True, False),
        (TESTS, False, False),
        (REWARDS, False, True),
        (CORRECTIONS, True, False),
        (CORRECTIONS, False, True),
        (LABELS, False, True),
    ],
)
def test_what_compares_answers(kind: str, discrete: bool, needed: bool) -> None:
    rated = [RatedAnswer(str(number), number % 2, 0.1 * number) for number in range(40)]
    items = rated if kind == LABELS else CASES
    evidence = Evidence("old", (), other_kinds={kind: items}, discrete=discrete)
    assert needs_judging(evidence, BOUNDS, CHAMPION) == needed
    assert rule_compared(evidence, BOUNDS, CHAMPION).passed == (not needed)


def test_the_report_asks_likelihoods_for_no_loss_and_people_for_the_gain() -> None:
    slight = [Case(1, 0)] * 6 + [Case(0, 1)] * 5 + [Case(1, 1)] * 20
    report = gate_judge(Evidence("old", slight, judging=round_with(40, 12)), BOUNDS)
    outcomes = {one.rule: one.outcome for one in report.verdicts}
    assert (outcomes["accuracy"], outcomes["compared"]) == ("passed", "passed")
    assert report.passed
    lost = [Case(0, 1)] * 20 + [Case(1, 1)] * 20
    assert not gate_judge(Evidence("old", lost, judging=round_with(40, 12)), BOUNDS).passed


BARRED = {PAIRS: "shop gives answers and no log-probabilities"}


def test_where_the_rival_has_no_likelihoods_a_round_decides_alone() -> None:
    won = Evidence("shop", (), exclusions=BARRED, judging=round_with(40, 12))
    assert gate_judge(won, BOUNDS).passed
    for other in (None, round_with(250, 240), round_with(12, 0, ended=False)):
        report = gate_judge(dataclasses.replace(won, judging=other), BOUNDS)
        assert [one.rule for one in report.refusals] == ["compared"]
    assert not gate_judge(dataclasses.replace(won, judging=round_with(2, 20)), BOUNDS).passed
    assert not gate_judge(dataclasses.replace(won, exclusions={}), BOUNDS).passed, "nothing was compared"


def test_not_worse_opens_the_challenger_stage_alone() -> None:
    few = [Case(1, 0)] * 2
    for evidence in (Evidence("old", few), Evidence("shop", (), exclusions=BARRED)):
        assert not gate_judge(evidence, BOUNDS, CHALLENGER).passed
        not_worse = dataclasses.replace(evidence, judging=round_with(250, 240))
        assert gate_judge(not_worse, BOUNDS, CHALLENGER).passed
        assert not gate_judge(not_worse, BOUNDS, CHAMPION).passed
        assert gate_judge(
            dataclasses.replace(evidence, judging=round_with(40, 12)), BOUNDS, CHALLENGER
        ).passed
        for other in (round_with(20, 18), round_with(12, 0, ended=False), round_with(2, 20)):
            assert not gate_judge(dataclasses.replace(evidence, judging=other), BOUNDS, CHALLENGER).passed
    lost = Evidence("old", [Case(0, 1)] * 40, judging=round_with(250, 240))
    assert not gate_judge(lost, BOUNDS, CHALLENGER).passed


@pytest.fixture
def candidate(db: None) -> Policy:
    champion, policy = policy_of("v1", "champion", AGENT), policy_of("v2", "candidate", AGENT)
    judged(policy, champion.name)
    JudgingRound.objects.all().delete()
    return policy


def missing(policy: Policy) -> str:
    unmet = {item.rule: item.missing for item in gate_checklists(policy, ["champion"])[0].unmet}
    return unmet.get("compared", "")


def test_a_refusal_says_where_to_compare(candidate: Policy) -> None:
    with pytest.raises(registry.RegistryRefused):
        registry.policy_promote(candidate, actor="ann")
    assert "side by side" in missing(candidate)
    judging = round_of(60, policy=candidate)
    assert f"/rate/pairs/?round={judging.pk}" in missing(candidate)
    before = missing(candidate)
    for _ in range(4):
        pair, side = preference(judging, "ada", "policy")
        judgement_submit(pair, "ada", side)
    assert missing(candidate) != before
    round_stop(judging, actor="ann")
    assert "ended" in missing(candidate)
    assert registry.policy_promote(candidate, "challenger", actor="ann").stage == "challenger"


def test_a_round_that_was_won_opens_the_gate(candidate: Policy) -> None:
    round_ended(candidate, Policy.objects.get(name="v1"), 40, 12)
    assert registry.policy_promote(candidate, actor="ann").stage == "champion"


def test_the_gate_reads_the_newest_round_against_the_rival_that_was_judged(candidate: Policy) -> None:
    champion = Policy.objects.get(name="v1")
    assert round_evidence(candidate, "v1") is None
    first = round_ended(candidate, champion, 40, 12)
    round_ended(candidate, None, 2, 30)
    round_of(3, policy=candidate)
    round_ended(candidate, champion, 0, 0)
    found = round_evidence(candidate, "v1")
    assert (found.round, found.verdict, found.ended) == (first.pk, BETTER, True)
    assert round_evidence(candidate, "base").verdict == WORSE


def test_the_apps_model_is_the_rival_before_anybody_looked_at_the_agent(admin_client: Client) -> None:
    looks: tuple[Callable[[str], object], ...] = (
        lambda name: call_command("policy", "show", name),
        lambda name: admin_client.get(f"/policies/{name}/"),
        lambda name: admin_client.post(f"/api/policies/{name}/promote/", {}, "application/json"),
        lambda name: admin_client.post(f"/policies/{name}/move/", {"move": "champion"}),
        lambda name: call_command("policy", "promote", name),
    )
    for number, look in enumerate(looks):
        agent = f"{AGENT}-{number}"
        policy = policy_of(f"v{number}", "candidate", agent)
        judged(policy, "base")
        decision_of(0, agent)
        with suppress(CommandError):
            look(policy.name)
        assert Policy.objects.get(agent=agent, stage="champion").kind == "recorded"
        policy.refresh_from_db()
        assert policy.stage == "candidate"
