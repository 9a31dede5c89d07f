"""The groups rater, operator and admin, with what each may do with feedback; rl adds its part."""

from django.db import migrations

RATER = {"rating": ["add"], "comparison": ["add"]}
READS = ["decision", "rating", "comparison", "outcome", "trace", "agentsettings"]
OPERATOR = {
    **{model: ["view"] for model in READS},
    "decision": ["add", "view"],
    "rating": ["add", "view"],
    "comparison": ["add", "view"],
    "outcome": ["add", "view"],
    "trace": ["add", "view"],
    "agentsettings": ["add", "change", "view"],
}
ADMIN = {**OPERATOR, "agentsettings": ["add", "change", "delete", "view"], "apikey": ["add", "change", "view"]}
PEOPLE = {"user": ["add", "change", "delete", "view"], "group": ["change", "view"]}


def permissions(apps, database, app, rights):
    """The rows of these rights. On a new database they are made here: Django makes its own after the last migration."""
    ContentType = apps.get_model("contenttypes", "ContentType")
    Permission = apps.get_model("auth", "Permission")
    for model, actions in rights.items():
        kind, _ = ContentType.objects.using(database).get_or_create(app_label=app, model=model)
        for action in actions:
            yield Permission.objects.using(database).get_or_create(
                content_type=kind,
                codename=f"{action}_{model}",
                defaults={"name": f"Can {action} {NAMES.get(model, model)}"},
            )[0]


NAMES = {"agentsettings": "agent settings", "apikey": "api key"}


def make(apps, schema_editor):
    database = schema_editor.connection.alias
    Group = apps.get_model("auth", "Group")
    for name, rights in (("rater", RATER), ("operator", OPERATOR), ("admin", ADMIN)):
        group, _ = Group.objects.using(database).get_or_create(name=name)
        group.permissions.add(*permissions(apps, database, "feedback", rights))
        if name == "admin":
            group.permissions.add(*permissions(apps, database, "auth", PEOPLE))


def remove(apps, schema_editor):
    Group = apps.get_model("auth", "Group")
    Group.objects.using(schema_editor.connection.alias).filter(name__in=["rater", "operator", "admin"]).delete()


class Migration(migrations.Migration):
    dependencies = [
        ("feedback", "0002_queue_keys_traces"),
        ("auth", "0012_alter_user_first_name_max_length"),
        ("contenttypes", "0002_remove_content_type_name"),
    ]
    operations = [migrations.RunPython(make, remove)]
