"""The GGUF file that serves a base model: quantised where it agrees with the base, else float16."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from rl.base_models.sources import AddedModel
from rl.bundled_models import ADDED_FILE
from rl.export.artifact import ExportResult, Progress, exported_file, sha256_file, silent
from rl.export.gguf import export_gguf
from rl.export.gguf_runtime import llama_log_probabilities, llama_opened, quantise
from rl.export.reference import CHECK_TOKENS, check_prompts
from rl.export.source import source_open

AGREED_KL, AGREED_TOP1 = 0.01, 0.98
"""Most KL divergence in nats per token, and least share of equal likeliest tokens, at which a quantised file serves."""
SMALL_BYTES = 64 * 1024**2
"""Of a float16 file: a smaller one is read fast enough as it is."""
ORIGINAL = "original"
"""Quantisation of a base's own GGUF file, whichever it has."""


def serving_file_write(
    base_model: str, folder: Path, *, llama_cpp_path: str | None = None, progress: Progress | None = None
) -> tuple[str, ExportResult]:
    """Write `base-<quantisation>.gguf` into a folder: (quantisation, result). Raises ExportRefused.

    Tried in this order: the GGUF file that the base was de-quantised from, as a link; q8_0; float16, which is compared
    with the base itself. The other two are compared with the float16 file, on the texts of `check_prompts`.
    """
    progress = progress or silent
    plain = folder / "base-f16.gguf"
    result = export_gguf(
        base_model, None, plain, quantization="f16", llama_cpp_path=llama_cpp_path, progress=progress
    )
    if plain.stat().st_size < SMALL_BYTES:
        return "f16", result
    source = source_open(base_model, None)
    texts = [prompt.ids[:CHECK_TOKENS] for prompt in check_prompts(source.tokenizer())]
    original = original_file(source.base)
    for quantization in (*((ORIGINAL,) if original else ()), "q8_0"):
        progress(f"comparing {quantization} with float16", 0, 0)
        file = folder / f"base-{quantization}.gguf"
        file.unlink(missing_ok=True)
        if quantization == ORIGINAL and original is not None:
            file.symlink_to(original)
        else:
            quantise(plain, file, quantization)
        found = agreement(plain, file, texts)
        facts = f"{quantization}: KL divergence from float16 {found.kl:.2g} nats per token, same most likely token at "
        result.notes.append(f"{facts}{100 * found.top1:.1f} %")
        if found.is_shown:
            plain.unlink()
            return quantization, replace(result, files=[exported_file(file)])
        file.unlink()
    return "f16", result


@dataclass(frozen=True)
class FileAgreement:
    """Agreement of a GGUF file with another one of the same model."""

    kl: float
    """Mean KL divergence, in nats per token."""
    top1: float
    """Share of positions where both have the same most likely token."""

    @property
    def is_shown(self) -> bool:
        return self.kl <= AGREED_KL and self.top1 >= AGREED_TOP1


def agreement(plain: Path, quantised: Path, texts: Sequence[Sequence[int]]) -> FileAgreement:
    """Compare what two files say after each token of some texts."""
    divergence, same, positions = 0.0, 0, 0
    context = max(64, *(len(ids) for ids in texts))
    with llama_opened(plain, context) as one, llama_opened(quantised, context) as other:
        for ids in texts:
            expected, found = (llama_log_probabilities(llama, ids, len(ids)) for llama in (one, other))
            shares = np.exp(expected.astype(np.float64))
            divergence += float((shares * (expected - found)).sum())
            same += int((expected.argmax(-1) == found.argmax(-1)).sum())
            positions += len(ids)
    return FileAgreement(max(divergence / positions, 0.0), same / positions)


def original_file(folder: Path) -> Path | None:
    """The GGUF file that a base's folder was de-quantised from; None where it has none, or another one by now."""
    if not (folder / ADDED_FILE).is_file():
        return None
    added = AddedModel.load(folder)
    file = folder / added.gguf
    if not added.gguf or not file.is_file() or sha256_file(file) != added.gguf_sha256:
        return None
    return file.resolve()
