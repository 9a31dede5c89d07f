"""Refusals of a write, and the collector of its faults: every fault of every field is told at once."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from pydantic import TypeAdapter, ValidationError

from backend.bodies import faults_of

PROBABILITY_TOLERANCE = 0.01
"""By how much probabilities may miss their sum of 1, and two statements of one probability each other (relative)."""


class FeedbackRefused(ValueError):
    """A write that cannot be accepted; `fields` says per field what was expected and what was found."""

    code = "invalid"

    def __init__(self, message: str, fields: Mapping[str, str] | None = None) -> None:
        super().__init__(message)
        self.fields = dict(fields or {})


class FeedbackConflict(FeedbackRefused):
    """The same id was sent before with a different body."""

    code = "conflict"


class DecisionUnknown(FeedbackRefused):
    """The decision that was named does not exist."""

    code = "not_found"


class DecisionPending(FeedbackRefused):
    """The decision that was named was answered, and is not in the database yet."""

    code = "pending"
    retry_after_s = 1


_adapters: dict[int, tuple[object, TypeAdapter[object]]] = {}
"""Id of a type of `fields` -> the type, which keeps its id so, and its validator, made on its first use."""


@dataclass
class Check:
    """Collects what is wrong with a write, so that a caller sees every fault at once."""

    fields: dict[str, str] = field(default_factory=dict)

    def value(self, name: str, kind: Any, value: Any) -> Any:
        """A value as it is stored; None where it is not of this type, with its faults in `fields`."""
        found = _adapters.get(id(kind)) or _adapters.setdefault(id(kind), (kind, TypeAdapter(kind)))
        try:
            return found[1].validate_python(value, strict=True)
        except ValidationError as error:
            self.fields |= faults_of(error, name)
            return None

    def propensity_of_choice(self, candidates: object, response: object, propensity: float | None) -> None:
        """Refuse a propensity that contradicts the probabilities of the candidates: an estimate from it would be wrong.

        Asked only where the propensity and every candidate's `probability` are there: they must sum to 1, and the
        response, where it is one candidate, must have the propensity as its probability, each to within 1 %.
        """
        if propensity is None or not isinstance(candidates, list) or not candidates:
            return
        shares = [one.get("probability") if isinstance(one, Mapping) else None for one in candidates]
        numbers = [float(s) for s in shares if isinstance(s, (int, float)) and not isinstance(s, bool)]
        if len(numbers) != len(candidates):
            return
        total = math.fsum(numbers)
        if min(numbers) < 0 or abs(total - 1) > PROBABILITY_TOLERANCE:
            self.fields["candidates"] = (
                f"expected probabilities that sum to 1 beside a propensity, found a sum of {total:.4g}"
            )
            return
        own = [n for one, n in zip(candidates, numbers, strict=True) if one.get("response") == response]
        if len(own) == 1 and abs(own[0] - propensity) > PROBABILITY_TOLERANCE * max(own[0], propensity):
            self.fields["propensity"] = (
                f"expected {own[0]:.4g}, the probability of the candidate that was the response, found {propensity:.4g}"
            )

    def raise_faults(self, what: str) -> None:
        """Raises FeedbackRefused where anything was wrong."""
        if self.fields:
            raise FeedbackRefused(
                f"{what} refused: " + "; ".join(f"{name}: {fault}" for name, fault in self.fields.items()),
                self.fields,
            )
