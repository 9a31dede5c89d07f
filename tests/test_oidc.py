"""Sign-in by OpenID Connect, against a real small provider."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import httpx
import oidc_provider_mock
import pytest
from oidc_provider_mock._app import OpenIDCode

from tests.support.server import ROOT, Server, query

pytestmark = pytest.mark.slow

PEOPLE = {
    "ada": {"preferred_username": "ada", "groups": ["ml-admins", "ml"], "email": "ada@shop.example"},
    "bob": {
        "preferred_username": "bob",
        "groups": ["ml"],
        "email": "bob@shop.example",
        "email_verified": True,
    },
    "eve": {"preferred_username": "eve", "groups": ["sales"], "email": "ada@shop.example"},
    "ivy": {
        "preferred_username": "ivy",
        "groups": ["ml"],
        "email": "ivy@shop.example",
        "email_verified": True,
    },
    "off": {
        "preferred_username": "off",
        "groups": ["ml"],
        "email": "off@shop.example",
        "email_verified": True,
    },
    "mal": {"preferred_username": "Boss@shop.example", "groups": ["ml"], "email": "root@shop.example"},
    "boss": {
        "preferred_username": "boss",
        "groups": ["ml-admins"],
        "email": "boss@shop.example",
        "email_verified": True,
    },
    "root": {"preferred_username": "root", "groups": ["ml"], "email": "root@shop.example"},
}


INVITED = """
from django.contrib.auth.models import User
from feedback.accounts.sign_in import signin_link
for name in ("root", "ivy@shop.example", "off@shop.example"):  # the first person is a superuser
    signin_link(name, "http://localhost")
User.objects.filter(username="off@shop.example").update(is_active=False)
User.objects.filter(username="root").update(email="root@shop.example")
"""

SENT: list[str] = []
"""Addresses that the provider sent somebody back to."""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    home = tmp_path_factory.mktemp("oidc")
    claims = [oidc_provider_mock.User(sub=name, claims=facts) for name, facts in PEOPLE.items()]
    with oidc_provider_mock.run_server_in_thread(user_claims=claims) as provider:
        server = Server(f"sqlite:///{home / 'ratchet.sqlite3'}", home, workers=1)
        server.environment |= {
            "OIDC_ISSUER": f"http://localhost:{provider.server_port}",
            "OIDC_CLIENT_ID": "ratchet",
            "OIDC_CLIENT_SECRET": "secret",
            "OIDC_NAME": "Shop",
            "OIDC_ROLES": "ml-admins=admin,ml=operator",
            "OAUTHLIB_INSECURE_TRANSPORT": "1",
        }
        server.migrate()
        server.manage("migrate", "--verbosity", "0")
        server.manage("shell", "-c", INVITED)
        with server:
            yield server


def signed_in(
    site: Server, name: str, *, answer: str = "", client: httpx.Client | None = None, query: str = ""
) -> httpx.Response:
    """The page after the provider sent this person back. answer: in place of the provider's own."""
    client = client or httpx.Client(base_url=site.address, timeout=60)
    assert "Sign in with Shop" in client.get("/accounts/login/").text
    asked = client.get(f"/accounts/oidc/sso/login/{query}")
    assert asked.status_code == 302
    assert parse_qs(urlsplit(asked.headers["Location"]).query)["code_challenge_method"] == ["S256"]
    form = {"sub": name} if answer != "deny" else {"action": "deny"}
    back = httpx.post(asked.headers["Location"], data=form, timeout=60).headers["Location"]
    if answer == "forged":
        back = back.replace("state=", "state=x")
    SENT.append(back)
    return client.get(back)


def role_and_state(site: Server, username: str) -> list[tuple[str, int, int]]:
    return query(
        site,
        "SELECT g.name, u.is_staff, u.is_superuser FROM auth_user u JOIN auth_user_groups m ON m.user_id = u.id "
        f"JOIN auth_group g ON g.id = m.group_id WHERE u.username = '{username}'",
    )


def people(site: Server) -> int:
    return int(query(site, "SELECT count(*) FROM auth_user")[0][0])


@pytest.mark.parametrize(("name", "role"), [("ada", "admin"), ("bob", "operator")])
def test_a_person_is_added_with_the_highest_role_of_their_groups(site: Server, name: str, role: str) -> None:
    for _ in range(2):
        client = httpx.Client(base_url=site.address, timeout=60)
        assert signed_in(site, name, client=client).headers["Location"] == "/"
        assert client.get("/runs/").status_code == 200
        assert role_and_state(site, name) == [(role, 1, 0)]


def test_who_was_invited_under_the_address_keeps_the_account(site: Server) -> None:
    before = people(site)
    assert role_and_state(site, "ivy@shop.example") == [("rater", 0, 0)]
    assert signed_in(site, "ivy").status_code == 302
    assert (people(site), role_and_state(site, "ivy@shop.example")) == (before, [("operator", 1, 0)])


@pytest.mark.parametrize(("name", "answer"), [("eve", ""), ("bob", "deny"), ("bob", "forged"), ("off", "")])
def test_who_is_refused_is_told_and_nobody_is_added(site: Server, name: str, answer: str) -> None:
    before = people(site)
    client = httpx.Client(base_url=site.address, timeout=60)
    refused = signed_in(site, name, answer=answer, client=client)
    assert refused.status_code == 403
    assert 'role="alert"' in refused.text
    assert people(site) == before
    assert client.get("/runs/").status_code == 302


@pytest.mark.parametrize("claims", [{"exp": -60}, {"iss": "https://elsewhere.example"}])
def test_a_token_that_expired_or_is_anothers_signs_nobody_in(
    site: Server, monkeypatch: pytest.MonkeyPatch, claims: dict[str, Any]
) -> None:
    valid = OpenIDCode.get_jwt_config
    monkeypatch.setattr(
        OpenIDCode,
        "get_jwt_config",
        lambda self, *grant: valid(self, *grant) | claims,  # seconds from now
    )
    client = httpx.Client(base_url=site.address, timeout=60)
    refused = signed_in(site, "bob", client=client)
    assert (refused.status_code, 'role="alert"' in refused.text) == (403, True)
    assert client.get("/runs/").status_code == 302


def test_an_answer_of_the_provider_counts_once(site: Server) -> None:
    client = httpx.Client(base_url=site.address, timeout=60)
    signed_in(site, "bob", client=client)
    assert client.get(SENT[-1]).status_code == 403
    thief = httpx.Client(base_url=site.address, timeout=60)
    assert thief.get(SENT[-1]).status_code == 403
    assert thief.get("/runs/").status_code == 302


@pytest.mark.parametrize("name", ["root", "mal"])
def test_a_name_or_an_unverified_address_of_somebody_here_gives_another_account(
    site: Server, name: str
) -> None:
    client = httpx.Client(base_url=site.address, timeout=60)
    assert signed_in(site, name, client=client).headers["Location"] == "/"
    assert client.get("/people/").status_code == 403
    assert client.get("/runs/").status_code == 200
    named = "SELECT count(*) FROM auth_user WHERE email = 'root@shop.example' OR username = 'root'"
    assert query(site, named) == [(1,)]


def test_a_name_chosen_at_the_provider_catches_nobody_else(site: Server) -> None:
    signed_in(site, "mal")
    signed_in(site, "boss")
    assert role_and_state(site, "boss") == [("admin", 1, 0)]
    roles = "SELECT g.name FROM auth_user u JOIN auth_user_groups m ON m.user_id = u.id JOIN auth_group g "
    mal = query(site, roles + "ON g.id = m.group_id WHERE lower(u.username) LIKE 'boss@%'")
    assert mal == [("operator",)]


@pytest.mark.parametrize("wish", ["next=//evil.example/", "next=https://evil.example/", "process=connect"])
def test_nothing_in_the_address_leads_elsewhere(site: Server, wish: str) -> None:
    client = httpx.Client(base_url=site.address, timeout=60)
    assert signed_in(site, "bob", client=client, query=f"?{wish}").headers["Location"] == "/"
    assert client.get("/runs/").status_code == 200


def test_a_provider_that_is_away_is_told_on_the_sign_in_page(tmp_path: Path) -> None:
    server = Server(f"sqlite:///{tmp_path / 'ratchet.sqlite3'}", tmp_path, workers=1)
    server.environment |= {
        "OIDC_ISSUER": "http://127.0.0.1:9",
        "OIDC_CLIENT_ID": "a",
        "OIDC_CLIENT_SECRET": "b",
    }
    server.migrate()
    server.manage("migrate", "--verbosity", "0")
    with server:
        answer = httpx.get(f"{server.address}/accounts/oidc/sso/login/", timeout=60)
    assert (answer.status_code, 'role="alert"' in answer.text) == (403, True)


def test_it_is_off_unless_it_is_set_up(client: object, db: None) -> None:
    from django.test import Client

    assert Client().get("/accounts/oidc/sso/login/").status_code == 404
    assert b"Sign in with" not in Client().get("/accounts/login/").content


@pytest.mark.parametrize(
    ("variables", "fault"),
    [
        ({"OIDC_ISSUER": "http://localhost:1"}, "OIDC_CLIENT_ID"),
        ({"OIDC_ROLES": "ml=king"}, "rater, operator or admin"),
        ({"OIDC_ROLES": "ml"}, "pairs"),
        ({"OPENWEBUI_WEBHOOK_SECRET": "guess me"}, "24 bytes in base64"),
        ({"MLFLOW_TRACKING_URI": "http://ada:pw@mlflow"}, "must hold no password"),
    ],
)
def test_settings_that_cannot_work_are_refused(tmp_path: Path, variables: dict[str, str], fault: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", "import backend.settings"],
        env={**os.environ, "RATCHET_HOME": str(tmp_path), **variables},
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
    )
    assert done.returncode != 0
    assert fault in done.stderr
