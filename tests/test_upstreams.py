"""Upstreams: what is stored of them, where their API keys are, and the hosted policies that answer with them."""

import io
import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from django.core.management import CommandError
from django.db import DataError, connection
from django.test import Client

from feedback.accounts.roles import role_give
from rl.models import Policy, PolicyEvent, Upstream
from rl.registry.service import champion_of, policy_promote, policy_rollback
from rl.serving.upstream_test import upstream_test
from rl.upstreams import (
    KEY_FILE,
    UpstreamKeyMissing,
    UpstreamRefused,
    hosted_policy_create,
    key_env_fault,
    upstream_add,
    upstream_change,
    upstream_get,
    upstream_key,
    upstream_remove,
    upstream_represent,
    url_fault,
    url_warning,
)
from tests.support.api_client import ApiClient, error_of, person
from tests.support.registry_rows import make_policy
from tests.support.said import printed
from tests.support.said import printed as run
from tests.support.stub_openai import ModelServer

pytestmark = pytest.mark.django_db

KEY = "sk-test-0123456789abcdef"
VALUES = {"name": "openai", "url": "https://api.openai.com/v1/", "model": "gpt-5-mini"}


def stored_text() -> str:
    """The row of an upstream as the database has it."""
    with connection.cursor() as cursor:
        cursor.execute("SELECT * FROM rl_upstream")
        return str(cursor.fetchall())


def test_a_key_is_stored_encrypted_and_read_back(ratchet_home: Path) -> None:
    upstream = upstream_add(VALUES, KEY)
    assert upstream_key(Upstream.objects.get()) == KEY
    assert upstream.url == "https://api.openai.com/v1"
    assert KEY not in stored_text()
    assert (ratchet_home / KEY_FILE).stat().st_mode & 0o777 == 0o600
    assert KEY not in str(upstream_represent(upstream))
    assert upstream_represent(upstream)["key"] == "stored"


def test_a_key_of_another_key_file_asks_for_the_api_key_again(ratchet_home: Path) -> None:
    upstream = upstream_add(VALUES, KEY)
    (ratchet_home / KEY_FILE).unlink()
    with pytest.raises(UpstreamKeyMissing, match="Enter the API key again"):
        upstream_key(upstream)
    assert upstream_key(upstream_change(upstream, {}, KEY)) == KEY
    (ratchet_home / KEY_FILE).write_text("not a key")
    with pytest.raises(UpstreamKeyMissing, match="holds no key"):
        upstream_key(upstream)


@pytest.mark.parametrize("damaged", [False, True])
def test_a_key_file_that_cannot_be_used_is_said(ratchet_home: Path, operator: Client, damaged: bool) -> None:
    path = ratchet_home / KEY_FILE
    path.write_text("not a key") if damaged else path.mkdir()
    said = operator.post("/upstreams/", {**VALUES, "dialect": "openai", "key": KEY})
    assert said.status_code == 400
    assert "key" in said.context["fields"]
    assert error_of(ApiClient("operate").post("/api/upstreams/", {**VALUES, "key": KEY}))[
        "fields"
    ].keys() == {"key"}
    stored = Upstream.objects.create(**VALUES, key_encrypted="x")
    with pytest.raises(UpstreamKeyMissing, match=KEY_FILE) as missing:
        upstream_key(stored)
    assert str(ratchet_home) not in str(missing.value)
    assert operator.post("/upstreams/openai/", {"act": "test"}).status_code == 302


@pytest.mark.parametrize("key", ["sk-abcdef\nEvil: 1", "sk-abcdef-\u043a\u043b\u044e\u0447"])
def test_what_is_no_key_in_the_environment_is_not_sent_and_not_repeated(settings: Any, key: str) -> None:
    settings.UPSTREAM_KEY_OF = {"OPENAI_API_KEY": key}.get
    upstream = upstream_add({**VALUES, "key_env": "OPENAI_API_KEY"})
    with pytest.raises(UpstreamRefused) as refused:
        upstream_test(upstream)
    assert "OPENAI_API_KEY" in str(refused.value)
    assert "sk-abcdef" not in str(refused.value)


def test_a_key_in_the_environment_is_read_when_it_is_needed(settings: Any) -> None:
    upstream = upstream_add({**VALUES, "key_env": "OPENAI_API_KEY"})
    settings.UPSTREAM_KEY_OF = {"OPENAI_API_KEY": f"{KEY}\n"}.get
    assert upstream_key(upstream) == KEY
    settings.UPSTREAM_KEY_OF = {}.get
    with pytest.raises(UpstreamKeyMissing, match="OPENAI_API_KEY"):
        upstream_key(upstream)
    changed = upstream_change(upstream, {}, KEY)
    assert (changed.key_env, upstream_key(changed)) == ("", KEY)
    changed = upstream_change(upstream, {"key_env": "OPENAI_API_KEY"})
    assert (changed.key_env, changed.key_encrypted) == ("OPENAI_API_KEY", "")


NO_URLS = "ftp://api.openai.com api.openai.com/v1 https://user:pass@api.openai.com/v1 https://u@h/v1 https://"
NO_URLS += " https://h/v1?key=1 https://h/v1#a https://h:port/v1 https://[::1/v1"


def test_another_secret_or_what_is_no_base_url_is_refused() -> None:
    for name in ("SECRET_KEY", "AWS_SECRET_ACCESS_KEY", "DATABASE_URL", "PATH", "a b", "EMAIL_HOST_PASSWORD"):
        assert key_env_fault(name)
        with pytest.raises(UpstreamRefused) as refused:
            upstream_add({**VALUES, "key_env": name})
        assert set(refused.value.fields) == {"key_env"}
    for url in (*NO_URLS.split(), "https://h/a b"):
        assert url_fault(url), url
        with pytest.raises(UpstreamRefused) as refused:
            upstream_add({**VALUES, "url": url})
        assert set(refused.value.fields) == {"url"}


def test_plain_http_to_another_machine_is_warned_of() -> None:
    safe = (
        "https://api.openai.com/v1",
        "http://localhost:8000/v1",
        "http://127.0.0.1/v1",
        "http://[::1]:1/v1",
    )
    for url in (*safe, "http://10.0.0.7/v1", "http://models.example/v1"):
        assert (bool(url_warning(url)), url_fault(url)) == (url not in safe, "")


@pytest.mark.parametrize(
    ("values", "key", "field"),
    [
        ({"name": "Not a slug"}, "", "name"),
        ({"model": ""}, "", "model"),
        ({"dialect": "gemini"}, "", "dialect"),
        ({"timeout_s": 0}, "", "timeout_s"),
        ({"timeout_s": float("inf")}, "", "timeout_s"),
        ({"connect_timeout_s": float("nan")}, "", "connect_timeout_s"),
        ({"concurrency": 0}, "", "concurrency"),
        ({"concurrency": 2**31 - 1}, "", "concurrency"),
        ({"price_in": -1.0}, "", "price_in"),
        ({"price_out": 10**400}, "", "price_out"),
        ({"model": "a\x00b"}, "", "model"),
        ({"timeout_s": "soon"}, "", "timeout_s"),
        ({"key_encrypted": "x"}, "", "key_encrypted"),
        ({"key_env": "MY_KEY"}, KEY, "key"),
        ({}, "with a blank", "key"),
        ({}, "schlüssel", "key"),
    ],
)
def test_what_cannot_be_stored_names_its_field(values: dict[str, Any], key: str, field: str) -> None:
    with pytest.raises(UpstreamRefused) as refused:
        upstream_add({**VALUES, **values}, key)
    assert field in refused.value.fields
    assert key not in str(refused.value) or not key
    assert not Upstream.objects.exists()


def test_a_name_is_taken_once_and_kept() -> None:
    upstream = upstream_add(VALUES)
    with pytest.raises(UpstreamRefused) as refused:
        upstream_add(VALUES)
    assert refused.value.code == "conflict"
    with pytest.raises(UpstreamRefused):
        upstream_change(upstream, {"name": "other"})
    with pytest.raises(UpstreamRefused, match="there are openai"):
        upstream_get("other")


def test_of_two_at_once_one_gets_the_name(monkeypatch: pytest.MonkeyPatch) -> None:
    def too_late(one: Upstream) -> None:
        Upstream.objects.create(name=one.name, url=one.url, model="m-1")

    monkeypatch.setattr(Upstream, "full_clean", too_late)
    with pytest.raises(UpstreamRefused) as refused:
        upstream_add({"name": "lab", "url": "http://localhost:1/v1", "model": "m-1"})
    assert (refused.value.code, list(refused.value.fields)) == ("conflict", ["name"])
    assert Upstream.objects.count() == 1


@pytest.mark.parametrize("path", ["/api/upstreams/a%00b/", "/v1/models/a%00b", "/policies/a%00b/"])
def test_an_address_that_no_database_can_look_for_is_404(client: Client, path: str) -> None:
    assert client.get(path).status_code == 404


def test_a_query_with_nul_is_404(operator: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: Any, **__: Any) -> None:
        raise DataError("PostgreSQL text fields cannot contain NUL (0x00) bytes")

    monkeypatch.setattr("rl.views.runs.runs_newest", refused)
    assert operator.get("/runs/?agent=a%00b").status_code == 404
    operator.raise_request_exception = False
    assert operator.get("/runs/?agent=a").status_code == 500


def test_a_stored_key_is_not_sent_to_a_new_address_by_who_does_not_know_it() -> None:
    upstream = upstream_add(VALUES, KEY)
    with pytest.raises(UpstreamRefused) as refused:
        upstream_change(upstream, {"url": "https://elsewhere.example/v1"})
    assert set(refused.value.fields) == {"key"}
    assert upstream_change(upstream, {"url": "https://api.openai.com/v2"}).url.endswith("/v2")
    assert upstream_change(upstream, {"url": "https://elsewhere.example/v1"}, KEY).key_encrypted


def test_a_hosted_policy_answers_where_nothing_else_does() -> None:
    policy = hosted_policy_create("shop", upstream_add(VALUES), parameters={"temperature": 0.2}, actor="eve")
    assert (policy.name, policy.kind, policy.base_model) == ("shop-gpt-5-mini", "hosted", "gpt-5-mini")
    assert champion_of("shop") == policy
    kinds = list(PolicyEvent.objects.order_by("pk").values_list("kind", "actor"))
    assert kinds == [("registered", "eve"), ("promoted", "eve")]


def test_the_same_model_and_parameters_are_one_policy() -> None:
    upstream = upstream_add(VALUES)
    first = hosted_policy_create("shop", upstream, actor="eve")
    assert hosted_policy_create("shop", upstream, actor="eve") == first
    other = hosted_policy_create("shop", upstream, parameters={"temperature": 1}, actor="eve")
    assert (other.name, champion_of("shop")) == ("shop-gpt-5-mini.2", other)
    assert policy_rollback("shop", actor="eve") == first


def test_of_two_policies_at_once_each_has_a_name(monkeypatch: pytest.MonkeyPatch) -> None:
    upstream = upstream_add(VALUES)
    names = iter(["support-bot-gpt-5-mini", "support-bot-gpt-5-mini", "support-bot-gpt-5-mini.2"])
    monkeypatch.setattr("rl.upstreams.policy_name_free", lambda name: next(names))
    hosted_policy_create("support-bot", upstream, actor="ada")
    other = hosted_policy_create("support-bot", upstream, parameters={"seed": 1}, actor="ada")
    assert other.name == "support-bot-gpt-5-mini.2"


def test_an_upstream_that_was_removed_meanwhile_answers_for_nobody() -> None:
    upstream = upstream_add(VALUES)
    Upstream.objects.all().delete()
    with pytest.raises(UpstreamRefused, match="removed meanwhile") as refused:
        hosted_policy_create("shop", upstream, actor="eve")
    assert refused.value.code == "conflict"
    assert not Policy.objects.exists()


def test_recorded_answers_are_replaced_and_a_trained_champion_is_not() -> None:
    Policy.objects.create(name="your-model", agent="shop", kind="recorded", stage="champion")
    hosted = hosted_policy_create("shop", upstream_add(VALUES), actor="eve")
    assert champion_of("shop") == hosted
    trained = make_policy("shop")
    policy_promote(trained, "champion", actor="eve", force=True, reason="a test")
    later = hosted_policy_create("shop", Upstream.objects.get(), model="org/large:8b", actor="eve")
    assert (later.name, later.stage) == ("shop-org-large-8b", "candidate")
    assert champion_of("shop") == trained


@pytest.mark.parametrize(
    ("agent", "parameters", "field"), [("Not a slug", {}, "agent"), ("shop", {"messages": []}, "parameters")]
)
def test_a_hosted_policy_that_cannot_be(agent: str, parameters: dict[str, Any], field: str) -> None:
    with pytest.raises(UpstreamRefused) as refused:
        hosted_policy_create(agent, upstream_add(VALUES), parameters=parameters, actor="eve")
    assert set(refused.value.fields) == {field}
    assert not Policy.objects.exists()


def test_an_upstream_that_answers_for_a_policy_stays() -> None:
    upstream = upstream_add(VALUES, KEY)
    policy = hosted_policy_create("shop", upstream, actor="eve")
    with pytest.raises(UpstreamRefused, match=policy.name):
        upstream_remove(upstream)
    upstream_remove(upstream_add({**VALUES, "name": "spare"}))
    assert list(Upstream.objects.values_list("name", flat=True)) == ["openai"]


@pytest.fixture
def provider() -> Iterator[ModelServer]:
    server = ModelServer()
    server.said = "ready"
    yield server
    server.close()


def test_the_command_adds_and_removes(provider: ModelServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO(f"{KEY}\n"))
    added = json.loads(
        run("upstream", "add", "stub", "--url", provider.url, "--model", "m-1", "--key", "--json")
    )
    assert (added["key"], added["model"], added["policies"]) == ("stored", "m-1", [])
    assert upstream_key(upstream_get("stub")) == KEY
    tested = json.loads(run("upstream", "test", "stub", "--json"))
    assert (tested["answer"], tested["model"], tested["schemas"]) == ("ready", "m-1", "none")
    assert tested["latency_ms"] > 0
    listed = run("upstream", "list", "--json") + run("upstream", "list")
    assert "stub" in listed
    assert KEY not in listed
    assert json.loads(run("upstream", "remove", "stub", "--json")) == {"removed": "stub"}


@pytest.mark.parametrize(("statuses", "form"), [([], "json_schema"), ([200, 500, 500], "json_object")])
def test_the_test_finds_the_form_of_json(provider: ModelServer, statuses: list[int], form: str) -> None:
    """A server that does not know schemas answers 500, or refuses the request; its objects are taken then."""
    provider.said = '{"ready": true}'
    provider.statuses = statuses
    provider.error = {"message": "response_format is unknown", "param": "response_format"}
    upstream = upstream_add({"name": "stub", "url": provider.url, "model": "m-1"})
    assert upstream_test(upstream).schemas == form
    assert upstream_get("stub").schemas == form


def test_the_command_connects_an_agent(provider: ModelServer) -> None:
    options = ["--url", provider.url, "--model", "m-1", "--agent", "shop", "--json"]
    added = json.loads(run("upstream", "add", "stub", *options))
    assert (added["policy"], added["stage"]) == ("shop-m-1", "champion")
    with pytest.raises(CommandError, match="shop-m-1"):
        run("upstream", "remove", "stub")
    assert json.loads(run("upstream", "change", "stub", "--model", "m-2", "--json"))["model"] == "m-2"
    cool = ["change", "stub", "--agent", "shop", "--parameters", '{"temperature": 0.2}', "--json"]
    policy = Policy.objects.get(name=json.loads(run("upstream", *cool))["policy"])
    assert (policy.parameters, policy.stage) == ({"temperature": 0.2}, "champion")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["add", "stub"], "--url and --model"),
        (["test"], "expected a name"),
        (["list", "stub"], "expected no name"),
        (["test", "nobody"], "there are none yet"),
        (["add", "stub", "--url", "ftp://h", "--model", "m"], "url: expected"),
        (["add", "stub", "--url", "http://h", "--model", "m", "--key"], "found nothing"),
        (["list", "--parameters", "{}"], "expected --agent"),
        (["test", "nobody", "--agent", "shop", "--parameters", "[1]"], "expected a JSON object"),
        (["test", "nobody", "--agent", "shop", "--parameters", "{"], "expected a JSON object"),
    ],
)
def test_one_line_refusals(arguments: list[str], said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO(""))
    with pytest.raises(CommandError, match=said) as refused:
        run("upstream", *arguments)
    assert "\n" not in str(refused.value)


def test_rest_takes_a_key_and_never_gives_it_back(provider: ModelServer) -> None:
    api = ApiClient("operate")
    added = api.post("/api/upstreams/", {"name": "stub", "url": provider.url, "model": "m-1", "key": KEY})
    assert (added.status_code, added.json()["key"]) == (201, "stored")
    changed = api.client.patch(
        "/api/upstreams/stub/", json.dumps({"price_in": 0.25}), content_type="application/json"
    )
    tested = api.post("/api/upstreams/stub/test/", {})
    listed, read = api.get("/api/upstreams/"), api.get("/api/upstreams/stub/")
    assert (changed.json()["price_in"], tested.json()["answer"]) == (0.25, "ready")
    assert [one["name"] for one in listed.json()["results"]] == ["stub"]
    for response in (added, changed, tested, listed, read):
        assert response.status_code < 300
        assert KEY not in response.text
    assert upstream_key(upstream_get("stub")) == KEY
    assert api.client.delete("/api/upstreams/stub/").status_code == 204
    assert error_of(api.get("/api/upstreams/stub/"))["code"] == "not_found"


@pytest.mark.parametrize(
    ("body", "fields"),
    [
        ({"name": "stub"}, {"url", "model"}),
        ({**VALUES, "timeout_s": "soon"}, {"timeout_s"}),
        ({**VALUES, "timeout_s": True}, {"timeout_s"}),
        ({**VALUES, "timeout_s": 1e300, "price_in": -1}, {"timeout_s", "price_in"}),
        ({**VALUES, "dialect": "gemini", "concurrency": 0}, {"dialect", "concurrency"}),
        ({**VALUES, "key_encrypted": "x"}, {"key_encrypted"}),
        ({**VALUES, "model": "a\u0000b"}, {"model"}),
        ({**VALUES, "url": "https://user:secret@h/v1"}, {"url"}),
    ],
)
def test_rest_names_the_fields_it_refuses(body: dict[str, Any], fields: set[str]) -> None:
    response = ApiClient("operate").post("/api/upstreams/", body)
    assert response.status_code == 400
    assert set(error_of(response)["fields"]) == fields
    assert not Upstream.objects.exists()


def test_an_upstream_that_fails_says_why_without_its_key(provider: ModelServer) -> None:
    upstream_add({"name": "stub", "url": provider.url, "model": "m-1"}, KEY)
    provider.statuses = [401]
    provider.error = {"message": f"Incorrect API key provided: {KEY}", "code": "invalid_api_key"}
    response = ApiClient("operate").post("/api/upstreams/stub/test/", {})
    assert response.status_code == 409
    assert "Incorrect API key provided: [hidden]" in error_of(response)["message"]


def test_the_page_adds_changes_tests_and_removes(operator: Client, provider: ModelServer) -> None:
    sent = {"name": "stub", "url": provider.url, "model": "m-1", "dialect": "openai", "key": KEY}
    added = operator.post("/upstreams/", sent, follow=True)
    assert (added.status_code, key_of("stub")) == (200, KEY)
    operator.post("/upstreams/stub/", {"act": "change", "model": "m-2", "key": ""})
    assert (upstream_get("stub").model, key_of("stub")) == ("m-2", KEY)
    tested = operator.post("/upstreams/stub/", {"act": "test"}, follow=True)
    assert "ready" in tested.text
    assert KEY not in added.text + tested.text
    operator.post("/upstreams/stub/", {"act": "remove"})
    assert not Upstream.objects.exists()
    assert operator.post("/upstreams/stub/", {"act": "remove"}).status_code == 404


def key_of(name: str) -> str:
    return upstream_key(upstream_get(name))


def test_a_fault_on_the_page_keeps_what_was_typed_but_the_key(operator: Client) -> None:
    page = operator.post("/upstreams/", {**VALUES, "dialect": "openai", "url": "nonsense", "key": KEY})
    assert page.status_code == 400
    assert page.context["fields"].keys() == {"url"}
    assert "gpt-5-mini" in page.text
    assert KEY not in page.text


def test_the_admin_keeps_a_key_it_does_not_show(client: Client, ratchet_home: Path) -> None:
    staff = person("the-operator", "operator")
    role_give(staff, "operator")
    client.force_login(staff)
    usual = dict.fromkeys(("context_tokens", "price_in", "price_cached", "price_out", "key_env"), "")
    usual |= {
        "dialect": "openai",
        "schemas": "json_schema",
        "timeout_s": 60,
        "connect_timeout_s": 5,
        "concurrency": 8,
    }
    assert client.post("/admin/rl/upstream/add/", {**usual, **VALUES, "key": KEY}).status_code == 302
    row = upstream_get("openai")
    assert (upstream_key(row), row.concurrency) == (KEY, 8)
    address = f"/admin/rl/upstream/{row.pk}/change/"
    assert KEY not in client.get(address).text
    assert row.key_encrypted not in client.get(address).text
    assert client.post(address, {**usual, **VALUES, "model": "m-2", "key": ""}).status_code == 302
    assert (upstream_get("openai").model, key_of("openai")) == ("m-2", KEY)
    moved = client.post(address, {**usual, **VALUES, "url": "https://elsewhere.example/v1"})
    assert moved.status_code == 200
    assert "enter the API key again" in moved.text
    named = client.post(address, {**usual, **VALUES, "key_env": "OPENAI_API_KEY"})
    assert (named.status_code, upstream_get("openai").key_encrypted) == (302, "")
    with connection.cursor() as cursor:
        cursor.execute("SELECT change_message FROM django_admin_log")
        assert KEY not in str(cursor.fetchall())


def test_a_key_stands_in_no_log_page_export_or_dump(
    operator: Client, provider: ModelServer, caplog: pytest.LogCaptureFixture, capfd: Any
) -> None:
    """Whatever goes wrong: an error within a page, a refusal, a failing upstream."""
    operator.raise_request_exception = False
    with caplog.at_level(logging.DEBUG):
        upstream_add({"name": "stub", "url": provider.url, "model": "m-1"}, KEY)
        hosted_policy_create("shop", upstream_get("stub"), actor="eve")
        seen = operator.post("/upstreams/", {**VALUES, "key": f"{KEY} "}).text
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("rl.views.upstreams.upstream_add", lambda values, key: 1 / 0)
            broken = operator.post("/upstreams/", {**VALUES, "key": KEY})
            assert broken.status_code == 500
            seen += broken.text
        provider.statuses = [500, 500, 500]
        provider.error = {"message": f"no such key: {KEY}"}
        seen += operator.post("/upstreams/stub/", {"act": "test"}, follow=True).text
        for address in (
            *"/upstreams/ /policies/ /policies/shop-m-1/ /agents/shop/ /admin/rl/upstream/".split(),
        ):
            seen += operator.get(address).text
    dump = printed("dumpdata", "rl", "feedback", "admin")
    out, err = capfd.readouterr()
    assert KEY not in seen + caplog.text + dump + out + err
