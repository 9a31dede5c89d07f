"""A policy's adapter alone as GGUF, to be loaded on the base's GGUF file in llama.cpp and switched while it runs."""

from __future__ import annotations

from pathlib import Path

import gguf
import torch

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
from rl.export.gguf_names import FAMILIES, TensorLayout, layout_of
from rl.export.gguf_tokenizer import chat_template_of
from rl.export.gguf_write import WIDTH, tensor_announce, tensor_stored, writer_for
from rl.export.reference import check_prompts, reference_make
from rl.export.source import Source, source_open
from rl.export.weights import LoraPair, MergedWeights


def export_gguf_lora(
    base_model: str | None,
    adapter: Path,
    output: Path,
    *,
    model_name: str | None = None,
    progress: Progress | None = None,
) -> ExportResult:
    """Write an adapter as a GGUF LoRA: for each weight it changes `<name>.lora_a` and `<name>.lora_b`, float32.

    base_model: as in `export_gguf`; its family must be one of FAMILIES. output: a file name, or a folder to write the
    file into under the specification's name (see gguf_identity). It is checked by opening a temporary float16 GGUF of
    the base in llama.cpp with the adapter on it and comparing the log-probabilities with base + adapter under PEFT.
    Raises ExportRefused; then nothing is left behind.
    """
    progress = progress or silent
    source = source_open(base_model, adapter)
    layout = layout_of(source.weights.base.config)
    if layout is None:
        raise ExportRefused(
            f"expected an adapter for one of the families {', '.join(FAMILIES)}, found one for "
            f"{source.weights.base.model_type!r}; export it as lora or merged instead"
        )
    if source.weights.replaced_names():
        raise ExportRefused(
            "expected an adapter of LoRA pairs only, found whole tensors in it "
            f"({', '.join(source.weights.replaced_names()[:3])}), which a GGUF adapter cannot hold; "
            "export the policy as gguf instead"
        )
    if output.suffix != ".gguf":
        output = output / identity_of(source, model_name).file_name("f32", adapter=True)
    base_writer = writer_for(
        Source(source.base_name, source.base, None, MergedWeights(source.weights.base, None))
    )
    test_prompts = check_prompts(source.tokenizer())
    needed = (
        source.weights.base.parameters * WIDTH["f16"]
        + (adapter / "adapter_model.safetensors").stat().st_size * 2
    )
    with staged_file(output, needed) as staged:
        reference = reference_make(source, test_prompts, progress=progress)
        tensors = lora_write(source, layout, staged, model_name or source.name)
        base = staged.with_name("base.gguf")
        base_writer.write(base, "f16", base_writer.general_name(source.name), progress)
        progress("comparing with the original", 0, 0)
        checked = gguf_check(base, reference, quantization="f16", lora=staged)
        facts, _ = gguf_read(staged, tensors, "f32")
        made = exported_file(staged)
    notes = [f"log-probabilities were not compared: {reference.skip_reason}"] if reference.skip_reason else []
    return ExportResult(
        "gguf-lora", [ExportedFile(output, made.bytes, made.sha256)], {**facts, **checked}, notes
    )


def lora_write(source: Source, layout: TensorLayout, path: Path, name: str) -> int:
    """Write the adapter's file, unchecked; the number of tensors in it."""
    pairs = list(source.weights.pairs())
    names = layout.names([pair.target for pair in pairs])
    if any(names[pair.target] == "token_embd.weight" for pair in pairs):
        raise ExportRefused(
            "expected an adapter of linear layers, found one that changes the embedding table; "
            "export the policy as gguf instead"
        )
    alphas = {round(pair.scale * pair.a.shape[0], 6) for pair in pairs}
    writer = gguf.GGUFWriter(path, layout.family.name)
    writer.add_type(gguf.GGUFType.ADAPTER)
    writer.add_name(name)
    identity_of(source, name).write(writer)
    writer.add_string("adapter.type", "lora")
    # llama.cpp scales by alpha / rank; where the modules differ, the scale goes into B and 0 means "no scale"
    uniform = len(alphas) == 1
    writer.add_float32("adapter.lora.alpha", alphas.pop() if uniform else 0.0)
    # the base's file may carry another template, or one that stands in for none
    writer.add_chat_template(chat_template_of(source.tokenizer()))
    for pair in pairs:
        tensor_announce(writer, f"{names[pair.target]}.lora_a", tuple(pair.a.shape), "f32")
        tensor_announce(writer, f"{names[pair.target]}.lora_b", tuple(pair.b.shape), "f32")
    try:
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        for pair in pairs:
            writer.write_tensor_data(tensor_stored("", pair.a, "f32"))
            writer.write_tensor_data(tensor_stored("", _b(pair, layout, uniform), "f32"))
    finally:
        writer.close()
    return 2 * len(pairs)


def _b(pair: LoraPair, layout: TensorLayout, uniform: bool) -> torch.Tensor:
    rows = layout.rows(pair.target, pair.b)
    return rows if uniform else rows * pair.scale
