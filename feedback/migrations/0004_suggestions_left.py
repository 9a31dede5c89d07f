"""Suggested ratings and their rights go."""

from __future__ import annotations

from typing import Any

from django.db import migrations


def rights_remove(apps: Any, schema_editor: Any) -> None:
    kinds = apps.get_model("contenttypes", "ContentType").objects.using(schema_editor.connection.alias)
    kinds.filter(app_label="feedback", model="suggestion").delete()


class Migration(migrations.Migration):
    dependencies = [("feedback", "0003_apikey_origin_additive")]
    operations = [
        migrations.DeleteModel("Suggestion"),
        migrations.RunPython(rights_remove, migrations.RunPython.noop),
    ]
