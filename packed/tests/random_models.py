"""Tiny random models of many architectures, rows for them, and a count of what waits for a device."""

from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.pytorch_utils import Conv1D

from packed_forward.packing import Strategy, TokenizedCompletion
from packed_forward.row_cache import SelftestCache
from packed_forward.selftest import PackableModel

VOCABULARY = 200

COMMON: dict[str, Any] = {"hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4}
COMMON |= {"num_key_value_heads": 2, "intermediate_size": 128, "vocab_size": VOCABULARY}
COMMON |= {"max_position_embeddings": 512, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}

HEAD = {"head_dim": 16}

MAMBA = {"hidden_size": 64, "num_hidden_layers": 2, "vocab_size": VOCABULARY, "state_size": 8}

GPT2 = {"n_embd": 64, "n_layer": 3, "n_head": 4, "n_positions": 512, "vocab_size": VOCABULARY}

LINEAR = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16}
LINEAR |= {"linear_value_head_dim": 16}

SHAPES: dict[str, tuple[str, dict[str, Any], Strategy]] = {
    "llama": ("llama", COMMON, Strategy.LAST_LAYER),
    "qwen2": ("qwen2", COMMON, Strategy.LAST_LAYER),
    "qwen3": ("qwen3", COMMON | HEAD, Strategy.LAST_LAYER),
    "mistral": ("mistral", COMMON | HEAD | {"sliding_window": None}, Strategy.LAST_LAYER),
    "gemma": ("gemma", COMMON | HEAD, Strategy.LAST_LAYER),
    "qwen2_moe": (
        "qwen2_moe",
        COMMON | {"num_experts": 4, "moe_intermediate_size": 64, "shared_expert_intermediate_size": 64},
        Strategy.LAST_LAYER,
    ),
    "phi3": ("phi3", COMMON | {"original_max_position_embeddings": 512}, Strategy.SPLIT),
    "olmo2": ("olmo2", COMMON, Strategy.SPLIT),
    "gpt_neox": ("gpt_neox", COMMON, Strategy.SPLIT),
    "gpt2": ("gpt2", GPT2, Strategy.SPLIT),
    # every fourth layer has no positions, and its last layer is one of them
    "smollm3": ("smollm3", COMMON, Strategy.SPLIT),
    # a window shorter than the rows
    "mistral, windowed": ("mistral", COMMON | HEAD | {"sliding_window": 16}, Strategy.STOCK),
    "gemma3, windowed": ("gemma3_text", COMMON | HEAD | {"sliding_window": 16}, Strategy.STOCK),
    "qwen3_next": ("qwen3_next", COMMON | HEAD | LINEAR | {"num_experts": 0}, Strategy.STOCK),
    "mamba": ("mamba", MAMBA, Strategy.STOCK),
}

"""Name -> (architecture, its config, the strategy it must end on)."""


def a_policy(
    shape: str,
    dtype: torch.dtype = torch.float32,
    cache: SelftestCache | None = None,
    *,
    device: str = "cpu",
    **more: Any,
) -> PackableModel:
    """A random model with LoRA, whose weights are large enough for a wrong mask to be seen. `more` replaces keys of its
    config."""
    architecture, config, _ = SHAPES[shape]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(CONFIG_MAPPING[architecture](**config | more)).to(dtype)
        with torch.no_grad():
            for name, weight in model.named_parameters():
                if weight.ndim > 1:
                    weight.mul_(10 if "embed" in name else 4)
        transposed = any(isinstance(module, Conv1D) for module in model.modules())
        lora = LoraConfig(
            r=16,
            lora_alpha=32,
            lora_dropout=0.0,
            target_modules=["in_proj", "x_proj"] if architecture == "mamba" else "all-linear",
            fan_in_fan_out=transposed,
            task_type="CAUSAL_LM",
        )
        adapted = get_peft_model(model, lora)
    for parameter in adapted.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.float()
    adapted.to(device)
    return PackableModel(adapted, pad_token_id=0, selftest_cache=cache)


def some_items(*prompts: int, seed: int = 1) -> list[TokenizedCompletion]:
    """Two responses, of 7 and 12 tokens, to each prompt of so many tokens."""
    generator = torch.Generator().manual_seed(seed)

    def tokens(count: int) -> list[int]:
        return list(torch.randint(3, VOCABULARY, (count,), generator=generator).tolist())

    ids = [tokens(count) for count in prompts]
    return [TokenizedCompletion(prompt, tokens(length)) for prompt in ids for length in (7, 12)]


class Reads(TorchDispatchMode):
    """Counts what makes a program wait for its device: reading a number, and counting what a mask selects."""

    WAITING = ("_local_scalar_dense", "nonzero", "masked_select", "item")

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        masks = name == "index" and any(i is not None and i.dtype == torch.bool for i in args[1])
        if name in self.WAITING or masks:
            self.found.append(name)
        return func(*args, **(kwargs or {}))
