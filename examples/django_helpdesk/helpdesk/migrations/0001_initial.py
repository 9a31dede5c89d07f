"""The ticket's table."""

from django.db import migrations, models


class Migration(migrations.Migration):
    initial = True
    dependencies = []
    operations = [
        migrations.CreateModel(
            name="Ticket",
            fields=[
                ("id", models.BigAutoField(primary_key=True, serialize=False)),
                ("customer", models.CharField(max_length=80)),
                ("question", models.TextField()),
                ("suggestion", models.TextField(blank=True)),
                ("decision_id", models.UUIDField(null=True, help_text="Ratchet's id of the suggestion, to rate it by")),
                ("thumb", models.CharField(max_length=4, blank=True, choices=[("up", "Good"), ("down", "Bad")])),
            ],
        )
    ]
