"""Declarations of what can be recorded: each field of a decision, rating, comparison, outcome and trace, once.

A field's annotation says its type for type checkers and for pydantic (`fields`), and its description. The column is in
`feedback.models`; validation, OpenAPI, answers, imports and exports, and the admin read these.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from functools import cached_property
from types import UnionType
from typing import Annotated, Any, TypeVar, Union, get_args, get_origin, get_type_hints

import pydantic
from pydantic import BeforeValidator, SkipValidation, ValidationError, create_model

from backend.bodies import Answer, Sent, Time, faults_of
from feedback.storage.fields import (
    Candidates,
    Duration,
    Json,
    JsonObject,
    Measure,
    Messages,
    Name,
    Notes,
    OneOf,
    Propensity,
    Response,
    SaidName,
    SaidText,
    Share,
    Slug,
    Source,
    Stars,
    Steps,
    Tags,
    Text,
    TimeSent,
    Tokens,
)
from feedback.storage.validation import Check

M = TypeVar("M", Sent, Answer)
EMPTY: tuple[object, ...] = (None, "", [], {}, ())


@dataclasses.dataclass(frozen=True)
class Internal:
    """Marks a field that no request may carry."""


@dataclasses.dataclass(frozen=True)
class Later:
    """Marks a field that was added after bodies had been hashed."""


@dataclasses.dataclass(frozen=True)
class Field:
    """One field of a body."""

    name: str
    kind: Any
    """Its Python type: str, int, float, datetime, tuple (tags), list, dict, or Any (JSON)."""
    default: Any
    """Default for a field that is not sent; MISSING where something must be."""
    annotation: object
    is_sent: bool
    is_later: bool

    @property
    def is_required(self) -> bool:
        return self.default is dataclasses.MISSING

    @property
    def is_json(self) -> bool:
        """True if its column holds JSON."""
        return self.kind in (tuple, list, dict, Any)

    def says_nothing(self, value: object) -> bool:
        return value in EMPTY or value == self.default


class Body:
    """Fields of one kind of write, declared by a dataclass."""

    def __init__(self, declaration: type) -> None:
        self._declaration = declaration
        hints = get_type_hints(declaration, include_extras=True)
        self.fields = tuple(_field(one, hints[one.name]) for one in dataclasses.fields(declaration))
        self.names = tuple(field.name for field in self.fields)
        self._by_name = dict(zip(self.names, self.fields, strict=True))
        self._later = tuple(field for field in self.fields if field.is_later)
        self.encoded = tuple(field for field in self.fields if field.is_json or field.kind is datetime)
        """Fields that a row of texts holds encoded: JSON and times."""

    def __getitem__(self, name: str) -> Field:
        return self._by_name[name]

    def __iter__(self) -> Iterator[Field]:
        return iter(self.fields)

    @cached_property
    def _model(self) -> type[Sent]:
        return self.sent(self._declaration.__name__, internal=True)

    def sent(
        self, name: str, *, internal: bool = False, without: Collection[str] = (), **more: object
    ) -> type[Sent]:
        """The model of a request that carries this body. more: further fields, as `create_model` takes them."""
        fields = {
            field.name: (field.annotation, _default(field.default))
            for field in self.fields
            if (internal or field.is_sent) and field.name not in without
        }
        return self._made(name, Sent, {**fields, **more})

    def answer(self, name: str, before: Mapping[str, object], after: Mapping[str, object]) -> type[Answer]:
        """The model of an answer that shows this body between other fields."""
        own = {field.name: (_answer_annotation(field), ...) for field in self.fields}
        return self._made(name, Answer, {**before, **own, **after})

    def _made(self, name: str, base: type[M], fields: Mapping[str, Any]) -> type[M]:
        model = create_model(name, __base__=base, **fields)
        model.described_by = self._declaration
        return model

    def validate(self, check: Check, given: Mapping[str, object]) -> dict[str, Any]:
        """The values of every field as they are stored; empty where a fault went into `check`."""
        sent = {
            name: value for name, value in given.items() if value is not None or name not in self._by_name
        }
        try:
            return self._model.model_validate(sent).__dict__
        except ValidationError as error:
            check.fields |= faults_of(error)
            return {}

    def hash_values(self, values: Mapping[str, object]) -> dict[str, object]:
        """The values that tell a retry from another write under the same id.

        A field that was added later counts only where it says something: a client that sends the same write again after
        an upgrade must find its first one.
        """
        silent = {field.name for field in self._later if field.says_nothing(values[field.name])}
        return {name: value for name, value in values.items() if name not in silent}

    def later_values(self, values: Mapping[str, object]) -> dict[str, object]:
        """Later fields that hold something."""
        return {
            field.name: values[field.name]
            for field in self._later
            if not field.says_nothing(values[field.name])
        }

    def read(self, record: object) -> dict[str, Any]:
        """The fields of an object that has them as attributes."""
        return {name: getattr(record, name) for name in self.names}


def _field(one: dataclasses.Field[object], hint: Any) -> Field:
    marks = hint.__metadata__ if get_origin(hint) is Annotated else ()
    default = one.default
    if one.default_factory is not dataclasses.MISSING:
        default = one.default_factory()
    return Field(
        name=one.name,
        kind=_python_type(hint),
        default=default,
        annotation=hint,
        is_sent=not any(isinstance(mark, Internal) for mark in marks),
        is_later=any(isinstance(mark, Later) for mark in marks),
    )


def _python_type(hint: object) -> object:
    """The type of a value that is there: of `Annotated[float, ...] | None` float."""
    while True:
        if get_origin(hint) is Annotated or get_origin(hint) in (Union, UnionType):
            hint = get_args(hint)[0]
        else:
            return get_origin(hint) or hint


def _default(value: object) -> object:
    """A default as `create_model` takes it: a new list or object for each row."""
    if value is dataclasses.MISSING:
        return ...
    if isinstance(value, (tuple, dict)):
        return pydantic.Field(default_factory=list if isinstance(value, tuple) else dict)
    return value


_ANSWERED = {datetime: Time, tuple: list[str], list: list[Any], dict: dict[str, Any]}


def _answer_annotation(field: Field) -> object:
    """The type of a field in an answer: without the limits of a request, null where nothing was sent.

    Stored values are answered as they are: a row that nobody can read must not keep a page of others from being shown.
    """
    kind: Any = _ANSWERED.get(field.kind, field.kind)
    marks = getattr(field.annotation, "__metadata__", ())
    words = next((mark.words for mark in marks if isinstance(mark, OneOf)), ())
    if words:
        kind = Annotated[kind, OneOf(word for word in words if word)]
    if "" in words:
        return Annotated[Annotated[kind | None, SkipValidation], BeforeValidator(lambda word: word or None)]
    return Annotated[kind | None if field.default is None else kind, SkipValidation]


Kind = Annotated[str, OneOf(["human", "simulated"])]


@dataclass(frozen=True, slots=True, kw_only=True)
class DecisionFacts:
    """One prompt and the response given to it. An import may bring chat messages as a response, a request a text."""

    agent: Slug
    messages: Messages
    """The prompt: chat messages, or one text. At most 1,000,000 characters as JSON."""
    response: Response
    """The answer exactly as it was given: a text, or the assistant's message with its calls of tools."""
    reasoning: Annotated[Text, Later()] = ""
    """What the model thought before it answered; training leaves it out by default."""
    state: Json = None
    """What the app knew when it asked: any JSON."""
    candidates: Candidates | None = None
    """The listed options it was chosen among."""
    policy: Name = ""
    """Name of the policy that answered."""
    unit: Name = ""
    """The user or session it was decided for; `forget` removes by it."""
    arm: Name = ""
    propensity: Propensity | None = None
    """Probability of the choice."""
    run_id: Name = ""
    """The app's own id of the run."""
    latency_ms: Duration | None = None
    tokens_in: Tokens | None = None
    tokens_out: Tokens | None = None
    tags: Tags = ()
    metadata: JsonObject = field(default_factory=dict)
    source: Annotated[Source, Internal()] = "app"
    """Source of the decision: app, simulation, or the format it came from."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RatingFacts:
    """Rating of one decision by one rater."""

    rater: SaidName = ""
    """Who rated; the key's name where left out. Signed in, one rates as oneself."""
    rater_kind: Kind = "human"
    thumb: Annotated[str, OneOf(["", "up", "down"])] = ""
    stars: Stars | None = None
    score: Share | None = None
    correction: SaidText | None = None
    """The response it should have been."""
    tags: Tags = ()
    notes: Notes = ""


RATING_CONTENT = ("thumb", "stars", "score", "correction", "tags", "notes")
"""A rating says at least one of these, as its table demands (`rating_says_something`)."""


def rating_share(thumb: str, stars: int | None, score: float | None) -> float | None:
    """Value of a rating on a scale from 0 (bad) to 1 (good), by its finest part; None where it has no
    verdict."""
    if score is not None:
        return score
    if stars is not None:
        return (stars - 1) / 4
    return {"up": 1.0, "down": 0.0}.get(thumb)


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparisonFacts:
    """One rater's preference between two decisions on the same prompt."""

    preference: Annotated[str, OneOf(["left", "right", "tie", "both_bad"])]
    rater: SaidName = ""
    """Who compared; the key's name where left out. Signed in, one compares as oneself."""
    rater_kind: Kind = "human"
    tags: Tags = ()
    notes: Notes = ""


@dataclass(frozen=True, slots=True)
class OutcomeFacts:
    """A measured fact about a decision."""

    name: Slug
    """Such as ticket_reopened."""
    value: Measure
    """true is 1, false is 0."""
    at: TimeSent | None = None
    """Time in the app."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceFacts:
    """An agent's run: its steps in the order they happened."""

    agent: Slug
    run_id: Name = ""
    steps: Steps
    """In the order they happened; at most 1,000,000 characters as JSON."""
    metadata: JsonObject = field(default_factory=dict)
    started_at: TimeSent | None = None
    finished_at: TimeSent | None = None


DECISION = Body(DecisionFacts)
RATING = Body(RatingFacts)
COMPARISON = Body(ComparisonFacts)
OUTCOME = Body(OutcomeFacts)
TRACE = Body(TraceFacts)
BODIES = (DECISION, RATING, COMPARISON, OUTCOME, TRACE)
