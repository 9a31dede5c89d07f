"""llama.cpp in process: open a GGUF file, compare it with the original, quantise it."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import gguf
import llama_cpp
import numpy as np
from llama_cpp import _logger

from rl.export.agreement import Expected, ExportAgreement, FloatArray, Measured, measured
from rl.export.artifact import ExportRefused, space_check
from rl.export.reference import CheckPrompt, Reference, cores_available, cores_for
from rl.llama_library import amx_avoid

amx_avoid()

FILE_TYPES: dict[str, int] = {
    "f32": llama_cpp.LLAMA_FTYPE_ALL_F32,
    "f16": llama_cpp.LLAMA_FTYPE_MOSTLY_F16,
    "bf16": llama_cpp.LLAMA_FTYPE_MOSTLY_BF16,
    "q8_0": llama_cpp.LLAMA_FTYPE_MOSTLY_Q8_0,
    "q2_k": llama_cpp.LLAMA_FTYPE_MOSTLY_Q2_K,
    "q3_k_s": llama_cpp.LLAMA_FTYPE_MOSTLY_Q3_K_S,
    "q3_k_m": llama_cpp.LLAMA_FTYPE_MOSTLY_Q3_K_M,
    "q3_k_l": llama_cpp.LLAMA_FTYPE_MOSTLY_Q3_K_L,
    "q4_0": llama_cpp.LLAMA_FTYPE_MOSTLY_Q4_0,
    "q4_k_s": llama_cpp.LLAMA_FTYPE_MOSTLY_Q4_K_S,
    "q4_k_m": llama_cpp.LLAMA_FTYPE_MOSTLY_Q4_K_M,
    "q5_k_s": llama_cpp.LLAMA_FTYPE_MOSTLY_Q5_K_S,
    "q5_k_m": llama_cpp.LLAMA_FTYPE_MOSTLY_Q5_K_M,
    "q6_k": llama_cpp.LLAMA_FTYPE_MOSTLY_Q6_K,
}
"""Quantisation -> llama.cpp's `general.file_type`."""

PLAIN = ("f32", "f16", "bf16")
"""Unquantised types; the others are quantised from one of them."""

_BUFFER_BYTES = 512 * 1024**2
"""Rows of one tensor quantised at once; llama.cpp's default is 8 GiB."""


@contextmanager
def llama_quiet() -> Iterator[list[str]]:
    """Silences llama.cpp's output; yields the list that collects its error lines."""
    errors: list[str] = []
    level = _logger.logger.level

    @llama_cpp.llama_log_callback
    def gather(severity: int, text: bytes, _: object) -> None:
        if severity == 4:  # GGML_LOG_LEVEL_ERROR
            errors.append(text.decode("utf-8", "replace").strip())

    llama_cpp.llama_log_set(gather, ctypes.c_void_p(0))
    try:
        yield errors
    finally:
        llama_cpp.llama_log_set(_logger.llama_log_callback, ctypes.c_void_p(0))
        _logger.logger.setLevel(level)


@contextmanager
def llama_opened(path: Path, context: int, lora: Path | None = None) -> Iterator[llama_cpp.Llama]:
    """A GGUF file opened on the CPU, optionally with a GGUF LoRA; `context` in tokens.

    Raises ExportRefused with llama.cpp's message if it does not open.
    """
    cores = cores_for(path.stat().st_size)
    with llama_quiet() as errors:
        try:
            llama = llama_cpp.Llama(
                str(path),
                n_ctx=context,
                n_batch=context,
                n_ubatch=context,
                n_threads=cores,
                n_threads_batch=cores,
                logits_all=True,
                verbose=False,
                n_gpu_layers=0,
                lora_path=str(lora) if lora is not None else None,
            )
        except (ValueError, RuntimeError) as error:
            raise ExportRefused(
                f"expected a GGUF file llama.cpp opens, found one it refuses: {'; '.join(errors[-3:]) or error}"
            ) from error
        try:
            yield llama
        finally:
            llama.close()


def llama_log_probabilities(llama: llama_cpp.Llama, ids: Sequence[int], positions: int) -> FloatArray:
    """Log-probabilities of the next token after each of the last `positions` tokens: (positions, vocabulary)."""
    llama.reset()
    llama.eval(list(ids))
    logits = np.array(llama.scores[len(ids) - positions : len(ids)], dtype=np.float64)
    shifted = logits - logits.max(axis=-1, keepdims=True)
    found: FloatArray = (shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))).astype(np.float32)
    return found


def quantise(source: Path, target: Path, quantization: str) -> None:
    """Quantises a plain GGUF file in this process. Raises ExportRefused with llama.cpp's message."""
    params = llama_cpp.llama_model_quantize_default_params()
    params.ftype = FILE_TYPES[quantization]
    params.nthread = cores_available()
    params.max_buf_size = _BUFFER_BYTES
    with llama_quiet() as errors:
        code = llama_cpp.llama_model_quantize(
            str(source).encode(), str(target).encode(), ctypes.byref(params)
        )
    if code != 0:
        # it does not say so when the disk is full
        space_check(target.parent, 0)
        raise ExportRefused(
            f"expected llama.cpp to quantise to {quantization}, found it failed: {'; '.join(errors[-3:]) or code}"
        )


# --- Checks of a file ---


PLAIN_BAR = {"f32": 0.002, "f16": 0.002, "bf16": 0.02}
"""Largest KL divergence of an unquantised file from the original on the check texts, in nats per token.

Float16 costs less than a tenth of it; more means a wrong file. bfloat16 keeps 8 bits of each weight, and costs a
float32 original more.
"""


def gguf_measured(
    path: Path, prompts: Sequence[CheckPrompt], expected: Sequence[Expected], *, lora: Path | None = None
) -> Measured | None:
    """Compares a GGUF file's tokens and log-probabilities in llama.cpp with the original's.

    lora: a GGUF LoRA on top. Returns None if nothing is expected: then only tokens were compared. Raises ExportRefused
    for a file that does not open or splits the prompts into other tokens.
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
) -> dict[str, object]:
    """Results of a check for `checked`: tokens are equal, and the agreement or why it was not measured."""
    facts: Mapping[str, object] = {"prompts": len(reference.prompts), "tokens_equal": True}
    if policy is None:
        return {**facts, "not_compared": reference.skip_reason}
    return {**facts, "agreement": ExportAgreement(policy=policy, base=base).as_dict()}


def plain_check(found: Measured, quantization: str, notes: Sequence[str] = ()) -> None:
    """Raises ExportRefused for an unquantised file above PLAIN_BAR; notes: possible explanations."""
    bar = PLAIN_BAR[quantization]
    if not found.texts.kl <= bar:
        raise ExportRefused(
            f"expected the {quantization} GGUF to answer like the original (KL divergence at most {bar} nats per "
            f"token), found {found.texts.kl:.4f} at {found.texts.positions} positions of {found.texts.prompts} texts; "
            "the export was thrown away, export the model as merged instead"
            + "".join(f" ({note})" for note in notes)
        )


def gguf_read(path: Path, tensors: int | None, quantization: str) -> tuple[dict[str, object], list[str]]:
    """Reads a file with the gguf package: its `architecture` and number of `tensors`, and notes on their types.

    tensors: expected number, None if unknown. llama.cpp stores matrices whose rows do not fit the quantisation's blocks
    in another type; the notes name them. Raises ExportRefused.
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
