"""Simulated decisions and ratings: marked, repeatable, as noisy as asked."""

from __future__ import annotations

import pytest

from feedback.models import Decision, Rating
from rl.agents import AGENTS
from rl.simulation import SimulationRefused, simulate

pytestmark = pytest.mark.django_db


def test_every_variation_becomes_a_decision() -> None:
    made = simulate("widgets", scenarios=3)
    assert made.decisions == Decision.objects.count() == 12
    assert not Rating.objects.exists()


def test_simulating_again_adds_nothing() -> None:
    simulate("widgets", scenarios=3, rated=True)
    again = simulate("widgets", scenarios=3, rated=True)
    assert (again.decisions_new, again.ratings_new) == (0, 0)
    assert Rating.objects.count() == 3 * 4 * 3


def test_simulated_ratings_say_so() -> None:
    simulate("filer", scenarios=2, rated=True, raters=1)
    assert set(Rating.objects.values_list("rater_kind", flat=True)) == {"simulated"}
    assert set(Decision.objects.values_list("source", flat=True)) == {"simulation"}


def test_without_noise_thumbs_follow_the_hidden_preference() -> None:
    simulate("fixtures", scenarios=20, rated=True, raters=1, noise=0.0)
    agent = AGENTS["fixtures"]
    for rating in Rating.objects.select_related("decision"):
        liked = agent.hidden_preference(rating.decision.state, rating.decision.response) >= 0.5
        assert (rating.thumb == "up") == liked


def test_noise_is_the_share_of_flipped_thumbs() -> None:
    simulate("widgets", scenarios=100, rated=True, raters=2, noise=0.1)
    agent = AGENTS["widgets"]
    flipped = sum(
        (r.thumb == "up") != (agent.hidden_preference(r.decision.state, r.decision.response) >= 0.5)
        for r in Rating.objects.select_related("decision")
    )
    # 800 draws with p = 0.1: mean 80, standard deviation 8.5; five of them either way
    assert 80 - 43 <= flipped <= 80 + 43


def test_unknown_agents_and_wrong_numbers_are_refused() -> None:
    with pytest.raises(SimulationRefused, match="assistant, filer, fixtures, librarian"):
        simulate("nobody")
    with pytest.raises(SimulationRefused, match=r"\[0, 0.5\]"):
        simulate("widgets", noise=0.7)
    with pytest.raises(SimulationRefused, match="expected 1 to"):
        simulate("widgets", scenarios=10**9)
