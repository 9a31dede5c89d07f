"""Frozen dataclasses of training knobs, one file per method, and the named presets. Pure: no Django, no torch."""

from rl.recipes.base import BASE as BASE
from rl.recipes.base import CHAMPION as CHAMPION
from rl.recipes.base import AdapterRecipe as AdapterRecipe
from rl.recipes.base import BasicRecipe as BasicRecipe
from rl.recipes.base import Recipe as Recipe
from rl.recipes.base import RecipeError as RecipeError
from rl.recipes.dpo import DPO_CONFIG as DPO_CONFIG
from rl.recipes.dpo import DPO_LOSSES as DPO_LOSSES
from rl.recipes.dpo import DPORecipe as DPORecipe
from rl.recipes.grpo import GRPO_CONFIG as GRPO_CONFIG
from rl.recipes.grpo import GRPORecipe as GRPORecipe
from rl.recipes.kto import KTO_CONFIG as KTO_CONFIG
from rl.recipes.kto import KTORecipe as KTORecipe
from rl.recipes.linear import LINEAR_CONFIG as LINEAR_CONFIG
from rl.recipes.linear import LinearRecipe as LinearRecipe
from rl.recipes.loop import AB_TESTING_KNOBS as AB_TESTING_KNOBS
from rl.recipes.loop import DATASET_CONFIG as DATASET_CONFIG
from rl.recipes.loop import ONLINE_LEARNING_CONFIG as ONLINE_LEARNING_CONFIG
from rl.recipes.named import RECIPES as RECIPES
from rl.recipes.named import recipe_named as recipe_named
from rl.recipes.ppo import PPO_CONFIG as PPO_CONFIG
from rl.recipes.ppo import PPORecipe as PPORecipe
from rl.recipes.reward_model import REWARD_MODEL_CONFIG as REWARD_MODEL_CONFIG
from rl.recipes.reward_model import RewardModelRecipe as RewardModelRecipe
from rl.recipes.sft import SFT_CONFIG as SFT_CONFIG
from rl.recipes.sft import SFTRecipe as SFTRecipe
