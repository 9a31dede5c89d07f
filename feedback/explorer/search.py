"""Search for decisions by agent, policy, tag, feedback, time and text."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from datetime import date, datetime, time, timedelta
from typing import Any
from urllib.parse import urlencode

from django.db import connection
from django.db.models import Model, OuterRef, Q, QuerySet, Subquery, TextField
from django.db.models.functions import Cast
from django.http import HttpRequest
from django.utils import timezone

from backend.bodies import value_excerpt
from feedback.accounts.roles import SCOPE_PERMISSIONS
from feedback.models import Decision
from feedback.selectors import agent_slugs, policy_names, ratings_standing, tag_condition
from feedback.storage.fields import Name, Slug
from feedback.storage.validation import Check


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
    run_id: str = "",
) -> QuerySet[Decision]:
    """Decisions that meet every condition, in no particular order.

    Args:
        tag: A tag that the app gave the decision.
        rated: Whether a rating stands, including simulated ones.
        since: Recorded at or after this time.
        until: Recorded before this time.
        q: Text in the prompt, response or reasoning; case is ignored.
        batch: Number of the import that created it.
        run_id: The app's own id of the run.
    """
    rows = Decision.objects.order_by()
    if agent:
        rows = rows.filter(agent=agent)
    if policy:
        rows = rows.filter(policy=policy)
    if run_id:
        rows = rows.filter(run_id=run_id)
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
        # As stored in the column: PostgreSQL keeps a letter, Django on SQLite writes \u and four digits.
        within = json.dumps(q, ensure_ascii=connection.vendor != "postgresql")[1:-1]
        rows = rows.alias(prompt=Cast("messages", TextField())).filter(
            Q(response__icontains=q) | Q(reasoning__icontains=q) | Q(prompt__icontains=within)
        )
    return rows


def one_of(rows: QuerySet[Model]) -> Subquery:
    """The id of one of these rows, or NULL, as a subquery.

    Replaces EXISTS, for which PostgreSQL first reads the whole table into a hash; this is an index lookup per decision.
    """
    return Subquery(rows.values("pk")[:1])


@dataclass(frozen=True)
class DecisionFilter:
    """Filter of a list of decisions, as the address carries it; empty fields match everything."""

    agent: str = ""
    policy: str = ""
    tag: str = ""
    since: date | None = None
    until: date | None = None
    """Last day, inclusive."""
    batch: int | None = None
    """Number of the import that created it."""

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
        """The set fields, as the address spells them."""
        values = {field.name: getattr(self, field.name) for field in fields(DecisionFilter)}
        return {name: str(value) for name, value in values.items() if value}

    @property
    def query(self) -> str:
        return urlencode(self.parts)

    def but(self, **changes: Any) -> DecisionFilter:
        return replace(self, **changes)


def narrowed_of(given: Mapping[str, str]) -> DecisionFilter:
    """Read a filter from an address or a form. Raises FeedbackRefused with a fault per field."""
    check = Check()
    found = DecisionFilter(
        agent=check.value("agent", Slug, given["agent"]) if given.get("agent") else "",
        policy=check.value("policy", Name, given.get("policy", "").strip()),
        tag=check.value("tag", Name, given.get("tag", "").strip()),
        since=_day(check, "since", given.get("since", "")),
        until=_day(check, "until", given.get("until", "")),
        batch=parse_batch_number(check, given.get("batch", "")),
    )
    check.raise_faults("search")
    return found


def filter_context(
    request: HttpRequest, within: DecisionFilter, more: Mapping[str, str] | None = None
) -> dict[str, object]:
    """Template context of the filters above a list: agents as links, the rest as a form.

    more: other parts of the address that the links keep.
    """

    def query(narrowed: DecisionFilter) -> str:
        return urlencode({**narrowed.parts, **(more or {})})

    reads = request.user.has_perm(SCOPE_PERMISSIONS["read"])
    return {
        "agents": [(slug, query(within.but(agent=slug))) for slug in agent_slugs()],
        "all_agents": query(within.but(agent="")),
        "policies": policy_names() if reads else None,
        "narrowed": [
            (name, value, query(within.but(**{name: "" if name in ("policy", "tag") else None})))
            for name, value in within.parts.items()
            if name != "agent"
        ],
    }


def _day(check: Check, name: str, text: str) -> date | None:
    try:
        return date.fromisoformat(text) if text else None
    except ValueError:
        check.fields[name] = f"expected a day such as 2026-11-21, found {value_excerpt(text)}"
        return None


def parse_batch_number(check: Check, text: str) -> int | None:
    """An import's number from an address; None if it is empty. A wrong one is a fault of `batch`."""
    if not text:
        return None
    if not text.isascii() or not text.isdecimal() or len(text) > 18 or int(text) == 0:
        check.fields["batch"] = f"expected the number of an import, found {value_excerpt(text)}"
        return None
    return int(text)


def _midnight(day: date) -> datetime:
    return timezone.make_aware(datetime.combine(day, time.min))
