"""Operators and admins may set up upstreams in the admin."""

from django.db import migrations


def grant(apps, schema_editor):
    database = schema_editor.connection.alias
    kind, _ = apps.get_model("contenttypes", "ContentType").objects.using(database).get_or_create(
        app_label="rl", model="upstream"
    )
    for action in ("add", "change", "delete", "view"):
        right, _ = apps.get_model("auth", "Permission").objects.using(database).get_or_create(
            content_type=kind,
            codename=f"{action}_upstream",
            defaults={"name": f"Can {action} upstream"},
        )
        for group in apps.get_model("auth", "Group").objects.using(database).filter(name__in=["operator", "admin"]):
            group.permissions.add(right)


class Migration(migrations.Migration):
    dependencies = [("rl", "0029_judging_rounds")]
    operations = [migrations.RunPython(grant, migrations.RunPython.noop)]
