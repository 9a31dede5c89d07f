"""Source of an export: the base model's folder, the adapter on it, and their tokenizer."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

from transformers import AutoTokenizer

from rl.base_models.sources import AddedModel, SourceRefused
from rl.bundled_models import ADDED_FILE, resolve_base_model
from rl.chat_templates import DEFAULT_CHAT_TEMPLATE, template_read
from rl.checksums import TEMPLATE_FILES, TOKENIZER_FILES, base_files, base_hash, file_sum
from rl.export.artifact import ExportRefused
from rl.export.weights import Adapter, BaseWeights, MergedWeights, adapter_open
from rl.training.loading import base_changes

CONFIG_FILES = ("config.json", "generation_config.json")
LICENSE_FILES = ("LICENSE", "LICENSE.txt", "LICENSE.md", "NOTICE", "NOTICE.txt", "USE_POLICY.md")


@dataclass(frozen=True)
class Original:
    """The GGUF file that a base model was de-quantised from (`rl.base_models.sources`)."""

    file: Path
    sha256: str
    ollama_name: str = ""
    """Name of the model in Ollama's store; empty for other sources."""


def original_of(folder: Path) -> tuple[Original | None, str]:
    """The GGUF file a base's folder was made from, and a note if it is gone or has changed."""
    if not (folder / ADDED_FILE).is_file():
        return None, ""
    try:
        added = AddedModel.load(folder)
    except SourceRefused as refusal:
        raise ExportRefused(str(refusal)) from refusal
    if not added.gguf:
        return None, ""
    file = folder / added.gguf
    if not file.is_file():
        return None, f"{file}, which the base model was made from, is not there any more"
    if (found := file_sum(file)) != added.gguf_sha256:
        return None, (
            f"{file} is another file than the one that the base model was made from (SHA-256 {found[:16]}, expected "
            f"{added.gguf_sha256[:16]}): the adapter does not fit it"
        )
    name = added.source.removeprefix("ollama:") if added.kind == "ollama" else ""
    return Original(file, added.gguf_sha256, name), ""


@dataclass(frozen=True)
class Source:
    """A base model (name and folder) with or without an adapter."""

    base_name: str
    base: Path
    adapter: Adapter | None
    weights: MergedWeights

    @property
    def tokenizer_folder(self) -> Path:
        """The adapter's folder if it has a tokenizer, else the base's."""
        if self.adapter is not None and (self.adapter.path / "tokenizer_config.json").is_file():
            return self.adapter.path
        return self.base

    @property
    def name(self) -> str:
        """Default name of the model: the adapter's folder, else the base's."""
        return (self.adapter.path if self.adapter is not None else self.base).name

    @property
    def chat_template(self) -> str | dict[str, str] | None:
        """The template used in training: the adapter's, else the base's."""
        own = template_read(self.adapter.path) if self.adapter is not None else None
        return own or template_read(self.base)

    def without_adapter(self) -> Source:
        return Source(self.base_name, self.base, None, MergedWeights(self.weights.base, None))

    def tokenizer(self) -> object:
        """The tokenizer, never with code from the model's folder. Raises ExportRefused."""
        folder = self.tokenizer_folder
        try:
            tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
        except (OSError, ValueError, KeyError) as error:
            raise ExportRefused(
                f"expected a tokenizer in {folder}, found none that loads ({str(error).splitlines()[0]})"
            ) from error
        tokenizer.chat_template = self.chat_template or tokenizer.chat_template or DEFAULT_CHAT_TEMPLATE
        return tokenizer

    def copy_tokenizer(self, target: Path) -> list[Path]:
        """Copies the tokenizer's files, and writes the chat template if they have none."""
        copied = _copy(self.tokenizer_folder, target, TOKENIZER_FILES + TEMPLATE_FILES)
        if template_read(target) is None:
            template = self.chat_template or DEFAULT_CHAT_TEMPLATE
            if isinstance(template, str):
                copied.append(target / TEMPLATE_FILES[0])
                copied[-1].write_text(template, "utf-8")
        return copied

    def copy_config(self, target: Path) -> list[Path]:
        return _copy(self.base, target, CONFIG_FILES + LICENSE_FILES)


def source_open(base_model: str | None, adapter: Path | None) -> Source:
    """Finds and reads the source of an export.

    base_model: `bundled`, a folder, or a Hugging Face name (downloaded once); None uses the adapter's. adapter: a
    folder as a training run or PEFT writes it; None exports the base itself. Raises ExportRefused if either is missing
    or broken, or they do not fit together.
    """
    read = adapter_open(adapter) if adapter is not None else None
    name = base_model or (read.base_model if read is not None else "")
    if not name:
        raise ExportRefused(
            "expected a base model, found none named, not even by the adapter; name it with --base-model"
        )
    folder = base_folder(name)
    weights = BaseWeights(folder)
    if read is not None:
        _hash_check(read, name, folder)
    return Source(name, folder, read, MergedWeights(weights, read))


def base_folder(name: str) -> Path:
    """The folder of a model given as `bundled`, a path or a Hugging Face name. Raises ExportRefused."""
    path = Path(resolve_base_model(name)).expanduser()
    if path.is_dir():
        return path
    if path.is_absolute() or name.startswith((".", "~")) or name.count("/") > 1:
        raise ExportRefused(
            f"expected a model folder, found nothing at {path}; check the path, or name a Hugging Face model"
        )
    return _fetch(name)


def _fetch(name: str) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    wanted = [
        "model*.safetensors",
        "model.safetensors.index.json",
        *TOKENIZER_FILES,
        *TEMPLATE_FILES,
        *CONFIG_FILES,
        *LICENSE_FILES,
    ]
    try:
        return Path(snapshot_download(name, allow_patterns=wanted))
    except (HfHubHTTPError, LocalEntryNotFoundError, HFValidationError, OSError) as error:
        raise ExportRefused(
            f"expected the base model {name!r} as a folder or from the Hugging Face hub, found neither "
            f"({str(error).splitlines()[0]}); name a local folder with --base-model"
        ) from error


def base_identity(name: str, folder: Path) -> str:
    """Identity of a base by name and folder; a folder of the hub's cache is identified by its commit."""
    local = Path(resolve_base_model(name)).expanduser().is_dir()
    return base_hash(str(folder)) if local else f"commit:{folder.name}"


def _hash_check(adapter: Adapter, name: str, folder: Path) -> None:
    expected = str(adapter.facts.get("base_model_hash") or "")
    if not expected.startswith(("commit:", "sha256:")):
        return
    found = base_identity(name, folder)
    if expected != found:
        raise ExportRefused(
            f"expected the base model the adapter was trained on, {adapter.base_model} ({expected[:19]}), found {name} "
            f"({found[:19]}){base_changes(adapter.facts, base_files(folder))}; name the right one with --base-model, "
            "or train again"
        )


def _copy(source: Path, target: Path, patterns: tuple[str, ...]) -> list[Path]:
    copied = []
    for file in sorted(file for pattern in patterns for file in source.glob(pattern) if file.is_file()):
        place = target / file.relative_to(source)
        place.parent.mkdir(exist_ok=True)
        shutil.copyfile(file, place)
        copied.append(place)
    return copied
