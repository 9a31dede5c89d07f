"""Table of training methods: the kind of dataset each reads and its trainer's name. `rl.jobs.train` imports them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rl.recipes import RecipeError


@dataclass(frozen=True)
class Method:
    """One way to learn from feedback."""

    slug: str
    kind: str
    """The dataset it is fed, one of Snapshot.Kind."""
    trainer: str
    """`module:Class` in the training room; every class has DPOTrainer's constructor, load_base_model and train."""
    estimate: str
    """`module:function` that foresees steps, minutes and memory for a dry run."""
    policy: bool = True
    """True if what comes out can answer, and enters the registry; a reward model only judges."""
    rewarded: bool = False
    """True if it needs reward functions (`--reward`)."""
    adapter: bool = True
    """True of a method that trains an adapter of a base model, which needs torch; a linear policy needs neither."""


METHODS = {
    method.slug: method
    for method in (
        Method("dpo", "pairs", "rl.training.dpo:DPOTrainer", "rl.training.estimates:dpo"),
        Method("kto", "labels", "rl.training.kto:KTOTrainer", "rl.training.estimates:kto"),
        Method("sft", "corrections", "rl.training.sft:SFTTrainer", "rl.training.estimates:sft"),
        Method(
            "reward_model",
            "pairs",
            "rl.training.reward_model:RewardModelTrainer",
            "rl.training.estimates:reward_model",
            policy=False,
        ),
        Method("ppo", "prompts", "rl.training.ppo:PPOTrainer", "rl.training.ppo.estimate:ppo", rewarded=True),
        Method(
            "grpo", "prompts", "rl.training.grpo:GRPOTrainer", "rl.training.ppo.estimate:grpo", rewarded=True
        ),
        Method("linear", "pairs", "rl.linear.fit:fit", "", adapter=False),
    )
}


POLICY_METHODS = tuple(method.slug for method in METHODS.values() if method.policy)
"""Methods whose runs make a policy."""


RLHF = "rlhf"
"""The whole of RLHF as one method: a reward model from the feedback found, then PPO against it."""


def method_named(slug: str) -> Method:
    """The method of that name. Raises RecipeError."""
    if slug not in METHODS:
        raise RecipeError(f"no method {slug!r}; known are {', '.join(METHODS)}")
    return METHODS[slug]


OBJECTIVE_KINDS = {"pairwise": "pairs", "regression": "scores", "binary": "labels"}
"""Kinds of dataset by objective of a reward model."""


LINEAR_KINDS = ("pairs", "scores", "corrections")
"""Kinds of datasets that a linear policy learns from."""


def dataset_kind(slug: str, knobs: Mapping[str, Any]) -> str:
    """The kind of dataset a method is fed; a reward model's depends on its objective, GRPO's on its mode, a linear
    policy's on its feedback."""
    if knobs.get("feedback") in LINEAR_KINDS:
        return str(knobs["feedback"])
    if knobs.get("mode") == "logged":
        return "groups"
    return OBJECTIVE_KINDS.get(knobs.get("objective", ""), method_named(slug).kind)
