"""Export of a policy or base model as one GGUF file for llama.cpp and Ollama: merged, quantised, checked."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from rl.agents.base import Message
from rl.export.agreement import Expected, ExportAgreement, Measured, closeness
from rl.export.artifact import (
    ExportedFile,
    ExportRefused,
    ExportResult,
    Progress,
    exported_file,
    silent,
    staged_file,
)
from rl.export.gguf_runtime import (
    FILE_TYPES,
    PLAIN,
    checked_facts,
    gguf_measured,
    gguf_read,
    llama_log_probabilities,
    llama_opened,
    plain_check,
    quantise,
)
from rl.export.gguf_write import WIDTH, TooLarge, identity_of, writer_for
from rl.export.reference import CHECK_TOKENS, Reference, check_prompts, reference_make
from rl.export.source import Source, original_of, source_open

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
    prompts: Sequence[Sequence[Message]] = (),
    progress: Progress | None = None,
) -> ExportResult:
    """Writes base + adapter as one GGUF file, tensor by tensor, with tokenizer and chat template.

    base_model: `bundled`, a folder or a Hugging Face name; None uses the adapter's. output: a file name, or a folder
    for a file with the specification's name (`identity_of`); an older file is replaced at the end. quantization: one of
    QUANTIZATIONS. model_name: `general.name`. system_prompt: system turn of the chat template for conversations without
    one. prompts: held-out prompts, whose answers are compared beside fixed texts in several scripts.

    The unquantised file must open in the gguf package and in llama.cpp, split the prompts into the same tokens and give
    the same log-probabilities as the original. The quantised file, and the base alone quantised the same way, are
    measured: `agreement` in `checked` (`rl.export.agreement`). Memory stays near one copy of the weights. Raises
    ExportRefused and leaves nothing behind.
    """
    progress = progress or silent
    if quantization not in QUANTIZATIONS:
        raise ExportRefused(f"expected a quantization of {', '.join(QUANTIZATIONS)}; found {quantization!r}")
    source = source_open(base_model, adapter)
    identity = identity_of(source, model_name)
    writer = writer_for(source, system_prompt, identity)
    name = writer.general_name(model_name or source.name)
    if output.suffix != ".gguf":
        output = output / identity.file_name(quantization)
    test_prompts = check_prompts(source.tokenizer(), prompts)
    plain = quantization if quantization in PLAIN else "f16"
    is_quantised = quantization not in PLAIN
    notes = list(writer.notes)

    with staged_file(output, _staging_bytes(source, plain, quantization)) as staging:
        reference = reference_make(source, test_prompts, with_base=is_quantised, progress=progress)
        if reference.skip_reason:
            notes.append(f"log-probabilities were not compared: {reference.skip_reason}")
        first = staging.with_name(f"{plain}.gguf") if is_quantised else staging
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
        progress("comparing with the original", 0, 0)
        # a file that is quantised next is compared on the fixed texts only
        asked = [text for text in reference.policy if not (is_quantised and text.held_out)]
        policy = gguf_measured(first, test_prompts, asked)
        if policy is not None:
            plain_check(policy, plain, writer.notes)
        base, before = None, {}
        if is_quantised:
            progress(f"quantising to {quantization}", 0, 0)
            quantise(first, staging, quantization)
            first.unlink()
            progress("comparing the quantised file", 0, 0)
            if policy is not None:
                before = {
                    "before_quantization": {"type": plain, **policy.texts.model_dump(exclude_none=True)}
                }
            policy = gguf_measured(staging, test_prompts, reference.policy)
            if reference.base:
                base = _base_measured(source, reference, first, plain, quantization, progress)
        facts, stored = gguf_read(staging, tensors, quantization)
        progress("checked", 1, 1)
        made = exported_file(staging)
    checked = {**facts, **checked_facts(reference, policy, base), **before}
    return ExportResult("gguf", [ExportedFile(output, made.bytes, made.sha256)], checked, notes + stored)


def _base_measured(
    source: Source,
    reference: Reference,
    plain_file: Path,
    plain: str,
    quantization: str,
    progress: Progress,
) -> Measured | None:
    """Agreement of the base alone, quantised the same way; needs two temporary files beside the export."""
    alone = source.without_adapter()
    progress("quantising the base model to compare", 0, 0)
    writer = writer_for(alone)
    writer.write(plain_file, plain, writer.general_name(alone.name), progress)
    quantised = plain_file.with_name("base.gguf")
    quantise(plain_file, quantised, quantization)
    plain_file.unlink()
    progress("comparing the quantised base model", 0, 0)
    found = gguf_measured(quantised, reference.prompts, reference.base)
    quantised.unlink()
    return found


def _staging_bytes(source: Source, plain: str, quantization: str) -> int:
    """Most bytes of the staging folder: a plain file, and quantised ones at up to 8.5 bits per weight."""
    parameters = source.weights.base.parameters
    size = parameters * WIDTH[plain]
    if quantization not in PLAIN:
        # the policy's, and for a while the base's
        size += 2 * (parameters * 17 // 16)
    return size


# --- The file that serves a base model ---


SMALL_BYTES = 64 * 1024**2
"""Smaller float16 files are fast enough unquantised."""
ORIGINAL = "original"
"""Quantisation of a base's own GGUF file, whatever it is."""


def serving_file_write(
    base_model: str, folder: Path, *, progress: Progress | None = None
) -> tuple[str, ExportResult]:
    """Writes `base-<quantisation>.gguf` into a folder: (quantisation, result). Raises ExportRefused.

    Tried in order: the GGUF file that the base was de-quantised from, as a link; q8_0; float16. Float16 is compared
    with the base itself, the other two with the float16 file on the texts of `check_prompts`.
    """
    progress = progress or silent
    plain = folder / "base-f16.gguf"
    result = export_gguf(base_model, None, plain, quantization="f16", progress=progress)
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
