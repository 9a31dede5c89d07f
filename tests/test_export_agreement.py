"""Exported files: agreement with their original, the keys that identify them, and their tokenizer."""

import dataclasses
import json
import math
import random
import re
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import llama_cpp
import numpy as np
import pytest
from tokenizers import Regex, Tokenizer, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from rl.agents.base import Agent
from rl.base_models.dequantise import gguf_to_folder
from rl.base_models.sources import AddedModel, model_add
from rl.evaluation.service import EvaluationOrder, evaluate
from rl.evaluation.sides import quantised_answerer
from rl.export import gguf_names, reference
from rl.export.agreement import (
    Closeness,
    Expected,
    ExportAgreement,
    FloatArray,
    Measured,
    measured,
    references_shared,
)
from rl.export.artifact import ExportRefused
from rl.export.gguf import export_gguf, identity_of
from rl.export.gguf_lora import export_gguf_lora
from rl.export.gguf_runtime import llama_opened
from rl.export.gguf_tokenizer import vocabulary_of
from rl.export.source import Source, original_of, source_open
from rl.training.held_out import HeldOutPrompt
from rl.training.policy import load_policy
from rl.training.sides import generate_answers
from tests.support.tiny_models import tiny_adapter, tiny_model, tiny_tokenizer
from tests.test_gguf import field, one_core  # noqa: F401


def test_the_figures_are_those_computed_by_hand() -> None:
    original = np.log(np.array([[0.5, 0.25, 0.25], [0.1, 0.8, 0.1]], np.float32))
    exported = np.log(np.array([[0.25, 0.5, 0.25], [0.1, 0.8, 0.1]], np.float32))

    def asked(ids: Sequence[int], positions: int) -> FloatArray:
        return exported[-positions:] if ids == [1, 2] else original[-positions:]

    found = measured(
        [
            Expected([1, 2], [0, 1], original),
            # the likeliest token is compared at both positions, the distribution at the last one
            Expected([1, 2], [0, 1], original[1:], held_out=True),
            Expected([3, 4], [0, 1], original[1:], held_out=True),
        ],
        asked,
    )
    # KL = 0.5 ln 2 - 0.25 ln 2 at the first position, 0 at the second
    assert found.texts.kl == pytest.approx(0.25 * math.log(2) / 2, rel=1e-5)
    assert (found.texts.positions, found.texts.top1_agreement, found.texts.same_answers) == (2, 0.5, None)
    assert found.held_out.kl == pytest.approx(0, abs=1e-6)
    assert (found.held_out.top1_agreement, found.held_out.same_answers) == (0.75, 1)


@pytest.mark.parametrize(("busy", "cores"), [(0.0, 4), (50.0, 2), (100.0, 1)])
def test_a_comparison_takes_idle_cores(monkeypatch: pytest.MonkeyPatch, busy: float, cores: int) -> None:
    monkeypatch.setattr(reference, "cores_available", lambda: 4)
    monkeypatch.setattr(reference.psutil, "cpu_count", lambda: 4)
    monkeypatch.setattr(reference.psutil, "cpu_percent", lambda seconds: busy)
    # a training that just ended is in the load average, and occupies no core
    monkeypatch.setattr(reference.os, "getloadavg", lambda: (4.0, 4.0, 4.0))
    assert reference.cores_for(1024**3) == cores
    assert reference.cores_for(1024**2) == 1


@pytest.mark.parametrize(
    ("kl", "top1", "same", "verdict"),
    [
        (0.004, 0.99, 4, "same"),
        (0.004, 0.99, 3, "close"),
        (0.004, 0.95, 4, "close"),
        (0.05, 0.99, 4, "close"),
        (0.2, 0.99, 4, "changed"),
        (0.01, 0.5, 4, "changed"),
    ],
)
def test_held_out_answers_lead_the_verdict(kl: float, top1: float, same: int, verdict: str) -> None:
    off = Closeness(prompts=10, positions=100, kl=2.0, top1_agreement=0.4)
    of = Closeness(prompts=4, positions=40, kl=kl, top1_agreement=top1, same_answers=same)
    found = ExportAgreement(policy=Measured(texts=off, held_out=of))
    assert (found.verdict, found.as_dict()["verdict"]) == (verdict, verdict)
    assert ExportAgreement.model_validate(found.as_dict()) == found
    assert ExportAgreement(policy=Measured(texts=off)).verdict == "changed"
    alone = [off.model_copy(update={"kl": kl, "top1_agreement": share}) for share in (0.96, 0.94)]
    expected = "same" if kl <= 0.01 else "close" if kl <= 0.1 else "changed"
    assert ExportAgreement(policy=Measured(texts=alone[0])).verdict == expected
    assert ExportAgreement(policy=Measured(texts=alone[1])).verdict == expected.replace("same", "close")


@pytest.fixture(scope="module")
def added(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A base de-quantised from a q8_0 file, with its source.json."""
    home = tmp_path_factory.mktemp("models")
    export_gguf(str(tiny_model(home / "random", "llama")), None, home / "tiny.gguf", quantization="q8_0")
    return home / model_add(str(home / "tiny.gguf"), home, gguf_to_folder).name


@pytest.fixture(scope="module")
def adapter(added: Path) -> Path:
    return tiny_adapter(added, added.parent / "lora")


ASK = [
    [{"role": "user", "content": text}]
    for text in ("Where is my lamp?", "I was billed twice.", "It does not start.")
]


@pytest.mark.slow
def test_an_adapter_fits_the_quantised_file(added: Path, adapter: Path, tmp_path: Path) -> None:
    result = export_gguf_lora(str(added), adapter, tmp_path / "out", prompts=ASK)
    file, original = result.files[0].path, added.parent / "tiny.gguf"
    found = ExportAgreement.model_validate(result.checked["agreement"])
    assert found.policy.held_out.prompts == 3
    assert found.policy.texts.kl < 0.05
    # what the adapter changes is far more than what rounding does
    assert found.base.texts.kl < 0.05
    assert result.checked["base_file"]["path"] == str(original)
    assert (
        f"FROM {original.resolve()}\nADAPTER ./{file.name}\n" in (tmp_path / "out" / "Modelfile").read_text()
    )
    readme = (tmp_path / "out" / "README.md").read_text()
    assert f"llama-server -m {original} --lora {file.name}" in readme
    assert AddedModel.load(added).gguf_sha256 in readme
    manifest = json.loads((tmp_path / "out" / "export.json").read_text())
    assert {row["path"] for row in manifest["files"]} == {"Modelfile", "README.md", file.name}
    llama = llama_cpp.Llama(str(original), lora_path=str(file), n_ctx=64, verbose=False)
    assert llama("Where is my lamp?", max_tokens=2)["choices"][0]["finish_reason"] in ("stop", "length")
    llama.close()


@pytest.mark.slow
def test_exports_of_one_policy_ask_its_original_once_where_they_share_what_it_said(
    added: Path, adapter: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = []
    original = reference.original_model
    monkeypatch.setattr(
        reference, "original_model", lambda source: opened.append(source.name) or original(source)
    )
    with references_shared():
        export_gguf_lora(str(added), adapter, tmp_path / "lora", prompts=ASK)
        first = export_gguf(str(added), adapter, tmp_path, quantization="q8_0", prompts=ASK)
        assert len(opened) == 1
        export_gguf(str(added), adapter, tmp_path, quantization="q8_0", prompts=ASK[:1])
        assert len(opened) == 2
    again = export_gguf(str(added), adapter, tmp_path, quantization="q8_0", prompts=ASK)
    assert len(opened) == 3
    assert again.checked["agreement"] == first.checked["agreement"]


@pytest.mark.slow
@pytest.mark.django_db
def test_a_policy_answers_on_the_quantised_file_as_in_full_precision(added: Path, adapter: Path) -> None:
    agent = Agent(slug="talker", title="", description="", max_new_tokens=8)
    prompts = [HeldOutPrompt(list(turns), {}) for turns in ASK]
    own = generate_answers(load_policy(str(added), adapter), [one.messages for one in prompts], agent)
    with quantised_answerer(str(added), adapter, agent) as (answer, file):
        found = [answer(prompt) for prompt in prompts]
    assert file == added.parent / "tiny.gguf"
    # random weights are unsure of every token: most answers begin alike
    assert sum(a.text[:1] == b.text[:1] for a, b in zip(own, found, strict=True)) >= 2
    assert all(answer.finish_reason in ("stop", "length") for answer in found)


@pytest.mark.slow
@pytest.mark.django_db
def test_quantised_evaluation(added: Path, adapter: Path, tmp_path: Path, settings: Any) -> None:
    settings.RATCHET_HOME = tmp_path
    rows = [{"prompt": turns, "chosen": "yes", "rejected": "no"} for turns in ASK]
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    order = EvaluationOrder(
        checkpoint=adapter, agent="talker", base_model=str(added), test_data=tmp_path / "pairs.jsonl"
    )
    found = evaluate(replace(order, quantization="gguf"))["quantised"]
    assert found["base_file"] == str(added.parent / "tiny.gguf")
    assert (found["same_answers"]["n"], found["valid_rate"]["value"]) == (3, 1.0)
    assert "quantised" not in evaluate(order)


@pytest.mark.slow
def test_wrong_order(added: Path, adapter: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gguf_names, "permute_rows", lambda tensor, heads: tensor.flip(0))
    with pytest.raises(ExportRefused, match=r"the adapter on tiny\.gguf to answer like the trained policy"):
        export_gguf_lora(str(added), adapter, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_another_file_than_the_recorded_one_is_not_taken_for_it(added: Path, tmp_path: Path) -> None:
    facts = json.loads((added / "source.json").read_text())
    (tmp_path / "source.json").write_text(json.dumps({**facts, "gguf_sha256": "0" * 64}))
    original, note = original_of(tmp_path)
    assert original is None
    assert "the adapter does not fit it" in note
    (tmp_path / "source.json").write_text(json.dumps({**facts, "gguf": "/nowhere.gguf"}))
    expected = (None, "/nowhere.gguf, which the base model was made from, is not there any more")
    assert original_of(tmp_path) == expected
    ollama = {**facts, "kind": "ollama", "source": "ollama:tiny:1b"}
    (tmp_path / "source.json").write_text(json.dumps(ollama))
    original, note = original_of(tmp_path)
    assert (original.ollama_name, note) == ("tiny:1b", "")


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
def test_a_file_name_splits_into_its_parts(adapted: Source, base: str, parts: tuple[str, ...]) -> None:
    identity = identity_of(dataclasses.replace(adapted, base_name=base))
    found = SPECIFICATION.match(identity.file_name("q4_k_m"))
    assert found.group("base", "size", "finetune", "version", "encoding", "type") == (*parts, "Q4_K_M", None)
    adapter = SPECIFICATION.match(identity.file_name("f32", adapter=True))
    assert adapter.group("finetune", "encoding", "type") == (parts[2], "F32", "LoRA")


def test_a_policys_own_name_says_what_it_was_trained_for(adapted: Source) -> None:
    identity = identity_of(adapted, "mail_room-v30")
    assert (identity.finetune, identity.version) == ("mail-room", "v30")
    assert identity_of(adapted, "my model").version == "v1.0"


@pytest.mark.campaign
def test_a_file_names_its_base_model_and_its_size(adapted: Source, tmp_path: Path) -> None:
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


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("llama") / "base", "llama")


ALPHABETS = [
    "abcdefgh ",
    "ABCdef 'stREve",
    "0123456789 ,.",
    " \n\t\r",
    "äöüßñ ",
    "привет мир ",
    "今日はの東京 ",
    "👍🏽🚀 ",
    "!?/\\-_=+{}[]\"' ",
    "كم عدد ",
]


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
    assert vocabulary_of(tiny_tokenizer("sentencepiece"), 443).notes == []
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
    assert result.checked["tokens_equal"] is True
    assert field(tmp_path / "out.gguf", "general.name") == "support (phi-3)"


def test_a_name_like_phi3_does_not_break_another_tokenizer(llama: Path, tmp_path: Path) -> None:
    export_gguf(str(llama), None, tmp_path / "out.gguf", quantization="f16", model_name="like-phi-3-v2")
    assert field(tmp_path / "out.gguf", "general.name") == "like-phi 3-v2"
