"""API keys: shown once, kept as a hash, limited by scopes, revoked within seconds; and the roles of people."""

from __future__ import annotations

import hashlib
import io
import json
from datetime import timedelta
from typing import Any

import pytest
from django.contrib.auth.models import Group, User
from django.core.management import CommandError, call_command
from django.db import connection
from django.test.utils import CaptureQueriesContext
from django.utils import timezone

from feedback.accounts.authentication import KeyRefused, key_check, key_create, key_revoke
from feedback.accounts.roles import RoleUnknown, role_give, user_scopes
from feedback.cache import forget_all
from feedback.models import ApiKey
from tests.support.api_client import person

pytestmark = pytest.mark.django_db


def command(*arguments: str) -> dict[str, Any]:
    out = io.StringIO()
    call_command("api_key", *arguments, "--json", stdout=out)
    found: dict[str, Any] = json.loads(out.getvalue())
    return found


def test_only_the_hash_of_a_key_is_stored() -> None:
    row, secret = key_create("app", ["ingest"])
    assert len(secret) == 43
    assert secret.startswith("rk_")
    row.refresh_from_db()
    stored = json.dumps({f.name: str(getattr(row, f.name)) for f in ApiKey._meta.concrete_fields})
    assert secret not in stored
    assert secret[11:] not in stored
    assert row.key_hash == hashlib.sha256(secret.encode()).hexdigest()


def test_two_keys_differ() -> None:
    assert key_create("a", ["read"])[1] != key_create("b", ["read"])[1]


def test_a_key_is_found_by_what_was_shown() -> None:
    row, secret = key_create("app", ["rate", "ingest"])
    found = key_check(secret)
    assert found is not None
    assert found.pk == row.pk
    assert found.scopes == ["ingest", "rate"]


@pytest.mark.parametrize(
    "change", [lambda s: s[:-1], lambda s: s + "x", lambda s: "rk_" + "A" * 40, lambda s: "", str.upper]
)
def test_a_key_that_differs_is_none(change: Any) -> None:
    _, secret = key_create("app", ["ingest"])
    assert key_check(change(secret)) is None


def test_the_same_beginning_is_not_enough() -> None:
    _, secret = key_create("app", ["ingest"])
    other = secret[:11] + ("B" if secret[11] == "A" else "A") * 32
    assert key_check(other) is None


def test_a_revoked_key_ends_at_once_in_this_process() -> None:
    _, secret = key_create("app", ["ingest"])
    assert key_check(secret) is not None
    key_revoke("app")
    assert key_check(secret) is None


def test_a_key_revoked_elsewhere_ends_when_its_memory_does(settings: Any) -> None:
    _, secret = key_create("app", ["ingest"])
    assert key_check(secret) is not None
    ApiKey.objects.filter(name="app").update(revoked_at=timezone.now())
    assert key_check(secret) is not None, "within FEEDBACK_REMEMBER_S the process goes by what it read"
    settings.FEEDBACK_REMEMBER_S = 0
    assert key_check(secret) is None


def test_checking_again_asks_the_database_nothing() -> None:
    _, secret = key_create("app", ["ingest"])
    key_check(secret)
    with CaptureQueriesContext(connection) as queries:
        assert key_check(secret) is not None
        assert key_check("rk_" + "x" * 39) is None
    assert len(queries) == 0


def test_the_time_of_use_is_written_at_most_once_a_minute() -> None:
    row, secret = key_create("app", ["ingest"])
    key_check(secret)
    row.refresh_from_db()
    first = row.last_used_at
    assert first is not None
    forget_all()
    key_check(secret)
    row.refresh_from_db()
    assert row.last_used_at == first
    long_ago = timezone.now() - timedelta(minutes=2)
    ApiKey.objects.filter(pk=row.pk).update(last_used_at=long_ago)
    forget_all()
    key_check(secret)
    row.refresh_from_db()
    assert row.last_used_at is not None
    assert row.last_used_at > long_ago


@pytest.mark.parametrize(
    ("name", "scopes", "field"),
    [
        ("app", ["write"], "scopes"),
        ("app", [], "scopes"),
        ("", ["read"], "name"),
        ("x" * 101, ["read"], "name"),
        ("a\x00b", ["read"], "name"),
    ],
)
def test_a_key_that_cannot_be_made_says_why(name: str, scopes: list[str], field: str) -> None:
    with pytest.raises(KeyRefused) as refusal:
        key_create(name, scopes)
    assert list(refusal.value.fields) == [field]
    assert ApiKey.objects.count() == 0


def test_a_name_is_used_once_even_after_revocation() -> None:
    key_create("app", ["read"])
    key_revoke("app")
    with pytest.raises(KeyRefused, match="already"):
        key_create("app", ["read"])


def test_the_command_prints_the_key_once_and_lists_none() -> None:
    made = command("create", "app", "--scopes", "rate, ingest")
    assert made["scopes"] == ["ingest", "rate"]
    assert key_check(made["key"]) is not None
    listed = command("list")
    assert [key["name"] for key in listed["keys"]] == ["app"]
    assert made["key"] not in json.dumps(listed)
    assert command("revoke", "app")["revoked_at"] is not None
    assert key_check(made["key"]) is None


def test_revoking_an_unknown_key_names_the_known_ones() -> None:
    key_create("app", ["read"])
    with pytest.raises(CommandError, match="app"):
        command("revoke", "ap")


# --- Roles ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("role", "scopes"),
    [
        ("rater", {"rate"}),
        ("operator", {"ingest", "rate", "read", "operate"}),
        ("admin", {"ingest", "rate", "read", "operate"}),
    ],
)
def test_a_role_gives_its_scopes(role: str, scopes: set[str]) -> None:
    assert user_scopes(person("ada", role)) == scopes


def test_no_role_gives_no_scope() -> None:
    assert user_scopes(User.objects.create_user("ada")) == frozenset()


def test_an_account_that_is_switched_off_has_no_scope() -> None:
    user = person("ada", "operator")
    user.is_active = False
    user.save()
    assert user_scopes(User.objects.get(pk=user.pk)) == frozenset()


def test_only_an_admin_may_change_people_and_keys() -> None:
    held = {
        role: {
            f"{p.content_type.app_label}.{p.codename}" for p in Group.objects.get(name=role).permissions.all()
        }
        for role in ("rater", "operator", "admin")
    }
    assert held["rater"] == {"feedback.add_rating", "feedback.add_comparison"}
    assert {"auth.change_user", "feedback.add_apikey"} & held["operator"] == set()
    assert {"auth.change_user", "feedback.add_apikey"} <= held["admin"]
    assert held["rater"] < held["operator"] < held["admin"]


def test_a_new_role_replaces_the_old_one() -> None:
    user = person("ada", "rater")
    role_give(user, "operator")
    assert [group.name for group in user.groups.all()] == ["operator"]
    assert user.is_staff
    role_give(user, "rater")
    assert not User.objects.get(pk=user.pk).is_staff
    with pytest.raises(RoleUnknown, match="rater, operator, admin"):
        role_give(user, "boss")
