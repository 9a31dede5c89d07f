"""Reward models have no stages: the newest that ranks better than chance is used."""

from __future__ import annotations

from typing import Any

from django.db import migrations, models


def rights_remove(apps: Any, schema_editor: Any) -> None:
    kinds = apps.get_model("contenttypes", "ContentType").objects.using(schema_editor.connection.alias)
    kinds.filter(app_label="rl", model="rewardmodelevent").delete()


class Migration(migrations.Migration):
    dependencies = [("rl", "0011_route_additive")]
    operations = [
        migrations.DeleteModel("RewardModelEvent"),
        migrations.RunPython(rights_remove, migrations.RunPython.noop),
        migrations.RemoveConstraint("rewardmodelversion", "reward_model_one_champion_per_agent"),
        migrations.RemoveConstraint("rewardmodelversion", "reward_model_stage_known"),
        migrations.RemoveIndex("rewardmodelversion", "rl_rewardmo_agent_f57b04_idx"),
        migrations.RemoveField("rewardmodelversion", "stage"),
        migrations.AddIndex(
            "rewardmodelversion", models.Index(fields=["agent"], name="rl_rewardmo_agent_6c6886_idx")
        ),
    ]
