"""Table of training methods (files here that define METHOD, and plugins'), recipes by name, defaults of the loop."""

from __future__ import annotations

import pkgutil
import re
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

from rl.recipes.base import DATASET_KINDS, DISTIL, Method, Recipe, RecipeError

FOLDER = Path(__file__).resolve().parent


def _discover() -> dict[str, Method]:
    found = {}
    for module in sorted(pkgutil.iter_modules([str(FOLDER)]), key=lambda module: module.name):
        if module.name != "methods":
            method = getattr(import_module(f"rl.recipes.{module.name}"), "METHOD", None)
            if method is not None:
                found[method.slug] = method
    return found


METHODS: dict[str, Method] = _discover()
"""Slug -> method: built-in ones, and plugins' once registered."""

RECIPES: dict[str, Mapping[str, object]] = {slug: method.presets for slug, method in METHODS.items()}
"""Method -> its presets."""

RLHF = "rlhf"
"""RLHF as one method: a reward model from the feedback, then PPO against it."""

PLANS = (DISTIL, RLHF)
"""Methods of two stages: SFT on one policy's answers, then preferences; a reward model, then PPO."""

AUTO = "auto"
"""The method that fits the feedback."""

JUDGES = tuple(slug for slug, method in METHODS.items() if not method.policy)
"""Methods whose runs make no policy."""

SLUG = r"[a-z][a-z0-9_]{0,25}"
DOTTED_PATH = r"[A-Za-z_][\w.]*:[A-Za-z_]\w*"


def policy_methods() -> list[str]:
    """Methods whose runs make a policy."""
    return [slug for slug, method in METHODS.items() if method.policy]


def method_named(slug: str) -> Method:
    """The method of a slug. Raises RecipeError."""
    if slug not in METHODS:
        raise RecipeError(
            f"no method {slug!r}; known are {', '.join(METHODS)}. A plugin's is known while its package is installed; "
            "the command `doctor` names plugins that were left out"
        )
    return METHODS[slug]


def recipe_named(method: str, preset: str, overrides: Mapping[str, object] | None = None) -> Any:
    """A preset of a method with an operator's overrides (the method's section of RATCHET_CONFIG).

    Raises RecipeError for an unknown method, preset or knob, naming the known ones.
    """
    presets = method_named(method).presets
    if preset not in presets:
        raise RecipeError(f"no preset {preset!r}; there are {', '.join(presets)}")
    return presets[preset].with_knobs(**(overrides or {}))


def method_register(name: str, found: object) -> None:
    """Registers a plugin's method (`backend.plugins`). Raises ValueError if it is no Method, or its slug is taken."""
    if not isinstance(found, Method):
        raise ValueError(f"expected a Method (rl.recipes.base), found {found!r:.80}")
    if METHODS.get(found.slug) == found:
        return
    if not isinstance(found.slug, str) or not re.fullmatch(SLUG, found.slug):
        raise ValueError(f"expected a slug of small letters, digits and _, found {found.slug!r}")
    if found.slug in (*METHODS, *PLANS, AUTO):
        raise ValueError(f"the slug {found.slug!r} is taken by another method: choose another slug")
    if fault := _fault(found):
        raise ValueError(f"method {found.slug}: {fault}")
    METHODS[found.slug] = found
    RECIPES[found.slug] = found.presets


def _fault(method: Method) -> str:
    """Fault of a plugin's method; empty if there is none. Its trainer is imported only when it trains."""
    presets = method.presets if isinstance(method.presets, Mapping) else {}
    if method.kind not in DATASET_KINDS:
        return f"expected a kind of dataset, one of {', '.join(DATASET_KINDS)}; found {method.kind!r}"
    if not isinstance(presets.get("default"), Recipe):
        found = ", ".join(f"{name}: {type(one).__name__}" for name, one in presets.items())
        return f"expected presets with `default`, a Recipe (rl.recipes.base); found {found or 'none'}"
    if other := [name for name, one in presets.items() if type(one) is not method.recipe]:
        return f"expected presets of one class, {method.recipe.__name__}; found another: {', '.join(other)}"
    for what in ("trainer", "estimate"):
        if not re.fullmatch(DOTTED_PATH, str(getattr(method, what))):
            return f"expected {what} as `module:name`, found {getattr(method, what)!r}"
    if not (method.policy and method.adapter):
        return "expected policy and adapter to be true: plugins bring methods that train an adapter which answers"
    knobs = [*method.options]
    knobs += ["reward", method.kl_knob] if method.rewarded else []
    if unknown := [knob for knob in knobs if knob not in presets["default"].as_dict()]:
        return f"expected options that are knobs of {method.recipe.__name__}, found {', '.join(map(repr, unknown))}"
    return "" if method.help else "expected help: what it learns from, and an example"


OBJECTIVE_KINDS = {"pairwise": "pairs", "regression": "scores", "binary": "labels"}
"""Objective of a reward model -> kind of its dataset."""


LINEAR_KINDS = ("pairs", "scores", "corrections", "pairs_and_scores")
"""Kinds of datasets that a linear policy learns from."""


def dataset_kind(slug: str, knobs: Mapping[str, Any]) -> str:
    """Kind of dataset of a method, by a reward model's objective, a linear policy's feedback."""
    if knobs.get("feedback") in LINEAR_KINDS:
        return str(knobs["feedback"])
    return OBJECTIVE_KINDS.get(knobs.get("objective", ""), method_named(slug).kind)


DATASET_CONFIG: dict[str, Any] = {
    "min_samples": 10,
    "rating_margin": 0.25,
    "max_pairs_per_prompt": 4,
    "reward_threshold": 0.5,
}
"""min_samples: fewest samples to train on. rating_margin: least difference of mean ratings (in [0, 1]) of a pair.
max_pairs_per_prompt: most training pairs of a prompt; held-out prompts give one each, so that they are independent.
reward_threshold: reward in [0, 1] from which an unrated response counts as good, and below which as bad."""


ONLINE_LEARNING_CONFIG: Mapping[str, object] = {
    "min_samples_to_retrain": 100,
    "max_buffer_size": 10_000,
    "retrain_interval_hours": 24.0,
    "method": "auto",
    "start_from": "base",
    "replay_share": 1.0,
    "gate": "champion",
    "auto_export": True,
    "auto_deploy": False,
    "auto_rollback": True,
    "keep_best": 3,
    "keep_newest": 5,
    "tick_seconds": 60,
}
"""Defaults of continuous learning (docs/online-learning.md). The section `continuous_learning` of RATCHET_CONFIG
overrides them, the agent's row in the admin overrides both."""


AB_TESTING_KNOBS = (
    "ramp",
    "allocation",
    "floor",
    "group_reserve",
    "metric",
    "goal",
    "alpha",
    "tuning",
    "min_units",
    "not_inferior",
    "guardrails",
    "slices",
    "on_win",
)
"""Fields of a new experiment that the section `ab_testing` of RATCHET_CONFIG may set."""
