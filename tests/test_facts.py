"""Declarations of what can be recorded (`feedback.storage.facts`), and everything that is read off them."""

import uuid
from dataclasses import dataclass
from typing import Annotated, Any

import pytest
from django.db import models

from feedback.models import Comparison, Decision, Outcome, Rating, Trace
from feedback.recording.ingest import trace_build
from feedback.storage.factories import Subject, comparison_build, decision_build, outcome_build, rating_build
from feedback.storage.facts import (
    BODIES,
    COMPARISON,
    DECISION,
    OUTCOME,
    RATING,
    RATING_CONTENT,
    TRACE,
    Body,
    Later,
    RatingFacts,
)
from feedback.storage.fields import Share
from feedback.storage.validation import Check
from feedback.transfer.formats.ratchet import READERS

ONE, OTHER = uuid.UUID(int=1), uuid.UUID(int=2)
TABLES = [
    (DECISION, Decision),
    (RATING, Rating),
    (COMPARISON, Comparison),
    (OUTCOME, Outcome),
    (TRACE, Trace),
]


@dataclass(frozen=True, slots=True, kw_only=True)
class LaterFacts(RatingFacts):
    """A rating with a field that was added after ratings had been recorded."""

    confidence: Annotated[Share | None, Later()] = None
    """How sure the rater is."""


LATER = Body(LaterFacts)


@pytest.mark.parametrize(("body", "model"), TABLES, ids=lambda one: getattr(one, "__name__", ""))
def test_every_declared_field_has_a_wide_enough_column(body: Body, model: type[models.Model]) -> None:
    properties = body.sent("Sent", internal=True).model_json_schema()["properties"]
    for field in body:
        column: Any = model._meta.get_field(field.name)
        described = properties[field.name]
        assert isinstance(column, models.JSONField) == field.is_json, field.name
        if field.kind is str and column.max_length is not None and "maxLength" in described:
            assert described["maxLength"] <= column.max_length, field.name
        if "enum" in described:
            assert [word for word in described["enum"] if word] == [word for word, _ in column.choices]
        if field.default is None and field.name != "at":
            assert column.null, field.name


def test_the_table_of_ratings_demands_the_same_content_as_validation() -> None:
    (constraint,) = (one for one in Rating._meta.constraints if one.name == "rating_says_something")
    demanded = {name.split("__")[0] for name in _names(constraint.condition)}  # type: ignore[attr-defined]
    assert demanded == {*RATING_CONTENT, "withdrawn"}


def _names(condition: Any) -> list[str]:
    found: list[str] = []
    for child in condition.children:
        found += [child[0]] if isinstance(child, tuple) else _names(child)
    return found


RECORDED = {
    "decision": "0f9b9010523bcadbaf3635075b65bff9d0b1b4e1d6a08b056193e3a2214747fa",
    "decision with all facts": "757b0edc4312404404a417bac732603573212c92a37c0245a68c1cc7d87047d2",
    "rating": "59c86549a41b16fa3aa6e7fa907be8314f83b21ad9b3fa6babad16e8d4deb83f",
    "rating with all facts": "891b06ece0458612667f4683bb1ee5f05fa28712b70d88f240d15bfaf73b7f42",
    "comparison": "07a83f5c715ecc94d39d0a92f4d67381ccf80061a29dbacb334241a7542d454f",
    "outcome": "45bf11dff3713a2d19841dfcc18da6bf1ec67a1c81714a26d42e60f4615d186b",
    "trace": "cb7f2607a5de3b4bc82bbbff05b92eaf08a12cbd7d55b8dde2f978ff688e3af2",
}
"""Hashes of bodies as they were recorded before fields were declared: databases hold them."""


@pytest.mark.django_db
def test_a_write_that_was_recorded_by_an_older_version_has_the_hash_it_had() -> None:
    full: dict[str, Any] = {
        "messages": [{"role": "user", "content": "q"}],
        "state": {"n": 1},
        "candidates": ["r", {"response": "s", "score": 0.5}],
        "policy": "p",
        "unit": "u",
        "arm": "B",
        "propensity": 0.5,
        "run_id": "x",
        "latency_ms": 3,
        "tokens_in": 4,
        "tokens_out": 5,
        "tags": ["t"],
        "metadata": {"k": 1},
        "source": "app",
    }
    said: dict[str, Any] = {"thumb": "up", "stars": 4, "score": 0.5, "correction": "c", "tags": ["t"]}
    said |= {"notes": "n", "rater_kind": "simulated"}
    left, right = Subject(ONE, "a", "h"), Subject(OTHER, "a", "h")
    rows: dict[str, Any] = {
        "decision": decision_build(agent="a", messages="q", response="r"),
        "decision with all facts": decision_build(agent="a", response="r", **full),
        "rating": rating_build(decision=ONE, rater="ada", thumb="up"),
        "rating with all facts": rating_build(decision=ONE, rater="ada", **said),
        "comparison": comparison_build(left=left, right=right, preference="tie", rater="ada"),
        "outcome": outcome_build(decision=ONE, name="reopened", value=True),
        "trace": trace_build(
            agent="a", steps=[{"kind": "step"}], run_id="x", started_at="2026-03-02T10:30:00Z"
        ),
    }
    assert {name: row.body_hash for name, row in rows.items()} == RECORDED


def test_a_field_added_later_is_hashed_where_it_says_something() -> None:
    given = {"rater": "ada", "thumb": "up"}
    before = RATING.hash_values(RATING.validate(Check(), given))
    assert LATER.hash_values(LATER.validate(Check(), given)) == before
    assert LATER.hash_values(LATER.validate(Check(), given | {"confidence": None})) == before
    told = LATER.hash_values(LATER.validate(Check(), given | {"confidence": 0.0}))
    assert told == before | {"confidence": 0.0}


def test_our_own_format_reads_every_type_of_field() -> None:
    assert {field.kind for body in BODIES for field in body} <= READERS.keys()
