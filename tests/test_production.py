"""The production mode of docs/settings.md; no secrets in the log; a data folder that is its owner's."""

from __future__ import annotations

import logging
import os
import re
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from django.core.checks import run_checks
from django.test import Client

from backend import settings as backend_settings
from backend.installation import home_private
from backend.logs import SecretsHidden

ROOT = Path(__file__).resolve().parent.parent


def documented_mode() -> dict[str, str]:
    """The `.env` of docs/settings.md, with a key and a database that are there."""
    section = (ROOT / "docs/settings.md").read_text().split("## In production")[1]
    match = re.search(r"```sh\n(.*?)```", section, re.S)
    assert match is not None
    mode = dict(line.split("=", 1) for line in match[1].splitlines())
    return {**mode, "SECRET_KEY": "k3y-" * 15 + "ABCdef", "DATABASE_URL": ""}


def deploy_check(environment: dict[str, str], home: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "manage.py", "check", "--deploy", "--fail-level", "WARNING"],
        cwd=ROOT, env={**os.environ, "RATCHET_HOME": str(home), **environment}, capture_output=True, text=True,
    )  # fmt: skip


@pytest.mark.campaign
def test_the_documented_mode_has_nothing_left_to_say(tmp_path: Path) -> None:
    done = deploy_check(documented_mode(), tmp_path / "home")
    assert done.returncode == 0, done.stderr
    assert "no issues (0 silenced)" in done.stdout


def test_without_https_only_the_check_names_what_is_missing(settings: Any) -> None:
    settings.SECURE_SSL_REDIRECT = settings.SESSION_COOKIE_SECURE = settings.CSRF_COOKIE_SECURE = False
    settings.SECURE_HSTS_SECONDS = 0
    found = {warning.id for warning in run_checks(tags=["security"], include_deployment_checks=True)}
    assert {f"security.{code}" for code in ("W004", "W008", "W012", "W016")} <= found


# --- Behind a proxy -----------------------------------------------------------------------------------------


@pytest.fixture
def production(settings: Any) -> Any:
    settings.SECURE_SSL_REDIRECT = True
    settings.SECURE_HSTS_SECONDS = 31_536_000
    settings.SECURE_PROXY_SSL_HEADER = ("HTTP_X_FORWARDED_PROTO", "https")
    return settings


@pytest.mark.django_db
def test_http_is_sent_to_https_and_probes_are_answered(production: Any, client: Client) -> None:
    away = client.get("/accounts/login/")
    assert (away.status_code, away["Location"]) == (301, "https://testserver/accounts/login/")
    assert client.get("/healthz").status_code == 200
    behind = client.get("/accounts/login/", headers={"X-Forwarded-Proto": "https"})
    assert behind.status_code == 200
    assert behind["Strict-Transport-Security"] == "max-age=31536000"


@pytest.mark.django_db
def test_without_proxies_nobody_is_believed_to_speak_https(settings: Any, client: Client) -> None:
    assert settings.SECURE_PROXY_SSL_HEADER is None
    settings.SECURE_SSL_REDIRECT = True
    answer = client.get("/accounts/login/", headers={"X-Forwarded-Proto": "https"})
    assert answer.status_code == 301


# --- Secrets ------------------------------------------------------------------------------------------------

KEY = "rk_abcdefgh" + "S" * 32


@pytest.mark.parametrize(
    ("line", "shown"),
    [
        ("Forbidden: /accounts/link/MQ/c0ffee-S3CRET/", "Forbidden: /accounts/link/MQ/[hidden]/"),
        (f"Authorization: Bearer {KEY}", "Authorization: Bearer rk_abcdefgh[hidden]"),
        ("authorization: bearer S3CRET", "authorization: bearer [hidden]"),
        ("cookie sessionid=S3CRET; csrftoken=S3CRET", "cookie sessionid=[hidden]; csrftoken=[hidden]"),
        ("postgres://ratchet:S3CRET@db:5432/x", "postgres://ratchet:[hidden]@db:5432/x"),
        ("http://localhost:8000/decisions/?q=a@b", "http://localhost:8000/decisions/?q=a@b"),
        ("a decision of policy widgets-v1 at 10:31:02", "a decision of policy widgets-v1 at 10:31:02"),
    ],
)
def test_a_line_of_the_log_shows_no_secret(line: str, shown: str) -> None:
    record = logging.LogRecord("rl", logging.ERROR, __file__, 1, "%s", (line,), None)
    assert SecretsHidden("{message}", style="{").format(record) == shown


def test_a_traceback_shows_no_secret() -> None:
    try:
        raise ValueError(f"cannot read {KEY}")
    except ValueError:
        record = logging.LogRecord("rl", logging.ERROR, __file__, 1, "failed", (), sys.exc_info())
    text = SecretsHidden("{message}", style="{").format(record)
    assert "cannot read rk_abcdefgh[hidden]" in text
    assert KEY not in text


def test_every_handler_hides_secrets(settings: Any) -> None:
    for handler in settings.LOGGING["handlers"].values():
        assert settings.LOGGING["formatters"][handler["formatter"]]["()"] == "backend.logs.SecretsHidden"


# --- The data folder ----------------------------------------------------------------------------------------


def test_the_data_folder_is_its_owners(tmp_path: Path) -> None:
    home = tmp_path / "new" / "home"
    home_private(home)
    assert home.stat().st_mode & 0o777 == 0o700
    home.chmod(0o755)
    home_private(home)
    assert home.stat().st_mode & 0o777 == 0o700
    home.chmod(0o750)  # opened to a group by somebody
    home_private(home)
    assert home.stat().st_mode & 0o777 == 0o750


def test_a_process_makes_its_data_folder_private(tmp_path: Path) -> None:
    home = tmp_path / "open"
    home.mkdir()
    home.chmod(0o755)
    code = "import os; os.umask(0); import backend.settings"
    subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, check=True,
        env={**os.environ, "RATCHET_HOME": str(home), "DJANGO_SETTINGS_MODULE": "backend.settings"},
    )  # fmt: skip
    assert home.stat().st_mode & 0o777 == 0o700
    assert (home / "secret_key").stat().st_mode & 0o777 == 0o600


def test_a_key_that_another_process_has_not_written_yet_is_not_read_as_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An empty file is what a full disk leaves, and what stood there for a moment while a key was written in place."""
    monkeypatch.delenv("SECRET_KEY", raising=False)
    home = tmp_path / "new"
    monkeypatch.setattr(backend_settings, "RATCHET_HOME", home)
    home.mkdir()
    (home / "secret_key").touch()
    key = backend_settings._secret_key()
    assert len(key) == 50
    assert backend_settings._secret_key() == key
    assert [path.name for path in home.iterdir()] == ["secret_key"]


def test_processes_that_start_at_once_have_one_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SECRET_KEY", raising=False)
    monkeypatch.setattr(backend_settings, "RATCHET_HOME", tmp_path / "new")
    start = threading.Barrier(8)

    def begin(_: int) -> str:
        start.wait(30)
        return backend_settings._secret_key()

    with ThreadPoolExecutor(8) as pool:
        keys = set(pool.map(begin, range(8)))
    assert len(keys) == 1
    assert keys == {(tmp_path / "new/secret_key").read_text()}
    assert (tmp_path / "new/secret_key").stat().st_mode & 0o777 == 0o600
