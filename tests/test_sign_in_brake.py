"""The brake on sign-in: per account and address, for passwords and links, alike for people who are not there."""

from datetime import timedelta
from typing import Any
from urllib.parse import urlsplit

import pytest
from axes.models import AccessAttempt
from django.contrib.auth import hashers
from django.contrib.auth.models import User
from django.db import connection
from django.test import Client, RequestFactory
from django.test.utils import CaptureQueriesContext

from backend.http import client_address
from feedback.accounts.sign_in import signin_link

pytestmark = pytest.mark.django_db

PASSWORD = "correct horse"
DOORS = ["/accounts/login/", "/admin/login/"]


@pytest.fixture(autouse=True)
def three_failures(settings: Any) -> Any:
    """Three under a name, five from an address; hashes that take no time."""
    settings.AXES_FAILURE_LIMIT = 3
    settings.SIGN_IN_FAILURES_OF_ADDRESS = 5
    settings.PASSWORD_HASHERS = ["django.contrib.auth.hashers.MD5PasswordHasher"]
    return settings


@pytest.fixture
def ada() -> User:
    return User.objects.create_superuser("ada", password=PASSWORD)


def attempt(name: str, password: str = "wrong", *, door: str = DOORS[0], address: str = "10.0.0.1") -> Any:
    return Client(REMOTE_ADDR=address).post(door, {"username": name, "password": password})


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("name", ["ada", "nobody"])
def test_an_account_is_shut_after_three_failures(ada: User, door: str, name: str) -> None:
    answers = [attempt(name, door=door, address=f"10.0.0.{n}") for n in range(4)]
    assert [answer.status_code for answer in answers] == [200, 200, 429, 429]
    assert answers[3]["Retry-After"] == "900"
    assert "Try again in 15 minutes" in answers[3].text
    right = attempt(name, PASSWORD, door=door, address="10.0.0.9")
    assert right.status_code == 429
    assert right.text == answers[3].text
    assert "sessionid" not in right.cookies


def test_an_address_is_sent_away_after_five_failures_under_any_names(ada: User) -> None:
    answers = [attempt(f"name-{n}", address="10.0.0.1").status_code for n in range(6)]
    assert answers == [200, 200, 200, 200, 429, 429]
    assert attempt("ada", PASSWORD, address="10.0.0.1").status_code == 429
    assert attempt("ada", PASSWORD, address="10.0.0.2").status_code == 302


def test_it_ends_after_the_wait_and_is_not_made_longer_by_trying(ada: User, settings: Any) -> None:
    for _ in range(6):
        attempt("ada")
    assert AccessAttempt.objects.get().failures_since_start == 3
    AccessAttempt.objects.update(
        attempt_time=AccessAttempt.objects.get().attempt_time - timedelta(minutes=16)
    )
    assert attempt("ada", PASSWORD).status_code == 302


def test_who_signs_in_rightly_does_not_clear_the_address(ada: User) -> None:
    """Else whoever has one account could guess at others for ever."""
    for n in range(4):
        attempt(f"name-{n}")
    assert attempt("ada", PASSWORD).status_code == 302
    assert attempt("name-9").status_code == 429


@pytest.mark.parametrize("who", ["known", "unknown", "switched off", "without a password"])
def test_a_wrong_password_costs_the_same(who: str, ada: User, monkeypatch: pytest.MonkeyPatch) -> None:
    """One hash and as many queries, which are what takes time."""
    User.objects.create_user("off", password=PASSWORD, is_active=False)
    User.objects.create_user("linked").set_unusable_password()
    name = {"known": "ada", "unknown": "nobody", "switched off": "off", "without a password": "linked"}[who]
    hashed = []
    encode = hashers.MD5PasswordHasher.encode
    monkeypatch.setattr(
        hashers.MD5PasswordHasher, "encode", lambda *given: (hashed.append(1), encode(*given))[1]
    )
    with CaptureQueriesContext(connection) as queries:
        assert attempt(name).status_code == 200
    assert len(hashed) == 1
    first = len(queries)
    with CaptureQueriesContext(connection) as queries:
        attempt("somebody else")
    assert len(queries) == first


def link(name: str) -> str:
    return urlsplit(signin_link(name, "http://localhost").url).path


def follow(path: str, *, method: str = "post", address: str = "10.0.0.1") -> Any:
    return getattr(Client(REMOTE_ADDR=address), method)(path)


def broken(path: str, n: int) -> str:
    return f"{path.rstrip('/')[:-6]}{n:06}/"


@pytest.mark.parametrize("method", ["get", "post"])
def test_links_of_a_person_are_sent_away_after_three_failures(method: str) -> None:
    good = link("ada")
    answers = [follow(broken(good, n), method=method, address=f"10.0.0.{n}").status_code for n in range(4)]
    assert answers == [410, 410, 429, 429]
    assert follow(good).status_code == 429
    assert follow(good.replace("/MQ/", "/MQ==/")).status_code in (404, 429)  # the same person, padded


def test_links_from_an_address_are_sent_away_after_five_failures() -> None:
    good = link("ada")
    answers = [
        follow(f"/accounts/link/{uid}/abc-def/").status_code for uid in ("MTE", "MTI", "MTM", "!", "x", "y")
    ]
    assert answers == [410, 410, 410, 410, 429, 429]
    assert follow(good).status_code == 429
    assert follow(good, address="10.0.0.2").status_code == 302


def test_a_new_link_lets_its_person_go(ada: User) -> None:
    """Else anybody could keep anybody out."""
    first = link("ada")
    for n in range(3):
        attempt("ada", address=f"10.0.1.{n}")
        follow(broken(first, n), address=f"10.0.2.{n}")
    assert attempt("ada", PASSWORD, address="10.0.3.1").status_code == 429
    assert follow(link("ada"), address="10.0.3.1").status_code == 302
    assert attempt("ada", PASSWORD, address="10.0.3.1").status_code == 302


def test_no_token_or_password_is_kept_of_a_failure(ada: User) -> None:
    path = broken(link("ada"), 7)
    follow(path)
    attempt("ada", "S3CRET-password")
    kept = repr(list(AccessAttempt.objects.values()))
    assert AccessAttempt.objects.count() == 2
    assert path.rstrip("/").rpartition("/")[2] not in kept
    assert "S3CRET" not in kept


@pytest.mark.parametrize(
    ("proxies", "forwarded", "remote", "believed"),
    [
        (0, "1.2.3.4", "10.0.0.1", "10.0.0.1"),
        (1, "6.6.6.6, 1.2.3.4", "10.0.0.1", "1.2.3.4"),
        (2, "6.6.6.6, 1.2.3.4, 10.0.0.2", "10.0.0.1", "1.2.3.4"),
        (2, "1.2.3.4", "10.0.0.1", "10.0.0.1"),
        (1, "nonsense", "10.0.0.1", "10.0.0.1"),
        (1, "", "10.0.0.1", "10.0.0.1"),
        (0, "", "2001:db8:1:2:3:4:5:6", "2001:db8:1:2::"),
        (0, "", "::ffff:10.0.0.1", "10.0.0.1"),
        (0, "", "", None),
    ],
)
def test_the_address(settings: Any, proxies: int, forwarded: str, remote: str, believed: str | None) -> None:
    settings.NUM_PROXIES = proxies
    request = RequestFactory().get("/", HTTP_X_FORWARDED_FOR=forwarded, REMOTE_ADDR=remote)
    assert client_address(request) == believed
