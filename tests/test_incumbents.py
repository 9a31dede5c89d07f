"""The app's own model as a policy: who it is, when it is champion, and that no command or page fails on it."""

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from django.contrib.auth.models import User
from django.core.management import call_command
from django.core.management.base import CommandError
from django.test import Client

from feedback.models import Decision
from feedback.services import decision_record, rating_submit
from rl.experiments.traffic import ExperimentRefused, experiment_draft, plan_of
from rl.models import Policy
from rl.models.policies import APP_MODEL
from rl.online.champion_monitor import champions_watch
from rl.registry import incumbents
from rl.registry import service as registry
from rl.registry.files import policies_prune, policies_retained
from rl.registry.incumbents import ACTOR, NEWEST, incumbent_sync
from rl.registry.integrity import PolicyWithoutFiles, adapter_folder, verify
from rl.registry.model_card import card_write, policy_card
from rl.selectors import agent_cards
from rl.serving.playground import policies_offered
from rl.serving.routing import PolicyUnaskable, models_listed, target_of
from tests.support.api_client import ApiClient
from tests.support.registry_rows import make_run, registered
from tests.support.serving import Parrot, parrot_only, written_by_the_asking_thread

pytestmark = pytest.mark.django_db

AGENT = "bikes"
__all__ = ["parrot_only", "written_by_the_asking_thread"]


def decide(number: int = 0, **facts: Any) -> Decision:
    return decision_record(
        **{"agent": AGENT, "messages": f"My chain broke ({number})", "response": "repair", **facts}
    ).row


def trained(name: str = "bikes-v9", stage: str = "candidate", **facts: Any) -> Policy:
    policy = registered(make_run(AGENT), name, Path(registry.home_path(f"policies/{name}")), **facts)
    if stage != "candidate":
        registry.policy_move(policy, stage, actor="ada", reason="a test", force=True)
    return policy


def test_answers_without_a_policy_name_belong_to_the_apps_model() -> None:
    decide()
    champion = incumbent_sync(AGENT)
    assert (champion.kind, champion.name, champion.recorded_as) == ("recorded", "bikes-app", "")
    assert (champion.stage, champion.title, champion.has_files) == ("champion", APP_MODEL, False)
    assert incumbent_sync(AGENT) == champion
    assert Policy.objects.count() == 1


@pytest.mark.parametrize(
    ("sent", "name"),
    [
        ("gpt-5-mini", "gpt-5-mini"),
        ("openai/gpt-5 mini", "openai-gpt-5-mini"),
        ("taken", "bikes-taken"),
        ("filer", "bikes-filer"),  # an agent's slug
        ("base", "bikes-base"),  # the name of Ratchet's own base model
        ("champion", "bikes-champion"),  # a word of an option
        ("compare", "bikes-compare"),  # the address of a page
        ("///", "bikes-app"),
    ],
)
def test_its_name_is_the_apps_own_where_that_is_free_and_plain(sent: str, name: str) -> None:
    Policy.objects.create(name="taken", agent="filer", kind="recorded", recorded_as="taken", stage="retired")
    decide(policy=sent)
    champion = incumbent_sync(AGENT)
    assert (champion.name, champion.recorded_as, champion.title) == (name, sent, sent)


def test_a_blank_name_is_none() -> None:
    decide(policy="  ")
    assert incumbent_sync(AGENT).title == APP_MODEL


@pytest.mark.parametrize(
    "facts",
    [
        {"source": "simulation"},
        {"source": "gateway", "policy": "base"},
        {"source": "decide"},
        {"tags": ["demonstration"]},
    ],
    ids=str,
)
def test_what_no_user_got_from_the_app_makes_no_policy(facts: dict[str, Any]) -> None:
    decide(**facts)
    assert incumbent_sync(AGENT) is None
    assert not Policy.objects.exists()


def test_answers_of_a_trained_policy_are_its_own() -> None:
    trained()
    decide(policy="bikes-v9")
    assert incumbent_sync(AGENT) is None


def test_the_sides_of_an_imported_comparison_are_nobodys(tmp_path: Any) -> None:
    file = tmp_path / "pairs.jsonl"
    file.write_text('{"prompt": "My chain broke", "chosen": "repair", "rejected": "sales"}\n')
    call_command("import_feedback", str(file), "--agent", AGENT)
    assert Decision.objects.count() == 2
    assert incumbent_sync(AGENT) is None


def test_imported_answers_with_ratings_are_the_apps(tmp_path: Any) -> None:
    file = tmp_path / "rated.jsonl"
    file.write_text('{"prompt": "My chain broke", "response": "repair", "thumb": "up", "model": "rules-2"}\n')
    call_command("import_feedback", str(file), "--agent", AGENT)
    assert incumbent_sync(AGENT).recorded_as == "rules-2"


def test_of_several_names_the_one_with_most_of_the_newest_answers_is_champion() -> None:
    for number in range(5):
        decide(number, policy="old-model")
    for number in range(3):
        decide(number, policy="new-model")
    assert incumbent_sync(AGENT).name == "old-model"
    assert Policy.objects.get(name="new-model").stage == "retired"
    for number in range(3, 9):
        decide(number, policy="new-model")
    assert incumbent_sync(AGENT).name == "old-model", "9 of 14 are not twice as many"
    decide(10, policy="new-model")
    champion = incumbent_sync(AGENT)
    assert champion.name == "new-model"
    assert Policy.objects.get(name="old-model").stage == "retired"
    event = champion.events.get(to_stage="champion")
    assert (event.actor, event.reason.split(" of ")[0]) == (ACTOR, "10")
    assert NEWEST >= 100


def test_it_stays_out_of_a_champions_place_and_comes_back_by_rollback() -> None:
    decide()
    incumbent = incumbent_sync(AGENT)
    policy = trained(stage="champion")
    assert policy.parent == incumbent
    decide(1)
    assert incumbent_sync(AGENT) == policy
    assert registry.policy_rollback(AGENT, actor="ada").name == incumbent.name
    assert registry.champion_of(AGENT).kind == "recorded"


def test_what_a_person_retired_stays_retired() -> None:
    decide()
    registry.policy_retire(incumbent_sync(AGENT), actor="ada")
    assert incumbent_sync(AGENT) is None


def test_the_apps_model_is_the_one_to_beat_again_where_its_successor_was_retired() -> None:
    decide()
    incumbent = incumbent_sync(AGENT)
    registry.policy_retire(trained(stage="champion"), actor="ada", reason="too many complaints")
    decide(1)
    assert incumbent_sync(AGENT) == incumbent
    registry.policy_retire(incumbent, actor="ada")
    assert incumbent_sync(AGENT) is None


def test_a_name_that_another_agent_took_in_the_same_moment_is_not_taken_twice(monkeypatch: Any) -> None:
    decide(policy="rules")
    Policy.objects.create(name="rules", agent="boats", kind="recorded", recorded_as="rules", stage="retired")
    free = incumbents._name_free
    names = iter(["rules"])  # free when it was looked for
    monkeypatch.setattr(incumbents, "_name_free", lambda *given: next(names, "") or free(*given))
    assert incumbent_sync(AGENT).name == "bikes-rules"


def test_no_gate_promotes_it() -> None:
    decide()
    recorded = incumbent_sync(AGENT)
    trained(stage="champion")
    recorded.refresh_from_db()
    with pytest.raises(registry.RegistryRefused, match="rollback"):
        registry.policy_promote(recorded, actor="ada")


def test_a_recorded_champion_closes_no_loop_and_leads_no_card() -> None:
    decide()
    policy = trained()
    (card,) = agent_cards()
    assert (card.policy, card.newest, card.incumbent.name) == (policy, policy, "bikes-app")


def test_ratings_that_fall_behind_the_apps_model_are_told_and_not_rolled_back(monkeypatch: Any) -> None:
    told: list[str] = []
    monkeypatch.setattr("rl.online.champion_monitor.notify", lambda event, *_, **__: told.append(event))
    for number in range(30):
        rating_submit(decision=decide(number), rater="ann", thumb="up")
    incumbent_sync(AGENT)
    trained(stage="champion")
    for number in range(30):
        row = decide(number, policy="bikes-v9", source="gateway")
        rating_submit(decision=row, rater="ann", thumb="down")
    (line,) = champions_watch()
    assert "bikes-v9" in line
    assert told == ["policy_rated_worse"]
    assert registry.champion_of(AGENT).name == "bikes-v9"


def test_the_base_answers_in_its_place_and_says_so(parrot: Parrot, written_at_once: None) -> None:
    decide()
    incumbent_sync(AGENT)
    assert plan_of(AGENT).champion == "bikes-app"
    target = target_of(AGENT)
    assert ([model.name for model in target.models], target.meant) == (["base"], "bikes-app")
    client = ApiClient("ingest")
    body = {"model": AGENT, "messages": [{"role": "user", "content": "My chain broke"}]}
    response = client.post("/v1/chat/completions", body)
    assert response.status_code == 200, response.content
    row = Decision.objects.get(source="gateway")
    assert row.policy == "base"
    assert row.metadata["serving"]["meant"] == "bikes-app"
    assert [tried["kind"] for tried in row.metadata["serving"]["fallbacks"]] == ["recorded"]


def test_asked_by_name_it_is_refused() -> None:
    decide()
    incumbent_sync(AGENT)
    for name in ("bikes-app", f"{AGENT}:bikes-app"):
        with pytest.raises(PolicyUnaskable, match="cannot be asked"):
            target_of(name)
    assert "bikes-app" not in {one.id for one in models_listed()}
    assert [name for name, _ in policies_offered(AGENT)] == ["base"]


def test_no_earlier_champion_steps_in_for_it_and_it_steps_in_for_none() -> None:
    decide()
    incumbent_sync(AGENT)
    trained(stage="champion")
    assert target_of(AGENT).standby == ()


def test_an_experiment_names_it_as_an_arm_that_cannot_answer() -> None:
    decide()
    incumbent_sync(AGENT)
    trained(stage="challenger")
    with pytest.raises(ExperimentRefused, match=r"bikes-app .* cannot answer"):
        experiment_draft("first", ["bikes-v9"], actor="ada")
    assert experiment_draft("second", ["bikes-v9"], control="base", actor="ada").arms.count() == 2


def test_its_files_are_neither_looked_for_nor_deleted(ratchet_home: Any) -> None:
    decide()
    policy = incumbent_sync(AGENT)
    with pytest.raises(PolicyWithoutFiles, match="bikes-app has no files"):
        adapter_folder(policy)
    assert verify([policy])["checked"] == 0
    assert policy.pk not in policies_retained(AGENT)
    assert policies_prune(AGENT, actor="test") == []
    assert card_write(policy) is None
    assert not (ratchet_home / "README.md").exists()
    assert "recorded" in policy_card(policy)


COMMANDS: list[tuple[list[str], str]] = [
    (["policy", "list"], ""),
    (["policy", "show", "bikes-app"], ""),
    (["policy", "verify"], ""),
    (["policy", "verify", "bikes-app"], ""),
    (["policy", "diff", "bikes-app", "bikes-v9"], ""),
    (["policy", "promote", "bikes-app"], "no gate judges"),
    (["policy", "reject", "bikes-app", "--reason", "x"], "can move to"),
    (["policy", "rollback", AGENT], "no predecessor"),
    (["evaluate_model", "--policy", "bikes-app"], "no files to evaluate"),
    (["export_model", "--policy", "bikes-app"], "bikes-app has no files"),
    (["export_model", "--policy", "bikes-app", "--format", "gguf"], "bikes-app has no files"),
    (["benchmark_model", "--policy", "bikes-app", "--tasks", "ratchet_format"], "recorded answers"),
    (["train_dpo", "--agent", AGENT, "--set", "start_from=bikes-app", "--dry-run"], "bikes-app"),
    (["doctor"], ""),
    (["online_learner", "status", "--agent", AGENT], ""),
    (["experiment", "start", "x", "--agent", AGENT, "--challenger", "bikes-app"], "cannot answer"),
]


@pytest.mark.parametrize(
    ("arguments", "refusal"), COMMANDS, ids=lambda value: " ".join(value) if value else ""
)
def test_every_command_works_with_it_or_refuses_it_by_name(arguments: list[str], refusal: str) -> None:
    decide()
    incumbent_sync(AGENT)
    trained()
    if refusal:
        with pytest.raises(CommandError, match=refusal):
            call_command(*arguments)
        return
    with suppress(SystemExit):  # doctor and verify end with 1 where something is wrong
        call_command(*arguments)


PAGES = [
    "/",
    "/policies/",
    f"/policies/?agent={AGENT}",
    "/policies/bikes-app/",
    "/policies/bikes-app/answers/",
    "/policies/compare/?left=bikes-app&right=bikes-v9",
    f"/agents/{AGENT}/",
    f"/agents/{AGENT}/playground/",
    f"/agents/{AGENT}/playground/?policy=bikes-app",
    "/start/",
    f"/start/?agent={AGENT}",
    "/experiments/",
    "/policies/bikes-v9/",
    "/admin/rl/policy/",
    "/admin/rl/policy/{pk}/change/",
]


@pytest.mark.parametrize("page", PAGES)
def test_every_page_shows_it(page: str, client: Client) -> None:
    decide()
    policy = incumbent_sync(AGENT)
    trained()
    client.force_login(User.objects.create_superuser("ada"))
    assert client.get(page.format(pk=policy.pk)).status_code == 200


def _post(path: str, **body: Any) -> Callable[[ApiClient], Any]:
    return lambda api: api.post(path, body)


REQUESTS: list[tuple[Callable[[ApiClient], Any], int]] = [
    (lambda api: api.get("/api/policies/"), 200),
    (lambda api: api.get(f"/api/policies/{AGENT}"), 200),
    (lambda api: api.get(f"/api/online/{AGENT}/"), 200),
    (_post("/api/policies/bikes-app/promote/"), 409),
    (_post("/api/policies/bikes-app/rollback/"), 409),
    (_post("/api/policies/bikes-app/evaluate/", compare="base"), 409),
    (_post("/api/policies/bikes-app/evaluate/", compare="nobody"), 400),
    (_post("/api/policies/nobody/evaluate/"), 404),
    (_post("/v1/chat/completions", model="bikes-app", messages=[{"role": "user", "content": "x"}]), 400),
    (_post("/api/decide/", agent="bikes-app", messages=[{"role": "user", "content": "x"}]), 400),
]


@pytest.mark.parametrize(("ask", "status"), REQUESTS)
def test_every_endpoint_answers_or_refuses_it(ask: Callable[[ApiClient], Any], status: int) -> None:
    decide()
    incumbent_sync(AGENT)
    trained()
    response = ask(ApiClient("read", "ingest", "operate"))
    assert response.status_code == status, response.content
