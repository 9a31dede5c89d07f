"""Decisions recorded beside the answer to a user: in groups, by a thread; on disk while the database is away.

A decision is noted in the process's journal, which outlives the process, before its user is answered, and is in the
database a moment later: nobody waits for that. A rating that is sent right after the answer does (`recorded_or_never`).
Where the database is away, the decision goes to the outbox (on the disk before the answer) and is replayed when the
database is back. Journal and outbox are files of `ratchet_client.outbox`. The id makes a decision once, however many
ways it takes.
"""

from __future__ import annotations

import logging
import random
import secrets
import threading
import time
import uuid
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cache
from pathlib import Path
from typing import TypeVar

from django.conf import settings
from django.db import DatabaseError, InterfaceError, OperationalError, close_old_connections, connection

from backend.installation import disk_state
from feedback.models import Decision
from feedback.recording.ingest import MAX_BULK, IngestResult, decisions_ingest
from feedback.selectors import decision_get
from feedback.storage.validation import DecisionPending, DecisionUnknown, FeedbackRefused
from ratchet_client.outbox import FAULTS, Outbox, Record
from ratchet_client.problem_log import ProblemLog
from ratchet_client.processes import exclusive, renew_after_fork

logger = logging.getLogger("feedback.recording.recorder")

WAIT_S = 0.25
"""Longest anybody waits for the database: callers that wait for a decision to be stored, or refer to one just made."""
GATHER_S = 0.03
"""Between two writes: a transaction costs as much as ten decisions in it."""
MOST_IN_HAND = 1_000
"""Decisions journalled and not yet in the database, at most; beyond them decisions go to the outbox."""
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.5, 15.0
"""Between two tries of an unreachable database, doubled each time, half of it random."""
IDLE_S = 5.0
"""Seconds between two looks of an idle recorder for records of other processes."""
ORPHAN_S = 5.0
"""Age in seconds from which a journalled decision is replayed by any process: its own may be gone."""

T = TypeVar("T")

Facts = Mapping[str, object]
"""A decision as `feedback.services.decision_record` takes it, JSON alone, with its id and created_at."""


class Storage(StrEnum):
    """Place of a decision when its recorder call returns."""

    DATABASE = "database"
    DISK = "disk"
    """In the journal or the outbox, and soon in the database."""
    MEMORY = "memory"
    """Neither database nor disk took it. It waits in the process and is lost with it; where more than
    `outbox.MAX_WAITING` wait, or it was not to be held, it is gone already."""

    @property
    def durable(self) -> bool:
        """True if it outlives the process."""
        return self is not Storage.MEMORY


@dataclass(eq=False)
class _PendingDecision:
    facts: Facts
    done_event: threading.Event = field(default_factory=threading.Event)
    storage: Storage = Storage.MEMORY
    """Set before `done`."""


class Recorder:
    """One per process. `note` and `record` never raise, and say where the decision lies.

    `note` waits for nobody; while the database is away, or too slow, for one write to the disk. `record` waits WAIT_S
    for the database at most. `hold`: what neither takes waits in memory until one of them does; without it the
    decision is dropped, for a caller that refuses its request then.
    """

    def __init__(self, folder: Callable[[], Path], *, counted: Callable[[str], None] | None = None) -> None:
        """folder: of journal and outbox, asked each time one is needed. counted: told `written` or `spooled`."""
        self._folder = folder
        self._counted = counted or (lambda how: None)
        self._queue: deque[_PendingDecision] = deque()
        self._signal = threading.Condition()
        self._thread: threading.Thread | None = None
        self._problems = ProblemLog(logger)
        self._down_until = 0.0
        self._wrote = 0.0
        self._stopping = False
        self._hurried = False
        """Somebody waits for what is in the queue."""
        self._in_hand = 0
        renew_after_fork(self)

    def after_fork(self) -> None:
        self._queue.clear()
        self._signal = threading.Condition()
        self._thread = None
        self._in_hand = 0

    @property
    def outbox(self) -> Outbox:
        return outbox_of(self._folder())

    @property
    def journal(self) -> Outbox:
        return journal_of(self._folder())

    def recordable(self) -> bool:
        """True if disk or database would take a decision now, as far as is known without writing one."""
        return time.monotonic() >= self._down_until or disk_state(self._folder()).ok

    def note(self, facts: Facts, *, hold: bool = True) -> Storage:
        """Have a decision recorded soon."""
        room = len(self._queue) + self._in_hand < MOST_IN_HAND
        if not room or time.monotonic() < self._down_until or not self._journalled(facts):
            return self.record(facts, hold=hold)
        with self._signal:
            self._queue.append(_PendingDecision(facts))
            if len(self._queue) == 1:  # else the thread knows
                self._awake()
                self._signal.notify()
        return Storage.DISK

    def _journalled(self, facts: Facts) -> bool:
        return self.journal.put(_line_of(facts), key=str(facts["id"]), hold=False)

    def record(self, facts: Facts, *, hold: bool = True) -> Storage:
        """Have a decision recorded, and wait for the database a moment."""
        pending = _PendingDecision(facts)
        if time.monotonic() < self._down_until:
            self._spool(pending, hold=hold)
            return pending.storage
        with self._signal:
            self._queue.append(pending)
            self._hurried = True
            self._awake()
            self._signal.notify()
        if not pending.done_event.wait(WAIT_S):
            # it may still get into the database: the replay of the same id then changes nothing
            self._spool(pending, hold=hold)
        elif not pending.storage.durable and not hold:
            self._drop(pending)
        return pending.storage

    def _spool(self, pending: _PendingDecision, *, hold: bool = True) -> None:
        on_disk = self.outbox.put(_line_of(pending.facts), key=str(pending.facts["id"]), hold=hold)
        pending.storage = Storage.DISK if on_disk else Storage.MEMORY
        self._counted("spooled" if on_disk else "in_memory" if hold else "dropped")
        pending.done_event.set()
        with self._signal:
            if not on_disk and not hold and pending in self._queue:
                self._queue.remove(pending)
            self._awake()

    def _drop(self, pending: _PendingDecision) -> None:
        """Take back what the thread has put into memory meanwhile."""
        if not self.outbox.take_back(_line_of(pending.facts)):
            pending.storage = Storage.DISK  # the disk took it at this very moment

    def _awake(self) -> None:
        if self._thread is None or not self._thread.is_alive():
            self._thread = threading.Thread(target=self._run, name="ratchet-recorder", daemon=True)
            self._thread.start()

    # --- The thread ---------------------------------------------------------------------------------------

    def _run(self) -> None:
        failures = 0
        looked = 0.0
        while not (self._stopping and not self._queue):
            batch = self._batch(failures)
            now = time.monotonic()
            try:
                if batch:
                    self._write(batch)
                if (failures and now >= self._down_until) or now - looked >= IDLE_S:
                    looked = now
                    close_old_connections()
                    self.replay()
                if failures:
                    self._problems.resolve("database", "decisions are stored in the database again")
                if now >= self._down_until:
                    failures = 0
            except (OperationalError, InterfaceError) as error:
                failures += 1
                pause = min(FIRST_PAUSE_S * 2.0 ** min(failures - 1, 10), LONGEST_PAUSE_S)
                self._down_until = time.monotonic() + pause * random.uniform(0.5, 1.0)
                message = (
                    "the database does not accept decisions; they are kept in the outbox "
                    f"{self.outbox.folder}"
                )
                self._problems.report("database", message, error)
                connection.close()
                for pending in batch:
                    if not pending.done_event.is_set():
                        self._spool(pending)
            except Exception as error:
                # a fault of ours; the decisions must not be lost with it
                self._problems.report("recorder", f"recording failed: {error!r}", error)
                for pending in batch:
                    if not pending.done_event.is_set():
                        self._spool(pending)
                time.sleep(FIRST_PAUSE_S)
            self._settle(batch)
        connection.close()

    def _settle(self, batch: Sequence[_PendingDecision]) -> None:
        """Clear the journal of decisions that are in the database or in the outbox now."""
        try:
            self.journal.remove(str(pending.facts["id"]) for pending in batch)
        except FAULTS as error:
            # They are replayed once more, which changes nothing.
            self._problems.report("journal", "the journal cannot be emptied", error)
        with self._signal:
            self._in_hand = 0

    def _batch(self, failures: int) -> list[_PendingDecision]:
        """All that waits, once there is something and it had time to gather."""
        with self._signal:
            if not self._queue and not self._stopping:
                self._signal.wait(
                    min(IDLE_S, max(self._down_until - time.monotonic(), 0.05)) if failures else IDLE_S
                )
            left = self._wrote + GATHER_S - time.monotonic()
            if self._queue and left > 0:
                self._signal.wait_for(lambda: self._hurried or self._stopping, left)
            batch = list(self._queue)
            self._queue.clear()
            self._hurried, self._in_hand = False, len(batch)
            return batch

    def _write(self, batch: Sequence[_PendingDecision]) -> None:
        """All of a batch in one transaction. Raises OperationalError where the database is away."""
        if time.monotonic() - self._wrote > IDLE_S:
            close_old_connections()  # one that the server has closed meanwhile is opened anew
        found_all = decisions_ingest([pending.facts for pending in batch], likely_new=True, reserved=True)
        self._wrote = time.monotonic()
        for pending, found in zip(batch, found_all, strict=True):
            if _is_refusal(found):
                self._keep_refused(pending, str(found))
            pending.storage = Storage.DATABASE
            pending.done_event.set()
            self._counted("written")

    def _keep_refused(self, pending: _PendingDecision, reason: str) -> None:
        """A decision that the database will never take goes to the outbox: its replay keeps it with the reason."""
        self._problems.report("refused", f"a decision cannot be recorded: {reason}")
        self.outbox.put(_line_of(pending.facts), key=str(pending.facts["id"]))

    # --- Replaying ----------------------------------------------------------------------------------------

    def replay(self) -> int:
        """Put into the database what is in the outbox; how many decisions were read. One process at a time does.

        Raises OperationalError while the database is away.
        """
        outbox = self.outbox
        if not outbox.write_waiting():
            self._replay_memory(outbox)
            return 0
        if not outbox.folder.is_dir():
            return 0
        for record in self.journal.pending(older_than_s=ORPHAN_S):
            if outbox.put(record.body, key=str(record.body["body"]["id"])):
                self.journal.settle([record.number])
        count = 0
        with exclusive(outbox.folder / "sender.lock", wait=False) as free:
            while free and (records := outbox.pending(MAX_BULK)):
                self._replay_batch(outbox, records)
                count += len(records)
        if count:
            outbox.compact()
            logger.info("%d decisions were replayed from the outbox %s", count, outbox.folder)
        return count

    def _replay_memory(self, outbox: Outbox) -> None:
        """Write what waits in memory straight to the database, which may be back before the disk is."""
        while lines := outbox.waiting_bodies(MAX_BULK):
            for line, found in zip(lines, _ingest([line["body"] for line in lines]), strict=True):
                if _is_refusal(found):
                    self._problems.report("refused", f"a decision cannot be recorded: {found}")
                outbox.take_back(line)

    def _replay_batch(self, outbox: Outbox, records: Sequence[Record]) -> None:
        decisions = [record for record in records if isinstance(record.body.get("body"), dict)]
        found_all = _ingest([record.body["body"] for record in decisions])
        reasons = {
            record.number: str(found)
            for record, found in zip(decisions, found_all, strict=True)
            if _is_refusal(found)
        }
        reasons |= {
            record.number: "expected a decision under `body`" for record in records if record not in decisions
        }
        for number, reason in reasons.items():
            outbox.refuse(number, reason)
        outbox.settle(record.number for record in records if record.number not in reasons)

    def stop(self, timeout_s: float = 5.0) -> None:
        """End the thread after its pending decisions are written."""
        with self._signal:
            self._stopping = True
            self._signal.notify_all()
        if self._thread is not None:
            self._thread.join(timeout_s)

    def drain(self, timeout_s: float) -> bool:
        """Wait until nothing is left to write or replay; False when time ran out."""
        deadline = time.monotonic() + timeout_s
        with self._signal:
            self._hurried = True
            self._signal.notify()
        while time.monotonic() < deadline:
            if (
                not self._queue
                and not self._in_hand
                and not self.outbox.pending_count()
                and not self.outbox.waiting
            ):
                return True
            time.sleep(0.02)
        return False


def _line_of(facts: Facts) -> dict[str, object]:
    """A decision as the spool keeps it."""
    return {"kind": "decision", "body": dict(facts)}


def _is_refusal(found: IngestResult | FeedbackRefused) -> bool:
    """False for a conflict: the decision was answered anew under the same id, and the first answer stands."""
    return isinstance(found, FeedbackRefused) and found.code != "conflict"


def _ingest(bodies: Sequence[Facts]) -> list[IngestResult | FeedbackRefused]:
    """Call decisions_ingest; a decision that the database itself refuses is refused alone, and holds nothing
    else back."""
    try:
        return decisions_ingest(bodies, reserved=True)
    except (OperationalError, InterfaceError):
        raise
    except DatabaseError as error:
        if len(bodies) == 1:
            return [FeedbackRefused(f"the database refuses it: {error}")]
        return [found for body in bodies for found in _ingest([body])]


def spool_folder() -> Path:
    folder: Path = settings.RATCHET_HOME / "spool" / "decisions"
    return folder


@cache
def outbox_of(folder: Path) -> Outbox:
    """Decisions that the database did not take."""
    return Outbox(folder, ProblemLog(logger))


@cache
def journal_of(folder: Path) -> Outbox:
    """Decisions that a process of this machine has in hand. A power cut loses the last of them."""
    return Outbox(folder, ProblemLog(logger), name="journal", fsync=False)


ELSEWHERE_S = 120.0
"""Age in seconds up to which another machine may still have a decision pending that was answered there."""


def decision_id_new() -> uuid.UUID:
    """An id with its time (RFC 9562, version 7), so that any machine can tell that it was given a moment ago."""
    milliseconds = time.time_ns() // 1_000_000
    drawn = milliseconds << 80 | secrets.randbits(80)
    return uuid.UUID(int=drawn & ~(0xF << 76 | 0x3 << 62) | 0x7 << 76 | 0x2 << 62)


def recorded_or_never(*decisions: uuid.UUID | str, then: Callable[[], T]) -> T:
    """The value of `then`; where it finds no decision that was answered a moment ago, once more when that is
    recorded.

    Raises DecisionPending where one of these is still to be recorded, here or perhaps by another machine, and
    DecisionUnknown where none is.
    """
    try:
        return then()
    except DecisionUnknown:
        deadline = time.monotonic() + WAIT_S
        while (held := any(map(_held, decisions))) and time.monotonic() < deadline:
            time.sleep(0.01)
        try:
            return then()
        except DecisionUnknown as error:
            if held or any(map(_given_lately, decisions)):
                raise DecisionPending(
                    "the decision is being recorded: send this again in a second, with the same id",
                    error.fields,
                ) from None
            raise


def _held(decision: uuid.UUID | str) -> bool:
    """True if a process of this machine has the decision in hand, or in the outbox."""
    folder = spool_folder()
    return any(box.contains(str(decision)) for box in (journal_of(folder), outbox_of(folder)))


def _given_lately(decision: uuid.UUID | str) -> bool:
    """True if `decision_id_new` gave the id so short a time ago that another machine may have the decision."""
    try:
        given = uuid.UUID(str(decision))
    except ValueError:
        return False
    age_s = time.time() - (given.int >> 80) / 1000
    return given.version == 7 and abs(age_s) < ELSEWHERE_S


def decision_recorded(id: uuid.UUID) -> Decision | None:
    """A decision by its id; where a process of this machine has it pending, once it is written, WAIT_S at most."""
    journal = journal_of(spool_folder())
    deadline = time.monotonic() + WAIT_S
    while (row := decision_get(id)) is None and journal.contains(str(id)) and time.monotonic() < deadline:
        time.sleep(0.01)
    return row


def outbox_replay() -> int:
    """Replay spooled decisions that no running process owns; called by the scheduler. How many were read."""
    return Recorder(spool_folder).replay()
