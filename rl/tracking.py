"""Runs, curves, evaluations and champions in MLflow, where MLFLOW_TRACKING_URI names a server (extra `mlflow`)."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from django.conf import settings

from rl.checksums import FileDamaged
from rl.models import Evaluation, RunMetric, TrainingRun
from rl.registry.integrity import adapter_folder
from rl.registry.service import champion_of

if TYPE_CHECKING:
    from mlflow.entities import Metric, Run
    from mlflow.tracking import MlflowClient

logger = logging.getLogger("rl.tracking")

BATCH = 500
"""Metrics of one request; MLflow takes 1,000."""
RUN, POLICY, EVALUATED = "ratchet.run", "ratchet.policy", "ratchet.evaluation"
"""Tags by which a run, a model version and the newest logged evaluation are found again."""
CHAMPION = "champion"
"""Alias of the model version that answers."""
ENDED = {TrainingRun.Status.SUCCEEDED: "FINISHED", TrainingRun.Status.FAILED: "FAILED"}


@dataclass
class Logged:
    """What was new."""

    runs: int = 0
    evaluations: int = 0
    champions: int = 0


def sync() -> Logged:
    """Log what MLflow does not have yet; called again it adds nothing.

    Raises mlflow.exceptions.MlflowException where the server cannot be reached or refuses.
    """
    from mlflow.tracking import MlflowClient

    client, logged = MlflowClient(settings.MLFLOW_TRACKING_URI), Logged()
    for agent in TrainingRun.objects.order_by("agent").values_list("agent", flat=True).distinct():
        experiment = client.get_experiment_by_name(f"ratchet/{agent}")
        place = experiment.experiment_id if experiment else client.create_experiment(f"ratchet/{agent}")
        known = dict(_known(client, place))
        for run in TrainingRun.objects.filter(agent=agent, status__in=ENDED).order_by("pk"):
            if run.pk not in known:
                known[run.pk] = _run_log(client, place, run)
                logged.runs += 1
            logged.evaluations += _evaluations_log(client, known[run.pk], run)
        logged.champions += _champion_log(client, agent, known)
    return logged


def sync_quietly() -> None:
    """`sync`, where it is set up; a server that is away is logged and tried again at the next tick."""
    if not settings.MLFLOW_TRACKING_URI:
        return
    from mlflow.exceptions import MlflowException

    try:
        if any(asdict(done := sync()).values()):
            logger.info("logged to MLflow: %s", done)
    except (MlflowException, FileDamaged, OSError) as error:
        logger.warning("nothing more was logged to MLflow: %s", error)


def _known(client: MlflowClient, experiment: str) -> Iterator[tuple[int, Run]]:
    """Logged runs by the run's number; one whose logging was interrupted is removed, to be logged again."""
    token: str | None = None
    while True:
        page = client.search_runs([experiment], f"tags.`{RUN}` != ''", max_results=1000, page_token=token)
        for run in page:
            if run.info.status == "RUNNING":
                client.delete_run(run.info.run_id)
            else:
                yield int(run.data.tags[RUN]), run
        if not (token := page.token):
            return


def _run_log(client: MlflowClient, experiment: str, run: TrainingRun) -> Run:
    from mlflow.entities import Metric, Param, RunTag

    made = client.create_run(
        experiment,
        start_time=_ms(run.started_at or run.created_at),
        run_name=f"run {run.pk}",
        tags={RUN: str(run.pk)},
    )
    facts = {
        **{
            name: getattr(run, name)
            for name in ("method", "base_model", "base_model_hash", "seed", "feedback_count")
        },
        "snapshot_sha256": run.snapshot.sha256 if run.snapshot else "",
        **{f"recipe.{name}": value for name, value in run.recipe.items()},
    }
    params = [Param(name, str(value)[:6000]) for name, value in facts.items() if value not in (None, "")]
    for at in range(0, len(params), 100):
        client.log_batch(made.info.run_id, params=params[at : at + 100])
    client.log_batch(
        made.info.run_id,
        tags=[
            RunTag("ratchet.code_version", run.code_version),
            RunTag("ratchet.hardware", json.dumps(run.hardware)),
        ],
    )
    metrics = (
        Metric(name, value, _ms(row.at), row.step)
        for row in RunMetric.objects.filter(run=run).order_by("step")
        for name, value in _numbers(row.values)
    )
    _metrics_log(client, made, metrics)
    ended = _ms(run.finished_at or run.created_at)
    client.set_terminated(made.info.run_id, ENDED[TrainingRun.Status(run.status)], ended)
    return client.get_run(made.info.run_id)


def _evaluations_log(client: MlflowClient, logged: Run, run: TrainingRun) -> int:
    from mlflow.entities import Metric

    newest = int(logged.data.tags.get(EVALUATED, 0))
    rows = list(Evaluation.objects.filter(policy__run=run, pk__gt=newest).order_by("pk"))
    for row in rows:
        figures = _numbers(row.figures, f"{row.split}/{row.against or 'alone'}")
        _metrics_log(
            client, logged, (Metric(name, value, _ms(row.created_at), row.pk) for name, value in figures)
        )
        client.set_tag(logged.info.run_id, EVALUATED, str(row.pk))
    return len(rows)


def _champion_log(client: MlflowClient, agent: str, known: Mapping[int, Run]) -> bool:
    """Give the alias to the champion's model version, made with its files where there is none. True if it moved."""
    from mlflow.exceptions import MlflowException

    champion = champion_of(agent)
    logged = known.get(champion.run_id or 0) if champion is not None and champion.has_files else None
    try:
        aliases = client.get_registered_model(agent).aliases
    except MlflowException:  # there is none; a server that is away says so below
        if logged is None:
            return False
        aliases = client.create_registered_model(agent, tags={"ratchet.agent": agent}).aliases
    if champion is None or logged is None:
        if CHAMPION in aliases:
            client.delete_registered_model_alias(agent, CHAMPION)
        return CHAMPION in aliases
    versions = {v.tags.get(POLICY): v.version for v in client.search_model_versions(f"name='{agent}'")}
    if champion.name not in versions:
        run_id = logged.info.run_id
        client.log_artifacts(run_id, str(adapter_folder(champion)), "policy")
        source = f"{logged.info.artifact_uri}/policy"
        tags = {POLICY: champion.name, "ratchet.sha256": champion.adapter_sha256}
        versions[champion.name] = client.create_model_version(
            agent, source, run_id, tags=tags, await_creation_for=0
        ).version
    if str(aliases.get(CHAMPION)) == str(versions[champion.name]):
        return False
    client.set_registered_model_alias(agent, CHAMPION, versions[champion.name])
    return True


def _metrics_log(client: MlflowClient, run: Run, metrics: Iterator[Metric]) -> None:
    batch: list[Metric] = []
    for metric in metrics:
        batch.append(metric)
        if len(batch) == BATCH:
            client.log_batch(run.info.run_id, batch)
            batch = []
    if batch:
        client.log_batch(run.info.run_id, batch)


def _numbers(value: object, name: str = "") -> Iterator[tuple[str, float]]:
    """Numbers within stored JSON, by their path: `holdout/base/preference_accuracy/low`."""
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _numbers(inner, f"{name}/{key}" if name else str(key))
    elif isinstance(value, (int, float)) and not isinstance(value, bool):
        yield "".join(c if c.isalnum() or c in "_-. /:" else "_" for c in name)[:250], float(value)


def _ms(at: Any) -> int:
    return int(at.timestamp() * 1000)
