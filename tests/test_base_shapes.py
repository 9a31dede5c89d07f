"""Base models of every shape that users bring: sharded, tied, padded, without template, pad or end token."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer

from rl.base_models.dequantise import gguf_to_folder
from rl.checksums import base_files
from rl.export.gguf import export_gguf
from rl.recipes import Recipe
from rl.training.loading import PolicyLoadError
from rl.training.policy import LoadedPolicy, generate, load_policy, lora_config
from tests.support.tiny_models import HARDWARE, tiny_model

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


SHAPES = {
    "sharded": sharded, "tied": tied, "padded": padded, "no template": without_template, "no pad": without_pad,
}  # fmt: skip


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


def test_a_shard_that_is_missing_is_named(tmp_path: Path) -> None:
    folder = sharded(tmp_path)
    gone = sorted(folder.glob("*.safetensors"))[1]
    gone.unlink()
    with pytest.raises(PolicyLoadError, match=re.escape(gone.name)):
        load_policy(str(folder))


def test_a_tokenizer_larger_than_the_embeddings_is_refused(tmp_path: Path) -> None:
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
