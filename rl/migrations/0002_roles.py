"""What operators and admins may do with runs and policies."""

from django.db import migrations

READS = ["snapshot", "trainingrun", "runmetric", "policy", "evaluation", "artifact", "policyevent"]
OPERATOR = {
    **{model: ["view"] for model in READS},
    "trainingrun": ["add", "view"],
    "policy": ["change", "view"],
}


def grant(apps, schema_editor):
    database = schema_editor.connection.alias
    ContentType = apps.get_model("contenttypes", "ContentType")
    Permission = apps.get_model("auth", "Permission")
    Group = apps.get_model("auth", "Group")
    for model, actions in OPERATOR.items():
        kind, _ = ContentType.objects.using(database).get_or_create(app_label="rl", model=model)
        for action in actions:
            right, _ = Permission.objects.using(database).get_or_create(
                content_type=kind,
                codename=f"{action}_{model}",
                defaults={"name": f"Can {action} {NAMES.get(model, model)}"},
            )
            for group in Group.objects.using(database).filter(name__in=["operator", "admin"]):
                group.permissions.add(right)


NAMES = {"trainingrun": "training run", "runmetric": "run metric", "policyevent": "policy event"}


class Migration(migrations.Migration):
    dependencies = [("rl", "0001_initial"), ("feedback", "0003_roles")]
    operations = [migrations.RunPython(grant, migrations.RunPython.noop)]
