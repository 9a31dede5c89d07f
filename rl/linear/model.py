"""A linear policy: log-probabilities of the answers it may choose from. No torch. Pure.

log p(answer | prompt) is the log-softmax over the answers of score(x, a) = sum over g in a of (b[g] + sum over f in x
of W[g, f] x[f]). An answer of a closed set has one feature, itself; an answer listed with each prompt also has its
words. The file is JSON with weights by name: readable in any language, nothing in it runs.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rl.agents.base import answer_plain
from rl.agents.fields import composed, json_read, leaves, plain
from rl.linear.features import (
    FAMILIES,
    OF_ANSWERS,
    VALUES,
    Features,
    Message,
    answer_features,
    message_text,
    prompt_features,
)

WEIGHTS = "linear_policy.json"
"""File name in a policy's folder."""

FORMAT = "ratchet-linear-1"

CLOSED, LISTED, FIELDS = "closed", "listed", "fields"
"""A closed set of answers; answers listed with each prompt; objects made of a closed set of values per field."""

ABSENT = "absent"
"""Value of a field that an object lacks; no JSON text equals it."""

MOST_OPTIONS = 24
"""Most objects offered in FIELDS mode: the likeliest and its neighbours."""

UNMET = 5.0
"""Log-odds of an unknown answer below the least likely of a closed set."""

Vector = NDArray[np.float64]


class LinearPolicyError(ValueError):
    """No linear policy in a file, or no answer to choose for a prompt; the message says what was expected."""


@dataclass(frozen=True)
class FieldPlace:
    """A field of an object, or one item of its list."""

    path: tuple[str, ...]
    item: str = ""
    """JSON text of the item; empty for a whole field."""

    def value_in(self, found: Mapping[tuple[str, ...], object]) -> str:
        """The field's value among an answer's leaves."""
        if self.path not in found:
            return ABSENT if not self.item else "false"
        value = found[self.path]
        if not self.item:
            return plain(value)
        return "true" if isinstance(value, list) and self.item in map(plain, value) else "false"


@dataclass(frozen=True)
class LinearPolicy:
    """Weights by answer feature and prompt feature, with the answers it was trained on."""

    agent: str
    mode: str
    """CLOSED, LISTED or FIELDS."""
    families: tuple[str, ...]
    """Families of prompt features, and of OF_ANSWERS (`rl.linear.features`)."""
    answers: tuple[str, ...]
    """Answers it may give if none are listed, as the agent writes them."""
    quoted: bool
    """True if answers occur in their prompts: without a list it chooses among those found there."""
    rows: tuple[str, ...]
    """Answer features, in the order of the weights' rows."""
    columns: tuple[str, ...]
    """Prompt features, in the order of the weights' columns."""
    weights: Vector
    """[answer features, prompt features], log-odds per unit of a feature."""
    bias: Vector
    """[answer features]."""
    facts: Mapping[str, Any] = field(default_factory=dict)
    """Facts of its training: feedback, penalty, rows, cross-validation."""
    parts: tuple[tuple[FieldPlace, LinearPolicy], ...] = ()
    """FIELDS only: a policy of each field's value (JSON text or ABSENT); of a list item, whether it is in the list."""
    _row: dict[str, int] = field(default_factory=dict, repr=False, compare=False)
    _column: dict[str, int] = field(default_factory=dict, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.weights.shape != (len(self.rows), len(self.columns)) or self.bias.shape != (len(self.rows),):
            raise LinearPolicyError(
                f"expected weights of {len(self.rows)} x {len(self.columns)}, found {self.weights.shape}"
            )
        self._row.update({name: place for place, name in enumerate(self.rows)})
        self._column.update({name: place for place, name in enumerate(self.columns)})

    def scores(self, messages: Sequence[Message], answers: Sequence[str]) -> list[float]:
        """The score of each answer in log-odds; only differences within one prompt have a meaning."""
        if self.mode == FIELDS:
            return self._field_scores(messages, answers)
        known = self.row_scores(prompt_features(messages, self.families))
        found = [self._sum(known, answer) for answer in answers]
        if None not in found or self.mode != CLOSED or not len(known):
            return [0.0 if score is None else score for score in found]
        # an answer of a closed set without data must not win for lack of it
        met = [score for answer in self.answers if (score := self._sum(known, answer)) is not None]
        worst = min(met, default=float(known.min()))
        return [worst - UNMET if score is None else score for score in found]

    def _field_scores(self, messages: Sequence[Message], answers: Sequence[str]) -> list[float]:
        """Sum over the fields of log p of the answer's value; UNMET below the least likely for an unknown one."""
        found = [dict(leaves(json_read(answer))) for answer in answers]
        totals = [0.0] * len(answers)
        for place, part in self.parts:
            known = dict(zip(part.answers, part.log_probabilities(messages, part.answers), strict=True))
            least = min(known.values()) - UNMET
            for number, one in enumerate(found):
                totals[number] += known.get(place.value_in(one), least)
        return totals

    def _field_options(self, messages: Sequence[Message]) -> list[str]:
        """The likeliest object, and those that differ from it in one field by its second value."""
        best: list[str] = []
        others: list[tuple[float, int, str]] = []
        for number, (_, part) in enumerate(self.parts):
            # rounded: equal values stay in the order of the answers, on every machine and after a reload
            scores = [round(score, 9) for score in part.log_probabilities(messages, part.answers)]
            order = sorted(range(len(scores)), key=scores.__getitem__, reverse=True)
            best.append(part.answers[order[0]])
            if len(order) > 1:
                others.append((scores[order[0]] - scores[order[1]], number, part.answers[order[1]]))
        chosen = [best]
        for _, number, value in sorted(others)[: MOST_OPTIONS - 1]:
            chosen.append([*best[:number], value, *best[number + 1 :]])
        return list(dict.fromkeys(map(self._object, chosen)))

    def _object(self, values: Sequence[str]) -> str:
        """The answer with these values in its fields."""
        lists: dict[tuple[str, ...], list[object]] = {}
        found: list[tuple[tuple[str, ...], object]] = []
        for (place, _), value in zip(self.parts, values, strict=True):
            if place.item and place.path not in lists:
                lists[place.path] = []
                found.append((place.path, lists[place.path]))
            if place.item and value == "true":
                lists[place.path].append(json.loads(place.item))
            elif not place.item and value != ABSENT:
                found.append((place.path, json.loads(value)))
        return json.dumps(composed(found), ensure_ascii=False)

    def _sum(self, known: Vector, answer: str) -> float | None:
        """Sum over an answer's features; None if none is known."""
        places = [self._row[name] for name in self.features_of(answer) if name in self._row]
        return float(sum(known[place] for place in places)) if places else None

    def row_scores(self, features: Features) -> Vector:
        """Weighted sum of a prompt's features per answer feature."""
        present = [(self._column[name], value) for name, value in features.items() if name in self._column]
        if not present:
            return self.bias
        places, values = zip(*present, strict=True)
        found: Vector = self.bias + self.weights[:, list(places)] @ np.array(values)
        return found

    def features_of(self, answer: str) -> tuple[str, ...]:
        """Features of an answer, independent of blanks and JSON spacing."""
        text = answer_plain(answer)
        return features_read(text, self.mode, self.families)

    def log_probabilities(self, messages: Sequence[Message], answers: Sequence[str]) -> list[float]:
        """log p of each of these answers in nats; their probabilities sum to 1."""
        return log_softmax(self.scores(messages, answers))

    def options(self, messages: Sequence[Message]) -> list[str]:
        """Answers it may give if none are listed. Raises LinearPolicyError if it knows none for this prompt."""
        if self.mode == FIELDS:
            return self._field_options(messages)
        if not self.quoted:
            return list(self.answers)
        text = "\n".join(message_text(message) for message in messages)
        found = [answer for answer in self.answers if all(part in text for part in answer_parts(answer))]
        if not found:
            raise LinearPolicyError(
                f"expected a prompt that names one of the {len(self.answers)} answers learnt from, found none of them; "
                "list the answers (`candidates`, or the agent's state)"
            )
        return found

    def restrict(self, columns: Set[str], answers: Set[str]) -> LinearPolicy:
        """A copy with only these prompt features, these answers and their parts."""
        if self.mode == FIELDS:
            read = [dict(leaves(json_read(answer))) for answer in answers]
            return self._parts_kept(
                lambda place, part: part.restrict(columns, {place.value_in(one) for one in read})
            )
        kept = {answer_plain(answer) for answer in answers}
        features = {name for answer in answers for name in self.features_of(answer)}
        return self._part(
            [place for place, name in enumerate(self.rows) if name in features],
            [place for place, name in enumerate(self.columns) if name in columns],
            [answer for answer in self.answers if answer_plain(answer) in kept],
        )

    def keep(self, is_kept: Callable[[str], bool]) -> LinearPolicy:
        """A copy with the prompt features, answer features and answers that a test accepts."""
        if self.mode == FIELDS:
            free = self._parts_kept(lambda _, part: part.keep(is_kept))
            parts = tuple(
                one for one in free.parts if is_kept(one[0].item) and all(map(is_kept, one[0].path))
            )
            return replace(free, parts=parts, _row={}, _column={})
        return self._part(
            [place for place, name in enumerate(self.rows) if is_kept(name)],
            [place for place, name in enumerate(self.columns) if is_kept(name)],
            [answer for answer in self.answers if is_kept(answer)],
        )

    def _parts_kept(self, remainder: Callable[[FieldPlace, LinearPolicy], LinearPolicy]) -> LinearPolicy:
        """A copy with each part replaced by its remainder; parts without an answer are dropped."""
        kept = [(place, remainder(place, part)) for place, part in self.parts]
        parts = tuple((place, part) for place, part in kept if part.answers)
        return replace(self, parts=parts, _row={}, _column={})

    @property
    def words(self) -> tuple[object, ...]:
        """Every text it holds: prompt features, answer features, answers, fields."""
        return (
            self.columns,
            self.rows,
            self.answers,
            tuple((place.path, place.item, part.words) for place, part in self.parts),
        )

    def _part(
        self, row_places: Sequence[int], column_places: Sequence[int], answers: Sequence[str]
    ) -> LinearPolicy:
        return replace(
            self,
            answers=tuple(answers),
            rows=tuple(self.rows[place] for place in row_places),
            columns=tuple(self.columns[place] for place in column_places),
            weights=self.weights[np.ix_(row_places, column_places)],
            bias=self.bias[row_places],
            _row={},
            _column={},
        )

    def save(self, folder: Path) -> Path:
        """Writes the file into a folder, atomically."""
        content = {"format": FORMAT, **self._body()}
        folder.mkdir(parents=True, exist_ok=True)
        path, half = folder / WEIGHTS, folder / f".{WEIGHTS}.{os.getpid()}"
        half.write_text(json.dumps(content, ensure_ascii=False) + "\n", "utf-8")
        half.replace(path)
        return path

    def _body(self) -> dict[str, object]:
        body: dict[str, object] = {
            "agent": self.agent,
            "mode": self.mode,
            "families": self.families,
            "answers": self.answers,
            "quoted": self.quoted,
            "prompt_features": self.columns,
            "answer_features": self.rows,
            "bias": [_short(value) for value in self.bias],
            "weights": [[_short(value) for value in row] for row in self.weights],
            "facts": self.facts,
        }
        if self.mode == FIELDS:
            body["parts"] = [
                {"path": place.path, "item": place.item, **part._body()} for place, part in self.parts
            ]
        return body

    @classmethod
    def load(cls, folder: Path) -> LinearPolicy:
        """Reads what `save` wrote. Raises LinearPolicyError."""
        path = folder / WEIGHTS
        try:
            body = json.loads(path.read_text("utf-8"))
            if body["format"] != FORMAT:
                raise LinearPolicyError(f"{path}: expected the format {FORMAT}, found {body['format']!r:.40}")
            return cls._of_body(body, path)
        except LinearPolicyError:
            raise
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise LinearPolicyError(f"expected a linear policy at {path}, found none ({error})") from error

    @classmethod
    def _of_body(cls, body: Mapping[str, Any], path: Path) -> LinearPolicy:
        of_prompt = tuple(name for name in body["families"] if name not in OF_ANSWERS)
        if body["mode"] not in (CLOSED, LISTED, FIELDS) or of_prompt not in FAMILIES:
            raise LinearPolicyError(f"{path}: made by another version ({body['mode']}, {body['families']})")
        rows, columns = tuple(map(str, body["answer_features"])), tuple(map(str, body["prompt_features"]))
        parts = [
            (FieldPlace(tuple(map(str, part["path"])), str(part["item"])), cls._of_body(part, path))
            for part in body.get("parts", ())
        ]
        return cls(
            agent=str(body["agent"]),
            mode=body["mode"],
            families=tuple(body["families"]),
            answers=tuple(map(str, body["answers"])),
            quoted=bool(body["quoted"]),
            rows=rows,
            columns=columns,
            weights=np.array(body["weights"], dtype=np.float64).reshape(len(rows), len(columns)),
            bias=np.array(body["bias"], dtype=np.float64),
            facts=dict(body["facts"]),
            parts=tuple(parts),
        )


def features_read(answer: str, mode: str, families: tuple[str, ...]) -> tuple[str, ...]:
    """Features of a plain answer; in a closed set without the family VALUES only the answer itself."""
    if mode == CLOSED and VALUES not in families:
        return (f"is {answer}",)
    return answer_features(answer, families)


def _short(value: float) -> float:
    return float(f"{value:.6g}")


def log_softmax(scores: Sequence[float]) -> list[float]:
    """Scores minus the log of the sum of their exponentials."""
    best = max(scores)
    total = best + math.log(math.fsum(math.exp(score - best) for score in scores))
    return [score - total for score in scores]


def answer_parts(answer: str) -> list[str]:
    """The texts of an answer: itself, or the texts within an object."""
    try:
        found = json.loads(answer)
    except (ValueError, RecursionError):
        found = None
    if isinstance(found, Mapping):
        return [value for value in found.values() if isinstance(value, str) and value]
    return [answer.strip()]
