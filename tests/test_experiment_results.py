"""Where an experiment stands by the decision log, and what the clock does about it."""

from datetime import timedelta
from typing import Any

import numpy as np
import pytest
from django.utils import timezone

from feedback.models import Outcome
from feedback.services import rating_submit, rating_withdraw
from rl.experiments.results import ResultsShown, results_of
from rl.experiments.schedule import arm_promote, bandit_reweight, experiment_look, tick
from rl.experiments.traffic import ExperimentRefused, plan_of
from rl.experiments.verdicts import Rule, effect_of, guardrail_judge
from rl.models import Experiment, ExperimentEvent, Policy, RewardRecord
from rl.recipes.experiment_metrics import Guardrail, metric_of
from rl.registry import service as registry
from rl.statistics.contrasts import Moments, bandit_chances, ratio_mismatch_anytime_p
from tests.support.evaluations import judged
from tests.support.experiment_worlds import moments_of_counts
from tests.support.experiments import expose, policy_of, running_of

pytestmark = pytest.mark.django_db


@pytest.fixture(autouse=True)
def policies() -> tuple[Policy, Policy]:
    return policy_of("filer-v1", Policy.Stage.CHAMPION), policy_of("filer-v2")


def thumbs(challenger: float, control: float) -> Any:
    """Of every ten units so many tenths say up."""
    return lambda n, new: {"thumb": n * 7919 % 1000 < 1000 * (challenger if new else control)}


def events(experiment: Experiment) -> list[str]:
    return list(experiment.events.order_by("pk").values_list("kind", flat=True))


def test_figures_are_those_of_the_log() -> None:
    experiment = running_of()
    rows = expose(range(200), thumbs(0.6, 0.3))
    found = {result.name: result for result in results_of(experiment).arms}
    for name, result in found.items():
        own = [row for row in rows if row.arm == f"shorter/{name}"]
        up = sum(rating.thumb == "up" for row in own for rating in row.ratings.all())
        assert (result.units, result.exposures, result.value_count) == (len(own), len(own), len(own))
        assert result.figures["thumbs_up"].value == pytest.approx(up / len(own))
    effect = found["challenger"].effect
    assert effect.value == pytest.approx(
        found["challenger"].figures["thumbs_up"].value - found["control"].figures["thumbs_up"].value  # type: ignore[operator]
    )


def test_several_decisions_of_one_unit_are_one_unit() -> None:
    experiment = running_of()
    for _ in range(5):
        expose(range(40), thumbs(0.5, 0.5))
    results = results_of(experiment)
    assert sum(result.units for result in results.arms) == 40
    assert sum(result.exposures for result in results.arms) == 200
    # all five of a unit say the same: no more is known than from one each
    one, five = (Moments.of_ratio([1, 0, 1, 0], [1] * 4), Moments.of_ratio([5, 0, 5, 0], [5] * 4))
    assert one.error == pytest.approx(five.error)


def test_a_withdrawn_rating_does_not_count() -> None:
    experiment = running_of()
    said = rating_submit(decision=expose(range(1))[0], rater="ann", thumb="up")
    assert sum(result.value_count for result in results_of(experiment).arms) == 1
    rating_withdraw(said.row)
    assert sum(result.value_count for result in results_of(experiment).arms) == 0


def test_metrics_are_read_where_they_are_kept() -> None:
    experiment = running_of(metric="outcome:kept", guardrails=[{"metric": "latency_ms", "margin": 0.1}])
    rows = expose(range(20), lambda _n, new: {"latency_ms": 200.0 if new else 100.0})
    for row in rows:
        Outcome.objects.create(decision=row, name="kept", value=2.0 if row.arm.endswith("control") else 3.0)
        RewardRecord.objects.create(
            decision=row.pk, agent="filer", raw=0.0, value=0.5, components={}, rows_said=0, basis="b"
        )
    found = {result.name: result.figures for result in results_of(experiment).arms}
    assert found["control"]["outcome:kept"].value == 2.0
    assert found["challenger"]["outcome:kept"].value == 3.0
    assert found["challenger"]["latency_ms"].value == pytest.approx(200.0)
    Experiment.objects.update(metric="reward")
    experiment.refresh_from_db()
    assert results_of(experiment).control.figures["reward"].value == 0.5


def test_an_experiment_compares_what_answers_cost() -> None:
    """A local policy's answers cost nothing; those whose price nobody knows do not count."""

    def spent(n: int, new: bool) -> dict[str, float]:
        return {"cost_usd": 0.0 if new else 0.001 * (1 + n % 3)} if n % 10 else {}

    running_of(metric="cost_usd_per_1000", goal="lower", guardrails=[])
    expose(range(300), lambda n, new: {"metadata": {"serving": spent(n, new)}})
    found = results_of(Experiment.objects.get())
    level = found.control.figures["cost_usd_per_1000"].value
    assert level == pytest.approx(2.0, abs=0.2)
    (effect,) = [one.effect for one in found.arms if one.effect is not None]
    assert effect.value == pytest.approx(-level)


def test_slices_show_where_a_difference_lies() -> None:
    experiment = running_of(slices=["source", "metadata.country"])
    expose(
        range(200),
        lambda n, new: {
            "thumb": new if n % 2 else n % 4 == 0,
            "metadata": {"country": "NL" if n % 2 else "DE"},
        },
    )
    found = {(one.slice, one.value): one.effect.value for one in results_of(experiment).slices}
    assert set(found) == {("source", "app"), ("metadata.country", "NL"), ("metadata.country", "DE")}
    assert found["metadata.country", "NL"] == 1.0
    assert abs(found["metadata.country", "DE"] or 0.0) < 0.25


def test_simulated_ratings_are_counted() -> None:
    experiment = running_of()
    expose(range(30), lambda n, _new: {"thumb": True, "rater_kind": "simulated" if n < 12 else "human"})
    assert results_of(experiment).simulated == 12


def test_an_empty_experiment_says_that_it_collects() -> None:
    shown = ResultsShown.of(results_of(running_of()))
    assert shown["verdict"] == "collecting"
    assert shown["arms"][1]["effect"]["value"] is None
    assert shown["arms"][1]["effect"]["state"] == "collecting"


def rule_of(**more: Any) -> Rule:
    given: dict[str, Any] = {"metric": metric_of("thumbs_up"), "goal": "higher", "alpha": 0.05}
    given |= {"tuning": 1000, "min_units": 50, "guardrails": (), "challengers": 1}
    return Rule(**{**given, **more})


@pytest.mark.campaign
def test_equal_arms_are_rarely_told_apart_by_the_whole_rule() -> None:
    """Main metric and an error-rate guardrail without margin, looked at every 50 decisions: alpha for both together."""
    random = np.random.default_rng(11)
    guard = Guardrail(metric_of("error_rate"), "lower", 0.0)
    rule = rule_of(guardrails=(guard,))
    alarms = 0
    for _ in range(300):
        new = random.random(1000) < 0.5
        up, failed = random.random(1000) < 0.4, random.random(1000) < 0.05
        for n in range(100, 1001, 50):
            arms = [new[:n], ~new[:n]]
            ups = [moments_of_counts(int(up[:n][arm].sum()), int(arm.sum())) for arm in arms]
            fails = [moments_of_counts(int(failed[:n][arm].sum()), int(arm.sum())) for arm in arms]
            said = (
                effect_of(ups[0], ups[1], rule).state,
                guardrail_judge(fails[0], fails[1], guard, rule).state,
            )
            if said[0] in ("better", "worse") or said[1] == "harm":
                alarms += 1
                break
    assert alarms <= 15  # 5 % of 300


def test_harm_and_alpha() -> None:
    # where less is better a fall is a gain
    new, old = moments_of_counts(100, 1000), moments_of_counts(300, 1000)
    assert effect_of(new, old, rule_of(metric=metric_of("error_rate"), goal="lower")).state == "better"
    assert effect_of(new, old, rule_of()).state == "worse"
    # an arm that always fails is harm though nothing varies
    guard = Guardrail(metric_of("error_rate"), "lower", 0.02)
    found = guardrail_judge(
        moments_of_counts(60, 60), moments_of_counts(0, 60), guard, rule_of(guardrails=(guard,))
    )
    assert found.state == "harm"
    # several challengers share what may be spent
    one, three = rule_of(), rule_of(challengers=3)
    assert three.metric_alpha == pytest.approx(one.metric_alpha / 3)


def test_a_better_arm_is_proposed_once() -> None:
    experiment = running_of()
    expose(range(400), thumbs(0.9, 0.4))
    assert "promote filer-v2" in tick()[0]
    assert tick() == []
    assert events(experiment) == ["created", "started", "proposed"]
    assert registry.champion_of("filer").name == "filer-v1"  # type: ignore[union-attr]


def test_a_worse_arm_is_stopped_for_harm() -> None:
    experiment = running_of()
    expose(range(400), thumbs(0.2, 0.8))
    assert "stopped for harm" in tick()[0]
    experiment.refresh_from_db()
    assert experiment.status == "stopped"
    assert events(experiment)[-1] == "harm"
    assert {plan_of("filer").assign(f"user-{n}").policy for n in range(50)} == {"filer-v1"}


def test_a_slow_arm_is_stopped_whatever_its_thumbs() -> None:
    running_of(guardrails=[{"metric": "latency_ms", "margin": 0.25}])
    expose(range(300), lambda n, new: {"thumb": new, "latency_ms": (300.0 if new else 100.0) + n % 7})
    assert "guardrail on latency_ms" in tick()[0]


def test_a_failing_arm_is_stopped() -> None:
    running_of()
    expose(
        range(200),
        lambda _n, new: {"metadata": {"serving": {"fallbacks": [{"policy": "filer-v2"}] if new else []}}},
    )
    assert "guardrail on error_rate" in tick()[0]


def test_nothing_is_done_before_there_are_units_enough() -> None:
    running_of(min_units=500)
    expose(range(400), thumbs(0.9, 0.1))
    assert tick() == []


@pytest.mark.campaign
def test_lost_decisions_hold_a_winner_back() -> None:
    experiment = running_of()
    expose([n for n in range(1200) if n % 2 or "control" in plan_of("filer").assign(f"user-{n}").arm])
    expose(range(2000, 2600), thumbs(0.9, 0.3))
    assert "sample ratio mismatch" in tick()[0]
    assert tick() == []
    assert events(experiment)[-1] == "mismatch"


def test_an_experiment_whose_policy_was_retired_is_stopped(policies: Any) -> None:
    experiment = running_of()
    registry.policy_retire(policies[1], actor="ann")
    (line,) = tick()
    assert line.startswith("experiment shorter: ")
    assert "filer-v2" in line
    experiment.refresh_from_db()
    assert experiment.status == "stopped"


def test_by_setting_a_winner_is_promoted_where_its_gate_opens(policies: Any) -> None:
    experiment = running_of(on_win="promote")
    # offline it is not better, and not worse: what a challenger has to be
    judged(policies[1], "filer-v1", both=30, wins=5, losses=5, neither=0)
    expose(range(400), thumbs(0.9, 0.4))
    assert "filer-v2 is champion" in tick()[0]
    assert registry.champion_of("filer").name == "filer-v2"  # type: ignore[union-attr]
    assert events(experiment)[-2:] == ["promoted", "stopped"]
    kept = policies[1].events.get(kind="promoted")
    expected = (False, "shorter", "challenger")
    assert (kept.forced, kept.verdicts["live"]["experiment"], kept.verdicts["to"]) == expected


def test_a_closed_gate_holds_a_winner_back(policies: Any) -> None:
    experiment = running_of(on_win="promote")
    judged(policies[1], "filer-v1", both=10, wins=0, losses=20, neither=10)
    expose(range(400), thumbs(0.9, 0.4))
    assert "worse than filer-v1" in tick()[0]
    assert tick() == []
    assert (experiment.events.first().kind, registry.champion_of("filer").name) == ("held", "filer-v1")  # type: ignore[union-attr]


def test_an_arm_that_is_not_shown_to_be_better_is_not_promoted() -> None:
    experiment = running_of()
    results = results_of(experiment)
    with pytest.raises(registry.RegistryRefused, match="has not won"):
        arm_promote(experiment, results.leader, results, actor="ann")


def test_a_bandit_gives_more_to_what_seems_better_and_never_less_than_its_floor() -> None:
    experiment = running_of(allocation="thompson", floor=0.1, min_units=5000)
    expose(range(200), thumbs(0.7, 0.4))
    ExperimentEvent.objects.filter(kind="started").update(created_at=timezone.now() - timedelta(hours=1))
    tick()
    plan = plan_of("filer").experiments[0]
    weights = {arm.name: arm.weight for arm in plan.arms}
    assert plan.epoch == 1
    assert weights["control"] == pytest.approx(0.1, abs=0.01)
    assert sum(weights.values()) == pytest.approx(1.0)
    assigned = [a.propensity for n in range(60) if (a := plan.assignment(f"u{n}"))]
    assert {round(p, 12) for p in assigned} == {round(weight, 12) for weight in weights.values()}
    assert events(experiment)[-1] == "reweighted"


def test_a_bandit_keeps_its_weights_for_an_epoch() -> None:
    running_of(allocation="thompson", min_units=5000)
    ExperimentEvent.objects.filter(kind="started").update(created_at=timezone.now() - timedelta(hours=1))
    assert len(tick()) == 1
    assert tick() == []


def test_a_bandits_figures_weigh_each_decision_by_its_propensity() -> None:
    """When the challenger was drawn with 0.2 two of two were good, with 0.8 none of eight: 2/0.2 of 2/0.2 + 8/0.8."""
    experiment = running_of(allocation="thompson")
    arm = experiment.arms.get(name="challenger")
    for number, (propensity, thumb) in enumerate([(0.2, True)] * 2 + [(0.8, False)] * 8):
        row = expose([number], lambda _n, _new, up=thumb: {"thumb": up})[0]  # type: ignore[misc]
        row.arm, row.metadata = arm.key, {"arm_propensity": propensity}
        row.save()
    found = next(result for result in results_of(experiment).arms if result.name == "challenger")
    assert found.figures["thumbs_up"].value == pytest.approx(0.5)


def test_two_clocks_reweight_once() -> None:
    experiment = running_of(allocation="thompson")
    results = results_of(experiment)
    bandit_reweight(experiment, results)
    with pytest.raises(ExperimentRefused, match="at the same time"):
        bandit_reweight(experiment, results)


def test_arms_nobody_rated_are_equally_likely() -> None:
    assert bandit_chances([Moments(0, float("nan"), float("nan"))] * 2, bounded=True) == [0.5, 0.5]


def test_a_stopped_experiment_is_looked_at_no_more() -> None:
    experiment = running_of()
    expose(range(400), thumbs(0.2, 0.8))
    experiment_look(experiment)
    with pytest.raises(ExperimentRefused, match="was stopped already"):
        experiment_look(experiment)


def test_the_split_is_checked_at_every_look() -> None:
    random = np.random.default_rng(2)
    alarms = 0
    for _ in range(300):
        walk = np.cumsum(random.random(2000) < 0.5)
        looks = range(50, 2001, 50)
        alarms += any(
            ratio_mismatch_anytime_p([int(walk[n - 1]), n - int(walk[n - 1])], [1, 1]) < 0.05 for n in looks
        )
    assert alarms <= 15
    assert ratio_mismatch_anytime_p([600, 400], [1, 1]) < 0.001


def ramp_of(experiment: Experiment) -> int:
    experiment.refresh_from_db()
    return experiment.ramp


def ramped(**settings: Any) -> Experiment:
    """A ramp by the scheduler, whose units take part as at 100 %."""
    return running_of(not_inferior=0.1, auto_ramp=True, min_units=40, **settings)


def test_a_ramp_goes_up_where_the_loss_of_all_users_is_ruled_out_to_exceed_the_margin() -> None:
    experiment = ramped()
    expose(range(110), thumbs(0.5, 0.6))
    low = results_of(experiment).challengers[0].effect.low  # type: ignore[union-attr]
    assert low is not None
    assert -0.7 < low < -0.2
    Experiment.objects.filter(pk=experiment.pk).update(ramp=1)
    assert [results_of(experiment).loss_excluded(to) for to in (5, 25, 100)] == [
        pytest.approx(share * -low / 2) for share in (0.05, 0.25, 1.0)
    ]
    for step in (5, 25, 25):
        tick()
        assert ramp_of(experiment) == step
    assert [event.reason for event in experiment.events.filter(kind="ramped")][-1].startswith(
        "at 5 % all users"
    )


def test_a_ramp_waits_for_enough_units_and_for_an_even_split() -> None:
    experiment = ramped()
    Experiment.objects.filter(pk=experiment.pk).update(ramp=1)
    tick()
    assert ramp_of(experiment) == 1
    assert results_of(experiment).loss_excluded(5) is None


def test_a_ramp_that_turns_out_worse_goes_back_to_the_champion_and_says_why() -> None:
    experiment = ramped()
    expose(range(400), thumbs(0.2, 0.8))
    Experiment.objects.filter(pk=experiment.pk).update(ramp=5)
    tick()
    experiment.refresh_from_db()
    assert (experiment.status, experiment.ramp) == ("stopped", 5)
    assert "worse than control" in experiment.reason
    assert plan_of("filer").experiments == ()


def test_cost_and_latency_stand_beside_whatever_is_asked() -> None:
    experiment = ramped(guardrails=[])
    expose(range(100), lambda n, new: {"thumb": True, "latency_ms": 10.0 if new else 20.0,
                                       "metadata": {"serving": {"cost_usd": 0.0 if new else 0.002}}})  # fmt: skip
    found = {one.name: one.figures for one in results_of(experiment).arms}
    assert found["challenger"]["latency_ms"].value == pytest.approx(10.0)
    assert found["control"]["cost_usd_per_1000"].value == pytest.approx(2.0)


def test_a_ramp_needs_the_loss_it_rules_out() -> None:
    with pytest.raises(ExperimentRefused, match="not_inferior"):
        running_of(auto_ramp=True)
