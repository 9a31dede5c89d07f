"""Upstreams: what is stored of them, where their API keys are, and the hosted policies that answer with them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from django.db import connection

from rl.models import Policy, PolicyEvent, Upstream
from rl.registry.service import champion_of, policy_promote, policy_rollback
from rl.upstreams.hosted import hosted_policy_create
from rl.upstreams.keys import KEY_FILE, UpstreamKeyMissing, key_env_fault, key_hidden, upstream_key
from rl.upstreams.service import (
    UpstreamRefused,
    upstream_add,
    upstream_change,
    upstream_get,
    upstream_remove,
    upstream_represent,
    url_fault,
    url_warning,
)
from tests.test_pages import make_policy

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


def test_an_upstream_without_a_key_has_an_empty_one() -> None:
    assert upstream_key(upstream_add({**VALUES, "url": "http://localhost:11434/v1"})) == ""


@pytest.mark.parametrize(
    "name", ["SECRET_KEY", "AWS_SECRET_ACCESS_KEY", "DATABASE_URL", "PATH", "a b", "EMAIL_HOST_PASSWORD"]
)
def test_an_environment_variable_with_another_secret_is_refused(name: str) -> None:
    assert key_env_fault(name)
    with pytest.raises(UpstreamRefused) as refused:
        upstream_add({**VALUES, "key_env": name})
    assert set(refused.value.fields) == {"key_env"}


@pytest.mark.parametrize("name", ["OPENAI_API_KEY", "HF_TOKEN", "MY_KEY"])
def test_an_environment_variable_with_a_key_is_taken(name: str) -> None:
    assert key_env_fault(name) == ""


@pytest.mark.parametrize(
    "url",
    ["ftp://api.openai.com", "api.openai.com/v1", "https://user:pass@api.openai.com/v1", "https://u@h/v1", "https://",
     "https://h/v1?key=1", "https://h/v1#a", "https://h:port/v1", "https://[::1/v1", "https://h/a b"],
)  # fmt: skip
def test_an_address_that_is_no_base_url_is_refused(url: str) -> None:
    assert url_fault(url)
    with pytest.raises(UpstreamRefused) as refused:
        upstream_add({**VALUES, "url": url})
    assert set(refused.value.fields) == {"url"}


@pytest.mark.parametrize(
    ("url", "unsafe"),
    [
        ("https://api.openai.com/v1", False),
        ("http://localhost:8000/v1", False),
        ("http://127.0.0.1/v1", False),
        ("http://[::1]:1/v1", False),
        ("http://10.0.0.7/v1", True),
        ("http://models.example/v1", True),
    ],
)
def test_plain_http_to_another_machine_is_warned_of(url: str, unsafe: bool) -> None:
    assert bool(url_warning(url)) is unsafe
    assert url_fault(url) == ""


@pytest.mark.parametrize(
    ("values", "key", "field"),
    [
        ({"name": "Not a slug"}, "", "name"),
        ({"model": ""}, "", "model"),
        ({"dialect": "gemini"}, "", "dialect"),
        ({"timeout_s": 0}, "", "__all__"),
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


def test_a_stored_key_is_not_sent_to_a_new_address_by_who_does_not_know_it() -> None:
    upstream = upstream_add(VALUES, KEY)
    with pytest.raises(UpstreamRefused) as refused:
        upstream_change(upstream, {"url": "https://elsewhere.example/v1"})
    assert set(refused.value.fields) == {"key"}
    assert upstream_change(upstream, {"url": "https://api.openai.com/v2"}).url.endswith("/v2")
    assert upstream_change(upstream, {"url": "https://elsewhere.example/v1"}, KEY).key_encrypted


def test_what_an_upstream_says_loses_the_key_it_repeats() -> None:
    assert key_hidden(f"Incorrect API key provided: {KEY}.", KEY) == "Incorrect API key provided: [hidden]."
    assert key_hidden("no key", "") == "no key"


# --- Hosted policies ----------------------------------------------------------------------------------------


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
    spare = upstream_add({**VALUES, "name": "spare"})
    upstream_remove(spare)
    assert list(Upstream.objects.values_list("name", flat=True)) == ["openai"]
