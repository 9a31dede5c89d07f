"""A policy as one GGUF file for llama.cpp and Ollama: LoRA merged on the way, quantised, checked before it is done."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path

from rl.agents.base import Message
from rl.export.artifact import (
    ExportedFile,
    ExportRefused,
    ExportResult,
    Progress,
    exported_file,
    silent,
    staged_file,
)
from rl.export.gguf_check import gguf_check, gguf_read
from rl.export.gguf_identity import identity_of
from rl.export.gguf_names import FAMILIES
from rl.export.gguf_runtime import FILE_TYPES, PLAIN, quantise
from rl.export.gguf_write import WIDTH, TooLarge, writer_for
from rl.export.reference import check_prompts, reference_make
from rl.export.source import Source, source_open
from rl.training.encoding import Encoder

QUANTIZATIONS = tuple(FILE_TYPES)
"""Values of `quantization`."""


def export_gguf(
    base_model: str | None,
    adapter: Path | None,
    output: Path,
    *,
    quantization: str = "q4_k_m",
    model_name: str | None = None,
    system_prompt: str | None = None,
    llama_cpp_path: str | None = None,
    prompts: Sequence[Sequence[Message]] = (),
    answer_tokens: int = 0,
    progress: Progress | None = None,
) -> ExportResult:
    """Write base + adapter as one GGUF file, tensor by tensor, with tokenizer and chat template inside.

    base_model: `bundled`, a folder or a Hugging Face name; None takes the one the adapter names. output: a file
    name, or a folder to write the file into under the specification's name (see gguf_identity); an older file there
    is replaced at the end.
    quantization: one of QUANTIZATIONS. model_name: `general.name`. system_prompt: said by the chat template where a
    conversation has no system turn. llama_cpp_path: a llama.cpp checkout, used for architectures not in FAMILIES.
    prompts: conversations to compare on, else a set of texts in several scripts; answer_tokens above 0 also compares
    greedy answers of that length.

    Before it is called done, the unquantised file is opened by the gguf package and by llama.cpp and must split the
    prompts into the same tokens and give the same log-probabilities as the original (see gguf_check); the quantised
    one is compared too, and its figures returned in `checked` (the unquantised one's under `before_quantization`).
    Memory stays near one copy of the weights. Raises ExportRefused; then nothing is left behind.
    """
    progress = progress or silent
    if quantization not in QUANTIZATIONS:
        raise ExportRefused(f"expected a quantization of {', '.join(QUANTIZATIONS)}; found {quantization!r}")
    source = source_open(base_model, adapter)
    identity = identity_of(source, model_name)
    writer = writer_for(source, system_prompt, llama_cpp_path, identity)
    name = writer.general_name(model_name or source.name)
    if output.suffix != ".gguf":
        output = output / identity.file_name(quantization)
    tokenizer = source.tokenizer()
    test_prompts = check_prompts(tokenizer, prompts)
    stop = Encoder(tokenizer).stop_ids
    plain = quantization if quantization in PLAIN else "f16"
    notes = list(writer.notes)

    with staged_file(output, _staging_bytes(source, plain, quantization)) as staging:
        reference = reference_make(source, test_prompts, answer_tokens, progress)
        if reference.skip_reason:
            notes.append(f"log-probabilities were not compared: {reference.skip_reason}")
        first = staging if quantization in PLAIN else staging.with_name(f"{plain}.gguf")
        try:
            tensors = writer.write(first, plain, name, progress)
        except TooLarge as error:
            if quantization == "f16":
                raise ExportRefused(
                    f"expected weights within float16's range (65504), found larger ones in {error}; "
                    "use --quantization bf16 or f32"
                ) from error
            plain = "bf16"
            tensors = writer.write(first, plain, name, progress)
        compare = partial(
            gguf_check,
            reference=reference,
            stop=stop,
            answer_tokens=answer_tokens,
            notes=writer.notes,
        )
        progress("comparing with the original", 0, 0)
        equality = compare(first, quantization=plain)
        if first != staging:
            progress(f"quantising to {quantization}", 0, 0)
            quantise(first, staging, quantization)
            progress("comparing the quantised file", 0, 0)
            before = {"type": plain, **equality}
            equality = compare(staging, quantization=quantization)
            equality["before_quantization"] = before
        facts, stored = gguf_read(staging, tensors, quantization)
        progress("checked", 1, 1)
        made = exported_file(staging)
    return ExportResult(
        "gguf", [ExportedFile(output, made.bytes, made.sha256)], {**facts, **equality}, notes + stored
    )


def _staging_bytes(source: Source, plain: str, quantization: str) -> int:
    """Bytes the staging folder holds at most: the plain file, and a quantised one at up to 8.5 bits a weight."""
    parameters = source.weights.base.parameters
    size = parameters * WIDTH[plain]
    if quantization not in PLAIN:
        size += parameters * 17 // 16
    if source.weights.base.model_type not in FAMILIES:
        size += source.weights.base.total_bytes
    return size
