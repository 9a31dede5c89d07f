"""The settings of a fine-tuning job in OpenAI's words, as requests and downloaded jobs have them."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, model_validator

from backend.bodies import Sent, value_excerpt
from feedback.storage.fields import Storable
from rl.fine_tuning.files import FineTuningRefused
from rl.fine_tuning.jobs import AUTO, METHODS, JobOrder
from rl.models import TrainingFile


def _auto_or(low: float, high: float, *, whole: bool = False) -> AfterValidator:
    """`auto`, or a number above or at `low` and at most `high`."""

    def check(value: object) -> float | str:
        number = isinstance(value, int if whole else (int, float)) and not isinstance(value, bool)
        if value == AUTO or (number and low <= value <= high):  # type: ignore[operator]
            return value  # type: ignore[return-value]
        kind = "a whole number" if whole else "a number"
        raise ValueError(f"expected auto or {kind} from {low:g} to {high:g}, found {value_excerpt(value)}")

    return AfterValidator(check)


class Hyperparameters(Sent):
    n_epochs: Annotated[Any, _auto_or(1, 50, whole=True)] = AUTO
    batch_size: Annotated[Any, _auto_or(1, 256, whole=True)] = AUTO
    learning_rate_multiplier: Annotated[Any, _auto_or(1e-4, 100)] = AUTO


class PreferenceHyperparameters(Hyperparameters):
    beta: Annotated[Any, _auto_or(1e-3, 2)] = AUTO


class ReinforcementHyperparameters(Hyperparameters):
    eval_interval: Annotated[Any, _auto_or(1, 10_000, whole=True)] = AUTO
    eval_samples: Annotated[Any, _auto_or(1, 10_000, whole=True)] = AUTO
    compute_multiplier: Literal["auto"] = "auto"
    reasoning_effort: Literal["default"] = "default"


class Supervised(Sent):
    hyperparameters: Hyperparameters = Hyperparameters()


class Preference(Sent):
    hyperparameters: PreferenceHyperparameters = PreferenceHyperparameters()


class Reinforcement(Sent):
    grader: dict[str, object]
    hyperparameters: ReinforcementHyperparameters = ReinforcementHyperparameters()


class MethodSent(Sent):
    type: Literal["supervised", "dpo", "reinforcement"]
    supervised: Supervised | None = None
    dpo: Preference | None = None
    reinforcement: Reinforcement | None = None

    @model_validator(mode="after")
    def is_one(self) -> MethodSent:
        others = {"supervised", "dpo", "reinforcement"} - {self.type}
        if given := [name for name in sorted(others) if getattr(self, name) is not None]:
            raise ValueError(f"{given[0]}: settings of another method than {self.type}")
        return self


def _suffix_checked(text: str) -> str:
    if not re.fullmatch(r"[A-Za-z0-9._-]{0,64}", text):
        raise ValueError("expected at most 64 letters, digits, dots, - and _")
    return text


Tag = Annotated[Storable, Field(max_length=512)]
ModelName = Annotated[Storable, Field(min_length=1, max_length=500)]


class JobSettings(Sent):
    method: MethodSent | None = None
    hyperparameters: Hyperparameters | None = None
    """OpenAI's older place for those of `supervised`."""
    seed: Annotated[int, Field(ge=0, le=2**31 - 1)] | None = None
    suffix: Annotated[str, AfterValidator(_suffix_checked)] = ""
    metadata: Annotated[dict[Annotated[Storable, Field(max_length=64)], Tag], Field(max_length=16)] = {}

    def order(self, model: str, training: TrainingFile, validation: TrainingFile | None) -> JobOrder:
        """The order of a job with these settings. Raises FineTuningRefused."""
        kind = self.method.type if self.method else "supervised"
        own = getattr(self.method, kind) if self.method else None
        chosen = own.hyperparameters if own else self.hyperparameters if kind == "supervised" else None
        if self.hyperparameters is not None and chosen is not self.hyperparameters:
            raise FineTuningRefused("hyperparameters", "give them under `method` alone")
        return JobOrder(
            model=model,
            training=training,
            validation=validation,
            method=kind,
            hyperparameters=chosen.model_dump(include=set(METHODS[kind].hyperparameters)) if chosen else {},
            seed=self.seed,
            suffix=self.suffix,
            metadata=self.metadata,
            grader=getattr(own, "grader", None),
        )
