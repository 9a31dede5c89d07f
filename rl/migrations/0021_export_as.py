from django.db import migrations, models


class Migration(migrations.Migration):
    dependencies = [("rl", "0020_follow_up_export")]

    operations = [
        migrations.AddField(
            model_name="trainingrun",
            name="export_as",
            field=models.CharField(
                blank=True,
                default="",
                help_text="Form its policy is to be exported in (`gguf:q8_0`, `onnx`, `ollama`); empty: the usual one",
                max_length=64,
            ),
        ),
    ]
