"""Simulated decisions and ratings: marked, repeatable, as noisy as asked."""

import json

import pytest

from feedback.models import Decision, Rating
from rl.agents import AGENTS
from rl.agents.base import Scenario
from rl.agents.widgets import WIDGETS
from rl.agents.worlds import TASTES, scenarios_of
from rl.management.simulation import SimulationRefused, simulate

pytestmark = pytest.mark.django_db


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


@pytest.mark.slow
def test_noise_is_the_share_of_flipped_thumbs() -> None:
    simulate("widgets", scenarios=100, rated=True, raters=2, noise=0.1)
    agent = AGENTS["widgets"]
    flipped = sum(
        (r.thumb == "up") != (agent.hidden_preference(r.decision.state, r.decision.response) >= 0.5)
        for r in Rating.objects.select_related("decision")
    )
    # 800 draws with p = 0.1: mean 80, standard deviation 8.5; five of them either way
    assert 80 - 43 <= flipped <= 80 + 43


@pytest.mark.slow
@pytest.mark.parametrize("slug", sorted(slug for slug, agent in AGENTS.items() if agent.world))
def test_every_agent_has_three_tastes_of_the_same_prompts_and_one_drifts(slug: str) -> None:
    agent = AGENTS[slug]
    team, situation, drifting = (scenarios_of(agent, taste, 60, seed=3) for taste in TASTES)
    shown = [json.dumps(agent.render(one.state)) for one in team]
    assert len(set(shown)) == 60
    assert shown == [json.dumps(agent.render(one.state)) for one in situation]
    # nothing that only the rater knows is in the prompt
    assert not any("wanted" in prompt for prompt in shown)

    def liked(scenario: Scenario) -> list[bool]:
        return [
            agent.hidden_preference(scenario.state, one) >= 0.5 for one in agent.candidates(scenario.state)
        ]

    likes = [[liked(one) for one in world] for world in (team, situation, drifting)]
    assert likes[2][:30] == likes[0][:30]
    assert likes[2][30:] == likes[1][30:]
    # the situation decides often, and leaves something to like and something not to in every scenario
    assert sum(one != other for one, other in zip(likes[0], likes[1], strict=True)) >= 12
    assert all(any(one) and not all(one) for one in [*likes[0], *likes[1]])
    for scenario in situation[::20]:
        assert all(
            agent.hidden_preference(scenario.state, right) >= 0.8 for right in agent.truths(scenario.state)
        )


def test_a_taste_is_simulated_by_its_name() -> None:
    made = simulate("widgets", scenarios=4, taste="situation", rated=True, raters=1, noise=0.0)
    assert (made.scenarios, made.decisions, made.ratings) == (4, 16, 16)
    for row in Rating.objects.select_related("decision"):
        small = row.decision.state["context"]["on"] == "phone"
        compact, _ = WIDGETS[row.decision.state["intent"]]
        if small:
            assert (row.thumb == "up") == (json.loads(row.decision.response)["widget"] in compact)
    with pytest.raises(SimulationRefused, match="expected a taste of team, situation, drifting"):
        simulate("widgets", taste="sour")


def test_unknown_agents_and_wrong_numbers_are_refused() -> None:
    with pytest.raises(SimulationRefused, match="assistant, filer, fixtures, librarian"):
        simulate("nobody")
    with pytest.raises(SimulationRefused, match=r"\[0, 0.5\]"):
        simulate("widgets", noise=0.7)
    with pytest.raises(SimulationRefused, match="expected 1 to"):
        simulate("widgets", scenarios=10**9)
