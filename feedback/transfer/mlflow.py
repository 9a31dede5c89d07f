"""Traces of an MLflow server as decisions, and their assessments as ratings, asked for by cursor (extra `mlflow`)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any

from django.conf import settings
from django.db import transaction

from feedback.models import Decision, ImportBatch
from feedback.storage.sql import rows_in
from feedback.transfer.formats.base import attempt
from feedback.transfer.formats.declared import slug
from feedback.transfer.formats.files import Tally
from feedback.transfer.formats.mlflow import MLFLOW, assessment_records, run_ids, trace_records
from feedback.transfer.formats.records import ImportedDecision, ImportedTrace, Record, RowError
from feedback.transfer.import_ import records_write
from feedback.transfer.import_plans import DEFAULT_AGENT, Origin, Raters
from feedback.transfer.import_report import ImportReport, refused_row_summary

if TYPE_CHECKING:
    from mlflow.entities import Experiment, TraceInfo
    from mlflow.tracking import MlflowClient

PAGE = 100
"""Traces of one request; they are stored together."""

LATE = timedelta(days=1)
"""Traces this much older than the newest known one are still asked for: a trace is sent when its work ends."""

BROKEN = ("BAD_REQUEST", "NOT_FOUND", "RESOURCE_DOES_NOT_EXIST")
"""Errors of a single trace whose spans are gone or damaged."""


class MlflowRefused(ValueError):
    """The server cannot be asked, or refuses. What was stored before stays; the next run goes on from there."""


@dataclass
class _Run:
    """One import under way."""

    client: MlflowClient
    experiment: Experiment
    agent: str
    options: dict[str, Any]
    """Server and experiment, and as `cursor` the start of the newest trace that was read, in ms since 1970."""
    report: ImportReport
    batch: ImportBatch | None = None
    raters: Raters = field(default_factory=Tally)

    def pages(self, bounds: str) -> Iterator[Sequence[TraceInfo]]:
        token: str | None = None
        while True:
            page = self.client.search_traces(
                locations=[self.experiment.experiment_id],
                filter_string=bounds,
                max_results=PAGE,
                order_by=["timestamp_ms ASC"],
                page_token=token,
                include_spans=False,
            )
            yield [trace.info for trace in page]
            if not (token := page.token):
                return

    def records(self, infos: Sequence[TraceInfo], fresh: bool) -> list[Record]:
        """Records of a page: of new traces all of it, of others their assessments."""
        known = _known([info.trace_id for info in infos])
        found: list[Record] = []
        for info in infos:
            if not fresh or info.trace_id in known:
                about = info.to_dict().get("assessments")
                found += attempt(0, info.trace_id, partial(assessment_records, info.trace_id, about, 0))
            elif info.state != "IN_PROGRESS":
                found += attempt(0, info.trace_id, partial(self._whole, info.trace_id))
        ours = (ImportedDecision, ImportedTrace)
        return [replace(one, agent=self.agent) if isinstance(one, ours) else one for one in found]

    def _whole(self, trace_id: str) -> Iterator[Record]:
        from mlflow.exceptions import MlflowException

        try:
            trace = self.client.get_trace(trace_id, display=False).to_dict()
        except MlflowException as error:
            if error.error_code not in BROKEN:
                raise
            raise RowError(str(error)) from None
        return trace_records(trace["info"], trace["data"], trace["info"].get("assessments"), 0)

    def store(self, records: list[Record], newest: int) -> None:
        """Store a page together with the cursor after it."""
        with transaction.atomic():
            if self.batch is None:
                self.batch = ImportBatch.objects.create(
                    file=self.report.file[-255:],
                    format=MLFLOW.name,
                    bytes=0,
                    options=self.options,
                    actor="import_mlflow",
                )
            part = records_write(records, Origin(MLFLOW.name, None, self.batch.pk), self.raters)
            self.raters.update(part.raters)
            self.report.add(part.report)
            self.options["cursor"] = max(self.options["cursor"], newest)
            self.batch.agent, self.batch.counts = self.report.agent, self.report.counts
            self.batch.skipped_because = dict(self.report.skipped_because)
            self.batch.refused = [refused_row_summary(row) for row in self.report.refused]
            self.batch.attached = [*self.batch.attached, *map(str, part.attached)]
            self.batch.save()


def traces_import(
    experiment: str, agent: str = "", progress: Callable[[int], None] = lambda seen: None
) -> ImportReport:
    """Store what an experiment's traces hold beyond what is here: new traces, and assessments of all of them.

    progress: called with the number of traces looked at. Called again it adds nothing. Raises MlflowRefused; the pages
    stored until then stay.
    """
    if not settings.MLFLOW_TRACKING_URI:
        raise MlflowRefused("MLFLOW_TRACKING_URI is not set: there is no server to ask")
    from mlflow.exceptions import MlflowException
    from mlflow.tracking import MlflowClient
    from requests import RequestException

    try:
        client = MlflowClient(settings.MLFLOW_TRACKING_URI)
        place = _experiment(client, experiment)
        run = _run(client, place, agent)
        _import(run, progress)
    except (MlflowException, RequestException) as error:
        raise MlflowRefused(_words(error)) from error
    return run.report


def _run(client: MlflowClient, place: Experiment, agent: str) -> _Run:
    source = {"server": settings.MLFLOW_TRACKING_URI, "experiment": place.experiment_id}
    before = (
        ImportBatch.objects.filter(format=MLFLOW.name, undone_at=None)
        .filter(**{f"options__{name}": value for name, value in source.items()})
        .order_by("-pk")
        .first()
    )
    cursor = before.options["cursor"] if before else 0
    name = f"MLflow experiment {place.name}"
    agent = agent or slug(place.name) or DEFAULT_AGENT
    return _Run(client, place, agent, {**source, "cursor": cursor}, ImportReport(name, MLFLOW.name))


def _import(run: _Run, progress: Callable[[int], None]) -> None:
    began = run.options["cursor"]
    edge = max(began - int(LATE.total_seconds() * 1000), 0)
    seen = 0
    for bounds, fresh in ((f"timestamp_ms >= {edge}", True), (f"timestamp_ms < {edge}", False)):
        for infos in run.pages(bounds) if edge or fresh else ():
            if records := run.records(infos, fresh):
                newest = max(info.request_time for info in infos)
                run.store(records, newest)
            seen += len(infos)
            progress(seen)
    if run.batch is not None and not run.report.stored_rows and run.options["cursor"] == began:
        run.batch.delete()
    elif run.batch is not None:
        run.report.batch = run.batch.pk


def _known(traces: Sequence[str]) -> set[str]:
    """Of these traces those that have a decision."""
    runs = {name: trace for trace in traces for name in run_ids(trace)}
    found = rows_in(Decision.objects.order_by(), "run_id", runs).values_list("run_id", flat=True)
    return {runs[name] for name in found}


def _experiment(client: MlflowClient, name: str) -> Experiment:
    found = client.get_experiment_by_name(name)
    if found is not None:
        return found
    there = ", ".join(sorted(one.name for one in client.search_experiments(max_results=20))) or "none"
    raise MlflowRefused(f"{settings.MLFLOW_TRACKING_URI} has no experiment {name!r}; it has: {there}")


def _words(error: Exception) -> str:
    """What went wrong and what to do, in one line."""
    server, code = settings.MLFLOW_TRACKING_URI, getattr(error, "error_code", "")
    said = " ".join(str(error).split())[:300]
    if code in ("UNAUTHENTICATED", "PERMISSION_DENIED"):
        return (
            f"{server} refuses this account: set MLFLOW_TRACKING_TOKEN, or MLFLOW_TRACKING_USERNAME and "
            f"MLFLOW_TRACKING_PASSWORD ({said})"
        )
    if code == "ENDPOINT_NOT_FOUND":
        return f"{server} has no traces to ask for: expected MLflow 3 ({said})"
    return f"{server} did not answer: {said}. Run the command again: it goes on where it stopped"
