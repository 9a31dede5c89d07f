"""Adjustment of an experiment's effect by what was known of its units before they had an arm."""

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import numpy as np
import pytest
from django.utils import timezone

from feedback.models import Decision, Rating, prompt_hash
from rl.experiments.results import results_of
from rl.experiments.verdicts import ArmEffect
from rl.models import Experiment, Policy
from rl.statistics.contrasts import FOLDS, Moments, adjusted_moments, cross_predictions
from tests.support.api_client import ApiClient, signed_in
from tests.support.experiments import PROMPT, expose, policy_of, running_of
from tests.support.said import printed, words
from tests.support.traffic_worlds import EQUAL_WORLDS, WORLDS, looks_of

pytestmark = pytest.mark.slow

UNITS = 120


def test_a_unit_is_predicted_from_the_units_of_other_folds() -> None:
    x = np.linspace(-1, 1, 100)[:, None]
    folds = np.arange(100) % FOLDS
    found = cross_predictions(x, 2 * x[:, 0], folds, np.zeros(100))
    assert found == pytest.approx(2 * x[:, 0], abs=1e-3)
    # what a unit did itself changes the predictions of other folds alone
    parts = 2 * x[:, 0]
    parts[10] = 50.0
    again = cross_predictions(x, parts, folds, np.zeros(100))
    assert again[folds == 0] == pytest.approx(found[folds == 0], abs=1e-12)
    assert abs(again[folds == 1] - found[folds == 1]).max() > 0.1


def test_figures_are_as_they_were_where_nothing_is_known_of_units() -> None:
    random = np.random.default_rng(0)
    counts = random.integers(1, 4, 200).astype(float)
    sums = random.binomial(counts.astype(int), 0.4).astype(float)
    arms = np.arange(200) % 2
    found = adjusted_moments(sums, counts, arms, np.ones((200, 3)), np.arange(200) % FOLDS, np.zeros(200))
    assert found is not None
    for arm, moments in enumerate(found):
        plain = Moments.of_ratio(sums[arms == arm], counts[arms == arm])
        assert (moments.n, moments.mean) == (plain.n, pytest.approx(plain.mean))
        assert moments.variance == pytest.approx(plain.variance, rel=0.02)


def test_luck_in_who_got_which_arm_is_taken_away() -> None:
    """Values are 0 or 1 and were the same before; the arms differ by who is in them, and by nothing else."""
    values = np.array([1.0] * 100 + [0.0] * 100)
    arms = np.where(np.arange(200) % 10 < 3, 1, 0)
    arms[100:] = np.where(np.arange(100) % 10 < 6, 1, 0)
    plain = [values[arms == arm].mean() for arm in (0, 1)]
    assert plain[0] - plain[1] > 0.25
    found = adjusted_moments(
        values, np.ones(200), arms, values[:, None].copy(), np.arange(200) // 3 % FOLDS, np.zeros(200)
    )
    assert abs(found[0].mean - found[1].mean) < 0.05
    assert max(one.variance for one in found) < 0.05


def test_too_few_units_are_not_adjusted() -> None:
    few = np.ones(30)
    assert adjusted_moments(few, few, np.arange(30) % 2, few[:, None], np.arange(30) % 5, few) is None


def test_heavy_units_are_judged_without_a_loss_of_error_control() -> None:
    """Two equal arms, one look, a z test at 5 %, units of Pareto sizes: the delta method errs in one of six."""
    world = EQUAL_WORLDS["heavier tails (index 1.1), half without a past"]
    found = [looks_of(world, np.random.default_rng(seed), np.array([4000]))[0] for seed in range(120)]
    wrong = {
        name: sum(abs(getattr(one, name).value) > 1.96 * getattr(one, name).error ** 0.5 for one in found)
        for name in ("delta", "plain", "adjusted")
    }
    # 6 of 120 are 5 %; more than 13 come about in 0.4 % of series
    assert max(wrong["plain"], wrong["adjusted"]) <= 13 < wrong["delta"]


def test_a_past_that_says_nothing_costs_nothing() -> None:
    world = WORLDS["one decision a unit, prompts that differ"]
    found = [looks_of(world, np.random.default_rng(seed), np.array([600]))[0] for seed in range(10)]
    assert min(1 - one.adjusted.error / one.plain.error for one in found) > -0.02


@pytest.fixture
def experiment(db: None) -> Experiment:
    policy_of("filer-v1", Policy.Stage.CHAMPION)
    policy_of("filer-v2")
    found = running_of()
    # who gets which arm follows from the salt, which is drawn: the same units in every run
    found.salt = "of-these-tests"
    found.save(update_fields=["salt"])
    return found


def liked(number: int) -> bool:
    return number * 7919 % 1000 < 500


def past_of(units: Sequence[int], days_ago: float = 10.0, rated_days_ago: float | None = None) -> None:
    """Three decisions of each unit before the experiment, rated as the unit's taste is."""
    at = timezone.now() - timedelta(days=days_ago)
    rated_at = at if rated_days_ago is None else timezone.now() - timedelta(days=rated_days_ago)
    rows = [
        Decision(
            agent="filer",
            messages=PROMPT,
            prompt_hash=prompt_hash("filer", PROMPT),
            response="inbox",
            policy="filer-v1",
            unit=f"user-{n}",
            created_at=at,
        )
        for n in units
        for _ in range(3)
    ]
    Decision.objects.bulk_create(rows)
    Rating.objects.bulk_create(
        Rating(
            decision=row,
            rater="ann",
            created_at=rated_at,
            thumb="up" if liked(int(row.unit.removeprefix("user-"))) else "down",
        )
        for row in rows
    )


def effect_in(experiment: Experiment) -> ArmEffect:
    effect = results_of(experiment).leader.effect
    assert effect is not None
    return effect


def thumbs(n: int, new: bool) -> dict[str, Any]:
    """As the unit always said, but for one in ten; the challenger pleases one in five more."""
    return {"thumb": (liked(n) ^ (n % 10 == 3)) or (new and n % 5 == 1)}


def test_the_units_past_takes_variance_away(experiment: Experiment) -> None:
    past_of(range(UNITS))
    expose(range(UNITS), thumbs)
    found = effect_in(experiment)
    assert found.unadjusted.variance_removed > 0.4
    assert found.unadjusted.covariates == ("their past",)
    figures = {one.name: one.figures["thumbs_up"].value for one in results_of(experiment).arms}
    assert found.unadjusted.value == pytest.approx(figures["challenger"] - figures["control"])
    assert found.value is not None
    assert found.high - found.low < 0.8 * (found.unadjusted.high - found.unadjusted.low)


def test_what_was_said_after_the_start_is_no_past(experiment: Experiment) -> None:
    expose(range(UNITS), thumbs)
    past_of(range(UNITS), rated_days_ago=0.5)  # of earlier decisions, said while the experiment ran
    found = effect_in(experiment)
    # all that is left of their past is that each had three decisions, which tells nobody apart
    assert found.unadjusted is None or found.unadjusted.value == pytest.approx(found.value)
    past_of(range(UNITS), days_ago=200.0)  # longer ago than is read
    assert effect_in(experiment).value == pytest.approx(found.value)


def test_first_prompts_take_variance_away_where_units_have_no_past(experiment: Experiment) -> None:
    rows = expose(range(UNITS), lambda n, _new: {"thumb": n % 3 != 0})
    for row in rows:
        text = (
            "move the invoice" if int(row.unit.removeprefix("user-")) % 3 else "rename the holiday pictures"
        )
        row.messages = [{"role": "user", "content": text}]
    Decision.objects.bulk_update(rows, ["messages"])
    found = effect_in(experiment)
    assert found.unadjusted.covariates == ("their first prompt",)
    assert found.unadjusted.variance_removed > 0.9


def test_a_bandits_figures_are_not_adjusted(experiment: Experiment) -> None:
    Experiment.objects.update(allocation="thompson")
    experiment.refresh_from_db()
    past_of(range(UNITS))
    expose(range(UNITS), thumbs)
    assert effect_in(experiment).unadjusted is None


def test_page_rest_and_command_say_what_the_adjustment_did(experiment: Experiment) -> None:
    past_of(range(UNITS))
    expose(range(UNITS), thumbs)
    effect = effect_in(experiment)
    removed = f"removes {100 * effect.unadjusted.variance_removed:.0f} % of the variance"
    page = words(signed_in("olga", "operator").get(f"/experiments/{experiment.pk}/").text)
    assert removed in page.replace("\u202f", " ")
    assert "from before assignment (their past)" in page
    found = ApiClient("read").get(f"/api/experiments/{experiment.pk}/results/").json()["arms"]
    by_name = {one["name"]: one["effect"] for one in found}
    assert by_name["challenger"]["unadjusted"] == {
        "value": pytest.approx(effect.unadjusted.value),
        "low": pytest.approx(effect.unadjusted.low),
        "high": pytest.approx(effect.unadjusted.high),
        "variance_removed": pytest.approx(effect.unadjusted.variance_removed),
        "covariates": ["their past"],
    }
    out = printed("experiment", "show", experiment.name)
    assert removed in out.replace("\u202f", " ")
