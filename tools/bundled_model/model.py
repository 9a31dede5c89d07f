"""The bundled base model: where it lies, and how it is built from nothing in an hour of one core.

A small Llama that answers the built-in agents' prompts with one of the listed options and prefers none of them.
Nothing here imports torch before it is asked to work.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

from rl.bundled_models import BUNDLED_MODEL, resolve_base_model
from rl.checksums import sums_write
from tools.bundled_model.corpus import tokenizer_text
from tools.bundled_model.words import PROMPT_WORDS

__all__ = ["BUNDLED_MODEL", "Shape", "build_base_model", "resolve_base_model", "tokenizer_build"]

STEPS = 16_000
"""Optimiser steps of a build."""

BATCH_SIZE = 24
"""Examples of a step."""

LEARNING_RATE, FURTHER_LEARNING_RATE = 2e-3, 1.5e-3
"""Of a training from nothing, and of one that goes on from a trained base."""

PAD, END = "<|pad|>", "<|end|>"
SPECIAL_TOKENS = (PAD, END, "<|system|>", "<|user|>", "<|assistant|>", "<|tool|>")
CHAT_TEMPLATE = (
    "{% if tools %}{{ '<|system|>' }}"
    "{% if messages[0]['role'] == 'system' %}{{ (messages[0]['content'] or '') + '\\n\\n' }}{% endif %}"
    "{{ 'You may call these functions:\\n<tools>\\n' }}"
    "{% for tool in tools %}{{ (tool | tojson) + '\\n' }}{% endfor %}"
    '{{ \'</tools>\\nTo call one, write <tool_call>{"name": ..., "arguments": {...}}</tool_call><|end|>\' }}'
    "{% endif %}"
    "{% for message in messages %}{% if not (tools and loop.first and message['role'] == 'system') %}"
    "{{ '<|' + message['role'] + '|>' + (message['content'] or '') }}"
    "{% for call in message['tool_calls'] or [] %}{% set function = call['function'] %}"
    "{{ '<tool_call>{\"name\": ' + (function['name'] | tojson) + ', \"arguments\": ' }}"
    "{% if function['arguments'] is string %}{{ function['arguments'] }}"
    "{% else %}{{ function['arguments'] | tojson }}{% endif %}{{ '}</tool_call>' }}{% endfor %}"
    "{{ '<|end|>' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
"""Tools stand in the system turn, calls after the words of their turn, as in Hermes and Qwen. Text alone is `<|role|>`,
the words, `<|end|>`."""
CONTEXT = 2048
TEXTS = 12_000
"""Made-up texts that the tokenizer's merges are learnt from."""

BLANK = "\u0120"
"""Sign for a blank in byte-level BPE."""
JSON_SIGNS = (
    ("{", '"'),
    ('"', ":"),
    (BLANK, '"'),
    ('"', "}"),
    ('"', ","),
    ("[", '"'),
    (BLANK, '["'),
    ('"', "]"),
    ('"]', "}"),
    (BLANK, "{"),
    (BLANK + "{", '"'),
    ("}", "}"),
    ('"}', "}"),
    (BLANK, "["),
    ('"]', ","),
)
"""Pairs of signs that are one token, in the order in which they are joined."""
ASKING, OPENING = (' "', '["', ' ["'), ("\n", '["', ' ["', ' "')
"""Tokens after which an answer names an option, and after which prompts list one."""


@dataclass(frozen=True)
class Shape:
    """The architecture. Every matrix row is a multiple of 256 wide, because k-quants work in blocks of 256."""

    vocabulary: int = 2560
    hidden_size: int = 256
    intermediate: int = 512
    layers: int = 4
    heads: int = 4
    kv_heads: int = 2
    rope_theta: float = 100_000.0


def build_base_model(
    output: Path,
    *,
    seed: int = 0,
    steps: int = STEPS,
    batch_size: int = BATCH_SIZE,
    learning_rate: float | None = None,
    shape: Shape | None = None,
    texts: int = TEXTS,
    start_from: str = "",
    progress: Callable[[int, int, float], None] | None = None,
) -> dict[str, Any]:
    """Train the base model from nothing and write it to `output`; the same seed learns from the same examples.

    output: a directory, made where missing; model files in it are replaced only after the last step. A training that
    was cut off goes on from the checkpoint beside it (`<output>.training.safetensors`), which goes when it is done.
    steps: optimiser steps of `batch_size` examples. texts: what the tokenizer learns from. start_from: a base model to
    train further, whose tokenizer and shape it keeps (give another seed than its own for other examples); empty: from
    nothing. progress: called after each step with (step, steps, loss in nats an answer token above the least possible).
    Returns parameters, vocabulary, steps, seconds, loss (mean of the last tenth), bytes.
    The caller's random state and thread count are left as they were.
    """
    import torch

    from tools.bundled_model.training import CURRICULUM, FURTHER, train
    from tools.bundled_model.weights import weights_start

    if steps < 1 or batch_size < 1:
        raise ValueError(f"steps and batch_size: expected at least 1, found {steps} and {batch_size}")
    output = Path(output)
    output.parent.mkdir(parents=True, exist_ok=True)
    shape = shape or Shape()
    state = output.with_name(f"{output.name}.training.safetensors")
    start_s = time.monotonic()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        if start_from:
            model, tokenizer = _base_loaded(start_from)
        else:
            tokenizer = tokenizer_build(seed, shape.vocabulary, texts)
            model = _model(shape, tokenizer)
            weights_start(model, asking=tokens_of(tokenizer, ASKING), opening=tokens_of(tokenizer, OPENING))
        losses = train(
            model,
            tokenizer,
            seed=seed,
            steps=steps,
            batch_size=batch_size,
            learning_rate=learning_rate or (FURTHER_LEARNING_RATE if start_from else LEARNING_RATE),
            curriculum=FURTHER if start_from else CURRICULUM,
            state=state,
            progress=progress,
        )
    parameters = sum(parameter.numel() for parameter in model.parameters())
    output.mkdir(exist_ok=True)
    model.to(torch.bfloat16).save_pretrained(output)
    tokenizer.save_pretrained(output)
    sums_write(output)
    (output / "model.safetensors").chmod(0o644)  # written as a temporary file, which only its owner may read
    state.unlink(missing_ok=True)
    last = losses[-max(1, steps // 10) :]
    return {
        "path": str(output),
        "seed": seed,
        "steps": steps,
        "seconds": round(time.monotonic() - start_s, 1),
        "loss": round(sum(last) / len(last), 4),
        "parameters": parameters,
        "vocabulary": len(tokenizer),
        "bytes": sum(file.stat().st_size for file in output.iterdir() if file.is_file()),
    }


def tokenizer_build(seed: int, vocabulary: int, texts: int = TEXTS) -> Any:
    """A byte-level BPE with GPT-2's pre-tokenizer, so that any text can be encoded and llama.cpp knows how.

    No merge joins a letter with a blank or a sign, so that a name is the same tokens wherever it stands: after a
    blank, in quotes, at the start of a line. Signs join in `JSON_SIGNS` alone, and the blank before `PROMPT_WORDS`.
    Raises ValueError where the made-up texts hold too few distinct pairs for `vocabulary` tokens.
    """
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    added_merges = (*JSON_SIGNS, *((BLANK, word) for word in PROMPT_WORDS))
    learnt_size = vocabulary - len(added_merges)
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(r"\p{L}+|\p{N}{1,2}|\p{M}+|[^\p{L}\p{N}\p{M}]"), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    random = Random(f"tokenizer/{seed}")
    bpe.train_from_iterator(
        (tokenizer_text(random) for _ in range(texts)),
        trainers.BpeTrainer(
            vocab_size=learnt_size,
            special_tokens=list(SPECIAL_TOKENS),
            initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
            show_progress=False,
        ),
    )
    if bpe.get_vocab_size() != learnt_size:
        raise ValueError(
            f"expected {learnt_size} tokens, the texts gave {bpe.get_vocab_size()}: use more texts"
        )
    written = json.loads(bpe.to_str())
    for left, right in added_merges:
        written["model"]["merges"].append([left, right])
        written["model"]["vocab"][left + right] = len(written["model"]["vocab"])
    bpe = Tokenizer.from_str(json.dumps(written))
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    bpe.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        pad_token=PAD,
        eos_token=END,
        bos_token=None,
        unk_token=None,
        additional_special_tokens=list(SPECIAL_TOKENS[2:]),
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
        model_max_length=CONTEXT,
    )


def tokens_of(tokenizer: Any, texts: Sequence[str]) -> list[int]:
    """Ids of texts that are one token each."""
    found = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts]
    if not all(len(ids) == 1 for ids in found):
        raise ValueError(f"expected texts of one token each, found {dict(zip(texts, found, strict=True))}")
    return [token for (token,) in found]


def _base_loaded(start_from: str) -> tuple[Any, Any]:
    """Model in float32 and tokenizer of a base that is trained further."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    path = resolve_base_model(start_from)
    tokenizer = AutoTokenizer.from_pretrained(path)
    for name in ("is_local", "local_files_only"):
        tokenizer.init_kwargs.pop(name, None)  # how it was loaded, which would be saved with it
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32), tokenizer


def _model(shape: Shape, tokenizer: Any) -> Any:
    from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=shape.vocabulary,
            hidden_size=shape.hidden_size,
            intermediate_size=shape.intermediate,
            num_hidden_layers=shape.layers,
            num_attention_heads=shape.heads,
            num_key_value_heads=shape.kv_heads,
            max_position_embeddings=CONTEXT,
            rope_parameters={"rope_type": "default", "rope_theta": shape.rope_theta},
            tie_word_embeddings=True,
            bos_token_id=None,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
        )
    )
    model.generation_config = GenerationConfig(
        bos_token_id=None, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id
    )
    return model
