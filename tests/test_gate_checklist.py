"""The gate before the click: what is missing, how far away that is; refusals on record; errors as raters read them."""

import re

import pytest

from feedback.cache import forget_all
from feedback.services import decision_record, rating_submit
from rl.gates.rules import prompts_for_gain, prompts_to_show
from rl.models import Policy, TrainingRun
from rl.models.runs import LEARNER
from rl.registry.checklist import gate_checklists, policy_verdict
from rl.selectors import AgentCard, agent_cards
from rl.views.runs import stations_of, step_next
from tests.support.api_client import signed_in
from tests.support.evaluations import judged
from tests.support.registry_rows import make_policy, make_run
from tests.support.said import words

pytestmark = pytest.mark.django_db

BOTH = [Policy.Stage.CHAMPION, Policy.Stage.CHALLENGER]


def test_the_outlook_by_hand() -> None:
    # a gain of half the half-width takes four times the prompts
    assert prompts_to_show(0.1, -0.1, 0.0, 100) == 400
    # one-sided 1/30 at the first attempt, 1/120 at the second: normal quantiles 1.8339 and 2.3940, squared 1.704
    figures = {"value": 0.1, "low": 0.0, "n": 1000, "margin": 0.0, "attempt": 1}
    assert prompts_for_gain(figures, 0.05) == pytest.approx(1704, abs=1)
    assert prompts_for_gain({"kind": "pairs", "n": 3}, 0.05) is None


def test_without_a_comparison_the_command_that_makes_one_is_named() -> None:
    policy = make_policy()
    champion, challenger = gate_checklists(policy, BOTH)
    assert (champion.stage, challenger.stage) == ("champion", "challenger")
    assert [item.rule for item in champion.unmet] == ["comparison"]
    assert champion.command == f"python manage.py evaluate_model --policy {policy.name} --compare-base"


def test_a_gain_that_is_not_shown_says_how_many_prompts_would_show_it() -> None:
    policy = make_policy()
    judged(policy, both=20, wins=8, losses=4, neither=8)
    champion, challenger = gate_checklists(policy, BOTH)
    (gain,) = champion.unmet
    assert gain.rule == "accuracy"
    found = re.search(
        r"about ([\d,]+) held-out prompts are needed, that is about ([\d,]+) more rated", gain.missing
    )
    assert champion.ratings == int(found[2].replace(",", ""))
    assert int(found[1].replace(",", "")) > 40
    assert challenger.opens


def test_harm_is_not_lifted_by_ratings() -> None:
    policy = make_policy()
    judged(policy, kl=7.5)
    (champion,) = gate_checklists(policy, BOTH[:1])
    assert [item.rule for item in champion.unmet] == ["kl"]
    assert champion.harmful
    assert "More ratings will not change this" in champion.unmet[0].missing


def test_an_open_gate_says_what_no_rule_asks_for() -> None:
    policy = make_policy()
    found = judged(policy)
    assert (policy_verdict(policy).standing, policy_verdict(policy).caveat) == ("Ready to promote.", False)
    right = {"value": 0.93, "low": 0.8, "high": 0.98, "n": 40}
    baseline = {"trained_on": {"rows": 70}, "preference_accuracy": right}
    found.figures |= {"simulated_share": 1.0, "baseline": baseline}
    found.save()
    html = signed_in("operator", "operator").get(f"/policies/{policy.name}/").text
    assert 'class="said-plainly is-waits"' in html
    # one action: the verdict leads to none beside the gate's own button
    assert re.findall(r'<(?:a|button)[^>]*class="button"', html) == []
    assert len(re.findall(r'<button type="submit" name="move" value="\w+">', html)) == 1
    for number in range(30):
        decision = decision_record(agent=policy.agent, messages=f"q {number}", response="a").row
        for rater, thumb in (("ann", "up"), ("bob", "down" if number % 2 else "up")):
            rating_submit(decision=decision, rater=rater, thumb=thumb)
    forget_all()
    verdict = policy_verdict(policy)
    assert verdict.caveat
    assert verdict.standing == (
        "Ready to promote. But note: all of its ratings are simulated; the raters agree too little to rely on; "
        "a simple classifier of the same ratings does better (93.0 %, this policy 87.5 %)."
    )


def test_an_open_gate_has_one_main_button() -> None:
    policy = make_policy()
    judged(policy)
    html = signed_in("operator", "operator").get(f"/policies/{policy.name}/").text
    assert re.search(r'<button type="submit" name="move" value="champion">Promote to champion', html)
    assert re.search(r'<button type="submit" name="move" value="challenger" class="quiet">', html)
    assert "by force</button>" not in html


def test_a_closed_gate_has_no_button_but_force_that_names_what_is_skipped() -> None:
    policy = make_policy()
    judged(policy, both=20, wins=8, losses=4, neither=8)
    html = signed_in("operator", "operator").get(f"/policies/{policy.name}/").text
    assert re.search(r'disabled aria-describedby="gate-champion">Promote to champion', html)
    # the main button is what the verdict asks for next
    assert re.search(r'name="move" value="challenger" class="quiet">Promote to challenger', html)
    assert "Skip “Better than what it replaces”" in words(html)
    assert html.count('name="force" required') == 1


def test_harm_offers_neither_ratings_nor_the_same_list_twice() -> None:
    policy = make_policy()
    judged(policy, both=4, wins=6, losses=0, neither=2, kl=7.5)
    text = words(signed_in("operator", "operator").get(f"/policies/{policy.name}/").text)
    assert "more rated prompts away" not in text
    assert "Rate more" not in text.replace("Rate more, then", "")
    assert "To become challenger part of the traffic, in an experiment not yet For the same reasons." in text


def test_a_refused_promotion_is_kept_with_its_report_and_shown_as_the_verdict() -> None:
    policy = make_policy()
    judged(policy, both=20, wins=8, losses=4, neither=8)
    html = (
        signed_in("operator", "operator")
        .post(f"/policies/{policy.name}/move/", {"move": "champion"}, follow=True)
        .text
    )
    event = policy.events.get(kind="gated")
    assert (event.actor, event.verdicts["passed"], event.verdicts["to"]) == ("operator", False, "champion")
    assert "not shown to be better" in event.reason
    assert "asked by operator: it stayed closed." in words(html)
    assert "stays candidate" in html


def test_an_operator_sees_the_checklist_on_the_agents_page_and_a_rater_does_not() -> None:
    policy = make_policy()
    decision_record(agent="widgets", messages="p", response="r")
    judged(policy, "widgets-app", both=20, wins=8, losses=4, neither=8)
    assert "Better than what it replaces" in signed_in("operator", "operator").get("/agents/widgets/").text
    assert "Better than what it replaces" not in signed_in("rater", "rater").get("/agents/widgets/").text


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
def test_an_error_is_shown_to_operators_alone(status: str) -> None:
    run = make_run(status=status, reason="RuntimeError: secret in a path")
    operator, rater = signed_in("operator", "operator"), signed_in("rater", "rater")
    for path in (f"/runs/{run.pk}/", "/"):
        assert "secret in a path" in operator.get(path).text
        assert "secret in a path" not in rater.get(path).text
    assert rater.get(f"/runs/{run.pk}/").status_code == 403
    assert TrainingRun.objects.get(pk=run.pk).reason
