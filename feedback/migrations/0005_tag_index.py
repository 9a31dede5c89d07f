from django.db import migrations

NAME = "feedback_decision_tags_gin"


def make(apps, schema_editor):
    # SQLite has no index of the values in a list
    if schema_editor.connection.vendor == "postgresql":
        schema_editor.execute(f"CREATE INDEX {NAME} ON feedback_decision USING gin (tags jsonb_path_ops)")


def remove(apps, schema_editor):
    if schema_editor.connection.vendor == "postgresql":
        schema_editor.execute(f"DROP INDEX IF EXISTS {NAME}")


class Migration(migrations.Migration):
    dependencies = [("feedback", "0004_queue_worth")]
    operations = [migrations.RunPython(make, remove)]
