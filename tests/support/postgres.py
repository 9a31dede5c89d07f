"""A PostgreSQL cluster of the tests' own: made, started and thrown away; reached through a socket in its own folder."""

import os
import pwd
import shutil
import subprocess
import tempfile
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import quote, unquote

import pytest

START_S = 30.0
"""Seconds a new cluster is given to answer."""

HARMLESS = ("postgres", "nobody")
"""Whom the server runs as where the tests run as root, which it refuses."""


class NoPostgres(Exception):
    """There is no PostgreSQL server on this machine, or it cannot be run."""


def binaries() -> Path:
    """The folder of initdb and postgres: on the PATH, or where Debian puts them. Raises NoPostgres."""
    folders = [
        Path(found).resolve().parent for name in ("initdb", "postgres") if (found := shutil.which(name))
    ]
    folders += sorted(Path("/usr/lib/postgresql").glob("*/bin"), reverse=True)
    for folder in folders:
        if all((folder / name).exists() for name in ("initdb", "postgres", "pg_ctl")):
            return folder
    raise NoPostgres(
        "neither initdb on the PATH nor a /usr/lib/postgresql/*/bin: install the package postgresql"
    )


def _runner() -> tuple[list[str], pwd.struct_passwd | None]:
    """What a command starts with to run as somebody who is not root, and who that is."""
    if os.geteuid() != 0:
        return [], None
    for name in HARMLESS:
        try:
            person = pwd.getpwnam(name)
        except KeyError:
            continue
        if setpriv := shutil.which("setpriv"):
            return [
                setpriv,
                f"--reuid={person.pw_uid}",
                f"--regid={person.pw_gid}",
                "--clear-groups",
                "--",
            ], person
        if su := shutil.which("su"):
            return [su, "-s", "/bin/sh", name, "-c", 'exec "$0" "$@"', "--"], person
    raise NoPostgres("the tests run as root, which PostgreSQL refuses, and neither setpriv nor su is there")


@contextmanager
def cluster(settings: Sequence[str] = ("fsync=off",)) -> Iterator[str]:
    """Run a new cluster; gives its DATABASE_URL, to a database `postgres` of a user `ratchet`. Raises NoPostgres.

    settings: lines of postgresql.conf. fsync=off keeps what a killed client did, and loses it only with the machine.
    """
    folder, (before, person) = binaries(), _runner()
    # not below pytest's own folders, which others may not enter
    home = Path(tempfile.mkdtemp(prefix="ratchet-pg-"))
    try:
        if person:
            os.chown(home, person.pw_uid, person.pw_gid)
        data = home / "data"
        made = subprocess.run(
            [
                *before,
                folder / "initdb",
                "-D",
                data,
                *"-U ratchet -A trust -E UTF8 --no-sync".split(),
            ],
            capture_output=True,
            text=True,
            cwd=home,
            check=False,
        )
        if made.returncode != 0:
            raise NoPostgres(f"initdb failed: {made.stderr.strip()}")
        options = [part for setting in settings for part in ("-c", setting)]
        with (home / "log").open("w") as log:
            server = subprocess.Popen(
                [
                    *before,
                    folder / "postgres",
                    "-D",
                    data,
                    "-k",
                    home,
                    *"-c listen_addresses= -c max_connections=200".split(),
                    *options,
                ],
                stdout=log,
                stderr=log,
                cwd=home,
            )
        try:
            _wait(server, home)
            yield f"postgres://ratchet@{quote(str(home), safe='')}/postgres"
        finally:
            # at once, clients or not: what is in it is thrown away
            stop = [*before, folder / "pg_ctl", "stop", "-D", data, "-m", "immediate"]
            subprocess.run(stop, capture_output=True, cwd=home, check=False)
            server.wait(timeout=START_S)
    finally:
        shutil.rmtree(home, ignore_errors=True)


@contextmanager
def pooled(url: str) -> Iterator[str]:
    """The same database through a pgbouncer of its own, two connections in transaction mode. Skips the test where there
    is none; fails under CI=true."""
    found = shutil.which("pgbouncer") or "/usr/sbin/pgbouncer"
    if not Path(found).exists():
        if os.environ.get("CI") == "true":
            raise NoPostgres("pgbouncer is not installed")
        pytest.skip("needs pgbouncer: install the package")
    before, person = _runner()
    socket, name = unquote(url.split("@")[1].split("/")[0]), url.rpartition("/")[2]
    home = Path(tempfile.mkdtemp(prefix="ratchet-pool-"))
    try:
        (home / "pool.ini").write_text(
            f"[databases]\n{name} = host={socket} dbname={name} user=ratchet\n[pgbouncer]\nlisten_addr =\n"
            f"unix_socket_dir = {home}\nlisten_port = 6432\nauth_type = any\npool_mode = transaction\n"
            "default_pool_size = 2\nmax_client_conn = 100\n"
        )
        if person:
            for path in (home, home / "pool.ini"):
                os.chown(path, person.pw_uid, person.pw_gid)
        with (home / "log").open("w") as log:
            server = subprocess.Popen([*before, found, home / "pool.ini"], stdout=log, stderr=log, cwd=home)
        try:
            deadline = time.monotonic() + START_S
            while not (home / ".s.PGSQL.6432").exists():
                if server.poll() is not None or time.monotonic() > deadline:
                    raise NoPostgres(f"pgbouncer does not start: {(home / 'log').read_text()[-2000:]}")
                time.sleep(0.05)
            yield f"postgres://ratchet@{quote(str(home), safe='')}:6432/{name}"
        finally:
            server.terminate()
            server.wait(timeout=START_S)
    finally:
        shutil.rmtree(home, ignore_errors=True)


@contextmanager
def stopped(url: str) -> Iterator[None]:
    """The cluster of this address, stopped as by a crash, and started again afterwards."""
    (before, _), folder = _runner(), binaries()
    home = Path(unquote(url.split("@")[1].split("/")[0]))
    control = [*before, folder / "pg_ctl", "-D", home / "data", "-s", "-w"]
    subprocess.run([*control, "stop", "-m", "immediate"], cwd=home, check=True)
    try:
        yield
    finally:
        options = f"-k {home} -c listen_addresses= -c max_connections=200 -c fsync=off"
        subprocess.run([*control, "start", "-l", home / "log.again", "-o", options], cwd=home, check=True)


def _wait(server: subprocess.Popen[bytes], home: Path) -> None:
    import psycopg

    deadline = time.monotonic() + START_S
    while True:
        try:
            psycopg.connect(host=str(home), user="ratchet", dbname="postgres").close()
            return
        except psycopg.OperationalError as error:
            if server.poll() is not None or time.monotonic() > deadline:
                said = (home / "log").read_text()[-2000:]
                raise NoPostgres(f"the server does not answer: {error}\n{said}") from None
            time.sleep(0.05)


@pytest.fixture(scope="session")
def postgres_url() -> Iterator[str]:
    """DATABASE_URL of a cluster for this test run. Skips with the reason where there is none; fails under CI=true."""
    try:
        with cluster() as url:
            yield url
    except NoPostgres as error:
        if os.environ.get("CI") == "true":
            raise
        pytest.skip(f"needs PostgreSQL: {error}")


def fresh_database(url: str) -> str:
    """The address of a new, empty database in the cluster."""
    import psycopg

    name = f"tests_{uuid.uuid4().hex[:12]}"
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute(f"CREATE DATABASE {name}")
    return f"{url.rpartition('/')[0]}/{name}"
