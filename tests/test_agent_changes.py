"""Agents deleted: every table and folder, nothing half done after a kill."""

import io
import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from django.apps import apps
from django.core.management import CommandError, call_command
from django.db import connection
from django.db.models import CharField
from django.utils import timezone

from feedback.accounts.authentication import key_create
from feedback.agents import (
    AgentNotRecorded,
    AgentRefused,
    agent_delete,
    agent_models,
    agent_path,
)
from feedback.models import (
    AgentSettings,
    Comparison,
    Decision,
    ImportBatch,
    Lease,
    Rating,
    RatingRequest,
)
from feedback.rating.requests import sample_draw
from feedback.recording.ingest import trace_record
from feedback.services import comparison_submit, decision_record, outcome_record, rating_submit
from rl.datasets import prepare_training_dataset
from rl.models import (
    AgentDefinition,
    Arm,
    Artifact,
    Evaluation,
    Experiment,
    GateSettings,
    GoldenCase,
    JudgedPair,
    JudgingRound,
    LearnerSettings,
    PairJudgement,
    Policy,
    PolicyEvent,
    RewardRecord,
    RewardSettings,
    RunMetric,
    ServingSettings,
    TrainingRun,
)
from rl.registry import files as agent_files
from rl.registry.incumbents import incumbent_sync
from rl.registry.judging import judgement_submit
from tests.support import said
from tests.support.api_client import person
from tests.support.imports import file_import
from tests.support.judging import decision_of, preference, round_of
from tests.support.registry_rows import policy_of

pytestmark = pytest.mark.django_db

command = partial(said.command, "agent")


def file(home: Path, path: str, text: str = "x") -> str:
    (home / path).parent.mkdir(parents=True, exist_ok=True)
    (home / path).write_text(text)
    return path


def history(home: Path, agent: str, tmp_path: Path) -> TrainingRun:
    """An agent with something in every table there is, and with files in every folder."""
    AgentSettings.objects.create(agent=agent, ratings_wanted=2)
    key_create(f"{agent}'s page", ["rate"], agent=agent, origin="https://shop.example")
    for n in range(12):
        one, two = (
            decision_record(
                agent=agent, messages=f"question {n}", response=text, arm=f"{agent}-trial/base"
            ).row
            for text in ("good", "bad")
        )
        comparison_submit(left=one, right=two, preference="left", rater="ann")
    rating_submit(decision=one, rater="ann", thumb="up")
    outcome_record(decision=one, name="clicked", value=1)
    trace_record(agent=agent, steps=[{"kind": "decision", "messages": "of a trace", "response": "r"}])
    Lease.objects.create(decision=one, rater="bob", until="2030-01-01T00:00:00Z")
    row = {"prompt": "imported", "completion": "a", "label": True}
    (tmp_path / f"{agent}.jsonl").write_text(json.dumps(row))
    file_import(tmp_path / f"{agent}.jsonl", agent=agent)
    call_command("calculate_rewards", "--agent-type", agent, stdout=io.StringIO())
    prepared = prepare_training_dataset(agent)
    AgentDefinition.objects.create(slug=agent, title=agent)
    for settings_of in (LearnerSettings, GateSettings, RewardSettings, ServingSettings):
        settings_of._default_manager.create(agent=agent)
    GoldenCase.objects.create(
        agent=agent, name="one", messages=[{"role": "user", "content": "q"}], accepted=["a"]
    )
    run = TrainingRun.objects.create(
        agent=agent,
        method="dpo",
        snapshot=prepared.snapshot,
        base_model="bundled",
        status="succeeded",
        finished_at=timezone.now(),
        output=f"policies/{agent}/{agent}-v12",
    )
    RunMetric.objects.create(run=run, step=1, values={})
    file(home, f"runs/{run.pk}/log.txt")
    policy = Policy.objects.create(
        name=f"{agent}-v12",
        agent=agent,
        run=run,
        base_model="bundled",
        base_model_hash="x",
        adapter_sha256="y",
        adapter_path=file(home, f"policies/{agent}/{agent}-v12/adapter.safetensors").rpartition("/")[0],
        feedback_count=12,
    )
    PolicyEvent.objects.create(policy=policy, kind="registered", actor="x")
    export = file(home, f"exports/{agent}-v12/model.gguf")
    Artifact.objects.create(policy=policy, format="gguf", path=export, bytes=1, sha256="z")
    Evaluation.objects.create(
        agent=agent, policy=policy, base_model="b", samples=1, figures={}, snapshot=prepared.snapshot
    )
    trial = Experiment.objects.create(name=f"{agent}-trial", agent=agent)
    Arm.objects.create(experiment=trial, name="base", policy=policy)
    return run


def slugs() -> dict[str, set[str]]:
    """Table -> the agents its rows belong to."""
    found = {
        model.__name__: set(model._default_manager.order_by().values_list(path, flat=True).distinct())
        for model, path in agent_models().items()
    }
    found["AgentDefinition"] = set(AgentDefinition.objects.values_list("slug", flat=True))
    return {name: agents for name, agents in found.items() if agents}


def paths_in_use(home: Path) -> list[str]:
    """Files that rows name and that are not there."""
    named = [policy.adapter_path for policy in Policy.objects.all()]
    named += [row.path for row in Artifact.objects.all()]
    named += [run.snapshot.path for run in TrainingRun.objects.select_related("snapshot") if run.snapshot]
    return [path for path in named if not (home / path).exists()]


def test_every_table_with_an_agent_is_found() -> None:
    """A model added tomorrow is deleted with its agent, or stands here with the reason."""
    for model in apps.get_models():
        if any(f.name == "agent" and isinstance(f, CharField) for f in model._meta.concrete_fields):
            assert model in agent_models() or model is ImportBatch, model
    assert agent_path(Rating) == "decision__agent"
    assert agent_path(Arm) == "experiment__agent"
    assert agent_path(ImportBatch) == "agent"


class Killed(BaseException):
    """What ends a process between two steps."""


def test_an_agent_at_work_is_not_deleted() -> None:
    decision_record(agent="helper", messages="q", response="a")
    TrainingRun.objects.create(agent="helper", method="dpo", base_model="b", status="queued")
    with pytest.raises(AgentRefused, match="is queued: cancel it"):
        agent_delete("helper", actor="x", force=True)


def files_below(home: Path) -> list[str]:
    return sorted(str(path.relative_to(home)) for path in home.rglob("*") if path.is_file())


def test_a_deleted_agent_leaves_nothing(ratchet_home: Path, tmp_path: Path) -> None:
    history(ratchet_home, "other", tmp_path)
    rows = {
        model.__name__: sorted(model._default_manager.order_by().values(), key=str)
        for model in agent_models()
    }
    kept = files_below(ratchet_home)
    history(ratchet_home, "helper", tmp_path)
    tried = command("delete", "helper", "--dry-run")
    assert tried["trained"]["policies"] == ["helper-v12"]
    with pytest.raises(CommandError, match=r"policy helper-v12.* trained for it"):
        call_command("agent", "delete", "helper")
    assert "helper" in slugs()["Policy"]
    gone = command("delete", "helper", "--force")
    assert gone["rows"] == tried["rows"]
    assert gone["rows"]["policies"] == 1
    assert {
        model.__name__: sorted(model._default_manager.order_by().values(), key=str)
        for model in agent_models()
    } == rows
    assert files_below(ratchet_home) == kept
    assert RewardRecord.objects.filter(agent="helper").count() == 0
    batch = ImportBatch.objects.get(agent="helper")
    assert (batch.is_undone, batch.undone) == (True, {"agent_deleted": "helper"})
    with pytest.raises(AgentNotRecorded):
        agent_delete("helper", actor="x")


def test_without_anything_trained_an_agent_goes_unforced() -> None:
    one = decision_record(agent="helper", messages="q", response="a").row
    rating_submit(decision=one, rater="ann", thumb="up")
    rating_submit(decision=one, rater="ann", thumb="down")
    decision_record(agent="other", messages="q", response="a")
    assert agent_delete("helper", actor="x").rows == {"decisions": 1, "ratings": 2}
    assert not Rating.objects.exists()
    assert not Comparison.objects.exists()
    assert Decision.objects.get().agent == "other"


def test_an_agent_that_others_rest_on_is_not_deleted(ratchet_home: Path, tmp_path: Path) -> None:
    history(ratchet_home, "helper", tmp_path)
    policy_of("child-v1", "candidate", "child", parent=Policy.objects.get())
    with pytest.raises(AgentRefused, match=r"1 policies of other agents \(parent\)"):
        agent_delete("helper", actor="x", force=True)


@pytest.mark.slow
@pytest.mark.parametrize("step", ["files_note", "delete", "files_remove"])
def test_a_kill_in_a_deletion_leaves_all_or_nothing_and_the_same_call_finishes(
    ratchet_home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    history(ratchet_home, "other", tmp_path)
    kept = files_below(ratchet_home)
    history(ratchet_home, "helper", tmp_path)

    def killed(*arguments: str) -> Any:
        raise Killed

    with monkeypatch.context() as patched:
        patched.setattr(agent_files, step, killed)
        with pytest.raises(Killed):
            agent_delete("helper", actor="x", force=True)
    assert paths_in_use(ratchet_home) == []
    agent_delete("helper", actor="x", force=True)
    assert files_below(ratchet_home) == kept
    assert all(agents == {"other"} for agents in slugs().values())


def test_feedback_alone_deletes(settings: Any) -> None:
    settings.FEEDBACK_AGENT_KEEPER = ""
    decision_record(agent="helper", messages="q", response="a")
    agent_delete("helper", actor="x")
    assert not Decision.objects.exists()


def test_the_page_deletes_for_operators_alone(client: Any) -> None:
    decision_record(agent="helper", messages="q", response="a")
    assert client.get("/agents/helper/change/").status_code == 302
    client.force_login(person("rat", "rater"))
    assert client.get("/agents/helper/change/").status_code == 403
    assert client.post("/agents/helper/change/", {"name": "helper"}).status_code == 403
    client.force_login(person("op", "operator"))
    page = client.get("/agents/helper/change/")
    assert page.status_code == 200
    assert page.context["main"] == [("decisions", 1)]
    assert client.get("/agents/nobody/change/").status_code == 404
    mistyped = client.post("/agents/helper/change/", {"name": "help"})
    assert mistyped.status_code == 400
    assert Decision.objects.count() == 1
    gone = client.post("/agents/helper/change/", {"name": "helper"})
    assert gone["Location"] == "/"
    assert not Decision.objects.exists()


def test_the_apps_own_model_was_not_trained_and_goes_with_its_agent() -> None:
    decision_of(0, "helper")
    assert incumbent_sync("helper") is not None
    assert agent_delete("helper", actor="x").trained == {}
    assert not Policy.objects.exists()


def test_what_was_judged_goes_with_its_agent() -> None:
    pair, side = preference(round_of(2, agent="helper"), "ann", "policy")
    judgement_submit(pair, "ann", side)
    sample_draw("helper", 2)
    agent_delete("helper", actor="x", force=True)
    connection.check_constraints()
    assert not any(
        model.objects.exists() for model in (PairJudgement, JudgedPair, JudgingRound, RatingRequest)
    )
