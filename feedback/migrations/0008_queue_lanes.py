from django.db import migrations, models
from django.db.models import F, Q

WAITING = "ratings_human < ratings_wanted"
ORDER = "ratings_human, asking_worth DESC, created_at, id, agent, policy"
LANES = {
    **{
        f"decision_asking_by_tag_{place}": f"((tags ->> {place}), {ORDER}) WHERE {WAITING} AND (tags ->> {place}) IS NOT NULL"
        for place in range(3)
    },
    # a fourth tag and those after it are seldom there
    "decision_asking_by_tags": f"USING gin (tags jsonb_path_ops) WHERE {WAITING} AND (tags ->> 3) IS NOT NULL",
}


def make(apps, schema_editor):
    # SQLite looks through the queue
    if schema_editor.connection.vendor == "postgresql":
        for name, definition in LANES.items():
            schema_editor.execute(f"CREATE INDEX {name} ON feedback_decision {definition}")


def remove(apps, schema_editor):
    if schema_editor.connection.vendor == "postgresql":
        for name in LANES:
            schema_editor.execute(f"DROP INDEX IF EXISTS {name}")


class Migration(migrations.Migration):
    dependencies = [("feedback", "0007_suggestions")]
    operations = [
        migrations.AddIndex(
            model_name="decision",
            index=models.Index(
                fields=["policy", "ratings_human", "-asking_worth", "created_at", "id", "agent"],
                condition=Q(ratings_human__lt=F("ratings_wanted")) & ~Q(policy=""),
                name="decision_asking_by_policy",
            ),
        ),
        migrations.RunPython(make, remove),
    ]
