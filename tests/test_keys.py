"""Who gets in: API keys with scopes, and people by one-time links; no page without."""

import hashlib
import json
import os
import subprocess
import sys
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from django.contrib.auth.models import Group, User
from django.contrib.auth.tokens import default_token_generator
from django.core.management import CommandError, call_command
from django.db import connection
from django.test import Client
from django.test.utils import CaptureQueriesContext
from django.utils import timezone

from feedback.accounts import sign_in
from feedback.accounts.authentication import KeyRefused, key_check, key_create, key_revoke
from feedback.accounts.roles import RoleUnknown, role_give, user_scopes
from feedback.accounts.sign_in import PeopleRefused, signin_link, signin_link_check, signin_link_redeem
from feedback.cache import forget_all
from feedback.models import ApiKey
from tests.support import said
from tests.support.api_client import person

pytestmark = pytest.mark.django_db

command = partial(said.command, "api_key")


def test_a_key_is_stored_as_its_hash_and_found_by_what_was_shown_alone() -> None:
    row, secret = key_create("app", ["rate", "ingest"])
    assert (len(secret), secret[:3]) == (43, "rk_")
    assert key_create("b", ["read"])[1] != secret
    row.refresh_from_db()
    stored = json.dumps({f.name: str(getattr(row, f.name)) for f in ApiKey._meta.concrete_fields})
    assert secret[11:] not in stored
    assert row.key_hash == hashlib.sha256(secret.encode()).hexdigest()
    found = key_check(secret)
    assert (found.pk, found.scopes) == (row.pk, ["ingest", "rate"])
    same_beginning = secret[:11] + ("B" if secret[11] == "A" else "A") * 32
    for other in (secret[:-1], secret + "x", "rk_" + "A" * 40, "", secret.upper(), same_beginning):
        assert key_check(other) is None


def test_a_revoked_key_ends_here_at_once_and_elsewhere_when_its_memory_does(settings: Any) -> None:
    _, elsewhere = key_create("elsewhere", ["ingest"])
    assert key_check(elsewhere) is not None
    ApiKey.objects.filter(name="elsewhere").update(revoked_at=timezone.now())
    assert key_check(elsewhere) is not None, "within FEEDBACK_REMEMBER_S the process goes by what it read"
    settings.FEEDBACK_REMEMBER_S = 0
    assert key_check(elsewhere) is None
    settings.FEEDBACK_REMEMBER_S = 60
    _, here = key_create("here", ["ingest"])
    assert key_check(here) is not None
    key_revoke("here")
    assert key_check(here) is None


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
    assert row.last_used_at > long_ago


def test_a_key_that_cannot_be_made_says_why() -> None:
    key_create("taken", ["read"])
    key_revoke("taken")  # a name is used once, even after that
    bad: list[tuple[str, list[str], str]] = [("app", ["write"], "scopes"), ("app", [], "scopes")]
    for name, scopes, field in (
        *bad,
        *((name, ["read"], "name") for name in ("", "x" * 101, "a\x00b", "taken")),
    ):
        with pytest.raises(KeyRefused) as refusal:
            key_create(name, scopes)
        assert list(refusal.value.fields) == [field]
    assert ApiKey.objects.count() == 1


def test_the_command_prints_the_key_once_and_lists_none() -> None:
    made = command("create", "app", "--scopes", "rate, ingest")
    assert made["scopes"] == ["ingest", "rate"]
    assert key_check(made["key"]) is not None
    listed = command("list")
    assert [key["name"] for key in listed["keys"]] == ["app"]
    assert made["key"] not in json.dumps(listed)
    with pytest.raises(CommandError, match="app"):
        command("revoke", "ap")
    assert command("revoke", "app")["revoked_at"] is not None
    assert key_check(made["key"]) is None


def test_a_role_gives_its_scopes_and_only_an_admin_may_change_people_and_keys() -> None:
    every = {"ingest", "rate", "read", "operate"}
    held = {}
    for role, scopes in {"rater": {"rate"}, "operator": every, "admin": every}.items():
        user = person(role, role)
        assert user_scopes(user) == scopes
        user.is_active = False
        user.save()
        assert user_scopes(User.objects.get(pk=user.pk)) == frozenset()
        permissions = Group.objects.get(name=role).permissions.all()
        held[role] = {f"{p.content_type.app_label}.{p.codename}" for p in permissions}
    assert user_scopes(User.objects.create_user("ada")) == frozenset()
    assert held["rater"] == {"feedback.add_rating", "feedback.add_comparison"}
    assert {"auth.change_user", "feedback.add_apikey"} <= held["admin"] - held["operator"]
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


BASE = "http://localhost:8000"


def parts(url: str) -> tuple[str, str]:
    uid, token = urlsplit(url).path.strip("/").split("/")[-2:]
    return uid, token


def path(url: str) -> str:
    return urlsplit(url).path


def test_the_first_person_may_open_the_admin_and_later_ones_rate() -> None:
    first, later = signin_link("ada", BASE), signin_link("bob", BASE)
    assert (first.operator, first.created, later.operator) == (True, True, False)
    ada, bob = User.objects.order_by("username")
    assert (ada.is_superuser, ada.has_usable_password(), bob.is_staff) == (True, False, False)
    assert [group.name for group in bob.groups.all()] == ["rater"]
    assert not signin_link("ada", BASE).created
    assert User.objects.count() == 2


def test_a_link_asks_when_opened_and_signs_in_once(client: Client) -> None:
    url = signin_link("ada", BASE).url
    assert client.get(path(url)).status_code == 200
    assert "_auth_user_id" not in client.session
    assert signin_link_check(*parts(url)) is not None
    answer = client.post(path(url))
    assert (answer.status_code, answer["Location"]) == (302, "/")
    assert client.session["_auth_user_id"] == str(User.objects.get().pk)
    other = Client()
    assert other.post(path(url)).status_code == 410
    assert "_auth_user_id" not in other.session


def test_two_requests_with_one_link_at_once_sign_in_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both pass the check before either signs in; the conditional UPDATE lets one of them through."""
    uid, token = parts(signin_link("ada", BASE).url)
    checked = [signin_link_check(uid, token), signin_link_check(uid, token)]
    assert None not in checked
    monkeypatch.setattr(sign_in, "signin_link_check", lambda *_: checked.pop())
    assert signin_link_redeem(uid, token) is not None
    assert signin_link_redeem(uid, token) is None


def test_two_links_made_within_a_second_both_end_with_the_first_sign_in() -> None:
    signin_link_redeem(*parts(signin_link("ada", BASE).url))
    second = parts(signin_link("ada", BASE).url)
    third = parts(signin_link("ada", BASE).url)
    assert signin_link_redeem(*second) is not None
    assert signin_link_redeem(*third) is None


def test_a_link_is_for_one_person_for_a_time_and_for_signing_in_alone(settings: Any) -> None:
    uid, token = parts(signin_link("ada", BASE).url)
    other, _ = parts(signin_link("bob", BASE).url)
    assert not default_token_generator.check_token(User.objects.get(username="ada"), token)
    for broken in (other, "", "!!", "MQ", "bm90LWEtbnVtYmVy", "OTk5OTk5OTk5OTk5OTk5OTk5OTk5OTk5"):
        assert signin_link_check(broken, token if broken == other else "abc-def") is None
    assert signin_link_check(uid, token) is not None
    settings.PASSWORD_RESET_TIMEOUT = -1
    assert signin_link_check(uid, token) is None
    settings.PASSWORD_RESET_TIMEOUT = 3600
    User.objects.update(is_active=False)
    assert signin_link_check(uid, token) is None
    with pytest.raises(PeopleRefused, match="inactive"):
        signin_link("ada", BASE)


def test_a_link_needs_a_base_url_and_a_name() -> None:
    for base in ("localhost:8000", "ftp://host", "http://", "javascript:alert(1)", ""):
        with pytest.raises(PeopleRefused, match="a base URL"):
            signin_link("ada", base)
    for name in ("", "a b", "a\x00b", "x" * 151, "<script>"):
        with pytest.raises(PeopleRefused, match="a name"):
            signin_link(name, BASE)
    with pytest.raises(CommandError, match=r"^[^\n]*'nowhere'$"):
        call_command("login_link", "--base-url", "nowhere")
    assert not User.objects.exists()
    found = said.command("login_link", "--user", "ada", "--base-url", "https://r.example/")
    assert found["url"].startswith("https://r.example/accounts/link/")
    assert (found["username"], found["created"], found["operator"]) == ("ada", True, True)


def test_signing_in_by_password(client: Client) -> None:
    User.objects.create_user("ada", password="correct horse")
    wrong = client.post("/accounts/login/", {"username": "ada", "password": "wrong"})
    assert "correct username and password" in wrong.text
    right = client.post("/accounts/login/?next=/runs/", {"username": "ada", "password": "correct horse"})
    assert (right.status_code, right["Location"]) == (302, "/runs/")
    assert client.get("/accounts/login/").status_code == 302


@pytest.mark.slow
def test_the_web_process_leaves_torch_alone(tmp_path: Path) -> None:
    """Started as gunicorn starts it, with a page served, in a process of its own."""
    code = (
        "import sys\n"
        "from backend.wsgi import application\n"
        "from django.core.management import call_command\n"
        "call_command('migrate', verbosity=0)\n"
        "from django.contrib.auth.models import User\n"
        "from django.test import Client\n"
        "from rl.management.simulation import simulate\n"
        "simulate('widgets', scenarios=2)\n"
        "client = Client(HTTP_HOST='localhost')\n"
        "client.force_login(User.objects.create_superuser('ada'))\n"
        "for page in ('/', '/rate/', '/runs/', '/admin/', '/admin/rl/policy/'):\n"
        "    assert client.get(page).status_code == 200, page\n"
        "heavy = {'torch', 'transformers', 'trl', 'peft', 'datasets', 'accelerate', 'llama_cpp', 'matplotlib'}\n"
        "sys.exit(repr(sorted(heavy & set(sys.modules))) if heavy & set(sys.modules) else 0)\n"
    )
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code],
        cwd=Path(__file__).resolve().parent.parent,
        env={**os.environ, "RATCHET_HOME": str(tmp_path / "web"), "DATABASE_URL": ""},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
