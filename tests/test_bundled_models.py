"""A bundled base that is made anew: what was trained on a former one stays on that, or is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rl import bundled_models
from rl.bundled_models import BUNDLED_ALTERNATIVES, BUNDLED_MODEL, base_named, resolve_base_model
from rl.checksums import base_hash
from rl.recipes import Recipe
from rl.training.hardware import Hardware
from rl.training.model_files import PolicyLoadError, base_check, base_of
from rl.training.policy import adapter_save, load_policy
from tests.support.tiny_models import tiny_model

HARDWARE = Hardware("cpu", "a test", 1.0, 1.0, 1, "a test", "float32", "highest", True, "cpu")


def test_only_the_bundled_base_is_named_by_its_hash():
    assert base_named("bundled", "sha256:0123456789abcdef99") == "bundled@0123456789abcdef"
    assert base_named("bundled", "") == "bundled"
    assert base_named("Qwen/Qwen3-0.6B", "commit:12") == "Qwen/Qwen3-0.6B"


def test_every_bundled_model_that_was_ever_shipped_is_found_by_its_hash():
    for folder in BUNDLED_ALTERNATIVES.glob("*"):
        assert base_hash(str(folder)).removeprefix("sha256:").startswith(folder.name)
        assert resolve_base_model(f"bundled@{folder.name}") == str(folder)
    assert resolve_base_model(base_named("bundled", base_hash(str(BUNDLED_MODEL)))) == str(BUNDLED_MODEL)
    assert resolve_base_model("bundled@0000000000000000") == resolve_base_model("bundled")


@pytest.fixture
def made_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Path]:
    """An adapter on the bundled base, which was then made anew, and the folder of former ones, still empty."""
    first, second = tiny_model(tmp_path / "first", "llama"), tiny_model(tmp_path / "second", "llama", seed=1)
    monkeypatch.setattr(bundled_models, "BUNDLED_MODEL", first)
    monkeypatch.setattr(bundled_models, "BUNDLED_ALTERNATIVES", tmp_path / "former")
    policy = load_policy("bundled", hardware=HARDWARE, trainable=True, recipe=Recipe(lora_r=4))
    adapter_save(policy, tmp_path / "adapter", agent="widgets", method="dpo")
    monkeypatch.setattr(bundled_models, "BUNDLED_MODEL", second)
    return tmp_path / "adapter", tmp_path / "former"


def test_an_adapter_is_never_put_on_the_base_made_anew(made_anew):
    adapter, _ = made_anew
    with pytest.raises(PolicyLoadError, match=r"was trained on 'bundled' .* or train it again"):
        load_policy("bundled", adapter, hardware=HARDWARE)


def test_an_adapter_stays_on_the_former_base_it_was_trained_on(made_anew, tmp_path):
    adapter, former = made_anew
    wanted = json.loads((adapter / "ratchet.json").read_text())["base_model_hash"]
    former.mkdir()
    (tmp_path / "first").rename(former / wanted.removeprefix("sha256:")[:16])
    policy = load_policy("bundled", adapter, hardware=HARDWARE)
    assert policy.base_model_hash == wanted
    assert policy.base_model == "bundled"
    # an export starts from the same weights
    from rl.export.source import source_open

    assert source_open(None, adapter).base == former / wanted.removeprefix("sha256:")[:16]
    assert source_open("bundled", None).base == tmp_path / "second"


def test_reward_and_label_models_name_the_bundled_base_by_its_hash():
    facts = {"base_model": "bundled", "base_model_hash": "sha256:" + "ab" * 32}
    assert base_of(facts) == "bundled@" + "ab" * 8
    assert base_of({"base_model": "some/model"}) == "some/model"


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
