"""Is a GGUF file the model it was made of? Opened by the gguf package and llama.cpp, compared with the original."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import gguf
import llama_cpp
import numpy as np

from rl.export.artifact import ExportRefused
from rl.export.gguf_runtime import llama_greedy_answer, llama_log_probabilities, llama_opened
from rl.export.reference import CHECK_TOKENS, Reference

PLAIN_BAR = {"f32": 0.05, "f16": 0.05, "bf16": 0.25}
"""Largest mean absolute log-probability difference from the original, in nats, over every token of the vocabulary.

Float16 moves it by hundredths at most; more means that something was written wrongly. bfloat16 keeps 8 bits of each
weight, and a float32 original loses more by that."""


def gguf_check(
    path: Path,
    reference: Reference,
    *,
    quantization: str,
    stop: Collection[int] = (),
    answer_tokens: int = 0,
    lora: Path | None = None,
    notes: Sequence[str] = (),
) -> dict[str, Any]:
    """Open a GGUF file in llama.cpp and compare it with what the original said; the figures, or ExportRefused.

    quantization: as named by users; f32, f16 and bf16 must stay below PLAIN_BAR, of the others the figures are only
    returned. stop, answer_tokens: for greedy answers, where `reference` has
    any. lora: a LoRA in GGUF to open on top. notes: what may explain a difference, told in the refusal.

    Returns `tokens_equal` and `prompts`; where the original was asked also `positions`,
    `logprob_mean_abs_diff`, `logprob_max_abs_diff` (nats), `top1_agreement` (share in [0, 1]) and, with answers,
    `greedy_equal` (share in [0, 1]); where it was not, `not_compared` says why.
    """
    figures: dict[str, Any] = {}
    longest = max(len(prompt.ids[:CHECK_TOKENS]) for prompt in reference.prompts)
    if reference.answers:
        longest = max(len(prompt.ids) for prompt in reference.prompts) + answer_tokens
    with llama_opened(path, max(longest, 64), lora) as llama:
        figures |= _tokens(llama, reference)
        if reference.skip_reason:
            return {**figures, "not_compared": reference.skip_reason}
        figures |= _log_probs(llama, reference)
        if reference.answers:
            answers = [llama_greedy_answer(llama, p.ids, answer_tokens, stop) for p in reference.prompts]
            equal = sum(found == answer for found, answer in zip(answers, reference.answers, strict=True))
            figures["greedy_equal"] = equal / len(answers)
    mean, bar = figures["logprob_mean_abs_diff"], PLAIN_BAR.get(quantization)
    if not np.isfinite(mean) or (bar is not None and mean > bar):
        raise ExportRefused(
            f"expected the {quantization} GGUF to answer like the original (mean absolute log-probability difference "
            f"at most {bar if bar is not None else 'finite'}), found {mean:.4f} over {figures['positions']} positions "
            f"of {figures['prompts']} prompts; the export was thrown away, export the model as merged instead"
            + "".join(f" ({note})" for note in notes)
        )
    return figures


def gguf_read(path: Path, tensors: int | None, quantization: str) -> tuple[dict[str, Any], list[str]]:
    """Open a file with the gguf package: its `architecture` and number of `tensors`, and notes on how they are stored.

    tensors: how many there must be, None where nobody counted. A matrix whose rows do not divide into the
    quantisation's blocks is stored in another type by llama.cpp; the notes name these. Raises ExportRefused.
    """
    try:
        reader = gguf.GGUFReader(path)
    except (ValueError, OSError, IndexError, KeyError) as error:
        raise ExportRefused(
            f"expected a GGUF file, found one the gguf package cannot read ({error})"
        ) from error
    field = reader.get_field("general.architecture")
    architecture = str(field.contents()) if field is not None else ""
    if not architecture or (tensors is not None and len(reader.tensors) != tensors):
        raise ExportRefused(
            f"expected a GGUF file with an architecture and {tensors} tensors, found {architecture or 'none'} and "
            f"{len(reader.tensors)}"
        )
    return {"architecture": architecture, "tensors": len(reader.tensors)}, _fallbacks(reader, quantization)


def _fallbacks(reader: gguf.GGUFReader, quantization: str) -> list[str]:
    block = 256 if "_k" in quantization else 32 if quantization in ("q4_0", "q8_0") else 1
    found: dict[str, list[str]] = {}
    for tensor in reader.tensors:
        width = int(tensor.shape[0])
        if len(tensor.shape) < 2 or width % block == 0 or tensor.name.startswith("position_embd"):
            continue
        found.setdefault(f"{width} wide as {tensor.tensor_type.name.lower()}", []).append(tensor.name)
    return [
        f"{quantization} stores rows in blocks of {block}: {len(names)} matrices {kind} instead "
        f"({', '.join(names[:3])}{', ...' if len(names) > 3 else ''})"
        for kind, names in found.items()
    ]


def _tokens(llama: llama_cpp.Llama, reference: Reference) -> dict[str, Any]:
    for prompt in reference.prompts:
        found = llama.tokenize(prompt.text.encode(), add_bos=prompt.framed, special=True)
        if found != prompt.ids:
            at = next(
                (i for i, (a, b) in enumerate(zip(found, prompt.ids, strict=False)) if a != b),
                min(len(found), len(prompt.ids)),
            )
            raise ExportRefused(
                f"expected llama.cpp to split text into the same tokens as transformers, found {found[at : at + 5]} "
                f"instead of {prompt.ids[at : at + 5]} at token {at} of {prompt.text[:60]!r}; this tokenizer cannot be "
                "written as GGUF here, export the model as merged instead"
            )
    return {"prompts": len(reference.prompts), "tokens_equal": True}


def _log_probs(llama: llama_cpp.Llama, reference: Reference) -> dict[str, Any]:
    worst, total, count, agreements, positions = 0.0, 0.0, 0, 0, 0
    for prompt, expected in zip(reference.prompts, reference.log_probs, strict=True):
        found = llama_log_probabilities(llama, prompt.ids[:CHECK_TOKENS], len(expected))
        difference = np.abs(found - expected)
        worst = max(worst, float(difference.max()))
        total += float(difference.sum(dtype=np.float64))
        count += difference.size
        agreements += int((found.argmax(-1) == expected.argmax(-1)).sum())
        positions += len(expected)
    return {
        "positions": positions,
        "logprob_mean_abs_diff": total / count,
        "logprob_max_abs_diff": worst,
        "top1_agreement": agreements / positions,
    }
