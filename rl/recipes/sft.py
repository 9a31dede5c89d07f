"""Hyperparameters of supervised fine-tuning, and their presets."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Self

from rl.recipes.base import DISTIL, HIGH_QUALITY, SMALL_GPU_ROWS, AnswerRecipe, Method, RecipeError

DEMONSTRATIONS = ("demonstration", "teacher")
"""Tags of responses to imitate, and sources of their rows: imported, or a better model's."""

ANSWER = "answer"
"""Source of an answer that nobody judged, by the policy that answered most: a teacher of `distil`."""

FEEDBACK_SOURCES = ("correction", *DEMONSTRATIONS, "ratings", "reward")

EXAMPLE_SOURCES = (*FEEDBACK_SOURCES, ANSWER)
"""Sources of demonstrations, by precedence on the same prompt."""

FEEDBACK = ("corrections", "pairs", "scores", "pairs_and_scores")

ALL = "all"

FORM, PREFERRED = "form", "preferred"


@dataclass(frozen=True)
class SFTRecipe(AnswerRecipe):
    """Supervised fine-tuning on what people wrote or liked; the loss covers the response alone."""

    least_steps: ClassVar[Mapping[str, int]] = {"min_steps": 48}
    """`many_rows_factor` doubles it on many rows. On 182 rows with rehearsed general prompts SmolLM2's held-out loss
    still fell at step 48."""

    most_passes: ClassVar[int] = 60
    """More than for preferences: what people wrote may be memorised. 46 answers taught 27 % of unseen prompts in 12
    passes and 79 % in 50 (docs/decisions/24)."""
    many_rows_factor: ClassVar[int] = 2
    """700 answers were learnt to 79-89 % in 264 steps and to 91-97 % in 540 (three made-up worlds; docs/decisions/24).
    """
    sources: str = ALL
    """`all`, or some of `correction`, `demonstration`, `teacher`, `ratings` and `reward`, separated by commas. Each
    prompt uses only the first of these that it has. `distil`: all of them, then the unrated answers of the policy that
    answered most (`answer`)."""

    feedback: str = "corrections"
    """`corrections`: demonstrations by people. `pairs`, `scores`, `pairs_and_scores`: demonstrations are made from that
    feedback, by `teacher`."""
    teacher: str = PREFERRED
    """Source of the answers with feedback other than `corrections`. `preferred`: each prompt's most preferred or liked
    recorded answer (Preferred-FT of Rafailov et al. 2023, arXiv 2305.18290). `form`: a random valid answer, which
    teaches the format alone (`rl.datasets.demonstrations`)."""

    @property
    def is_taught(self) -> bool:
        """True if demonstrations are made from judged answers."""
        return self.feedback != "corrections"

    def micro_batch(self, tokens: float, longest: int, room: float) -> dict[str, int]:
        return self._split(tokens, room)  # a few long rows are computed by themselves

    def __post_init__(self) -> None:
        super().__post_init__()
        self._one_of("feedback", FEEDBACK)
        self._one_of("teacher", (PREFERRED, FORM))
        if unknown := sorted(set(self.source_names) - set(EXAMPLE_SOURCES)):
            raise RecipeError(
                f"sources must be all, distil, or some of {', '.join(EXAMPLE_SOURCES)}; found "
                f"{', '.join(unknown) or 'nothing'}"
            )

    def refit_to_rows(self, rows: int) -> Self:
        """A copy whose passes fit another number of rows; unchanged if passes were named."""
        if self.min_steps == 0 or self.max_steps > 0:
            return self
        return dataclasses.replace(self, epochs=min(self.epochs, SFTRecipe.epochs)).fit_to_rows(rows)

    @property
    def source_names(self) -> tuple[str, ...]:
        named = {ALL: FEEDBACK_SOURCES, DISTIL: EXAMPLE_SOURCES}
        return named.get(self.sources) or tuple(name.strip() for name in self.sources.split(","))


SFT_CONFIG: dict[str, SFTRecipe] = {
    "default": SFTRecipe(learning_rate=1e-4),
    "small_gpu": SFTRecipe(**SMALL_GPU_ROWS, learning_rate=1e-4),
    "high_quality": SFTRecipe(**HIGH_QUALITY, batch_size=8, learning_rate=5e-5, epochs=5.0),
    "cpu": SFTRecipe(min_steps=250, patience=6, batch_size=16, learning_rate=3e-3),
}
"""SFT presets by name, for `train_sft --config`."""

METHOD = Method(
    "sft",
    "corrections",
    SFT_CONFIG,
    "rl.training.sft:SFTTrainer",
    "rl.training.estimates:sft",
    help="Train a policy by supervised fine-tuning (SFT) on corrections, demonstrations and highly rated "
    "responses, and register it. Example: manage.py train_sft --agent widgets",
)
