"""Model families in GGUF: architecture, configuration keys, tensor names and layouts.

Keys and layouts follow llama.cpp's own conversion; tensor names come from the `gguf` package.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import gguf
import torch

from rl.export.artifact import ExportRefused

if TYPE_CHECKING:
    from transformers import PretrainedConfig


@dataclass(frozen=True)
class Family:
    """A family of models (transformers' `model_type`), and how it is written as GGUF."""

    arch: gguf.MODEL_ARCH
    parameters: Callable[[gguf.GGUFWriter, PretrainedConfig], None]
    """Writes the configuration keys."""
    permuted: bool = False
    """True: q and k rows change order, as llama.cpp rotates neighbouring pairs where transformers rotates halves."""
    norm_shift: float = 0.0
    """Added to norm weights: Gemma multiplies by 1 + w."""
    conv1d: bool = False
    """True: linear weights are (in, out), as in GPT-2."""
    output_head: bool = True
    """False: llama.cpp always uses the embedding table as output."""

    @property
    def name(self) -> str:
        """`general.architecture`."""
        return str(gguf.MODEL_ARCH_NAMES[self.arch])


@dataclass(frozen=True)
class TensorLayout:
    """Names and shapes of a model's tensors in GGUF."""

    family: Family
    config: PretrainedConfig
    tied: bool

    def names(self, names: list[str]) -> dict[str, str]:
        """Checkpoint name -> GGUF name of every tensor llama.cpp reads. Raises ExportRefused for an unknown one."""
        table = gguf.get_tensor_name_map(self.family.arch, self.config.num_hidden_layers)
        mapping: dict[str, str] = {}
        for name in names:
            if self._is_omitted(name):
                continue
            mapped = table.get_name(name, try_suffixes=(".weight", ".bias"))
            if mapped is None:
                raise ExportRefused(
                    f"expected only tensors of a {self.family.name} model, found {name}, which GGUF has no place for; "
                    "export the model as merged instead"
                )
            mapping[name] = mapped
        return mapping

    def shape(self, name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
        return shape[::-1] if self._conv1d(name) else shape

    def tensor(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """A checkpoint's tensor in llama.cpp's layout, same dtype."""
        if self._conv1d(name):
            return tensor.T
        if self.family.norm_shift and name.endswith("norm.weight"):
            return tensor.float() + self.family.norm_shift
        return self.rows(name, tensor)

    def rows(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """q and k rows in llama.cpp's order, other tensors unchanged. Also for a LoRA's B."""
        if not self.family.permuted:
            return tensor
        module = name.rsplit(".", 2)[-2]
        if module == "q_proj":
            return permute_rows(tensor, self.config.num_attention_heads)
        if module == "k_proj":
            return permute_rows(tensor, self.config.num_key_value_heads)
        return tensor

    def extra(self) -> dict[str, torch.Tensor]:
        """Tensors that are not in the checkpoint: rotation factors."""
        rope = rope_parameters(self.config)
        kind = rope.get("rope_type", "default")
        if self.family.permuted and kind == "llama3":
            return {"rope_freqs.weight": llama3_factors(rope, head_size(self.config))}
        if self.family.arch == gguf.MODEL_ARCH.PHI3 and rope.get("long_factor"):
            return {
                "rope_factors_long.weight": torch.tensor(rope["long_factor"], dtype=torch.float32),
                "rope_factors_short.weight": torch.tensor(rope["short_factor"], dtype=torch.float32),
            }
        return {}

    def _conv1d(self, name: str) -> bool:
        return self.family.conv1d and name.endswith(("c_attn.weight", "c_proj.weight", "c_fc.weight"))

    def _is_omitted(self, name: str) -> bool:
        if name == "lm_head.weight":
            return self.tied or not self.family.output_head
        # buffers that old checkpoints still carry
        return name.endswith((".rotary_emb.inv_freq", ".attn.masked_bias")) or (
            self.family.conv1d and name.endswith(".attn.bias")
        )


def permute_rows(tensor: torch.Tensor, heads: int) -> torch.Tensor:
    """Rows of q or k (heads * size, ...) from halves (transformers) to neighbouring pairs (llama.cpp), per head."""
    return (
        tensor.reshape(heads, 2, tensor.shape[0] // heads // 2, *tensor.shape[1:])
        .swapaxes(1, 2)
        .reshape(tensor.shape)
    )


def rope_parameters(config: PretrainedConfig) -> dict[str, Any]:
    """Rotary position parameters: rope_type, rope_theta and scaling (of full-attention layers)."""
    found = dict(getattr(config, "rope_parameters", None) or {})
    return dict(found.get("full_attention", found))


def head_size(config: PretrainedConfig) -> int:
    return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)


def llama3_factors(rope: dict[str, Any], size: int) -> torch.Tensor:
    """Divisors of the size / 2 rotation frequencies (Llama 3.1's scaling, as in transformers).

    Wavelengths below the high-frequency bound stay, those above the low one are divided by `factor`; between them the
    frequency is interpolated.
    """
    frequencies = 1.0 / (rope["rope_theta"] ** (torch.arange(0, size, 2, dtype=torch.float64) / size))
    factor, low, high = (float(rope[key]) for key in ("factor", "low_freq_factor", "high_freq_factor"))
    context = float(rope["original_max_position_embeddings"])
    wavelength = 2 * math.pi / frequencies
    smooth = ((context / wavelength - low) / (high - low)).clamp(0, 1)
    return (1 / ((1 - smooth) / factor + smooth)).float()


def _common(writer: gguf.GGUFWriter, config: PretrainedConfig) -> None:
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    writer.add_rope_freq_base(float(rope_parameters(config).get("rope_theta", 10000.0)))


def _rope_scaling(writer: gguf.GGUFWriter, config: PretrainedConfig) -> None:
    rope = rope_parameters(config)
    kind = rope.get("rope_type", "default")
    if kind in ("default", "llama3"):
        return
    if kind == "linear":
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(float(rope["factor"]))
    elif kind == "yarn":
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(float(rope["factor"]))
        original = rope.get("original_max_position_embeddings") or config.max_position_embeddings
        writer.add_rope_scaling_orig_ctx_len(int(original))
    else:
        raise ExportRefused(
            f"expected rotary positions scaled by linear, yarn or llama3 (or not at all), found {kind!r}, which "
            "llama.cpp does not know for this family; export the model as merged instead"
        )


def _llama(writer: gguf.GGUFWriter, config: PretrainedConfig) -> None:
    _common(writer, config)
    size = head_size(config)
    writer.add_rope_dimension_count(size)
    writer.add_key_length(size)
    writer.add_value_length(size)
    _rope_scaling(writer, config)


def _qwen(writer: gguf.GGUFWriter, config: PretrainedConfig) -> None:
    if getattr(config, "use_sliding_window", False) and config.sliding_window:
        raise ExportRefused(
            "expected a Qwen model with full attention, found use_sliding_window, which llama.cpp does not do for this "
            "family; export the model as merged instead"
        )
    _common(writer, config)
    size = head_size(config)
    writer.add_key_length(size)
    writer.add_value_length(size)
    _rope_scaling(writer, config)


def _phi3(writer: gguf.GGUFWriter, config: PretrainedConfig) -> None:
    _common(writer, config)
    rope = rope_parameters(config)
    share = rope.get("partial_rotary_factor") or getattr(config, "partial_rotary_factor", None) or 1.0
    writer.add_rope_dimension_count(int(share * head_size(config)))
    original = int(
        rope.get("original_max_position_embeddings")
        or getattr(config, "original_max_position_embeddings", None)
        or config.max_position_embeddings
    )
    writer.add_rope_scaling_orig_ctx_len(original)
    # 0 tells llama.cpp's phi3 that there is no window
    writer.add_sliding_window(config.sliding_window or 0)
    kind = rope.get("rope_type", "default")
    if kind in ("longrope", "su"):
        scale = config.max_position_embeddings / original
        attention = math.sqrt(1 + math.log(scale) / math.log(original)) if scale > 1 else 1.0
        writer.add_rope_scaling_attn_factors(float(rope.get("attention_factor") or attention))
    elif kind != "default":
        raise ExportRefused(
            f"expected rotary positions scaled by longrope or not at all for Phi-3, found {kind!r}; "
            "export the model as merged instead"
        )


def _gemma(writer: gguf.GGUFWriter, config: PretrainedConfig) -> None:
    _common(writer, config)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    _rope_scaling(writer, config)


def _gemma2(writer: gguf.GGUFWriter, config: PretrainedConfig) -> None:
    _set_attention_window(config, every=2)
    _gemma(writer, config)
    writer.add_sliding_window(config.sliding_window)
    writer.add_attn_logit_softcapping(float(config.attn_logit_softcapping))
    writer.add_final_logit_softcapping(float(config.final_logit_softcapping))


def _gemma3(writer: gguf.GGUFWriter, config: PretrainedConfig) -> None:
    _set_attention_window(config, every=6)
    if config.final_logit_softcapping or config.attn_logit_softcapping:
        raise ExportRefused(
            "expected a Gemma 3 model without soft-capped logits, found one with them, which llama.cpp does not do for "
            "this family; export the model as merged instead"
        )
    _gemma(writer, config)
    writer.add_sliding_window(config.sliding_window)
    writer.add_rope_freq_base_swa(float(config.rope_parameters["sliding_attention"]["rope_theta"]))


def _set_attention_window(config: PretrainedConfig, every: int) -> None:
    """Refuses a Gemma whose layer pattern or attention scale llama.cpp does not support."""
    pattern = [
        "full_attention" if (i + 1) % every == 0 else "sliding_attention"
        for i in range(config.num_hidden_layers)
    ]
    if list(config.layer_types) != pattern or config.query_pre_attn_scalar != config.head_dim:
        raise ExportRefused(
            f"expected full attention in every layer number divisible by {every} and attention scaled by head_dim, "
            "found another arrangement, which llama.cpp does not do for this family; export the model as merged instead"
        )


def _gpt2(writer: gguf.GGUFWriter, config: PretrainedConfig) -> None:
    if config.scale_attn_by_inverse_layer_idx or not config.scale_attn_weights:
        raise ExportRefused(
            "expected GPT-2's plain attention scaling, found another, which llama.cpp does not do; "
            "export the model as merged instead"
        )
    writer.add_context_length(config.n_positions)
    writer.add_embedding_length(config.n_embd)
    writer.add_block_count(config.n_layer)
    writer.add_feed_forward_length(config.n_inner or 4 * config.n_embd)
    writer.add_head_count(config.n_head)
    writer.add_layer_norm_eps(config.layer_norm_epsilon)
    writer.add_vocab_size(config.vocab_size)


_ARCH = gguf.MODEL_ARCH
FAMILIES: dict[str, Family] = {
    "llama": Family(_ARCH.LLAMA, _llama, permuted=True),
    # llama.cpp runs Mistral as a llama
    "mistral": Family(_ARCH.LLAMA, _llama, permuted=True),
    "qwen2": Family(_ARCH.QWEN2, _qwen),
    "qwen3": Family(_ARCH.QWEN3, _qwen),
    "phi3": Family(_ARCH.PHI3, _phi3),
    "gemma": Family(_ARCH.GEMMA, _gemma, norm_shift=1.0, output_head=False),
    "gemma2": Family(_ARCH.GEMMA2, _gemma2, norm_shift=1.0, output_head=False),
    "gemma3_text": Family(_ARCH.GEMMA3, _gemma3, norm_shift=1.0, output_head=False),
    "gpt2": Family(_ARCH.GPT2, _gpt2, conv1d=True),
}
"""`model_type` -> how it is written."""


def layout_of(config: PretrainedConfig) -> TensorLayout | None:
    """The layout of a model; None if its family is not one of FAMILIES."""
    family = FAMILIES.get(str(config.model_type))
    if family is None:
        return None
    return TensorLayout(family, config, bool(getattr(config, "tie_word_embeddings", False)))


def layout_notes(config: PretrainedConfig) -> list[str]:
    """Notes on models that llama.cpp runs differently."""
    window = getattr(config, "sliding_window", None)
    if config.model_type in ("mistral", "phi3") and window and window < config.max_position_embeddings:
        return [
            f"llama.cpp reads the whole context where transformers looks back {window} tokens: "
            "answers to longer prompts differ"
        ]
    return []
