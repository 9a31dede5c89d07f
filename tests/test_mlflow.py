"""Runs, curves, evaluations and champions in a real MLflow server, which has an environment of its own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from django.core.management import CommandError, call_command
from mlflow.tracking import MlflowClient

from rl import tracking
from rl.checksums import file_sum
from rl.models import Evaluation, Policy, RunMetric, TrainingRun
from tests.support.mlflow_server import server  # noqa: F401
from tests.support.registry_rows import make_run, registered
from tests.support.server import free_port

pytestmark = [pytest.mark.django_db, pytest.mark.timeout(900)]


def policy_trained(home: Path, name: str, stage: str) -> Policy:
    run = make_run("widgets", recipe={"beta": 0.1}, seed=7, started_at="2026-01-02T03:04:05Z")
    folder = home / "policies" / "widgets" / name
    folder.mkdir(parents=True)
    policy = registered(run, name, folder)
    Policy.objects.filter(pk=policy.pk).update(stage=stage)
    for step in range(1, 4):
        RunMetric.objects.create(run=run, step=step, values={"loss": 1 / step, "rewards/accuracies": 0.5})
    Evaluation.objects.create(
        agent="widgets",
        policy=policy,
        base_model="bundled",
        against="base",
        samples=40,
        figures={"valid_rate": 0.9},
    )
    return policy


@pytest.mark.campaign
def test_what_was_trained_judged_and_promoted_is_found_in_mlflow(
    server: str,  # noqa: F811
    settings: Any,
    ratchet_home: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    settings.MLFLOW_TRACKING_URI = server
    first = policy_trained(ratchet_home, "widgets-v1", "champion")
    make_run("widgets", status="failed", reason="out of memory")
    call_command("mlflow_sync", json=True)
    assert json.loads(capsys.readouterr().out) == {"runs": 2, "evaluations": 1, "champions": 1}
    assert tracking.sync() == tracking.Logged()

    client = MlflowClient(server)
    experiment = client.get_experiment_by_name("ratchet/widgets")
    assert experiment is not None
    runs = {run.data.tags["ratchet.run"]: run for run in client.search_runs([experiment.experiment_id])}
    assert sorted(run.info.status for run in runs.values()) == ["FAILED", "FINISHED"]
    logged = runs[str(first.run_id)]
    assert (logged.data.params["method"], logged.data.params["recipe.beta"]) == ("dpo", "0.1")
    curve = client.get_metric_history(logged.info.run_id, "loss")
    assert [(point.step, point.value) for point in curve] == [(1, 1.0), (2, 0.5), (3, pytest.approx(1 / 3))]
    assert logged.data.metrics["holdout/base/valid_rate"] == 0.9
    version = client.get_model_version_by_alias("widgets", "champion")
    assert version.tags["ratchet.policy"] == "widgets-v1"
    files = client.download_artifacts(logged.info.run_id, "policy", str(ratchet_home))
    assert file_sum(Path(files) / "adapter_model.safetensors") == first.adapter_sha256

    Policy.objects.filter(pk=first.pk).update(stage="retired")
    second = policy_trained(ratchet_home, "widgets-v2", "champion")
    assert tracking.sync().champions == 1
    assert client.get_model_version_by_alias("widgets", "champion").tags["ratchet.policy"] == second.name
    Policy.objects.filter(pk=second.pk).update(stage="retired")
    Policy.objects.filter(pk=first.pk).update(stage="champion")
    tracking.sync()  # rolled back: the version that is there already
    assert client.get_model_version_by_alias("widgets", "champion").version == version.version
    Policy.objects.filter(pk=first.pk).update(stage="retired")
    assert tracking.sync().champions == 1
    assert "champion" not in client.get_registered_model("widgets").aliases


@pytest.mark.campaign
def test_a_run_whose_logging_was_interrupted_is_logged_again(
    server: str,  # noqa: F811
    settings: Any,
    ratchet_home: Path,
) -> None:
    settings.MLFLOW_TRACKING_URI = server
    run = make_run("filer")
    client = MlflowClient(server)
    place = client.create_experiment("ratchet/filer")
    client.create_run(place, tags={"ratchet.run": str(run.pk)})
    assert tracking.sync().runs == 1
    (logged,) = client.search_runs([place])
    assert logged.info.status == "FINISHED"


def test_a_server_that_is_away_stops_nothing(settings: Any, caplog: pytest.LogCaptureFixture) -> None:
    make_run("widgets")
    settings.MLFLOW_TRACKING_URI = f"http://127.0.0.1:{free_port()}"
    tracking.sync_quietly()
    assert "MLflow" in caplog.text
    with pytest.raises(CommandError, match="MLflow"):
        call_command("mlflow_sync")
    settings.MLFLOW_TRACKING_URI = ""
    tracking.sync_quietly()
    with pytest.raises(CommandError, match="MLFLOW_TRACKING_URI"):
        call_command("mlflow_sync")
    assert TrainingRun.objects.count() == 1
