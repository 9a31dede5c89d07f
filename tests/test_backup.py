"""Backups: as of one moment while others write, checked, and put back; SQLite here and PostgreSQL in a cluster."""

import hashlib
import json
import os
import sqlite3
import subprocess
import sys
import threading
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from django.core.management import CommandError, call_command

from backend.backups import archive, databases
from backend.backups.archive import MANIFEST, BackupRefused, verify
from feedback.recording.recorder import journal_of, outbox_of
from tests.support.postgres import fresh_database, postgres_url  # noqa: F401
from tests.support.vanishing_folder import vanishes_when_listed

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture
def lite(tmp_path: Path, ratchet_home: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An SQLite file in the data folder in place of the database, with one table of numbers."""
    file = ratchet_home / "ratchet.sqlite3"
    with sqlite3.connect(file) as made:
        made.execute("PRAGMA journal_mode=WAL")
        made.execute("CREATE TABLE feedback_decision (id INTEGER PRIMARY KEY, other INTEGER)")
        made.executemany("INSERT INTO feedback_decision VALUES (?, ?)", [(n, n) for n in range(100)])
    made.close()
    for module in (archive, databases):
        monkeypatch.setattr(module, "database_file", lambda: file)
    monkeypatch.setattr(archive, "migration_names", lambda: {"feedback.0001_initial"})
    monkeypatch.setattr(archive, "migrations_applied", lambda: ["feedback.0001_initial"])
    monkeypatch.setattr(archive, "database_empty", lambda: False)
    return file


def write(home: Path, name: str, data: bytes = b"bytes") -> Path:
    path = home / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    return path


def test_the_backup_leaves_out_what_is_remade(lite: Path, ratchet_home: Path, tmp_path: Path) -> None:
    kept = [
        "policies/a/v1/adapter.safetensors",
        "snapshots/a/x.jsonl",
        "runs/1/log.txt",
        "secret_key",
        "labels/a/1/m",
    ]
    left = (
        "cache/x metrics/counts.db uploads/y serving-exports.log spool/decisions/sender.lock upstream_key "
        "before-restore-1/old policies/a/.half"
    ).split()
    for name in kept + left:
        write(ratchet_home, name)
    manifest = archive.backup(tmp_path / "b")
    assert set(manifest.files) == {f"home/{name}" for name in kept} | {"database.sqlite3"}
    assert manifest.rows == {"feedback_decision": 100}
    assert (tmp_path / "b").stat().st_mode & 0o777 == 0o700
    assert (tmp_path / "b/database.sqlite3").stat().st_mode & 0o777 == 0o600
    with pytest.raises(BackupRefused, match="expected a new or empty folder"):
        archive.backup(tmp_path / "b")
    with pytest.raises(BackupRefused, match="outside RATCHET_HOME"):
        archive.backup(ratchet_home / "b")


def test_a_checkpoint_that_a_training_removes_meanwhile_is_left_out(
    lite: Path, ratchet_home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(ratchet_home, "runs/1/checkpoints/checkpoint-10/complete.json")
    older = write(ratchet_home, "runs/1/checkpoints/checkpoint-5/complete.json").parent
    vanishes_when_listed(older, monkeypatch)
    manifest = archive.backup(tmp_path / "b")
    assert not older.exists()
    expected = {"home/runs/1/checkpoints/checkpoint-10/complete.json", "database.sqlite3"}
    assert set(manifest.files) == expected


def test_a_copy_is_of_one_moment_while_others_write(lite: Path, tmp_path: Path) -> None:
    """Each transaction writes two rows: a copy that caught one of them alone would be of two moments."""
    stop = threading.Event()
    written = [0]

    def writing() -> None:
        with sqlite3.connect(lite, timeout=30) as other:
            while not stop.is_set():
                with other:
                    number = 1000 + 2 * written[0]
                    other.execute("INSERT INTO feedback_decision VALUES (?, ?)", (number, number + 1))
                    other.execute("INSERT INTO feedback_decision VALUES (?, ?)", (number + 1, number))
                written[0] += 1

    thread = threading.Thread(target=writing)
    thread.start()
    try:
        while written[0] < 5:
            pass
        for n in range(3):
            target = tmp_path / f"b{n}"
            manifest = archive.backup(target)
            with sqlite3.connect(target / "database.sqlite3") as copy:
                (alone,) = copy.execute(
                    "SELECT COUNT(*) FROM feedback_decision a LEFT JOIN feedback_decision b ON b.id = a.other "
                    "WHERE b.id IS NULL"
                ).fetchone()
                (count,) = copy.execute("SELECT COUNT(*) FROM feedback_decision").fetchone()
            copy.close()
            assert alone == 0
            assert count == manifest.rows["feedback_decision"] >= 110
    finally:
        stop.set()
        thread.join()


def test_a_decision_on_its_way_is_in_the_backup(
    lite: Path, ratchet_home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between copying the spool and the database what waits is recorded: in the copied spool it waits still."""
    folder = ratchet_home / "spool/decisions"
    journal, spool = journal_of(folder), outbox_of(folder)
    journal.put({"kind": "decision", "body": {"id": "1"}}, key="1")
    assert [path.name for path in archive._spool_files(ratchet_home)] == ["journal.sqlite3"]
    spool.put({"kind": "decision", "body": {"id": "2"}})
    before = archive.database_copy

    def sent_meanwhile(folder: Path) -> Any:
        journal.remove(["1"])
        spool.settle([1])
        return before(folder)

    monkeypatch.setattr(archive, "database_copy", sent_meanwhile)
    archive.backup(tmp_path / "b")
    assert journal.pending_count() == spool.pending_count() == 0
    copied = tmp_path / "b/home/spool/decisions"
    assert [path.name for path in sorted(copied.iterdir())] == ["journal.sqlite3", "outbox.sqlite3"]
    found = journal_of(copied).pending() + outbox_of(copied).pending()
    assert [record.body["body"]["id"] for record in found] == ["1", "2"]


def forge(backup: Path, name: str, data: bytes = b"bytes", **facts: Any) -> None:
    """A file in the manifest that `backup` did not write, with its true hash."""
    manifest = json.loads((backup / MANIFEST).read_text())
    if not (backup / name).is_file():
        write(backup, name, data)
    content = (backup / name).read_bytes()
    manifest["files"][name] = [len(content), hashlib.sha256(content).hexdigest(), 0o600]
    (backup / MANIFEST).write_text(json.dumps(manifest | facts))


def link_folder(backup: Path) -> None:
    outside = backup.parent / "outside"
    (backup / "home/policies").rename(outside)
    (backup / "home/policies").symlink_to(outside)


def link_file(backup: Path) -> None:
    (backup / "home/policies/v1").rename(backup.parent / "v1")
    (backup / "home/policies/v1").symlink_to(backup.parent / "v1")


def forge_without_hash(backup: Path) -> None:
    manifest = json.loads((backup / MANIFEST).read_text())
    del manifest["files"]["database.sqlite3"]
    (backup / MANIFEST).write_text(json.dumps(manifest))


@pytest.mark.parametrize(
    ("damage", "fault"),
    [
        (lambda b: forge(b, "home/../../x"), "never writes"),
        (lambda b: forge(b, "home/../x"), "never writes"),
        (lambda b: forge(b, str(b.parent / "x")), "never writes"),
        (lambda b: forge(b, "x"), "never writes"),
        (lambda b: forge(b, "home/upstream_key"), "never writes"),
        (lambda b: forge(b, "home/before-restore-1/x"), "never writes"),
        (lambda b: forge(b, "home/.restoring/x"), "never writes"),
        (link_folder, "is a link"),
        (link_file, "is a link"),
        (forge_without_hash, "names the database"),
        (
            lambda b: forge(b, "../database.sqlite3", b"SQLite", database="../database.sqlite3"),
            "names the database",
        ),
        (lambda b: forge(b, "home/x", files=[]), "cannot be read"),
        (lambda b: forge(b, "home/x", rows={"feedback_decision": 99}), "rows, expected 99"),
        (lambda b: write(b, "home/policies/v1", b"bytez"), "is damaged"),
        (lambda b: (b / "home/policies/v1").unlink(), "is missing"),
        (lambda b: (b / MANIFEST).unlink(), "not a complete backup"),
        (lambda b: (b / MANIFEST).write_text("{"), "cannot be read"),
        (
            lambda b: (b / MANIFEST).write_text(
                (b / MANIFEST).read_text().replace("home/policies", "../policies")
            ),
            "never writes",
        ),
        (
            lambda b: (b / MANIFEST).write_text(
                (b / MANIFEST).read_text().replace("0001_initial", "0099_later")
            ),
            "newer Ratchet",
        ),
    ],
)
def test_a_damaged_backup(lite: Path, ratchet_home: Path, tmp_path: Path, damage: Any, fault: str) -> None:
    write(ratchet_home, "policies/v1", b"bytes")
    archive.backup(tmp_path / "b")
    write(ratchet_home, "policies/v1", b"newer")
    damage(tmp_path / "b")
    before = sorted(ratchet_home.rglob("*"))
    with pytest.raises(BackupRefused, match=fault):
        archive.restore(tmp_path / "b", overwrite=True)
    assert (ratchet_home / "policies/v1").read_bytes() == b"newer"
    assert sorted(ratchet_home.rglob("*")) == before


def test_links_and_modes_of_neither_side_are_taken(lite: Path, ratchet_home: Path, tmp_path: Path) -> None:
    """A link in the data folder is moved aside with the rest, and nothing is written behind it."""
    write(ratchet_home, "policies/v1")
    write(ratchet_home, "secret_key")
    archive.backup(tmp_path / "b")
    manifest = json.loads((tmp_path / "b" / MANIFEST).read_text())
    manifest["files"]["home/policies/v1"][2] = 0o4777
    (tmp_path / "b" / MANIFEST).write_text(json.dumps(manifest))
    outside = write(tmp_path, "outside/secret_key", b"of another program")
    for name, to in (("policies", outside.parent), ("secret_key", outside)):
        (ratchet_home / name).rename(tmp_path / name)
        (ratchet_home / name).symlink_to(to)
    archive.restore(tmp_path / "b", overwrite=True)
    assert (ratchet_home / "policies/v1").stat().st_mode & 0o7777 == 0o755
    assert (ratchet_home / "secret_key").read_bytes() == b"bytes"
    assert not (ratchet_home / "policies").is_symlink()
    assert [path.name for path in outside.parent.iterdir()] == ["secret_key"]
    assert outside.read_bytes() == b"of another program"
    assert not (ratchet_home / archive.DRAFT).exists()


def test_a_failing_copy_replaces_nothing(
    lite: Path, ratchet_home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(ratchet_home, "policies/v1", b"old")
    archive.backup(tmp_path / "b")
    write(ratchet_home, "policies/v1", b"new")
    write(ratchet_home / archive.DRAFT, "home/left", b"by a kill")
    before = sorted(path for path in ratchet_home.rglob("*") if archive.DRAFT not in path.parts)

    def half(source: Path, to: Path) -> None:
        to.write_bytes(Path(source).read_bytes()[:1])

    monkeypatch.setattr(archive.shutil, "copyfile", half)
    with pytest.raises(BackupRefused, match="is damaged"):
        archive.restore(tmp_path / "b", overwrite=True)
    assert (ratchet_home / "policies/v1").read_bytes() == b"new"
    assert sorted(ratchet_home.rglob("*")) == before


def test_a_flipped_byte_of_the_database_is_found(lite: Path, tmp_path: Path) -> None:
    archive.backup(tmp_path / "b")
    file = tmp_path / "b/database.sqlite3"
    raw = bytearray(file.read_bytes())
    raw[5000] ^= 255
    file.write_bytes(raw)
    with pytest.raises(BackupRefused, match="damaged"):
        verify(tmp_path / "b")
    raw[16:24] = b"\xff" * 8  # and SQLite's own check would find what the sum does not
    file.write_bytes(raw)
    with pytest.raises(BackupRefused, match="damaged"):
        databases.database_check(file, {})


def test_what_is_there_is_moved_aside_when_asked(lite: Path, ratchet_home: Path, tmp_path: Path) -> None:
    write(ratchet_home, "policies/v1", b"old")
    archive.backup(tmp_path / "b")
    write(ratchet_home, "policies/v1", b"new")
    write(ratchet_home, "policies/v2", b"new")
    with sqlite3.connect(lite) as other:
        other.execute("DELETE FROM feedback_decision")
    other.close()
    with pytest.raises(BackupRefused, match="add --overwrite"):
        archive.restore(tmp_path / "b")
    archive.restore(tmp_path / "b", overwrite=True)
    assert (ratchet_home / "policies/v1").read_bytes() == b"old"
    assert not (ratchet_home / "policies/v2").exists()
    (aside,) = ratchet_home.glob("before-restore-*")
    assert (aside / "policies/v2").read_bytes() == b"new"
    with sqlite3.connect(lite) as restored:
        assert restored.execute("SELECT COUNT(*) FROM feedback_decision").fetchone() == (100,)
    restored.close()


def test_a_full_disk_is_said_before(lite: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(archive.shutil, "disk_usage", lambda path: type("Usage", (), {"free": 1000})())
    with pytest.raises(BackupRefused, match="free some, or name a folder on another disk"):
        archive.backup(tmp_path / "b")
    assert not (tmp_path / "b").exists()


@pytest.mark.django_db
def test_the_command_refuses_in_one_line(tmp_path: Path) -> None:
    with pytest.raises(CommandError, match="not a complete backup"):
        call_command("restore", str(tmp_path), stdout=StringIO())


MOVE = """
import json, sys
import django
django.setup()
from django.conf import settings
from django.core.management import call_command
from feedback.models import Decision
from feedback.accounts.sign_in import signin_link, signin_link_check
if sys.argv[1] == "out":
    call_command("migrate", verbosity=0)
    from rl.management.simulation import simulate
    simulate("widgets", scenarios=2)
    (settings.RATCHET_HOME / "policies").mkdir()
    (settings.RATCHET_HOME / "policies" / "adapter").write_bytes(b"weights")
    link = signin_link("ada", "http://localhost").url.split("/")[-3:-1]
    call_command("backup", sys.argv[2], verbosity=0, stdout=sys.stderr)
else:
    call_command("restore", sys.argv[2], stdout=sys.stderr)
    link = sys.argv[3:5]
    settings.SECRET_KEY = (settings.RATCHET_HOME / "secret_key").read_text()  # as the next process reads it
print(json.dumps({"decisions": sorted(str(d.pk) for d in Decision.objects.all()), "link": link,
                  "good": signin_link_check(*link) is not None}))
"""


def move(home: Path, database: str, *arguments: str) -> Any:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", MOVE, *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        env={
            **os.environ,
            "RATCHET_HOME": str(home),
            "DATABASE_URL": database,
            "SECRET_KEY": "",
            "DJANGO_SETTINGS_MODULE": "backend.settings",
        },
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.postgres
def test_an_installation_on_postgresql_is_moved_into_an_empty_home(postgres_url: str, tmp_path: Path) -> None:  # noqa: F811
    """The same decisions and files, and a sign-in link of the old place is good in the new one: the key moved too."""
    before = move(tmp_path / "one", fresh_database(postgres_url), "out", str(tmp_path / "b"))
    assert len(before["decisions"]) == 8
    after = move(tmp_path / "two", fresh_database(postgres_url), "in", str(tmp_path / "b"), *before["link"])
    assert after["decisions"] == before["decisions"]
    assert after["good"]
    assert (tmp_path / "two/policies/adapter").read_bytes() == b"weights"
    assert (tmp_path / "two/secret_key").read_bytes() == (tmp_path / "one/secret_key").read_bytes()


RESTORE = """
import os, sys
import django
django.setup()
from django.core.management import call_command
from backend.backups import databases
if sys.argv[1] == "kill":
    databases._table_rows = lambda: os.kill(os.getpid(), 9)
if sys.argv[1] == "break":
    databases._program = lambda name: sys.argv[3]
call_command("restore", sys.argv[2], "--overwrite", verbosity=0)
"""


@pytest.mark.postgres
def test_a_postgresql_restore_that_fails_or_is_killed_changes_nothing(
    postgres_url: str,  # noqa: F811
    tmp_path: Path,
) -> None:
    """The database has a table of a newer version, which references one of the backup's."""
    import psycopg

    url, home = fresh_database(postgres_url), tmp_path / "one"
    move(home, url, "out", str(tmp_path / "b"))
    with psycopg.connect(url) as connection:
        connection.execute("CREATE TABLE later (decision uuid REFERENCES feedback_decision)")
        connection.execute("INSERT INTO later SELECT id FROM feedback_decision LIMIT 3")
    real, broken = databases._program("pg_restore"), tmp_path / "pg_restore"
    broken.write_text(
        f"#!/bin/sh\ncase $1 in --file*) exec {real} $*;; esac\n{real} $* | head -c 90000; exit 3\n"
    )
    broken.chmod(0o755)

    def restore(how: str) -> int:
        return subprocess.run(
            [sys.executable, "-W", "ignore", "-c", RESTORE, how, str(tmp_path / "b"), str(broken)],
            cwd=ROOT,
            env={
                **os.environ,
                "RATCHET_HOME": str(home),
                "DATABASE_URL": url,
                "SECRET_KEY": "",
                "DJANGO_SETTINGS_MODULE": "backend.settings",
            },
        ).returncode

    def counts() -> dict[str, int]:
        with psycopg.connect(url) as connection:
            tables = [
                row[0]
                for row in connection.execute("SELECT tablename FROM pg_tables WHERE schemaname='public'")
            ]
            return {
                name: connection.execute(f'SELECT COUNT(*) FROM "{name}"').fetchone()[0] for name in tables
            }  # type: ignore[arg-type,index]

    before = counts()
    assert (before["later"], before["feedback_decision"]) == (3, 8)
    assert (restore("kill"), restore("break")) == (-9, 1)
    assert counts() == before
    assert not list(home.glob("before-restore-*"))
    assert restore("whole") == 0
    assert counts() == {name: count for name, count in before.items() if name != "later"}
