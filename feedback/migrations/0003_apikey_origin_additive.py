from django.db import migrations, models


class Migration(migrations.Migration):

    dependencies = [
        ('feedback', '0002_roles'),
    ]

    operations = [
        migrations.AddField(
            model_name='apikey',
            name='agent',
            field=models.CharField(blank=True, db_default='', default='', help_text='Of a publishable key: the only agent it rates', max_length=64),
        ),
        migrations.AddField(
            model_name='apikey',
            name='origin',
            field=models.CharField(blank=True, db_default='', default='', help_text='Of a publishable key: the only site it works on, such as https://shop.example', max_length=200),
        ),
    ]
