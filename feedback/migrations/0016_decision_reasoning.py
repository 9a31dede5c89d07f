from django.db import migrations, models


class Migration(migrations.Migration):

    dependencies = [
        ("feedback", "0015_help_in_plain_words"),
    ]

    operations = [
        migrations.AddField(
            model_name='decision',
            name='reasoning',
            field=models.TextField(blank=True, default='', help_text='What the model thought before it answered'),
        ),
    ]
