"""Proximal policy optimisation, ours: formulas, models on one base, rollouts, and one loop."""

from rl.recipes import PPORecipe as PPOConfig
from rl.training.ppo.trainer import PPOTrainer

__all__ = ["PPOConfig", "PPOTrainer"]
