"""Forward strategies over packed rows, fastest first; `packed.selection` finds the first that is exact for a model."""

from __future__ import annotations

from enum import StrEnum


class Strategy(StrEnum):
    """A way to compute packed rows; each falls back on the next."""

    FLEX_LAST_LAYER = "flex+last_layer"
    """Strategy `flex`, with the last layer's queries, output and MLP only where a completion token is
    predicted."""
    FLEX = "flex"
    """All rows one behind the other under FlexAttention's block mask, without padding: for long prompts on CUDA."""
    LAST_LAYER = "split+last_layer"
    """Strategy `split`, with the last layer's queries, output and MLP only where a completion token is
    predicted."""
    SPLIT = "split"
    """Causal attention over the prompt, one small masked attention for the completions."""
    STOCK = "stock"
    """Not packed: TRL's rows, prompt and completion repeated for each."""


FLEX_STRATEGIES = (Strategy.FLEX_LAST_LAYER, Strategy.FLEX)
LAST_LAYER_STRATEGIES = (Strategy.FLEX_LAST_LAYER, Strategy.LAST_LAYER)
PREFIX_ATTENTION_STRATEGIES = (*FLEX_STRATEGIES, Strategy.LAST_LAYER, Strategy.SPLIT)
"""Strategies whose attention is `prefix_attention`."""
