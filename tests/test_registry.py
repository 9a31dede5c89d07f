"""The registry: one champion, moves that are allowed, history that stays."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from django.core.exceptions import ValidationError
from django.db import IntegrityError, transaction
from django.utils import timezone

from rl import registry
from rl.models import Evaluation, Policy, PolicyEvent, TrainingRun

pytestmark = pytest.mark.django_db

GAIN = {"value": 0.3, "low": 0.1, "high": 0.5}


def policy(
    name: str = "widgets-v1", *, difference: dict[str, float] | None = GAIN, against: str = "base"
) -> Policy:
    run = TrainingRun.objects.create(
        agent="widgets", method="dpo", status="succeeded", base_model="bundled", base_model_hash="b" * 64,
        finished_at=timezone.now(),
    )  # fmt: skip
    made = registry.policy_register(
        run, name=name, adapter=Path("/nowhere"), adapter_sha256="a" * 64, feedback_count=1, actor="test"
    )
    if difference is not None:
        judged(made, difference, against)
    made.refresh_from_db()
    return made


def judged(subject: Policy, difference: dict[str, float], against: str) -> None:
    figures: dict[str, Any] = {
        "preference_accuracy": {"value": 0.9, "low": 0.8, "high": 0.95, "n": 50},
        "comparison": {
            "against": against, "preference_accuracy": {"value": 0.6}, "difference": difference, "p_value": 0.01
        },
    }  # fmt: skip
    evaluation = Evaluation.objects.create(
        agent="widgets", policy=subject, base_model="bundled", samples=50, figures=figures
    )
    registry.policy_evaluated(subject, evaluation, actor="test")


def test_a_promoted_policy_replaces_the_champion() -> None:
    first = registry.policy_promote(policy("widgets-v1"), actor="ann")
    second = registry.policy_promote(policy("widgets-v2", against="widgets-v1"), actor="ann")
    first.refresh_from_db()
    assert (first.stage, second.stage) == ("retired", "champion")
    assert registry.champion_of("widgets") == second


def test_the_database_keeps_one_champion_per_agent() -> None:
    registry.policy_promote(policy("widgets-v1"), actor="ann")
    other = policy("widgets-v2")
    with pytest.raises(IntegrityError), transaction.atomic():
        Policy.objects.filter(pk=other.pk).update(stage="champion")


def test_no_gain_no_promotion() -> None:
    candidate = policy(difference={"value": 0.05, "low": -0.02, "high": 0.12})
    with pytest.raises(
        registry.RegistryRefused, match=r"no gain over base is shown.*\+5\.0 points \[-2\.0, \+12\.0\]"
    ):
        registry.policy_promote(candidate, actor="ann")
    candidate.refresh_from_db()
    assert candidate.stage == "candidate"


def test_an_unjudged_policy_is_not_promoted() -> None:
    with pytest.raises(registry.RegistryRefused, match="evaluate_model --policy widgets-v1 --compare-base"):
        registry.policy_promote(policy(difference=None), actor="ann")


def test_a_challenger_must_be_judged_against_the_champion() -> None:
    registry.policy_promote(policy("widgets-v1"), actor="ann")
    with pytest.raises(registry.RegistryRefused, match="--compare widgets-v1"):
        registry.policy_promote(policy("widgets-v2", against="base"), actor="ann")


def test_force_needs_a_reason_and_stays_on_record() -> None:
    candidate = policy(difference=None)
    with pytest.raises(registry.RegistryRefused, match="needs a reason"):
        registry.policy_promote(candidate, actor="ann", force=True)
    registry.policy_promote(candidate, actor="ann", force=True, reason="the old one is offensive")
    event = candidate.events.get(kind="promoted")
    assert (event.forced, event.reason, event.actor) == (True, "the old one is offensive", "ann")


def test_rollback_puts_the_previous_champion_back() -> None:
    first = registry.policy_promote(policy("widgets-v1"), actor="ann")
    second = registry.policy_promote(policy("widgets-v2", against="widgets-v1"), actor="ann")
    assert registry.policy_rollback("widgets", actor="bob") == first
    second.refresh_from_db()
    assert second.stage == "retired"
    assert registry.champion_of("widgets") == first


def test_rollback_without_an_earlier_champion_is_refused() -> None:
    registry.policy_promote(policy("widgets-v1"), actor="ann")
    with pytest.raises(registry.RegistryRefused, match="replaced no champion"):
        registry.policy_rollback("widgets", actor="bob")


def test_rejected_is_the_end() -> None:
    rejected = registry.policy_reject(policy(), actor="ann", reason="worse on phones")
    with pytest.raises(registry.RegistryRefused, match="can move to nowhere"):
        registry.policy_promote(rejected, actor="ann", force=True, reason="please")


def test_history_is_neither_changed_nor_deleted() -> None:
    event = policy().events.latest("id")
    event.reason = "rewritten"
    with pytest.raises(ValidationError):
        event.save()
    with pytest.raises(ValidationError):
        event.delete()
    assert PolicyEvent.objects.filter(pk=event.pk).exists()


def test_the_same_feedback_count_gets_a_numbered_name() -> None:
    policy("widgets-v1")
    policy("widgets-v1.2")
    assert registry.policy_name_next("widgets", 1) == "widgets-v1.3"
    assert registry.policy_name_next("widgets", 2) == "widgets-v2"


def test_an_unknown_policy_names_those_there_are() -> None:
    policy("widgets-v1")
    with pytest.raises(registry.RegistryRefused, match="there are widgets-v1"):
        registry.policy_get("widgets-v9")
