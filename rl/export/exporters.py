"""Table of exporters: formats of a policy and their writers, imported on use. Pure."""

from __future__ import annotations

import os
import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rl.export.artifact import ExportedFile, ExportRefused, ExportResult, sha256_file
from rl.linear.model import WEIGHTS, LinearPolicy, LinearPolicyError

ADAPTER, LINEAR = "adapter", "linear"

OPTIONS = ("quantization", "model_name", "system_prompt", "prompts")
"""Keyword arguments that a writer may take beside `progress`; `prompts` are the agent's held-out prompts."""


@dataclass(frozen=True)
class Exporter:
    """A format of a policy for other programs."""

    name: str
    """Name in `export_model --format`."""
    writer: str
    """`module:function`, imported on use. For an adapter `(base_model, adapter, output, *, progress, ...)`, for a
    linear policy `(policy, output)`. Returns an `rl.export.artifact.ExportResult` of files that were compared with the
    original, or raises ExportRefused and leaves nothing behind."""
    title: str
    """Its files and their readers, in a few words."""
    policy_kind: str = ADAPTER
    """Kind of policy: `adapter` or `linear`."""
    options: tuple[str, ...] = ()
    """OPTIONS that its writer takes."""
    names_file: bool = False
    """True if the writer names the file in the policy's folder; else it gets a folder with the exporter's name."""


EXPORTERS: dict[str, Exporter] = {
    exporter.name: exporter
    for exporter in (
        Exporter(
            "merged",
            "rl.export.hugging_face:export_merged",
            "a Hugging Face folder with the adapter merged in",
            options=("prompts",),
        ),
        Exporter("lora", "rl.export.hugging_face:export_lora", "the adapter's folder, for PEFT"),
        Exporter("onnx", "rl.export.onnx:export_onnx", "an ONNX folder in float32", options=("prompts",)),
        Exporter(
            "gguf",
            "rl.export.gguf:export_gguf",
            "one file for llama.cpp and Ollama",
            options=OPTIONS,
            names_file=True,
        ),
        Exporter(
            "gguf-lora",
            "rl.export.gguf_lora:export_gguf_lora",
            "the adapter alone, for llama.cpp and Ollama",
            options=("model_name", "prompts"),
        ),
        Exporter(
            "linear",
            "rl.export.exporters:export_linear",
            "a linear policy's own JSON",
            policy_kind=LINEAR,
            names_file=True,
        ),
    )
}
"""Name -> exporter: built-in ones, and plugins' once registered."""

NAME = r"[a-z0-9][a-z0-9_-]{0,15}"
DOTTED_PATH = r"[A-Za-z_][\w.]*:[A-Za-z_]\w*"


def exporters_of(kind: str) -> list[str]:
    return [name for name, exporter in EXPORTERS.items() if exporter.policy_kind == kind]


def exporter_register(name: str, found: Any) -> None:
    """Registers a plugin's exporter (`backend.plugins`). Raises ValueError if it is none, or its name is taken."""
    if not isinstance(found, Exporter):
        raise ValueError(f"expected an Exporter (rl.export.exporters), found {found!r:.80}")
    if EXPORTERS.get(found.name) == found:
        return
    if not re.fullmatch(NAME, str(found.name)):
        raise ValueError(f"expected a name of up to 16 small letters, digits, _ and -, found {found.name!r}")
    if found.name in EXPORTERS:
        raise ValueError(f"the name {found.name!r} is taken by another exporter: choose another name")
    if not re.fullmatch(DOTTED_PATH, str(found.writer)):
        raise ValueError(
            f"exporter {found.name}: expected its writer as `module:function`, found {found.writer!r}"
        )
    if found.policy_kind not in (ADAPTER, LINEAR):
        raise ValueError(
            f"exporter {found.name}: expected `policy_kind` as {ADAPTER} or {LINEAR}, found {found.policy_kind!r}"
        )
    if unknown := sorted(set(found.options) - set(OPTIONS)):
        raise ValueError(
            f"exporter {found.name}: expected options of {', '.join(OPTIONS)}, found {', '.join(unknown)}"
        )
    EXPORTERS[found.name] = found


def export_linear(policy: Path, output: Path) -> ExportResult:
    """Copies the file of a linear policy. output: a file name ending in `.json`, or a folder.

    Raises ExportRefused if there is no linear policy, or the copy differs.
    """
    target = output if output.suffix == ".json" else output / WEIGHTS
    try:
        LinearPolicy.load(policy)
        target.parent.mkdir(parents=True, exist_ok=True)
        half = target.with_name(f".{target.name}.{os.getpid()}")
        shutil.copyfile(policy / WEIGHTS, half)
        half.replace(target)
    except (LinearPolicyError, OSError) as error:
        raise ExportRefused(f"expected the linear policy {policy} to copy to {target}: {error}") from error
    found, expected = sha256_file(target), sha256_file(policy / WEIGHTS)
    if found != expected:
        raise ExportRefused(f"{target} has SHA-256 {found[:16]}, expected {expected[:16]}: is the disk full?")
    return ExportResult(
        "linear",
        [ExportedFile(target, target.stat().st_size, found)],
        {"same_bytes": True},
        [
            "a linear policy has no base model, so there is no merged model, LoRA, ONNX or GGUF of it; docs/linear.md "
            "says how another program reads its file"
        ],
    )
