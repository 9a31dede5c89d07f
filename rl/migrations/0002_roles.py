"""The rights of the groups on the tables of rl, and the daily calculation of rewards."""

from __future__ import annotations

from typing import Any

from django.db import migrations

RIGHTS: dict[str, list[str]] = {
    "rl.agentdefinition": ["add", "change", "delete", "view"],
    "rl.arm": ["add", "change", "delete", "view"],
    "rl.artifact": ["view"],
    "rl.evaluation": ["view"],
    "rl.experiment": ["add", "change", "view"],
    "rl.experimentevent": ["view"],
    "rl.gatesettings": ["add", "change", "delete", "view"],
    "rl.goldencase": ["add", "change", "delete", "view"],
    "rl.labelrun": ["view"],
    "rl.learnersettings": ["add", "change", "delete", "view"],
    "rl.policy": ["change", "view"],
    "rl.policyevent": ["view"],
    "rl.rewardrecord": ["view"],
    "rl.rewardsettings": ["add", "change", "delete", "view"],
    "rl.runmetric": ["view"],
    "rl.servingsettings": ["add", "change", "delete", "view"],
    "rl.snapshot": ["view"],
    "rl.trainingrun": ["add", "change", "view"],
    "rl.upstream": ["add", "change", "delete", "view"],
}
"""Table -> what operators and admins may do with its rows."""


def rights_grant(apps: Any, schema_editor: Any) -> None:
    """Django makes its own permissions after the last migration; the rows are made here so that groups can have them."""
    database = schema_editor.connection.alias
    groups = apps.get_model("auth", "Group").objects.using(database)
    permissions = apps.get_model("auth", "Permission").objects.using(database)
    kinds = apps.get_model("contenttypes", "ContentType").objects.using(database)
    for group_name in ("operator", "admin"):
        group, _ = groups.get_or_create(name=group_name)
        for label, actions in RIGHTS.items():
            app, _, model = label.partition(".")
            kind, _ = kinds.get_or_create(app_label=app, model=model)
            title = apps.get_model(app, model)._meta.verbose_name_raw
            for action in actions:
                right, _ = permissions.get_or_create(
                    content_type=kind,
                    codename=f"{action}_{model}",
                    defaults={"name": f"Can {action} {title}"},
                )
                group.permissions.add(right)


def rewards_schedule(apps: Any, schema_editor: Any) -> None:
    """Workers calculate pending rewards once a day; an operator may change or delete the row in the admin."""
    apps.get_model("django_q", "Schedule").objects.using(schema_editor.connection.alias).get_or_create(
        name="daily rewards", defaults={"func": "rl.tasks.rewards", "schedule_type": "D", "repeats": -1}
    )


class Migration(migrations.Migration):
    dependencies = [
        ("rl", "0001_initial"),
        ("feedback", "0002_roles"),
        ("django_q", "0018_task_success_index"),
    ]
    operations = [
        migrations.RunPython(rights_grant, migrations.RunPython.noop),
        migrations.RunPython(rewards_schedule, migrations.RunPython.noop),
    ]
