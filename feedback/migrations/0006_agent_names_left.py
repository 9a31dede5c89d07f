"""Agents keep their names, so that prompts are hashed under them. Several ratings of a decision are counted."""

from __future__ import annotations

from django.db import migrations


class Migration(migrations.Migration):
    dependencies = [("feedback", "0005_key_budget_additive")]
    operations = [migrations.DeleteModel("AgentName"), migrations.RemoveField("agentsettings", "aggregation")]
