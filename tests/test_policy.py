"""Loading, answering and saving policies; what is refused, and with which words."""

import dataclasses
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from rl.checksums import base_hash
from rl.recipes import Recipe
from rl.training import loading
from rl.training.loading import PolicyLoadError, adapter_read
from rl.training.policy import Generation, LoadedPolicy, adapter_save, generate, load_policy
from rl.training.scoring import score_responses
from tests.support.tiny_models import HARDWARE, TOKENIZERS, tiny_adapter, tiny_model

ASK = [{"role": "user", "content": "Which widget?"}]


@pytest.fixture(scope="module")
def llama(base: str) -> LoadedPolicy:
    return load_policy(base, hardware=HARDWARE)


def trained(base: str, path: Path) -> LoadedPolicy:
    """A policy whose fresh LoRA has been moved off zero, saved to `path`."""
    policy = load_policy(base, hardware=HARDWARE, trainable=True, recipe=Recipe(lora_r=4))
    with torch.no_grad():
        for name, weight in policy.model.named_parameters():
            if "lora_B" in name:
                weight.normal_(std=0.05, generator=torch.Generator().manual_seed(len(name)))
    adapter_save(policy, path, agent="widgets", method="dpo")
    return policy


@pytest.mark.parametrize("architecture", TOKENIZERS)
def test_every_architecture_loads_quantised_and_answers(tmp_path: Path, architecture: str) -> None:
    folder = tiny_model(tmp_path / architecture, architecture)
    policy = load_policy(str(folder), hardware=HARDWARE, quantization="4bit", trainable=True, recipe=Recipe())
    assert policy.quantization == "4bit"
    assert "the frozen base is loaded in 4 bits (NF4)" in policy.notes
    base = load_policy(str(folder), hardware=HARDWARE)
    linear = {
        name
        for name, m in base.model.named_modules()
        if type(m).__name__ in ("Linear", "Conv1D") and "head" not in name
    }
    adapted = {
        n.split("base_model.model.")[1].split(".lora_A")[0]
        for n, _ in policy.model.named_parameters()
        if "lora_A" in n
    }
    assert adapted == linear
    assert all("lora_" in name for name, weight in policy.model.named_parameters() if weight.requires_grad)
    (answer,) = generate(policy, [ASK], max_new_tokens=4)
    assert 1 <= answer.tokens <= 4
    exact, rounded = (score_responses(p, [(ASK, "table")])[0].logp for p in (base, policy))
    assert rounded != exact
    assert rounded == pytest.approx(exact, rel=0.25)


def test_where_4_bit_is_not_possible_a_notice_says_why_and_the_base_is_loaded_whole(base: str) -> None:
    without = dataclasses.replace(HARDWARE, supports_4bit=False, reasons={"supports_4bit": "no kernels here"})
    policy = load_policy(base, hardware=without, quantization="4bit")
    assert policy.quantization == "none"
    assert "no kernels here" in policy.notes[0]
    assert "float32 instead" in policy.notes[0]


def test_a_failing_4_bit_library_is_not_used(base: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError("no such kernel\nlong trace")

    monkeypatch.setattr(loading, "_try_four_bit", broken)
    policy = load_policy(base, hardware=HARDWARE, quantization="4bit")
    assert policy.quantization == "none"
    assert "no such kernel" in policy.notes[0]


def test_answers_come_in_the_order_asked_and_do_not_depend_on_their_neighbours(llama: LoadedPolicy) -> None:
    prompts = [[{"role": "user", "content": "why " * n}] for n in (12, 1, 30, 5)]
    together = generate(llama, prompts, max_new_tokens=8, batch_size=4)
    alone = [generate(llama, [prompt], max_new_tokens=8)[0] for prompt in prompts]
    assert together == alone
    assert len({answer.text for answer in alone}) > 1


def greedy_tokens(policy: LoadedPolicy, messages: list[dict[str, str]], count: int) -> list[int]:
    """The likeliest token, again and again, from whole forward passes."""
    ((*prompt,),), _ = policy.encoder.prompts([messages], count)
    tokens: list[int] = []
    for _ in range(count):
        with torch.inference_mode():
            tokens.append(int(policy.model(torch.tensor([prompt + tokens])).logits[0, -1].argmax()))
    return tokens


def test_greedy_answers_are_the_most_likely_tokens_one_by_one(llama: LoadedPolicy) -> None:
    (answer,) = generate(llama, [ASK], max_new_tokens=5)
    tokens = greedy_tokens(llama, ASK, answer.tokens)
    assert llama.tokenizer.decode(tokens, skip_special_tokens=True) == answer.text


def test_an_answer_stops_at_the_turn_end(llama: LoadedPolicy, monkeypatch: pytest.MonkeyPatch) -> None:
    tokens = greedy_tokens(llama, ASK, 6)
    monkeypatch.setattr(llama.encoder, "turn_end_id", tokens[2])
    kept = tokens[: tokens.index(tokens[2])]
    assert generate(llama, [ASK], max_new_tokens=6) == [
        Generation(
            llama.tokenizer.decode(kept, skip_special_tokens=True), len(kept) + 1, "stop", unforced=True
        )
    ]


def test_sampling_is_repeatable_by_seed_and_leaves_the_callers_randomness_alone(llama: LoadedPolicy) -> None:
    torch.manual_seed(5)
    expected = torch.rand(1)
    torch.manual_seed(5)
    one = generate(llama, [ASK] * 3, max_new_tokens=8, temperature=1.0, seed=1)
    assert torch.rand(1) == expected
    assert one == generate(llama, [ASK] * 3, max_new_tokens=8, temperature=1.0, seed=1)
    assert one != generate(llama, [ASK] * 3, max_new_tokens=8, temperature=1.0, seed=2)
    assert len({answer.text for answer in one}) > 1


def test_a_saved_adapter_scores_the_same_when_loaded_again(base: str, tmp_path: Path) -> None:
    items = [(ASK, "table"), (ASK, "chart")]
    policy = trained(base, tmp_path / "adapter")
    again = load_policy(base, tmp_path / "adapter", hardware=HARDWARE)
    assert score_responses(again, items) == score_responses(policy, items)
    assert not any(weight.requires_grad for weight in again.model.parameters())


def test_an_adapter_carries_its_tokenizer_and_where_it_comes_from(base: str, tmp_path: Path) -> None:
    trained(base, tmp_path / "adapter")
    facts = adapter_read(tmp_path / "adapter")
    assert facts["base_model"] == base
    assert facts["base_model_hash"] == base_hash(base)
    assert (facts["agent"], facts["method"]) == ("widgets", "dpo")
    assert (tmp_path / "adapter" / "tokenizer.json").is_file()
    assert "<|assistant|>" in (tmp_path / "adapter" / "chat_template.jinja").read_text()


def test_an_adapter_is_refused_on_another_base(base: str, tmp_path: Path) -> None:
    trained(base, tmp_path / "adapter")
    other = tiny_model(tmp_path / "other", "llama", seed=1)
    with pytest.raises(PolicyLoadError, match=r"was trained on .* it only works with its own base model"):
        load_policy(str(other), tmp_path / "adapter", hardware=HARDWARE)


def test_an_adapter_made_elsewhere_is_used_with_a_note(base: str, tmp_path: Path) -> None:
    policy = load_policy(base, tiny_adapter(Path(base), tmp_path / "theirs"), hardware=HARDWARE)
    assert "could not be checked" in policy.notes[-1]


def test_an_adapter_of_another_shape_is_refused(base: str, tmp_path: Path) -> None:
    wide = tiny_model(tmp_path / "wide", "llama", hidden=128)
    with pytest.raises(PolicyLoadError, match="does not fit"):
        load_policy(base, tiny_adapter(wide, tmp_path / "theirs"), hardware=HARDWARE)


def test_saving_an_adapter_replaces_the_old_one_whole(base: str, tmp_path: Path) -> None:
    (tmp_path / "adapter").mkdir()
    (tmp_path / "adapter" / "stale.txt").write_text("old")
    trained(base, tmp_path / "adapter")
    assert not (tmp_path / "adapter" / "stale.txt").exists()
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


def test_the_base_hash_changes_with_one_weight(base: str, tmp_path: Path) -> None:
    folder = shutil.copytree(base, tmp_path / "copy")
    assert base_hash(str(folder)) == base_hash(base)
    weights = load_file(folder / "model.safetensors")
    next(iter(weights.values())).view(-1)[0] += 1
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    assert base_hash(str(folder)) != base_hash(base)


def nothing(path: Path) -> None:
    path.mkdir()


def no_weights(path: Path) -> None:
    path.mkdir()
    (path / "config.json").write_text("{}")


def a_pickle(path: Path) -> None:
    no_weights(path)
    (path / "pytorch_model.bin").write_bytes(b"\x80")


def an_adapter(path: Path) -> None:
    path.mkdir()
    (path / "adapter_config.json").write_text("{}")


def a_cut_file(path: Path) -> None:
    tiny_model(path, "llama")
    whole = (path / "model.safetensors").read_bytes()
    (path / "model.safetensors").write_bytes(whole[: len(whole) // 2])


def an_unknown_kind(path: Path) -> None:
    tiny_model(path, "llama")
    (path / "config.json").write_text(json.dumps({"model_type": "martian"}))


def own_code(path: Path) -> None:
    tiny_model(path, "llama")
    config = {"model_type": "martian", "auto_map": {"AutoConfig": "code.Config"}}
    (path / "config.json").write_text(json.dumps(config))


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (nothing, r"is no model: expected config.json and \*.safetensors, found nothing"),
        (no_weights, r"is no model: expected config.json and \*.safetensors, found config.json"),
        (a_pickle, r"pickles .*pytorch_model.bin.* can run code when read"),
        (an_adapter, "is an adapter, not a base model"),
        (a_cut_file, r"model.safetensors is no whole safetensors file"),
        (an_unknown_kind, "not understood"),
        (own_code, "which is never done"),
    ],
)
def test_no_usable_model_is_refused(tmp_path: Path, make: Callable[[Path], None], says: str) -> None:
    make(tmp_path / "model")
    with pytest.raises(PolicyLoadError, match=says):
        load_policy(str(tmp_path / "model"), hardware=HARDWARE)


def test_an_unknown_name_without_network_says_what_to_try() -> None:
    with pytest.raises(PolicyLoadError, match=r"nobody/nothing.*Check the name and the network"):
        load_policy("nobody/nothing", hardware=HARDWARE)


@pytest.mark.parametrize(
    ("files", "says"),
    [
        ({}, r"is no adapter: expected adapter_config.json and adapter_model.safetensors, found nothing"),
        ({"adapter_config.json": "{}", "adapter_model.bin": "x"}, "pickle"),
        ({"adapter_config.json": "{}", "adapter_model.safetensors": "x"}, "no whole safetensors file"),
    ],
)
def test_a_bad_adapter_is_refused_first(tmp_path: Path, files: dict[str, str], says: str) -> None:
    (tmp_path / "adapter").mkdir()
    for name, content in files.items():
        (tmp_path / "adapter" / name).write_text(content)
    with pytest.raises(PolicyLoadError, match=says):
        load_policy("no-such-base", tmp_path / "adapter", hardware=HARDWARE)


def test_broken_facts_beside_an_adapter_are_refused(base: str, tmp_path: Path) -> None:
    tiny_adapter(Path(base), tmp_path / "adapter")
    (tmp_path / "adapter" / "ratchet.json").write_text("{")
    with pytest.raises(PolicyLoadError, match="not readable JSON"):
        load_policy(base, tmp_path / "adapter", hardware=HARDWARE)
