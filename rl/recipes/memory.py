"""Memory of a training by arithmetic: weights, what is trained with its optimiser, what a micro-batch keeps. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from rl.recipes.base import BasicRecipe, Recipe

GB = 1e9

NF4_BYTES = 0.65
"""A weight in NF4 with double quantisation takes 4.127 bits (Dettmers et al. 2023); embeddings stay as they are."""


@dataclass(frozen=True)
class ModelShape:
    """Numbers of a model that decide its memory."""

    parameters: int
    hidden_size: int
    layers: int
    middle: int
    """Width within an MLP."""
    vocabulary: int = 0


def weights_bytes(shape: ModelShape, recipe: Recipe, size: float, *, judges: int = 0) -> float:
    """Bytes of the frozen weights, `size` of one weight, where so many reward models judge.

    A warm-up is trained on a base of its own. Where whole weights are trained, reward models do not share the base.
    """
    bases = 2 if getattr(recipe, "warm_up_steps", 0) else 1
    return (bases + judges * recipe.whole) * shape.parameters * size


def trained_bytes(shape: ModelShape, recipe: Recipe) -> float:
    """Bytes of what is trained, in float32: weight, gradient, two moments; of a reference the weight alone."""
    width = 8 * shape.hidden_size + 3 * (shape.hidden_size + shape.middle)
    trained = shape.parameters if recipe.whole else shape.layers * recipe.lora_r * width
    return trained * (16.0 * recipe.trained_copies + 4.0 * recipe.has_adapter_reference)


def kept_bytes(
    shape: ModelShape, recipe: BasicRecipe, responses: int, size: float, *, sparing: bool
) -> float:
    """Bytes that a micro-batch of so many responses at full length keeps for the way back, at most.

    sparing: gradient checkpointing, which keeps one layer whole.
    """
    knobs = recipe.as_dict()
    per_layer = responses * knobs["max_length"] * (10 * shape.hidden_size + 3 * shape.middle) * size
    answered = knobs.get("max_new_tokens") or knobs["max_completion_length"]
    return per_layer * (1 if sparing else shape.layers) + responses * answered * shape.vocabulary * size
