
from django.db import migrations, models


class Migration(migrations.Migration):
    dependencies = [
        ("rl", "0023_pairs_and_scores"),
    ]

    operations = [
        migrations.AlterField(
            model_name="rewardmodelversion",
            name="sha256",
            field=models.CharField(help_text="Of its file of weights", max_length=64),
        ),
    ]
