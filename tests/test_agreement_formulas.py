"""Agreement among raters, against published figures."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from feedback.agreement import statistics
from feedback.agreement.statistics import (
    cohen_kappa,
    dawid_skene,
    kappa_of_scores,
    krippendorff_alpha,
    rated_by_both,
)

# Krippendorff, "Computing Krippendorff's alpha-reliability" (2011), section C: four observers, twelve units
KRIPPENDORFF = [
    [1, 2, 3, 3, 2, 1, 4, 1, 2, None, None, None],
    [1, 2, 3, 3, 2, 2, 4, 1, 2, 5, None, 3],
    [None, 3, 3, 3, 2, 3, 4, 2, 2, 5, 1, None],
    [1, 2, 3, 3, 2, 4, 4, 1, 2, 5, 1, None],
]
# The example of Wikipedia's article "Krippendorff's alpha": three coders, fifteen units
WIKIPEDIA = [
    [None, None, None, None, None, 3, 4, 1, 2, 1, 1, 3, 3, None, 3],
    [1, None, 2, 1, 3, 3, 4, 3, None, None, None, None, None, None, None],
    [None, None, 2, 1, 3, 4, 4, None, 2, 1, 1, 3, 3, None, 4],
]
# Dawid & Skene (1979), table 1: 45 patients judged by five anaesthetists, by the first of them three times
ANAESTHETISTS = """
1111111 3334334 1122122 2223121 2223222 2223322 1222111 3333433 2222223 2322223 4444444 2223343 1111111 2223212
1211111 1112111 1111111 1111111 2222221 2221322 2222222 2222221 2223222 2212222 1111111 1111111 2322222 1111111
1111111 1121121 1111111 3333233 1111111 2222222 2223232 4334343 2212232 2323233 3333432 1111111 1111111 1212111
2322222 1211111 2222222
"""


def listed(matrix: list[list[int | None]]) -> tuple[list[int], list[int]]:
    """Units and values of a matrix of raters by units."""
    found = [(unit, value) for row in matrix for unit, value in enumerate(row) if value is not None]
    return [unit for unit, _ in found], [value for _, value in found]


# --- Alpha --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("matrix", "metric", "expected", "n"),
    [
        (KRIPPENDORFF, "nominal", 0.743, 40),
        (KRIPPENDORFF, "ordinal", 0.815, 40),
        (KRIPPENDORFF, "interval", 0.849, 40),
        (WIKIPEDIA, "nominal", 0.691, 26),
        (WIKIPEDIA, "interval", 0.811, 26),
    ],
)
def test_alpha_is_the_published_one(matrix: Any, metric: Any, expected: float, n: int) -> None:
    estimate = krippendorff_alpha(*listed(matrix), metric).estimate
    assert estimate.value == pytest.approx(expected, abs=0.0005)
    assert estimate.n == n


def test_scores_on_a_continuous_scale_give_the_same_alpha(monkeypatch: pytest.MonkeyPatch) -> None:
    table = krippendorff_alpha(*listed(KRIPPENDORFF), "interval")
    monkeypatch.setattr(statistics, "_MANY_VALUES", 1)
    moments = krippendorff_alpha(*listed(KRIPPENDORFF), "interval")
    assert moments.estimate.value == pytest.approx(table.estimate.value, abs=1e-12)
    assert moments.estimate.low == pytest.approx(table.estimate.low, abs=1e-12)
    assert moments.disagreement == pytest.approx(table.disagreement, abs=1e-12, nan_ok=True)


def test_the_parts_of_the_ratings_make_up_alpha() -> None:
    units, values = listed(KRIPPENDORFF)
    alpha = krippendorff_alpha(units, values, "ordinal")
    assert alpha.estimate.value is not None
    assert 1 - np.nanmean(alpha.disagreement) == pytest.approx(alpha.estimate.value, abs=1e-12)
    alone = units.index(11)  # the last unit was rated once
    assert np.isnan(alpha.disagreement).tolist() == [i == alone for i in range(len(units))]


def test_the_one_who_differs_carries_the_disagreement() -> None:
    # three raters, four units; the third always says the other thing, the first two agree
    units = [0, 0, 0, 1, 1, 1, 2, 2, 2, 3, 3, 3]
    values = [0, 0, 1, 1, 1, 0, 0, 0, 1, 1, 1, 0]
    parts = krippendorff_alpha(units, values, "nominal").disagreement.reshape(4, 3).mean(axis=0)
    # expected disagreement: 6 of each value among 12, 2*6*6/(12*11); observed: one of two others, and both of them
    expected = 72 / 132
    assert parts == pytest.approx([0.5 / expected, 0.5 / expected, 1 / expected])


@pytest.mark.parametrize(
    ("units", "values"), [([], []), ([1], [1]), ([1, 2], [1, 2]), ([1, 1], [1, 1]), ([1, 1, 2], [3, 3, 4])]
)
def test_alpha_is_not_defined_without_pairs_that_could_differ(units: list[int], values: list[int]) -> None:
    assert krippendorff_alpha(units, values, "nominal").estimate.value is None


def test_perfect_agreement_has_no_interval_to_speak_of() -> None:
    estimate = krippendorff_alpha([0, 0, 1, 1], [1, 1, 2, 2], "nominal").estimate
    assert (estimate.value, estimate.low, estimate.high) == (1.0, None, None)


def test_values_that_are_no_numbers_are_refused() -> None:
    with pytest.raises(ValueError, match="expected finite values"):
        krippendorff_alpha([1, 1], [1.0, float("nan")], "interval")


def test_the_interval_of_alpha_covers_what_it_should() -> None:
    """Of 300 samples of 60 units, about 95 % of the intervals hold the alpha of the whole."""
    random = np.random.default_rng(7)

    def ratings(units: int) -> tuple[Any, Any]:
        truth = random.choice(2, units, p=[0.7, 0.3])
        said = np.where(random.random((units, 3)) < 0.8, truth[:, None], 1 - truth[:, None])
        return np.repeat(np.arange(units), 3), said.ravel()

    whole = krippendorff_alpha(*ratings(100_000), "nominal").estimate.value
    assert whole is not None
    samples = [krippendorff_alpha(*ratings(60), "nominal").estimate for _ in range(300)]
    covered = sum(s.low <= whole <= s.high for s in samples if s.low is not None and s.high is not None)
    assert 0.91 <= covered / 300 <= 0.98


# --- Kappa --------------------------------------------------------------------------------------------------

SAS = [[0, 4, 1], [0, 8, 0], [0, 1, 5]]
"""The example whose figures SAS gives, as quoted in statsmodels' test_inter_rater.py."""


def test_kappa_is_the_published_one() -> None:
    kappa = cohen_kappa(SAS)
    found = [kappa.value, kappa.low, kappa.high]
    assert found == pytest.approx([0.4842, 0.2137, 0.7547], abs=5e-5)
    assert kappa.n == 19


def test_weighted_kappa_is_the_published_one() -> None:
    assert cohen_kappa(SAS, "linear").value == pytest.approx(0.4701, abs=5e-5)


def test_kappa_of_scores_is_quadratically_weighted_kappa() -> None:
    pairs = [(i, j) for i, row in enumerate(SAS) for j, count in enumerate(row) for _ in range(count)]
    first, second = zip(*pairs, strict=True)
    assert kappa_of_scores(first, second).value == pytest.approx(
        cohen_kappa(SAS, "quadratic").value, abs=1e-12
    )


def test_kappa_of_two_who_always_say_one_thing_is_not_defined() -> None:
    assert cohen_kappa([[5, 0], [0, 0]]).value is None
    assert kappa_of_scores([0.5, 0.5], [0.5, 0.5]).value is None
    assert cohen_kappa([[0, 0], [0, 0]]).n == 0


def test_every_two_raters_are_compared_where_both_rated() -> None:
    units = np.array([7, 7, 7, 8, 8, 9])
    raters = np.array([2, 0, 1, 0, 2, 1])
    values = np.array([1.0, 2.0, 3.0, 4.0, 5.0, 6.0])
    found = [(a, b, x.tolist(), y.tolist()) for a, b, x, y in rated_by_both(units, raters, values)]
    assert found == [(0, 1, [2.0], [3.0]), (0, 2, [2.0, 4.0], [1.0, 5.0]), (1, 2, [3.0], [1.0])]


# --- Dawid and Skene ----------------------------------------------------------------------------------------


def anaesthetists() -> tuple[Any, Any, Any]:
    found = [
        (patient, (0, 0, 0, 1, 2, 3, 4)[place], int(said) - 1)
        for patient, row in enumerate(ANAESTHETISTS.split())
        for place, said in enumerate(row)
    ]
    units, raters, classes = zip(*found, strict=True)
    return np.array(units), np.array(raters), np.array(classes)


def test_dawid_and_skene_find_what_they_published() -> None:
    found = dawid_skene(*anaesthetists(), 4)
    assert found.converged
    assert found.prevalence == pytest.approx([0.40, 0.42, 0.11, 0.07], abs=0.005)
    # table 2: the first observer's error rates
    assert found.confusion[0] == pytest.approx(
        np.array([[0.89, 0.11, 0, 0], [0.07, 0.88, 0.05, 0], [0, 0.34, 0.66, 0], [0, 0, 0.56, 0.44]]),
        abs=0.006,
    )
    # table 4: the only patient they are in doubt about
    assert found.posterior[37] == pytest.approx([0, 0.02, 0.98, 0], abs=0.005)


def test_a_rater_who_says_the_opposite_is_read_the_other_way_round() -> None:
    random = np.random.default_rng(1)
    truth = random.integers(0, 2, 400)
    said = np.where(random.random((400, 4)) < 0.85, truth[:, None], 1 - truth[:, None])
    said[:, 3] = 1 - truth
    units, raters = np.repeat(np.arange(400), 4), np.tile(np.arange(4), 400)
    found = dawid_skene(units, raters, said.ravel(), 2)
    assert found.reliability()[3] < 0.05
    right = (found.posterior.argmax(axis=1) == truth).mean()
    majority = (said.mean(axis=1) > 0.5) == truth
    assert right > 0.99 > majority.mean()


def test_few_ratings_do_not_make_a_rater_perfect() -> None:
    units, raters, classes = anaesthetists()
    newcomer = np.array([0]), np.array([5]), np.array([0])  # one rating, and right
    more = [np.concatenate(pair) for pair in zip((units, raters, classes), newcomer, strict=True)]
    alone = dawid_skene(*more, 4).confusion[5, 0, 0]
    borrowed = dawid_skene(*more, 4, strength=2.0)
    others = borrowed.confusion[:5, 0, 0].mean()
    assert alone == 1.0
    assert abs(borrowed.confusion[5, 0, 0] - others) < 0.06


# --- Outside data -------------------------------------------------------------------------------------------

SHARED = Path(__file__).resolve().parents[2] / "shared" / "data"


@pytest.mark.skipif(not (SHARED / "vectors").is_dir(), reason="needs ../shared/data/vectors")
def test_reference_vectors_of_agreement() -> None:
    alpha, kappa = _vector("kripp-wiki"), _vector("cohen")
    for metric in ("nominal", "interval"):
        found = krippendorff_alpha(*listed(alpha["input"]), metric).estimate.value
        assert found == pytest.approx(alpha["expected"][metric], abs=alpha["tol"])
    table = kappa["input"]["table"]
    assert cohen_kappa(table).value == pytest.approx(kappa["expected"]["kappa"], abs=kappa["tol"])
    assert cohen_kappa(table, "linear").value == pytest.approx(
        kappa["expected"]["weighted_linear"], abs=kappa["tol"]
    )


def _vector(name: str) -> dict[str, Any]:
    vectors = json.loads((SHARED / "vectors" / "reference_vectors.json").read_text("utf-8"))
    found: dict[str, Any] = next(vector for vector in vectors if vector["id"] == name)
    return found
