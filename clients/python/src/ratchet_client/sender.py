"""Background delivery of the outbox: one record at a time, until the server stores or refuses it."""

from __future__ import annotations

import http.client
import json
import logging
import random
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Any
from uuid import UUID

from ratchet_client.json_values import truncate
from ratchet_client.outbox import Outbox
from ratchet_client.problem_log import ProblemLog
from ratchet_client.processes import exclusive, renew_after_fork
from ratchet_client.transport import HttpConnection, HttpResponse

MAX_FAILURES_IN_A_ROW = 10
"""Records in a row that fail with status 500 before the sender pauses."""
IDLE_S = 5.0
"""Seconds between an idle sender's looks for records of other processes."""
POLL_S = 0.2
"""Seconds between two checks whether another process still sends."""
BATCH = 100
"""Records read from the outbox at a time."""
FIRST_DELAY_S, LONGEST_DELAY_S = 0.5, 60.0

_CONFIGURATION = {401, 403, 404, 405, 407}
_SERVER_DOWN = {408, 425, 429, 502, 503, 504}


class Disposition(Enum):
    """State of a record after one attempt to deliver it."""

    DELIVERED = "the server has it"
    REFUSED = "the server will never take it"
    DEFERRED = "the server failed on it; others may go through"
    UNAVAILABLE = "no record can be sent now"


@dataclass(frozen=True)
class Delivery:
    """Result of one attempt: the record's state, the reason, and the seconds that the server asked to wait."""

    disposition: Disposition
    reason: str = ""
    retry_after_s: float | None = None


def route(record: dict[str, Any]) -> tuple[str, Any]:
    """Address and JSON body of a record. Raises ValueError for a record that this client did not write."""
    kind, body, decision = record.get("kind"), record.get("body"), record.get("decision")
    if isinstance(body, dict):
        if kind == "trace":
            return "/api/traces/", body
        if kind in ("rating", "outcome") and isinstance(decision, str):
            return f"/api/decisions/{UUID(decision)}/{kind}s/", body
    raise ValueError(f"expected a trace, a rating or an outcome, found kind {kind!r}")


def delivery_of(response: HttpResponse, kind: str, trace_held: Callable[[], bool]) -> Delivery:
    """What becomes of a record after this HTTP response.

    200 and 201: stored. 409: done, because the server has a record with this id. Wrong key or address, a redirect, a
    busy or unreachable server: all records wait. 500: this record waits. Any other 4xx: refused.
    """
    status, reason = response.status, f"HTTP {response.status}: {truncate(response.text, 500)}"
    if 200 <= status < 300 or status == 409:
        return Delivery(Disposition.DELIVERED, reason if status == 409 else "")
    if status == 404 and kind != "trace":
        # The decision is unknown. If a trace still waits, it may be in that trace; otherwise it will not come.
        return Delivery(Disposition.DEFERRED if trace_held() else Disposition.REFUSED, reason)
    if status < 400 or status in _CONFIGURATION or status in _SERVER_DOWN:
        return Delivery(Disposition.UNAVAILABLE, reason, response.retry_after_s)
    return Delivery(
        Disposition.DEFERRED if status >= 500 else Disposition.REFUSED, reason, response.retry_after_s
    )


class Sender:
    """The background thread. Only one sender works on an outbox at a time, across all processes."""

    def __init__(self, outbox: Outbox, connection: HttpConnection, problems: ProblemLog) -> None:
        self.outbox, self.connection, self.problems = outbox, connection, problems
        self.last_problem = ""
        self.sent = 0
        """Records that the server took from this process."""
        self._thread: threading.Thread | None = None
        self._renew()
        renew_after_fork(self)

    def _renew(self) -> None:
        self._signal = threading.Condition()
        self._work = self._hurry = self._stop = False

    def after_fork(self) -> None:
        """Reset in the child: threads do not survive a fork."""
        self._thread = None
        self.connection.forget()
        self._renew()

    def wake(self, *, hurry: bool = False) -> None:
        """Start sending. hurry: skip the delay that follows failures."""
        with self._signal:
            if self._stop:
                return
            self._work = True
            self._hurry = self._hurry or hurry
            if self._thread is None or not self._thread.is_alive():
                self._thread = threading.Thread(target=self._run, name="ratchet-collector", daemon=True)
                self._thread.start()
            self._signal.notify_all()

    def flush(self, timeout_s: float) -> bool:
        """Wait until the server has answered for all records now in the outbox. False after the timeout."""
        deadline = time.monotonic() + timeout_s
        self.outbox.write_waiting()
        goal = self.outbox.newest()
        while left := self.outbox.pending_count(up_to=goal):
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                break
            self.wake(hurry=True)
            with self._signal:
                self._signal.wait(min(left_s, POLL_S))  # wait until a round has ended
            if self.last_problem:
                time.sleep(min(left_s, POLL_S))  # A hurried sender still pauses between attempts.
        return not left and not self.outbox.waiting

    def stop(self, timeout_s: float) -> None:
        """End the thread after its current request."""
        with self._signal:
            self._stop = True
            self._signal.notify_all()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(timeout_s)

    # --- The thread ---------------------------------------------------------------------------------------

    def _run(self) -> None:
        failures = 0
        while True:
            with self._signal:
                self._work = self._hurry = False
                if self._stop:
                    break
            try:
                self.outbox.write_waiting()
                outcome = self._deliver_pending()
            except Exception as error:
                # The outbox cannot be read, or the client has a fault: keep all records, log it, try later.
                self.problems.report("sender", f"sending from {self.outbox.folder} failed: {error!r}", error)
                outcome = Delivery(Disposition.UNAVAILABLE, repr(error))
            failures = (
                failures + 1 if outcome is not None and outcome.disposition is Disposition.UNAVAILABLE else 0
            )
            self.last_problem = outcome.reason if outcome is not None else ""
            with self._signal:
                self._signal.notify_all()
                if failures:
                    assert outcome is not None
                    self._signal.wait_for(lambda: self._hurry or self._stop, _delay(failures, outcome))
                else:
                    idle = POLL_S if outcome is not None else IDLE_S
                    self._signal.wait_for(lambda: self._work or self._stop, idle)
        self.connection.close()

    def _deliver_pending(self) -> Delivery | None:
        """Send all records. None: none are left. DEFERRED: another process sends. UNAVAILABLE: the server fails."""
        if not self.outbox.pending_count():
            return None
        with exclusive(self.outbox.folder / "sender.lock", wait=False) as free:
            if not free:
                return Delivery(Disposition.DEFERRED)
            failure = self._send_each()
        if self._stop:
            return None
        if failure is None:
            self.problems.resolve("server", f"{self.connection.url} takes what is sent again")
            return None
        self.problems.report(
            "server",
            f"{self.connection.url} does not take everything now ({failure.reason}); the outbox keeps it",
        )
        return Delivery(Disposition.UNAVAILABLE, failure.reason, failure.retry_after_s)

    def _send_each(self) -> Delivery | None:
        """Send each record once; returns the last failure. A record that the server fails on goes behind the others."""
        failed: set[int] = set()
        in_a_row = 0
        failure: Delivery | None = None
        while records := [one for one in self.outbox.pending(BATCH) if one.number not in failed]:
            for number, record in records:
                if self._stop:
                    return None
                delivery = self.attempt(record)
                if delivery.disposition is Disposition.UNAVAILABLE:
                    return delivery
                if delivery.disposition is not Disposition.DEFERRED:
                    in_a_row = 0
                    self._settle(number, delivery)
                    continue
                failed.add(number)
                self.outbox.defer(number)
                in_a_row, failure = in_a_row + 1, delivery
                if in_a_row >= MAX_FAILURES_IN_A_ROW:
                    return failure
        return failure

    def _settle(self, number: int, delivery: Delivery) -> None:
        """Save a record's state before the next record is sent."""
        if delivery.disposition is Disposition.DELIVERED:
            self.sent += 1
            self.outbox.settle([number])
            return
        self.outbox.refuse(number, delivery.reason)
        self.problems.report(
            "refused", f"a record was refused ({delivery.reason}); it is kept in {self.outbox.path}"
        )

    def attempt(self, record: dict[str, Any]) -> Delivery:
        """Send one record."""
        try:
            path, body = route(record)
        except ValueError as error:
            return Delivery(Disposition.REFUSED, str(error))
        try:
            response = self.connection.post(path, json.dumps(body).encode("ascii"))
        except (OSError, http.client.HTTPException) as error:
            return Delivery(Disposition.UNAVAILABLE, f"no answer: {error!r}")
        delivery = delivery_of(response, str(record["kind"]), lambda: self.outbox.holds_kind("trace"))
        if delivery.disposition is Disposition.DELIVERED and delivery.reason:
            message = f"{path}: id {body.get('id')} is known with another body ({delivery.reason})"
            self.problems.report("conflict", message, level=logging.WARNING)
        return delivery


def _delay(failures: int, outcome: Delivery, jitter: Callable[[], float] = random.random) -> float:
    """Seconds to wait after this many failed rounds: doubled each time, at most 60, half of it random."""
    delay = min(FIRST_DELAY_S * 2.0 ** min(failures - 1, 20), LONGEST_DELAY_S) * (0.5 + 0.5 * jitter())
    return max(delay, outcome.retry_after_s or 0.0)
