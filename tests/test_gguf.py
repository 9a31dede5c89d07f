"""GGUF exports say in llama.cpp what the original says in transformers, or are refused and leave nothing."""

import random
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer

from rl.agents import AGENTS, get_agent
from rl.export import gguf as gguf_export
from rl.export import gguf_names
from rl.export.agreement import ExportAgreement
from rl.export.artifact import ExportRefused
from rl.export.gguf import QUANTIZATIONS, export_gguf
from rl.export.gguf_lora import export_gguf_lora
from rl.export.gguf_names import FAMILIES
from rl.export.gguf_runtime import llama_opened
from rl.export.gguf_tokenizer import chat_template_of
from rl.serving.base import Ask
from rl.serving.llama import LlamaPolicy
from tests.support.export_models import llama as llama
from tests.support.export_models import llama_lora as llama_lora
from tests.support.export_models import one_core as one_core
from tests.support.tiny_models import tiny_adapter, tiny_model

SIX_BITS = {"q6_k", "q8_0", "f16", "bf16", "f32"}


def field(path: Path, key: str) -> Any:
    found = gguf.GGUFReader(path).get_field(key)
    return None if found is None else found.contents()


def texts_of(checked: dict[str, Any]) -> dict[str, Any]:
    """Agreement of a policy with the original on the check texts."""
    found: dict[str, Any] = checked["agreement"]["policy"]["texts"]
    return found


def leftovers(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.rglob("*") if path.name != "home")


@pytest.mark.slow
@pytest.mark.parametrize("architecture", sorted(FAMILIES))
def test_a_family_answers_in_llama_cpp_as_in_transformers(architecture: str, tmp_path: Path) -> None:
    adapter = tiny_adapter(tiny_model(tmp_path / "base", architecture), tmp_path / "lora")
    result = export_gguf(None, adapter, tmp_path / "out.gguf", quantization="f16")
    found = texts_of(result.checked)
    assert found["kl"] <= 0.0005
    assert found["top1_agreement"] >= 0.98
    assert result.checked["tokens_equal"] is True
    assert (result.checked["prompts"], found["prompts"]) == (10, 10)
    assert found["positions"] > 400
    assert result.files[0].path == tmp_path / "out.gguf"
    assert field(tmp_path / "out.gguf", "general.architecture") == FAMILIES[architecture].name


ROPE = {
    "llama3": (
        "llama",
        {
            "rope_type": "llama3",
            "rope_theta": 500.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    ),
    "linear": ("mistral", {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}),
    "yarn": (
        "qwen2",
        {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 512},
    ),
    "longrope": (
        "phi3",
        {
            "rope_type": "longrope",
            "rope_theta": 10000.0,
            "long_factor": [1.0, 2, 3, 4, 5, 6, 7, 8],
            "short_factor": [1.0, 1.1, 1.2, 1.3, 1.4, 1.5, 1.6, 1.7],
            "original_max_position_embeddings": 512,
        },
    ),
    "partial": ("phi3", {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}),
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", sorted(ROPE))
def test_scaled_positions_survive(kind: str, tmp_path: Path) -> None:
    architecture, rope = ROPE[kind]
    base = tiny_model(tmp_path / "base", architecture, rope_parameters=rope)
    checked = export_gguf(str(base), None, tmp_path / "out.gguf", quantization="f32").checked
    assert texts_of(checked)["kl"] <= 0.0001


@pytest.mark.slow
@pytest.mark.parametrize(
    ("architecture", "knobs"),
    [
        ("llama", {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True}),
        ("llama", {"head_dim": 32}),
        ("qwen3", {"dtype": "bfloat16", "tie_word_embeddings": True}),
        ("mistral", {"num_key_value_heads": 1, "tokenizer": "tekken"}),
        # the sixth layer reads beyond the window, with positions of its own
        ("gemma3_text", {"layers": 6}),
    ],
    ids=["tied with biases", "wide heads", "bfloat16", "one key head", "windowed layers"],
)
def test_variants_of_a_family_survive(architecture: str, knobs: dict[str, Any], tmp_path: Path) -> None:
    base = tiny_model(tmp_path / "base", architecture, **knobs)
    adapter = tiny_adapter(base, tmp_path / "lora", use_rslora=True)
    checked = export_gguf(None, adapter, tmp_path / "out.gguf", quantization="f16").checked
    assert texts_of(checked)["kl"] <= 0.0001


@pytest.mark.parametrize(("architecture", "broken"), [("llama", "permute_rows"), ("gemma", "norm_shift")])
def test_wrong_file(architecture: str, broken: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    base = tiny_model(tmp_path / "base", architecture)
    if broken == "permute_rows":
        monkeypatch.setattr(gguf_names, "permute_rows", lambda tensor, heads: tensor)
    else:
        object.__setattr__(FAMILIES["gemma"], "norm_shift", 0.0)
    try:
        with pytest.raises(
            ExportRefused, match=r"to answer like the original .* at most 0\.002 .*, found \d"
        ):
            export_gguf(str(base), None, tmp_path / "out" / "a.gguf", quantization="q8_0")
    finally:
        object.__setattr__(FAMILIES["gemma"], "norm_shift", 1.0)
    assert not (tmp_path / "out").exists()


def agent_prompts(**counts: int) -> list[list[dict[str, str]]]:
    """Prompts of the built-in agents, so many of each, always the same ones."""
    return [
        get_agent(slug).render(scenario.state)
        for slug, count in counts.items()
        for scenario in random.Random(0).sample(get_agent(slug).scenarios(), count)
    ]


@pytest.mark.campaign
def test_every_quantisation_of_the_bundled_model_opens_and_is_measured(tmp_path: Path) -> None:
    asked = agent_prompts(widgets=2, fixtures=1, filer=1)
    sizes, worst = {}, {}
    for quantization in QUANTIZATIONS:
        result = export_gguf("bundled", None, tmp_path, quantization=quantization, prompts=asked)
        assert result.files[0].path == tmp_path / f"Ratchet-bundled-3.0M-v1.0-{quantization.upper()}.gguf"
        assert result.notes == []  # every row of the bundled model is a multiple of 256 wide
        sizes[quantization] = result.files[0].bytes
        worst[quantization] = texts_of(result.checked)["kl"]
        if quantization not in ("f32", "f16", "bf16"):
            assert result.checked["before_quantization"]["kl"] <= 0.0005
    assert len(QUANTIZATIONS) == 14
    bits = ["f32", "f16", "q8_0", "q6_k", "q5_k_m", "q4_k_m", "q3_k_m", "q2_k"]
    assert [sizes[name] for name in bits] == sorted((sizes[name] for name in bits), reverse=True)
    assert [worst[name] for name in bits[1:]] == sorted(worst[name] for name in bits[1:])
    # most of it at tokens of prompts, which the model never learnt to predict
    assert all(worst[name] < 0.05 for name in SIX_BITS)
    assert leftovers(tmp_path) == sorted(
        f"Ratchet-bundled-3.0M-v1.0-{name.upper()}.gguf" for name in QUANTIZATIONS
    )


@pytest.mark.campaign
def test_the_bundled_model_answers_its_agents_as_before(tmp_path: Path) -> None:
    prompts = agent_prompts(widgets=14, fixtures=13, filer=13)
    checked = export_gguf("bundled", None, tmp_path / "q8.gguf", quantization="q8_0", prompts=prompts).checked
    found = ExportAgreement.model_validate(checked["agreement"])
    assert found.policy.held_out.prompts == 40
    assert (found.policy.held_out.same_answers or 0) >= 38
    assert found.verdict == "same"
    assert found.base is None, "there is no adapter, so that the base is what was exported"


@pytest.mark.slow
@pytest.mark.parametrize("quantization", ["q6_k", "q4_k_m"])
def test_the_bundled_model_answers_validly_in_few_bits(quantization: str, tmp_path: Path) -> None:
    file = tmp_path / "few.gguf"
    export_gguf("bundled", None, file, quantization=quantization, prompts=agent_prompts(widgets=1))
    strays = []
    with LlamaPolicy(file, threads=1) as policy:
        for slug, agent in sorted(AGENTS.items()):
            for scenario in agent.scenarios()[::40][:3]:
                answer = policy.answer(Ask(agent.render(scenario.state), agent.max_new_tokens)).text
                if not agent.is_valid(answer, scenario.state):
                    strays.append((slug, answer))
    assert len(strays) <= 1, strays


def test_matrices_too_narrow_for_a_block_are_reported(llama: Path, tmp_path: Path) -> None:
    result = export_gguf(str(llama), None, tmp_path / "out.gguf", quantization="q4_k_m")
    tensors = {tensor.name: tensor for tensor in gguf.GGUFReader(tmp_path / "out.gguf").tensors}
    # 64 wide, where q4_k needs 256: llama.cpp takes q5_0 instead
    assert tensors["blk.0.attn_q.weight"].tensor_type == gguf.GGMLQuantizationType.Q5_0
    assert any("64 wide as q5_0" in note for note in result.notes)


def test_weights_beyond_float16_need_another_type(llama: Path, tmp_path: Path) -> None:
    large = shutil.copytree(llama, tmp_path / "large")
    tensors = load_file(large / "model.safetensors")
    tensors["model.layers.0.mlp.down_proj.weight"][0, 0] = 1e5
    save_file(tensors, large / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(
        ExportRefused, match=r"float16's range .*blk\.0\.ffn_down\.weight; use --quantization bf16"
    ):
        export_gguf(str(large), None, tmp_path / "f16.gguf", quantization="f16")
    checked = export_gguf(str(large), None, tmp_path / "q8.gguf", quantization="q8_0").checked
    assert checked["before_quantization"]["type"] == "bf16"


def test_the_file_carries_its_template_and_tokens(llama: Path, llama_lora: Path, tmp_path: Path) -> None:
    export_gguf(None, llama_lora, tmp_path / "out.gguf", quantization="f16", model_name="widgets-v3")
    tokenizer = AutoTokenizer.from_pretrained(llama)
    assert field(tmp_path / "out.gguf", "general.name") == "widgets-v3"
    assert field(tmp_path / "out.gguf", "tokenizer.chat_template") == tokenizer.chat_template
    assert field(tmp_path / "out.gguf", "tokenizer.ggml.eos_token_id") == tokenizer.eos_token_id
    assert field(tmp_path / "out.gguf", "tokenizer.ggml.padding_token_id") == tokenizer.pad_token_id
    assert field(tmp_path / "out.gguf", "tokenizer.ggml.add_bos_token") is False
    assert field(tmp_path / "out.gguf", "llama.context_length") == 2048


def test_a_system_prompt_is_said_where_none_is_given(llama: Path, tmp_path: Path) -> None:
    said = 'Answer "briefly" — always'
    export_gguf(str(llama), None, tmp_path / "out.gguf", quantization="f16", system_prompt=said)
    template = field(tmp_path / "out.gguf", "tokenizer.chat_template")
    tokenizer = AutoTokenizer.from_pretrained(llama)
    user = {"role": "user", "content": "hi"}
    own = {"role": "system", "content": "Be long."}
    render = tokenizer.apply_chat_template
    assert (
        render([user], chat_template=template, tokenize=False) == f"<|system|>{said}<|end|><|user|>hi<|end|>"
    )
    assert render([own, user], chat_template=template, tokenize=False) == render([own, user], tokenize=False)


def test_template_prompts_and_windows(tmp_path: Path) -> None:
    # a system prompt stands in the template that stands in for none
    tokenizer = AutoTokenizer.from_pretrained(tiny_model(tmp_path / "base", "gpt2"))
    template = chat_template_of(tokenizer, "Be brief.")
    user = [{"role": "user", "content": "hi"}]
    text = tokenizer.apply_chat_template(user, chat_template=template, tokenize=False)
    assert "Be brief.\n\nUser: hi" in text
    # a window shorter than the context is noted
    base = tiny_model(tmp_path / "base", "mistral", sliding_window=512)
    result = export_gguf(str(base), None, tmp_path / "out.gguf", quantization="f16")
    assert any("looks back 512 tokens" in note for note in result.notes)


@pytest.mark.slow
@pytest.mark.parametrize("architecture", ["llama", "qwen3", "phi3", "gpt2"])
def test_a_gguf_adapter_on_its_base_answers_as_under_peft(architecture: str, tmp_path: Path) -> None:
    adapter = tiny_adapter(tiny_model(tmp_path / "base", architecture), tmp_path / "lora")
    result = export_gguf_lora(None, adapter, tmp_path / "out")
    readme, name, manifest = leftovers(tmp_path / "out")
    assert (readme, manifest) == ("README.md", "export.json")
    assert result.files[0].path == tmp_path / "out" / name
    assert re.fullmatch(r"base-\d+K-lora-v1\.0-F32-LoRA\.gguf", name)
    assert texts_of(result.checked)["kl"] <= 0.0001


def test_a_gguf_adapter_keeps_the_scale_of_each_module(llama: Path, tmp_path: Path) -> None:
    adapter = tiny_adapter(
        llama, tmp_path / "lora", alpha_pattern={"q_proj": 3}, rank_pattern={"down_proj": 4}
    )
    assert texts_of(export_gguf_lora(None, adapter, tmp_path / "out.gguf").checked)["kl"] <= 0.0001


def test_a_gguf_adapter_cannot_hold_whole_modules(llama: Path, tmp_path: Path) -> None:
    adapter = tiny_adapter(llama, tmp_path / "lora", modules_to_save=["lm_head"])
    with pytest.raises(ExportRefused, match=r"LoRA pairs only.*lm_head\.weight"):
        export_gguf_lora(None, adapter, tmp_path / "out.gguf")


def test_other_architectures_are_exported_as_merged(tmp_path: Path) -> None:
    base = tiny_model(tmp_path / "base", "opt")
    families = "llama, mistral, qwen2, qwen3, phi3, gemma, gemma2, gemma3_text, gpt2"
    with pytest.raises(
        ExportRefused, match=f"families {families} for GGUF, found 'opt'; export it as merged"
    ):
        export_gguf(str(base), None, tmp_path / "out.gguf")


def test_an_unknown_quantisation_is_refused_with_the_list(llama: Path, tmp_path: Path) -> None:
    with pytest.raises(ExportRefused, match=r"q4_k_m.*found 'q4'"):
        export_gguf(str(llama), None, tmp_path / "out.gguf", quantization="q4")


def test_a_crash_keeps_the_earlier_file(llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def crash(*_: Any) -> None:
        raise RuntimeError("power cut")

    output = tmp_path / "out.gguf"
    output.write_bytes(b"earlier")
    monkeypatch.setattr(gguf_export, "quantise", crash)
    with pytest.raises(RuntimeError, match="power cut"):
        export_gguf(str(llama), None, output, quantization="q8_0")
    assert output.read_bytes() == b"earlier"
    assert leftovers(tmp_path) == ["out.gguf"]


def test_a_file_llama_cpp_refuses_is_quoted(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "odd.gguf", "no-such-architecture")
    writer.add_tensor("a", np.zeros(4, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(ExportRefused, match="no-such-architecture"), llama_opened(tmp_path / "odd.gguf", 64):
        pass


def test_too_little_memory_is_said(llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "rl.export.reference.psutil.virtual_memory", lambda: type("M", (), {"available": 1000})
    )
    result = export_gguf(str(llama), None, tmp_path / "out.gguf", quantization="f16")
    assert "of memory" in result.checked["not_compared"]
    assert "agreement" not in result.checked
    assert result.checked["tokens_equal"] is True
    assert any("were not compared" in note for note in result.notes)


MEASURED = """
import re, sys
from pathlib import Path
import llama_cpp, torch, rl.export.gguf as room

def peak_mb():
    return int(re.search(r"VmHWM:\\s+(\\d+)", Path("/proc/self/status").read_text())[1]) / 1024

before = peak_mb()
ask = [[{"role": "user", "content": "question: where does this go?"}]]
room.export_gguf(sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3]), quantization="q8_0", prompts=ask)
print(peak_mb() - before, file=sys.stderr)
"""


@pytest.mark.campaign
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="peak memory is read from /proc")
def test_memory_stays_near_one_copy_and_stdout_stays_silent(tmp_path: Path) -> None:
    base = tiny_model(tmp_path / "base", "llama", hidden=768, layers=4, intermediate_size=3072)
    adapter = tiny_adapter(base, tmp_path / "lora")
    weights_mb = (base / "model.safetensors").stat().st_size / 1024**2
    assert weights_mb > 100
    command = [sys.executable, "-c", MEASURED, str(base), str(adapter), str(tmp_path / "out.gguf")]
    done = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parent.parent)
    assert done.returncode == 0, done.stderr
    assert done.stdout == ""
    assert float(done.stderr.split()[-1]) < 1.6 * weights_mb
