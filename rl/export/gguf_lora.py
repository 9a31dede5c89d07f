"""Export of a policy's adapter as GGUF, which llama.cpp loads on the base's GGUF file and switches while running."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import gguf
import torch

from rl.agents.base import Message
from rl.export.agreement import ExportAgreement, Measured
from rl.export.artifact import (
    ExportedFile,
    ExportRefused,
    ExportResult,
    Progress,
    exported_file,
    manifest_write,
    silent,
    staged_file,
    staged_folder,
)
from rl.export.gguf import WIDTH, identity_of, tensor_announce, tensor_stored, writer_for
from rl.export.gguf_names import FAMILIES, TensorLayout, layout_of
from rl.export.gguf_runtime import checked_facts, gguf_measured, gguf_read, plain_check
from rl.export.gguf_tokenizer import chat_template_of
from rl.export.ollama import modelfile
from rl.export.reference import Reference, check_prompts, reference_make
from rl.export.source import Original, Source, original_of, source_open
from rl.export.weights import LoraPair

QUANTISED_BAR, QUANTISED_SHARE = 0.1, 10.0
"""On a quantised base, a KL divergence above QUANTISED_BAR nats per token plus QUANTISED_SHARE times the base's own
means a wrong file, not rounding."""

_README = """# {name}

A LoRA adapter for `{base}`, trained with Ratchet on the weights of one file:

    {sha256}  {file}

It fits that file alone. Ollama and llama.cpp load it beside the file, which stays as it is:

    ollama create {name} -f Modelfile && ollama run {name}
    llama-server -m {path} --lora {adapter}

`Modelfile` names the base by its {place} on the machine that trained it: change `FROM` where that is another. Ollama
loads adapters of the architectures that its llama.cpp engine runs, and says so where it does not; the policy as one
file (`export_model --format gguf`) works with all.

{agreement}
"""

_README_PLAIN = """# {name}

A LoRA adapter for `{base}`, for llama.cpp. It fits a GGUF file of that model, in any quantisation:

    llama-server -m BASE.gguf --lora {adapter}

{agreement}
"""


def export_gguf_lora(
    base_model: str | None,
    adapter: Path,
    output: Path,
    *,
    model_name: str | None = None,
    prompts: Sequence[Sequence[Message]] = (),
    progress: Progress | None = None,
) -> ExportResult:
    """Writes an adapter as a GGUF LoRA: `<name>.lora_a` and `<name>.lora_b` per changed weight, float32.

    base_model: as in `export_gguf`; its family must be one of FAMILIES. output: a file name; or a new or empty folder,
    or an earlier export to replace, which gets the file under the specification's name (`identity_of`), a README and,
    for a base from a GGUF file, a Modelfile. prompts: as in `export_gguf`.

    llama.cpp compares it with base + adapter under PEFT: on the GGUF file the base was made from, whose SHA-256 must
    match, else on a temporary float16 GGUF of the base. Raises ExportRefused and leaves nothing behind.
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
    name = model_name or source.name
    needed = (adapter / "adapter_model.safetensors").stat().st_size * 2
    progress("looking for the base's GGUF file", 0, 0)
    original, note = original_of(source.base)
    notes = [f"{note}; compared on a float16 file of the base instead"] if note else []
    if original is None:
        needed += source.weights.base.parameters * WIDTH["f16"]
    test_prompts = check_prompts(source.tokenizer(), prompts)
    stage = staged_file(output, needed) if output.suffix == ".gguf" else staged_folder(output, needed)
    with stage as place:
        file = place
        if place.is_dir():
            file = place / identity_of(source, model_name).file_name("f32", adapter=True)
        reference = reference_make(source, test_prompts, with_base=True, progress=progress)
        tensors = lora_write(source, layout, file, name)
        progress("comparing with the original", 0, 0)
        if original is not None:
            policy, base = _quantised_check(original, file, reference)
            notes.append(f"checked on {original.file}, the file that the base model was made from")
        else:
            policy, base = _plain_check(source, file, reference, progress)
        facts, _ = gguf_read(file, tensors, "f32")
        checked = {**facts, **checked_facts(reference, policy, base)}
        if original is not None:
            checked["base_file"] = {"path": str(original.file), "sha256": original.sha256}
        if reference.skip_reason:
            notes.append(f"log-probabilities were not compared: {reference.skip_reason}")
        made = exported_file(file)
        if place.is_dir():
            words = ExportAgreement(policy=policy, base=base).words() if policy is not None else []
            (place / "README.md").write_text(_readme(source, name, original, file.name, words), "utf-8")
            if original is not None:
                jinja = chat_template_of(source.tokenizer())
                (place / "Modelfile").write_text(
                    modelfile(
                        original.ollama_name or original.file.resolve(),
                        original.file,
                        file.name,
                        jinja if isinstance(jinja, str) else "",
                    ),
                    "utf-8",
                )
            manifest_write(place, output, "gguf-lora", checked, notes)
    target = output if output.suffix == ".gguf" else output / made.path.name
    return ExportResult("gguf-lora", [ExportedFile(target, made.bytes, made.sha256)], checked, notes)


def _quantised_check(
    original: Original, lora: Path, reference: Reference
) -> tuple[Measured | None, Measured | None]:
    """Agreement of policy and base on the file the base was made from. Raises ExportRefused."""
    base = gguf_measured(original.file, reference.prompts, reference.base)
    policy = gguf_measured(original.file, reference.prompts, reference.policy, lora=lora)
    if policy is None or base is None:
        return policy, base
    bar = QUANTISED_BAR + QUANTISED_SHARE * base.texts.kl
    if not policy.texts.kl <= bar:
        raise ExportRefused(
            f"expected the adapter on {original.file.name} to answer like the trained policy (KL divergence at most "
            f"{bar:.2f} nats per token; the base alone has {base.texts.kl:.4f}), found {policy.texts.kl:.4f}; the "
            "export was thrown away, export the policy as gguf instead"
        )
    return policy, base


def _plain_check(
    source: Source, lora: Path, reference: Reference, progress: Progress
) -> tuple[Measured | None, Measured | None]:
    """Agreement of policy and base on a temporary float16 file of the base. Raises ExportRefused."""
    alone = source.without_adapter()
    writer = writer_for(alone)
    file = lora.with_name("base.gguf")
    writer.write(file, "f16", writer.general_name(source.name), progress)
    policy = gguf_measured(file, reference.prompts, reference.policy, lora=lora)
    if policy is not None:
        plain_check(policy, "f16", writer.notes)
    base = gguf_measured(file, reference.prompts, reference.base) if policy is not None else None
    file.unlink()
    return policy, base


def _readme(source: Source, name: str, original: Original | None, adapter: str, agreement: list[str]) -> str:
    base = source.base.name if source.base_name.startswith((".", "/", "~")) else source.base_name
    words = " ".join(agreement)
    if original is None:
        return _README_PLAIN.format(name=name, base=base, adapter=adapter, agreement=words)
    return _README.format(
        name=name,
        base=original.ollama_name or base,
        sha256=original.sha256,
        file=original.file.name,
        path=original.file,
        place="name" if original.ollama_name else "place",
        adapter=adapter,
        agreement=words,
    )


def lora_write(source: Source, layout: TensorLayout, path: Path, name: str) -> int:
    """Writes the adapter's file without checks. Returns its number of tensors."""
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
    # the base's file may have another template, or a substitute for a missing one
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
