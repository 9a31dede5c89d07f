"""Losses of reward and of valid answers are bounded by an interval, no longer by a point: the old defaults give way."""

from django.db import migrations, models

BEFORE = {"max_reward_loss": 0.1, "max_invalid_gain": 0.03}
NOW = {"max_reward_loss": 0.2, "max_invalid_gain": 0.1}


def widen(apps, schema_editor):
    """A bound that an operator chose stays; one that only stood at the default follows it."""
    rows = apps.get_model("rl", "GateSettings").objects.using(schema_editor.connection.alias)
    for name, value in BEFORE.items():
        rows.filter(**{name: value}).update(**{name: NOW[name]})


class Migration(migrations.Migration):
    dependencies = [("rl", "0015_learnt_use")]

    operations = [
        migrations.AlterField(
            model_name="gatesettings",
            name="max_reward_loss",
            field=models.FloatField(default=0.2, help_text="Fall of the mean reward that must be ruled out"),
        ),
        migrations.AlterField(
            model_name="gatesettings",
            name="max_invalid_gain",
            field=models.FloatField(default=0.1, help_text="Fall of the share of valid answers that must be ruled out"),
        ),
        migrations.RunPython(widen, migrations.RunPython.noop),
    ]
