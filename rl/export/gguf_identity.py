"""Identity of an exported model by the GGUF specification: file name, and `general.*` keys of base, size and version.

Source: ggml-org/ggml docs/gguf.md, "GGUF Naming Convention": `<BaseName>-<SizeLabel>-<FineTune>-<Version>-<Encoding>
[-<Type>].gguf`. BaseName may hold letters, digits and hyphens only, so that a file name can be split into its parts.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import gguf
from gguf.utility import naming_convention, size_label

from rl.bundled_models import BUNDLED
from rl.export.source import Source

BUNDLED_NAME = "Ratchet-bundled"
"""Base name of the model that comes with Ratchet."""
DEFAULT_VERSION = "v1.0"
"""Version the specification has where none is named."""

_SIZE = re.compile(r"(?:^|-)(\d+(?:\.\d+)?[KMBT])(?=-|$)", re.IGNORECASE)
_VERSION = re.compile(r"-(v\d+(?:\.\d+)*)$")


@dataclass(frozen=True)
class Identity:
    """Parts of a model's name, as the specification has them."""

    base_name: str
    size_label: str
    """Number of the base's parameters, rounded: `3.4M`, `0.6B`."""
    finetune: str
    """Purpose of the training: the agent's slug; empty for a base alone."""
    version: str
    base_model: str
    """The base as it was named: `bundled`, `Qwen/Qwen3-0.6B`, a folder's name."""

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
        """Write the `general.*` keys; `general.base_model.*` names the parent of a fine-tuned model."""
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
        # the specification has no part of a base name that begins with a digit and goes on in letters
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
