"""Base class of format writers: records of ours become rows of theirs."""

from __future__ import annotations

import json
from collections import Counter, namedtuple
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum
from typing import Any, Literal, NamedTuple, TypeAlias, TypeVar

from feedback.messages import Completion, Message
from feedback.storage.facts import BODIES, COMPARISON, DECISION, OUTCOME, RATING, TRACE, Body, rating_share
from feedback.transfer.formats.cells import JsonObject
from feedback.transfer.formats.records import (
    ImportedComparison,
    ImportedDecision,
    ImportedRating,
    RowError,
    content_of,
)

Line: TypeAlias = dict[str, Any]
"""One row of a file, ready to become JSON; may hold orjson.Fragment."""


class LineWritten(dict[str, Any]):
    """A row that is JSON already; only its type is known here."""

    def __init__(self, kind: str, text: bytes) -> None:
        super().__init__(type=kind)
        self.text = text


Writer: TypeAlias = Callable[[Iterable[Any], Counter[str]], Iterator[Line]]
"""Records to rows; what the format has no words for is counted by reason instead."""


class View(StrEnum):
    """View of the feedback a shape is made from; feedback.transfer.export_views reads each."""

    HISTORY = "history"
    """Every row ever stored, as feedback.transfer.formats.writers."""
    DECISIONS = "decisions"
    """Decisions with the ratings that stand and their outcomes, as ImportedDecision."""
    RATED = "rated"
    """Decisions as in DECISIONS, with at least one standing rating."""
    COMPARISONS = "comparisons"
    """Comparisons that stand, those of one pair one after the other, as ImportedComparison with both decisions."""
    PREFERENCES = "preferences"
    """COMPARISONS; corrections, each preferred to what it corrects; and per prompt the best rated response over the
    worst."""
    DEMONSTRATIONS = "demonstrations"
    """Responses to be imitated: corrections, well-rated responses and imported demonstrations."""
    PROMPTS = "prompts"
    """One decision for each different prompt."""


@dataclass(frozen=True)
class RowShape:
    """One way a format is written: a kind of file."""

    name: str
    """Name in `--format` and `?format=`."""
    title: str
    views: tuple[View, ...]
    write: Writer
    container: Literal["lines", "array"] = "lines"
    beside: tuple[str, ...] = ()
    """Shapes that belong into files of their own beside this one's."""


class NotSaid(Exception):
    """A record that a format has no words for; the message is the reason it is counted under, one of REASONS."""


REASONS: dict[str, str] = {
    "tie": "comparisons that called both responses equally good, where the format has no tie",
    "both_bad": "comparisons that called both responses bad",
    "same_response": "preferences between two responses with the same words",
    "same_beginning": "pairs whose responses begin alike, where the format finds the prompt as the common beginning",
    "no_verdict": "ratings without thumb, stars or score, where the format has no other words",
    "neutral": "ratings in the very middle, where the format knows good and bad alone",
    "unreadable": "decisions that could not be read: `/problems/` names each and says why",
    "not_good": "decisions that nobody called good or corrected: nothing to imitate",
    "another_rater": "ratings beyond the one a message can carry",
    "not_text": "records with images, tool calls or the like, where the format holds plain text",
    "conversation": "prompts of several turns, where the format holds one question",
    "roles": "prompts with turns that the format has no speaker for",
    "marker": "texts that hold the format's own turn markers",
    "empty": "responses without a word, where the format needs one",
    "too_long": "conversations of more than 200 turns, where the format nests one turn in the other",
    "no_candidates": "decisions that did not choose among listed responses",
    "no_feedback": "decisions nobody rated, compared or measured, left out by --require-feedback",
    "below_min_reward": "decisions whose raw reward is below --min-reward, or unknown",
}
"""Every reason something is left out for, and what its number counts."""

R = TypeVar("R")


def writer_by_record(said: Callable[[R, Counter[str]], Iterable[Line]]) -> Writer:
    """A writer that turns one record after the other into rows; a record that raises NotSaid is counted."""

    def write(records: Iterable[R], left_out: Counter[str]) -> Iterator[Line]:
        for record in records:
            try:
                found = list(said(record, left_out))
            except NotSaid as reason:
                left_out[str(reason)] += 1
            else:
                yield from found

    return write


def shape(
    name: str,
    title: str,
    view: View,
    said: Callable[[R, Counter[str]], Iterable[Line]],
    container: Literal["lines", "array"] = "lines",
    beside: tuple[str, ...] = (),
) -> RowShape:
    """A kind of file of one view, whose rows say one record each."""
    return RowShape(name, title, (view,), writer_by_record(said), container, beside)


def each_rating(
    record: ImportedDecision, left_out: Counter[str], said: Callable[[ImportedRating], Line]
) -> Iterator[Line]:
    """A row for each rating of a decision; a rating that raises NotSaid is counted."""
    for rating in record.ratings:
        try:
            yield said(rating)
        except NotSaid as reason:
            left_out[str(reason)] += 1


# --- What several formats need -----------------------------------------------------------------------------


def sides(record: ImportedComparison) -> tuple[ImportedDecision, ImportedDecision]:
    """Left and right of a comparison that an exporter gave: both are there."""
    assert isinstance(record.left, ImportedDecision)
    assert isinstance(record.right, ImportedDecision)
    return record.left, record.right


def pair_ids(record: ImportedComparison) -> tuple[object, ...]:
    """The ids of both sides: comparisons of one pair have the same."""
    return tuple(side.id for side in sides(record))


def better_worse(record: ImportedComparison) -> tuple[ImportedDecision, ImportedDecision]:
    """The preferred and the other response. Raises NotSaid for a tie and for two with the same words."""
    left, right = sides(record)
    if record.preference not in ("left", "right"):
        raise NotSaid(record.preference)
    better, worse = (left, right) if record.preference == "left" else (right, left)
    if better.response == worse.response:
        raise NotSaid("same_response")
    return better, worse


def plain(messages: Sequence[JsonObject]) -> list[Message]:
    """The messages with their contents as texts; their other keys are kept. Raises NotSaid."""
    try:
        return [{**message, "content": content_of(message.get("content"), "content")} for message in messages]
    except RowError:
        raise NotSaid("not_text") from None


def turns_by_role(messages: Sequence[JsonObject], roles: Mapping[str, str]) -> list[tuple[str, str]]:
    """(the format's word for the speaker, text) of each turn. Raises NotSaid where one cannot be said in words."""
    turns = []
    for message in plain(messages):
        if set(message) - {"role", "content", "name"}:
            raise NotSaid("not_text")
        if message["role"] not in roles:
            raise NotSaid("roles")
        turns.append((roles[message["role"]], message["content"]))
    return turns


def question(messages: Sequence[JsonObject]) -> str:
    """The text of a prompt that is one user turn. Raises NotSaid."""
    turns = turns_by_role(
        messages, {"user": "user", "system": "system", "assistant": "assistant", "tool": "tool"}
    )
    if len(turns) != 1 or turns[0][0] != "user":
        raise NotSaid("conversation")
    if not turns[0][1].strip():
        raise NotSaid("empty")
    return turns[0][1]


def prompt_fields(record: ImportedDecision) -> Line:
    """The prompt as labelling tools show it: a question as `prompt`, several turns as `messages`. Raises NotSaid."""
    try:
        return {"prompt": question(record.messages)}
    except NotSaid:
        return {"messages": plain(record.messages)}


def words(completion: Completion) -> str:
    """A response that is a text. Raises NotSaid for messages."""
    if not isinstance(completion, str):
        raise NotSaid("not_text")
    return completion


def some_words(completion: Completion) -> str:
    if not words(completion).strip():
        raise NotSaid("empty")
    return words(completion)


def turns_of(completion: Completion) -> list[Message]:
    """A response as chat messages."""
    if isinstance(completion, str):
        return [{"role": "assistant", "content": completion}]
    return plain(completion)


def some_turns(completion: Completion) -> list[Message]:
    """A response as chat messages that say or call something. Raises NotSaid for one without a word."""
    turns = turns_of(completion)
    if not any(str(turn.get("content") or "").strip() or turn.get("tool_calls") for turn in turns):
        raise NotSaid("empty")
    return turns


def share_of(rating: ImportedRating) -> float | None:
    """Value of a rating on a scale from 0 (bad) to 1 (good); None where it has no verdict."""
    return rating_share(rating.thumb, rating.stars, rating.score)


def good(rating: ImportedRating) -> bool:
    """True if a rating says good rather than bad. Raises NotSaid where it says neither."""
    share = share_of(rating)
    if share is None:
        raise NotSaid("no_verdict")
    if share == 0.5:
        raise NotSaid("neutral")
    return share > 0.5


def stars_of(rating: ImportedRating) -> int | None:
    """1 to 5: a score at its nearest star; None where there is no verdict but a thumb, or none at all."""
    if rating.stars is not None:
        return rating.stars
    return None if rating.score is None else round(1 + 4 * rating.score)


def tools_text(decision: ImportedDecision) -> dict[str, str]:
    """The tools a decision could call, as one JSON text: rows whose tools differ then still have one schema."""
    tools = decision.metadata.get("tools")
    return {"tools": json.dumps(tools, ensure_ascii=False)} if tools else {}


def iso(at: datetime | None) -> str | None:
    return None if at is None else at.isoformat()


# --- Rows of everything that was ever said: ids and times as texts, JSON as its text -----------------------

JSON_COLUMNS = frozenset(field.name for body in BODIES for field in body if field.is_json)
"""Columns that come as the JSON text they are stored as: it is written on without being understood."""

TIME_COLUMNS = frozenset(
    {"created_at", *(field.name for body in BODIES for field in body if field.kind is datetime)}
)
"""Columns of times: ISO 8601 in UTC with microseconds."""


def row_of(body: Body, *before: str, after: Sequence[str]) -> object:
    """A tuple of the columns of a declared body, between other columns."""
    return namedtuple("row_of", (*before, *body.names, *after))  # its names are data


class DecisionRow(row_of(DECISION, "id", after=("trace_id", "created_at"))):  # type: ignore[misc]
    """A decision, its JSON columns as text."""

    __slots__ = ()


class RatingRow(
    row_of(RATING, "id", after=("withdrawn", "created_at", "decision_id", "supersedes_id"))  # type: ignore[misc]
):
    """A rating, superseded or not; its tags as text."""

    __slots__ = ()


class OutcomeRow(row_of(OUTCOME, "id", after=("created_at", "decision_id"))):  # type: ignore[misc]
    """A measured fact about a decision."""

    __slots__ = ()


class ComparisonRow(
    row_of(COMPARISON, "id", "left_id", "right_id", after=("withdrawn", "created_at", "supersedes_id"))  # type: ignore[misc]
):
    """A comparison, superseded or not; its tags as text."""

    __slots__ = ()


class TraceRow(row_of(TRACE, "id", after=("created_at",))):  # type: ignore[misc]
    """A trace, its JSON columns as text."""

    __slots__ = ()


class DecisionText(NamedTuple):
    """A decision with its ratings and outcomes, as the text of a line of our own format."""

    text: bytes


class DecisionExport(NamedTuple):
    """A decision with every rating ever given, each after the one it supersedes, and its outcomes."""

    decision: DecisionRow
    ratings: Sequence[RatingRow]
    outcomes: Sequence[OutcomeRow]
