"""The groups rater, operator and admin with their rights on feedback, and PostgreSQL's indexes of tags."""

from __future__ import annotations

from typing import Any

from django.db import migrations

RIGHTS: dict[str, dict[str, list[str]]] = {
    "admin": {
        "auth.group": ["change", "view"],
        "auth.user": ["add", "change", "delete", "view"],
        "feedback.agentsettings": ["add", "change", "delete", "view"],
        "feedback.apikey": ["add", "change", "view"],
        "feedback.comparison": ["add", "view"],
        "feedback.decision": ["add", "view"],
        "feedback.outcome": ["add", "view"],
        "feedback.rating": ["add", "view"],
        "feedback.suggestion": ["view"],
        "feedback.trace": ["add", "view"],
        "feedback.withdrawal": ["view"],
    },
    "operator": {
        "feedback.agentsettings": ["add", "change", "view"],
        "feedback.comparison": ["add", "view"],
        "feedback.decision": ["add", "view"],
        "feedback.outcome": ["add", "view"],
        "feedback.rating": ["add", "view"],
        "feedback.suggestion": ["view"],
        "feedback.trace": ["add", "view"],
        "feedback.withdrawal": ["view"],
    },
    "rater": {"feedback.comparison": ["add"], "feedback.rating": ["add"]},
}
"""Group -> table -> what its members may do with the rows."""

WAITING = "ratings_human < ratings_wanted"
ORDER = "ratings_human, annotation_priority DESC, created_at, id, agent, policy"
INDEXES = {
    "feedback_decision_tags_gin": "USING gin (tags jsonb_path_ops)",
    **{
        f"decision_asking_by_tag_{place}": f"((tags ->> {place}), {ORDER}) WHERE {WAITING} AND (tags ->> {place}) IS NOT NULL"
        for place in range(3)
    },
    # a fourth tag and those after it are seldom there
    "decision_asking_by_tags": f"USING gin (tags jsonb_path_ops) WHERE {WAITING} AND (tags ->> 3) IS NOT NULL",
}
"""Indexes of PostgreSQL that a Django model cannot declare. SQLite has no index of the values in a list."""


def indexes_make(apps: Any, schema_editor: Any) -> None:
    if schema_editor.connection.vendor == "postgresql":
        for name, definition in INDEXES.items():
            schema_editor.execute(f"CREATE INDEX {name} ON feedback_decision {definition}")


def rights_grant(apps: Any, schema_editor: Any) -> None:
    """Django makes its own permissions after the last migration; the rows are made here so that groups can have them."""
    database = schema_editor.connection.alias
    groups = apps.get_model("auth", "Group").objects.using(database)
    permissions = apps.get_model("auth", "Permission").objects.using(database)
    kinds = apps.get_model("contenttypes", "ContentType").objects.using(database)
    for group_name, rights in RIGHTS.items():
        group, _ = groups.get_or_create(name=group_name)
        for label, actions in rights.items():
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


class Migration(migrations.Migration):
    dependencies = [
        ("feedback", "0001_initial"),
        ("auth", "0012_alter_user_first_name_max_length"),
        ("contenttypes", "0002_remove_content_type_name"),
    ]
    operations = [
        migrations.RunPython(rights_grant, migrations.RunPython.noop),
        migrations.RunPython(indexes_make, migrations.RunPython.noop),
    ]
