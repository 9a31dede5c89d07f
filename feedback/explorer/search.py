"""Search for decisions by agent, policy, tag, feedback, time and text."""

from __future__ import annotations

import json
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from datetime import date, datetime, time, timedelta
from typing import Any
from urllib.parse import urlencode

from django.db import connection
from django.db.models import OuterRef, Q, QuerySet, Subquery, TextField
from django.db.models.functions import Cast
from django.utils import timezone

from feedback.models import Decision, Outcome, Rating
from feedback.selectors import ratings_standing, tag_condition
from feedback.storage.validation import Check, value_excerpt
from feedback.storage.validation import FeedbackRefused as FeedbackRefused


def decisions_search(
    *,
    agent: str = "",
    policy: str = "",
    tag: str = "",
    rated: bool | None = None,
    since: datetime | None = None,
    until: datetime | None = None,
    q: str = "",
    batch: int | None = None,
) -> QuerySet[Decision]:
    """Decisions that match everything asked for, in no particular order.

    tag: one the app gave the decision. rated: whether a rating stands, simulated ones included. since: recorded at or
    after; until: before. q: text anywhere in the prompt, the response or its reasoning, upper and lower case alike.
    batch: number of the import that brought it.
    """
    rows = Decision.objects.order_by()
    if agent:
        rows = rows.filter(agent=agent)
    if policy:
        rows = rows.filter(policy=policy)
    if batch is not None:
        rows = rows.filter(import_batch=batch)
    if since is not None:
        rows = rows.filter(created_at__gte=since)
    if until is not None:
        rows = rows.filter(created_at__lt=until)
    if tag:
        rows = rows.filter(tag_condition(tag))
    if rated is not None:
        standing = one_of(ratings_standing(of_withdrawn=True).order_by().filter(decision=OuterRef("pk")))
        rows = rows.alias(standing=standing).filter(standing__isnull=not rated)
    if q:
        # as it stands in the column: PostgreSQL writes a letter as itself, Django on SQLite as \u and four digits
        within = json.dumps(q, ensure_ascii=connection.vendor != "postgresql")[1:-1]
        rows = rows.alias(prompt=Cast("messages", TextField())).filter(
            Q(response__icontains=q) | Q(reasoning__icontains=q) | Q(prompt__icontains=within)
        )
    return rows


def one_of(rows: QuerySet[Any]) -> Subquery:
    """The id of one of these rows, or NULL. For "is there any" in place of EXISTS, which PostgreSQL answers by reading
    the whole table into a hash first; a value is looked up for each decision that is come to."""
    return Subquery(rows.values("pk")[:1])


@dataclass(frozen=True)
class DecisionFilter:
    """Filter of a list of decisions, as an address carries it; empty: everything."""

    agent: str = ""
    policy: str = ""
    tag: str = ""
    since: date | None = None
    until: date | None = None
    """The last day that counts."""
    batch: int | None = None
    """Number of the import that brought it."""

    def decisions(self) -> QuerySet[Decision]:
        return decisions_search(
            agent=self.agent,
            policy=self.policy,
            tag=self.tag,
            since=_midnight(self.since) if self.since else None,
            until=_midnight(self.until + timedelta(days=1)) if self.until else None,
            batch=self.batch,
        )

    @property
    def parts(self) -> dict[str, str]:
        """Name and value of what is set, as it stands in an address."""
        values = {field.name: getattr(self, field.name) for field in fields(DecisionFilter)}
        return {name: str(value) for name, value in values.items() if value}

    @property
    def query(self) -> str:
        return urlencode(self.parts)

    def but(self, **changes: Any) -> DecisionFilter:
        return replace(self, **changes)


def narrowed_of(given: Mapping[str, str]) -> DecisionFilter:
    """Filter read from an address or a form. Raises FeedbackRefused with a fault per field."""
    check = Check()
    found = DecisionFilter(
        agent=check.agent(given["agent"]) if given.get("agent") else "",
        policy=check.text("policy", given.get("policy", "").strip(), limit=200),
        tag=check.text("tag", given.get("tag", "").strip(), limit=100),
        since=_day(check, "since", given.get("since", "")),
        until=_day(check, "until", given.get("until", "")),
        batch=parse_batch_number(check, given.get("batch", "")),
    )
    check.raise_faults("search")
    return found


def _day(check: Check, name: str, text: str) -> date | None:
    try:
        return date.fromisoformat(text) if text else None
    except ValueError:
        check.fields[name] = f"expected a day such as 2026-11-21, found {value_excerpt(text)}"
        return None


def parse_batch_number(check: Check, text: str) -> int | None:
    """The number of an import as an address says it; None where it says none."""
    if not text:
        return None
    if not text.isascii() or not text.isdecimal() or len(text) > 18 or int(text) == 0:
        check.fields["batch"] = f"expected the number of an import, found {value_excerpt(text)}"
        return None
    return int(text)


def _midnight(day: date) -> datetime:
    return timezone.make_aware(datetime.combine(day, time.min))


@dataclass(frozen=True)
class DecisionWhole:
    """A decision with what stands of it."""

    decision: Decision
    ratings: list[Rating]
    """Standing ratings, oldest first."""
    outcomes: list[Outcome]
    """In the order they happened."""


def decision_whole(pk: uuid.UUID) -> DecisionWhole | None:
    """A decision with the ratings that stand and its outcomes; None where there is no such decision."""
    decision = Decision.objects.filter(pk=pk).first()
    if decision is None:
        return None
    return DecisionWhole(
        decision,
        list(ratings_standing(of_withdrawn=True).filter(decision=decision)),
        list(Outcome.objects.filter(decision=decision).order_by("at", "id")),
    )
