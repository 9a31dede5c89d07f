"""Formats as declarations: paths say which part of a row holds what, and one engine reads them.

A path is a JMESPath expression: `model`, `usage.prompt_tokens`, `"request.body"`, `updated_at || created_at`. The
function `json(...)` in it decodes JSON that stands as a text. A path that is met by nothing gives None.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial, reduce
from typing import Any

import jmespath
from jmespath.exceptions import JMESPathTypeError
from jmespath.functions import Functions, signature
from jmespath.visitor import TreeInterpreter

from feedback.storage.responses import Completion, Message
from feedback.transfer.formats.base import key_of
from feedback.transfer.formats.calls import (
    call_decision,
    json_value,
    metadata_retained,
    text_or_empty,
    whole_of,
)
from feedback.transfer.formats.cells import JsonObject
from feedback.transfer.formats.records import (
    ImportedComparison,
    ImportedDecision,
    ImportedOutcome,
    ImportedRating,
    Record,
    RowLeftOut,
    list_of,
    mapping_of,
    messages_of,
    number_of,
    tags_of,
    text_of,
    time_of,
    uuid_of,
)
from feedback.transfer.formats.verdicts import NamedScore, outcome_name, ratings_and_outcomes

MAX_NOTES = 20_000
"""Characters kept of what a judge wrote."""


class _Functions(Functions):
    """JMESPath's functions, and one of ours."""

    @signature({"types": []})
    def _func_json(self, value: object) -> Any:
        return json_value(value)


_interpreter = TreeInterpreter(jmespath.Options(custom_functions=_Functions()))


@cache
def _reader(path: str) -> Callable[[Any], Any]:
    return _compiled(jmespath.compile(path).parsed)


def _compiled(node: JsonObject) -> Callable[[Any], Any]:
    """A function for a parsed path: the common kinds directly, which takes half the time of interpreting them."""
    kind, children = node["type"], [_compiled(child) for child in node["children"] if isinstance(child, dict)]
    if kind == "field":
        name = node["value"]
        return lambda row: row.get(name) if isinstance(row, Mapping) else None
    if kind == "subexpression":
        return lambda row: reduce(lambda value, inner: inner(value), children, row)
    if kind in ("or_expression", "and_expression"):
        first, second = children
        wanted = kind == "or_expression"
        return lambda row: found if _is_true(found := first(row)) is wanted else second(row)
    if kind == "not_expression":
        return lambda row: not _is_true(children[0](row))
    if (
        kind == "comparator"
        and isinstance(node["children"][1].get("value"), str)
        and node["value"] in ("eq", "ne")
    ):
        wanted, text = node["value"] == "eq", node["children"][1]["value"]
        return lambda row: (children[0](row) == text) is wanted
    if kind == "function_expression" and node["value"] == "json":
        return lambda row: json_value(children[0](row))
    return partial(_visit, node)


def _is_true(value: object) -> bool:
    """True as JMESPath has it: also of 0."""
    return bool(value) or (value == 0 and value is not False)


def _visit(parsed: JsonObject, row: object) -> Any:
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


FIELDS: dict[str, Callable[[Any, str], Any]] = {
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
        self, row: JsonObject, line: int, request: object = None, answer: object = None, **more: Any
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
        metadata = metadata_at(row, self.metadata)
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


@dataclass(frozen=True)
class Sides:
    """Two responses to one prompt, ready for the comparisons of those who judged them."""

    left: ImportedDecision
    right: ImportedDecision

    @classmethod
    def of(
        cls,
        row: JsonObject,
        line: int,
        messages: list[Message],
        responses: Sequence[Completion],
        policies: Sequence[str] = ("", ""),
        **facts: Any,
    ) -> Sides:
        """The decisions of both. Raises RowLeftOut where they are the same."""
        left, right = (
            ImportedDecision(
                line=line, key=key_of(row), messages=messages, response=response, policy=policy, **facts
            )
            for response, policy in zip(responses, policies, strict=True)
        )
        if left.response == right.response:
            raise RowLeftOut(SAME)
        return cls(left, right)

    def judged(self, preference: str, *, simulated: bool = False, **more: Any) -> ImportedComparison:
        """One rater's preference. more: further fields of the comparison."""
        kind = "simulated" if simulated else "human"
        return ImportedComparison(
            line=self.left.line,
            key=self.left.key,
            left=self.left,
            right=self.right,
            preference=preference,
            rater_kind=kind,
            **more,
        )


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
        return Sides.of(row, line, messages, responses, policies, metadata=metadata_at(row, self.metadata))
