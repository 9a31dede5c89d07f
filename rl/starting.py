"""Whose weights a run begins with: the base model's alone, or those of a policy there is."""

from __future__ import annotations

from rl import registry
from rl.checksums import FileDamaged
from rl.integrity import adapter_folder
from rl.jobs import RunRefused, TrainOrder, base_model_for
from rl.recipes import BASE, CHAMPION, Recipe


def start_settled(order: TrainOrder, recipe: Recipe) -> Recipe:
    """The recipe with `champion` made the name of the policy it stands for now, or base where there is none here.

    Raises RunRefused for a policy of another base model or without files, RegistryRefused for an unknown one.
    """
    wanted = recipe.as_dict().get("start_from", BASE)
    if wanted == BASE:
        return recipe
    base_model = base_model_for(order)
    if wanted == CHAMPION:
        champion = registry.champion_of(order.agent)
        fits = champion is not None and champion.base_model == base_model
        return recipe.with_knobs(start_from=champion.name if champion is not None and fits else BASE)
    if (found := registry.policy_get(wanted)).base_model != base_model:
        raise RunRefused(
            f"start_from {wanted}: it is an adapter for {found.base_model}, this run trains {base_model}; give --model "
            f"{found.base_model}, or start from base"
        )
    start_located(wanted)
    return recipe


def recipe_opened(recipe: Recipe) -> Recipe:
    """The recipe as the training package takes it: the folder of the adapter to start from in place of its name."""
    start = recipe.as_dict().get("start_from", BASE)
    return recipe if start == BASE else recipe.with_knobs(start_from=start_located(start))


def start_located(name: str) -> str:
    """The folder of the adapter that a run starts from. Raises RunRefused where its files are gone."""
    try:
        folder = adapter_folder(registry.policy_get(name))
    except FileDamaged as damage:
        raise RunRefused(f"start_from {name}: {damage}; or start from base") from damage
    if not folder.is_dir():
        raise RunRefused(
            f"start_from {name}: its files are gone ({folder}); start from base or from the champion"
        )
    return str(folder)
