"""From the decision log to what a policy would have earned: what is read, what is estimated, who uses it."""

import math
import re
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from django.contrib.auth.models import User
from django.test import Client

from feedback.models import Decision, Outcome, Rating, prompt_hash
from rl.datasets.feedback_types import Split
from rl.evaluation.off_policy import LoggedChoices, logged_choices, off_policy
from rl.evaluation.service import _off_policy
from rl.models import Evaluation, Policy, RewardRecord, RewardSettings, ServingSettings
from rl.registry import service as registry
from rl.serving.linear import choice_probabilities
from rl.statistics.offpolicy import MIN_DECISIONS
from rl.views.policies import off_policy_summary
from tests.support.evaluations import judged
from tests.support.experiments import policy_of
from tests.support.figures import figures_of
from tests.support.split_prompts import stand

pytestmark = pytest.mark.django_db

FOLDERS = ["Inbox", "Reports", "Bills"]
WARM = ServingSettings(agent="filer", choose_temperature=1.0)


def prompts(n: int, split: Split = "holdout") -> list[list[dict[str, str]]]:
    """n prompts of the filer that stand on a side of the split."""
    found = [[{"role": "user", "content": f"Where does {split} document {i} go?"}] for i in range(n)]
    for messages in found:
        stand("filer", messages, split)
    return found


def record(messages: Any, chosen: int, shares: list[float], up: bool | None, **facts: Any) -> Decision:
    row = Decision.objects.create(
        agent="filer",
        messages=messages,
        prompt_hash=prompt_hash("filer", messages),
        response=FOLDERS[chosen],
        propensity=shares[chosen],
        candidates=[
            {"response": name, "probability": share} for name, share in zip(FOLDERS, shares, strict=True)
        ],
        **facts,
    )
    if up is not None:
        Rating.objects.create(decision=row, rater="ann", thumb="up" if up else "down")
    return row


def test_only_held_out_choices_with_a_reward_are_asked() -> None:
    held, trained = prompts(2), prompts(1, "train")
    even = [0.5, 0.25, 0.25]
    rated = record(held[0], 1, even, True)
    record(held[1], 1, even, None)
    record(trained[0], 1, even, True)
    RewardRecord.objects.create(
        decision=rated.pk, agent="filer", raw=0.0, value=0.6, components={}, rows_said=1, basis="b"
    )
    log = logged_choices("filer")
    # one rating is too few to go by: the calculated rewards speak
    assert (log.decisions, log.kind, len(log.rows)) == (2, "reward", 1)
    row = log.rows[0]
    assert (row.responses, row.chosen, row.propensity) == (FOLDERS, 1, 0.25)
    assert (row.probabilities, row.reward) == ((0.5, 0.25, 0.25), 0.6)


def test_propensities_that_were_not_drawn_by_are_said_and_nothing_is_estimated() -> None:
    """Written down as even, drawn always for the first: trained prompts show it as well as held-out ones."""
    for messages in prompts(40, "train"):
        record(messages, 0, [0.4, 0.3, 0.3], None)
    for messages in prompts(31):
        record(messages, 0, [0.4, 0.3, 0.3], True)
    log = logged_choices("filer")
    assert "candidates at place 1 should have been chosen 28 times and were chosen 71 times" in log.fault
    figures, difference = off_policy(log, [[-1.0, -2.0, -3.0]] * 31, None, WARM)
    assert (figures, difference) == ({"refused": log.fault, "decisions": 31}, None)


@pytest.mark.parametrize(
    ("logged", "scale", "counted"),
    [
        ([1.0, 0.0], (0.0, 1.0), {1.0, 0.0}),
        ([-1.0, 0.0], (-1.0, 0.0), {0.0, 1.0}),
        ([3.0, -1.0], (-1.0, 3.0), {1.0, 0.0}),
    ],
)
def test_logged_rewards_count(logged: list[float], scale: tuple[float, float], counted: set[float]) -> None:
    for number, messages in enumerate(prompts(MIN_DECISIONS)):
        # people said something else, and an agent's own function calculated something else
        row = record(messages, number % 3, [0.4, 0.3, 0.3], True)
        Outcome.objects.create(decision=row, name="reward", value=logged[number % 2])
        Outcome.objects.create(decision=row, name="seconds", value=9.0)
        RewardRecord.objects.create(
            decision=row.pk, agent="filer", raw=1.0, value=0.75, components={}, rows_said=1, basis="b"
        )
    log = logged_choices("filer")
    assert (log.kind, log.scale, len(log.rows)) == ("outcome", scale, MIN_DECISIONS)
    assert {row.reward for row in log.rows} == counted
    assert math.fsum(row.reward for row in log.rows) / len(log.rows) == 0.5


def test_settings_say_what_a_logged_reward_is_worth() -> None:
    RewardSettings.objects.create(agent="filer", outcomes={"reward": {"good": 10, "bad": 0}})
    for number, messages in enumerate(prompts(MIN_DECISIONS)):
        row = record(messages, number % 3, [0.4, 0.3, 0.3], None)
        Outcome.objects.create(decision=row, name="reward", value=5 * (number % 2))
    log = logged_choices("filer")
    assert (log.scale, {row.reward for row in log.rows}) == ((0.0, 10.0), {0.0, 0.5})


def test_the_newest_logged_reward_counts() -> None:
    for number, messages in enumerate(prompts(MIN_DECISIONS)):
        row = record(messages, number % 3, [0.4, 0.3, 0.3], None)
        for day, value in ((2, 1.0), (1, 0.0)):
            Outcome.objects.create(
                decision=row, name="reward", value=value, at=datetime(2025, 1, day, tzinfo=UTC)
            )
    assert {row.reward for row in logged_choices("filer").rows} == {1.0}


def test_ratings_speak_where_there_are_enough() -> None:
    for number, messages in enumerate(prompts(MIN_DECISIONS)):
        record(messages, number % 3, [0.4, 0.3, 0.3], number % 2 == 0)
    log = logged_choices("filer")
    assert (log.kind, len(log.rows)) == ("score", MIN_DECISIONS)
    assert {row.reward for row in log.rows} == {0.0, 1.0}


def test_a_response_that_was_not_listed_is_no_choice() -> None:
    for number, messages in enumerate(prompts(MIN_DECISIONS + 1)):
        row = record(messages, 0, [0.4, 0.3, 0.3], True)
        if number == 0:
            Decision.objects.filter(pk=row.pk).update(response="Elsewhere")
    assert len(logged_choices("filer").rows) == MIN_DECISIONS


def world(n: int, seed: int, exploring: bool = True) -> LoggedChoices:
    """Reports is right with 0.9, the others with 0.2; it was logged evenly, or always Inbox."""
    random = np.random.default_rng(seed)
    shares = [1 / 3] * 3 if exploring else [1.0, 0.0, 0.0]
    for messages in prompts(n):
        chosen = int(random.choice(3, p=shares))
        record(messages, chosen, shares, bool(random.random() < (0.9 if chosen == 1 else 0.2)))
    return logged_choices("filer", most=n)


def scores(favourite: int, n: int) -> list[list[float]]:
    """Log-probabilities of a policy that favours one folder e^2 to 1."""
    return [[2.0 if number == favourite else 0.0 for number in range(3)] for _ in range(n)]


def earns(favourite: int) -> float:
    """Exactly: e^2 / (e^2 + 2) = 0.78699 on the favourite, the rest shared."""
    share = math.exp(2) / (math.exp(2) + 2)
    rest = (1 - share) / 2
    return sum((share if n == favourite else rest) * (0.9 if n == 1 else 0.2) for n in range(3))


@pytest.fixture(scope="module")
def logs(django_db_setup: None, django_db_blocker: Any) -> dict[str, LoggedChoices]:
    from django.db import transaction

    with django_db_blocker.unblock():
        try:
            with transaction.atomic():
                found = {"explored": world(240, 1)}
                Rating.objects.all().delete()
                Decision.objects.all().delete()
                found["fixed"] = world(60, 2, exploring=False)
                raise InterruptedError  # nothing of this stays
        except InterruptedError:
            return found


@pytest.mark.slow
def test_the_estimate_holds_what_the_policy_would_earn(logs: Any) -> None:
    log = logs["explored"]
    figures, difference = off_policy(log, scores(1, 240), scores(0, 240), WARM)
    assert difference is not None
    for method in ("ips", "snips", "doubly_robust"):
        assert figures[method]["low"] < earns(1) < figures[method]["high"]
        assert figures["against"][method]["low"] < earns(0) < figures["against"][method]["high"]
    assert difference.low < earns(1) - earns(0) < difference.high
    assert difference.low > 0
    assert figures["logged"] == pytest.approx(np.mean([row.reward for row in log.rows]))


def test_a_policy_that_would_earn_less_is_surely_less(logs: Any) -> None:
    _, difference = off_policy(logs["explored"], scores(0, 240), scores(1, 240), WARM)
    assert difference.high < 0


def test_how_the_choice_is_drawn_is_the_agents_setting(logs: Any) -> None:
    cold = ServingSettings(agent="filer", choose_temperature=0.0)
    warm, _ = off_policy(logs["explored"], scores(1, 240), None, WARM)
    best, _ = off_policy(logs["explored"], scores(1, 240), None, cold)
    assert best["snips"]["value"] > warm["snips"]["value"]
    assert choice_probabilities([2.0, 0.0], temperature=0.0) == (1.0, 0.0)


def test_a_log_that_never_tried_it_is_refused(logs: Any) -> None:
    figures, difference = off_policy(logs["fixed"], scores(1, 60), scores(0, 60), WARM)
    assert difference is None
    assert "never possible when it was logged" in figures["refused"]


def test_a_small_log_says_its_figures_with_a_warning_and_opens_no_gate(logs: Any) -> None:
    log = logs["explored"]
    few = LoggedChoices(log.rows[:60], log.kind, 60)
    figures, difference = off_policy(few, scores(1, 60), scores(0, 60), WARM)
    assert "only" in figures["overlap"]["warnings"][0]
    assert difference is None


def test_choices_nobody_rated_say_so() -> None:
    figures, _ = off_policy(LoggedChoices([], "reward", 17), [], None, WARM)
    assert figures_of(figures["refused"]) == [17]


def test_a_gate_refuses_what_would_have_earned_less() -> None:
    policy_of("filer-v1", Policy.Stage.CHAMPION)
    candidate = policy_of("filer-v2", Policy.Stage.CANDIDATE)
    judged(candidate, "filer-v1", off_policy={"value": -0.2, "low": -0.3, "high": -0.1})
    with pytest.raises(
        registry.RegistryRefused, match=r"off-policy estimate of its reward minus the champion's: -0\.200"
    ):
        registry.policy_promote(candidate, actor="ann")


def test_an_evaluation_scores_the_log_with_the_model_itself(tmp_path_factory: pytest.TempPathFactory) -> None:
    from rl.training.hardware import Hardware
    from rl.training.policy import load_policy
    from tests.support.tiny_models import tiny_model

    ServingSettings.objects.create(agent="filer", choose_temperature=5.0)
    random = np.random.default_rng(4)
    for messages in prompts(MIN_DECISIONS + 10):
        record(messages, int(random.integers(3)), [1 / 3] * 3, bool(random.random() < 0.5))
    base: Path = tiny_model(tmp_path_factory.mktemp("base") / "llama")
    machine = Hardware("cpu", "a test", 1.0, 1.0, 1, "a test", "float32", "highest", True, "cpu")
    figures, difference = _off_policy("filer", load_policy(str(base), hardware=machine), None)
    assert difference is None
    assert figures["decisions"] == MIN_DECISIONS + 10
    assert 0.0 <= figures["doubly_robust"]["low"] <= figures["doubly_robust"]["high"] <= 1.0


def evaluated(policy: Policy, off_policy: dict[str, Any]) -> Evaluation:
    return Evaluation.objects.create(
        agent="filer",
        policy=policy,
        base_model="bundled",
        against="filer-v1",
        samples=1,
        figures={"off_policy": off_policy},
    )


def test_the_policys_page_shows_the_estimate_or_why_there_is_none(logs: Any) -> None:
    policy = policy_of("filer-v2")
    client = Client()
    client.force_login(User.objects.create_superuser("root"))
    evaluated(policy, {"refused": "the log does not cover the policy"})
    page = re.sub(r"<[^>]*>", " ", client.get("/policies/filer-v2/").text)
    assert "No off-policy estimate: the log does not cover the policy" in page
    figures, _ = off_policy(logs["explored"], scores(1, 240), scores(0, 240), WARM)
    evaluated(policy, figures)
    page = re.sub(r"\s+", " ", re.sub(r"<[^>]*>", " ", client.get("/policies/filer-v2/").text))
    assert "on 240 held-out decisions of other policies" in page
    assert "doubly robust" in page
    assert "Effective decisions" in page
    assert off_policy_summary([]) is None
