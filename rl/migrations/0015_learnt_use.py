"""What became of feedback in a run, how much a run's rows were made of, and which rewards speak for themselves."""

from django.db import migrations, models

import rl.models.learning

PEOPLE = {"ratings", "comparisons"}
FORM = {"agent", "format", "syntax", "efficiency"}
AT_ONCE = 1000


def settle(apps, schema_editor):
    """What was noted before counted as trained on, and a run as having read all that its snapshot was made from."""
    database = schema_editor.connection.alias
    apps.get_model("rl", "Learnt").objects.using(database).update(use="trained")
    Run = apps.get_model("rl", "TrainingRun")
    for run in Run.objects.using(database).filter(snapshot__isnull=False).select_related("snapshot").iterator():
        Run.objects.using(database).filter(pk=run.pk).update(feedback_count=run.snapshot.feedback_count)
    Record = apps.get_model("rl", "RewardRecord")
    measured = []
    for pk, components in Record.objects.using(database).order_by().values_list("pk", "components").iterator(AT_ONCE):
        names = {name for horizon in components.values() for name in horizon.get("parts", {})}
        if names - PEOPLE - FORM:
            measured.append(pk)
    for start in range(0, len(measured), AT_ONCE // 2):
        chunk = measured[start : start + AT_ONCE // 2]
        Record.objects.using(database).filter(pk__in=chunk).update(measured=True)


class Migration(migrations.Migration):
    dependencies = [("rl", "0014_reward_models")]

    operations = [
        migrations.AddField(
            model_name="trainingrun",
            name="feedback_count",
            field=models.PositiveIntegerField(
                default=0,
                help_text="Ratings, comparisons, outcomes, traces and demonstrations that its training rows are of",
            ),
        ),
        migrations.AddField(
            model_name="learnt",
            name="use",
            field=models.CharField(
                choices=[
                    ("trained", "made a row that was trained on"),
                    ("held_out", "made a row that is kept for judging"),
                    ("left_out", "made no row"),
                ],
                default="left_out",
                max_length=8,
            ),
        ),
        migrations.AlterField(
            model_name="learnt",
            name="feedback",
            field=models.UUIDField(
                help_text="Id of a rating, comparison or outcome; or of a decision that was a demonstration, or whose "
                "trace spoke"
            ),
        ),
        migrations.AlterField(
            model_name="learnersettings",
            name="method",
            field=models.CharField(choices=rl.models.learning.method_choices, default="auto", max_length=32),
        ),
        migrations.AlterField(
            model_name="learnersettings",
            name="max_buffer_size",
            field=models.PositiveIntegerField(
                default=10000,
                help_text="Most new feedback that one retrain learns from, the newest; the rest waits for the next",
            ),
        ),
        migrations.AddField(
            model_name="rewardrecord",
            name="measured",
            field=models.BooleanField(
                default=False,
                help_text="Whether an outcome, its trace or a function the operator named spoke, beside people and form",
            ),
        ),
        migrations.AddField(
            model_name="rewardsettings",
            name="threshold",
            field=models.FloatField(
                default=0.5,
                help_text="Reward in [0, 1] from which a response that nobody rated is a good one; below it is a bad one",
            ),
        ),
        migrations.RunPython(settle, migrations.RunPython.noop),
        migrations.AddConstraint(
            model_name="learnt",
            constraint=models.CheckConstraint(
                condition=models.Q(use__in=["trained", "held_out", "left_out"]), name="learnt_use_known"
            ),
        ),
        migrations.AddConstraint(
            model_name="rewardsettings",
            constraint=models.CheckConstraint(
                condition=models.Q(threshold__gt=0.0, threshold__lt=1.0), name="reward_threshold_within_0_1"
            ),
        ),
    ]
