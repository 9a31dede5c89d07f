"""llama.cpp in process, quietly: open a GGUF file, ask it for log-probabilities and answers, quantise a file."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import llama_cpp
import numpy as np
from llama_cpp import _logger

from rl.export.agreement import FloatArray
from rl.export.artifact import ExportRefused, space_check
from rl.export.reference import cores_available, cores_for

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
"""Quantisation as users name it -> llama.cpp's `general.file_type`."""

PLAIN = ("f32", "f16", "bf16")
"""Written as they are; everything else is quantised from one of them."""

_BUFFER_BYTES = 512 * 1024**2
"""Rows of one tensor quantised at once; llama.cpp's own default is 8 GiB."""


@contextmanager
def llama_quiet() -> Iterator[list[str]]:
    """Nothing of llama.cpp reaches stdout or stderr; gives the list in which its error lines gather."""
    errors: list[str] = []
    level = _logger.logger.level

    @llama_cpp.llama_log_callback
    def gather(severity: int, text: bytes, _: Any) -> None:
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
    """A GGUF file opened on the CPU, with a LoRA in GGUF where one is given; `context` in tokens.

    Raises ExportRefused with llama.cpp's own words where it does not open.
    """
    cores = cores_for(path.stat().st_size)
    with llama_quiet() as errors:
        try:
            llama = llama_cpp.Llama(
                str(path), n_ctx=context, n_batch=context, n_ubatch=context, n_threads=cores,
                n_threads_batch=cores, logits_all=True, verbose=False, n_gpu_layers=0,
                lora_path=str(lora) if lora is not None else None,
            )  # fmt: skip
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
    """Quantise a plain GGUF file in this process. Raises ExportRefused with llama.cpp's own words."""
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
