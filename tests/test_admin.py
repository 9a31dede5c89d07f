"""The admin: the registry to look at, settings and keys to change; and the moves of a policy on its page."""

import re
from typing import Any

import pytest
from django.contrib.auth.models import Permission, User
from django.contrib.staticfiles import finders
from django.db import connection
from django.db.models import Model
from django.test import Client
from django.test.utils import CaptureQueriesContext
from django.urls import reverse
from django.utils import timezone
from django.utils.html import escape

from feedback.accounts.authentication import key_check, key_create
from feedback.accounts.roles import role_give
from feedback.models import AgentSettings, ApiKey, Decision, Trace
from feedback.services import (
    comparison_submit,
    decision_record,
    outcome_record,
    rating_submit,
    rating_withdraw,
)
from rl.admin import golden_of, prompt_read, prompt_written, responses_read, responses_written
from rl.evaluation.benchmarks import figures_paired
from rl.models import (
    Artifact,
    BenchmarkResult,
    Evaluation,
    GoldenCase,
    Policy,
    RunMetric,
    Snapshot,
    TrainingRun,
)
from rl.registry import service as registry
from rl.registry.checklist import gate_checklists
from tests.support.evaluations import evidence_stored

pytestmark = pytest.mark.django_db


RECORDS = [Snapshot, Evaluation, Policy, Artifact]
GAIN = {"value": 0.4, "low": 0.3, "high": 0.5}


@pytest.fixture
def operator(client: Client) -> Client:
    client.force_login(User.objects.create_superuser("ada"))
    return client


def make(count: int, agent: str = "widgets") -> None:
    """`count` rows of every fact."""
    for number in range(count):
        left, right = (
            decision_record(agent=agent, messages=f"prompt {number}", response=f"answer {side} {number}").row
            for side in ("a", "b")
        )
        rating = rating_submit(decision=left, rater="ada", thumb="up").row
        rating_submit(decision=right, rater="ada", stars=3, notes="so so")
        if number % 2:
            rating_withdraw(rating)
        comparison_submit(left=left, right=right, preference="left", rater="ada")
        outcome_record(decision=left, name="reopened", value=1)
        Trace.objects.create(agent=agent, steps=[{"kind": "tool"}])
        policy = make_policy(agent)
        Evaluation.objects.create(
            agent=agent, policy=policy, base_model="bundled", samples=9, figures={"preference_accuracy": 0.9}
        )
        registry.artifact_register(
            policy, actor="test", path=f"exports/{policy.name}.gguf", format="gguf", bytes=10, sha256="1" * 64
        )


def make_policy(agent: str = "widgets", difference: dict[str, float] | None = None) -> Policy:
    of = {"agent": agent, "base_model": "bundled"}
    counted = {"counts": {"train": 8}, "feedback_count": 9, "simulated_share": 0.5}
    snapshot = Snapshot.objects.create(agent=agent, kind="pairs", path="s.jsonl", sha256="a" * 64, **counted)
    over = {"status": "succeeded", "finished_at": timezone.now()}
    run = TrainingRun.objects.create(method="dpo", snapshot=snapshot, **of, **over)
    RunMetric.objects.create(run=run, step=1, values={"loss": 0.69})
    named = {"name": registry.policy_name_next(agent, 9), "adapter": registry.home_path("a")}
    policy = registry.policy_register(
        run, **named, adapter_sha256="b" * 64, feedback_count=9, actor="train_dpo"
    )
    if difference is not None:
        Policy.objects.filter(pk=policy.pk).update(
            metrics={
                "preference_accuracy": {"value": 0.934, "low": 0.87, "high": 0.97, "n": 96},
                "against": "base",
                "against_preference_accuracy": {"value": 0.534, "low": 0.43, "high": 0.63, "n": 96},
                "difference": difference,
                "p_value": 0.00031,
            }
        )
        policy.refresh_from_db()
        evidence = evidence_stored(wins=15 if difference["low"] > 0 else 0)
        Evaluation.objects.create(
            policy=policy, samples=40, against="base", figures={}, evidence=evidence, **of
        )
    return policy


def listing(model: type[Model]) -> str:
    return reverse(f"admin:{model._meta.app_label}_{model._meta.model_name}_changelist")


def page(row: Model, action: str = "change") -> str:
    return reverse(f"admin:{row._meta.app_label}_{row._meta.model_name}_{action}", args=[row.pk])


@pytest.mark.parametrize("model", RECORDS, ids=lambda model: model.__name__)
def test_records_are_listed_and_not_changed(operator: Client, model: type[Model]) -> None:
    make(2)
    with CaptureQueriesContext(connection) as captured:
        assert operator.get(listing(model)).status_code == 200
    # a list is not counted
    assert not [q for q in captured if re.search(rf"COUNT\(.*FROM \"{model._meta.db_table}\"", q["sql"])]
    assert operator.get(f"{listing(model)}?q=widgets").status_code == 200
    row = model._default_manager.all()[0]
    assert 'name="_save"' not in operator.get(page(row)).text
    assert operator.get(listing(model) + "add/").status_code == 403
    assert operator.post(page(row), {"agent": "other", "notes": "other"}).status_code == 403
    assert operator.post(page(row, "delete"), {"post": "yes"}).status_code == 403
    chosen = {"action": "delete_selected", "_selected_action": str(row.pk), "post": "yes"}
    operator.post(listing(model), chosen)
    assert model._default_manager.count() == 2


@pytest.mark.slow
def test_a_list_takes_as_many_queries_for_twelve_rows_as_for_two(operator: Client, settings: Any) -> None:
    settings.FEEDBACK_REMEMBER_S = 3600.0  # what is remembered is not counted again, however slow the machine

    def queries() -> dict[str, int]:
        found = {}
        for model in RECORDS:
            with CaptureQueriesContext(connection) as captured:
                operator.get(listing(model))
            found[model.__name__] = len(captured)
        return found

    make(2)
    queries()
    few = queries()
    make(10)
    assert queries() == few


@pytest.mark.parametrize(("at_once", "wanted"), [(4, {2}), (3, {1})])
def test_settings(operator: Client, monkeypatch: pytest.MonkeyPatch, at_once: int, wanted: set[int]) -> None:
    make(2)
    monkeypatch.setattr("feedback.admin.RENEWED_AT_ONCE", at_once)
    sent = {"agent": "widgets", "collection_rate": "0.5", "ratings_wanted": "2", "overlap_share": "0"}
    sent |= {"overlap_ratings": "3"}
    answer = operator.post(reverse("admin:feedback_agentsettings_add"), sent)
    assert answer.status_code == 302
    assert AgentSettings.objects.get().ratings_wanted == 2
    # of many decisions the page says what to run instead of doing it
    assert set(Decision.objects.values_list("ratings_wanted", flat=True)) == wanted
    assert ("renew_queue --agent widgets" in operator.get(answer["Location"]).text) == (wanted == {1})


def test_labels_of_settings_read_as_words(operator: Client) -> None:
    serving = operator.get(reverse("admin:rl_servingsettings_add")).text
    assert "Budget (USD a month)" in serving
    assert "Largest KL on general prompts" in operator.get(reverse("admin:rl_gatesettings_add")).text


def test_the_filter_by_agent_is_applied(operator: Client) -> None:
    make(1, agent="widgets")
    make(1, agent="helpdesk")
    html = operator.get(f"{listing(Policy)}?agent=helpdesk").text
    assert "helpdesk-v9" in html
    assert "widgets-v9" not in html


def test_every_static_file_of_a_page_exists(operator: Client) -> None:
    for address in ("admin:index", "admin:rl_policy_changelist", "admin:auth_user_changelist"):
        files = set(re.findall(r'(?:src|href)="/static/([^"?]+)', operator.get(reverse(address)).text))
        assert {"rl/admin.css", "favicon.svg", "unfold/css/styles.css"} <= files
        assert [file for file in sorted(files) if finders.find(file) is None] == []


def test_a_key_is_shown_once_where_it_is_made(operator: Client) -> None:
    answer = operator.post(
        reverse("admin:feedback_apikey_add"), {"name": "the shop", "scopes": ["ingest", "rate"]}
    )
    secret = re.search(r'rt-secret">(rk_[\w-]{40})<', answer.text)
    assert secret
    key = key_check(secret[1])
    assert (key.name, key.scopes) == ("the shop", ["ingest", "rate"])
    for address in (listing(ApiKey), page(key)):
        html = operator.get(address).text
        assert "the shop" in html
        assert secret[1] not in html
        assert key.key_hash not in html


def test_a_key_without_a_name_of_its_own_and_known_scopes_is_not_made(operator: Client) -> None:
    key_create("taken", ["read"])
    for sent in (
        {},
        {"name": "x"},
        {"name": "x", "scopes": ["everything"]},
        {"name": "taken", "scopes": ["read"]},
    ):
        assert 'role="alert"' in operator.post(reverse("admin:feedback_apikey_add"), sent).text
    assert ApiKey.objects.count() == 1


def test_a_revoked_key_opens_nothing(operator: Client) -> None:
    key, secret = key_create("the shop", ["read"])
    assert operator.get(page(key, "revoke")).status_code == 405
    operator.post(page(key, "revoke"))
    assert key_check(secret) is None
    assert "Revoke the shop" not in operator.get(page(key)).text


def test_a_policy_on_record_leads_to_its_page_which_offers_possible_moves(operator: Client) -> None:
    policy = make_policy()
    assert policy_page(policy) in operator.get(page(policy)).text
    assert policy_page(policy) in operator.get(listing(Policy)).text
    offered = re.findall(r'name="move" value="(\w+)"', operator.get(policy_page(policy)).text)
    # the last two by force alone: not judged yet
    assert offered == ["rejected", "retired", "champion", "challenger"]
    registry.policy_reject(policy, actor="eve", reason="no")
    assert 'name="move"' not in operator.get(policy_page(policy)).text
    assert operator.post("/policies/widgets-v777/move/", {"move": "champion"}).status_code == 404


def policy_page(policy: Policy) -> str:
    return reverse("policy", args=[policy.name])


def test_a_closed_gate_says_what_is_missing_before_the_click(operator: Client) -> None:
    policy = make_policy(difference={"value": 0.01, "low": -0.05, "high": 0.07})
    (challenger, champion) = gate_checklists(policy, ["champion", "challenger"])
    html = operator.get(policy_page(policy)).text
    for item in (*challenger.unmet, *champion.unmet):
        assert escape(item.words) in html
    assert re.search(r'disabled aria-describedby="gate-champion">Promote to champion', html)


def test_who_may_only_look_or_rate_cannot_move_and_nobody_moves_by_get(client: Client) -> None:
    policy = make_policy(difference=GAIN)
    looks = User.objects.create_user("bob", is_staff=True)
    looks.user_permissions.add(Permission.objects.get(codename="view_policy"))
    address = reverse("policy-move", args=[policy.name])
    for user, admin in ((looks, 200), (User.objects.create_user("rita"), 302)):
        client.force_login(user)
        assert 'name="move"' not in client.get(policy_page(policy)).text
        assert client.post(address, {"move": "champion"}).status_code == 403
        assert client.get(page(policy)).status_code == admin
    client.force_login(User.objects.create_superuser("ada"))
    assert client.get(address + "?move=champion").status_code == 405
    policy.refresh_from_db()
    assert policy.stage == "candidate"


@pytest.mark.parametrize("responses", [[], ["one"], ["one\nof two lines", '{"widget": "table"}']])
def test_responses_are_read_as_they_were_written(responses: list[str]) -> None:
    assert responses_read(responses_written(responses)) == responses


def test_one_question_is_plain_words_and_a_conversation_is_json() -> None:
    question = [{"role": "user", "content": "is it up?"}]
    talk = [{"role": "system", "content": "Be brief."}, *question]
    assert prompt_written(question) == "is it up?"
    assert prompt_read(prompt_written(question)) == question
    assert prompt_read(prompt_written(talk)) == talk


def test_a_decision_people_disliked_is_forbidden_and_its_correction_right() -> None:
    decision = decision_record(agent="filer", messages="an invoice", response="Photos").row
    rating_submit(decision=decision, rater="ada", thumb="down", correction="Invoices")
    found = golden_of(str(decision.pk))
    assert (found["accepted"], found["forbidden"]) == (["Invoices"], ["Photos"])
    assert (found["agent"], found["name"]) == ("filer", "an invoice")


def test_an_operator_makes_one_from_the_page_of_a_decision(operator: Client) -> None:
    decision = decision_record(agent="filer", messages="an invoice", response="Invoices").row
    rating_submit(decision=decision, rater="ada", thumb="up")
    link = f"/admin/rl/goldencase/add/?decision={decision.pk}"
    assert link in operator.get(f"/decisions/{decision.pk}/").text
    assert "an invoice" in operator.get(link).text
    form = {"agent": "filer", "name": "invoices", "messages": "an invoice"}
    form |= {"accepted": "Invoices\n---\nBills", "forbidden": "", "state": "", "active": "on"}
    assert operator.post("/admin/rl/goldencase/add/", form).status_code == 302
    case = GoldenCase.objects.get()
    expected = ([{"role": "user", "content": "an invoice"}], ["Invoices", "Bills"])
    assert (case.messages, case.accepted) == expected


def test_a_case_that_says_nothing_is_refused(operator: Client) -> None:
    form = {"agent": "filer", "name": "n", "messages": "[not json", "accepted": "", "forbidden": ""}
    form |= {"state": ""}
    page = operator.post("/admin/rl/goldencase/add/", form).text
    assert "this is no JSON list of messages" in page
    page = operator.post("/admin/rl/goldencase/add/", form | {"messages": "x"}).text
    assert "expected at least one accepted or forbidden response" in page
    assert not GoldenCase.objects.exists()


def test_only_who_may_make_keys_makes_and_revokes_them(client: Client) -> None:
    user = User.objects.create_user("bob")
    role_give(user, "operator")
    client.force_login(user)
    key, _ = key_create("the shop", ["read"])
    assert client.get(reverse("admin:feedback_apikey_add")).status_code == 403
    assert client.post(page(key, "revoke")).status_code == 403
    role_give(user, "admin")
    assert client.get(reverse("admin:feedback_apikey_add")).status_code == 200
    assert client.post(page(key, "revoke")).status_code == 302


def test_lists_of_records_say_figures_in_words(operator: Client) -> None:
    snapshot = Snapshot.objects.create(
        agent="widgets",
        kind="pairs",
        path="snapshots/x.jsonl",
        sha256="3f" * 32,
        feedback_count=9,
        simulated_share=0.5,
        counts={"train": 1071, "eval": 10},
    )
    page = operator.get("/admin/rl/snapshot/").text
    assert "1,071 train, 10 eval" in page
    assert snapshot.path not in page
    policy = make_policy("widgets")
    registry.artifact_register(
        policy, actor="test", path="exports/x.gguf", format="gguf", bytes=396_212_480, sha256="1e" * 32
    )
    page = operator.get("/admin/rl/artifact/").text
    assert "377.9\xa0MB" in page
    assert "1e1e" not in page
    figures = figures_paired([1.0, 1.0, 1.0, 0.0], [1.0, 0.0, 0.0, 0.0])
    BenchmarkResult.objects.create(
        policy=policy,
        task="ratchet_format",
        metric="acc",
        n=4,
        figures=figures,
        items={},
        chat_template=True,
        seconds=1,
    )
    assert "75.0%, base 25.0%" in operator.get("/admin/rl/benchmarkresult/").text
