"""Import traces and assessments from an MLflow server."""

from __future__ import annotations

from pydantic import Field

from backend.command import CommandOptions, RatchetCommand, Result
from feedback.transfer.import_report import next_steps
from feedback.transfer.mlflow import traces_import


class Options(CommandOptions):
    experiment: str
    """NAME: Experiment whose traces are read."""
    agent: str = Field(
        "",
        description="SLUG: Agent that the decisions are stored for (default: the experiment's name). "
        "Example: --agent support-bot",
    )


class Command(RatchetCommand[Options, Result]):
    help = (
        "Import the traces of an experiment from the MLflow server of MLFLOW_TRACKING_URI: model calls as decisions, "
        "assessments as ratings. Run it again, by cron for instance: it reads what is new, and assessments added to "
        "older traces. undo_import removes a run. Example: manage.py import_mlflow shop --agent support-bot"
    )

    def work(self, options: Options) -> Result:
        with self.bar(f"import {options.experiment}") as bar:
            report = traces_import(
                options.experiment, options.agent, lambda seen: bar.update(0, 0, f"{seen:,} traces")
            )
        return {**report.as_dict(), "headline": report.headline, "next": next_steps(report)}

    def show(self, result: Result) -> None:
        self.stdout.write(f"{result['file']}: {result['headline'] or 'no traces'}")
        for reason, count in result["skipped_because"].items():
            self.stdout.write(f"  skipped {count}: {reason}")
        for row in result["refused"]:
            self.stdout.write(f"  refused {row['key']}: {row['reason']}")
        for step in result["next"]:
            self.stdout.write(f"Next: {step}")
