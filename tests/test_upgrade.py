"""The upgrade from the first migrations, with rows in every table of that time: nothing lost, everything readable."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

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
from feedback.api.shown import decision_shown
from feedback.exported import Selection
from feedback.exporting import ExportReport, export_stream
from feedback.models import Decision, Rating
from feedback.selectors import comparisons_standing, ratings_standing
from rl.models import Policy
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
}))
"""


def upgraded(home: Path, database: str) -> Any:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", UPGRADE], cwd=ROOT, capture_output=True, text=True,
        env={**os.environ, "RATCHET_HOME": str(home), "DATABASE_URL": database,
             "DJANGO_SETTINGS_MODULE": "backend.settings"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


WHOLE = {
    "decisions": 2,
    "ratings": 3,
    "standing": [["ada", "down", None], ["bob", "", "over there"]],
    "comparisons": 1,
    "champion": "shop-v1",
    "shown": [200] * 11,
    "exported": 2,
    "found": True,
}


def test_the_first_version_upgrades_with_its_rows(tmp_path: Path) -> None:
    assert upgraded(tmp_path / "lite", "") == WHOLE
