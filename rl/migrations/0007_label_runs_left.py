"""Label models with their rights, and datasets of several rated responses per prompt, go."""

from __future__ import annotations

from typing import Any

from django.db import migrations, models


def rights_remove(apps: Any, schema_editor: Any) -> None:
    kinds = apps.get_model("contenttypes", "ContentType").objects.using(schema_editor.connection.alias)
    kinds.filter(app_label="rl", model="labelrun").delete()


class Migration(migrations.Migration):
    dependencies = [("rl", "0006_judge_budget_additive")]
    operations = [
        migrations.DeleteModel("LabelRun"),
        migrations.RunPython(rights_remove, migrations.RunPython.noop),
        migrations.AlterField(
            "snapshot",
            "kind",
            models.CharField(
                max_length=16,
                choices=[
                    ("pairs", "preference pairs"),
                    ("labels", "good and bad responses"),
                    ("scores", "scored responses"),
                    ("corrections", "demonstrations"),
                    ("prompts", "prompts"),
                    ("pairs_and_scores", "preference pairs and scored responses"),
                ],
            ),
        ),
    ]
