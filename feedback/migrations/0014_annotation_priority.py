from django.db import migrations, models
from django.db.models import F, Q

WAITING = Q(ratings_human__lt=F("ratings_wanted"))
RENAME = migrations.RenameField("decision", "asking_worth", "annotation_priority")
INDEXES = (
    ("decision_asking_by_agent", ("agent",), (), WAITING),
    ("decision_asking", (), (), WAITING),
    ("decision_asking_by_policy", ("policy",), ("agent",), WAITING & ~Q(policy="")),
)


class Migration(migrations.Migration):
    """The column by the field's word. Both databases rename it within their indexes: nothing is built anew."""

    dependencies = [("feedback", "0013_api_key_name")]
    operations = [
        migrations.SeparateDatabaseAndState(
            database_operations=[RENAME],
            state_operations=[
                *(migrations.RemoveIndex("decision", name) for name, *_ in INDEXES),
                RENAME,
                *(
                    migrations.AddIndex(
                        "decision",
                        models.Index(
                            fields=[*first, "ratings_human", "-annotation_priority", "created_at", "id", *last],
                            condition=condition,
                            name=name,
                        ),
                    )
                    for name, first, last, condition in INDEXES
                ),
            ],
        )
    ]
