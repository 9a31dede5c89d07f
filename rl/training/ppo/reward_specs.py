"""Rewards by name, as a recipe and `--reward` give them: reward functions, and reward models as `model:FOLDER`."""

from __future__ import annotations

from rl.rewards.base import RewardFunction
from rl.rewards.catalogue import AUTO, LEARNED_REWARD, MODEL, rewards_named
from rl.training.labels import LearnedReward
from rl.training.ppo.reward_role import SharedRewardModel, fits
from rl.training.ppo.shared_base import SharedBase
from rl.training.result import TrainingRefused
from rl.training.reward_scores import RewardModel


def rewards_of(specs: str, base: SharedBase | None = None) -> list[RewardFunction]:
    """The reward functions and reward models of specs separated by commas, in their order.

    The first reward model that was trained on the base in memory becomes one more role on it; any other, and all where
    no base is given, is loaded beside it.

    Raises TrainingRefused for a name nobody knows, and for a model that cannot be used.
    """
    functions: list[RewardFunction] = []
    for name in (spec.strip() for spec in specs.split(",")):
        try:
            if name.startswith(MODEL):
                path = name.removeprefix(MODEL)
                taken = any(isinstance(f, SharedRewardModel) for f in functions)
                if base is not None and not taken and fits(path, base):
                    functions.append(SharedRewardModel(base, path))
                else:
                    functions.append(RewardModel.load(path))
            elif name.startswith(f"{LEARNED_REWARD}:"):
                functions.append(LearnedReward.load(name.removeprefix(f"{LEARNED_REWARD}:")))
            elif name == AUTO:
                raise TrainingRefused(
                    "reward auto is the agent's registered reward model: run the training by command, which finds or "
                    "trains it, or name a folder with model:FOLDER"
                )
            elif name == LEARNED_REWARD:
                raise TrainingRefused(
                    "reward learned needs the folder of a label model: learned:FOLDER, or run the training by command, "
                    "which finds the agent's newest"
                )
            elif name:
                # whoever names code_execution here means it; the commands ask the settings first
                functions += rewards_named([name], code_execution=True)
        except ValueError as error:
            raise TrainingRefused(str(error)) from error
    return functions
