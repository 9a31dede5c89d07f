"""Tiny random causal models of several architectures and LoRA adapters for them: quick to make, no network."""

import functools
import json
import shutil
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from rl.training.hardware import Hardware

HARDWARE = Hardware("cpu", "a test", 1.0, 1.0, 1, "a test", "float32", "highest", True, "cpu")
"""Computes in float32: a CPU with bfloat16 instructions would round otherwise."""

CONTEXT = 2048
"""Positions every tiny model can read."""

PAD, END, USER, ASSISTANT, SYSTEM = "<|pad|>", "<|end|>", "<|user|>", "<|assistant|>", "<|system|>"
SPECIAL = [PAD, END, USER, ASSISTANT, SYSTEM]

CHAT_TEMPLATE = (
    "{% for m in messages %}{{ '<|' + m.role + '|>' + m.content + '<|end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)

SENTENCES = [
    "The quick brown fox jumps over the lazy dog, and the dog doesn't mind at all.",
    "question: how did revenue change over the last week\nwidgets: pie_chart, line_chart, table",
    '{"widget": "line_chart"} {"folder": "invoices/2025"} {"choice": "left"}',
    "Where should this file go? It's an invoice from March 2025; 12 pages, 340 kB.",
    "Grüße aus Köln: das Café am Fluß ist schön, naïve Déjà-vu für 25 € im Jahr 2024.",
    "Сколько будет два плюс два? Спасибо, хорошо!",
    "今日は天気がいいです。東京の人口は何人ですか。你好,世界!",
    "def add(a, b):\n    return a + b  # sums\n\n\nprint(add(1, 2))",
    "which answer is better and why was the other one worse",
]

# The pre-tokenizers as published with the models of each family (their tokenizer.json).
_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CASED = (rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+", rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*")
_REST_SLASH = r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_ENDINGS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
REGEXES = {
    "llama3": _WORDS + r"\p{N}{1,3}" + _REST,
    "qwen2": _WORDS + r"\p{N}" + _REST,
    "tekken": f"{_CASED[0]}|{_CASED[1]}|" + r"\p{N}" + _REST_SLASH,
    "gpt4o": f"{_CASED[0]}{_ENDINGS}|{_CASED[1]}{_ENDINGS}|" + r"\p{N}{1,3}" + _REST_SLASH,
}
"""Kind of tokenizer -> the pattern it splits text by."""

TOKENIZERS = {"llama": "llama3", "mistral": "sentencepiece", "qwen2": "qwen2", "qwen3": "qwen2"}
TOKENIZERS |= {"phi3": "sentencepiece", "gemma": "gemma", "gemma2": "gemma", "gemma3_text": "gemma"}
TOKENIZERS |= {"gpt2": "gpt2", "opt": "gpt2"}
"""Architecture -> the kind of tokenizer its published models carry."""


def tiny_model(
    path: Path,
    architecture: str = "llama",
    *,
    seed: int = 0,
    chat_template: bool = True,
    hidden: int = 64,
    layers: int = 2,
    tokenizer: str | None = None,
    dtype: str = "float32",
    **config: Any,
) -> Path:
    """Write a random model of an architecture (a key of TOKENIZERS) and its tokenizer into `path`; return it.

    The weights are large enough for a wrong rotation, bias or norm to change the answers visibly. `tokenizer`
    is a kind `tiny_tokenizer` knows; `config` replaces keys of the architecture's config.
    GPT-2 and OPT get no chat template, as published. The same arguments always give the same files.
    """
    arguments = (
        architecture,
        seed,
        chat_template,
        hidden,
        layers,
        tokenizer,
        dtype,
        json.dumps(config, sort_keys=True),
    )
    made = _made.get(arguments)
    if made is not None and made.is_dir() and made != path:
        shutil.copytree(made, path, dirs_exist_ok=True)
        return path
    path.mkdir(parents=True, exist_ok=True)
    fast = tiny_tokenizer(tokenizer or TOKENIZERS[architecture])
    if chat_template and architecture not in ("gpt2", "opt"):
        fast.chat_template = CHAT_TEMPLATE
    fast.save_pretrained(path)
    knobs = {**_config(architecture, hidden, layers, len(fast)), **config}
    for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
        knobs.setdefault(name, getattr(fast, name))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(CONFIG_MAPPING[architecture](**knobs))
        _randomise(model)
    model.to(getattr(torch, dtype)).save_pretrained(path)
    _made[arguments] = path
    return path


_made: dict[tuple[Any, ...], Path] = {}


def tiny_adapter(base: Path, path: Path, seed: int = 0, **lora: Any) -> Path:
    """Write a PEFT LoRA adapter for `base` (r 8, alpha 16, all linear layers, B not zero); return `path`."""
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    conv1d = model.config.model_type == "gpt2"
    knobs = {"r": 8, "lora_alpha": 16, "target_modules": "all-linear", "fan_in_fan_out": conv1d, **lora}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        adapted = get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", **knobs))
        for name, weight in adapted.named_parameters():
            if "lora_B" in name or "lora_embedding_B" in name:
                torch.nn.init.normal_(weight, std=0.05)
    adapted.save_pretrained(path)
    return path


def tiny_tokenizer(kind: str = "gpt2") -> PreTrainedTokenizerFast:
    """A tokenizer of about 420 tokens: byte-level (gpt2, smollm, a key of REGEXES), or sentencepiece, gemma."""
    tokenizer = Tokenizer.from_str(_trained(kind))
    bos = "<s>" if kind == "sentencepiece" else "<bos>" if kind == "gemma" else None
    unk = "<unk>" if bos else None
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        eos_token=END,
        bos_token=bos,
        unk_token=unk,
        clean_up_tokenization_spaces=False,
        model_max_length=CONTEXT,
    )


@functools.cache
def _trained(kind: str) -> str:
    if kind in ("sentencepiece", "gemma"):
        return _sentencepiece(kind)
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=kind not in REGEXES)
    # Mistral's tekken takes a word that is a token as it is, without merging its way there
    tokenizer = Tokenizer(models.BPE(ignore_merges=kind == "tekken"))
    if kind == "gpt2":
        tokenizer.pre_tokenizer = byte_level
    else:
        first = (
            pre_tokenizers.Digits(individual_digits=True)
            if kind == "smollm"
            else pre_tokenizers.Split(Regex(REGEXES[kind]), "isolated")
        )
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([first, byte_level])
    if kind == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.train_from_iterator(
        SENTENCES,
        trainers.BpeTrainer(
            vocab_size=420,
            special_tokens=SPECIAL,
            initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
            show_progress=False,
        ),
    )
    return str(tokenizer.to_str())


def _sentencepiece(kind: str) -> str:
    """The fast form of a sentencepiece BPE: spaces as U+2581, unknown characters as byte tokens.

    Trained over plain words, then rebuilt with the byte tokens, as the conversion from tokenizer.model does.
    """
    bos = "<s>" if kind == "sentencepiece" else "<bos>"
    trained = Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    trained.train_from_iterator(
        SENTENCES[:4] + SENTENCES[7:], trainers.BpeTrainer(vocab_size=180, show_progress=False)
    )
    learnt = json.loads(trained.to_str())["model"]
    tokens = [PAD, END, bos, "<unk>", USER, ASSISTANT, SYSTEM, *(f"<0x{byte:02X}>" for byte in range(256))]
    tokens += [token for token in sorted(learnt["vocab"], key=learnt["vocab"].get) if token not in tokens]
    # sentencepiece knows no merges, only tokens: every split of a token into two others counts, in order of rank
    merges = [
        (token[:cut], token[cut:])
        for token in tokens
        if token in learnt["vocab"]
        for cut in range(1, len(token))
        if token[:cut] in learnt["vocab"] and token[cut:] in learnt["vocab"]
    ]
    tokenizer = Tokenizer(
        models.BPE(
            {token: i for i, token in enumerate(tokens)},
            merges,
            unk_token="<unk>",
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    spaces = normalizers.Replace(" ", "▁")
    if kind == "gemma":
        tokenizer.normalizer = spaces
        tokenizer.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    else:
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), spaces])
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    if kind == "sentencepiece":
        steps.append(decoders.Strip(" ", 1, 0))
    tokenizer.decoder = decoders.Sequence(steps)
    tokenizer.add_special_tokens([PAD, END, bos, "<unk>", USER, ASSISTANT, SYSTEM])
    return str(tokenizer.to_str())


def _config(architecture: str, hidden: int, layers: int, vocabulary: int) -> dict[str, Any]:
    if architecture == "gpt2":
        return {
            "n_embd": hidden,
            "n_layer": layers,
            "n_head": 4,
            "n_positions": CONTEXT,
            "vocab_size": vocabulary,
        }
    common: dict[str, Any] = {"hidden_size": hidden, "num_hidden_layers": layers, "num_attention_heads": 4}
    common |= {"vocab_size": vocabulary, "max_position_embeddings": CONTEXT}
    if architecture == "opt":
        return {**common, "ffn_dim": 2 * hidden, "word_embed_proj_dim": hidden}
    common |= {"num_key_value_heads": 2, "intermediate_size": 2 * hidden}
    if architecture in ("qwen3", "mistral") or architecture.startswith("gemma"):
        common["head_dim"] = hidden // 4
    if architecture in ("gemma2", "gemma3_text"):
        # short enough that a test's prompts reach beyond it
        common |= {"query_pre_attn_scalar": hidden // 4, "sliding_window": 32}
    if architecture == "phi3":
        common["original_max_position_embeddings"] = CONTEXT
    return common


def _randomise(model: torch.nn.Module) -> None:
    """Matrices of about unit gain, norms around their neutral value, biases that matter, peaked answers."""
    # Gemma multiplies what it embeds by sqrt(hidden), so its tied table must be smaller
    table_std = 0.1 if model.config.model_type.startswith("gemma") else 0.3
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.ndim == 1:
                weight.add_(torch.randn_like(weight) * 0.1)
            elif any(part in name for part in ("embed", "wte", "wpe")):
                torch.nn.init.normal_(weight, std=table_std)
            else:
                torch.nn.init.normal_(
                    weight, std=(2.0 if "lm_head" in name else 1.0) * weight.shape[1] ** -0.5
                )
