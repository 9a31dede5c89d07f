"""A champion that people rate worse than its predecessor is rolled back; one that is no worse stays."""

from __future__ import annotations

import random
from typing import Any

import pytest

from backend import notifications
from feedback.services import decision_record, rating_submit
from rl.models import LearnerSettings, Policy
from rl.online import champion_monitor
from rl.registry import service as registry
from tests.test_registry import policy

pytestmark = pytest.mark.django_db


def rated(name: str, ups: int, downs: int, seed: int = 0) -> None:
    """Decisions of a policy, so many of them liked and not, in a shuffled order."""
    thumbs = ["up"] * ups + ["down"] * downs
    random.Random(seed).shuffle(thumbs)
    for number, thumb in enumerate(thumbs):
        decision = decision_record(
            agent="widgets", messages=f"{name} {seed} {number}", response="r", policy=name
        ).row
        rating_submit(decision=decision, rater="ada", thumb=thumb)


@pytest.fixture
def champion() -> Policy:
    """The second champion of widgets; of the first one's 40 rated decisions 30 were liked."""
    registry.policy_promote(policy("widgets-v1"), actor="ann")
    rated("widgets-v1", 30, 10)
    return registry.policy_promote(policy("widgets-v2", against="widgets-v1"), actor="ann")


def test_a_champion_that_is_rated_worse_is_rolled_back(
    champion: Policy, settings: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent: list[dict[str, Any]] = []
    monkeypatch.setattr(notifications, "_post", lambda address, body: sent.append(body) or True)
    settings.NOTIFY_WEBHOOK = "https://hooks.example/1"
    rated("widgets-v2", 4, 16)
    (line,) = champion_monitor.champions_watch()
    assert line.startswith(
        "widgets-v2 was rolled back to widgets-v1: 20 rated decisions average 0.200, widgets-v1's 40 averaged 0.750"
    )
    back = registry.champion_of("widgets")
    assert back is not None
    assert back.name == "widgets-v1"
    assert champion.events.filter(kind="rolled_back", actor="online learner").count() == 1
    assert sent[0]["event"] == "policy_rolled_back"
    # put back by a rollback, it is not rolled back to what was worse
    rated("widgets-v1", 0, 40, seed=1)
    assert champion_monitor.champions_watch() == []


def test_a_champion_that_is_no_worse_stays_and_each_look_is_taken_once(champion: Policy) -> None:
    rated("widgets-v2", 14, 6)
    assert champion_monitor.champions_watch() == champion_monitor.champions_watch() == []
    looks = champion.events.filter(kind="watched")
    assert [look.verdicts["look"] for look in looks] == [1]
    rated("widgets-v2", 15, 5, seed=1)
    champion_monitor.champions_watch()
    assert [look.verdicts["decisions"] for look in looks.all()] == [40, 20]
    assert registry.champion_of("widgets") == champion


def test_too_few_rated_decisions_say_nothing(champion: Policy) -> None:
    rated("widgets-v2", 0, 19)
    assert champion_monitor.champion_look(champion) is None


def test_the_first_champion_has_nobody_to_be_rolled_back_to() -> None:
    first = registry.policy_promote(policy("widgets-v1"), actor="ann")
    rated("widgets-v1", 0, 40)
    assert champion_monitor.champion_look(first) is None


def test_who_wants_no_rollback_gets_none(champion: Policy) -> None:
    LearnerSettings.objects.create(agent="widgets", auto_rollback=False)
    rated("widgets-v2", 0, 20)
    assert champion_monitor.champions_watch() == []
    assert registry.champion_of("widgets") == champion


def test_verdicts_without_spread_are_alike_or_surely_not() -> None:
    assert champion_monitor.worse_by_chance([1.0] * 20, [1.0] * 20) == 1.0
    assert champion_monitor.worse_by_chance([0.0] * 20, [1.0] * 20) == 0.0


@pytest.mark.campaign
def test_no_worse_is_seldom_rolled_back_over_five_looks() -> None:
    # made-up thumbs, both liked seven times in ten: at most 5 % of 400 worlds, and their spread
    rolled = 0
    for seed in range(400):
        draw = random.Random(seed)
        before = [float(draw.random() < 0.7) for _ in range(200)]
        own = [float(draw.random() < 0.7) for _ in range(320)]
        rolled += any(
            champion_monitor.worse_by_chance(own[: 20 * 2**k], before)
            <= champion_monitor.alpha_of_look(0.05, k + 1)
            for k in range(5)
        )
    assert rolled <= 28  # 20 expected at most, standard deviation 4.4
