"""Formats as declarations: paths say which part of a row holds what, and one engine reads them.

A path is a JMESPath expression: `model`, `usage.prompt_tokens`, `"request.body"`, `updated_at || created_at`. The
function `json(...)` in it decodes JSON that stands as a text. A path that is met by nothing gives None.
"""

from __future__ import annotations

import math
import operator
import re
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from functools import cache, partial, reduce
from typing import Any, TypeAlias

import jmespath
from jmespath.exceptions import JMESPathTypeError
from jmespath.functions import Functions, signature
from jmespath.visitor import TreeInterpreter

from feedback.messages import Completion, Message
from feedback.storage.responses import value_excerpt
from feedback.transfer.formats.base import key_of, thumb_of
from feedback.transfer.formats.calls import (
    call_decision,
    json_value,
    metadata_retained,
    text_or_empty,
    whole_of,
)
from feedback.transfer.formats.cells import JsonObject, listed
from feedback.transfer.formats.records import (
    ImportedDecision,
    ImportedOutcome,
    ImportedRating,
    ImportedReference,
    OutcomeReference,
    Record,
    RowError,
    RowLeftOut,
    RowSkipped,
    list_of,
    mapping_of,
    messages_of,
    number_of,
    tags_of,
    text_of,
    time_of,
    uuid_of,
)

MAX_NOTES = 20_000
"""Characters kept of what a judge wrote."""


class _Functions(Functions):
    """JMESPath's functions, and one of ours."""

    @signature({"types": []})
    def _func_json(self, value: object) -> object:
        return json_value(value)


_interpreter = TreeInterpreter(jmespath.Options(custom_functions=_Functions()))


NUMBERS_COMPARED = {"lt": operator.lt, "lte": operator.le, "gt": operator.gt, "gte": operator.ge}


@cache
def _reader(path: str) -> Callable[[object], object]:
    return _compiled(jmespath.compile(path).parsed)


def _compiled(node: JsonObject) -> Callable[[Any], Any]:
    """A function for a parsed path: the common kinds directly, which takes half the time of interpreting them."""
    kind, children = node["type"], [_compiled(child) for child in node["children"] if isinstance(child, dict)]
    if kind == "field":
        name = node["value"]
        return lambda row: row.get(name) if isinstance(row, (dict, Mapping)) else None
    if kind == "subexpression":
        return lambda row: reduce(lambda value, inner: inner(value), children, row)
    if kind in ("or_expression", "and_expression"):
        first, second = children
        wanted = kind == "or_expression"
        return lambda row: found if _is_true(found := first(row)) is wanted else second(row)
    if kind == "not_expression":
        return lambda row: not _is_true(children[0](row))
    if kind == "comparator" and node["children"][1]["type"] == "literal":
        compared = node["children"][1]["value"]
        if isinstance(compared, str) and node["value"] in ("eq", "ne"):
            wanted = node["value"] == "eq"
            return lambda row: (children[0](row) == compared) is wanted
        if type(compared) is int and node["value"] in NUMBERS_COMPARED:
            compare = NUMBERS_COMPARED[node["value"]]
            return lambda row: (
                compare(found, compared) if type(found := children[0](row)) in (int, float) else None
            )
    if kind == "function_expression" and node["value"] == "json":
        return lambda row: json_value(children[0](row))
    return partial(_visit, node)


def _is_true(value: object) -> bool:
    """True as JMESPath has it: also of 0."""
    return bool(value) or (value == 0 and value is not False)


def _visit(parsed: JsonObject, row: object) -> object:
    try:
        return _interpreter.visit(parsed, row)
    except (JMESPathTypeError, TypeError):  # a text where a number is compared: as if nothing stood there
        return None


def at(row: object, path: str) -> Any:
    """The value at a path; None where nothing is there, and for an empty path."""
    return _reader(path)(row) if path else None


def slug(name: str) -> str:
    """A function's or a project's name as an agent's slug."""
    return re.sub(r"[^a-z0-9_-]+", "-", name.lower()).strip("-_")[:64].strip("-_")


def _milliseconds(value: object, what: str) -> float | None:
    return None if value is None or value == "" else number_of(value, what)


FIELDS: dict[str, Callable[[object, str], Any]] = {
    "agent": lambda value, what: slug(text_or_empty(value)),
    "id": lambda value, what: uuid_of(value),
    "policy": lambda value, what: text_or_empty(value),
    "unit": lambda value, what: text_or_empty(value),
    "run_id": lambda value, what: text_or_empty(value),
    "rater": lambda value, what: text_or_empty(value),
    "tokens_in": lambda value, what: whole_of(value),
    "tokens_out": lambda value, what: whole_of(value),
    "latency_ms": _milliseconds,
    "latency_s": _milliseconds,
    "created_at": time_of,
    "ended_at": time_of,
    "tags": lambda value, what: tags_of(json_value(value) or None, what),
}
"""Field of a decision -> what reads its value. `latency_s` and `ended_at` become `latency_ms`. Raises RowError."""


def facts_at(row: object, fields: Mapping[str, str]) -> dict[str, Any]:
    """Fields of a decision, each at its path. Raises RowError."""
    facts = {name: FIELDS[name](at(row, path), path) for name, path in fields.items()}
    seconds, ended = facts.pop("latency_s", None), facts.pop("ended_at", None)
    if facts.get("latency_ms") is None and seconds is not None:
        facts["latency_ms"] = seconds * 1000
    if ended is not None and facts.get("created_at") is not None:
        facts["latency_ms"] = max((ended - facts["created_at"]).total_seconds() * 1000, 0.0)
    return facts


def metadata_at(row: object, paths: Mapping[str, str]) -> dict[str, Any]:
    """Metadata of the values that say something, each at its path."""
    return metadata_retained(**{name: at(row, path) for name, path in paths.items()})


def leave_out(row: object, reasons: Mapping[str, str]) -> None:
    """Raises RowLeftOut with the first reason whose path holds something."""
    for path, reason in reasons.items():
        if at(row, path):
            raise RowLeftOut(reason)


def notes_of(value: object, what: str) -> str:
    """What somebody wrote, as far as it is kept. Raises RowError."""
    return text_of(value or "", what)[:MAX_NOTES]


# --- Named scores as ratings: thumbs, scores in [0, 1], tags; other numbers are outcomes -------------------

PASS_WORDS = ("yes", "true", "pass", "passed", "correct", "right", "satisfied", "helpful", "\U0001f44d", "+1")
FAIL_WORDS = listed("no false fail failed incorrect wrong unsatisfied unhelpful 👎 -1")

LESS_IS_BETTER = re.compile(
    r"toxic|hallucinat|bias|harm|error|violat|jailbreak|latenc|duration|cost|perplex|distance|pii|risk|refus|leak",
    re.I,
)
"""In the name of a score: less of it is better, or may be."""


@dataclass(frozen=True, slots=True)
class NamedScore:
    """One score by one author.

    Scores of tracing tools carry no scale. A number in [0, 1] is a score; any other number is an outcome, which counts
    for nothing until somebody says what it is worth. Under a name where less is better (toxicity, latency) a number
    is an outcome too, and yes or no is a tag.
    """

    name: str
    value: object
    """A boolean, a number, a text, or nothing."""
    author: str = ""
    """A person, a judge model, or "" where the file does not say."""
    simulated: bool = False
    label: object = None
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


# --- Declarations ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Scores:
    """Named scores that stand in a list of a row, or (with no `items`) a row that is one."""

    name: str
    value: str = ""
    label: str = ""
    author: str = ""
    notes: str = ""
    correction: str = ""
    scored_at: str = ""
    simulated: str = ""
    """Path that holds something where a model or a program gave the score."""
    items: str = ""
    binary: bool = True
    """True if 0 and 1 are thumbs rather than the ends of a scale."""
    comments: bool = False
    """True of remarks: those without a word are passed over, and the second is named `comment 2`."""

    def read(self, row: object) -> Iterator[NamedScore]:
        """The scores of a row. Raises RowError."""
        for index, item in enumerate(list_of(json_value(at(row, self.items)) or [], self.items)):
            where = f"{self.items}[{index}]"
            score = self.one(mapping_of(item, where), f"{where}.")
            if not self.comments:
                yield score
            elif score.notes.strip():
                yield replace(score, name=f"{score.name} {index + 1}" if index else score.name)

    def one(self, row: JsonObject, where: str = "") -> NamedScore:
        label, correction = at(row, self.label), at(row, self.correction)
        return NamedScore(
            name=text_of(at(row, self.name), where + self.name, required=True),
            value=at(row, self.value),
            author=text_or_empty(at(row, self.author)),
            simulated=bool(at(row, self.simulated)),
            label=label if not isinstance(label, str) else text_of(label, where + self.label),
            notes=notes_of(at(row, self.notes), where + self.notes),
            correction=None if correction is None else text_of(correction, where + self.correction),
            scored_at=time_of(at(row, self.scored_at), where + self.scored_at),
            binary=self.binary,
        )


@dataclass(frozen=True)
class Call:
    """Where a logged model call holds its parts."""

    request: str = ""
    answer: str = ""
    own: str = ""
    """The call's own name: the decision's run_id, and its id where it is a UUID and `own_id` is set."""
    own_id: bool = False
    own_required: bool = True
    fields: Mapping[str, str] = field(default_factory=dict)
    metadata: Mapping[str, str] = field(default_factory=dict)
    left_out: Mapping[str, str] = field(default_factory=dict)
    """Path -> why a row is left out that holds something there."""
    scores: Sequence[Scores] = ()
    outcomes: str = ""
    """Path of an object of numbers without a stated scale."""
    ratings: Callable[[JsonObject], tuple[ImportedRating, ...]] = lambda row: ()

    def __call__(self, row: JsonObject, line: int) -> Iterator[Record]:
        yield self.decision(row, line)

    def decision(
        self, row: JsonObject, line: int, request: object = None, answer: object = None, **more: object
    ) -> ImportedDecision:
        """The decision a row is. request, answer, more: what is known already. Raises RowError, RowLeftOut."""
        own = text_of(at(row, self.own) or "", self.own, required=self.own_required) if self.own else ""
        leave_out(row, self.left_out)
        ratings, outcomes = ratings_and_outcomes([score for part in self.scores for score in part.read(row)])
        facts = {
            "run_id": own[:200],
            "id": uuid_of(own) if self.own_id else None,
            **facts_at(row, self.fields),
            "ratings": (*ratings, *self.ratings(row)),
            "outcomes": (*outcomes, *outcomes_at(row, self.outcomes)),
            **more,
        }
        metadata = {**metadata_at(row, self.metadata), **facts.pop("metadata", {})}
        key = own[:200] or key_of(row)
        request = at(row, self.request) if request is None else request
        answer = at(row, self.answer) if answer is None else answer
        return call_decision(line, key, request, answer, metadata=metadata, **facts)


def outcomes_at(row: object, path: str) -> Iterator[ImportedOutcome]:
    """Numbers under names, of unknown scale. Raises RowError."""
    for name, value in mapping_of(at(row, path) or {}, path).items():
        if value is not None:
            yield ImportedOutcome(outcome_name(str(name)), number_of(value, f"{path}.{name}"))


# --- Two responses to one prompt -----------------------------------------------------------------------------

SAME = "both responses are the same: no preference"


Sides: TypeAlias = tuple[ImportedDecision, ImportedDecision]
"""Two responses to one prompt."""


def sides_of(
    row: JsonObject,
    line: int,
    messages: list[Message],
    responses: Sequence[Completion],
    policies: Sequence[str] = ("", ""),
    **facts: Any,
) -> Sides:
    """The decisions of two responses to one prompt. Raises RowLeftOut where they are the same."""
    left, right = (
        ImportedDecision(
            line=line, key=key_of(row), messages=messages, response=response, policy=policy, **facts
        )
        for response, policy in zip(responses, policies, strict=True)
    )
    if left.response == right.response:
        raise RowLeftOut(SAME)
    return left, right


@dataclass(frozen=True)
class Pair:
    """Where a row holds a prompt of one text and two responses to it."""

    prompt: str
    responses: tuple[str, str]
    policies: tuple[str, str] = ("", "")
    metadata: Mapping[str, str] = field(default_factory=dict)
    required: bool = False
    """True if an empty response is a fault."""

    def __call__(self, row: JsonObject, line: int, messages: list[Message] | None = None) -> Sides:
        """The decisions of both. Raises RowError, RowLeftOut."""
        if messages is None:
            messages = messages_of(text_of(at(row, self.prompt), self.prompt), self.prompt)
        responses = [text_of(at(row, path), path, required=self.required) for path in self.responses]
        policies = [text_or_empty(at(row, path)) for path in self.policies]
        return sides_of(row, line, messages, responses, policies, metadata=metadata_at(row, self.metadata))
