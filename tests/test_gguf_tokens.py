"""Tokenizers in GGUF: any text becomes the same tokens in llama.cpp as in the original, or is noted or refused."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path
from typing import Any

import gguf
import pytest
from tokenizers import Regex, Tokenizer, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from rl.export.artifact import ExportRefused
from rl.export.gguf import export_gguf
from rl.export.gguf_runtime import llama_opened
from rl.export.gguf_tokenizer import vocabulary_of
from tests.support.tiny_models import tiny_model, tiny_tokenizer
from tests.test_gguf import field, one_core  # noqa: F401


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("llama") / "base", "llama")


ALPHABETS = [
    "abcdefgh ", "ABCdef 'stREve", "0123456789 ,.", " \n\t\r", "äöüßñ ", "привет мир ", "今日はの東京 ",
    "👍🏽🚀 ", "!?/\\-_=+{}[]\"' ", "كم عدد ",
]  # fmt: skip


def texts(seed: int, count: int) -> list[str]:
    chance = random.Random(seed)
    made = []
    for number in range(count):
        alphabet = chance.choice(ALPHABETS) if number % 2 else "".join(ALPHABETS)
        text = "".join(chance.choice(alphabet) for _ in range(chance.randint(1, 30)))
        made.append(f"<|user|>{text}<|end|>" if number % 3 == 0 else text)
    return made


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "pre"),
    [
        ("gpt2", "gpt-2"),
        ("llama3", "smaug-bpe"),
        ("qwen2", "qwen2"),
        ("smollm", "smollm"),
        ("sentencepiece", "default"),
        ("gemma", "default"),
    ],
)
def test_any_text_becomes_the_same_tokens(kind: str, pre: str, tmp_path: Path) -> None:
    base = tiny_model(tmp_path / "base", "llama", tokenizer=kind)
    export_gguf(str(base), None, tmp_path / "out.gguf", quantization="f16")
    assert field(tmp_path / "out.gguf", "tokenizer.ggml.pre") == pre
    tokenizer = AutoTokenizer.from_pretrained(base)
    with llama_opened(tmp_path / "out.gguf", 64) as opened:
        for text in texts(seed=1, count=400):
            expected = tokenizer(text, add_special_tokens=False)["input_ids"]
            assert opened.tokenize(text.encode(), add_bos=False, special=True) == expected, text


@pytest.mark.parametrize(("kind", "pre"), [("tekken", "tekken"), ("gpt4o", "gpt-4o")])
def test_a_nearly_equal_pre_tokenizer_comes_with_a_note(kind: str, pre: str) -> None:
    vocabulary = vocabulary_of(tiny_tokenizer(kind), 420)
    assert vocabulary.pre == pre
    assert "capitals of the Latin alphabet only" in vocabulary.notes[0]


def test_llama3_words_taken_whole_are_llama_bpe() -> None:
    tokenizer = rebuilt(tiny_tokenizer("llama3"), lambda facts: facts["model"].update(ignore_merges=True))
    assert vocabulary_of(tokenizer, 420).pre == "llama-bpe"


def rebuilt(tokenizer: PreTrainedTokenizerFast, change: Any, **special: str) -> PreTrainedTokenizerFast:
    """The tokenizer with its tokenizer.json changed."""
    facts = json.loads(tokenizer.backend_tokenizer.to_str())
    change(facts)
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(json.dumps(facts)), eos_token=tokenizer.eos_token, **special
    )


def test_an_unknown_pre_tokenizer_is_refused_naming_it(llama: Path, tmp_path: Path) -> None:
    tokenizer = tiny_tokenizer("gpt2")
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(r"[aeiou]+"), "isolated"), pre_tokenizers.ByteLevel(use_regex=False)]
    )
    odd = shutil.copytree(llama, tmp_path / "odd")
    tokenizer.save_pretrained(odd)
    with pytest.raises(ExportRefused, match=r"pre-tokenizer llama\.cpp knows \(.*qwen2.*found .*\[aeiou\]\+"):
        export_gguf(str(odd), None, tmp_path / "out.gguf")
    assert not (tmp_path / "out.gguf").exists()


def test_sentencepiece_scores_follow_the_order_of_merges() -> None:
    vocabulary = vocabulary_of(tiny_tokenizer("sentencepiece"), 443)
    merges = json.loads(tiny_tokenizer("sentencepiece").backend_tokenizer.to_str())["model"]["merges"]
    first, last = ("".join(merges[0]), "".join(merges[-1]))
    score = dict(zip(vocabulary.tokens, vocabulary.scores, strict=True))
    assert score[first] == 0.0
    assert score[last] < score[first]
    assert vocabulary.types[vocabulary.tokens.index("<0x41>")] == gguf.TokenType.BYTE
    assert vocabulary.types[vocabulary.tokens.index("<unk>")] == gguf.TokenType.UNKNOWN
    assert vocabulary.types[vocabulary.tokens.index("<|user|>")] == gguf.TokenType.CONTROL


def test_merges_sentencepiece_would_not_have_are_noted() -> None:
    def drop(facts: dict[str, Any]) -> None:
        facts["model"]["merges"] = [
            pair for pair in facts["model"]["merges"] if pair != facts["model"]["merges"][-1]
        ]

    vocabulary = vocabulary_of(rebuilt(tiny_tokenizer("sentencepiece"), drop), 443)
    whole = vocabulary_of(tiny_tokenizer("sentencepiece"), 443)
    assert whole.notes == []
    assert any("pairs the original does not merge" in note for note in vocabulary.notes)


def test_embedding_rows_without_a_token_are_unused() -> None:
    vocabulary = vocabulary_of(tiny_tokenizer("gpt2"), 448)
    assert vocabulary.tokens[420:422] == ["[PAD420]", "[PAD421]"]
    assert set(vocabulary.types[420:]) == {gguf.TokenType.UNUSED}
    with pytest.raises(ExportRefused, match="at most 400 tokens"):
        vocabulary_of(tiny_tokenizer("gpt2"), 400)


def test_white_space_after_special_tokens_is_dropped_as_phi3_does(tmp_path: Path) -> None:
    """Phi-3's special tokens strip what follows; llama.cpp does so by the model's name, and knows these names."""

    def like_phi3(facts: dict[str, Any]) -> None:
        names = {"<|pad|>": "</s>", "<s>": "<s>", "<|system|>": "<|endoftext|>"}
        for token in facts["added_tokens"]:
            token["rstrip"] = token["content"] not in ("<unk>", "<s>", "<|system|>")
        text = json.dumps(facts)
        for old, new in names.items():
            text = text.replace(old, new)
        facts.update(json.loads(text))

    base = tiny_model(tmp_path / "base", "phi3")
    tokenizer = rebuilt(
        tiny_tokenizer("sentencepiece"), like_phi3, pad_token="</s>", bos_token="<s>", unk_token="<unk>"
    )
    tokenizer.chat_template = (
        "{% for m in messages %}<|user|>\n{{ m.content }}<|end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
    )
    tokenizer.save_pretrained(base)
    result = export_gguf(str(base), None, tmp_path / "out.gguf", quantization="f16", model_name="support")
    assert result.equality["tokens_equal"] is True
    assert field(tmp_path / "out.gguf", "general.name") == "support (phi-3)"


def test_a_name_like_phi3_does_not_break_another_tokenizer(llama: Path, tmp_path: Path) -> None:
    export_gguf(str(llama), None, tmp_path / "out.gguf", quantization="f16", model_name="like-phi-3-v2")
    assert field(tmp_path / "out.gguf", "general.name") == "like-phi 3-v2"
