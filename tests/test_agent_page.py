"""The page of an agent: for any slug that decided something, with what was set for it and who may change that."""

from __future__ import annotations

import pytest
from django.test import Client
from django.utils import timezone

from feedback.services import decision_record, rating_submit
from rl.datasets.reward_records import rewards_calculate
from rl.models import LearnerSettings, Policy, RewardSettings, TrainingRun
from tests.support.api_client import person

pytestmark = pytest.mark.django_db


@pytest.fixture
def operator(client: Client) -> Client:
    user = person("olga", "operator")
    user.is_staff = True
    user.save()
    client.force_login(user)
    return client


def test_it_needs_a_signed_in_person(client: Client) -> None:
    assert client.get("/agents/filer/").status_code == 302


@pytest.mark.parametrize("slug", ["nobody", "Not-A-Slug", "a" * 70])
def test_an_agent_nobody_heard_of_is_not_found(operator: Client, slug: str) -> None:
    assert operator.get(f"/agents/{slug}/").status_code == 404


def test_a_built_in_agent_shows_how_it_is_asked_before_it_decided_anything(operator: Client) -> None:
    html = operator.get("/agents/librarian/").text
    for said in ("rl.agents.librarian.Librarian", "Pick the listed subjects", "a subject is missing", "uniqueItems",
                 "/agents/librarian/rewards/", "subject_changed", "No champion"):  # fmt: skip
        assert said in html, said


def test_it_shows_counts_rewards_runs_and_the_champion(operator: Client) -> None:
    row = decision_record(agent="support", messages="q", response="r").row
    rating_submit(decision=row, rater="ada", thumb="down")
    rewards_calculate()
    Policy.objects.create(
        name="support-v1", agent="support", stage="champion", base_model="b", base_model_hash="h",
        adapter_path="p", adapter_sha256="s", feedback_count=1,
        metrics={"preference_accuracy": {"value": 0.8, "low": 0.7, "high": 0.9, "n": 50}},
    )  # fmt: skip
    TrainingRun.objects.create(
        agent="support", method="dpo", status="failed", base_model="b", finished_at=timezone.now()
    )
    html = operator.get("/agents/support/").text
    for said in ("no definition: free text", "<dd>1</dd>", "-1.25", "-2.00", "no data", "support-v1", "It answers now.",
                 "status-failed"):  # fmt: skip
        assert said in html, said


def test_what_was_set_otherwise_is_shown_and_changed_by_who_may(operator: Client) -> None:
    LearnerSettings.objects.create(agent="filer", min_samples_to_retrain=77)
    worth = {"solved": {"good": 1.0, "bad": 0.0}}
    row = RewardSettings.objects.create(agent="filer", delayed_weight=3, outcomes=worth)
    html = operator.get("/agents/filer/").text
    assert '<dd class="words">solved (good 1, bad 0)</dd>' in html
    assert '<dd class="words">77</dd>' in html
    assert f"/admin/rl/rewardsettings/{row.pk}/change/" in html
    assert "/admin/rl/gatesettings/add/?agent=filer" in html
    operator.force_login(person("rita", "rater"))
    html = operator.get("/agents/filer/").text
    assert "/admin/rl/" not in html
    assert "/decisions/?agent=filer" not in html
