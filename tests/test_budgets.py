"""An agent's monthly budget for providers: a hard stop, local policies step in, one notice."""

from datetime import timedelta
from typing import Any

import pytest
from django.core.management.base import CommandError

from feedback.accounts.authentication import KeyRefused, key_budget, key_create
from feedback.erasure.withdrawals import decision_withdraw
from feedback.explorer.bulk_readers import caller_cost_since, cost_since
from feedback.models import ApiKey, Decision, ImportBatch
from rl.evaluation.sides import HostedFailed, HostedSide
from rl.models import Policy, ServingSettings
from rl.reward_models.service import score_model_ask
from rl.rewards.graders import GraderError, Sampling
from rl.serving import routing
from rl.serving.routing import BudgetReached, budgets_notice, month_cost, month_start, target_of
from rl.training.held_out import HeldOutPrompt
from tests.support.api_client import ApiClient
from tests.support.experiments import running_of
from tests.support.hosted import answer_of, hosted
from tests.support.registry_rows import policy_of
from tests.support.said import command
from tests.support.stub_openai import ModelServer

pytestmark = pytest.mark.django_db

AGENT = "filer"


@pytest.fixture(autouse=True)
def champion(settings: Any) -> Policy:
    settings.FEEDBACK_REMEMBER_S = 0
    return hosted("http://127.0.0.1:1/v1", "filer-gpt", agent=AGENT)


def spent(usd: float, **facts: Any) -> None:
    answer_of(usd, agent=AGENT, messages="hello", response="hi", policy="filer-gpt", **facts)


def budget(usd: float | None, *fallbacks: str) -> None:
    ServingSettings.objects.update_or_create(
        agent=AGENT, defaults={"budget_usd": usd, "fallbacks": list(fallbacks)}
    )


def test_within_the_budget_the_hosted_model_answers() -> None:
    spent(0.5)
    spent(9.0, created_at=month_start() - timedelta(days=3))
    for limit in (None, 0.51):
        budget(limit)
        assert target_of(AGENT).meant == "filer-gpt"


def test_a_spent_budget_stops_it_and_a_fallback_answers() -> None:
    policy_of("filer-v2", Policy.Stage.RETIRED)
    spent(0.5)
    budget(0.5, "filer-v2")
    assert [model.name for model in target_of(AGENT).models] == ["filer-v2"]


def test_without_a_local_policy_it_refuses_with_429() -> None:
    spent(0.5)
    budget(0.5)
    with pytest.raises(BudgetReached):
        target_of("filer-gpt")
    said = ApiClient("ingest").post(
        "/v1/chat/completions", {"model": AGENT, "messages": [{"role": "user", "content": "hello"}]}
    )
    assert said.status_code == 429
    assert said.json()["error"]["code"] == "insufficient_quota"


def test_an_answer_of_another_policy_is_no_evidence_on_the_arm() -> None:
    policy_of("filer-v1", Policy.Stage.CHALLENGER)
    Policy.objects.filter(name="filer-v1").update(
        kind="hosted", upstream=Policy.objects.get(name="filer-gpt").upstream
    )
    policy_of("filer-v2", Policy.Stage.CHALLENGER)
    running_of()
    spent(0.5)
    units = [f"user-{n}" for n in range(20)]
    assert {target_of(AGENT, unit).arm.partition("/")[2] for unit in units} == {"control", "challenger"}
    budget(0.5, "filer-v2")
    assert {target_of(AGENT, unit).arm.partition("/")[2] for unit in units} == {"", "challenger"}


def test_the_notice_comes_once_a_month(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[Any] = []
    monkeypatch.setattr(routing, "notify", lambda *args, **facts: sent.append((args[0], facts["spent_usd"])))
    budget(0.5)
    spent(0.4)
    assert budgets_notice() == []
    spent(0.2)
    assert len(budgets_notice()) == 1
    assert budgets_notice() == []
    ServingSettings.objects.update(budget_noticed_at=month_start() - timedelta(days=1))
    assert len(budgets_notice()) == 1
    assert sent == [("budget_reached", pytest.approx(0.6))] * 2


@pytest.mark.django_db(transaction=True)
def test_graders_and_evaluations_count_and_stop() -> None:
    with ModelServer() as stub:
        stub.said = '{"result": 1}'
        policy = hosted(stub.url, "judge-gpt", agent="judge", price_in=100_000.0, price_out=0.0)
        ServingSettings.objects.create(agent="judge", budget_usd=1.0)
        assert score_model_ask("judge", [{"role": "user", "content": "q"}], Sampling()) == stub.said
        assert month_cost("judge") == pytest.approx(0.7)  # 7 tokens
        assert HostedSide(policy).answers(
            [HeldOutPrompt([{"role": "user", "content": "q"}], {"state": None})]
        )
        assert month_cost("judge") == pytest.approx(1.4)
        with pytest.raises(GraderError, match="budget"):
            score_model_ask("judge", [{"role": "user", "content": "q"}], Sampling())
        with pytest.raises(HostedFailed, match="budget"):
            HostedSide(policy).answers([HeldOutPrompt([{"role": "user", "content": "r"}], {"state": None})])
    assert len(stub.bodies) == 2
    assert len(budgets_notice()) == 1
    assert not Decision.objects.exists()


# --- Of a key ---------------------------------------------------------------------------------------------------


def test_a_keys_budget_stops_hosted_models_for_that_key_alone() -> None:
    key, _ = key_create("the-app", ["ingest"])
    other, _ = key_create("another", ["ingest"])
    row = answer_of(0.5, agent=AGENT, messages="hello", response="hi", policy="filer-gpt")
    row.metadata["serving"]["caller"] = key.ident
    row.save(update_fields=["metadata"])
    assert target_of(AGENT, "", key.ident).meant == "filer-gpt"
    key_budget("the-app", 0.5)
    key_budget("another", 0.5)
    with pytest.raises(BudgetReached, match="this key has spent its budget"):
        target_of(AGENT, "", key.ident)
    for caller in ("", "user:1", other.ident):
        assert target_of(AGENT, "", caller).meant == "filer-gpt"
    policy_of("filer-v2", Policy.Stage.RETIRED)
    budget(None, "filer-v2")
    assert [model.name for model in target_of(AGENT, "", key.ident).models] == ["filer-v2"]
    key_budget("the-app", None)
    assert target_of(AGENT, "", key.ident).meant == "filer-gpt"


def test_withdrawn_answers_were_paid_for_and_imported_ones_were_not() -> None:
    key, _ = key_create("the-app", ["ingest"])
    paid, brought = [
        answer_of(0.5, agent=AGENT, messages="hello", response="hi", policy="filer-gpt") for _ in range(2)
    ]
    for row in (paid, brought):
        row.metadata["serving"]["caller"] = key.ident
    brought.import_batch = ImportBatch.objects.create(file="f", sha256="c4" * 32, bytes=1, format="openai")
    Decision.objects.bulk_update([paid, brought], ["metadata", "import_batch"])
    decision_withdraw(paid.pk, actor="ann", reason="a mistake")
    assert caller_cost_since(key.ident, month_start()) == cost_since(AGENT, month_start()) == 0.5


def test_a_keys_notice_comes_once_and_its_requests_are_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[Any] = []
    monkeypatch.setattr(routing, "notify", lambda *args, **facts: sent.append((args[0], facts["key"])))
    api = ApiClient("ingest")
    key = ApiKey.objects.get()
    row = answer_of(0.5, agent=AGENT, messages="hello", response="hi", policy="filer-gpt")
    row.metadata["serving"]["caller"] = key.ident
    row.save(update_fields=["metadata"])
    key_budget(key.name, 0.25)
    assert len(budgets_notice()) == 1
    assert budgets_notice() == []
    assert sent == [("budget_reached", key.name)]
    said = api.post(
        "/v1/chat/completions", {"model": AGENT, "messages": [{"role": "user", "content": "hello"}]}
    )
    assert (said.status_code, said.json()["error"]["code"]) == (429, "insufficient_quota")


@pytest.mark.parametrize("usd", [-1.0, float("nan"), float("inf")])
def test_a_budget_is_an_amount_of_money(usd: float) -> None:
    key_create("the-app", ["ingest"])
    with pytest.raises(KeyRefused, match="budget"):
        key_budget("the-app", usd)


def test_the_command_sets_a_keys_budget() -> None:
    key_create("the-app", ["ingest"])
    assert command("api_key", "budget", "the-app", "20")["budget_usd"] == 20.0
    assert command("api_key", "budget", "the-app", "none")["budget_usd"] is None
    with pytest.raises(CommandError, match="expected US dollars"):
        command("api_key", "budget", "the-app", "much")
