"""Prompts' sides are written down. What was in a dataset before keeps the side it had there.

Rows of snapshots name their prompt and its side, so `enter` is also how a lost table is filled again (docs/datasets.md). Where a snapshot's file is gone, the agent's prompts stand as the rule before had them: by their hash.
"""

import json

import django.utils.timezone
from django.conf import settings
from django.db import migrations, models

AT_ONCE = 2000


def enter(apps, schema_editor):
    database = schema_editor.connection.alias
    Snapshot = apps.get_model("rl", "Snapshot")
    for agent in Snapshot.objects.using(database).order_by().values_list("agent", flat=True).distinct():
        whole = True
        for path in Snapshot.objects.using(database).filter(agent=agent).order_by("id").values_list("path", flat=True):
            whole &= enter_snapshot(apps, database, agent, path)
        if not whole:
            enter_by_hash(apps, database, agent)


def enter_snapshot(apps, database, agent, path):
    try:
        with (settings.RATCHET_HOME / path).open("rb") as file:
            write(apps, database, agent, ((row["prompt_hash"], row["split"]) for row in map(json.loads, file)))
    except (OSError, ValueError, KeyError):
        return False
    return True


def enter_by_hash(apps, database, agent):
    Decision = apps.get_model("feedback", "Decision")
    rows = Decision.objects.using(database).filter(agent=agent).order_by()
    write(
        apps, database, agent,
        ((name, by_hash(name)) for name in rows.values_list("prompt_hash", flat=True).distinct().iterator()),
    )


def by_hash(prompt_hash):
    share = int(prompt_hash[:8], 16) / 2**32
    return "train" if share < 0.8 else "eval" if share < 0.9 else "holdout"


def write(apps, database, agent, sides):
    PromptSplit = apps.get_model("rl", "PromptSplit")
    seen, rows = set(), []

    def keep():
        PromptSplit.objects.using(database).bulk_create(rows, ignore_conflicts=True)
        rows.clear()

    for prompt_hash, split in sides:
        if prompt_hash not in seen:
            seen.add(prompt_hash)
            rows.append(PromptSplit(prompt_hash=prompt_hash, agent=agent, split=split))
        if len(rows) == AT_ONCE:
            keep()
    keep()


class Migration(migrations.Migration):

    dependencies = [
        ("feedback", "0009_policy_newest"),
        ("rl", "0012_label_runs"),
    ]

    operations = [
        migrations.CreateModel(
            name="PromptSplit",
            fields=[
                ("prompt_hash", models.CharField(max_length=64, primary_key=True, serialize=False)),
                ("agent", models.CharField(max_length=64)),
                ("split", models.CharField(choices=[("train", "Train"), ("eval", "Eval"), ("holdout", "Holdout")], max_length=8)),
                ("created_at", models.DateTimeField(default=django.utils.timezone.now, editable=False)),
            ],
            options={
                "indexes": [models.Index(fields=["agent", "split"], name="prompt_split_by_agent")],
                "constraints": [models.CheckConstraint(condition=models.Q(("split__in", ["train", "eval", "holdout"])), name="prompt_split_known")],
            },
        ),
        migrations.RunPython(enter, migrations.RunPython.noop),
    ]
