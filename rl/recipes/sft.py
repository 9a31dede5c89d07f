"""The knobs of supervised fine-tuning, and their presets."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import ClassVar, Self

from rl.recipes.base import SEARCH, AnswerRecipe, Method, RecipeError

DEMONSTRATIONS = ("demonstration", "teacher")
"""Tags of responses to be imitated, and what their rows name as source: brought from elsewhere, or a better model's."""

EXAMPLE_SOURCES = ("correction", *DEMONSTRATIONS, "ratings", "reward")
"""Sources of a demonstration, the one that goes before the others on the same prompt first."""

FEEDBACK = ("corrections", "pairs", "scores", "pairs_and_scores")

ALL = "all"

CLASSIFIER, FORM, PREFERRED = "classifier", "form", "preferred"


@dataclass(frozen=True)
class SFTRecipe(AnswerRecipe):
    """Supervised fine-tuning on what was written to be said or is well liked; the loss is on the response alone."""

    supports_full_finetuning: ClassVar[bool] = True

    most_passes: ClassVar[int] = 60
    """More than preferences get: what people wrote is to be said as it stands. 46 answers taught 27 % of unseen prompts
    in 12 passes and 79 % in 50 (docs/decisions/24)."""
    many_rows_factor: ClassVar[int] = 2
    """700 answers were learnt to 79 to 89 % in 264 steps and to 91 to 97 % in 540 (three made-up worlds;
    docs/decisions/24)."""
    sources: str = ALL
    """Sources of demonstrations: `all`, or some of `correction`, `demonstration`, `teacher`, `ratings` and
    `reward`, with commas between. On one prompt only those of the first of these that it has are shown."""

    feedback: str = "corrections"
    """`corrections`: what people wrote, showed or liked is shown. `pairs`, `scores`, `pairs_and_scores`: a linear
    classifier learns from the preferences, from the thumbs, stars and scores, or from both, and its answer to each
    prompt is shown; for answers that are a choice, and base models that know nothing of the world."""
    teacher: str = CLASSIFIER
    """Source of the answers with feedback other than `corrections`: the `classifier`; `preferred`, the answer to
    each prompt that people preferred or liked most, as it was given (Preferred-FT of Rafailov et al. 2023,
    arXiv 2305.18290); `form` shows any answer that the agent can act on, drawn by lot, liked or not: the form of an
    answer, and no taste (`rl.agents.random_answers`)."""

    recombine: bool = False
    """True shows, beside what people wrote (feedback `corrections`), a linear classifier's answers to prompts made of
    the parts of theirs, up to 1,000 prompts in all; for answers that are a choice, and base models that know nothing of
    the world."""

    @property
    def is_taught(self) -> bool:
        """True where demonstrations are made of the feedback, not read from it alone."""
        return self.recombine or self.feedback != "corrections"

    def __post_init__(self) -> None:
        super().__post_init__()
        self._one_of("feedback", FEEDBACK)
        if self.recombine and self.feedback != "corrections":
            raise RecipeError(
                f"recombine: expected feedback corrections, found {self.feedback}, whose classifier answers recombined "
                "prompts already"
            )
        self._one_of("teacher", (CLASSIFIER, PREFERRED, FORM))
        if unknown := sorted(set(self.source_names) - set(EXAMPLE_SOURCES)):
            raise RecipeError(
                f"sources must be all, or some of {', '.join(EXAMPLE_SOURCES)}; found {', '.join(unknown) or 'nothing'}"
            )

    def refit_to_rows(self, rows: int) -> Self:
        """A copy whose passes fit so many rows instead of those it was fitted to; the same where passes were named."""
        if self.min_steps == 0 or self.max_steps > 0:
            return self
        return dataclasses.replace(self, epochs=min(self.epochs, SFTRecipe.epochs)).fit_to_rows(rows)

    @property
    def source_names(self) -> tuple[str, ...]:
        """Sources as a list."""
        return (
            EXAMPLE_SOURCES
            if self.sources == ALL
            else tuple(name.strip() for name in self.sources.split(","))
        )


SFT_CONFIG: dict[str, SFTRecipe] = {
    "default": SFTRecipe(learning_rate=1e-4),
    "small_gpu": SFTRecipe(
        learning_rate=1e-4, lora_r=8, lora_alpha=16, batch_size=1, gradient_accumulation=4, max_length=768,
        quantization="4bit", gradient_checkpointing=True,
    ),
    "high_quality": SFTRecipe(
        lora_r=64, lora_alpha=128, batch_size=8, max_length=2048, learning_rate=5e-5,
        epochs=5.0,
    ),
    "cpu": SFTRecipe(
        epochs=3.0, min_steps=250, patience=6, batch_size=16, learning_rate=3e-3, lora_r=16, lora_alpha=32,
    ),
}  # fmt: skip
"""SFT presets by name: what `train_sft --config` takes."""

METHOD = Method(
    "sft",
    "corrections",
    SFT_CONFIG,
    "rl.training.sft:SFTTrainer",
    "rl.training.estimates:sft",
    help="Train a policy by supervised fine-tuning (SFT) on corrections, demonstrations and highly rated "
    "responses, and register it. Example: manage.py train_sft --agent widgets",
    options=SEARCH,
)
