"""Adapters on the team's own servers: published at a promotion, proved before traffic, repaired after restarts.

The stub keeps what vLLM 0.32 and llama-server publish; the campaign runs both programs.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from django.contrib.auth.models import User
from django.core.management import call_command
from django.test import Client
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

from feedback.cache import forget_all
from rl.checksums import file_sum
from rl.management.commands.doctor import engine_faults
from rl.models import Artifact, EngineAdapter, Policy, ServingSettings
from rl.online import learner
from rl.registry import service as registry
from rl.serving import engines, publication
from rl.serving.assembly import answer_of
from rl.serving.base import Ask
from rl.serving.fallback import NobodyAnswers, pieces
from rl.serving.routing import target_of
from tests.support.server import free_port
from tests.support.serving import gguf_files
from tests.support.stub_server import Stub, StubHandler, StubServer
from tests.support.tiny_models import SENTENCES, tiny_adapter, tiny_model

pytestmark = pytest.mark.django_db

BASE = "org/tiny"
HELLO = [{"role": "user", "content": "which widget shows the revenue of last week?"}]


class EngineStub(Stub):
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

        class Handler(StubHandler):
            protocol_version = "HTTP/1.0"  # a kept connection would be answered after the end

            def do_GET(self) -> None:
                self.answer(*stub.got(self.path))

            def do_POST(self) -> None:
                body = json.loads(self.body())
                stub.calls.append((self.path, str(body.get("lora_name") or body.get("model"))))
                self.answer(*stub.posted(self.path, body))

        self.server = StubServer(Handler)
        self.name = f"127.0.0.1:{self.server.server_port}"
        self.url = f"http://{self.name}/v1"

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
    folder.mkdir(parents=True, exist_ok=True)
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
    served = pieces(target_of(model), Ask(HELLO, max_tokens=12, temperature=0))
    return served.model.name, answer_of(list(served.result), 0.0).text


def row_of(policy: Policy) -> EngineAdapter:
    return EngineAdapter.objects.get(policy=policy.name)


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
    vllm.adapters.clear()
    publication.reconcile()
    assert list(vllm.adapters) == ["widgets-v2", "widgets-v1"]  # the champion first


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


def test_a_deleted_policy_is_unloaded(vllm: EngineStub, ratchet_home: Path) -> None:
    policy = promote(trained(ratchet_home, 1))
    policy.events.all().delete()
    policy.delete()
    assert publication.reconcile() == [f"{vllm.name} no longer has widgets-v1"]
    assert vllm.adapters == {}


def test_an_adapter_that_vllm_was_started_with_is_proved_in_place(
    vllm: EngineStub, ratchet_home: Path
) -> None:
    path = str(ratchet_home / "policies/widgets-v1")
    vllm.adapters = {"widgets-v1": path}
    promote(trained(ratchet_home, 1))
    assert {call for call, _ in vllm.calls} == {"/v1/chat/completions"}
    assert answered() == ("widgets-v1", path)


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


def test_who_promotes_is_told_to_start_llama_server_again(
    made: Callable[[str], EngineStub], ratchet_home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    llama = made("llamacpp")
    policy = trained(ratchet_home, 1)
    path = f"exports/{policy.name}/{policy.name}-LoRA.gguf"
    Artifact.objects.create(policy=policy, format="gguf-lora", path=path, bytes=1, sha256="0")
    call_command("policy", "promote", policy.name, force=True, reason="test")
    printed = capsys.readouterr().out
    assert f"{llama.name} does not answer with it: llama-server reads adapters at its start only" in printed
    assert f"--lora {ratchet_home}/{path}" in printed


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
    assert Client().get("/readyz").json()["adapters"] == "missing"

    llama.files = ["/mnt/other.gguf", f"/mnt/ratchet/{files[0]}"]
    with pytest.raises(NobodyAnswers):
        answered()  # it is there, and nobody has proved it
    assert publication.reconcile() == [f"{llama.name} answers for widgets-v1"]
    forget_all()
    assert answered() == ("widgets-v1", llama.files[1])
    assert answered("widgets:base") == ("base", "base")
    assert "adapters" not in Client().get("/readyz").json()

    second = promote(Policy.objects.get(name="widgets-v2"))
    assert answered()[0] == "widgets-v1"
    assert f"{files[0]},{ratchet_home}/{files[1]}" in row_of(second).fault
    llama.files = [f"/mnt/ratchet/{files[1]}", f"/mnt/ratchet/{files[0]}"]  # other numbers than before
    assert answered() == ("widgets-v1", llama.files[1])
    publication.reconcile()
    forget_all()
    assert answered() == ("widgets-v2", llama.files[0])


# --- The real programs ----------------------------------------------------------------------------------------


class Started:
    """A model server in a process of its own, to be stopped and started again on its port."""

    def __init__(self, home: Path, command: Callable[[int], list[str]], environment: dict[str, str]) -> None:
        self.port = free_port()
        self.name = f"127.0.0.1:{self.port}"
        self.url = f"http://{self.name}/v1"
        self.log = home / "engine.log"
        self._command, self._environment = command, {**os.environ, "PYTHONPATH": "", **environment}
        self._process: subprocess.Popen[bytes] | None = None

    def start(self, *more: str) -> None:
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                [*self._command(self.port), *more],
                env=self._environment,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        deadline = time.monotonic() + 300
        while not self._is_up():
            assert self._process.poll() is None, self.log.read_text()[-5000:]
            assert time.monotonic() < deadline, self.log.read_text()[-5000:]
            time.sleep(0.2)

    def _is_up(self) -> bool:
        try:
            return httpx.get(f"{self.url}/models", timeout=5).status_code == 200
        except httpx.HTTPError:
            return False

    def kill(self) -> None:
        if self._process is not None:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait(30)
            self._process = None

    def asked(self, path: str, **body: object) -> Any:
        return httpx.post(f"{self.url}/{path}", json=body, timeout=120).raise_for_status().json()


def adapters_of(home: Path, base: Path) -> list[Policy]:
    """A candidate each of two agents, with real adapters of one base."""
    found = []
    for seed, agent in enumerate(("widgets", "filer"), 1):
        policy = trained(home, seed, agent)
        folder = tiny_adapter(base, home / policy.adapter_path, seed=seed)
        Policy.objects.filter(pk=policy.pk).update(
            adapter_sha256=file_sum(folder / "adapter_model.safetensors")
        )
        policy.refresh_from_db()
        found.append(policy)
    return found


def log_probabilities(base: Path, adapter: Path, tokens: list[int]) -> list[float]:
    """Of each token but the first after those before it, by PEFT in float32."""
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    adapted = PeftModel.from_pretrained(model, adapter)
    with torch.no_grad():
        table = adapted(torch.tensor([tokens])).logits[0].log_softmax(-1)
    return [float(table[at, token]) for at, token in enumerate(tokens[1:])]


@pytest.mark.campaign
@pytest.mark.timeout(900)
def test_vllm_answers_with_each_adapter_as_peft_does(
    ratchet_home: Path, tmp_path: Path, settings: Any, told: list[str]
) -> None:
    """VLLM_PYTHON: the Python of an environment that has vLLM (for CPU)."""
    python = os.environ.get("VLLM_PYTHON")
    if not python:
        pytest.skip("VLLM_PYTHON names no environment with vLLM")
    base = tiny_model(tmp_path / "base", hidden=128)  # heads of 32, the least that vLLM has kernels for
    calm = {
        "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_NO_USAGE_STATS": "1",
    }
    options = (
        f"--model {base} --served-model-name {BASE} --dtype float32 --enable-lora --max-loras 2 --max-num-seqs 4 "
        "--max-model-len 512 --enforce-eager --host 127.0.0.1 --port"
    ).split()
    server = Started(
        tmp_path,
        lambda port: [python, "-m", "vllm.entrypoints.openai.api_server", *options, str(port)],
        calm,
    )
    settings.LOCAL_BACKENDS = [server.url]
    policies = adapters_of(ratchet_home, base)
    tokens = AutoTokenizer.from_pretrained(base)(SENTENCES[0])["input_ids"]
    try:
        server.start()
        settings.SERVING_TIMEOUT_S = 120.0  # the first answers of a tiny model are compiled
        for policy in policies:
            promote(policy)
            assert row_of(policy).fault == ""
            assert answered(policy.agent)[0] == policy.name
            said = server.asked(
                "completions",
                model=policy.name,
                prompt=tokens,
                max_tokens=1,
                temperature=0,
                prompt_logprobs=0,
            )
            rows = said["choices"][0]["prompt_logprobs"][1:]
            found = [row[str(token)]["logprob"] for row, token in zip(rows, tokens[1:], strict=True)]
            expected = log_probabilities(base, ratchet_home / policy.adapter_path, tokens)
            assert found == pytest.approx(expected, abs=1e-4)
        server.kill()
        server.start()
        with pytest.raises(NobodyAnswers):
            answered()
        assert told == ["rl.tasks.engines"]
        assert publication.reconcile() == [f"{server.name} answers for {one.name}" for one in policies]
        assert [answered(one.agent)[0] for one in policies] == [one.name for one in policies]
    finally:
        server.kill()


@pytest.mark.campaign
@pytest.mark.timeout(900)
def test_llama_server_answers_with_each_adapter(
    ratchet_home: Path, tmp_path: Path, settings: Any, told: list[str]
) -> None:
    """LLAMA_SERVER: llama.cpp's server."""
    program = os.environ.get("LLAMA_SERVER")
    if not program:
        pytest.skip("LLAMA_SERVER names no llama-server")
    files = gguf_files()
    command = f"{program} -m {files.base} --alias {BASE} -c 512 -t 1 --host 127.0.0.1 --port"
    server = Started(tmp_path, lambda port: [*command.split(), str(port)], {})
    settings.LOCAL_BACKENDS = [server.url]
    policies = [trained(ratchet_home, seed, agent) for seed, agent in enumerate(("widgets", "filer"), 1)]
    paths = []
    for policy, file in zip(policies, (files.one, files.two), strict=True):
        path = f"exports/{policy.name}/{policy.name}-LoRA.gguf"
        (ratchet_home / path).parent.mkdir(parents=True)
        shutil.copy(file, ratchet_home / path)
        Artifact.objects.create(policy=policy, format="gguf-lora", path=path, bytes=1, sha256=file_sum(file))
        paths.append(ratchet_home / path)
    try:
        server.start()
        for policy in policies:
            promote(policy)
        advice = row_of(policies[1]).fault.partition("start it again with ")[2]
        assert advice == f"--lora-init-without-apply --lora {paths[0]},{paths[1]}"
        server.kill()
        server.start(*advice.split())
        assert publication.reconcile() == [f"{server.name} answers for {one.name}" for one in policies]
        forget_all()
        assert [answered(one.agent)[0] for one in policies] == [one.name for one in policies]
        together = [_first_token(target) for target in ("widgets", "filer", "widgets:base")]
        for found, options in zip(together, (["--lora", paths[0]], ["--lora", paths[1]], []), strict=True):
            server.kill()
            server.start(*map(str, options))  # one adapter alone, or none
            said = server.asked("chat/completions", model=BASE, messages=HELLO, max_tokens=1, **LOGPROBS)
            assert found == pytest.approx(_top(said["choices"][0]["logprobs"]), abs=1e-3)
        assert len({round(found[0], 2) for found in together}) == 3
    finally:
        server.kill()


LOGPROBS = {"temperature": 0, "logprobs": True, "top_logprobs": 5}


def _first_token(model: str) -> list[float]:
    """Log-probabilities of the likeliest first tokens of an answer through the gateway."""
    extra = {name: LOGPROBS[name] for name in ("logprobs", "top_logprobs")}
    served = pieces(target_of(model), Ask(HELLO, max_tokens=1, temperature=0, extra=extra))
    return _top(answer_of(list(served.result), 0.0).extras.choice["logprobs"])


def _top(logprobs: Any) -> list[float]:
    return [row["logprob"] for row in logprobs["content"][0]["top_logprobs"]]
