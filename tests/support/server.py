"""The real thing: gunicorn serving this project to tests and benchmarks, to be killed and started again."""

from __future__ import annotations

import json
import os
import signal
import socket
import sqlite3
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

import httpx

from tests.support.migrated_database import template_copy

ROOT = Path(__file__).resolve().parents[2]
START_S = 60.0
"""Seconds a server is given to answer."""


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@contextmanager
def program_started(
    command: list[str], health: str, home: Path, seconds: float, **popen: Any
) -> Iterator[None]:
    """Run a program until the end of the block, which begins once `health` answers 200. popen: as Popen takes it."""

    def is_up() -> bool:
        try:
            return httpx.get(health, timeout=5).status_code == 200
        except httpx.HTTPError:
            return False

    with (home / "log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True, **popen)
    deadline = time.monotonic() + seconds
    try:
        while not is_up():
            assert process.poll() is None, (home / "log").read_text()[-3000:]
            assert time.monotonic() < deadline, (home / "log").read_text()[-3000:]
            time.sleep(0.5)
        yield
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait(30)


class Server:
    """gunicorn with its workers on a port of its own; `DATABASE_URL` and `RATCHET_HOME` as given."""

    def __init__(
        self,
        database_url: str,
        home: Path,
        *,
        workers: int = 2,
        threads: int = 4,
        keep_alive_s: int = 130,
        root: Path = ROOT,
    ) -> None:
        self.home, self.root, self.keep_alive_s = home, root, keep_alive_s
        self.database_url = database_url
        self.port = free_port()
        self.address = f"http://127.0.0.1:{self.port}"
        self.workers, self.threads = workers, threads
        # nothing of the developer's or of the tests' own settings
        names = ("PATH", "LANG", "LC_ALL", "HOME", "TMPDIR", "VIRTUAL_ENV")
        self.environment = {name: os.environ[name] for name in names if name in os.environ} | {
            "DATABASE_URL": database_url,
            "RATCHET_HOME": str(home),
            "SECRET_KEY": "of-a-server-that-lives-for-a-minute",
            "DJANGO_SETTINGS_MODULE": "backend.settings",
        }
        self._log: IO[bytes] = (home / "server.log").open("ab")
        self._process: subprocess.Popen[bytes] | None = None

    def manage(self, *arguments: str) -> str:
        """Run a command of the project; returns what it printed on stdout."""
        done = subprocess.run(
            [sys.executable, self.root / "manage.py", *arguments],
            env=self.environment,
            capture_output=True,
            text=True,
            check=False,
            cwd=self.root,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    def migrate(self) -> None:
        """Apply every migration, or copy a SQLite file to which they were applied."""
        scheme, _, path = self.database_url.partition(":///")
        if scheme != "sqlite" or not template_copy(Path(path)):
            self.manage("migrate", "--verbosity", "0")

    def key(self, *scopes: str) -> str:
        made = json.loads(
            self.manage(
                "api_key", "create", f"the-app-{'-'.join(scopes)}", "--scopes", ",".join(scopes), "--json"
            )
        )
        key: str = made["key"]
        return key

    @contextmanager
    def training_worker(self) -> Iterator[subprocess.Popen[bytes]]:
        """`serve --only training` on the same data, stopped at the end."""
        process = subprocess.Popen(
            [sys.executable, str(self.root / "manage.py"), "serve", "--only", "training"],
            env=self.environment,
            cwd=self.root,
            stdout=self._log,
            stderr=self._log,
        )
        try:
            yield process
        finally:
            process.send_signal(signal.SIGINT)
            process.wait(60)

    def start(self) -> None:
        self._process = subprocess.Popen(
            [
                sys.executable,
                *"-m gunicorn backend.wsgi --bind".split(),
                f"127.0.0.1:{self.port}",
                "--workers",
                str(self.workers),
                "--threads",
                str(self.threads),
                *f"--keep-alive {self.keep_alive_s} --log-level warning".split(),
            ],
            env=self.environment,
            stdout=self._log,
            stderr=self._log,
            cwd=self.root,
            start_new_session=True,  # a group of its own, to be killed as one
        )
        deadline = time.monotonic() + START_S
        while not self._listens():
            assert self._process.poll() is None, self.log()
            assert time.monotonic() < deadline, self.log()
            time.sleep(0.05)

    def kill(self) -> None:
        """End it as a power cut would: every process at once, nothing finished."""
        if self._process is not None and self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
            while self._listens():  # a worker that is still dying holds the address
                time.sleep(0.05)

    def _listens(self) -> bool:
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", self.port)) == 0

    def log(self) -> str:
        return (self.home / "server.log").read_text("utf-8", "replace")[-5000:]

    def __enter__(self) -> Server:
        self.start()
        return self

    def __exit__(self, *_: Any) -> None:
        self.kill()
        self._log.close()


def query(server: Server, sql: str) -> list[tuple[Any, ...]]:
    """Rows of its database, read beside it."""
    url = server.database_url
    if url.startswith("sqlite"):
        with sqlite3.connect(url.removeprefix("sqlite:///")) as connection:
            return connection.execute(sql).fetchall()
    import psycopg

    with psycopg.connect(url) as connection:
        return connection.execute(sql).fetchall()  # type: ignore[arg-type]
