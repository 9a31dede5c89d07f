"""Names of exported files and the keys that say what they were made of, by the GGUF specification."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import gguf
import pytest

from rl.export.gguf import export_gguf
from rl.export.gguf_lora import export_gguf_lora
from rl.export.gguf_write import identity_of
from rl.export.source import Source, source_open
from tests.support.tiny_models import tiny_adapter

BUNDLED = Path(__file__).resolve().parent.parent / "rl" / "bundled_model"

# ggml-org/ggml docs/gguf.md, the expression of the naming convention
SPECIFICATION = re.compile(
    r"^(?P<base>[A-Za-z0-9\s]*(?:(?:-(?:(?:[A-Za-z\s][A-Za-z0-9\s]*)|(?:[0-9\s]*)))*))-"
    r"(?:(?P<size>(?:\d+x)?(?:\d+\.)?\d+[A-Za-z](?:-[A-Za-z]+(\d+\.)?\d+[A-Za-z]+)?)"
    r"(?:-(?P<finetune>[A-Za-z0-9\s-]+))?)?-(?:(?P<version>v\d+(?:\.\d+)*))"
    r"(?:-(?P<encoding>(?!LoRA|vocab)[\w_]+))?(?:-(?P<type>LoRA|vocab))?(?:-(?P<shard>\d{5}-of-\d{5}))?\.gguf$"
)


@pytest.fixture(scope="module")
def adapted(tmp_path_factory: pytest.TempPathFactory) -> Source:
    folder = tmp_path_factory.mktemp("adapters") / "support-bot-v214.2"
    return source_open("bundled", tiny_adapter(BUNDLED, folder, seed=1))


@pytest.mark.parametrize(
    ("base", "parts"),
    [
        ("bundled", ("Ratchet-bundled", "3.0M", "support-bot", "v214.2")),
        ("Qwen/Qwen3-0.6B", ("Qwen3", "0.6B", "support-bot", "v214.2")),
        ("HuggingFaceTB/SmolLM2-135M-Instruct", ("SmolLM2", "135M", "Instruct-support-bot", "v214.2")),
        ("meta-llama/Llama-3.2-1B-Instruct", ("Llama-3-2", "1B", "Instruct-support-bot", "v214.2")),
        ("models/mistral_7b", ("mistral", "7B", "support-bot", "v214.2")),
        ("models/our 3rd try", ("our3rd-try", "3.0M", "support-bot", "v214.2")),
    ],
)
def test_a_file_name_splits_into_the_parts_of_the_specification(
    adapted: Source, base: str, parts: tuple[str, ...]
) -> None:
    identity = identity_of(dataclasses.replace(adapted, base_name=base))
    found = SPECIFICATION.match(identity.file_name("q4_k_m"))
    assert found is not None
    assert found.group("base", "size", "finetune", "version", "encoding", "type") == (*parts, "Q4_K_M", None)
    adapter = SPECIFICATION.match(identity.file_name("f32", adapter=True))
    assert adapter is not None
    assert adapter.group("finetune", "encoding", "type") == (parts[2], "F32", "LoRA")


def test_a_policys_own_name_says_what_it_was_trained_for(adapted: Source) -> None:
    identity = identity_of(adapted, "mail_room-v30")
    assert (identity.finetune, identity.version) == ("mail-room", "v30")
    assert identity_of(adapted, "my model").version == "v1.0"


@pytest.mark.campaign
def test_a_file_names_its_base_model_and_its_size(adapted: Source, tmp_path: Path) -> None:
    assert adapted.adapter is not None
    whole = export_gguf("bundled", adapted.adapter.path, tmp_path, quantization="f16").files[0].path
    lora = export_gguf_lora("bundled", adapted.adapter.path, tmp_path / "lora").files[0].path
    assert whole.name == "Ratchet-bundled-3.0M-support-bot-v214.2-F16.gguf"
    assert lora.name == "Ratchet-bundled-3.0M-support-bot-v214.2-F32-LoRA.gguf"
    for path in (whole, lora):
        reader = gguf.GGUFReader(path)
        stored = {key: field.contents() for key, field in reader.fields.items() if key.startswith("general.")}
        assert stored["general.basename"] == "Ratchet-bundled"
        assert stored["general.size_label"] == "3.0M"
        assert stored["general.finetune"] == "support-bot"
        assert stored["general.version"] == "v214.2"
        assert stored["general.base_model.count"] == 1
        assert stored["general.base_model.0.name"] == "bundled"
