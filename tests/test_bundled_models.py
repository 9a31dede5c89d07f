"""The identity of a base model: an adapter trained on another one is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from rl import bundled_models
from rl.checksums import base_hash
from rl.recipes import Recipe
from rl.training.loading import PolicyLoadError, base_check
from rl.training.policy import adapter_save, load_policy
from tests.support.tiny_models import HARDWARE, tiny_model


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


def test_what_notes_another_hash_is_refused():
    base_check("the reward model r", {"base_model": "b"}, "b", "sha256:1")
    base_check("the reward model r", {"base_model": "b", "base_model_hash": "sha256:1"}, "b", "sha256:1")
    with pytest.raises(PolicyLoadError, match=r"the reward model r was trained on 'b' \(sha256:2.*sha256:1"):
        base_check("the reward model r", {"base_model": "b", "base_model_hash": "sha256:2"}, "b", "sha256:1")


def test_a_refusal_names_the_files_that_changed():
    facts = {
        "base_model": "b",
        "base_model_hash": "sha256:2",
        "base_files": {"a": "1", "chat_template.jinja": "2"},
    }
    with pytest.raises(PolicyLoadError, match=r"\(changed since: chat_template.jinja\)"):
        base_check("the adapter a", facts, "b", "sha256:1", {"a": "1", "chat_template.jinja": "3"})


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
