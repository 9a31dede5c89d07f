"""OpenAI's fine-tuning API: files, jobs and `ft:` names, by OpenAI's own client."""

import io
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import openai
import openai.types.fine_tuning as types
import pytest
from django.core.files.uploadedfile import SimpleUploadedFile
from django.core.management import CommandError, call_command
from django.test import Client
from openai.types import FileDeleted, FileObject
from openai.types.fine_tuning.jobs import FineTuningJobCheckpoint
from pydantic import BaseModel

from feedback.accounts.authentication import key_create
from feedback.cache import forget_all
from feedback.erasure.service import unit_forget
from feedback.services import decision_record
from rl.fine_tuning import shown
from rl.fine_tuning.jobs import JobOrder, _knobs_of
from rl.models import FineTuningJob, PromptSplit, TrainingFile, TrainingRun
from rl.models.fine_tuning import FOLDER, policy_of_model
from rl.online import pipeline
from rl.recipes import DPO_CONFIG
from rl.registry.files import policies_retained
from tests.support.api_client import ApiClient, error_of
from tests.support.serving import (  # noqa: F401
    Parrot,
    parrot_only,
    policy_made,
    written_by_the_asking_thread,
)
from tests.support.tiny_models import tiny_model

pytestmark = [pytest.mark.django_db, pytest.mark.usefixtures("unqueued")]


@pytest.fixture(name="unqueued")
def runs_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """Queued runs are trained by the test itself."""
    monkeypatch.setattr("rl.jobs.lifecycle.async_task", lambda *_, **__: None)


@pytest.fixture
def api() -> ApiClient:
    return ApiClient("operate", "read", "ingest")


def chat_line(number: int, answer: str = "yes") -> dict[str, Any]:
    turns = [("system", "Answer yes or no."), ("user", f"Is {number} even?"), ("assistant", answer)]
    return {"messages": [{"role": role, "content": text} for role, text in turns]}


def preference_line(number: int) -> dict[str, Any]:
    def said(text: str) -> list[dict[str, str]]:
        return [{"role": "assistant", "content": text}]

    return {
        "input": {"messages": [{"role": "user", "content": f"Is {number} even?"}]},
        "preferred_output": said("yes"),
        "non_preferred_output": said("perhaps"),
    }


def lines(rows: Sequence[object]) -> bytes:
    return b"".join(json.dumps(row).encode() + b"\n" for row in rows)


CHAT, PREFERENCES = lines([chat_line(n) for n in range(20)]), lines([preference_line(n) for n in range(20)])


def sent(
    api: ApiClient, content: bytes = CHAT, *, purpose: str = "fine-tune", name: str = "train.jsonl"
) -> Any:
    return api.client.post("/v1/files", {"purpose": purpose, "file": SimpleUploadedFile(name, content)})


def uploaded(api: ApiClient, content: bytes = CHAT) -> str:
    response = sent(api, content)
    assert response.status_code == 200, response.content
    found: str = response.json()["id"]
    return found


def ordered(api: ApiClient, **body: Any) -> Any:
    return api.post("/v1/fine_tuning/jobs", {"model": "bundled", **body})


def created(api: ApiClient, **body: Any) -> dict[str, Any]:
    response = ordered(api, **body)
    assert response.status_code == 200, response.content
    found: dict[str, Any] = response.json()
    return found


def parsed(kind: type[BaseModel], body: object) -> None:
    """Reads a body as the official client's own type, whose fields it has and no others."""
    assert not kind.model_validate(body, strict=True).model_extra


def stored(home: Path) -> list[str]:
    return sorted(path.name for path in (home / FOLDER).glob("*"))


def test_a_file_is_kept_listed_read_and_deleted(api: ApiClient, ratchet_home: Path) -> None:
    made = sent(api).json()
    assert made | {"created_at": 0} == {
        "id": made["id"],
        "object": "file",
        "bytes": len(CHAT),
        "created_at": 0,
        "filename": "train.jsonl",
        "purpose": "fine-tune",
        "status": "processed",
    }
    parsed(FileObject, made)
    second = uploaded(api, PREFERENCES)
    assert [row["id"] for row in api.get("/v1/files").json()["data"]] == [second, made["id"]]
    first = api.get("/v1/files", limit=1, order="asc").json()
    assert ([row["id"] for row in first["data"]], first["has_more"]) == ([made["id"]], True)
    assert [row["id"] for row in api.get("/v1/files", after=second).json()["data"]] == [made["id"]]
    assert api.get("/v1/files", purpose="fine-tune-results").json()["data"] == []
    content: Any = api.get(f"/v1/files/{made['id']}/content")
    assert b"".join(content.streaming_content) == CHAT
    gone = api.client.delete(f"/v1/files/{made['id']}")
    parsed(FileDeleted, gone.json())
    assert gone.json() == {"id": made["id"], "object": "file", "deleted": True}
    assert error_of(api.get(f"/v1/files/{made['id']}"))["code"] == "not_found"


@pytest.mark.django_db(transaction=True)
def test_a_deleted_file_leaves_nothing_on_disk(api: ApiClient, ratchet_home: Path) -> None:
    name = uploaded(api)
    assert stored(ratchet_home) == [f"{name}.jsonl"]
    api.client.delete(f"/v1/files/{name}")
    assert stored(ratchet_home) == []


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "an empty file"),
        (b"\x1f\x8b\x08\x00", "plain JSON lines"),
        (b"[" + CHAT.splitlines()[0] + b"]", "plain JSON lines"),
        (CHAT + b'{"messages": [}\n' + b'{"messages": 5}\n', "line 21: not JSON"),
        (CHAT + b'{"messages": 5}\n', "line 21: messages"),
        (CHAT + lines([{"messages": [{"role": "user", "content": "hi"}]}]), "line 21: "),
        (
            lines([{"messages": [{"role": "user", "content": "hi"}]}]) + CHAT[:-1] + b"{\n",
            "line 21: not JSON",
        ),
        (CHAT + lines([preference_line(1)]), "line 21: preferred"),
        (b'{"prompt": "a", "completion": "b"}\n', "line 1: "),
    ],
)
def test_a_faulty_line_stores_nothing(api: ApiClient, ratchet_home: Path, content: bytes, said: str) -> None:
    refused = sent(api, content)
    assert (refused.status_code, error_of(refused)["param"]) == (400, "file")
    assert said in error_of(refused)["message"]
    assert str(ratchet_home) not in error_of(refused)["message"]
    assert (stored(ratchet_home), TrainingFile.objects.count()) == ([], 0)


def test_many_faulty_lines_are_counted_and_some_named(api: ApiClient) -> None:
    message = error_of(sent(api, CHAT + b"{\n" * 40))["message"]
    assert "40 lines" in message
    assert "line 40: " in message
    assert "and 20 more lines" in message


def test_bad_uploads_are_refused_as_openai_does(api: ApiClient, settings: Any, ratchet_home: Path) -> None:
    wrong = sent(api, purpose="batch")
    assert (wrong.status_code, error_of(wrong)["param"]) == (400, "purpose")
    json_body = api.post("/v1/files", {"purpose": "fine-tune"})
    assert json_body.status_code == 415
    assert "multipart/form-data" in error_of(json_body)["message"]
    none = api.client.post("/v1/files", {"purpose": "fine-tune"})
    assert (none.status_code, error_of(none)["param"]) == (400, "file")
    broken = api.client.post("/v1/files", b"--x\r\n\r\n", content_type="multipart/form-data; boundary=x")
    assert broken.status_code == 400
    settings.FEEDBACK_UPLOAD_MAX_BYTES = 1000
    large = sent(api)
    assert (large.status_code, error_of(large)["code"]) == (413, "too_large")
    assert stored(ratchet_home) == []


def test_a_job_is_a_queued_run_in_openais_shape(api: ApiClient) -> None:
    training, validation = uploaded(api), uploaded(api, lines([chat_line(n) for n in range(100, 120)]))
    job = created(
        api,
        training_file=training,
        validation_file=validation,
        suffix="even",
        seed=7,
        metadata={"agent": "evens", "team": "a"},
        method={"type": "supervised", "supervised": {"hyperparameters": {"n_epochs": 2}}},
    )
    run = TrainingRun.objects.get()
    assert (run.agent, run.method, run.status, run.follow_up) == ("evens", "sft", "queued", "judge")
    assert run.recipe == {"epochs": 2, "seed": 7}
    assert job | {"id": "", "created_at": 0} == {
        "id": "",
        "object": "fine_tuning.job",
        "created_at": 0,
        "error": None,
        "fine_tuned_model": None,
        "finished_at": None,
        "hyperparameters": {"n_epochs": 2, "batch_size": "auto", "learning_rate_multiplier": "auto"},
        "model": "bundled",
        "organization_id": "evens",
        "result_files": [],
        "status": "queued",
        "trained_tokens": None,
        "training_file": training,
        "validation_file": validation,
        "integrations": [],
        "seed": 7,
        "estimated_finish": None,
        "method": {
            "type": "supervised",
            "supervised": {
                "hyperparameters": {"n_epochs": 2, "batch_size": "auto", "learning_rate_multiplier": "auto"}
            },
        },
        "metadata": {"agent": "evens", "team": "a"},
    }
    assert api.get(f"/v1/fine_tuning/jobs/{job['id']}").json() == job
    parsed(types.FineTuningJob, job)
    for event in api.get(f"/v1/fine_tuning/jobs/{job['id']}/events").json()["data"]:
        parsed(types.FineTuningJobEvent, event)


def test_jobs_are_paged_and_found_by_their_metadata(api: ApiClient) -> None:
    training = uploaded(api)
    names = [created(api, training_file=training, metadata={"n": str(n)})["id"] for n in range(3)]
    assert len({run.pk for run in TrainingRun.objects.all()}) == 3
    page = api.get("/v1/fine_tuning/jobs", limit=2).json()
    assert ([job["id"] for job in page["data"]], page["has_more"]) == ([names[2], names[1]], True)
    rest = api.get("/v1/fine_tuning/jobs", after=page["last_id"]).json()
    assert ([job["id"] for job in rest["data"]], rest["has_more"]) == ([names[0]], False)
    found = api.get("/v1/fine_tuning/jobs", **{"metadata[n]": "1"}).json()
    assert [job["id"] for job in found["data"]] == [names[1]]
    odd = created(api, training_file=training, metadata={"2026": "x", 'a"b': "y"})["id"]
    for tag in ({"metadata[2026]": "x"}, {'metadata[a"b]': "y"}):
        assert [job["id"] for job in api.get("/v1/fine_tuning/jobs", **tag).json()["data"]] == [odd]
    assert error_of(api.get("/v1/fine_tuning/jobs", after="ftjob-none"))["code"] == "not_found"
    assert error_of(api.get("/v1/fine_tuning/jobs", limit=0))["param"] == "limit"


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"model": "gpt-4o-mini-2024-07-18"}, "model"),
        ({"model": "ft:bundled:assistant::12345678"}, "model"),
        ({"training_file": "file-none"}, "training_file"),
        ({"validation_file": "file-none"}, "validation_file"),
        ({"suffix": "two words:"}, "suffix"),
        ({"seed": -1}, "seed"),
        ({"metadata": {"agent": "Not A Slug"}}, "metadata"),
        ({"metadata": {"x": "y" * 513}}, "metadata.x"),
        ({"method": {"type": "dpo"}}, "training_file"),
        ({"method": {"type": "reinforcement"}}, "training_file"),
        ({"method": {"type": "reinforcement", "reinforcement": {}}}, "method.reinforcement.grader"),
        ({"method": {"type": "supervised", "dpo": {}}}, "method"),
        ({"hyperparameters": {"n_epochs": 0}}, "hyperparameters.n_epochs"),
        ({"hyperparameters": {"beta": 1}}, "hyperparameters.beta"),
        ({"integrations": [{"type": "wandb"}]}, "integrations"),
        ({"n_epochs": 3}, "n_epochs"),
    ],
)
def test_a_bad_job_names_its_parameter(api: ApiClient, body: dict[str, Any], param: str) -> None:
    refused = ordered(api, **{"training_file": uploaded(api), **body})
    assert refused.status_code in (400, 404)
    assert error_of(refused)["param"] == param
    assert (FineTuningJob.objects.count(), TrainingRun.objects.count()) == (0, 0)


def test_a_refused_model_names_the_choices_and_an_operator_maps_others(api: ApiClient, settings: Any) -> None:
    training = uploaded(api)
    refused = error_of(ordered(api, model="gpt-4o-mini", training_file=training))
    assert "bundled, smollm2" in refused["message"]
    settings.FINE_TUNING_MODELS = {"gpt-4o-mini*": "bundled"}
    job = created(api, model="gpt-4o-mini-2024-07-18", training_file=training)
    assert job["model"] == "gpt-4o-mini-2024-07-18"
    assert TrainingRun.objects.get().base_model == "bundled"


def test_too_few_examples_and_one_file_for_both_are_refused(api: ApiClient) -> None:
    few = uploaded(api, lines([chat_line(n) for n in range(9)]))
    refused = error_of(ordered(api, training_file=few))
    assert (refused["param"], "at least 10" in refused["message"]) == ("training_file", True)
    same = uploaded(api)
    assert error_of(ordered(api, training_file=same, validation_file=same))["param"] == "validation_file"


def test_hyperparameters_become_our_knobs() -> None:
    asked = {"n_epochs": 3, "batch_size": 8, "learning_rate_multiplier": 0.5, "beta": "auto"}
    knobs = _knobs_of(JobOrder("bundled", TrainingFile(), hyperparameters=asked))
    recipe = DPO_CONFIG["cpu"].with_knobs(**knobs)
    assert (recipe.epochs, recipe.batch_size, recipe.gradient_accumulation) == (3.0, 8, 1)
    assert recipe.learning_rate == DPO_CONFIG["cpu"].learning_rate / 2
    assert recipe.beta == DPO_CONFIG["cpu"].beta


def test_a_file_that_a_job_waits_for_cannot_be_deleted_and_a_cancelled_job_lets_it_go(api: ApiClient) -> None:
    training = uploaded(api)
    job = created(api, training_file=training)
    held = api.client.delete(f"/v1/files/{training}")
    assert (held.status_code, error_of(held)["param"]) == (400, "file_id")
    assert job["id"] in error_of(held)["message"]
    cancelled = api.post(f"/v1/fine_tuning/jobs/{job['id']}/cancel", "")
    assert (cancelled.status_code, json.loads(cancelled.content)["status"]) == (200, "cancelled")
    again = api.post(f"/v1/fine_tuning/jobs/{job['id']}/cancel", "")
    assert (again.status_code, error_of(again)["type"]) == (400, "invalid_request_error")
    assert api.client.delete(f"/v1/files/{training}").status_code == 200


@pytest.mark.parametrize("path", ["", "/events", "/checkpoints"])
def test_an_unknown_job_is_404(api: ApiClient, path: str) -> None:
    unknown = api.get(f"/v1/fine_tuning/jobs/ftjob-none{path}")
    assert (unknown.status_code, error_of(unknown)["param"]) == (404, "fine_tuning_job_id")


def test_a_run_that_is_refused_is_a_failed_job_with_its_reason(api: ApiClient) -> None:
    job = created(api, training_file=uploaded(api))
    TrainingRun.objects.update(status="refused", reason="no rows", finished_at="2026-01-01T00:00Z")
    failed = api.get(f"/v1/fine_tuning/jobs/{job['id']}").json()
    assert failed["status"] == "failed"
    expected = {"code": "invalid_training_file", "message": "no rows", "param": "training_file"}
    assert failed["error"] == expected
    events = api.get(f"/v1/fine_tuning/jobs/{job['id']}/events").json()["data"]
    assert (events[0]["level"], events[0]["message"]) == ("error", "no rows")


def test_reading_keys_cannot_write_and_writing_ones_cannot_read() -> None:
    operator, reader = ApiClient("operate"), ApiClient("read")
    name = uploaded(operator)
    assert operator.get(f"/v1/files/{name}/content").status_code == 403
    assert sent(reader).status_code == 403
    assert ordered(reader, training_file=name).status_code == 403
    assert reader.client.delete(f"/v1/files/{name}").status_code == 403
    assert sent(ApiClient()).status_code == 401


@pytest.fixture(name="client")
def openai_client(live_server: Any) -> Iterator[openai.OpenAI]:
    key = key_create("tuner", ["ingest", "read", "operate"])[1]
    with openai.OpenAI(base_url=f"{live_server.url}/v1", api_key=key, max_retries=0) as made:
        yield made


@pytest.mark.training
@pytest.mark.slow
@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize("method", ["supervised", "dpo"])
def test_openai(client: openai.OpenAI, parrot: Parrot, settings: Any, tmp_path: Path, method: Any) -> None:
    settings.FINE_TUNING_MODELS = {"gpt-4o-mini*": str(tiny_model(tmp_path / "tiny"))}
    settings.RATCHET_CONFIG = {name: {"max_steps": 2, "warm_up_steps": 0} for name in ("dpo",)} | {
        "sft": {"max_steps": 2}
    }
    rows = [preference_line(n) if method == "dpo" else chat_line(n) for n in range(60)]
    file = client.files.create(file=("train.jsonl", lines(rows[:20])), purpose="fine-tune")
    validation = client.files.create(file=("valid.jsonl", lines(rows[20:])), purpose="fine-tune")
    job = client.fine_tuning.jobs.create(
        model="gpt-4o-mini-2024-07-18",
        training_file=file.id,
        validation_file=validation.id,
        suffix="even",
        method={"type": method},
    )
    assert job.status == "queued"
    run = TrainingRun.objects.get()
    pipeline.run_train(run.pk, actor="test")
    assert client.fine_tuning.jobs.retrieve(job.id).status == "running"  # not judged yet
    pipeline.run_follow(run.pk)
    job = client.fine_tuning.jobs.retrieve(job.id)
    assert (job.status, job.error, job.finished_at is not None) == ("succeeded", None, True)
    assert job.fine_tuned_model == f"ft:tiny:assistant:even:{job.id.removeprefix('ftjob-')[:8]}"
    run.refresh_from_db()
    counts = run.snapshot.counts if run.snapshot else {}
    assert counts["train"] == 20
    assert counts["eval"] + counts["holdout"] == 40
    assert {split.split for split in PromptSplit.objects.all()} == {"train", "eval", "holdout"}
    events = list(client.fine_tuning.jobs.list_events(job.id, limit=2))
    kinds = [event.id.rpartition(f"{job.id.removeprefix('ftjob-')}-")[2] for event in events]
    assert kinds[:3] == ["succeeded", "verdict", "model"]
    assert kinds[-1] == "created"
    assert any(event.type == "metrics" and "train_loss" in dict(event.data or {}) for event in events)  # type: ignore[call-overload]
    assert events[1].message == shown.verdict_of(run.policy)[1]
    (checkpoint,) = client.fine_tuning.jobs.checkpoints.list(job.id)
    assert (checkpoint.step_number, checkpoint.fine_tuned_model_checkpoint) == (2, job.fine_tuned_model)
    metrics, verdict = job.result_files
    assert client.files.content(metrics).text.startswith("step,")
    assert json.loads(client.files.content(verdict).text)["policy"] == run.policy.name
    assert client.files.retrieve(verdict).purpose == "fine-tune-results"

    name = job.fine_tuned_model
    assert name in [model.id for model in client.models.list()]
    assert client.models.retrieve(name).owned_by == "assistant"
    asked = client.chat.completions.create(model=name, messages=[{"role": "user", "content": "Is 4 even?"}])
    assert asked.choices[0].message.content == "hello there"
    assert client.responses.create(model=name, input="Is 4 even?").output_text == "hello there"
    assert [model.name for _, model in parrot.asked] == [run.policy.name] * 2
    assert run.policy.stage == "candidate"  # an agent gets it through the gate alone

    if method == "supervised":
        more = client.fine_tuning.jobs.create(model=name, training_file=file.id)
        assert TrainingRun.objects.latest("pk").recipe["start_from"] == run.policy.name
        client.fine_tuning.jobs.cancel(more.id)
    assert client.models.delete(name).deleted
    assert client.files.delete(file.id).deleted
    forget_all()  # another process would see it within FEEDBACK_REMEMBER_S
    with pytest.raises(openai.NotFoundError):
        client.chat.completions.create(model=name, messages=[{"role": "user", "content": "Is 4 even?"}])


def test_the_name_alone_finds_its_policy(api: ApiClient) -> None:
    job = created(api, training_file=uploaded(api), suffix="even")
    row = FineTuningJob.objects.get(name=job["id"])
    assert policy_of_model(row.tuned_model) == ""
    policy = policy_made("assistant-v1", "assistant", "candidate")
    policy.run = row.run
    policy.save()
    assert policy_of_model(row.tuned_model) == "assistant-v1"
    for other in (row.tuned_model.replace("even", "odd"), row.tuned_model + "0", "ft:a:b:c:", "ft:ft-v1"):
        assert policy_of_model(other) == ""


def test_files_of_fine_tuned_models_are_kept_and_those_of_deleted_ones_are_not(api: ApiClient) -> None:
    job = FineTuningJob.objects.get(name=created(api, training_file=uploaded(api))["id"])
    policy = policy_made("assistant-v1", "assistant", "candidate")
    policy.run = job.run
    policy.save()
    for number in range(2, 12):
        policy_made(f"assistant-v{number}", "assistant", "candidate")
    assert policy.pk in policies_retained("assistant")
    deleted = api.client.delete(f"/v1/models/{job.tuned_model}")
    assert deleted.json() == {"id": job.tuned_model, "object": "model", "deleted": True}
    policy.refresh_from_db()
    assert policy.stage == "rejected"
    assert policy.pk not in policies_retained("assistant")
    again = api.client.delete(f"/v1/models/{job.tuned_model}")
    assert (again.status_code, error_of(again)["param"]) == (400, "model")
    assert api.client.delete("/v1/models/assistant-v2").status_code == 404


def test_what_is_forgotten_goes_from_training_files_too(api: ApiClient, ratchet_home: Path) -> None:
    secret = "My parcel to Elm Street 14 never arrived, says Ada Lovelace."
    decision_record(agent="a", messages=secret, response="Sorry to hear that.", unit="ada")
    asked = {"messages": [{"role": "user", "content": secret}, {"role": "assistant", "content": "Sorry."}]}
    name = uploaded(api, CHAT + lines([asked]))
    assert unit_forget("ada").places[f"files in {FOLDER}/"] == 1
    content = (ratchet_home / FOLDER / f"{name}.jsonl").read_text("utf-8")
    assert "Ada Lovelace" not in content
    assert api.get(f"/v1/files/{name}").json()["bytes"] == len(content.encode())


DOWNLOADED = {
    "id": "ftjob-abc123",
    "object": "fine_tuning.job",
    "model": "gpt-4o-mini-2024-07-18",
    "fine_tuned_model": "ft:gpt-4o-mini-2024-07-18:acme:support:7p4lURel",
    "status": "succeeded",
    "seed": 11,
    "hyperparameters": {"n_epochs": 4, "batch_size": 1, "learning_rate_multiplier": 1.8},
    "method": {"type": "supervised", "supervised": {"hyperparameters": {"n_epochs": 4}}},
    "metadata": None,
}


def imported(tmp_path: Path, told: object, *options: str) -> dict[str, Any]:
    (tmp_path / "job.json").write_text(json.dumps(told))
    (tmp_path / "train.jsonl").write_bytes(CHAT)
    out = io.StringIO()
    paths = [str(tmp_path / "job.json"), str(tmp_path / "train.jsonl")]
    call_command("import_openai_job", *paths, "--json", *options, stdout=out)
    found: dict[str, Any] = json.loads(out.getvalue())
    return found


def test_a_downloaded_job_is_queued_with_its_settings(tmp_path: Path) -> None:
    found = imported(tmp_path, DOWNLOADED, "--model", "bundled", "--agent", "support-bot")
    run = TrainingRun.objects.get(pk=found["run"])
    assert (run.agent, run.method, run.base_model) == ("support-bot", "sft", "bundled")
    assert run.recipe == {"epochs": 4, "seed": 11}
    assert found["model"].startswith("ft:bundled:support-bot:support:")


def test_a_job_whose_validation_file_is_missing_stores_nothing(tmp_path: Path, ratchet_home: Path) -> None:
    with pytest.raises(CommandError, match="nowhere"):
        imported(tmp_path, DOWNLOADED, "--model", "bundled", "--validation", str(tmp_path / "nowhere.jsonl"))
    assert not TrainingFile.objects.exists()


@pytest.mark.parametrize(
    ("told", "said"),
    [
        ([], "expected a fine-tuning job"),
        (DOWNLOADED, "model: expected one of"),
        (DOWNLOADED | {"model": "bundled", "method": {"type": "reinforcement"}}, "prompts without an answer"),
        (DOWNLOADED | {"seed": "x"}, "seed"),
    ],
)
def test_an_untrainable_job_is_refused(tmp_path: Path, ratchet_home: Path, told: object, said: str) -> None:
    with pytest.raises(CommandError, match=said):
        imported(tmp_path, told)
    assert (FineTuningJob.objects.count(), TrainingFile.objects.count()) == (0, 0)


def test_a_file_belongs_to_the_key_that_uploaded_it(api: ApiClient, operator: Client) -> None:
    name, other = uploaded(api), ApiClient(key=key_create("another", ["operate", "read"])[1])
    for path in (f"/v1/files/{name}", f"/v1/files/{name}/content"):
        assert error_of(other.get(path))["code"] == "not_found"
        assert (api.get(path).status_code, operator.get(path).status_code) == (200, 200)
    assert error_of(other.client.delete(f"/v1/files/{name}"))["code"] == "not_found"
    refused = error_of(ordered(other, training_file=name))
    assert (refused["code"], refused["param"]) == ("not_found", "training_file")
    listed = [client.get("/v1/files").json()["data"] for client in (api, other, operator)]
    assert [[file["id"] for file in files] for files in listed] == [[name], [], [name]]
    assert api.client.delete(f"/v1/files/{name}").json()["deleted"]


def test_a_job_belongs_to_the_key_that_asked_for_it(api: ApiClient, operator: Client) -> None:
    name, other = (
        created(api, training_file=uploaded(api))["id"],
        ApiClient(key=key_create("another", ["operate", "read"])[1]),
    )
    job = FineTuningJob.objects.get(name=name)
    TrainingRun.objects.update(status="succeeded", follow_up="done", finished_at="2026-01-01T00:00Z")
    policy = policy_made("assistant-v1", "assistant", "candidate")
    policy.run = job.run
    policy.save()
    paths = [f"/v1/fine_tuning/jobs/{name}{part}" for part in ("", "/events", "/checkpoints")]
    paths += [f"/v1/files/{file}{part}" for file in shown.result_names(job) for part in ("", "/content")]
    for row in api.get(f"/v1/fine_tuning/jobs/{name}/checkpoints").json()["data"]:
        parsed(FineTuningJobCheckpoint, row)
    for path in paths:
        assert error_of(other.get(path))["code"] == "not_found"
        assert (api.get(path).status_code, operator.get(path).status_code) == (200, 200)
    assert error_of(other.post(f"/v1/fine_tuning/jobs/{name}/cancel", ""))["code"] == "not_found"
    assert error_of(other.get("/v1/fine_tuning/jobs", after=name))["code"] == "not_found"
    listed = [client.get("/v1/fine_tuning/jobs").json()["data"] for client in (api, other, operator)]
    assert [[row["id"] for row in rows] for rows in listed] == [[name], [], [name]]


OBJECTS = ("files", "files/file-x", "files/file-x/content", "fine_tuning/jobs", "fine_tuning/jobs/ftjob-x")


@pytest.mark.parametrize(
    "path", [*OBJECTS, "fine_tuning/jobs/ftjob-x/events", "files/a/b", "fine_tuning/nothing"]
)
def test_whatever_is_refused_has_openais_shape(api: ApiClient, path: str) -> None:
    for client in (Client(), ApiClient(key="nope").client):
        assert client.get(f"/v1/{path}").status_code in (401, 404)
        error_of(client.get(f"/v1/{path}"))
    for method in (api.client.put, api.client.patch):
        error_of(method(f"/v1/{path}", "{", content_type="application/json"))
    error_of(api.get(f"/v1/{path}/"))
    error_of(api.get(f"/v1/{path}", limit="x", nothing="1"))


@pytest.mark.parametrize(
    ("path", "body", "kind"),
    [
        ("files", "{}", "application/json"),
        ("files", "xx", "multipart/form-data; boundary=q"),
        ("files", "xx", "multipart/form-data"),
        ("fine_tuning/jobs", "{", "application/json"),
        ("fine_tuning/jobs", "[]", "application/json"),
        ("fine_tuning/jobs", b"\xff\xfe", "application/json"),
        ("fine_tuning/jobs", "[" * 100_000, "application/json"),
        ("fine_tuning/jobs", "a=b", "application/x-www-form-urlencoded"),
    ],
)
def test_a_body_that_cannot_be_read_is_refused_in_openais_shape(
    api: ApiClient, path: str, body: str | bytes, kind: str
) -> None:
    refused = api.client.post(f"/v1/{path}", body, content_type=kind)
    assert refused.status_code in (400, 415)
    error_of(refused)
