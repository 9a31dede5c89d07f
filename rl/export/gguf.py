"""Export of a policy or base model as one GGUF file for llama.cpp and Ollama: merged, written, quantised, checked.

Names and `general.*` keys follow ggml-org/ggml docs/gguf.md, "GGUF Naming Convention":
`<BaseName>-<SizeLabel>-<FineTune>-<Version>-<Encoding>[-<Type>].gguf`. A base name has only letters, digits and
hyphens, so that a file name can be split into its parts.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import gguf
import numpy as np
import torch
from gguf.utility import naming_convention, size_label

from rl.agents.base import Message
from rl.bundled_models import BUNDLED
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
from rl.export.gguf_names import FAMILIES, TensorLayout, layout_notes, layout_of
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
from rl.export.gguf_tokenizer import Vocabulary, vocabulary_of
from rl.export.reference import CHECK_TOKENS, Reference, check_prompts, reference_make
from rl.export.source import Source, original_of, source_open

WIDTH = {"f32": 4, "f16": 2, "bf16": 2}
"""Bytes per weight of each plain type."""

_TENSOR_TYPES = {
    "f32": gguf.GGMLQuantizationType.F32,
    "f16": gguf.GGMLQuantizationType.F16,
    "bf16": gguf.GGMLQuantizationType.BF16,
}


class TooLarge(Exception):
    """A weight exceeds float16; the argument is the tensor's name."""


class GgufWriter:
    """Writes one model as a plain GGUF file."""

    def __init__(
        self, source: Source, layout: TensorLayout, vocabulary: Vocabulary, identity: Identity | None = None
    ) -> None:
        self.source = source
        self.identity = identity
        self.layout = layout
        self.vocabulary = vocabulary
        self.notes = [*vocabulary.notes, *layout_notes(layout.config)]

    def general_name(self, name: str) -> str:
        """llama.cpp drops white space after special tokens only in models named phi-3."""
        looks_like_phi3 = re.search(r"phi-?3", name, re.IGNORECASE) is not None
        if self.vocabulary.strips_after_special and not looks_like_phi3:
            return f"{name} (phi-3)"
        if looks_like_phi3 and not self.vocabulary.strips_after_special:
            return re.sub(r"(phi)-?3", r"\1 3", name, flags=re.IGNORECASE)
        return name

    def write(self, path: Path, plain: str, name: str, progress: Progress) -> int:
        """Writes the file as f32, f16 or bf16, one tensor in memory at a time. Returns its number of tensors.

        Raises TooLarge if f16 cannot hold a weight.
        """
        weights, base, layout = self.source.weights, self.source.weights.base, self.layout
        names, extra = layout.names(base.names), layout.extra()
        writer = gguf.GGUFWriter(path, layout.family.name)
        writer.add_type(gguf.GGUFType.MODEL)
        writer.add_name(name)
        if self.identity is not None:
            self.identity.write(writer)
        writer.add_file_type(FILE_TYPES[plain])
        writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
        layout.family.parameters(writer, layout.config)
        self.vocabulary.write(writer)
        for target, tensor in extra.items():
            tensor_announce(writer, target, tuple(tensor.shape), "f32")
        for checkpoint, target in names.items():
            shape = layout.shape(checkpoint, base.shape(checkpoint))
            tensor_announce(writer, target, shape, _type_of(target, shape, plain))
        try:
            writer.write_header_to_file()
            writer.write_kv_data_to_file()
            writer.write_ti_data_to_file()
            for target, tensor in extra.items():
                writer.write_tensor_data(tensor_stored(target, tensor, "f32"))
            for done, (checkpoint, target) in enumerate(names.items()):
                tensor = layout.tensor(checkpoint, weights.tensor(checkpoint))
                writer.write_tensor_data(
                    tensor_stored(target, tensor, _type_of(target, tuple(tensor.shape), plain))
                )
                progress(f"writing {plain}", done + 1, len(names))
        finally:
            writer.close()
        return len(names) + len(extra)


def writer_for(
    source: Source, system_prompt: str | None = None, identity: Identity | None = None
) -> GgufWriter:
    """The writer of a model; `identity` is written into the file. Raises ExportRefused for an unknown family."""
    layout = layout_of(source.weights.base.config)
    if layout is None:
        raise ExportRefused(
            f"expected a model of the families {', '.join(FAMILIES)} for GGUF, found "
            f"{source.weights.base.model_type!r}; export it as merged, and convert the folder with llama.cpp's "
            "convert_hf_to_gguf.py"
        )
    rows = source.weights.base.shape(_embedding(layout, source))[0]
    return GgufWriter(source, layout, vocabulary_of(source.tokenizer(), rows, system_prompt), identity)


def _embedding(layout: TensorLayout, source: Source) -> str:
    for checkpoint, target in layout.names(source.weights.base.names).items():
        if target == "token_embd.weight":
            return checkpoint
    raise ExportRefused(f"expected an embedding table in {source.base}, found none among its tensors")


def _type_of(name: str, shape: tuple[int, ...], plain: str) -> str:
    """llama.cpp reads vectors, norms, positions and rotation factors only as float32."""
    stays_float = (
        len(shape) < 2 or name.endswith("_norm.weight") or name.startswith(("position_embd", "rope_"))
    )
    return "f32" if stays_float else plain


def tensor_announce(writer: gguf.GGUFWriter, name: str, shape: tuple[int, ...], kind: str) -> None:
    """Reserves a tensor's place; its bytes are written later, in the same order."""
    size = math.prod(shape) * WIDTH[kind]
    writer.add_tensor_info(name, shape, np.dtype(np.float32), size, raw_dtype=_TENSOR_TYPES[kind])


def tensor_stored(name: str, tensor: torch.Tensor, kind: str) -> np.ndarray:
    """A tensor as the bytes in the file."""
    if kind == "f32":
        return tensor.to(torch.float32).contiguous().numpy()
    if kind == "bf16":
        return tensor.to(torch.bfloat16).contiguous().view(torch.int16).numpy()
    half = tensor.to(torch.float16).contiguous()
    if not bool(torch.isfinite(half).all()) and bool(torch.isfinite(tensor).all()):
        raise TooLarge(name)
    return half.numpy()


# --- Identity of a file ---


BUNDLED_NAME = "Ratchet-bundled"
"""Base name of the bundled model."""
DEFAULT_VERSION = "v1.0"
"""The specification's version if none is named."""

_SIZE = re.compile(r"(?:^|-)(\d+(?:\.\d+)?[KMBT])(?=-|$)", re.IGNORECASE)
_VERSION = re.compile(r"-(v\d+(?:\.\d+)*)$")


@dataclass(frozen=True)
class Identity:
    """Parts of a model's name in the specification."""

    base_name: str
    size_label: str
    """Rounded number of the base's parameters: `3.4M`, `0.6B`."""
    finetune: str
    """The agent's slug; empty for a base alone."""
    version: str
    base_model: str
    """The base as named: `bundled`, `Qwen/Qwen3-0.6B`, a folder's name."""

    def file_name(self, encoding: str, *, adapter: bool = False) -> str:
        """`Qwen3-0.6B-support-bot-v214-Q4_K_M.gguf`; an adapter's ends in `-F32-LoRA.gguf`."""
        name = naming_convention(
            None,
            self.base_name,
            self.finetune or None,
            self.version,
            self.size_label,
            encoding,
            "LoRA" if adapter else None,
        )
        return f"{name}.gguf"

    def write(self, writer: gguf.GGUFWriter) -> None:
        """Writes the `general.*` keys; `general.base_model.*` names the parent of a fine-tuned model."""
        writer.add_basename(self.base_name)
        writer.add_size_label(self.size_label)
        writer.add_version(self.version)
        if not self.finetune:
            return
        writer.add_finetune(self.finetune)
        writer.add_base_model_count(1)
        organization, _, name = self.base_model.rpartition("/")
        writer.add_base_model_name(0, name)
        if re.fullmatch(r"[\w.-]+", organization):  # a name of the hub, `organization/model`, and not a path
            writer.add_base_model_organization(0, organization)
            writer.add_base_model_repo_url(0, f"https://huggingface.co/{self.base_model}")


def identity_of(source: Source, model_name: str | None = None) -> Identity:
    """The identity of a base with its adapter.

    model_name: a policy's name such as `support-bot-v214`, whose end is the version; by default the adapter's folder.
    """
    named = _SIZE.split(re.sub(r"[_\s]+", "-", _last_part(source)), maxsplit=1)
    base, rest = named[0], named[2] if len(named) > 1 else ""
    label = named[1].upper() if len(named) > 1 else size_label(source.weights.base.parameters, 0, 0, 0)
    version = DEFAULT_VERSION
    finetune = [_plain(rest)]
    if source.adapter is not None:
        name = model_name or source.name
        if found := _VERSION.search(name):
            version, name = found[1], name[: found.start()]
        finetune.append(_plain(name))
    return Identity(
        # the specification allows no part of a base name that begins with a digit and continues in letters
        base_name=re.sub(r"-(?=\d+[A-Za-z])", "", _plain(base)) or "model",
        size_label=label,
        finetune="-".join(part for part in finetune if part),
        version=version,
        base_model=source.base.name if source.base_name.startswith((".", "/", "~")) else source.base_name,
    )


def _last_part(source: Source) -> str:
    return BUNDLED_NAME if source.base_name == BUNDLED else source.base_name.rstrip("/").rpartition("/")[2]


def _plain(name: str) -> str:
    """Letters, digits and hyphens alone."""
    return re.sub(r"[^A-Za-z0-9]+", "-", name).strip("-")


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
