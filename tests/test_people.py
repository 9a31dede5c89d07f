"""Signing in: one-time links, and no page without."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from io import StringIO
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from django.contrib.auth.models import User
from django.contrib.auth.tokens import default_token_generator
from django.core.management import CommandError, call_command
from django.test import Client

from feedback.accounts import sign_in
from feedback.accounts.sign_in import PeopleRefused, signin_link, signin_link_check, signin_link_redeem

pytestmark = pytest.mark.django_db

BASE = "http://localhost:8000"


def parts(url: str) -> tuple[str, str]:
    uid, token = urlsplit(url).path.strip("/").split("/")[-2:]
    return uid, token


def path(url: str) -> str:
    return urlsplit(url).path


def test_the_first_person_may_open_the_admin_and_later_ones_rate() -> None:
    assert signin_link("ada", BASE).operator
    assert not signin_link("bob", BASE).operator
    assert User.objects.get(username="ada").is_superuser
    assert not User.objects.get(username="bob").is_staff
    assert [group.name for group in User.objects.get(username="bob").groups.all()] == ["rater"]


def test_a_person_who_is_there_is_not_made_again() -> None:
    assert signin_link("ada", BASE).created
    assert not signin_link("ada", BASE).created
    assert User.objects.count() == 1


def test_a_new_person_has_no_password_to_guess() -> None:
    signin_link("ada", BASE)
    assert not User.objects.get().has_usable_password()


def test_opening_a_link_asks_and_does_not_sign_in(client: Client) -> None:
    url = signin_link("ada", BASE).url
    assert client.get(path(url)).status_code == 200
    assert "_auth_user_id" not in client.session
    assert signin_link_check(*parts(url)) is not None


def test_a_link_signs_in_once(client: Client) -> None:
    url = signin_link("ada", BASE).url
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


def test_a_link_runs_out(settings: Any) -> None:
    uid, token = parts(signin_link("ada", BASE).url)
    settings.PASSWORD_RESET_TIMEOUT = -1
    assert signin_link_check(uid, token) is None


def test_a_link_signs_in_nobody_else() -> None:
    _, token = parts(signin_link("ada", BASE).url)
    uid, _ = parts(signin_link("bob", BASE).url)
    assert signin_link_check(uid, token) is None


def test_a_link_does_not_reset_a_password() -> None:
    _, token = parts(signin_link("ada", BASE).url)
    assert not default_token_generator.check_token(User.objects.get(), token)


@pytest.mark.parametrize("uid", ["", "!!", "MQ", "bm90LWEtbnVtYmVy", "OTk5OTk5OTk5OTk5OTk5OTk5OTk5OTk5"])
def test_a_broken_link_is_refused(uid: str) -> None:
    assert signin_link_check(uid, "abc-def") is None


def test_a_person_who_is_switched_off_gets_no_link() -> None:
    url = signin_link("ada", BASE).url
    User.objects.update(is_active=False)
    assert signin_link_check(*parts(url)) is None
    with pytest.raises(PeopleRefused, match="inactive"):
        signin_link("ada", BASE)


@pytest.mark.parametrize("base", ["localhost:8000", "ftp://host", "http://", "javascript:alert(1)", ""])
def test_a_base_url_must_be_one(base: str) -> None:
    with pytest.raises(PeopleRefused, match="expected a base URL"):
        signin_link("ada", base)
    assert not User.objects.exists()


@pytest.mark.parametrize("name", ["", "a b", "a\x00b", "x" * 151, "<script>"])
def test_a_name_must_be_one(name: str) -> None:
    with pytest.raises(PeopleRefused, match="expected a name"):
        signin_link(name, BASE)


def test_the_command_prints_one_json_object() -> None:
    out = StringIO()
    call_command("login_link", "--user", "ada", "--base-url", "https://r.example/", "--json", stdout=out)
    found = json.loads(out.getvalue())
    assert found["url"].startswith("https://r.example/accounts/link/")
    assert (found["username"], found["created"], found["operator"]) == ("ada", True, True)


def test_the_command_refuses_in_one_line() -> None:
    with pytest.raises(CommandError, match=r"^expected a base URL .* found 'nowhere'$"):
        call_command("login_link", "--base-url", "nowhere")


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
