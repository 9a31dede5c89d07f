"""Named scores of tracing and evaluation tools as ratings: thumbs, scores in [0, 1], tags; other numbers are outcomes.

Such scores carry no scale. A number is a score only in [0, 1]; outside it is kept as an outcome under its name, which
counts for nothing until somebody says what it is worth. Of a name that says that less is better (toxicity,
hallucination, latency) a number is an outcome too, and yes or no a tag: which way it points is not said.
"""

from __future__ import annotations

import math
import re
import uuid
from collections.abc import Iterator
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any

from feedback.storage.responses import value_excerpt
from feedback.transfer.formats.base import thumb_of
from feedback.transfer.formats.cells import listed
from feedback.transfer.formats.records import (
    ImportedOutcome,
    ImportedRating,
    ImportedReference,
    OutcomeReference,
    Record,
    RowError,
    RowSkipped,
    text_of,
)

PASS_WORDS = ("yes", "true", "pass", "passed", "correct", "right", "satisfied", "helpful", "\U0001f44d", "+1")
FAIL_WORDS = listed("no false fail failed incorrect wrong unsatisfied unhelpful 👎 -1")

LESS_IS_BETTER = re.compile(
    r"toxic|hallucinat|bias|harm|error|violat|jailbreak|latenc|duration|cost|perplex|distance|pii|risk|refus|leak",
    re.I,
)
"""In the name of a score: less of it is better, or may be."""


@dataclass(frozen=True, slots=True)
class NamedScore:
    """One score by one author: what it says, and where."""

    name: str
    value: object
    """A boolean, a number, a text, or nothing."""
    author: str = ""
    """A person, a judge model, or "" where the file does not say."""
    simulated: bool = False
    label: Any = None
    """A word beside the number, such as pass or polite."""
    notes: str = ""
    correction: str | None = None
    scored_at: datetime | None = None
    id: uuid.UUID | None = None
    """Id of the rating, where the file's is a UUID."""
    binary: bool = True
    """True if 0 and 1 are thumbs rather than the ends of a scale."""

    def at_time(self, at: datetime | None) -> NamedScore:
        return replace(self, scored_at=at)

    @property
    def rater(self) -> str:
        """Scores of different names by one author answer different questions: none supersedes the other."""
        return f"{self.author}: {self.name}"[:200] if self.author else self.name[:200]

    def facts(self) -> tuple[ImportedRating | None, ImportedOutcome | None]:
        """Meaning as a rating, and as an outcome where it is a number of unknown scale or direction."""
        name = text_of(self.name, "name", required=True)
        words: dict[str, Any] = {"tags": (name[:100],)}
        number = self._number()
        outcome: ImportedOutcome | None = None
        less = LESS_IS_BETTER.search(name) is not None
        thumb = word_thumb(self.value) or word_thumb(self.label)
        verdict = False
        if isinstance(self.value, bool):
            thumb = "up" if self.value else "down"
        elif number is not None and self.binary and number in (0, 1) and not thumb:
            thumb = "up" if number else "down"
        if less and number is not None:
            outcome = ImportedOutcome(outcome_name(name), number, self.scored_at)
        elif less and thumb:
            content = self.value if self.value is not None else self.label
            words["tags"] = (f"{name}: {str(content).lower()}"[:100],)
            verdict = True
        elif thumb:
            words["thumb"], verdict = thumb, True
        elif number is not None and 0 <= number <= 1:
            words["score"], verdict = number, True
        elif number is not None:
            outcome = ImportedOutcome(outcome_name(name), number, self.scored_at)
        label = self.value if isinstance(self.value, str) else self.label
        if isinstance(label, str) and label.strip() and not word_thumb(label):
            words["tags"], verdict = (f"{name}: {text_of(label, 'label')}"[:100],), True
        if self.notes.strip():
            words["notes"], verdict = self.notes, True
        if self.correction is not None:
            words["correction"], verdict = self.correction, True
        if not verdict:
            return None, outcome
        rating = ImportedRating(
            rater=self.rater,
            rater_kind="simulated" if self.simulated else "human",
            created_at=self.scored_at,
            id=self.id,
            **words,
        )
        return rating, outcome

    def _number(self) -> float | None:
        if isinstance(self.value, bool) or self.value is None or isinstance(self.value, str):
            return None
        if not isinstance(self.value, (int, float)):
            raise RowError(
                f"{self.name}: expected a number, a text, true or false, found {value_excerpt(self.value)}"
            )
        try:
            number = float(self.value)
        except OverflowError:
            number = math.inf
        if not math.isfinite(number):
            raise RowError(
                f"{self.name}: expected a number within the range of a double, found {value_excerpt(self.value)}"
            )
        return number

    def references(self, line: int, key: str, reference: str, *also: str) -> Iterator[Record]:
        """The facts of a decision that stands elsewhere; a row is skipped that says nothing at all."""
        rating, outcome = self.facts()
        others = tuple(name for name in also if name)
        if rating is not None:
            yield ImportedReference(line, key, reference, rating, also=others)
        if outcome is not None:
            yield OutcomeReference(line, key, reference, outcome, also=others)
        if rating is None and outcome is None:
            yield RowSkipped(line, key, "no score, label, comment or correction")


def word_thumb(word: object) -> str:
    """up or down, where a word says that something passed or failed; else ""."""
    if not isinstance(word, str):
        return ""
    plain = word.strip().lower().strip(":").replace("\ufe0f", "")
    # an emoji of any skin tone says the same
    plain = "".join(mark for mark in plain if not 0x1F3FB <= ord(mark) <= 0x1F3FF)
    return "up" if plain in PASS_WORDS else "down" if plain in FAIL_WORDS else thumb_of(plain)


def outcome_name(name: str) -> str:
    """A score's name as an outcome's: lower-case letters, digits, - and _."""
    slug = re.sub(r"[^a-z0-9_-]+", "_", name.lower()).strip("_-")[:64].strip("_-")
    return slug or "score"


def ratings_and_outcomes(
    scores: list[NamedScore],
) -> tuple[tuple[ImportedRating, ...], tuple[ImportedOutcome, ...]]:
    """The facts of scores that stand in the row of their decision."""
    ratings: list[ImportedRating] = []
    outcomes: list[ImportedOutcome] = []
    for score in scores:
        rating, outcome = score.facts()
        if rating is not None:
            ratings.append(rating)
        if outcome is not None:
            outcomes.append(outcome)
    return tuple(ratings), tuple(outcomes)
