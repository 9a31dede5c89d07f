"""The program in production: settings, `serve` before it serves, no secrets and no floods in the log."""

import io
import logging
import os
import re
import socket
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from django.contrib.auth.models import User
from django.core.checks import run_checks
from django.core.management import CommandError, call_command
from django.db import OperationalError
from django.test import Client
from django.utils import timezone

from backend import logs
from backend import settings as backend_settings
from backend.command import RatchetCommand
from backend.installation import home_private
from backend.logs import OutageLog, SecretsHidden
from feedback import cache
from feedback.cache import TTLCache
from rl.jobs import supervisor
from rl.management.commands.serve import Command
from tests.support.postgres import fresh_database, pooled
from tests.support.postgres import postgres_url as postgres_url
from tests.support.server import Server

pytestmark = pytest.mark.django_db

ROOT = Path(__file__).resolve().parent.parent


def documented_mode() -> dict[str, str]:
    """The `.env` of docs/settings.md, with a key and a database that are there."""
    section = (ROOT / "docs/settings.md").read_text().split("## In production")[1]
    match = re.search(r"```sh\n(.*?)```", section, re.S)
    mode = dict(line.split("=", 1) for line in match[1].splitlines())
    return {**mode, "SECRET_KEY": "k3y-" * 15 + "ABCdef", "DATABASE_URL": ""}


def deploy_check(environment: dict[str, str], home: Path) -> subprocess.CompletedProcess[str]:
    check = [sys.executable, "manage.py", "check", "--deploy", "--fail-level", "WARNING"]
    env = {**os.environ, "RATCHET_HOME": str(home), **environment}
    return subprocess.run(check, cwd=ROOT, env=env, capture_output=True, text=True)


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


@pytest.fixture
def production(settings: Any) -> Any:
    settings.SECURE_SSL_REDIRECT = True
    settings.SECURE_HSTS_SECONDS = 31_536_000
    settings.SECURE_PROXY_SSL_HEADER = ("HTTP_X_FORWARDED_PROTO", "https")
    return settings


def test_http_is_sent_to_https_and_probes_are_answered(production: Any, client: Client) -> None:
    away = client.get("/accounts/login/")
    assert (away.status_code, away["Location"]) == (301, "https://testserver/accounts/login/")
    assert client.get("/healthz").status_code == 200
    behind = client.get("/accounts/login/", headers={"X-Forwarded-Proto": "https"})
    assert behind.status_code == 200
    assert behind["Strict-Transport-Security"] == "max-age=31536000"


def test_without_proxies_nobody_is_believed_to_speak_https(settings: Any, client: Client) -> None:
    assert settings.SECURE_PROXY_SSL_HEADER is None
    settings.SECURE_SSL_REDIRECT = True
    assert client.get("/accounts/login/", headers={"X-Forwarded-Proto": "https"}).status_code == 301


KEY = "rk_abcdefgh" + "S" * 32


LINES = {
    "Forbidden: /accounts/link/MQ/c0ffee-S3CRET/": "Forbidden: /accounts/link/MQ/[hidden]/",
    f"Authorization: Bearer {KEY}": "Authorization: Bearer rk_abcdefgh[hidden]",
    "authorization: bearer S3CRET": "authorization: bearer [hidden]",
    "cookie sessionid=S3CRET; csrftoken=S3CRET": "cookie sessionid=[hidden]; csrftoken=[hidden]",
    "Gone: /api/feedback/S3CRET": "Gone: /api/feedback/[hidden]",
    "postgres://ratchet:S3CRET@db:5432/x": "postgres://ratchet:[hidden]@db:5432/x",
    "http://localhost:8000/decisions/?q=a@b": "http://localhost:8000/decisions/?q=a@b",
    "a decision of policy widgets-v1 at 10:31:02": "a decision of policy widgets-v1 at 10:31:02",
}


def test_a_line_of_the_log_and_a_traceback_show_no_secret(settings: Any) -> None:
    formatter = SecretsHidden("{message}", style="{")
    for line, shown in LINES.items():
        record = logging.LogRecord("rl", logging.ERROR, __file__, 1, "%s", (line,), None)
        assert formatter.format(record) == shown
    try:
        raise ValueError(f"cannot read {KEY}")
    except ValueError:
        record = logging.LogRecord("rl", logging.ERROR, __file__, 1, "failed", (), sys.exc_info())
    text = formatter.format(record)
    assert "cannot read rk_abcdefgh[hidden]" in text
    assert KEY not in text
    for handler in settings.LOGGING["handlers"].values():
        assert settings.LOGGING["formatters"][handler["formatter"]]["()"] == "backend.logs.SecretsHidden"


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
    env = {**os.environ, "RATCHET_HOME": str(home), "DJANGO_SETTINGS_MODULE": "backend.settings"}
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, env=env)
    assert home.stat().st_mode & 0o777 == 0o700
    assert (home / "secret_key").stat().st_mode & 0o777 == 0o600


def test_an_unwritten_key_is_not_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_a_port_in_use_is_refused_with_another_to_take(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor, "PORT_WAIT_S", 0.0)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(CommandError, match=f"in use.*serve --port {port + 1}"):
            call_command("serve", port=port)


def test_a_port_that_becomes_free_is_waited_for() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert supervisor.port_answers("127.0.0.1", port)
    supervisor.port_wait("127.0.0.1", port)
    assert not supervisor.port_answers("127.0.0.1", port)


def greeting(host: str = "127.0.0.1") -> str:
    said = io.StringIO()  # no terminal: a log or a notebook shows the link too
    Command(stderr=said, no_color=True)._greet(host, 8123)
    return said.getvalue()


def test_the_first_person_is_handed_a_link_that_works(client: Client) -> None:
    client.post(re.search(r"http://localhost:8123(/accounts/link/\S+)", greeting())[1])
    assert client.session["_auth_user_id"] == str(User.objects.get().pk)


def test_nobody_else_is_handed_a_link() -> None:
    said = greeting(host="0.0.0.0")
    User.objects.create_user("ada", last_login=timezone.now())
    for text in (said, greeting()):
        assert "/accounts/link/" not in text
        # the interpreter that runs now: `python` may be another one, without Django
        typed = re.search(r"run: (\S+) manage\.py login_link --base-url http://localhost:8123", text)
        assert (ROOT / typed[1]).samefile(sys.executable)


def test_a_database_that_is_down_is_said_in_one_line_with_what_to_do() -> None:
    class Asks(RatchetCommand):
        def work(self, options: dict[str, Any]) -> dict[str, Any]:
            raise OperationalError("connection failed:\nConnection refused")

    with pytest.raises(CommandError) as refusal:
        call_command(Asks())
    assert "\n" not in str(refusal.value)
    assert "correct DATABASE_URL" in str(refusal.value)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [1000.0]
    monkeypatch.setattr(logs.time, "monotonic", lambda: now[0])
    return now


def test_an_outage_is_said_once_per_interval(clock: list[float], caplog: pytest.LogCaptureFixture) -> None:
    log = OutageLog(logging.getLogger("tests.outages"))
    for _ in range(1000):
        log.report("the database cannot be reached", ValueError("no\nroute"))
    assert len(caplog.records) == 1
    assert caplog.messages[0].startswith("the database cannot be reached: ValueError: no route")
    clock[0] += 61
    log.report("the database cannot be reached")
    assert len(caplog.records) == 2
    assert "(999 more times since the last line)" in caplog.messages[1]


def test_reads_from_what_is_remembered_say_it_once(
    clock: list[float], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache.outage.reset()
    values: TTLCache[int] = TTLCache()
    assert values.get("a", lambda: 7) == 7

    def away() -> int:
        raise OperationalError("refused")

    logging.getLogger("feedback").addHandler(caplog.handler)
    try:
        for _ in range(50):
            clock[0] += 0.1
            values._kept["a"] = (clock[0] - 30, 7)
            assert values.get("a", away) == 7
    finally:
        logging.getLogger("feedback").removeHandler(caplog.handler)
    assert len(caplog.records) == 1
    assert "using data read 30 s ago" in caplog.messages[0]


@pytest.mark.campaign
@pytest.mark.postgres
def test_behind_a_pool_of_transactions_readers_of_many_rows_answer(postgres_url: str, tmp_path: Path) -> None:
    """Cursors that outlive a transaction meet another connection there: nearly every page of agreement was 500."""
    url = fresh_database(postgres_url)
    server = Server(url, tmp_path, workers=1, threads=8)
    server.migrate()
    server.manage("simulate", "widgets", "--scenarios", "60", "--rate", "simulated")
    key = server.key("read")
    with pooled(url) as through:
        server.environment |= {"DATABASE_URL": through, "DATABASE_POOLED": "true"}
        with server, ThreadPoolExecutor(8) as pool:

            def ask(number: int) -> int:
                path = ("/api/agreement/?agent=widgets", "/api/decisions/?q=a")[number % 2]
                request = urllib.request.Request(
                    server.address + path, headers={"Authorization": f"Bearer {key}"}
                )
                try:
                    return int(urllib.request.urlopen(request, timeout=120).status)
                except urllib.error.HTTPError as error:
                    return error.code

            assert Counter(pool.map(ask, range(60))) == {200: 60}, server.log()
