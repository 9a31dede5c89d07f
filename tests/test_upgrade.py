"""The upgrade from the first migrations, with rows in their tables: nothing is lost and everything stays readable, on
PostgreSQL too. There a unit is forgotten in the upgraded database. A new database has the same schema and rights.
Two versions work on one database while servers are replaced."""

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import httpx
import pytest
from django.db.migrations.loader import MigrationLoader
from django.db.migrations.operations import AddField, AddIndex, CreateModel
from django.db.models import NOT_PROVIDED

from backend.database import ADDITIVE
from tests.support.database_schema import schema_facts
from tests.support.postgres import fresh_database, postgres_url  # noqa: F401
from tests.support.server import Server, query

ROOT = Path(__file__).resolve().parent.parent

UPGRADE = """
import json, sys
import django
django.setup()
from datetime import timedelta
from django.conf import settings
from django.core.management import call_command
from django.db import connection
from django.db.migrations.executor import MigrationExecutor
from django.test import Client
from django.utils import timezone

executor = MigrationExecutor(connection)
FIRST = [("feedback", "0001_initial"), ("rl", "0001_initial"), ("auth", "0012_alter_user_first_name_max_length"),
         ("sessions", "0001_initial")]
executor.migrate(FIRST)
old = executor.loader.project_state(FIRST).apps
Decision, Rating, Comparison, Outcome = (
    old.get_model("feedback", name) for name in ("Decision", "Rating", "Comparison", "Outcome"))
at = timezone.now() - timedelta(days=30)
facts = {"agent": "shop", "messages": [{"role": "user", "content": "Where?"}], "prompt_hash": "a" * 64,
         "tags": ["late"], "policy": "shop-v1", "created_at": at}
left = Decision.objects.create(response="here", **facts)
right = Decision.objects.create(response="there", **facts)
first = Rating.objects.create(decision=left, rater="ada", thumb="up", created_at=at)
Rating.objects.create(decision=left, rater="ada", thumb="down", supersedes=first, created_at=at)
Rating.objects.create(decision=right, rater="bob", correction="over there", created_at=at)
Comparison.objects.create(left=left, right=right, rater="ada", preference="left", created_at=at)
Outcome.objects.create(decision=left, name="reopened", value=1.0, at=at)
folder = settings.RATCHET_HOME / "snapshots"
folder.mkdir(parents=True)
(folder / "x.jsonl").write_text(json.dumps({"split": "train", "prompt": "p"}) + "\\n")
names = {name: old.get_model("rl", name) for name in
         ("Snapshot", "TrainingRun", "RunMetric", "Policy", "Artifact", "PolicyEvent", "Evaluation")}
snapshots = [names["Snapshot"].objects.create(
    agent="shop", kind="pairs", path=path, sha256="b" * 64, feedback_count=4, counts={"train": 1})
    for path in ("snapshots/x.jsonl", "snapshots/swept.jsonl")]
run = names["TrainingRun"].objects.create(
    agent="shop", method="dpo", status="succeeded", base_model="bundled", snapshot=snapshots[0], finished_at=at)
names["RunMetric"].objects.create(run=run, step=1, values={"loss": 0.69})
policy = names["Policy"].objects.create(
    name="shop-v1", agent="shop", stage="champion", base_model="bundled", base_model_hash="c", run=run,
    adapter_path="policies/shop-v1", adapter_sha256="d" * 64, feedback_count=4)
names["Artifact"].objects.create(policy=policy, format="gguf", path="exports/s.gguf", bytes=1, sha256="e" * 64)
names["PolicyEvent"].objects.create(
    policy=policy, kind="promoted", from_stage="candidate", to_stage="champion", actor="ada")
names["Evaluation"].objects.create(
    agent="shop", policy=policy, base_model="bundled", samples=9, snapshot=snapshots[1],
    figures={"preference_accuracy": {"value": 0.7, "low": 0.5, "high": 0.9, "n": 9}})

call_command("migrate", verbosity=0)

from django.contrib.auth.models import User
from feedback.transfer.export_views import Selection
from feedback.transfer.export import ExportReport, export_stream
from feedback.models import Decision, Rating
from feedback.selectors import comparisons_standing, ratings_standing
from rl.models import Policy
from tests.support.database_schema import schema_facts
client = Client(HTTP_HOST="localhost")
client.force_login(User.objects.create_superuser("ada"))
pages = ["/", "/decisions/", f"/decisions/{left.pk}/", "/rate/?agent=shop", "/agents/shop/", "/runs/",
         f"/runs/{run.pk}/", "/policies/", "/policies/shop-v1/", "/agreement/?agent=shop", "/admin/rl/policy/"]
export = b"".join(export_stream("ratchet", Selection("shop"), ExportReport("ratchet"))).decode().splitlines()
print(json.dumps({
    "decisions": Decision.objects.count(), "ratings": Rating.objects.count(),
    "standing": sorted([r.rater, r.thumb, r.correction] for r in ratings_standing()),
    "comparisons": comparisons_standing().count(),
    "champion": Policy.objects.get(agent="shop", stage="champion").name,
    "shown": [client.get(page).status_code for page in pages],
    "exported": len([line for line in export if json.loads(line)["type"] == "decision"]),
    "found": client.get("/decisions/?q=there").text.count("there") > 0,
    "schema": schema_facts(connection),
}))
"""


FORGET = """
from feedback.erasure.service import unit_forget
from tests.support.imports import file_import
from feedback.recording.recorder import Recorder, outbox_of, spool_folder
from tests.test_erasure import SECRET, UNIT, copies, found_in, spooled, world

def marked():
    words, tables = (SECRET, UNIT), []
    with connection.cursor() as cursor:
        for table in connection.introspection.table_names(cursor):
            cursor.execute(f'SELECT count(*) FROM "{table}" t WHERE t::text LIKE ANY(%s)', [[f"%{w}%" for w in words]])
            tables += [table] * (cursor.fetchone()[0] > 0)
    return tables, [name.rpartition("/")[2] for name in found_in(settings.RATCHET_HOME, *words)]

User.objects.filter(username="ada").delete()
own, _ = world()
copies(settings.RATCHET_HOME, own)
spooled(own)
exported = settings.RATCHET_HOME.parent / "exported.jsonl"
exported.write_text(json.dumps({"type": "decision", "id": str(own.pk), "agent": "helper", "messages": own.messages,
                                "response": own.response}) + "\\n")
before, others = marked(), Decision.objects.exclude(unit=UNIT).count()
done = unit_forget(UNIT)
after = marked()
body = {"id": str(own.pk), "agent": "helper", "messages": own.messages, "response": own.response, "unit": UNIT}
outbox_of(spool_folder()).put({"kind": "decision", "body": body})
Recorder(spool_folder).replay()
report = file_import(exported)
print(json.dumps({"tables": len(before[0]), "files": len(before[1]), "left": marked(), "after": after,
                  "returned": Decision.objects.count() - others, "imported": report.decisions,
                  "not_compacted": done.not_compacted}))
"""
"""Continues UPGRADE: the world of `tests/test_erasure.py`, every table read as text and every file searched after."""


NEW = """
import json
import django
django.setup()
from django.core.management import call_command
from django.db import connection
from tests.support.database_schema import schema_facts
call_command("migrate", verbosity=0)
print(json.dumps(schema_facts(connection)))
"""


def upgraded(home: Path, database: str, more: str = "", script: str = UPGRADE) -> Any:
    """What the script prints; with `more` behind it, what that prints too."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", script + more],
        cwd=ROOT,
        capture_output=True,
        text=True,
        env={
            **os.environ,
            "RATCHET_HOME": str(home),
            "DATABASE_URL": database,
            "DJANGO_SETTINGS_MODULE": "backend.settings",
        },
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    return found if more else found[0]


WHOLE = {"decisions": 2, "ratings": 3, "standing": [["ada", "down", None], ["bob", "", "over there"]]}
WHOLE |= {"comparisons": 1, "champion": "shop-v1", "shown": [200] * 11, "exported": 2, "found": True}


def differences(one: dict[str, Any], other: dict[str, Any]) -> list[str]:
    return [name for name in sorted({*one, *other}) if one.get(name) != other.get(name)]


@pytest.mark.campaign
@pytest.mark.django_db
def test_the_first_version_upgrades_with_its_rows_to_the_schema_of_a_new_database(tmp_path: Path) -> None:
    from django.db import connection

    whole = upgraded(tmp_path / "lite", "")
    schema = whole.pop("schema")
    assert whole == WHOLE
    assert len(schema) > 40, "tables and indexes"
    assert differences(schema, schema_facts(connection)) == []


@pytest.mark.django_db
def test_the_models_are_as_migrated() -> None:
    from django.core.management import call_command

    call_command("makemigrations", check_changes=True, dry_run=True, verbosity=0)  # exits where they are not


@pytest.mark.campaign
@pytest.mark.postgres
def test_postgresql_upgrades_and_forgets(tmp_path: Path, postgres_url: str) -> None:  # noqa: F811
    whole, forgotten = upgraded(tmp_path / "home", fresh_database(postgres_url), FORGET)
    new = upgraded(tmp_path / "new", fresh_database(postgres_url), script=NEW)
    schema = whole.pop("schema")
    assert whole == WHOLE
    assert min(len(schema[part]) for part in ("columns", "constraints", "indexes")) > 40
    assert differences(schema, new) == []
    # ten tables and more held it, and files of six kinds
    assert forgotten["tables"] >= 10
    assert forgotten["files"] >= 6
    assert (forgotten["after"], forgotten["left"]) == ([[], []], [[], []])
    assert (forgotten["returned"], forgotten["imported"], forgotten["not_compacted"]) == (0, 0, "")


def breaking(operations: Iterable[Any]) -> list[str]:
    """Operations after which the version before could not write to the tables."""
    found = []
    for one in operations:
        if isinstance(one, AddField) and not (
            one.field.null or one.field.many_to_many or one.field.db_default is not NOT_PROVIDED
        ):
            found.append(f"{one.model_name}.{one.name} needs a db_default")
        elif not isinstance(one, AddField | AddIndex | CreateModel):
            found.append(one.describe())
    return found


def test_an_additive_migration_only_adds_what_the_version_before_can_leave_out() -> None:
    ours = {
        key: one for key, one in MigrationLoader(None).disk_migrations.items() if key[0] in ("feedback", "rl")
    }
    additive = {key: breaking(one.operations) for key, one in ours.items() if key[1].endswith(ADDITIVE)}
    assert additive
    assert not any(additive.values()), additive
    assert breaking(ours["rl", "0001_initial"].operations), "the measure finds what breaks"


def next_version(folder: Path) -> Path:
    """This version with one more field of a rating, and its additive migration."""
    for name in ("backend", "feedback", "rl", "templates", "static", "clients", "packed"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__", "tests"))
    shutil.copy(ROOT / "manage.py", folder)
    facts = folder / "feedback/models/facts.py"
    known = '    correction = models.TextField(null=True, blank=True, help_text="The response it should have been")'
    text = facts.read_text("utf-8")
    assert text.count(known) == 1
    more = '    mood = models.CharField(max_length=8, blank=True, default="calm", db_default="calm")\n'
    facts.write_text(text.replace(known, more + known), "utf-8")
    return folder


@pytest.mark.campaign
@pytest.mark.postgres
def test_servers_and_workers_of_two_versions_share_one_database(tmp_path: Path, postgres_url: str) -> None:  # noqa: F811
    home, url = tmp_path / "data", fresh_database(postgres_url)
    home.mkdir()
    old, new = Server(url, home), Server(url, home, root=next_version(tmp_path / "next"))
    old.migrate()
    headers = {"Authorization": f"Bearer {old.key('ingest', 'rate', 'read', 'operate')}"}

    def asked(server: Server, path: str, body: dict[str, Any]) -> httpx.Response:
        return httpx.post(f"{server.address}{path}", json=body, headers=headers, timeout=60)

    with old:
        new.manage("makemigrations", "feedback", "--name", "rating_mood_additive", "--verbosity", "0")
        new.migrate()
        with new:
            for server in (old, new):
                assert httpx.get(f"{server.address}/readyz", timeout=60).json()["migrations"] == "ok"
            for number in range(24):
                ends = (old, new) if number % 2 else (new, old)
                body = {
                    "agent": "desk",
                    "prompt": f"message {number % 3} of {number}",
                    "response": f"queue {number % 3}",
                }
                made = asked(ends[0], "/api/decisions/", body)
                assert made.status_code == 201, made.text
                rating = {"thumb": "up"} if number % 4 else {"thumb": "down", "correction": "queue 1"}
                rated = asked(ends[1], f"/api/decisions/{made.json()['id']}/ratings/", rating)
                assert rated.status_code == 201, rated.text
            assert query(old, "SELECT mood, count(*) FROM feedback_rating GROUP BY mood") == [("calm", 24)]
            for queues, works in ((old, new), (new, old)):
                queued = asked(queues, "/api/runs/", {"agent": "desk", "method": "linear"})
                assert queued.status_code in (201, 202), queued.text
                with works.training_worker():
                    status = ended(works, queued.json()["id"], headers)
                assert status == "trained", works.log()
            old.manage("doctor")
        query(
            old,
            "INSERT INTO django_migrations (app, name, applied) VALUES ('rl', '0099_less', now()) RETURNING id",
        )
        assert httpx.get(f"{old.address}/readyz", timeout=60).status_code == 503


def ended(server: Server, run: int, headers: dict[str, str]) -> str:
    """Status of a run once it has ended."""
    deadline = time.monotonic() + 180
    while time.monotonic() < deadline:
        status = str(
            httpx.get(f"{server.address}/api/runs/{run}/", headers=headers, timeout=60).json()["status"]
        )
        if status not in ("queued", "running"):
            return status
        time.sleep(0.5)
    raise AssertionError(server.log())
