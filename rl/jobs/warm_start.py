"""Warm start: the weights a run begins with, the base model's alone or those of an existing policy."""

from __future__ import annotations

from rl.checksums import FileDamaged
from rl.jobs.lifecycle import TrainOrder, base_model_for
from rl.models import Policy
from rl.models.runs import RunRefused
from rl.recipes import BASE, CHAMPION, SFT_STAGE, Recipe
from rl.registry import service as registry
from rl.registry.integrity import adapter_folder


def start_resolved(order: TrainOrder, recipe: Recipe) -> Recipe:
    """The recipe with `champion` made the name of the policy it stands for now, or base where there is none here. A
    start whose weights themselves were trained makes the run one of full fine-tuning, too.

    Raises RunRefused for a policy of another base model, of another kind of training or without files, RegistryRefused
    for an unknown one.
    """
    start = recipe.as_dict().get("start_from", BASE)
    if start in (BASE, SFT_STAGE):
        return recipe
    base_model = base_model_for(order)
    if start == CHAMPION:
        champion = registry.champion_of(order.agent)
        fits = champion is not None and champion.base_model == base_model
        return (
            recipe.with_knobs(start_from=BASE)
            if champion is None or not fits
            else _continued_recipe(recipe, champion)
        )
    found = registry.policy_get(start)
    if found.kind != Policy.Kind.ADAPTER:
        raise RunRefused(
            f"start_from {start}: it is no adapter ({found.get_kind_display()}), so there are no weights to begin "
            "with; start from base"
        )
    if found.base_model != base_model:
        raise RunRefused(
            f"start_from {start}: it is an adapter for {found.base_model}, this run trains {base_model}; give --model "
            f"{found.base_model}, or start from base"
        )
    start_located(start)
    return _continued_recipe(recipe, found)


def _continued_recipe(recipe: Recipe, start: Policy) -> Recipe:
    """The recipe for going on from a policy's weights as they are: a LoRA, or whole tensors. Raises RunRefused."""
    whole = start.run is not None and start.run.recipe.get("lora_r") == 0
    if whole and not recipe.supports_full_finetuning:
        raise RunRefused(
            f"start_from {start.name}: it was fully fine-tuned (--lora-r 0), and this method trains LoRA adapters; "
            "start from base, or from a policy with a LoRA adapter"
        )
    if recipe.whole and not whole:
        raise RunRefused(
            f"start_from {start.name}: it is a LoRA adapter, and --lora-r 0 trains the weights themselves; start from "
            "base, or leave out --lora-r"
        )
    return recipe.with_knobs(start_from=start.name, **({"lora_r": 0} if whole else {}))


def recipe_opened(recipe: Recipe) -> Recipe:
    """The recipe as the training package takes it: the folder of the adapter to start from in place of its name."""
    start = recipe.as_dict().get("start_from", BASE)
    if start == SFT_STAGE:  # of a dry run, before the stage is trained
        return recipe.with_knobs(start_from=BASE)
    return recipe if start == BASE else recipe.with_knobs(start_from=start_located(start))


def start_located(name: str) -> str:
    """The folder of the adapter that a run starts from. Raises RunRefused where its files are gone."""
    try:
        folder = adapter_folder(registry.policy_get(name))
    except FileDamaged as damage:
        raise RunRefused(f"start_from {name}: {damage}; or start from base") from damage
    if not folder.is_dir():
        raise RunRefused(
            f"start_from {name}: its files were deleted ({folder}); start from base or from the champion"
        )
    return str(folder)
