"""Adapters on the team's own servers: published at a promotion, proved before traffic, repaired after restarts.

The stub keeps what vLLM 0.32 and llama-server publish; the campaign runs both programs.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from datetime import timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from django.contrib.auth.models import User
from django.test import Client

from feedback.cache import forget_all
from rl.checksums import file_sum
from rl.doctor import engine_faults
from rl.models import Artifact, EngineAdapter, Policy, ServingSettings
from rl.online import learner
from rl.registry import service as registry
from rl.serving import engines, publication
from rl.serving.assembly import answer_of
from rl.serving.base import Ask
from rl.serving.fallback import NobodyAnswers, pieces
from rl.serving.routing import target_of

pytestmark = pytest.mark.django_db

BASE = "org/tiny"
HELLO = [{"role": "user", "content": "hello"}]


class EngineStub:
    """vLLM or llama-server with one base model. An adapter's answer is its path."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.adapters: dict[str, str] = {}
        """vLLM: name -> path."""
        self.files: list[str] = []
        """llama-server: what `--lora` named at its start."""
        self.inert: set[str] = set()
        """Paths of adapters that answer as the base does."""
        self.updating = True
        """VLLM_ALLOW_RUNTIME_LORA_UPDATING"""
        self.calls: list[tuple[str, str]] = []
        """Path of each POST, and the adapter or model that it names."""
        stub = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self._send(*stub.got(self.path))

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                stub.calls.append((self.path, str(body.get("lora_name") or body.get("model"))))
                self._send(*stub.posted(self.path, body))

            def _send(self, status: int, body: object) -> None:
                raw = body.encode() if isinstance(body, str) else json.dumps(body).encode()
                self.send_response(status)
                if not isinstance(body, str):
                    self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(raw)))
                self.end_headers()
                self.wfile.write(raw)

            def log_message(self, *_: Any) -> None:
                """Nothing on the tests' screen."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.name = f"127.0.0.1:{self._server.server_port}"
        self.url = f"http://{self.name}/v1"
        threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True).start()

    def got(self, path: str) -> tuple[int, object]:
        if path == "/lora-adapters" and self.kind == "llamacpp":
            return 200, [{"id": at, "path": file, "scale": 1.0} for at, file in enumerate(self.files)]
        if path != "/v1/models":
            return 404, {"detail": "Not Found"}
        rows: list[dict[str, object]] = [{"id": BASE, "owned_by": self.kind, "root": BASE, "parent": None}]
        for name, root in self.adapters.items():
            rows.append({"id": name, "owned_by": self.kind, "root": root, "parent": BASE})
        return 200, {"object": "list", "data": rows}

    def posted(self, path: str, body: dict[str, Any]) -> tuple[int, object]:
        if path == "/v1/chat/completions":
            return self._answered(body)
        if not self.updating or self.kind != "vllm":
            return 404, {"detail": "Not Found"}
        name = body["lora_name"]
        if path == "/v1/unload_lora_adapter":
            if self.adapters.pop(name, None) is None:
                return self._error(404, "NotFoundError", f"The lora adapter '{name}' cannot be found.")
            return 200, f"Success: LoRA adapter '{name}' removed successfully."
        if name in self.adapters:
            said = f"The lora adapter '{name}' has already been loaded."
            return self._error(400, "InvalidUserInput", said)
        if not (Path(body["lora_path"]) / "adapter_model.safetensors").is_file():
            said = f"Loading lora {name} failed: No adapter found for <path>"
            return self._error(404, "NotFoundError", said)
        self.adapters[name] = body["lora_path"]
        return 200, f"Success: LoRA adapter '{name}' added successfully."

    def _answered(self, body: dict[str, Any]) -> tuple[int, object]:
        if self.kind == "vllm":
            if body["model"] not in (BASE, *self.adapters):
                return self._error(404, "NotFoundError", f"The model `{body['model']}` does not exist.")
            applied = self.adapters.get(body["model"], "")
        else:
            scales = {row["id"]: row["scale"] for row in body.get("lora", [])}
            on = [file for at, file in enumerate(self.files) if scales.get(at, 0.0 if scales else 1.0) == 1.0]
            applied = "+".join(on)
        shift = 0.0 if not applied or applied in self.inert else 0.1 + len(applied) / 1000
        top = [{"token": token, "logprob": at - shift} for token, at in (("a", -0.5), ("b", -1.5))]
        return 200, {
            "choices": [
                {
                    "index": 0,
                    "message": {"role": "assistant", "content": applied or "base"},
                    "finish_reason": "stop",
                    "logprobs": {"content": [{**top[0], "top_logprobs": top}]},
                }
            ]
        }

    @staticmethod
    def _error(status: int, kind: str, message: str) -> tuple[int, object]:
        return status, {"error": {"message": message, "type": kind, "param": None, "code": status}}

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Tasks that the workers were sent."""
    names: list[str] = []
    monkeypatch.setattr(engines, "async_task", lambda name, **_: names.append(name))
    monkeypatch.setattr(engines, "SOON_S", 0.0)
    monkeypatch.setattr(engines, "LIST_AGAIN_S", 0.0)
    return names


@pytest.fixture
def made(settings: Any, told: list[str]) -> Iterator[Callable[[str], EngineStub]]:
    """Starts a stub and lists it in LOCAL_BACKENDS."""
    stubs: list[EngineStub] = []

    def make(kind: str) -> EngineStub:
        stubs.append(EngineStub(kind))
        settings.LOCAL_BACKENDS = [stub.url for stub in stubs]
        return stubs[-1]

    yield make
    for stub in stubs:
        stub.close()


@pytest.fixture
def vllm(made: Callable[[str], EngineStub]) -> EngineStub:
    return made("vllm")


@pytest.fixture(autouse=True)
def homes(settings: Any, ratchet_home: Path) -> None:
    settings.ENGINE_HOME = ratchet_home


def trained(home: Path, number: int, agent: str = "widgets") -> Policy:
    folder = home / f"policies/{agent}-v{number}"
    folder.mkdir(parents=True)
    (folder / "adapter_model.safetensors").write_bytes(b"weights")
    return Policy.objects.create(
        name=folder.name,
        agent=agent,
        base_model=BASE,
        base_model_hash="0",
        adapter_path=f"policies/{folder.name}",
        adapter_sha256=file_sum(folder / "adapter_model.safetensors"),
        feedback_count=number,
    )


def promote(policy: Policy) -> Policy:
    return registry.policy_promote(policy, actor="test", force=True, reason="test")


def answered(model: str = "widgets") -> tuple[str, str]:
    """The policy that answered, and what was said."""
    served = pieces(target_of(model), Ask(HELLO))
    return served.model.name, answer_of(list(served.result), 0.0).text


def row_of(policy: Policy) -> EngineAdapter:
    return EngineAdapter.objects.get(policy=policy)


def test_a_promotion_loads_the_adapter_and_proves_it_before_it_has_the_policys_name(
    vllm: EngineStub, ratchet_home: Path
) -> None:
    first = promote(trained(ratchet_home, 1))
    path = str(ratchet_home / "policies/widgets-v1")
    assert answered() == ("widgets-v1", path)
    asked = [(call.rpartition("/")[2], name) for call, name in vllm.calls]
    assert asked == [
        ("unload_lora_adapter", "widgets-v1.probe"),
        ("load_lora_adapter", "widgets-v1.probe"),
        ("completions", BASE),
        ("completions", BASE),
        ("completions", "widgets-v1.probe"),
        ("unload_lora_adapter", "widgets-v1.probe"),
        ("load_lora_adapter", "widgets-v1"),
        ("completions", "widgets-v1"),
    ]
    assert row_of(first).proved_at is not None
    vllm.calls.clear()
    assert publication.reconcile() == []
    assert vllm.calls == []
    assert answered("widgets:base") == ("base", "base")


def test_an_engine_sees_the_files_below_its_own_path(
    vllm: EngineStub, ratchet_home: Path, tmp_path: Path, settings: Any
) -> None:
    settings.ENGINE_HOME = tmp_path / "mount"
    settings.ENGINE_HOME.symlink_to(ratchet_home)
    promote(trained(ratchet_home, 1))
    assert vllm.adapters == {"widgets-v1": f"{tmp_path}/mount/policies/widgets-v1"}


def test_an_adapter_that_answers_as_the_base_gets_no_traffic_until_it_is_mended(
    vllm: EngineStub, ratchet_home: Path, client: Client
) -> None:
    promote(trained(ratchet_home, 1))
    path = str(ratchet_home / "policies/widgets-v2")
    vllm.inert = {path}
    second = promote(trained(ratchet_home, 2))
    assert answered() == ("widgets-v1", str(ratchet_home / "policies/widgets-v1"))
    assert "widgets-v2" not in vllm.adapters
    row = row_of(second)
    assert (row.proved_at, row.tries) == (None, 1)
    assert "base" in row.fault
    assert [fault.part for fault in engine_faults()] == ["engines"]
    client.force_login(User.objects.create_superuser("ada"))
    page = client.get("/policies/widgets-v2/").content.decode()
    assert vllm.name in page
    assert "log-probabilities" in page

    vllm.inert = set()
    vllm.calls.clear()
    publication.reconcile()
    assert vllm.calls == []  # it waits before it tries again
    EngineAdapter.objects.update(try_after=row.try_after - timedelta(hours=1))
    assert publication.reconcile() == [f"{vllm.name} answers for widgets-v2"]
    assert answered() == ("widgets-v2", path)
    assert list(engine_faults()) == []


def test_the_pause_doubles_and_a_promotion_tries_at_once(vllm: EngineStub, ratchet_home: Path) -> None:
    policy = trained(ratchet_home, 1)
    vllm.inert = {str(ratchet_home / "policies/widgets-v1")}
    registry.policy_promote(policy, "challenger", actor="test", force=True, reason="test")
    pauses = []
    for _ in range(3):
        row = row_of(policy)
        EngineAdapter.objects.update(try_after=row.try_after - timedelta(hours=1))
        publication.reconcile()
        later = row_of(policy)
        pauses.append((later.try_after - row.try_after).total_seconds())
    assert [row_of(policy).tries, len(pauses)] == [4, 3]
    assert pauses[0] < pauses[1] < pauses[2]
    vllm.inert = set()
    promote(policy)
    assert answered()[0] == "widgets-v1"


def test_a_restart_that_forgot_the_adapters_is_mended_and_the_base_never_answers(
    vllm: EngineStub, ratchet_home: Path, told: list[str]
) -> None:
    promote(trained(ratchet_home, 1))
    assert answered()[0] == "widgets-v1"
    for _ in range(2):  # known by the 404, then by the list
        vllm.adapters.clear()
        told.clear()
        with pytest.raises(NobodyAnswers) as refusal:
            answered()
        assert {tried.kind for tried in refusal.value.fallbacks} == {"unpublished"}
        assert told == ["rl.tasks.engines"]
        assert learner.tick() == [f"{vllm.name} answers for widgets-v1"]
        assert answered()[0] == "widgets-v1"


def test_a_fallback_that_the_agent_names_may_be_the_base(
    vllm: EngineStub, ratchet_home: Path, told: list[str]
) -> None:
    ServingSettings.objects.create(agent="widgets", fallbacks=["base"])
    promote(trained(ratchet_home, 1))
    vllm.adapters.clear()
    assert answered() == ("base", "base")


def test_a_rollback_finds_its_adapter_and_older_ones_are_unloaded(
    vllm: EngineStub, ratchet_home: Path
) -> None:
    vllm.adapters = {"foreign": "/elsewhere"}
    for number in (1, 2, 3):
        promote(trained(ratchet_home, number))
    publication.reconcile()
    assert set(vllm.adapters) == {"foreign", "widgets-v2", "widgets-v3"}
    registry.policy_rollback("widgets", actor="test")
    assert answered()[0] == "widgets-v2"
    publication.reconcile()
    assert set(vllm.adapters) == {"foreign", "widgets-v1", "widgets-v2"}


def test_a_move_is_followed_by_a_worker(
    vllm: EngineStub, ratchet_home: Path, told: list[str], django_capture_on_commit_callbacks: Any
) -> None:
    policy = promote(trained(ratchet_home, 1))
    with django_capture_on_commit_callbacks(execute=True):
        registry.policy_retire(policy, actor="test")
    assert told == ["rl.tasks.engines"]
    publication.reconcile()
    assert vllm.adapters == {}
    assert not EngineAdapter.objects.exists()


def test_of_two_engines_the_one_that_has_it_answers(
    made: Callable[[str], EngineStub], ratchet_home: Path
) -> None:
    fixed, free = made("vllm"), made("vllm")
    fixed.updating = False
    promote(trained(ratchet_home, 1))
    assert answered()[0] == "widgets-v1"
    assert [name for _, name in free.calls][-1] == "widgets-v1"
    faults = dict(EngineAdapter.objects.values_list("engine", "fault"))
    assert faults[free.name] == ""
    assert "VLLM_ALLOW_RUNTIME_LORA_UPDATING" in faults[fixed.name]


def test_an_engine_that_is_away_keeps_its_proof(vllm: EngineStub, ratchet_home: Path, settings: Any) -> None:
    policy = promote(trained(ratchet_home, 1))
    proved_at = row_of(policy).proved_at
    vllm.close()
    assert publication.reconcile() == []
    assert "cannot be reached" in row_of(policy).fault
    assert row_of(policy).proved_at == proved_at
    settings.LOCAL_BACKENDS = ["in-process"]
    assert list(engine_faults()) == []


def test_two_processes_do_not_publish_one_adapter(vllm: EngineStub, ratchet_home: Path) -> None:
    policy = promote(trained(ratchet_home, 1))
    vllm.adapters.clear()
    EngineAdapter.objects.update(try_after=row_of(policy).try_after + publication.LEASE)
    vllm.calls.clear()
    assert publication.reconcile() == []
    assert vllm.calls == []


def test_a_damaged_file_is_not_published(vllm: EngineStub, ratchet_home: Path) -> None:
    policy = promote(trained(ratchet_home, 1))
    vllm.adapters.clear()
    (ratchet_home / "policies/widgets-v1/adapter_model.safetensors").write_bytes(b"other")
    assert publication.reconcile() == []
    assert "adapter_model.safetensors" in row_of(policy).fault
    assert vllm.adapters == {}


def test_other_servers_and_bases_get_no_adapters(
    made: Callable[[str], EngineStub], ratchet_home: Path
) -> None:
    made("ollama")
    other = trained(ratchet_home, 1, "filer")
    Policy.objects.filter(pk=other.pk).update(base_model="org/other")
    vllm = made("vllm")
    promote(trained(ratchet_home, 1))
    promote(Policy.objects.get(pk=other.pk))
    assert set(vllm.adapters) == {"widgets-v1"}


def test_llama_server_answers_with_the_adapters_of_its_start(
    made: Callable[[str], EngineStub], ratchet_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []
    monkeypatch.setattr(engines, "adapter_make", asked.append)
    llama = made("llamacpp")
    first = promote(trained(ratchet_home, 1))
    assert asked == ["widgets-v1"]
    with pytest.raises(NobodyAnswers):
        answered()
    files = []
    for policy in (first, trained(ratchet_home, 2)):
        path = f"exports/{policy.name}/{policy.name}-LoRA.gguf"
        Artifact.objects.create(policy=policy, format="gguf-lora", path=path, bytes=1, sha256="0")
        files.append(path)
    publication.reconcile()
    assert f"--lora {ratchet_home}/{files[0]}" in row_of(first).fault

    llama.files = ["/mnt/other.gguf", f"/mnt/ratchet/{files[0]}"]
    with pytest.raises(NobodyAnswers):
        answered()  # it is there, and nobody has proved it
    assert publication.reconcile() == [f"{llama.name} answers for widgets-v1"]
    forget_all()
    assert answered() == ("widgets-v1", llama.files[1])
    assert answered("widgets:base") == ("base", "base")

    second = promote(Policy.objects.get(name="widgets-v2"))
    assert answered()[0] == "widgets-v1"
    assert f"{files[0]},{ratchet_home}/{files[1]}" in row_of(second).fault
    llama.files = [f"/mnt/ratchet/{files[1]}", f"/mnt/ratchet/{files[0]}"]  # other numbers than before
    assert answered() == ("widgets-v1", llama.files[1])
    publication.reconcile()
    forget_all()
    assert answered() == ("widgets-v2", llama.files[0])
