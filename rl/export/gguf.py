"""A policy as one GGUF file for llama.cpp and Ollama: LoRA merged on the way, quantised, checked before it is done."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch

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
from rl.export.gguf_check import fallback_notes, gguf_check
from rl.export.gguf_names import FAMILIES, Layout, layout_notes, layout_of
from rl.export.gguf_runtime import FILE_TYPES, PLAIN, quantise
from rl.export.gguf_tokenizer import Vocabulary, chat_template_with, vocabulary_of
from rl.export.merged import merged_write
from rl.export.reference import check_prompts, reference_make
from rl.export.source import Source, source_open
from rl.training.encoding import Encoder

QUANTIZATIONS = tuple(FILE_TYPES)
"""What `quantization` may be."""

_WIDTH = {"f32": 4, "f16": 2, "bf16": 2}
_TENSOR_TYPES = {
    "f32": gguf.GGMLQuantizationType.F32,
    "f16": gguf.GGMLQuantizationType.F16,
    "bf16": gguf.GGMLQuantizationType.BF16,
}
_CONVERTER = "convert_hf_to_gguf.py"


class _TooLarge(Exception):
    """A weight that float16 cannot hold; its argument is the tensor's name."""


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
    name, or a folder to write `<name>-<quantization>.gguf` into; an older file there is replaced at the end.
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
    writer = _writer(source, system_prompt, llama_cpp_path)
    name = writer.general_name(model_name or source.name)
    if output.suffix != ".gguf":
        output = output / f"{_slug(model_name or source.name)}-{quantization}.gguf"
    tokenizer = source.tokenizer()
    asked = check_prompts(tokenizer, prompts)
    progress("asking the original", 0, len(asked))
    reference = reference_make(source, asked, answer_tokens)
    stop = Encoder(tokenizer).stop_ids
    plain = quantization if quantization in PLAIN else "f16"
    notes = list(writer.notes)
    if reference.skipped:
        notes.append(f"log-probabilities were not compared: {reference.skipped}")

    with staged_file(output, _needed(source, plain, quantization)) as staged:
        first = staged if quantization in PLAIN else staged.with_name(f"{plain}.gguf")
        try:
            tensors = writer.write(first, plain, name, progress)
        except _TooLarge as error:
            if quantization == "f16":
                raise ExportRefused(
                    f"expected weights within float16's range (65504), found larger ones in {error}; "
                    "use --quantization bf16 or f32"
                ) from error
            plain = "bf16"
            tensors = writer.write(first, plain, name, progress)
        checked = gguf_check(
            first, reference, quantization=plain, tensors=tensors, stop=stop, answer_tokens=answer_tokens
        )
        if first != staged:
            progress(f"quantising to {quantization}", 0, 1)
            quantise(first, staged, quantization)
            before = {
                "type": plain,
                **{k: v for k, v in checked.items() if k not in ("architecture", "tensors")},
            }
            checked = gguf_check(
                staged,
                reference,
                quantization=quantization,
                tensors=tensors,
                stop=stop,
                answer_tokens=answer_tokens,
            )
            checked["before_quantization"] = before
            notes += fallback_notes(staged, quantization)
        progress("checked", 1, 1)
        made = exported_file(staged)
    return ExportResult("gguf", [ExportedFile(output, made.bytes, made.sha256)], checked, notes)


class _Native:
    """Writes the families this project knows."""

    def __init__(self, source: Source, layout: Layout, vocabulary: Vocabulary) -> None:
        self.source = source
        self.layout = layout
        self.vocabulary = vocabulary
        self.notes = [*vocabulary.notes, *layout_notes(layout.config)]

    def general_name(self, name: str) -> str:
        """llama.cpp drops white space after special tokens in models named phi-3, and only there."""
        looks_like_phi3 = re.search(r"phi-?3", name, re.IGNORECASE) is not None
        if self.vocabulary.strips_after_special and not looks_like_phi3:
            return f"{name} (phi-3)"
        if looks_like_phi3 and not self.vocabulary.strips_after_special:
            return re.sub(r"(phi)-?3", r"\1 3", name, flags=re.IGNORECASE)
        return name

    def write(self, path: Path, plain: str, name: str, progress: Progress) -> int:
        """Write the whole file; the number of tensors in it. One tensor is in memory at a time."""
        weights, base, layout = self.source.weights, self.source.weights.base, self.layout
        names, extra = layout.names(base.names), layout.extra()
        writer = gguf.GGUFWriter(path, layout.family.name)
        writer.add_type(gguf.GGUFType.MODEL)
        writer.add_name(name)
        writer.add_file_type(FILE_TYPES[plain])
        writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
        layout.family.parameters(writer, layout.config)
        self.vocabulary.write(writer)
        for target, tensor in extra.items():
            _announce(writer, target, tuple(tensor.shape), "f32")
        for checkpoint, target in names.items():
            shape = layout.shape(checkpoint, base.shape(checkpoint))
            _announce(writer, target, shape, _type_of(target, shape, plain))
        try:
            writer.write_header_to_file()
            writer.write_kv_data_to_file()
            writer.write_ti_data_to_file()
            for target, tensor in extra.items():
                writer.write_tensor_data(_stored(target, tensor, "f32"))
            for done, (checkpoint, target) in enumerate(names.items()):
                tensor = layout.tensor(checkpoint, weights.tensor(checkpoint))
                writer.write_tensor_data(
                    _stored(target, tensor, _type_of(target, tuple(tensor.shape), plain))
                )
                progress(f"writing {plain}", done + 1, len(names))
        finally:
            writer.close()
        return len(names) + len(extra)


class _External:
    """Lets a llama.cpp checkout write what this project does not know."""

    def __init__(self, source: Source, script: Path, system_prompt: str | None) -> None:
        self.source = source
        self.script = script
        self.template = chat_template_with(source.tokenizer(), system_prompt) if system_prompt else None
        self.notes = [f"written by {_CONVERTER} of the llama.cpp checkout in LLAMA_CPP_PATH"]

    def general_name(self, name: str) -> str:
        return name

    def write(self, path: Path, plain: str, name: str, progress: Progress) -> None:
        """Merge into a folder beside `path`, convert it, throw the folder away."""
        folder = path.with_name("merged")
        folder.mkdir()
        merged_write(self.source, folder, progress)
        if self.template is not None:
            (folder / "chat_template.jinja").write_text(self.template, "utf-8")
        progress("converting", 0, 1)
        command = [sys.executable, str(self.script), str(folder), "--outfile", str(path), "--outtype", plain]
        done = subprocess.run(  # noqa: S603 - the operator named this program in the settings
            [*command, "--model-name", name], capture_output=True, text=True, check=False
        )
        for file in folder.iterdir():
            file.unlink()
        folder.rmdir()
        if done.returncode != 0 or not path.is_file():
            said = (done.stderr or done.stdout).strip().splitlines()
            raise ExportRefused(
                f"expected {self.script} to convert the merged model, found it ended with code {done.returncode}: "
                f"{said[-1] if said else 'no message'}"
            )


def _writer(source: Source, system_prompt: str | None, llama_cpp_path: str | None) -> _Native | _External:
    layout = layout_of(source.weights.base.config)
    if layout is not None:
        rows = source.weights.base.shape(_embedding(layout, source))[0]
        return _Native(source, layout, vocabulary_of(source.tokenizer(), rows, system_prompt))
    kind = source.weights.base.model_type
    if not llama_cpp_path:
        raise ExportRefused(
            f"expected a model of the families {', '.join(FAMILIES)} for GGUF, found {kind!r}; set LLAMA_CPP_PATH to a "
            f"llama.cpp checkout to use its {_CONVERTER}, or export the model as merged"
        )
    given = Path(llama_cpp_path).expanduser()
    script = given if given.is_file() else given / _CONVERTER
    if not script.is_file():
        raise ExportRefused(
            f"expected a llama.cpp checkout with {_CONVERTER} in LLAMA_CPP_PATH, found none at {script}"
        )
    return _External(source, script, system_prompt)


def _embedding(layout: Layout, source: Source) -> str:
    for checkpoint, target in layout.names(source.weights.base.names).items():
        if target == "token_embd.weight":
            return checkpoint
    raise ExportRefused(f"expected an embedding table in {source.base}, found none among its tensors")


def _type_of(name: str, shape: tuple[int, ...], plain: str) -> str:
    """llama.cpp reads vectors, norms, positions and rotation factors as float32 only."""
    kept = len(shape) < 2 or name.endswith("_norm.weight") or name.startswith(("position_embd", "rope_"))
    return "f32" if kept else plain


def _announce(writer: gguf.GGUFWriter, name: str, shape: tuple[int, ...], kind: str) -> None:
    size = int(np.prod(shape)) * _WIDTH[kind]
    writer.add_tensor_info(name, shape, np.dtype(np.float32), size, raw_dtype=_TENSOR_TYPES[kind])


def _stored(name: str, tensor: torch.Tensor, kind: str) -> np.ndarray[Any, Any]:
    """A tensor as the bytes GGUF keeps."""
    if kind == "f32":
        return tensor.to(torch.float32).contiguous().numpy()
    if kind == "bf16":
        return tensor.to(torch.bfloat16).contiguous().view(torch.int16).numpy()
    half = tensor.to(torch.float16).contiguous()
    if not bool(torch.isfinite(half).all()) and bool(torch.isfinite(tensor).all()):
        raise _TooLarge(name)
    return half.numpy()


def _needed(source: Source, plain: str, quantization: str) -> int:
    """Bytes the staging folder holds at most: the plain file, and a quantised one at up to 8.5 bits a weight."""
    parameters = source.weights.base.parameters
    size = parameters * _WIDTH[plain]
    if quantization not in PLAIN:
        size += parameters * 17 // 16
    if source.weights.base.model_type not in FAMILIES:
        size += source.weights.base.total_bytes
    return size


def _slug(name: str) -> str:
    return re.sub(r"[^A-Za-z0-9._-]+", "-", name).strip("-.") or "model"
