"""An agent names who steps in for its champion; an upstream takes more requests at once."""

from django.db import migrations, models


class Migration(migrations.Migration):

    dependencies = [
        ("rl", "0027_incumbents"),
    ]

    operations = [
        migrations.AddField(
            model_name="servingsettings",
            name="fallbacks",
            field=models.JSONField(blank=True, default=list, help_text='Policies that step in where the champion fails, in this order, such as ["support-bot-v214", "base"]; empty: the base model, or nobody for a hosted champion'),
        ),
        migrations.AlterField(
            model_name="upstream",
            name="concurrency",
            field=models.PositiveIntegerField(default=128, help_text="Requests at once, at most, per process"),
        ),
    ]
