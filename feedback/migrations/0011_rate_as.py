"""Keys made before `rate_as` named whose ratings they sent as they liked: they go on doing so."""

from typing import Any

from django.db import migrations, models


def keys_keep_naming_raters(apps: Any, schema_editor: Any) -> None:
    for key in apps.get_model("feedback", "ApiKey").objects.all():
        if "rate" in key.scopes and "rate_as" not in key.scopes:
            after = key.scopes.index("rate") + 1
            key.scopes = [*key.scopes[:after], "rate_as", *key.scopes[after:]]
            key.save(update_fields=["scopes"])


class Migration(migrations.Migration):
    dependencies = [("feedback", "0010_import_batches")]

    operations = [
        migrations.AlterField(
            model_name="apikey",
            name="scopes",
            field=models.JSONField(default=list, help_text="Of ingest, rate, rate_as, read, operate"),
        ),
        migrations.RunPython(keys_keep_naming_raters, migrations.RunPython.noop),
    ]
