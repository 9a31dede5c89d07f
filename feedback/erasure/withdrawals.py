"""Withdrawal of decisions from datasets, queues and counts. They stay on record and can be restored.

For decisions recorded by mistake. `feedback.erasure.service` erases a person's data for good;
`feedback.transfer.import_undo` undoes a whole import.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime

from django.conf import settings
from django.core.serializers.json import DjangoJSONEncoder
from django.db import transaction
from django.db.models import QuerySet
from django.utils import timezone
from django.utils.module_loading import import_string
from pydantic import ValidationError

from backend.bodies import Answer, Sent, faults_of
from backend.installation import PROGRAM
from feedback.models import SHADOW, Decision, Lease, Withdrawal, shadow_id
from feedback.storage.fields import Name, RowNumber, Slug, Source, TimeSent, Uuid
from feedback.storage.problem_rows import problems_remove
from feedback.storage.sampling import rating_target
from feedback.storage.sql import chunks, rows_in
from feedback.storage.validation import Check, FeedbackRefused

TrainedFinder = Callable[[Mapping[str, set[str]], datetime], dict[str, list[object]]]
"""({agent: prompt hashes}, since) -> {kind: artefacts trained on them since then}."""


def prompts_trained_on(prompts: Mapping[str, set[str]], since: datetime) -> dict[str, list[object]]:
    """Artefacts trained on these prompts ({agent: hashes}) since then, by FEEDBACK_TRAINED_ON, without empty kinds."""
    if not settings.FEEDBACK_TRAINED_ON:
        return {}
    find: TrainedFinder = import_string(settings.FEEDBACK_TRAINED_ON)
    return {kind: rows for kind, rows in find(prompts, since).items() if rows}


def trained_text(found: Mapping[str, list[object]], on: str = "on it") -> str:
    """Artefacts as a sentence: `run 3, policy a-v1 were trained on it`."""
    kinds = (("runs", "run"), ("policies", "policy"))
    words = [f"{word} {name}" for kind, word in kinds for name in found.get(kind, ())]
    if not words:
        return f"nothing was trained {on}"
    shown = ", ".join(words[:8]) + (f" and {len(words) - 8} more" if len(words) > 8 else "")
    return f"{shown} {'was' if len(words) == 1 else 'were'} trained {on}"


SHOWN_IDS = 100
"""Most ids listed in a report."""


class WithdrawalRefused(FeedbackRefused):
    """Nothing is selected, or the selection is invalid."""


class WithdrawalUnknown(WithdrawalRefused):
    """There is no such withdrawal or decision."""

    code = "not_found"


class WithdrawalConflict(WithdrawalRefused):
    """The withdrawal was restored already."""

    code = "conflict"


class WithdrawalSelection(Sent):
    """Decisions that meet every given condition."""

    ids: list[Uuid] = []
    batch: RowNumber | None = None
    """Brought by the import of this number."""
    agent: Slug | None = None
    """Of this agent."""
    unit: Name = ""
    """Decided for this unit, exactly as the app sent it."""
    source: Source = ""
    """From this source: app, gateway, decide, simulation, or a format."""
    since: TimeSent | None = None
    """Recorded at or after."""
    until: TimeSent | None = None
    """Recorded before."""

    @property
    def as_dict(self) -> dict[str, object]:
        """The given conditions, as JSON."""
        given = {name: value for name in WithdrawalSelection.model_fields if (value := getattr(self, name))}
        conditions: dict[str, object] = json.loads(DjangoJSONEncoder().encode(given))
        return conditions

    def decisions(self) -> QuerySet[Decision]:
        """Selected decisions that are not withdrawn yet. Raises WithdrawalRefused without any condition."""
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


def selection_read(given: dict[str, object]) -> WithdrawalSelection:
    """A selection from what was sent. Raises FeedbackRefused with a fault per field."""
    try:
        return WithdrawalSelection.model_validate(
            {name: value for name, value in given.items() if value not in (None, "")}
        )
    except ValidationError as error:
        faults = Check(faults_of(error))
        faults.raise_faults("selection")
        raise


class Withdrawn(Answer):
    """What a withdrawal did, or with dry_run would do."""

    withdrawal: int | None = None
    """Its number; null for a dry run, and where nothing was withdrawn."""
    dry_run: bool
    decisions: int
    ids: list[uuid.UUID]
    """The first SHOWN_IDS ids."""
    agents: dict[str, int] = {}
    """Agent -> decisions."""
    trained_on: dict[str, list[object]] = {}
    """Artefacts that read them: runs, policies, labels, snapshots, evaluations."""


def decision_withdraw(
    decision: uuid.UUID, *, actor: str, reason: str = "", dry_run: bool = False
) -> Withdrawn:
    """Withdraw one decision. Raises WithdrawalUnknown if it does not exist."""
    if not Decision.objects.filter(pk=decision).exists():
        raise WithdrawalUnknown(f"no decision {decision}", {"ids": "does not exist"})
    return decisions_withdraw(
        WithdrawalSelection(ids=[decision]), actor=actor, reason=reason, dry_run=dry_run
    )


def decisions_withdraw(
    selection: WithdrawalSelection, *, actor: str, reason: str = "", dry_run: bool = False
) -> Withdrawn:
    """Exclude decisions from training, counts and queues, all or none; earlier withdrawals stay.

    Policies trained on them are listed, not changed. Raises WithdrawalRefused without any condition.
    """
    with transaction.atomic():
        rows = list(selection.decisions().values_list("pk", "agent", "prompt_hash", "created_at"))
        rows += _shadows(row[0] for row in rows)
        ids = [row[0] for row in rows]
        report = Withdrawn(dry_run=dry_run, decisions=len(ids), ids=ids[:SHOWN_IDS])
        prompts: dict[str, set[str]] = {}
        for _, agent, prompt, _ in rows:
            report.agents[agent] = report.agents.get(agent, 0) + 1
            prompts.setdefault(agent, set()).add(prompt)
        if not rows:
            return report
        # created_at may be long before the recording, so the oldest one bounds what can have read them.
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
        for chunk in chunks(ids):
            Decision.objects.filter(pk__in=chunk).update(withdrawal=made, ratings_wanted=0)
            Lease.objects.filter(decision__in=chunk).delete()
            if settings.FEEDBACK_FORGET:
                # Stored rewards are recalculated after a restore.
                import_string(settings.FEEDBACK_FORGET)(chunk)
        problems_remove(ids)
    return report


def _shadows(decisions: Iterable[uuid.UUID]) -> list[tuple[uuid.UUID, str, str, datetime]]:
    """Standing answers beside these decisions that are not among them."""
    given = set(decisions)
    found: list[tuple[uuid.UUID, str, str, datetime]] = []
    for chunk in chunks({shadow_id(pk) for pk in given} - given):
        rows = Decision.objects.filter(pk__in=chunk, withdrawal=None).order_by()
        found += rows.values_list("pk", "agent", "prompt_hash", "created_at")
    return found


def withdrawal_restore(number: int, *, actor: str, dry_run: bool = False) -> int:
    """Restore a withdrawal's decisions; returns how many. Raises WithdrawalUnknown, WithdrawalConflict."""
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
        found = Decision.objects.filter(withdrawal=withdrawal).order_by()
        rows = list(found.values_list("pk", "agent", "source"))
        if not dry_run:
            _restore(rows)
            withdrawal.restored_at, withdrawal.restored_by = timezone.now(), actor[:200]
            withdrawal.save(update_fields=["restored_at", "restored_by"])
    return len(rows)


def decision_restore(decision: uuid.UUID, *, actor: str) -> bool:
    """Restore one decision; False if it was not withdrawn. The last one marks its withdrawal as restored."""
    with transaction.atomic():
        row = Decision.objects.select_for_update(of=("self",)).filter(pk=decision).first()
        if row is None:
            raise WithdrawalUnknown(f"no decision {decision}", {"ids": "does not exist"})
        made = row.withdrawal
        if made is None:
            return False
        beside = made.decisions.filter(pk=shadow_id(row.pk)).values_list("pk", "agent", "source")
        _restore([(row.pk, row.agent, row.source), *beside])
        if not made.decisions.exists():
            made.restored_at, made.restored_by = timezone.now(), actor[:200]
            made.save(update_fields=["restored_at", "restored_by"])
    return True


def _restore(rows: Sequence[tuple[uuid.UUID, str, str]]) -> None:
    by_wanted: dict[int, list[uuid.UUID]] = {}
    for pk, agent, source in rows:
        wanted = 0 if source == SHADOW else rating_target(agent, pk)
        by_wanted.setdefault(wanted, []).append(pk)
    for wanted, ids in by_wanted.items():
        for chunk in chunks(ids):
            Decision.objects.filter(pk__in=chunk).update(withdrawal=None, ratings_wanted=wanted)


def withdrawals() -> QuerySet[Withdrawal]:
    return Withdrawal.objects.order_by("-pk")
