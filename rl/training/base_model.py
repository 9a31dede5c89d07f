"""The bundled base model: where it lies, and how it is built from nothing in a few minutes on two cores.

A small Llama that answers the built-in agents' prompts with one of the listed options and prefers none of them.
Nothing here imports torch before it is asked to work.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

from rl.checksums import sums_write
from rl.training.base_corpus import Example, example_random, tokenizer_text

BUNDLED_MODEL = Path(__file__).resolve().parent.parent / "bundled_model"
"""The model shipped with the project: config, safetensors, tokenizer, chat template."""

STEPS = 1600
"""Optimiser steps of a build; the shipped model had 800."""

PAD, END = "<|pad|>", "<|end|>"
SPECIAL_TOKENS = (PAD, END, "<|system|>", "<|user|>", "<|assistant|>", "<|tool|>")
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|' + message['role'] + '|>' + message['content'] + '<|end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
CONTEXT = 2048


@dataclass(frozen=True)
class Shape:
    """The architecture. Every matrix row is a multiple of 256 wide, because k-quants work in blocks of 256."""

    vocabulary: int = 2560
    hidden: int = 256
    intermediate: int = 768
    layers: int = 4
    heads: int = 4
    kv_heads: int = 2


def resolve_base_model(name: str) -> str:
    """`bundled` becomes the shipped model's directory; any other name or path stays as it is."""
    return str(BUNDLED_MODEL) if name == "bundled" else name


def build_base_model(
    output: Path,
    *,
    seed: int = 0,
    steps: int = STEPS,
    batch_size: int = 32,
    learning_rate: float = 2e-3,
    shape: Shape | None = None,
    progress: Callable[[int, int, float], None] | None = None,
) -> dict[str, Any]:
    """Train the base model from nothing and write it to `output`; the same seed learns from the same examples.

    output: a directory, made where missing; model files in it are replaced only after the last step.
    steps: optimiser steps of `batch_size` examples. progress: called after each with (step, steps, loss in nats).
    Returns parameters, vocabulary, steps, seconds, loss (mean of the last tenth, nats per response token), bytes.
    The caller's random state and thread count are left as they were.
    """
    import torch

    from rl.training.base_weights import weights_start

    if steps < 1:
        raise ValueError(f"steps must be at least 1, found {steps}")
    output.mkdir(parents=True, exist_ok=True)
    shape = shape or Shape()
    started = time.monotonic()
    tokenizer = tokenizer_build(seed, shape.vocabulary)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = _model(shape, tokenizer)
        weights_start(model)
        losses = _train(model, tokenizer, seed, steps, batch_size, learning_rate, progress)
    model.to(torch.bfloat16).save_pretrained(output)
    tokenizer.save_pretrained(output)
    sums_write(Path(output))
    (output / "model.safetensors").chmod(0o644)  # written as a temporary file, which only its owner may read
    last = losses[-max(1, steps // 10) :]
    return {
        "path": str(output),
        "seed": seed,
        "steps": steps,
        "seconds": round(time.monotonic() - started, 1),
        "loss": round(sum(last) / len(last), 4),
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "vocabulary": len(tokenizer),
        "bytes": sum(file.stat().st_size for file in output.iterdir() if file.is_file()),
    }


def tokenizer_build(seed: int, vocabulary: int, texts: int = 12_000) -> Any:
    """A byte-level BPE with GPT-2's pre-tokenizer, so that any text can be encoded and llama.cpp knows how.

    Raises ValueError where the made-up texts hold too few distinct pairs for `vocabulary` tokens.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    bpe.decoder = decoders.ByteLevel()
    random = Random(f"tokenizer/{seed}")
    bpe.train_from_iterator(
        (tokenizer_text(random) for _ in range(texts)),
        trainers.BpeTrainer(
            vocab_size=vocabulary,
            special_tokens=list(SPECIAL_TOKENS),
            initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
            show_progress=False,
        ),
    )
    if bpe.get_vocab_size() != vocabulary:
        raise ValueError(
            f"expected {vocabulary} tokens, the texts gave {bpe.get_vocab_size()}: use more texts"
        )
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


def _model(shape: Shape, tokenizer: Any) -> Any:
    from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=shape.vocabulary,
            hidden_size=shape.hidden,
            intermediate_size=shape.intermediate,
            num_hidden_layers=shape.layers,
            num_attention_heads=shape.heads,
            num_key_value_heads=shape.kv_heads,
            max_position_embeddings=CONTEXT,
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


def encode(tokenizer: Any, example: Example) -> tuple[list[int], list[int]]:
    """Token ids of an example's prompt (none for plain text) and of its response with the end token."""
    prompt: list[int] = []
    if example.messages:
        text = tokenizer.apply_chat_template(
            list(example.messages), tokenize=False, add_generation_prompt=True
        )
        prompt = tokenizer(text, add_special_tokens=False)["input_ids"]
    response = tokenizer(example.response, add_special_tokens=False)["input_ids"]
    return prompt, [*response, tokenizer.eos_token_id]


def _train(
    model: Any,
    tokenizer: Any,
    seed: int,
    steps: int,
    batch_size: int,
    learning_rate: float,
    progress: Callable[[int, int, float], None] | None,
) -> list[float]:
    """AdamW with warm-up and cosine decay; returns the loss of each step, in nats per response token."""
    import torch

    from rl.training.hardware import detect

    decayed = [p for p in model.parameters() if p.ndim > 1]
    plain = [p for p in model.parameters() if p.ndim == 1]
    optimizer = torch.optim.AdamW(
        [{"params": decayed, "weight_decay": 0.05}, {"params": plain, "weight_decay": 0.0}],
        lr=learning_rate,
        betas=(0.9, 0.95),
    )
    # on a processor that multiplies it natively only: elsewhere bfloat16 is emulated, and many times slower
    bfloat16 = detect().dtype == "bfloat16"
    warmup = max(1, steps // 20)
    losses: list[float] = []
    model.train()
    for step, batch in zip(range(1, steps + 1), batches(tokenizer, seed, batch_size), strict=False):
        rate = min(step / warmup, 0.5 * (1 + math.cos(math.pi * step / (steps + 1))))
        for group in optimizer.param_groups:
            group["lr"] = learning_rate * rate
        ids, taught = _padded(batch, tokenizer.pad_token_id)
        # padded on the right and read causally: no mask is needed; only what is taught reaches the head
        with torch.autocast("cpu", torch.bfloat16, enabled=bfloat16):
            seen = model.model(input_ids=ids[:, :-1]).last_hidden_state
            logits = model.lm_head(seen[taught[:, 1:]])
        loss = torch.nn.functional.cross_entropy(logits.float(), ids[:, 1:][taught[:, 1:]])
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(float(loss.detach()))
        if progress is not None:
            progress(step, steps, losses[-1])
    model.eval()
    return losses


def batches(tokenizer: Any, seed: int, batch_size: int) -> Iterator[list[tuple[list[int], list[int]]]]:
    """Endless batches of encoded examples, always the same for a seed; those of one batch have similar lengths."""
    random = Random(f"examples/{seed}")
    while True:
        drawn = [encode(tokenizer, example_random(random)) for _ in range(8 * batch_size)]
        drawn.sort(key=lambda pair: len(pair[0]) + len(pair[1]))
        cut = [drawn[start : start + batch_size] for start in range(0, len(drawn), batch_size)]
        random.shuffle(cut)
        yield from cut


def _padded(batch: Sequence[tuple[list[int], list[int]]], pad: int) -> tuple[Any, Any]:
    """Token ids [B, T], padded on the right, and whether each is a response token to be learnt, bool [B, T]."""
    import torch

    width = max(len(prompt) + len(response) for prompt, response in batch)
    ids = torch.full((len(batch), width), pad)
    taught = torch.zeros((len(batch), width), dtype=torch.bool)
    for row, (prompt, response) in enumerate(batch):
        end = len(prompt) + len(response)
        ids[row, :end] = torch.tensor(prompt + response)
        taught[row, len(prompt) : end] = True
    return ids, taught
