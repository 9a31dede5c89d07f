"""Exports: files that are whole or absent, and merged weights that are PEFT's own."""

import json
import shutil
import subprocess
from collections import namedtuple
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from rl.checksums import base_hash
from rl.export import artifact, hugging_face
from rl.export.artifact import ExportRefused, exported_file, staged_file, staged_folder
from rl.export.hugging_face import export_lora, export_merged
from rl.export.source import source_open
from rl.export.weights import Adapter
from tests.support.export_models import llama as llama
from tests.support.export_models import llama_lora as llama_lora
from tests.support.export_models import one_core as one_core
from tests.support.tiny_models import tiny_adapter, tiny_model

Usage = namedtuple("Usage", "total used free")


def leftovers(folder: Path) -> list[str]:
    """What lies in a folder, except the home every test gets."""
    return sorted(path.name for path in folder.rglob("*") if path.name != "home") if folder.exists() else []


def half_written(output: Path, error: Exception) -> None:
    with staged_file(output, 3) as staged:
        staged.write_bytes(b"half")
        raise error


def merged_by_peft(base: Path, adapter: Path) -> dict[str, torch.Tensor]:
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    state: dict[str, torch.Tensor] = (
        PeftModel.from_pretrained(model, str(adapter)).merge_and_unload().state_dict()
    )
    return state


def test_a_staged_file_appears_whole_with_its_hash(tmp_path: Path) -> None:
    with staged_file(tmp_path / "new" / "a.bin", 3) as staged:
        staged.write_bytes(b"abc")
        assert not (tmp_path / "new" / "a.bin").exists()
    made = exported_file(tmp_path / "new" / "a.bin")
    # FIPS 180-2, appendix B.1
    assert made.sha256 == "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
    assert made.bytes == 3
    assert leftovers(tmp_path) == ["a.bin", "new"]


def test_a_failure_leaves_the_earlier_file_as_it_was(tmp_path: Path) -> None:
    output = tmp_path / "a.bin"
    output.write_bytes(b"earlier")
    with pytest.raises(RuntimeError, match="lightning"):
        half_written(output, RuntimeError("lightning"))
    assert output.read_bytes() == b"earlier"
    assert leftovers(tmp_path) == ["a.bin"]


def test_a_failure_removes_the_folders_made_for_it(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError), staged_folder(tmp_path / "deep" / "er" / "out", 3):
        raise RuntimeError
    assert leftovers(tmp_path) == []


def test_an_earlier_export_is_replaced_but_nothing_else(tmp_path: Path) -> None:
    output = tmp_path / "out"
    output.mkdir()
    (output / "thesis.txt").write_text("mine")
    with pytest.raises(ExportRefused, match="other files in"), staged_folder(output, 1):
        pass
    assert (output / "thesis.txt").read_text() == "mine"
    (output / "export.json").write_text("{}")
    with staged_folder(output, 1) as staged:
        (staged / "new").write_text("x")
    assert leftovers(output) == ["new"]


def test_too_little_space_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: Usage(10**12, 10**12, 2 * 10**9))
    with (
        pytest.raises(ExportRefused, match=r"needs 5\.1 GB in .*, found 2\.0 GB free"),
        staged_file(tmp_path / "out" / "a", 5 * 10**9),
    ):
        pass
    assert leftovers(tmp_path) == []


@pytest.mark.slow
def test_full_disk(llama: Path, llama_lora: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(disk)], capture_output=True
    )
    if mounted.returncode != 0:
        pytest.skip("mounting a small tmpfs is not allowed here")
    try:
        with pytest.raises(ExportRefused, match="free some space"):
            export_merged(None, llama_lora, disk / "out")
        # and when nobody looked beforehand
        monkeypatch.setattr(artifact, "space_check", lambda *_: None)
        with pytest.raises(ExportRefused, match="became full while exporting"):
            export_merged(None, llama_lora, disk / "out")
        assert leftovers(disk) == []
    finally:
        subprocess.run(["umount", str(disk)], check=True)


def test_an_output_below_a_file_is_refused(llama_lora: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(ExportRefused, match="folder that can be written"):
        export_lora(None, llama_lora, tmp_path / "file" / "out")


@pytest.mark.slow
@pytest.mark.parametrize("architecture", ["llama", "gpt2", "phi3", "opt"])
def test_merged_weights_are_those_of_peft(architecture: str, tmp_path: Path) -> None:
    base = tiny_model(tmp_path / "base", architecture)
    adapter = tiny_adapter(base, tmp_path / "lora")
    export_merged(None, adapter, tmp_path / "out")
    expected, before = merged_by_peft(base, adapter), load_file(base / "model.safetensors")
    found = load_file(tmp_path / "out" / "model.safetensors")
    assert set(found) == set(before)
    changed = [name for name in found if not torch.equal(found[name], before[name])]
    assert len(changed) == len(load_file(adapter / "adapter_model.safetensors")) // 2
    for name, tensor in found.items():
        torch.testing.assert_close(tensor, expected[name], rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    "knobs",
    [
        {"use_rslora": True},
        {"alpha_pattern": {"q_proj": 3}, "rank_pattern": {"layers.1.mlp.down_proj": 4}},
        {"modules_to_save": ["lm_head"]},
        {"target_modules": ["embed_tokens", "lm_head", "q_proj"]},
    ],
    ids=["rslora", "patterns", "whole modules", "embeddings"],
)
def test_every_plain_lora_merges_as_peft_does(knobs: dict[str, Any], llama: Path, tmp_path: Path) -> None:
    adapter = tiny_adapter(llama, tmp_path / "lora", **knobs)
    source = source_open(None, adapter)
    for name, tensor in merged_by_peft(llama, adapter).items():
        torch.testing.assert_close(source.weights.tensor(name), tensor, rtol=0, atol=1e-5)


@pytest.mark.slow
def test_a_merged_folder_is_checked(llama: Path, llama_lora: Path, tmp_path: Path) -> None:
    result = export_merged(str(llama), llama_lora, tmp_path / "out")
    # float32 in, float32 out: only the order of additions differs
    found = result.checked["agreement"]["policy"]["texts"]
    assert found["kl"] < 1e-8
    assert found["top1_agreement"] == 1.0
    assert found["positions"] > 100
    listed = {file.path.name: file.sha256 for file in result.files}
    assert set(listed) == {path.name for path in (tmp_path / "out").iterdir()}
    assert listed["config.json"] == exported_file(tmp_path / "out" / "config.json").sha256
    assert AutoTokenizer.from_pretrained(tmp_path / "out").chat_template is not None


@pytest.mark.slow
def test_weights_are_as_readable_as_the_rest(llama: Path, tmp_path: Path) -> None:
    export_merged(str(llama), None, tmp_path / "out")
    assert len({file.stat().st_mode for file in (tmp_path / "out").iterdir()}) == 1


@pytest.mark.slow
def test_a_wrong_merge_goes(llama_lora: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Adapter, "scale", lambda self, module, rank: 3.0)
    with pytest.raises(ExportRefused, match="to answer like base \\+ adapter"):
        export_merged(None, llama_lora, tmp_path / "out")
    assert leftovers(tmp_path) == []


@pytest.mark.slow
def test_merging_keeps_the_base_type(tmp_path: Path) -> None:
    base = tiny_model(tmp_path / "base", "qwen3", dtype="bfloat16")
    export_merged(None, tiny_adapter(base, tmp_path / "lora"), tmp_path / "out")
    assert {tensor.dtype for tensor in load_file(tmp_path / "out" / "model.safetensors").values()} == {
        torch.bfloat16
    }


@pytest.mark.slow
def test_shards(llama: Path, llama_lora: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hugging_face, "SHARD_BYTES", 150_000)
    export_merged(None, llama_lora, tmp_path / "out")
    shards = sorted(tmp_path.glob("out/model-*.safetensors"))
    assert len(shards) == 4
    assert all(shard.stat().st_size < 160_000 for shard in shards)
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"]) == set(load_file(llama / "model.safetensors"))
    # and a sharded folder is read again
    again = export_merged(str(tmp_path / "out"), None, tmp_path / "again")
    assert again.checked["agreement"]["policy"]["texts"]["kl"] < 1e-12


@pytest.mark.slow
def test_a_base_without_adapter_is_exported_as_it_is(llama: Path, tmp_path: Path) -> None:
    export_merged(str(llama), None, tmp_path / "out")
    before, after = load_file(llama / "model.safetensors"), load_file(tmp_path / "out" / "model.safetensors")
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())


def test_published_gpt2_names_without_prefix_are_found(tmp_path: Path) -> None:
    base = tiny_model(tmp_path / "base", "gpt2")
    adapter = tiny_adapter(base, tmp_path / "lora")
    expected = merged_by_peft(base, adapter)
    tensors = load_file(base / "model.safetensors")
    save_file(
        {name.removeprefix("transformer."): tensor for name, tensor in tensors.items()},
        base / "model.safetensors",
        metadata={"format": "pt"},
    )
    weights = source_open(None, adapter).weights
    torch.testing.assert_close(
        weights.tensor("h.0.attn.c_attn.weight"),
        expected["transformer.h.0.attn.c_attn.weight"],
        rtol=0,
        atol=1e-5,
    )


@pytest.mark.parametrize(
    ("knobs", "named"),
    [({"use_dora": True}, "use_dora"), ({"lora_bias": True, "target_modules": ["q_proj"]}, "lora_bias")],
)
def test_other_formulas_are_refused_by_name(knobs: dict[str, Any], named: str, tmp_path: Path) -> None:
    base = tiny_model(tmp_path / "base", "llama", attention_bias=True)
    adapter = tiny_adapter(base, tmp_path / "lora", **knobs)
    with pytest.raises(ExportRefused, match=f"plain LoRA.*{named}"):
        export_merged(None, adapter, tmp_path / "out")


def test_an_adapter_on_tied_embeddings_is_refused(tmp_path: Path) -> None:
    base = tiny_model(tmp_path / "base", "llama", tie_word_embeddings=True)
    adapter = tiny_adapter(base, tmp_path / "lora", target_modules=["embed_tokens", "q_proj"])
    with pytest.raises(ExportRefused, match="tied embeddings"):
        source_open(None, adapter)


def test_a_folder_that_is_no_checkpoint_is_refused(tmp_path: Path, llama: Path) -> None:
    (tmp_path / "notes.txt").write_text("not an adapter")
    with pytest.raises(
        ExportRefused, match=r"adapter_config\.json and adapter_model\.safetensors.*notes\.txt"
    ):
        export_lora(str(llama), tmp_path, tmp_path / "out")


def test_a_broken_adapter_is_refused(tmp_path: Path, llama_lora: Path) -> None:
    broken = shutil.copytree(llama_lora, tmp_path / "broken")
    weights = broken / "adapter_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])
    with pytest.raises(ExportRefused, match="no whole safetensors"):
        export_merged(None, broken, tmp_path / "out")


def test_a_base_that_is_nowhere_is_refused(llama_lora: Path, tmp_path: Path) -> None:
    with pytest.raises(ExportRefused, match="found nothing at"):
        export_merged(str(tmp_path / "gone"), llama_lora, tmp_path / "out")


def test_refusals_by_kind_of_weights(tmp_path: Path, llama: Path) -> None:
    # pickled weights are refused
    pickled = shutil.copytree(llama, tmp_path / "pickled")
    (pickled / "model.safetensors").rename(pickled / "pytorch_model.bin")
    with pytest.raises(ExportRefused, match=r"safetensors.*found pytorch_model\.bin"):
        export_merged(str(pickled), None, tmp_path / "out")
    # quantised bases are refused
    small = shutil.copytree(llama, tmp_path / "small")
    config = json.loads((small / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "bitsandbytes", "load_in_4bit": True}
    (small / "config.json").write_text(json.dumps(config))
    with pytest.raises(ExportRefused, match=r"full precision.*quantised with bitsandbytes"):
        export_merged(str(small), None, tmp_path / "out")


def test_an_adapter_of_another_shape_is_refused(llama_lora: Path, tmp_path: Path) -> None:
    wide = tiny_model(tmp_path / "wide", "llama", hidden=128)
    with pytest.raises(ExportRefused):
        export_merged(str(wide), llama_lora, tmp_path / "out")
    assert leftovers(tmp_path / "out") == []


def test_an_adapter_of_another_base_is_refused(llama: Path, llama_lora: Path, tmp_path: Path) -> None:
    adapter = shutil.copytree(llama_lora, tmp_path / "lora")
    facts = {"base_model": str(llama), "base_model_hash": base_hash(str(llama))}
    (adapter / "ratchet.json").write_text(json.dumps(facts))
    assert source_open(None, adapter).base == llama
    other = tiny_model(tmp_path / "other", "llama", seed=1)
    with pytest.raises(ExportRefused, match="base model the adapter was trained on"):
        source_open(str(other), adapter)


def test_an_exported_adapter_answers_as_the_original(llama: Path, llama_lora: Path, tmp_path: Path) -> None:
    assert export_lora(None, llama_lora, tmp_path / "out").checked["hashes_equal"] is True
    ids = torch.tensor([[5, 9, 33, 70]])
    answers = []
    for folder in (llama_lora, tmp_path / "out"):
        base = AutoModelForCausalLM.from_pretrained(llama, dtype=torch.float32)
        with torch.no_grad():
            answers.append(PeftModel.from_pretrained(base, str(folder))(input_ids=ids).logits)
    assert torch.equal(*answers)
    assert f"from_pretrained({str(llama)!r}, " in (tmp_path / "out" / "README.md").read_text()
    assert AutoTokenizer.from_pretrained(tmp_path / "out").eos_token == "<|end|>"


@pytest.mark.slow
def test_an_exported_adapter_carries_our_model_card_without_a_path(tmp_path: Path) -> None:
    from rl.export.hugging_face import export_lora
    from rl.training.policy import adapter_describe, load_policy

    bundled = Path(__file__).resolve().parent.parent / "rl" / "bundled_model"
    adapter = tiny_adapter(bundled, tmp_path / "adapter")
    (adapter / "README.md").write_text(
        f"---\nbase_model: {bundled}\nlibrary_name: peft\n---\n# PEFT's template\n"
    )
    export_lora("bundled", adapter, tmp_path / "plain")
    assert "template" not in (tmp_path / "plain" / "README.md").read_text()
    adapter_describe(load_policy("bundled", None), adapter, agent="support-bot", method="dpo")
    assert json.loads((adapter / "adapter_config.json").read_text())["base_model_name_or_path"] == "bundled"
    assert str(bundled) not in "".join(file.read_text() for file in adapter.glob("*.json"))
    card = (adapter / "README.md").read_text()
    assert "LoRA adapter for agent `support-bot`" in card
    assert str(bundled) not in card
    export_lora("bundled", adapter, tmp_path / "ours")
    assert (
        (tmp_path / "ours" / "README.md")
        .read_text()
        .startswith("---\nlibrary_name: peft\nbase_model: bundled")
    )
