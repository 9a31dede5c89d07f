"""The GGUF file that serves a base model: quantised where it agrees with the base, else float16."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from rl.export.agreement import Expected, ExportAgreement, Measured, closeness
from rl.export.artifact import ExportResult, Progress, exported_file, silent
from rl.export.gguf import export_gguf
from rl.export.gguf_runtime import llama_log_probabilities, llama_opened, quantise
from rl.export.reference import CHECK_TOKENS, check_prompts
from rl.export.source import original_of, source_open

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
    original, note = original_of(source.base)
    if note:
        result.notes.append(note)
    for quantization in (*((ORIGINAL,) if original else ()), "q8_0"):
        progress(f"comparing {quantization} with float16", 0, 0)
        file = folder / f"base-{quantization}.gguf"
        file.unlink(missing_ok=True)
        if quantization == ORIGINAL and original is not None:
            file.symlink_to(original.file.resolve())
        else:
            quantise(plain, file, quantization)
        found = agreement(plain, file, texts)
        result.notes.append(f"{quantization} beside float16: {' '.join(found.words())}")
        if found.verdict == "same":
            plain.unlink()
            return quantization, replace(result, files=[exported_file(file)])
        file.unlink()
    return "f16", result


def agreement(plain: Path, quantised: Path, texts: Sequence[Sequence[int]]) -> ExportAgreement:
    """Agreement of a quantised file with the float16 file after each token of some texts."""
    context = max(64, *(len(ids) for ids in texts))
    with llama_opened(plain, context) as one, llama_opened(quantised, context) as other:

        def expected() -> Iterator[Expected]:
            for ids in texts:
                found = llama_log_probabilities(one, ids, len(ids))
                yield Expected(list(ids), found.argmax(-1).tolist(), found)

        compared = closeness(expected(), lambda ids, last: llama_log_probabilities(other, ids, last))
    return ExportAgreement(policy=Measured(texts=compared))
