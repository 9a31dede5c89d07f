"""The gate before the click: what is missing, how far away that is; refusals on record; errors as raters read them."""

from __future__ import annotations

import re

import pytest
from django.contrib.auth.models import User
from django.test import Client

from feedback.accounts.roles import role_give
from feedback.services import decision_record
from rl.gates.rules import MAX_PROMPTS, prompts_for_gain, prompts_to_show
from rl.models import Policy, TrainingRun
from rl.models.runs import LEARNER
from rl.registry import service as registry
from rl.registry.checklist import gate_checklists, rated_until
from rl.selectors import AgentCard, agent_cards
from rl.views.next_step import stations_of, step_next
from tests.support.evaluations import judged
from tests.test_pages import make_policy, make_run, words

pytestmark = pytest.mark.django_db

BOTH = [Policy.Stage.CHAMPION, Policy.Stage.CHALLENGER]


def client_of(role: str) -> Client:
    user, client = User.objects.create_user(role), Client()
    role_give(user, role)
    client.force_login(user)
    return client


# --- The outlook: worked by hand --------------------------------------------------------------------------------


def test_a_gain_of_half_the_half_width_takes_four_times_the_prompts() -> None:
    assert prompts_to_show(0.1, -0.1, 0.0, 100) == 400


def test_a_margin_is_taken_off_the_gain() -> None:
    assert prompts_to_show(0.1, -0.1, 0.05, 100) == 1600


def test_no_gain_has_no_number() -> None:
    assert prompts_to_show(0.0, -0.2, 0.0, 100) is None
    assert prompts_to_show(-0.1, -0.2, 0.0, 100) is None


def test_a_tiny_gain_ends_at_the_most() -> None:
    assert prompts_to_show(1e-9, -0.2, 0.0, 100) == MAX_PROMPTS


def test_the_next_attempt_is_paid_for() -> None:
    # one-sided 1/30 at the first attempt, 1/120 at the second: normal quantiles 1.8339 and 2.3940, squared 1.704
    figures = {"value": 0.1, "low": 0.0, "n": 1000, "margin": 0.0, "attempt": 1}
    assert prompts_for_gain(figures, 0.05) == pytest.approx(1704, abs=1)


def test_figures_without_an_interval_say_nothing() -> None:
    assert prompts_for_gain({"kind": "pairs", "n": 3}, 0.05) is None


def test_of_what_is_rated_a_third_is_held_out_at_first() -> None:
    assert rated_until(40, 30, min_evidence=30) == 30


# --- The checklist ----------------------------------------------------------------------------------------------


def test_without_a_comparison_the_command_that_makes_one_is_named() -> None:
    policy = make_policy()
    champion, challenger = gate_checklists(policy, BOTH)
    assert (champion.stage, challenger.stage) == ("champion", "challenger")
    assert [item.rule for item in champion.unmet] == ["comparison"]
    assert champion.command == f"python manage.py evaluate_model --policy {policy.name} --compare-base"


def test_too_few_prompts_are_named_with_what_is_needed() -> None:
    policy = make_policy()
    judged(policy, both=4, wins=6, losses=0, neither=0)
    (champion,) = gate_checklists(policy, BOTH[:1])
    evidence = next(item for item in champion.unmet if item.rule == "evidence")
    assert {"10", "30"} <= set(evidence.words.split())
    assert not champion.opens
    assert not champion.harmful


def test_a_gain_that_is_not_shown_says_how_many_prompts_would_show_it() -> None:
    policy = make_policy()
    judged(policy, both=20, wins=8, losses=4, neither=8)
    champion, challenger = gate_checklists(policy, BOTH)
    (gain,) = champion.unmet
    assert gain.rule == "accuracy"
    found = re.search(
        r"about ([\d,]+) held-out prompts are needed, that is about ([\d,]+) more rated", gain.missing
    )
    assert found is not None
    assert champion.ratings == int(found[2].replace(",", ""))
    assert int(found[1].replace(",", "")) > 40
    assert challenger.opens


def test_no_gain_asks_for_another_training_and_not_for_ratings() -> None:
    policy = make_policy()
    judged(policy, both=20, wins=4, losses=4, neither=12)
    (champion,) = gate_checklists(policy, BOTH[:1])
    assert champion.ratings == 0
    assert "train again" in champion.unmet[0].missing


def test_harm_is_not_lifted_by_ratings() -> None:
    policy = make_policy()
    judged(policy, kl=7.5)
    (champion,) = gate_checklists(policy, BOTH[:1])
    assert [item.rule for item in champion.unmet] == ["kl"]
    assert champion.harmful
    assert "More ratings will not change this" in champion.unmet[0].missing


# --- The page ---------------------------------------------------------------------------------------------------


def test_an_open_gate_has_one_main_button() -> None:
    policy = make_policy()
    judged(policy)
    html = client_of("operator").get(f"/policies/{policy.name}/").text
    assert re.search(r'<button type="submit" name="move" value="champion">Promote to champion', html)
    assert re.search(r'<button type="submit" name="move" value="challenger" class="quiet">', html)
    assert "by force</button>" not in html


def test_a_closed_gate_has_no_button_but_force_that_names_what_is_skipped() -> None:
    policy = make_policy()
    judged(policy, both=20, wins=8, losses=4, neither=8)
    html = client_of("operator").get(f"/policies/{policy.name}/").text
    assert re.search(r'disabled aria-describedby="gate-champion">Promote to champion', html)
    assert re.search(r'name="move" value="challenger">Promote to challenger', html)
    assert "Skip “Better than what it replaces”" in words(html)
    assert html.count('name="force" required') == 1


def test_harm_offers_neither_ratings_nor_the_same_list_twice() -> None:
    policy = make_policy()
    judged(policy, both=4, wins=6, losses=0, neither=2, kl=7.5)
    text = words(client_of("operator").get(f"/policies/{policy.name}/").text)
    assert "more rated prompts away" not in text
    assert "Rate more" not in text.replace("Rate more, then", "")
    assert "To become challenger part of the traffic, in an experiment closed For the same reasons." in text


def test_a_refused_promotion_is_kept_with_its_report_and_shown_as_the_verdict() -> None:
    policy = make_policy()
    judged(policy, both=20, wins=8, losses=4, neither=8)
    html = (
        client_of("operator").post(f"/policies/{policy.name}/move/", {"move": "champion"}, follow=True).text
    )
    event = policy.events.get(kind="gated")
    assert (event.actor, event.verdicts["passed"], event.verdicts["to"]) == ("operator", False, "champion")
    assert "not shown to be better" in event.reason
    assert "asked by operator: it stayed closed." in words(html)
    assert "stays candidate" in html


def test_a_refusal_without_a_comparison_is_kept_too() -> None:
    policy = make_policy()
    html = (
        client_of("operator").post(f"/policies/{policy.name}/move/", {"move": "champion"}, follow=True).text
    )
    assert policy.events.get(kind="gated").verdicts["passed"] is False
    assert words(html).count("it was not compared with base yet") >= 2


def test_a_move_that_no_stage_allows_asks_no_gate() -> None:
    policy = make_policy()
    registry.policy_reject(policy, actor="ann", reason="loops")
    with pytest.raises(registry.RegistryRefused, match="is rejected and can move to nowhere"):
        registry.policy_promote(policy, actor="ann")
    assert not policy.events.filter(kind="gated").exists()


def test_an_operator_sees_the_checklist_on_the_agents_page_and_a_rater_does_not() -> None:
    policy = make_policy()
    decision_record(agent="widgets", messages="p", response="r")
    judged(policy, "widgets-app", both=20, wins=8, losses=4, neither=8)
    assert "Better than what it replaces" in client_of("operator").get("/agents/widgets/").text
    assert "Better than what it replaces" not in client_of("rater").get("/agents/widgets/").text


# --- Runs that stopped ------------------------------------------------------------------------------------------


def card() -> AgentCard:
    return next(one for one in agent_cards() if one.facts.slug == "widgets")


def test_a_failed_run_beside_a_policy_does_not_stop_the_agent() -> None:
    policy = make_policy()
    failed = make_run(status="failed", reason="CUDA out of memory")
    shown = card()
    assert shown.run.pk == policy.run_id
    assert shown.stopped_beside.pk == failed.pk
    assert stations_of(shown).training == "done"
    assert step_next(shown).kind != "look"


def test_a_first_training_that_failed_does_and_so_does_the_learners() -> None:
    make_run(status="failed", reason="no")
    assert stations_of(card()).training == "fault"
    make_policy()
    make_run(status="failed", reason="no", asked_by=LEARNER)
    assert stations_of(card()).training == "fault"


@pytest.mark.parametrize("status", ["failed", "refused"])
def test_an_error_is_shown_to_operators_and_in_plain_words_to_raters(status: str) -> None:
    run = make_run(status=status, reason="RuntimeError: secret in a path")
    operator, rater = client_of("operator"), client_of("rater")
    for path in (f"/runs/{run.pk}/", "/"):
        assert "secret in a path" in operator.get(path).text
        assert "secret in a path" not in rater.get(path).text
    assert "operators see the reason" in rater.get(f"/runs/{run.pk}/").text
    assert TrainingRun.objects.get(pk=run.pk).reason
