"""Withdrawal of decisions: out of datasets, queues and counts, still on record, and restored by number.

For what should not have been recorded or cannot be read. What a person has the right to have removed is erased by
`feedback.erasure.service`; a file that should not have been imported is undone by `feedback.transfer.import_undo`.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, fields
from datetime import datetime
from typing import Any

from django.conf import settings
from django.db import transaction
from django.db.models import QuerySet
from django.utils import timezone
from django.utils.module_loading import import_string

from backend.installation import PROGRAM
from feedback.erasure.artifacts import prompts_trained_on
from feedback.models import Decision, Lease, Withdrawal
from feedback.storage.problem_rows import problems_remove
from feedback.storage.sampling import rating_target
from feedback.storage.sql import IDS, rows_in
from feedback.storage.validation import Check, FeedbackRefused

SHOWN_IDS = 100
"""Ids of decisions that an answer lists."""


class WithdrawalRefused(FeedbackRefused):
    """Nothing is selected, or what is named does not exist; the message says what to do."""


class WithdrawalUnknown(WithdrawalRefused):
    """There is no withdrawal of that number."""

    code = "not_found"


class WithdrawalConflict(WithdrawalRefused):
    """Raised for a withdrawal that was restored already."""

    code = "conflict"


@dataclass(frozen=True)
class WithdrawalSelection:
    """Selection of decisions to withdraw: those that meet everything given."""

    ids: tuple[uuid.UUID, ...] = ()
    batch: int | None = None
    """Number of the import that brought them."""
    agent: str = ""
    unit: str = ""
    source: str = ""
    since: datetime | None = None
    """Recorded at or after."""
    until: datetime | None = None
    """Recorded before."""

    @property
    def as_dict(self) -> dict[str, Any]:
        """The request, as JSON."""
        body = {f.name: getattr(self, f.name) for f in fields(self)}
        if self.ids:
            body["ids"] = [str(pk) for pk in self.ids]
        for name in ("since", "until"):
            body[name] = body[name].isoformat() if body[name] else None
        return {name: value for name, value in body.items() if value}

    def decisions(self) -> QuerySet[Decision]:
        """Decisions of the selection that are not withdrawn yet. Raises WithdrawalRefused where nothing
        narrows them down."""
        selection = self.as_dict
        if not selection:
            raise WithdrawalRefused(
                "expected at least one of ids, batch, agent, unit, source, since and until: without them every "
                "decision would be withdrawn"
            )
        found = Decision.objects.order_by().filter(withdrawal=None)
        if self.ids:
            found = rows_in(found, "id", list(self.ids))
        columns = {"batch": "import_batch", "since": "created_at__gte", "until": "created_at__lt"}
        for name in selection:
            if name != "ids":
                found = found.filter(**{columns.get(name, name): getattr(self, name)})
        return found


def selection_read(given: dict[str, Any]) -> WithdrawalSelection:
    """A selection from what was sent. Raises FeedbackRefused with a fault per field."""
    check, ids = Check(), []
    values = {name: value for name, value in given.items() if value not in (None, "")}
    for value in given.get("ids") or ():
        try:
            ids.append(value if isinstance(value, uuid.UUID) else uuid.UUID(value))
        except (ValueError, AttributeError, TypeError):
            check.fields["ids"] = f"expected UUIDs of decisions, found {value!r:.80}"
    found = WithdrawalSelection(
        ids=tuple(dict.fromkeys(ids)),
        batch=check.integer("batch", given.get("batch"), 1, 2**63 - 1),
        agent=check.agent(values["agent"]) if "agent" in values else "",
        unit=check.text("unit", values.get("unit", ""), limit=200),
        source=check.text("source", values.get("source", ""), limit=40),
        since=check.time("since", values.get("since")),
        until=check.time("until", values.get("until")),
    )
    check.raise_faults("selection")
    return found


@dataclass
class Withdrawn:
    """Report of a withdrawal, or with dry_run of what it would be."""

    withdrawal: int | None
    """Its number; None for a dry run, or where nothing was selected."""
    dry_run: bool
    decisions: int
    ids: list[str]
    """The first SHOWN_IDS of them."""
    agents: dict[str, int] = field(default_factory=dict)
    """Agent -> how many."""
    trained_on: dict[str, list[Any]] = field(default_factory=dict)
    """Artefacts that read them: {runs, policies, labels, snapshots, evaluations}; empty lists are left
    out."""

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def decision_withdraw(
    decision: uuid.UUID, *, actor: str, reason: str = "", dry_run: bool = False
) -> Withdrawn:
    """Withdraw one decision. Raises WithdrawalUnknown where there is none of that id."""
    if not Decision.objects.filter(pk=decision).exists():
        raise WithdrawalUnknown(f"no decision {decision}", {"ids": "does not exist"})
    return decisions_withdraw(
        WithdrawalSelection(ids=(decision,)), actor=actor, reason=reason, dry_run=dry_run
    )


def decisions_withdraw(
    selection: WithdrawalSelection, *, actor: str, reason: str = "", dry_run: bool = False
) -> Withdrawn:
    """Exclude decisions from training, counts and queues, all or none. Those withdrawn before stay so.

    What was trained on them stays trained: it is listed. Raises WithdrawalRefused for a selection of everything.
    """
    with transaction.atomic():
        rows = list(selection.decisions().values_list("pk", "agent", "prompt_hash", "created_at"))
        ids = [row[0] for row in rows]
        report = Withdrawn(None, dry_run, len(ids), [str(pk) for pk in ids[:SHOWN_IDS]])
        prompts: dict[str, set[str]] = {}
        for _, agent, prompt, _ in rows:
            report.agents[agent] = report.agents.get(agent, 0) + 1
            prompts.setdefault(agent, set()).add(prompt)
        if not rows:
            return report
        # a decision may say when it was taken long before it was recorded: everything that read its prompt counts
        report.trained_on = prompts_trained_on(prompts, min(row[3] for row in rows))
        if dry_run:
            return report
        made = Withdrawal.objects.create(
            selection=selection.as_dict,
            reason=reason[:500],
            actor=actor[:200],
            decisions_count=len(ids),
            trained_on=report.trained_on,
        )
        report.withdrawal = made.pk
        for chunk in _chunks(ids):
            Decision.objects.filter(pk__in=chunk).update(withdrawal=made, ratings_wanted=0)
            Lease.objects.filter(decision__in=chunk).delete()
            if settings.FEEDBACK_FORGET:
                # rewards are made again from the facts when the decisions are restored
                import_string(settings.FEEDBACK_FORGET)(chunk)
        problems_remove(ids)
    return report


def withdrawal_restore(number: int, *, actor: str, dry_run: bool = False) -> int:
    """Put the decisions of a withdrawal back; how many. Raises WithdrawalUnknown, WithdrawalConflict."""
    with transaction.atomic():
        withdrawal = Withdrawal.objects.select_for_update().filter(pk=number).first()
        if withdrawal is None:
            raise WithdrawalUnknown(
                f"there is no withdrawal {number}; `{PROGRAM} withdraw_decisions --list` lists them"
            )
        if withdrawal.restored_at is not None:
            raise WithdrawalConflict(
                f"withdrawal {number} was restored on {withdrawal.restored_at:%Y-%m-%d %H:%M} "
                f"by {withdrawal.restored_by}"
            )
        rows = list(Decision.objects.filter(withdrawal=withdrawal).order_by().values_list("pk", "agent"))
        if not dry_run:
            _restore(rows)
            withdrawal.restored_at, withdrawal.restored_by = timezone.now(), actor[:200]
            withdrawal.save(update_fields=["restored_at", "restored_by"])
    return len(rows)


def decision_restore(decision: uuid.UUID, *, actor: str) -> bool:
    """Put one decision back; whether it was withdrawn. The last one of a withdrawal restores that as a whole."""
    with transaction.atomic():
        row = Decision.objects.select_for_update(of=("self",)).filter(pk=decision).first()
        if row is None:
            raise WithdrawalUnknown(f"no decision {decision}", {"ids": "does not exist"})
        made = row.withdrawal
        if made is None:
            return False
        _restore([(row.pk, row.agent)])
        if not made.decisions.exists():
            made.restored_at, made.restored_by = timezone.now(), actor[:200]
            made.save(update_fields=["restored_at", "restored_by"])
    return True


def _restore(rows: Sequence[tuple[uuid.UUID, str]]) -> None:
    by_wanted: dict[int, list[uuid.UUID]] = {}
    for pk, agent in rows:
        by_wanted.setdefault(rating_target(agent, pk), []).append(pk)
    for wanted, ids in by_wanted.items():
        for chunk in _chunks(ids):
            Decision.objects.filter(pk__in=chunk).update(withdrawal=None, ratings_wanted=wanted)


def withdrawals() -> QuerySet[Withdrawal]:
    """Every withdrawal, newest first."""
    return Withdrawal.objects.order_by("-pk")


def _chunks(ids: Sequence[uuid.UUID]) -> Iterator[Sequence[uuid.UUID]]:
    for start in range(0, len(ids), IDS):
        yield ids[start : start + IDS]
