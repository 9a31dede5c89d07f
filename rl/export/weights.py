"""Weights of a policy, one tensor at a time: a base model's safetensors with a LoRA merged."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from peft.utils.other import get_pattern_key
from safetensors import SafetensorError, safe_open
from transformers import AutoConfig

from rl.export.artifact import ExportRefused
from rl.training.loading import ADAPTER_FILES, PolicyLoadError, adapter_read

ADAPTER_CONFIG, ADAPTER_WEIGHTS = ADAPTER_FILES

# Knobs of LoraConfig that change the formula W + scale * B A, or the base itself.
_OTHER_FORMULAS = (
    "use_dora",
    "use_qalora",
    "use_bdlora",
    "lora_bias",
    "target_parameters",
    "trainable_token_indices",
    "layer_replication",
    "alora_invocation_tokens",
    "arrow_config",
    "kasa_config",
    "monteclora_config",
    "velora_config",
    "megatron_config",
)
_OTHER_BASES = ("pissa", "corda", "olora", "mica", "loftq", "lora_ga")

_BASE_PREFIXES = ("model.", "transformer.")
"""Prefixes of module names that a published checkpoint may omit."""


@dataclass(frozen=True)
class Adapter:
    """A LoRA adapter folder as PEFT writes it."""

    path: Path
    config: dict[str, Any]
    """adapter_config.json."""
    facts: dict[str, Any]
    """ratchet.json; empty for an adapter made elsewhere."""

    @property
    def base_model(self) -> str:
        """Its base model, by ratchet.json, else by adapter_config.json."""
        return str(self.facts.get("base_model") or self.config.get("base_model_name_or_path") or "")

    def scale(self, module: str, rank: int) -> float:
        """PEFT's scaling of one module's B A: alpha / r, or alpha / sqrt(r) with rsLoRA (arXiv 2312.03732)."""
        patterns = self.config.get("alpha_pattern") or {}
        alpha = patterns.get(get_pattern_key(patterns, module), self.config["lora_alpha"])
        return float(alpha) / (math.sqrt(rank) if self.config.get("use_rslora") else rank)


def adapter_open(path: Path) -> Adapter:
    """Reads an adapter folder's configuration. Raises ExportRefused unless it is a LoRA that can be merged."""
    try:
        facts = adapter_read(path)
    except PolicyLoadError as error:
        raise ExportRefused(str(error)) from error
    config = _json(path / ADAPTER_CONFIG)
    kind = str(config.get("peft_type"))
    if kind != "LORA":
        raise ExportRefused(
            f"expected a LoRA adapter in {path}, found peft_type {kind}; merge it with PEFT first"
        )
    other = [knob for knob in _OTHER_FORMULAS if config.get(knob)]
    init = str(config.get("init_lora_weights")).lower()
    if init.startswith(_OTHER_BASES):
        other.append(f"init_lora_weights={init}")
    if other:
        raise ExportRefused(
            f"expected a plain LoRA (W + scale * B A) in {path}, found {', '.join(other)}; "
            "merge it with PEFT's merge_and_unload and export the merged model"
        )
    return Adapter(path, config, facts)


class BaseWeights:
    """Tensors of a model folder's safetensors, read one at a time."""

    def __init__(self, folder: Path) -> None:
        """Raises ExportRefused if the folder lacks a complete set of safetensors, or its weights are quantised."""
        self.folder = folder
        self.config = _model_config(folder)
        quantised = getattr(self.config, "quantization_config", None)
        if quantised:
            method = (
                quantised.get("quant_method") if isinstance(quantised, dict) else type(quantised).__name__
            )
            raise ExportRefused(
                f"expected a base model in full precision in {folder}, found weights quantised with {method}; "
                "export from the unquantised model it was made of"
            )
        self.tied = bool(getattr(self.config, "tie_word_embeddings", False))
        self.model_type = str(self.config.model_type)
        self._file: dict[str, Path] = {}
        self._shape: dict[str, tuple[int, ...]] = {}
        self._dtype: dict[str, str] = {}
        for file in _weight_files(folder):
            with _open_tensors(file) as tensors:
                for name in tensors.keys():  # noqa: SIM118 - safe_open is not a mapping
                    piece = tensors.get_slice(name)
                    self._file[name] = file
                    self._shape[name] = tuple(piece.get_shape())
                    self._dtype[name] = str(piece.get_dtype())

    @property
    def names(self) -> list[str]:
        return list(self._file)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._shape[name]

    def dtype(self, name: str) -> torch.dtype:
        return _DTYPES[self._dtype[name]]

    def bytes(self, name: str) -> int:
        """Stored size of a tensor."""
        return math.prod(self._shape[name]) * self.dtype(name).itemsize

    @property
    def total_bytes(self) -> int:
        return sum(self.bytes(name) for name in self._file)

    @property
    def main_dtype(self) -> torch.dtype:
        """Type of the largest tensor, taken as the model's."""
        return self.dtype(max(self._file, key=self.bytes))

    @property
    def parameters(self) -> int:
        return sum(math.prod(shape) for shape in self._shape.values())

    def tensor(self, name: str) -> torch.Tensor:
        """A tensor as stored, on the CPU."""
        with _open_tensors(self._file[name]) as tensors:
            return tensors.get_tensor(name)


@dataclass(frozen=True)
class LoraPair:
    """Factors of one module's update: `a` (rank, in), `b` (out, rank), both float32, and its scale."""

    module: str
    target: str
    """Name of the weight in the base's files."""
    a: torch.Tensor
    b: torch.Tensor
    scale: float
    transposed: bool
    """True if the weight is (in, out): GPT-2's Conv1D, or an embedding table."""

    def delta(self) -> torch.Tensor:
        """scale * B A in the weight's orientation (LoRA, arXiv 2106.09685, section 4.1), float32."""
        product = self.scale * (self.b @ self.a)
        return product.T if self.transposed else product


class MergedWeights:
    """A base's tensors with an adapter merged: same names and shapes, float32 where merged."""

    def __init__(self, base: BaseWeights, adapter: Adapter | None) -> None:
        """Raises ExportRefused if a tensor of the adapter has no place in the base."""
        self.base = base
        self.adapter = adapter
        self._pairs: dict[str, tuple[str, str, str]] = {}
        self._replaced: dict[str, str] = {}
        if adapter is not None:
            self._plan(adapter)

    @property
    def names(self) -> list[str]:
        return self.base.names

    @property
    def changed_names(self) -> list[str]:
        return [*self._pairs, *self._replaced]

    def tensor(self, name: str) -> torch.Tensor:
        """One tensor with the adapter merged: float32 if changed, else as stored."""
        # PEFT may bring a whole embedding table and a LoRA on it
        stored = (
            self._adapter_tensor(self._replaced[name]) if name in self._replaced else self.base.tensor(name)
        )
        if name not in self._pairs:
            return stored
        # in place: a large tensor is in memory once in float32, plus its delta
        return stored.to(torch.float32, copy=True).add_(self.pair(name).delta())

    def pair(self, name: str) -> LoraPair:
        """The factors that change a weight; KeyError if the adapter leaves it alone."""
        module, a_key, b_key = self._pairs[name]
        a, b = (self._adapter_tensor(key).to(torch.float32) for key in (a_key, b_key))
        assert self.adapter is not None
        return LoraPair(
            module, name, a, b, self.adapter.scale(module, a.shape[0]), self._is_transposed(name, a, b)
        )

    def pairs(self) -> Iterator[LoraPair]:
        for name in self._pairs:
            yield self.pair(name)

    def replaced_names(self) -> list[str]:
        """Names of tensors that the adapter replaces (PEFT's modules_to_save and trained biases)."""
        return list(self._replaced)

    def _adapter_tensor(self, key: str) -> torch.Tensor:
        assert self.adapter is not None
        with _open_tensors(self.adapter.path / ADAPTER_WEIGHTS) as tensors:
            return tensors.get_tensor(key)

    def _is_transposed(self, name: str, a: torch.Tensor, b: torch.Tensor) -> bool:
        shape, straight = self.base.shape(name), (b.shape[0], a.shape[1])
        if shape == straight == straight[::-1]:
            assert self.adapter is not None
            conv1d = self.base.model_type == "gpt2" and not name.endswith("lm_head.weight")
            return conv1d or bool(self.adapter.config.get("fan_in_fan_out"))
        if shape in (straight, straight[::-1]):
            return shape != straight
        raise ExportRefused(
            f"expected an adapter whose update fits {name} of shape {shape}, found B A of shape {straight}; "
            "this adapter was trained on another base model"
        )

    def _plan(self, adapter: Adapter) -> None:
        with _open_tensors(adapter.path / ADAPTER_WEIGHTS) as tensors:
            keys = list(tensors.keys())
        left = set(keys)
        for key in keys:
            for a_mark, b_mark in (
                ("lora_A.weight", "lora_B.weight"),
                ("lora_embedding_A", "lora_embedding_B"),
            ):
                if key.endswith("." + a_mark):
                    module = _module(key.removesuffix("." + a_mark))
                    b_key = key.removesuffix(a_mark) + b_mark
                    if b_key not in left:
                        raise ExportRefused(
                            f"expected {b_key} beside {key} in {adapter.path}; the adapter is not whole"
                        )
                    self._pairs[self._target(f"{module}.weight", key)] = (module, key, b_key)
                    left -= {key, b_key}
        for key in sorted(left):
            if "lora_" in key:
                raise ExportRefused(
                    f"expected lora_A and lora_B pairs in {adapter.path}, found {key}, which this export cannot merge; "
                    "merge it with PEFT's merge_and_unload and export the merged model"
                )
            self._replaced[self._target(_module(key), key)] = key
        if self.base.tied:
            ends = ("embed_tokens.weight", "wte.weight", "lm_head.weight")
            touched = [name for name in self.changed_names if name.endswith(ends)]
            if touched:
                raise ExportRefused(
                    f"expected an adapter that leaves tied embeddings alone, found one that changes "
                    f"{', '.join(touched)} of a base whose input and output embeddings are one tensor; "
                    "train without these modules"
                )

    def _target(self, name: str, key: str) -> str:
        shapes = self.base._shape
        candidates = [
            name,
            *(name.removeprefix(p) for p in _BASE_PREFIXES),
            *(p + name for p in _BASE_PREFIXES),
        ]
        for candidate in candidates:
            if candidate in shapes:
                return candidate
        raise ExportRefused(
            f"expected every tensor of the adapter to belong to the base in {self.base.folder}, found {key} with no "
            f"{name} there; this adapter was trained on another base model"
        )


def _module(key: str) -> str:
    return (
        key.removeprefix("base_model.model.").replace(".base_layer.", ".").replace(".modules_to_save.", ".")
    )


def _weight_files(folder: Path) -> list[Path]:
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        names = sorted(set(_json(index).get("weight_map", {}).values()))
        files = [folder / name for name in names]
    else:
        files = [folder / "model.safetensors"]
    missing = [file.name for file in files if not file.is_file()]
    if missing or not files:
        found = sorted(
            file.name for file in folder.iterdir() if file.suffix in (".safetensors", ".bin", ".pt", ".gguf")
        )
        raise ExportRefused(
            f"expected a model's weights as safetensors in {folder} ({', '.join(missing) or 'none listed'} missing), "
            f"found {', '.join(found) or 'no weights'}; other formats are not read, "
            "save it with safe_serialization=True"
        )
    return files


def _model_config(folder: Path) -> Any:
    if not (folder / "config.json").is_file():
        raise ExportRefused(
            f"expected a model folder with config.json, found none in {folder}; name a Hugging Face model or its folder"
        )
    _json(folder / "config.json")
    try:
        return AutoConfig.from_pretrained(folder, trust_remote_code=False)
    except (OSError, ValueError, KeyError) as error:
        raise ExportRefused(
            f"expected a model that transformers knows in {folder}, found a configuration it refuses "
            f"({str(error).splitlines()[0]})"
        ) from error


def _open_tensors(file: Path) -> Any:
    try:
        return safe_open(file, framework="pt", device="cpu")
    except SafetensorError as error:
        raise ExportRefused(f"expected whole safetensors in {file}, found a broken file ({error})") from error


def _json(path: Path) -> dict[str, Any]:
    try:
        facts = json.loads(path.read_text("utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ExportRefused(f"expected JSON in {path}, found a broken file ({error})") from error
    if not isinstance(facts, dict):
        raise ExportRefused(f"expected a JSON object in {path}, found {type(facts).__name__}")
    return facts


_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
}
