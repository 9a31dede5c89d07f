"""Hyperparameters of a linear policy, and their presets."""

from __future__ import annotations

import math
from dataclasses import dataclass

from rl.recipes.base import BasicRecipe, Method, RecipeError

AUTO = "auto"
FEEDBACK = (AUTO, "pairs", "scores", "corrections", "pairs_and_scores")


@dataclass(frozen=True)
class LinearRecipe(BasicRecipe):
    """Regularised logistic regression on features of prompt and answer (`rl.linear.fit`)."""

    feedback: str = AUTO
    """Kind of feedback: `pairs`, `scores` (thumbs, stars, scores, rewards), `pairs_and_scores` (pairs, and scores of
    answers in no pair), `corrections` (answers people wrote, showed or liked); `auto` takes what `auto` of the other
    methods would."""
    penalty: str = AUTO
    """Inverse strength of the L2 penalty, above 0 (scikit-learn's C); `auto` cross-validates 0.03 to 10."""
    features: str = AUTO
    """Features of a prompt: `words`, `crossed` (also two fields at once), `parts` (also parts of words), `phrases`
    (also two or three words in a row); `auto` cross-validates them."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._one_of("feedback", FEEDBACK)
        self._one_of("features", (AUTO, "words", "crossed", "parts", "phrases"))
        if self.penalty != AUTO:
            try:
                value = float(self.penalty)
            except ValueError:
                value = math.nan
            if not (math.isfinite(value) and value > 0):
                raise RecipeError(f"penalty must be above 0, or auto; found {self.penalty!r}")


LINEAR_CONFIG: dict[str, LinearRecipe] = {"default": LinearRecipe()}
"""The only preset; cross-validation does the rest."""

METHOD = Method(
    "linear",
    "pairs",
    LINEAR_CONFIG,
    "rl.linear.fit:fit",
    "",
    help="Train a linear policy (regularised logistic regression) that chooses among listed candidates, "
    "without a base model and within seconds, and register it. Example: manage.py train_linear --agent "
    "widgets",
    options={
        "feedback": (
            "Kind of feedback: auto, pairs, scores (also thumbs and stars), pairs_and_scores or corrections. Example: "
            "--feedback scores"
        ),
        "penalty": (
            "Inverse strength of the L2 penalty (scikit-learn's C), or auto: cross-validated. Example: "
            "--penalty 0.3"
        ),
        "features": (
            "Features of a prompt: words, crossed (pairs of fields), parts (parts of words), phrases (words in a "
            "row), or auto. "
            "Example: --features crossed"
        ),
    },
    adapter=False,
)
