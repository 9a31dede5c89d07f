"""Serving end to end in process: files found or made, policies side by side on one base, health and counters."""

import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from django.db import OperationalError
from django.test import Client

from feedback.models import Decision
from rl.api import health as health
from rl.checksums import base_hash, file_sum
from rl.gates.report import GateReport
from rl.models import Artifact, Policy
from rl.registry import integrity
from rl.registry import service as registry
from rl.registry.service import PreparationRefused, policy_promote
from rl.serving import fallback, files
from rl.serving.base import BackendFailed, Model
from rl.serving.fallback import InProcess
from rl.serving.llama import LlamaPolicy
from rl.serving.routing import base_model, policy_model
from tests.support.api_client import ApiClient, error_of
from tests.support.serving import (  # noqa: F401
    BUNDLED,
    Parrot,
    gguf_files,
    parrot_only,
    policy_made,
    support_bot_allowed,
    written_by_the_asking_thread,
)
from tests.support.tiny_models import tiny_adapter

pytestmark = pytest.mark.django_db

HASH = base_hash(str(BUNDLED))
HELLO = [{"role": "user", "content": "question: is uptime healthy\nwidgets:\nbadge\ntable"}]
SCHEMA = {"type": "object", "properties": {"widget": {"enum": ["badge", "table"]}}, "required": ["widget"]}
SCHEMA |= {"additionalProperties": False}


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """Commands that would have been started to make files."""
    started: list[list[str]] = []

    def popen(command: list[str], **_: Any) -> SimpleNamespace:
        started.append([part for part in command if not part.endswith(("python", "python3", "manage.py"))])
        return SimpleNamespace(poll=lambda: 0)

    monkeypatch.setattr(files.subprocess, "Popen", popen)
    files._makers.clear()
    return started


@pytest.fixture
def served(settings: Any, made: list[list[str]]) -> None:
    """The bundled base and two policies of `widgets` on it, as the exporters leave them."""
    gguf = gguf_files()
    folder = files.base_folder(HASH)
    folder.mkdir(parents=True)
    shutil.copy(gguf.base, folder / "base-f16.gguf")
    (folder / "base.json").write_text(json.dumps({"base_model": "bundled", "quantization": "f16"}))
    for name, path, stage in (("widgets-v1", gguf.one, "champion"), ("widgets-v2", gguf.two, "challenger")):
        policy_made(name, stage=stage)
        Policy.objects.filter(name=name).update(base_model_hash=HASH)
        shutil.copy(path, settings.RATCHET_HOME / "exports" / f"{name}-LoRA.gguf")


@pytest.fixture
def api(written_at_once: None) -> ApiClient:
    return ApiClient("ingest", "read")


def test_a_file_is_not_made_twice_at_once(made: list[list[str]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "ASK_AGAIN_S", 0.0)
    status: list[int | None] = [None]
    monkeypatch.setattr(
        files.subprocess, "Popen", lambda *_, **__: made.append([]) or SimpleNamespace(poll=lambda: status[0])
    )
    for _ in range(3):
        files.adapter_make("bot-v1")
    assert len(made) == 1
    status[0] = 1  # it failed
    files.adapter_make("bot-v1")
    assert len(made) == 2


def test_two_versions_share_one_base(api: ApiClient, served: None, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[Path] = []
    init = LlamaPolicy.__init__

    def counted(self: LlamaPolicy, path: Path, **more: Any) -> None:
        opened.append(path)
        init(self, path, **more)

    monkeypatch.setattr(LlamaPolicy, "__init__", counted)
    found: dict[str, set[tuple[float, ...]]] = {}
    for model in ("widgets-v1", "widgets-v2", "base") * 2:
        agent = "widgets" if model == "base" else model
        target = "widgets:base" if model == "base" else agent
        response = api.post(
            "/v1/chat/completions",
            {
                "model": target,
                "messages": HELLO,
                "response_format": {"type": "json_schema", "json_schema": {"name": "w", "schema": SCHEMA}},
            },
        )
        assert response.status_code == 200, response.content
        body = json.loads(response.content)
        assert body["model"] == model
        assert json.loads(body["choices"][0]["message"]["content"])["widget"] in ("badge", "table")
        assert body["usage"]["prompt_tokens"] > 10
        (backend,) = fallback.backends()
        logps = backend.log_probabilities(HELLO, ['{"widget": "badge"}'], _model(model), 5)
        found.setdefault(model, set()).add(tuple(round(value, 2) for value in logps))
    assert len(opened) == 1
    assert len({next(iter(values)) for values in found.values()}) == 3
    assert (
        Decision.objects.filter(propensity=1.0).count() == 6
    )  # the likeliest within the schema: no other could come


def _model(name: str) -> Model:
    if name == "base":
        return base_model("widgets", policy_model("widgets-v1"))
    return policy_model(name) or pytest.fail(name)


def test_a_stream_in_process_is_the_plain_answer(api: ApiClient, served: None) -> None:
    body = {"model": "widgets", "messages": HELLO}
    plain = json.loads(api.post("/v1/chat/completions", body).content)
    stream: Any = api.post("/v1/chat/completions", {**body, "stream": True})
    data = b"".join(stream.streaming_content).decode().split("\n\n")
    chunks = [json.loads(line.removeprefix("data: ")) for line in data if "chunk" in line]
    said = "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks)
    assert said == plain["choices"][0]["message"]["content"] != ""


def test_a_decision_in_process_has_the_whole_distribution(api: ApiClient, served: None) -> None:
    state = {"question": "is uptime healthy", "widgets": ["badge", "table", "gauge"]}
    response = api.post("/api/decide/", {"agent": "widgets", "state": state, "unit": "ada"})
    body = json.loads(response.content)
    assert response.status_code == 201
    best = max(body["candidates"], key=lambda c: c["log_probability"])
    assert (body["response"], body["propensity"], body["policy"]) == (best["response"], 1.0, "widgets-v1")
    assert body["action"]["widget"] in state["widgets"]


def test_a_missing_file_is_made(api: ApiClient, served: None, made: list[list[str]], settings: Any) -> None:
    (settings.RATCHET_HOME / "exports" / "widgets-v2-LoRA.gguf").unlink()
    for _ in range(2):
        response = api.post("/v1/chat/completions", {"model": "widgets-v2", "messages": HELLO})
        assert (response.status_code, response["Retry-After"]) == (503, "15")
    assert made == [["export_model", "--policy", "widgets-v2", "--format", "gguf-lora"]]
    assert not Decision.objects.exists()


def test_a_champion_is_replaced(api: ApiClient, served: None, made: list[list[str]], settings: Any) -> None:
    (settings.RATCHET_HOME / "exports" / "widgets-v1-LoRA.gguf").unlink()
    body = json.loads(api.post("/v1/chat/completions", {"model": "widgets", "messages": HELLO}).content)
    assert (body["model"], body["ratchet"]["intended"]) == ("base", "widgets-v1")
    assert made == [["export_model", "--policy", "widgets-v1", "--format", "gguf-lora"]]
    assert Decision.objects.first().metadata["serving"]["fallbacks"][0]["kind"] == "missing"  # type: ignore[union-attr]


def test_a_damaged_champion_is_replaced_by_the_last_undamaged_champion_before_the_base(
    api: ApiClient, served: None, made: list[list[str]], settings: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent: list[str] = []
    monkeypatch.setattr(integrity, "_tell", lambda key, event, text, **_: sent.append(f"{event}: {text}"))
    for name in ("widgets-v3", "widgets-v4"):
        policy_made(name, stage="candidate")
        shutil.copy(gguf_files().two, settings.RATCHET_HOME / "exports" / f"{name}-LoRA.gguf")
    Policy.objects.update(base_model_hash=HASH)
    for artifact in Artifact.objects.all():
        Artifact.objects.filter(pk=artifact.pk).update(sha256=file_sum(settings.RATCHET_HOME / artifact.path))
    for name in ("widgets-v2", "widgets-v3", "widgets-v4"):  # v1 was first; each replaces the one before
        policy = Policy.objects.get(name=name)
        registry.policy_promote(policy, actor="ada", reason="for the test", force=True)

    def answered() -> tuple[str, str | None]:
        response = api.post("/v1/chat/completions", {"model": "widgets", "messages": HELLO})
        return response["X-Ratchet-Policy"], response.get("X-Ratchet-Intended")

    assert answered() == ("widgets-v4", None)
    for damaged, next_one in (
        ("v4", "widgets-v3"),
        ("v3", "widgets-v2"),
        ("v2", "widgets-v1"),
        ("v1", "base"),
    ):
        file = settings.RATCHET_HOME / "exports" / f"widgets-{damaged}-LoRA.gguf"
        data = bytearray(file.read_bytes())
        data[-3] ^= 0xFF
        file.write_bytes(data)
        assert answered() == (next_one, "widgets-v4")
        assert f"widgets-v4 is damaged; {next_one} answers" in sent[-1]
    # asked for by name it answers or refuses
    response = api.post("/v1/chat/completions", {"model": "widgets-v4", "messages": HELLO})
    assert (response.status_code, "is damaged" in error_of(response)["message"]) == (503, True)
    # only the champion's own file is made anew, not those of policies that step in
    assert made == [["export_model", "--policy", "widgets-v4", "--format", "gguf-lora"]]


def test_a_broken_adapter_is_stepped_in_for(api: ApiClient, served: None, settings: Any) -> None:
    (settings.RATCHET_HOME / "exports" / "widgets-v1-LoRA.gguf").write_bytes(b"GGUF nonsense")
    body = {"model": "widgets", "messages": HELLO}
    assert json.loads(api.post("/v1/chat/completions", body).content)["model"] == "base"
    response = api.post("/v1/chat/completions", {**body, "functions": [{"name": "f"}]})
    assert (response.status_code, error_of(response)["param"]) == (400, "functions")


def test_a_whole_file_is_served_from(api: ApiClient, served: None, settings: Any) -> None:
    policy = Policy.objects.get(name="widgets-v2")
    policy.artifacts.all().delete()
    for quantization in ("f16", "q4_k_m"):
        path = f"exports/widgets-v2-{quantization}.gguf"
        Artifact.objects.create(
            policy=policy, format="gguf", quantization=quantization, path=path, bytes=1, sha256="0"
        )
        shutil.copy(gguf_files().base, settings.RATCHET_HOME / path)
    model = _model("widgets-v2")
    assert model.merged_file == "exports/widgets-v2-f16.gguf"
    assert files.files_of(model) == (settings.RATCHET_HOME / model.merged_file, None)
    body = json.loads(api.post("/v1/chat/completions", {"model": "widgets-v2", "messages": HELLO}).content)
    assert body["model"] == "widgets-v2"


def test_no_file_is_503_for_now(api: ApiClient, made: list[list[str]], support_bot: None) -> None:
    response = api.post("/v1/chat/completions", {"model": "support-bot", "messages": HELLO})
    assert (response.status_code, response["Retry-After"]) == (503, "15")
    assert made == [["export_model", "--base-model", "bundled", "--format", "gguf", "--quantization", "auto"]]


def test_a_base_is_found_by_its_hash_before_its_name(served: None) -> None:
    assert files.base_file(Model("base", "renamed", HASH)) is not None
    assert files.base_file(Model("base", "bundled")) is not None
    assert files.base_file(Model("base", "bundled", "sha256:other")) is None


def test_another_template_is_another_base(served: None, tmp_path: Path) -> None:
    folder = tmp_path / "other"
    shutil.copytree(BUNDLED, folder)
    (files.bases_folder() / "named").mkdir()
    (files.bases_folder() / "named" / "base.json").write_text(json.dumps({"base_model": str(folder)}))
    shutil.copy(gguf_files().base, files.bases_folder() / "named" / "base-f16.gguf")
    assert files.base_file(Model("base", str(folder))) == files.base_folder(HASH) / "base-f16.gguf"
    (folder / "chat_template.jinja").write_text("{{ messages[0].content }}")
    assert files.base_file(Model("base", str(folder))) is None


def test_a_changed_base_is_said_and_nothing_made(made: list[list[str]], tmp_path: Path) -> None:
    others = ((tmp_path / "gone", "is not there any more"), (BUNDLED, "was changed since"))
    for number, (base, word) in enumerate(others):
        policy_made(f"widgets-v{number}", stage="candidate")
        Policy.objects.update(base_model=str(base), base_model_hash="sha256:" + "a" * 64)
        with pytest.raises(BackendFailed, match=word):
            files.files_of(_model(f"widgets-v{number}"))
    assert made == []


def test_who_waits_too_long_for_llama_is_sent_away(served: None) -> None:
    backend = InProcess(context=512, waiting=1)
    with backend._turns.turn(1), pytest.raises(BackendFailed) as failure:
        backend.log_probabilities(HELLO, ["x"], _model("base"), 0.01)
    assert failure.value.kind == "busy"
    backend.close()


@pytest.mark.training
@pytest.mark.prepares
@pytest.mark.django_db(transaction=True)
def test_promoted_is_servable(api: ApiClient, ratchet_home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RATCHET_HOME", str(ratchet_home))
    tiny_adapter(BUNDLED, ratchet_home / "nowhere")
    policy = policy_made("widgets-v1", stage="candidate")
    policy.artifacts.all().delete()
    weights = file_sum(ratchet_home / "nowhere" / "adapter_model.safetensors")
    Policy.objects.update(base_model_hash=base_hash(str(BUNDLED)), adapter_sha256=weights)
    policy.refresh_from_db()
    policy_promote(policy, "champion", actor="ada", reason="for the test", force=True)
    artifact = policy.artifacts.get()
    assert (artifact.format, artifact.checked != {}) == ("gguf-lora", True)
    body = json.loads(api.post("/v1/chat/completions", {"model": "widgets", "messages": HELLO}).content)
    assert body["model"] == "widgets-v1"


@pytest.mark.prepares
def test_the_unservable_needs_force(ratchet_home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(options: list[str], deadline: float) -> dict[str, Any]:
        raise PreparationRefused("no converter")

    monkeypatch.setattr(files, "_export", refuse)
    monkeypatch.setattr(registry, "policy_judge", lambda policy, to: GateReport(to, "base", ()))
    policy = policy_made("widgets-v1", stage="candidate")
    with pytest.raises(registry.RegistryRefused, match=r"stays candidate: .*no converter"):
        registry.policy_promote(policy, "champion", actor="ada")
    assert Policy.objects.get().stage == "candidate"
    forced = registry.policy_promote(policy, "champion", actor="ada", reason="a server has it", force=True)
    assert forced.stage == "champion"


@pytest.mark.training
def test_export_model_makes_what_serving_looks_for(ratchet_home: Path) -> None:
    from rl.export.service import ExportOrder, export

    tiny_adapter(BUNDLED, ratchet_home / "nowhere")
    policy = policy_made("widgets-v1")
    Artifact.objects.all().delete()
    Policy.objects.update(base_model_hash=base_hash(str(BUNDLED)))
    export(ExportOrder(policy="widgets-v1", format="gguf-lora"))
    again = export(ExportOrder(base_model="bundled", format="gguf", quantization="f16"))
    assert again["notes"] == ["it was there already"]
    base, adapter = files.files_of(_model("widgets-v1"))
    assert adapter == ratchet_home / policy.artifacts.get().path
    with LlamaPolicy(base, threads=1) as llama:
        assert llama.log_probabilities(HELLO, ["x"], adapter) != llama.log_probabilities(HELLO, ["x"])


def test_alive_is_open_to_everyone(client: Client) -> None:
    response = client.get("/healthz")
    assert (response.status_code, response.json()) == (200, {"status": "ok"})
    assert client.post("/healthz").status_code == 405


def test_ready_names_what_is_away(
    client: Client, parrot: Parrot, monkeypatch: pytest.MonkeyPatch, made: list[list[str]], served: None
) -> None:
    parts = ("database", "migrations", "queue", "model", "data", "spool")
    assert client.get("/readyz").json() == {"status": "ready", **dict.fromkeys(parts, "ok")}
    monkeypatch.setattr(health, "backends", list)
    response = client.get("/readyz")
    assert (response.status_code, response.json()["model"], response["Retry-After"]) == (503, "away", "5")

    class Away:
        def cursor(self) -> None:
            raise OperationalError("away")

    monkeypatch.setattr(health, "connection", Away())
    assert client.get("/readyz").json()["database"] == "away"


def test_counters_are_for_those_who_may_read(api: ApiClient, parrot: Parrot, settings: Any) -> None:
    settings.GATEWAY_NEW_AGENTS = ["an-agent-*"]
    api.post("/v1/chat/completions", {"model": "widgets", "messages": HELLO})
    api.post("/v1/chat/completions", {"model": "an-agent-nobody-set-up", "messages": HELLO})
    response = api.get("/metrics")
    assert response["Content-Type"].startswith("text/plain")
    text = response.content.decode()
    assert 'ratchet_gateway_requests_total{agent="widgets",status="200"}' in text
    assert 'agent="other"' in text
    assert "an-agent-nobody-set-up" not in text
    for name in ("ratchet_gateway_seconds_bucket", "ratchet_spool_bytes 0.0", "ratchet_runs_queued 0.0"):
        assert name in text
    assert Client().get("/metrics").status_code == 401
    assert ApiClient("ingest").get("/metrics").status_code == 403


def test_the_chosen_file_serves_a_base(tmp_path: Path, settings: Any) -> None:
    folder = files.base_folder("sha256:" + "c" * 64)
    folder.mkdir(parents=True)
    for name in ("f16", "q8_0", "original"):
        (folder / f"base-{name}.gguf").write_bytes(name.encode())
    (folder / "base.json").write_text(json.dumps({"base_model": "some", "quantization": "original"}))
    model = Model("base", "some", "sha256:" + "c" * 64)
    for wanted, name in (("auto", "original"), ("q8_0", "q8_0"), ("q4_0", "f16")):
        settings.SERVING_QUANTIZATION = wanted
        assert files.base_file(model) == folder / f"base-{name}.gguf"
