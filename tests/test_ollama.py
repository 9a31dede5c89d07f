"""Ollama, by the official client on a real socket: what is sent, what is created, what is refused."""

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from django.core.management import CommandError, call_command

from rl.checksums import file_sum
from rl.export import ollama
from rl.export import service as export_service
from rl.export.artifact import ExportRefused
from rl.export.ollama import export_to_ollama, template_translated
from rl.models import GateSettings, Policy, PolicyEvent
from rl.online import pipeline
from rl.registry import service as registry
from tests.support.dataset_feedback import prompts_in, rate
from tests.support.registry_rows import make_run, registered
from tests.support.stub_ollama import OllamaServer
from tests.support.tiny_models import tiny_model

pytestmark = pytest.mark.django_db

CHATML = (
    "{% for m in messages %}{{'<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>' + '\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
LLAMA3 = (
    "{% for m in messages %}{% set c = '<|start_header_id|>' + m['role'] + '<|end_header_id|>\n\n' + m['content'] "
    "| trim + '<|eot_id|>' %}{% if loop.first %}{% set c = bos_token + c %}{% endif %}{{ c }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)
QWEN = (
    "{% if messages[0]['role'] != 'system' %}{{ '<|im_start|>system\nYou are Qwen.<|im_end|>\n' }}{% endif %}"
    + CHATML
)
MISTRAL = (
    "{{ bos_token }}{% for m in messages %}{% if m['role'] == 'user' %}{{ '[INST] ' + m['content'] + ' [/INST]' }}"
    "{% elif m['role'] == 'assistant' %}{{ m['content'] + eos_token }}{% else %}{{ raise_exception('no') }}{% endif %}"
    "{% endfor %}"
)


@pytest.fixture
def server() -> Iterator[OllamaServer]:
    with OllamaServer() as running:
        yield running


def gguf_file(path: Path, jinja: str = CHATML) -> Path:
    """A file as small as one can be, with the keys that are read."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(2048)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(["<s>", "<|im_end|>", "a"])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    writer.add_add_bos_token(True)
    writer.add_chat_template(jinja)
    writer.add_tensor("token_embd.weight", np.zeros((3, 32), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return gguf_file(tmp_path / "widgets.gguf")


def test_chatml_becomes_a_range_over_messages() -> None:
    go = template_translated(CHATML, "<s>", "<|im_end|>", bos_added=True)
    assert go.text == (
        '{{ range .Messages }}{{ if eq .Role "system" }}<|im_start|>system\n{{ .Content }}<|im_end|>\n'
        '{{ else if eq .Role "user" }}<|im_start|>user\n{{ .Content }}<|im_end|>\n'
        '{{ else if eq .Role "assistant" }}<|im_start|>assistant\n{{ .Content }}<|im_end|>\n'
        "{{ end }}{{ end }}<|im_start|>assistant\n"
    )
    assert go.stop == ["<|im_end|>"]


@pytest.mark.parametrize(("added", "start"), [(True, ""), (False, "<|begin_of_text|>")])
def test_the_first_token_is_written_once(added: bool, start: str) -> None:
    go = template_translated(LLAMA3, "<|begin_of_text|>", "<|eot_id|>", bos_added=added)
    turns = [{"role": "user", "content": "hi"}]
    assert go.render(turns) == (
        f"{start}<|start_header_id|>user<|end_header_id|>\n\nhi<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\n"
    )


def test_templates_of_their_own() -> None:
    # a system turn of the templates own is the models system prompt
    go = template_translated(QWEN, "", "<|im_end|>", bos_added=False)
    assert go.system == "You are Qwen."
    assert "Qwen" not in go.text
    # an end written only where nobody goes on is no part of a turn
    closing = CHATML.removesuffix("{% endif %}") + "{% else %}{{ eos_token }}{% endif %}"
    go = template_translated(closing, "", "<eos>", bos_added=False)
    plain = template_translated(CHATML, "", "<eos>", bos_added=False)
    assert go is not None
    assert go == plain


@pytest.mark.parametrize(
    "jinja", [MISTRAL, "{{ messages | length }}", "{% for %}", "{{ messages[9].content }}"]
)
def test_what_is_no_row_of_blocks_is_not_translated(jinja: str) -> None:
    assert template_translated(jinja, "<s>", "</s>", bos_added=True) is None


@pytest.mark.slow
def test_a_file_becomes_a_model(server: OllamaServer, file: Path) -> None:
    made = export_to_ollama(
        file,
        "widgets-v1",
        host=server.url,
        system="Be brief.",
        parameters={"temperature": 0.2},
        alias="widgets",
    )
    digest = f"sha256:{hashlib.sha256(file.read_bytes()).hexdigest()}"
    assert server.blobs[digest] == file.read_bytes()
    (order,) = server.created
    assert order["files"] == {"widgets.gguf": digest}
    assert order["system"] == "Be brief."
    assert order["template"].startswith('{{ range .Messages }}{{ if eq .Role "system" }}<|im_start|>')
    assert order["parameters"]["stop"] == ["<|im_end|>"]
    assert order["parameters"]["temperature"] == 0.2
    assert order["parameters"]["num_ctx"] == 2048
    assert (made.uploaded, made.alias, made.notes) == (1, "widgets", [])
    assert set(server.models) == {"widgets-v1:latest", "widgets:latest"}


@pytest.mark.slow
def test_a_template_that_cannot_be_translated_is_left_to_ollama(server: OllamaServer, tmp_path: Path) -> None:
    made = export_to_ollama(gguf_file(tmp_path / "m.gguf", MISTRAL), "m", host=server.url)
    assert "template" not in server.created[0]
    assert "cannot be translated" in made.notes[0]


def test_a_known_file_is_not_sent_again(server: OllamaServer, file: Path) -> None:
    export_to_ollama(file, "widgets-v1", host=server.url, alias="widgets")
    second = export_to_ollama(file, "widgets-v2", host=server.url, alias="widgets", system="v2")
    assert second.uploaded == 0
    assert sum(path.startswith("/api/blobs") and method == "POST" for method, path in server.asked) == 1
    assert server.models["widgets:latest"] == server.models["widgets-v2:latest"]


def test_a_broken_upload_is_sent_again_and_in_the_end_refused(server: OllamaServer, file: Path) -> None:
    server.cut_uploads = 99
    with pytest.raises(ExportRefused, match="expected an Ollama server at"):
        export_to_ollama(file, "widgets-v1", host=server.url)
    assert server.cut_uploads == 99 - ollama.UPLOADS
    assert server.created == []
    server.cut_uploads = 2
    assert export_to_ollama(file, "widgets-v1", host=server.url).uploaded == 1
    assert len(server.blobs) == 1


def test_a_file_changed_meanwhile(server: OllamaServer, file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ollama, "sha256_file", lambda path: "0" * 64)
    with pytest.raises(ExportRefused, match="found it changed"):
        export_to_ollama(file, "widgets-v1", host=server.url)
    assert server.created == []


def test_an_adapter_goes_on_a_known_model(server: OllamaServer, file: Path) -> None:
    export_to_ollama("smollm2", "widgets-v1", adapter=file, host=server.url)
    (order,) = server.created
    assert (order["from"], list(order["adapters"])) == ("smollm2", ["widgets.gguf"])
    assert "files" not in order
    server.adapters_known = False
    with pytest.raises(ExportRefused, match=r"no longer supported.*--format gguf"):
        export_to_ollama("smollm2", "widgets-v1", adapter=file, host=server.url)


def test_a_name_ollama_would_not_take_and_no_server_are_refused(server: OllamaServer, file: Path) -> None:
    for name in ("a b", "../x", "a:b:c"):
        with pytest.raises(ExportRefused, match="expected a name"):
            export_to_ollama(file, name, host=server.url)
    assert server.asked == []
    with pytest.raises(ExportRefused, match=r"http://127.0.0.1:9, found none.*OLLAMA_HOST"):
        export_to_ollama(file, "widgets-v1", host="http://127.0.0.1:9")


@pytest.fixture
def policy(file: Path) -> Policy:
    home = registry.home_path("policies/widgets/widgets-v1")
    home.mkdir(parents=True)
    weights = home / "adapter_model.safetensors"
    weights.write_bytes(b"weights")
    made = registered(make_run(), "widgets-v1", home, adapter_sha256=file_sum(weights))
    registry.artifact_register(
        made,
        actor="test",
        format="gguf",
        quantization="q4_k_m",
        path=str(file),
        bytes=3,
        sha256=file_sum(file),
        checked={},
    )
    return made


@pytest.mark.slow
def test_deployment_points_the_alias(policy: Policy, server: OllamaServer, settings: Any) -> None:
    settings.OLLAMA_HOST, settings.OLLAMA_MODEL_FAST = server.url, "fast"
    said = pipeline.policy_deploy(policy, actor="test", to_ollama=True)
    assert said == f"ollama {server.url} as widgets-v1, fast"
    assert {"widgets-v1:latest", "fast:latest"} == set(server.models)
    assert policy.events.get(kind=PolicyEvent.Kind.DEPLOYED).reason == said
    settings.OLLAMA_MODEL_FAST = ""  # without a name of its own the alias is the agent
    assert export_service.policy_register(policy, promote=True)["alias"] == "widgets"


def test_a_loop_goes_on_where_ollama_is_away(policy: Policy, settings: Any) -> None:
    settings.OLLAMA_HOST = "http://127.0.0.1:9"
    outcome = pipeline.PipelineResult(policy.name)
    pipeline._deploy(policy, outcome)
    assert outcome.deployed.startswith("not deployed: expected an Ollama server")
    assert not policy.events.filter(kind=PolicyEvent.Kind.DEPLOYED).exists()


def test_export_model_registers(
    policy: Policy,
    file: Path,
    server: OllamaServer,
    settings: Any,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    settings.OLLAMA_HOST = server.url
    written = {"policy": policy.name, "format": "gguf", "files": [{"path": str(file)}], "checked": {}}
    written |= {"notes": []}
    orders: list[export_service.ExportOrder] = []

    def export(order: export_service.ExportOrder, progress: Any = None) -> dict[str, Any]:
        orders.append(order)
        return dict(written)

    monkeypatch.setattr("rl.management.commands.export_model.export", export)
    call_command("export_model", "--policy", policy.name, "--register", "--system-prompt", "Hi.", "--json")
    assert json.loads(capsys.readouterr().out)["ollama"]["name"] == "widgets-v1"
    assert server.created[0]["system"] == "Hi."
    # what is registered can only be a GGUF file
    assert (orders[0].format, orders[0].quantization) == ("gguf", "q4_k_m")


def test_only_a_whole_gguf_is_registered() -> None:
    with pytest.raises(CommandError, match="--register needs --format gguf"):
        call_command("export_model", "--policy", "x", "--format", "merged", "--register")


GLADLY, NO = "yes, gladly and by all means", "no"
"""A fresh model holds the shorter answer for more likely; what is trained on these ratings must turn that round."""


@pytest.fixture
def rated(server: OllamaServer, settings: Any, tmp_path: Path) -> OllamaServer:
    """Feedback of which a tiny model learns within a few steps, a gate that eight held-out prompts open, a server."""
    for split, count in (("train", 12), ("eval", 2), ("holdout", 8)):
        for prompt in prompts_in(split, count):
            rate(prompt, GLADLY, "up")
            rate(prompt, NO, "down")
    GateSettings.objects.create(
        agent="helper",
        min_evidence=8,
        max_kl=1000,
        max_length_ratio=1000,
        max_reward_loss=10,
        max_invalid_gain=1,
    )
    settings.OLLAMA_HOST, settings.OLLAMA_MODEL_FAST = server.url, "fast"
    settings.RATCHET_BASE_MODEL = str(tiny_model(tmp_path / "base", "llama"))
    settings.RATCHET_CONFIG = {
        "dpo": {
            "max_steps": 20,
            "batch_size": 4,
            "lora_r": 2,
            "lora_alpha": 8,
            "max_length": 96,
            "learning_rate": 0.01,
        }
    }
    return server


def of_the_policy(server: OllamaServer, name: str) -> dict[str, Any]:
    """What the server was asked to make of a policy; its one file is, byte for byte, the artifact in the registry."""
    (order,) = [order for order in server.created if order["model"] == name]
    (digest,) = order["files"].values()
    artifact = Policy.objects.get(name=name).artifacts.get(format="gguf")
    assert digest == f"sha256:{artifact.sha256}"
    assert server.blobs[digest] == registry.home_path(artifact.path).read_bytes()
    return dict(order)


@pytest.mark.campaign
@pytest.mark.training
def test_train_dpo_makes_a_model(rated: OllamaServer, capsys: pytest.CaptureFixture[str]) -> None:
    call_command(
        "train_dpo",
        "--agent",
        "helper",
        "--config",
        "cpu",
        "--max-steps",
        "2",
        "--quantization",
        "q8_0",
        "--register-ollama",
        "--json",
    )
    said = json.loads(capsys.readouterr().out)
    assert said["ollama"]["name"] == said["policy"] == "helper-v24"
    assert of_the_policy(rated, "helper-v24")["template"].startswith("{{ range .Messages }}")
    assert list(rated.models) == ["helper-v24:latest"]  # nobody asked for the alias


@pytest.mark.campaign
@pytest.mark.training
def test_run_pipeline_deploys(rated: OllamaServer, capsys: pytest.CaptureFixture[str]) -> None:
    call_command("run_pipeline", "--agent", "helper", "--config", "cpu", "--deploy-ollama", "--json")
    said = json.loads(capsys.readouterr().out)
    assert (said["passed"], said["stage"]) == (True, "champion"), said["reason"]
    assert said["deployed"] == f"ollama {rated.url} as helper-v24, fast"
    of_the_policy(rated, "helper-v24")
    assert rated.models["fast:latest"] == rated.models["helper-v24:latest"]
    events = Policy.objects.get(name="helper-v24").events.order_by("pk").values_list("kind", flat=True)
    assert [kind for kind in events if kind in ("promoted", "exported", "deployed")][-1] == "deployed"


@pytest.mark.campaign
@pytest.mark.training
def test_run_pipeline_deploys_no_refused(rated: OllamaServer, capsys: pytest.CaptureFixture[str]) -> None:
    GateSettings.objects.update(min_evidence=9)
    call_command("run_pipeline", "--agent", "helper", "--config", "cpu", "--deploy-ollama", "--json")
    said = json.loads(capsys.readouterr().out)
    assert (said["passed"], said["stage"], said["deployed"]) == (False, "candidate", "")
    assert rated.asked == []
