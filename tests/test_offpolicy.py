"""What a policy would have earned: estimators by hand, on a public log, on simulated ones; logs that cannot answer."""

import csv
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy import stats

from rl.statistics.offpolicy import (
    Draw,
    Log,
    LoggedChoice,
    OffPolicyRefused,
    clipped_ips,
    cross_fitted,
    doubly_robust,
    gain,
    ips,
    overlap_check,
    overlap_of,
    propensity_fault,
    report,
    snips,
)
from rl.statistics.permutation import mean_bounds
from tests.support.experiment_worlds import LOG_WORLDS, coverage, draws
from tests.support.figures import figures_of

DATA = Path(__file__).resolve().parents[2] / "shared/data"
VECTORS = DATA / "vectors/reference_vectors.json"


def log(reward: list[float], propensity: list[float], target: list[float]) -> Log:
    return Log(np.array(reward), np.array(propensity), np.array(target))


# weights 2, 0.5, 1, 0
FOUR = log([1.0, 1.0, 0.0, 1.0], [0.25, 0.5, 0.5, 0.5], [0.5, 0.25, 0.5, 0.0])


def test_estimators_by_hand() -> None:
    # estimators of four decisions by hand
    assert ips(FOUR).value == pytest.approx((2 + 0.5 + 0 + 0) / 4)
    assert snips(FOUR).value == pytest.approx(2.5 / 3.5)
    assert clipped_ips(FOUR, bound=1.0).value == pytest.approx((1 + 0.5) / 4)
    found = overlap_of(FOUR)
    assert found.ess == pytest.approx(3.5**2 / (4 + 0.25 + 1))  # Kish's
    assert (found.max_weight, found.mean_weight) == (2.0, 0.875)
    # doubly robust corrects the model by what was logged
    modelled, expected = np.array([0.5, 0.5, 0.5, 0.5]), np.array([0.6, 0.6, 0.6, 0.6])
    # 0.6 + mean of w (r - 0.5) = (1 + 0.25 - 0.5 + 0) / 4
    assert doubly_robust(FOUR, modelled, expected).value == pytest.approx(0.6 + 0.75 / 4)
    # a policy equal to the logs gains nothing
    same = log([1.0, 0.0, 1.0, 0.0], [0.5] * 4, [0.5] * 4)
    found = gain(snips(same), snips(same))
    assert (found.value, found.low, found.high) == (0.0, 0.0, 0.0)


def test_the_model_never_sees_the_decision_it_foretells() -> None:
    # the reward is 1 for the one group and 0 for all others, told by a feature nobody else has
    choices = [
        LoggedChoice(np.eye(5)[[i]], 0, float(i == 0), 1.0, np.ones(1), group=f"prompt-{i}") for i in range(5)
    ]
    assert cross_fitted(choices)[0][0] == 0.0
    # one prompt is on one side of a fold: nothing else to learn from
    same = [LoggedChoice(np.ones((1, 1)), 0, 1.0, 1.0, np.ones(1), group="one") for _ in range(4)]
    assert list(cross_fitted(same)[0]) == [0.5] * 4


@pytest.fixture(scope="module")
def bandit() -> dict[str, dict[str, Any]]:
    found = {}
    for name in ("random", "bts"):
        path = DATA / "open-bandit/men" / name / "men.csv"
        if not path.exists():
            pytest.skip("the open bandit data lies in ../shared, which is not here")
        with path.open(newline="") as file:
            rows = [
                (int(r["item_id"]), int(r["position"]), int(r["click"]), float(r["propensity_score"]))
                for r in csv.DictReader(file)
            ]
        item, position, click, propensity = (np.array(column) for column in zip(*rows, strict=True))
        found[name] = {"item": item, "position": position, "click": click.astype(float), "p": propensity}
    return found


def expected_of(case: str) -> dict[str, float]:
    vectors = {one["id"]: one for one in json.loads(VECTORS.read_text("utf-8"))}
    expected: dict[str, float] = vectors[case]["expected"]
    return expected


def frequencies(of: dict[str, Any], items: int) -> Any:
    """(position, item) -> share of the log's choices at that position."""
    counts = np.zeros((of["position"].max() + 1, items))
    np.add.at(counts, (of["position"], of["item"]), 1)
    return counts / np.maximum(counts.sum(axis=1, keepdims=True), 1)


def judged(logged: dict[str, Any], target: Any) -> Log:
    return Log(logged["click"], logged["p"], target)


def agrees(found: Log, expected: dict[str, float]) -> None:
    overlap, by_ips = overlap_of(found), ips(found)
    assert by_ips.value == pytest.approx(expected["ips"], abs=1e-9)
    assert snips(found).value == pytest.approx(expected["snips"], abs=1e-9)
    assert clipped_ips(found).value == pytest.approx(expected["ips_clip10"], abs=1e-9)
    assert overlap.mean_weight == pytest.approx(expected["mean_w"], abs=1e-9)
    assert overlap.max_weight == pytest.approx(expected["max_w"], abs=1e-9)
    assert overlap.ess == pytest.approx(expected["ess"], rel=1e-9)
    assert by_ips.error == pytest.approx(expected["ips_se"], abs=1e-9)


@pytest.mark.slow
def test_a_random_log_tells_what_thompson_sampling_earned(bandit: Any) -> None:
    """Random to bts: 0.00566 +- 0.00140, and bts earned 0.0069, inside the interval."""
    random, bts = bandit["random"], bandit["bts"]
    found = judged(random, frequencies(bts, 34)[random["position"], random["item"]])
    agrees(found, expected_of("ope men: random->empirical-bts"))
    truth = float(bts["click"].mean())
    assert truth == pytest.approx(expected_of("ope on-policy bts/men")["mean"], abs=1e-12)
    assert ips(found).low < truth < ips(found).high
    assert overlap_check(found).warnings == ()


@pytest.mark.campaign
@pytest.mark.parametrize("name", ["4 candidates", "10 candidates, one in thirty succeeds"])
def test_intervals_hold_the_truth_as_often_as_they_say(name: str) -> None:
    """Where rewards are rare, Student's intervals held it in 78 %; the long form is benchmarks/off_policy.py."""
    held = coverage(LOG_WORLDS[name], 150, decisions=200)
    assert set(held) == {"ips", "snips", "clipped_ips", "doubly_robust"}
    for method, found in held.items():
        # 95 % of 150 is 142.5 with a standard deviation of 2.7
        assert found.held >= 0.95 * found.logs - 8, (method, found)


def test_bounds_and_warnings() -> None:
    # what was cut counts for the upper bound: Weights of 20 are cut at 10: what they earned beyond may be
    # nothing or all.
    heavy = log([1.0] * 20 + [0.0] * 380, [0.05] * 20 + [0.5] * 380, [1.0] * 20 + [0.0] * 380)
    found = clipped_ips(heavy)
    assert found.value == pytest.approx(0.5)
    assert found.low < 0.5
    assert found.high == 1.0
    # rare rewards and a small effective sample are warned of
    rare = log([1.0] * 5 + [0.0] * 195, [0.5] * 200, [0.5] * 200)
    small = log([0.0, 1.0] * 30, [0.5] * 60, [0.5] * 60)
    found = [[figures_of(warning) for warning in overlap_check(one).warnings] for one in (rare, small)]
    assert found == [[[5, 200]], [[60, 60]]]
    # bounds of a mean are the exact ones of counts: Gaffke's bound of zeros and ones is Clopper and
    # Pearson's: Beta quantiles of 3 of 10.
    low, high = mean_bounds([1.0] * 3 + [0.0] * 7, 0.0, 1.0)
    assert low == pytest.approx(stats.beta.ppf(0.025, 3, 8), abs=0.01)
    assert high == pytest.approx(stats.beta.ppf(0.975, 4, 7), abs=0.015)
    # a side of which nothing is known has no bound
    assert mean_bounds([1.0, 2.0], 0.0, math.inf)[1] == math.inf
    with pytest.raises(ValueError, match=r"expected values in \[0, 1\], found 1 to 2"):
        mean_bounds([1.0, 2.0], 0.0, 1.0)
    with pytest.raises(ValueError, match="found 0"):
        mean_bounds([], 0.0, 1.0)


@pytest.mark.parametrize("known", [True, False])
def test_right_propensities_are_not_found_at_fault(known: bool) -> None:
    assert [propensity_fault(draws(seed, 500, known=known)) for seed in range(10)] == [""] * 10


@pytest.mark.parametrize(
    ("fault", "known", "words"),
    [
        ("1.15", False, "too large"),
        ("0.85", False, "too small"),
        ("shuffled", True, "are not those used for sampling"),
        ("uniform", True, "are not those used for sampling"),
        ("uniform", False, "are not those used for sampling"),
        ("sharper", True, "are not those used for sampling"),
    ],
)
def test_wrong_propensities_are_found(fault: str, known: bool, words: str) -> None:
    assert words in propensity_fault(draws(1, 3000, fault, known))


def test_propensities_of_few_draws_and_one_decision() -> None:
    # few draws say nothing of their propensities
    assert propensity_fault([]) == ""
    assert propensity_fault(draws(1, 5, "uniform")) == ""
    # candidates of one decision exclude each other: Both halves together are always chosen once: their count
    # has no variance and is not tested.
    assert propensity_fault([Draw(["a", "a"], i % 2, 0.5, [0.5, 0.5]) for i in range(100)]) == ""
    # always the first, which the places show: 100 chosen of 50 expected
    first = [Draw(["a", "a"], 0, 0.5, [0.5, 0.5]) for _ in range(100)]
    assert "place 1 should have been chosen 50 times and were chosen 100 times" in propensity_fault(first)


def choices_of(n: int, logged: list[float], target: list[float], chosen: int = 0) -> list[LoggedChoice]:
    features = np.eye(len(logged))
    return [
        LoggedChoice(
            features, chosen, float(i % 2), logged[chosen], np.array(target), np.array(logged), f"p{i}"
        )
        for i in range(n)
    ]


def test_a_log_that_cannot_answer_is_refused_with_its_figures() -> None:
    # it always chose the first, and the policy would choose the second; or too few are there
    for choices, figure in (
        (choices_of(200, [1.0, 0.0], [0.1, 0.9]), "90 %"),
        (choices_of(29, [0.5, 0.5], [0.5, 0.5]), r"found 29\b"),
        ([], "/api/decide/"),
    ):
        with pytest.raises(OffPolicyRefused, match=figure):
            report(choices)
    # without the whole distribution missing overlap shows in the weights
    deterministic = log([0.0, 1.0] * 100, [1.0] * 200, [0.1] * 200)
    heavy = log([0.0, 1.0] * 100, [0.05] * 200, [0.001] * 190 + [0.99] * 10)
    for found, figure in ((deterministic, r"0\.10"), (heavy, "200 decisions have an effective sample size")):
        with pytest.raises(OffPolicyRefused, match=figure):
            overlap_check(found)
    for propensity in (0.0, 1.5, float("nan")):
        with pytest.raises(ValueError, match="propensities"):
            log([1.0], [propensity], [0.5])
