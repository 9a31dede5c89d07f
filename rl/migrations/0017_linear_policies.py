"""The kind of a policy: a LoRA adapter, as all were, or a linear policy."""

from django.db import migrations, models


class Migration(migrations.Migration):
    dependencies = [("rl", "0016_gate_intervals")]

    operations = [
        migrations.AddField(
            model_name="policy",
            name="kind",
            field=models.CharField(
                choices=[("adapter", "LoRA adapter"), ("linear", "linear")], default="adapter", max_length=16
            ),
        ),
        migrations.AlterField(
            model_name="policy",
            name="adapter_path",
            field=models.CharField(
                help_text="Folder of the adapter or linear policy, relative to RATCHET_HOME where inside it",
                max_length=500,
            ),
        ),
        migrations.AddConstraint(
            model_name="policy",
            constraint=models.CheckConstraint(
                condition=models.Q(kind__in=["adapter", "linear"]), name="policy_kind_known"
            ),
        ),
    ]
