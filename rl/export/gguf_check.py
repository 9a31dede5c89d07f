"""Is a GGUF file the model it was made of? Opened by the gguf package and llama.cpp, compared with the original."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import gguf
import llama_cpp

from rl.export.agreement import Expected, ExportAgreement, Measured, measured
from rl.export.artifact import ExportRefused
from rl.export.gguf_runtime import llama_log_probabilities, llama_opened
from rl.export.reference import CheckPrompt, Reference

PLAIN_BAR = {"f32": 0.002, "f16": 0.002, "bf16": 0.02}
"""Largest KL divergence from the original on the check texts, in nats per token, of an unquantised file.

Float16 costs less than a tenth of it; more means that something was written wrongly. bfloat16 keeps 8 bits of each
weight, and a float32 original loses more by that."""


def gguf_measured(
    path: Path, prompts: Sequence[CheckPrompt], expected: Sequence[Expected], *, lora: Path | None = None
) -> Measured | None:
    """Open a GGUF file in llama.cpp and compare its tokens and log-probabilities with the original's.

    lora: a LoRA in GGUF to open on top. None where nothing is expected: the tokens alone were compared. Raises
    ExportRefused for a file that does not open or splits the prompts into other tokens.
    """
    longest = max(len(ids) for ids in [*(p.ids for p in prompts), *(text.ids for text in expected)])
    with llama_opened(path, max(longest, 64), lora) as llama:
        _tokens_check(llama, prompts)
        found = measured(expected, partial(llama_log_probabilities, llama)) if expected else None
    if found is not None and not math.isfinite(found.texts.kl):
        raise ExportRefused(
            "expected a GGUF file that gives finite log-probabilities, found one that does not; the export was thrown "
            "away, use --quantization bf16 or f32"
        )
    return found


def checked_facts(
    reference: Reference, policy: Measured | None, base: Measured | None = None
) -> dict[str, Any]:
    """Facts of a check for `checked`: the tokens are equal, and the agreement or why it was not measured."""
    facts: dict[str, Any] = {"prompts": len(reference.prompts), "tokens_equal": True}
    if policy is None:
        return {**facts, "not_compared": reference.skip_reason}
    return {**facts, "agreement": ExportAgreement(policy=policy, base=base).as_dict()}


def plain_check(found: Measured, quantization: str, notes: Sequence[str] = ()) -> None:
    """Raise ExportRefused for an unquantised file above PLAIN_BAR; notes: what may explain a difference."""
    bar = PLAIN_BAR[quantization]
    if not found.texts.kl <= bar:
        raise ExportRefused(
            f"expected the {quantization} GGUF to answer like the original (KL divergence at most {bar} nats per "
            f"token), found {found.texts.kl:.4f} at {found.texts.positions} positions of {found.texts.prompts} texts; "
            "the export was thrown away, export the model as merged instead"
            + "".join(f" ({note})" for note in notes)
        )


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


def _tokens_check(llama: llama_cpp.Llama, prompts: Sequence[CheckPrompt]) -> None:
    for prompt in prompts:
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
