"""Collector of an agent's traces, ratings and outcomes: it writes to the outbox and sends in the background."""

from __future__ import annotations

import atexit
import http.client
import json
import logging
import random
import threading
import time
import uuid
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any
from uuid import UUID

from ratchet_client.decisions import validate_agent
from ratchet_client.json_values import to_json, truncate
from ratchet_client.outbox import Outbox
from ratchet_client.problem_log import ProblemLog, logger
from ratchet_client.processes import exclusive, renew_after_fork
from ratchet_client.traces import Trace, last_decision, log_errors, trace_current
from ratchet_client.transport import HttpConnection, HttpResponse

# --- Sending, in a thread of its own ---

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


def route(record: Mapping[str, object]) -> tuple[str, Any]:
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
    busy or unreachable server: all records wait. 500, or a decision that is being recorded: this record waits. Any
    other 4xx: refused.
    """
    status, reason = response.status, f"HTTP {response.status}: {truncate(response.text, 500)}"
    if 200 <= status < 300 or status == 409:
        return Delivery(Disposition.DELIVERED, reason if status == 409 else "")
    if status == 404 and kind != "trace":
        # The decision is unknown. If a trace still waits, it may be in that trace; otherwise it will not come.
        return Delivery(Disposition.DEFERRED if trace_held() else Disposition.REFUSED, reason)
    if status == 503 and '"code":"pending"' in response.text.replace(" ", ""):
        return Delivery(Disposition.DEFERRED, reason, response.retry_after_s)
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
            for number, record, _, _ in records:
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


_collectors: weakref.WeakSet[TraceCollector] = weakref.WeakSet()


@dataclass(frozen=True)
class CollectorStatus:
    """Counts of records by where they are."""

    sent: int
    """Records that this collector has sent."""
    refused: int
    """Records in the outbox that the server refused. `refused` lists them with the reasons."""
    pending_bytes: int
    """Bytes in the outbox that the server does not have yet."""
    waiting: int
    """Records in memory, because the disk cannot be written."""
    lost: int
    """Records lost, because memory was full while the disk could not be written."""
    last_problem: str
    """Why the last delivery failed; empty after a success."""


class TraceCollector:
    """Records one agent's traces: to the outbox at once, to the server in the background.

    agent: slug of the agent. url: address of the server, such as http://localhost:8000. Without it, records stay in
    the outbox until a collector with a url opens the same folder. api_key: key with the scope `ingest` (and `rate` for
    ratings). spool_dir: folder of the outbox, for one server. Processes may share it. redact: gets each trace or
    rating as a dict before it is written. It returns what to write, or None to drop it; if it raises, nothing is
    written. metadata: facts added to every trace. fsync=False writes faster, but a power cut may lose the last records.

    Raises ValueError for an invalid agent or url. No other method raises into the app or waits for the network.
    """

    def __init__(
        self,
        agent: str,
        url: str | None = None,
        api_key: str | None = None,
        spool_dir: str | Path = "spool",
        *,
        redact: Callable[[dict[str, object]], dict[str, object] | None] | None = None,
        metadata: Mapping[str, object] | None = None,
        timeout_s: float = 10.0,
        exit_timeout_s: float = 2.0,
        fsync: bool = True,
    ) -> None:
        self.agent = validate_agent(agent)
        self.problems = ProblemLog()
        self.outbox = Outbox(Path(spool_dir).absolute(), self.problems, fsync=fsync)
        self._sender = (
            Sender(self.outbox, HttpConnection(url, api_key, timeout_s), self.problems) if url else None
        )
        self._redact = redact
        self._metadata = dict(metadata or {})
        self._exit_timeout_s = exit_timeout_s
        _collectors.add(self)
        if self._sender is not None:
            self._wake_if_pending(self._sender)

    @log_errors
    def _wake_if_pending(self, sender: Sender) -> None:
        """Send at once what an earlier process left in the outbox."""
        if self.outbox.pending_count():
            sender.wake()

    # --- Recording ----------------------------------------------------------------------------------------

    def trace(
        self,
        run_id: str = "",
        *,
        unit: str = "",
        policy: str = "",
        metadata: Mapping[str, object] | None = None,
    ) -> Trace:
        """A new trace: `with collector.trace(run_id="42", unit="user-7") as trace: trace.step("plan")`.

        run_id: the app's own id of the run. unit: user or session of the run. policy: name of the deciding policy.
        """
        return Trace(
            self, run_id=run_id, unit=unit, policy=policy, metadata={**self._metadata, **(metadata or {})}
        )

    def current(self) -> Trace | None:
        """The trace that the running code is in, if any."""
        return trace_current(self)

    def decision(
        self, messages: Any, response: Any, *, unit: str = "", policy: str = "", **facts: Any
    ) -> str:
        """Record one decision in the current trace or in a new one. Returns its id. Facts: see Trace.decision."""
        trace = self.current()
        if trace is not None:
            return trace.decision(messages, response, unit=unit or None, policy=policy or None, **facts)
        alone = self.trace(str(facts.pop("run_id", "")), unit=unit, policy=policy)
        key = alone.decision(messages, response, **facts)
        alone.finish()
        return key

    @property
    def last_decision_id(self) -> str | None:
        """Id of this thread's or task's latest decision, for `rate`."""
        return last_decision.get()

    def rate(
        self,
        decision: str | uuid.UUID,
        *,
        rater: str,
        thumb: str | None = None,
        stars: int | None = None,
        score: float | None = None,
        correction: str | None = None,
        tags: Sequence[str] = (),
        notes: str = "",
    ) -> None:
        """Send a rating of a decision: thumb "up" or "down", stars 1..5, score 0..1, a correction."""
        values = {"thumb": thumb, "stars": stars, "score": score, "correction": correction, "notes": notes}
        self._submit(
            "rating",
            decision,
            {"rater": rater, **{k: v for k, v in values.items() if v not in (None, "")}, "tags": list(tags)},
        )

    def outcome(self, decision: str | uuid.UUID, name: str, value: float, *, at: str | None = None) -> None:
        """Send a measured result of a decision, such as `ticket_reopened`. at: ISO time; now if left out."""
        self._submit("outcome", decision, {"name": name, "value": value} | ({"at": at} if at else {}))

    def submit(self, kind: str, decision: str | uuid.UUID, body: dict[str, object]) -> bool:
        """Write a rating or an outcome, in the API's form, to the outbox. True if it is on disk."""
        return bool(self._submit(kind, decision, body))

    @log_errors
    def _submit(self, kind: str, decision: str | uuid.UUID, body: dict[str, object]) -> bool:
        body = {"id": str(uuid.uuid4()), **to_json(body, text=1_000_000, total=2_000_000)}
        return self._put(kind, body, decision=str(uuid.UUID(str(decision))))

    @log_errors
    def _add(self, trace: dict[str, object]) -> bool:
        return self._put("trace", trace)

    def add(self, trace: dict[str, object]) -> bool:
        """Write a finished trace, such as CheckpointLoader yields, to the outbox. True if it is on disk."""
        return bool(self._add(trace))

    def _put(self, kind: str, body: dict[str, object], **address: str) -> bool:
        if self._redact is not None:
            try:
                redacted = self._redact(body)
            except Exception as error:
                # A record that could not be redacted is not written.
                self.problems.report(
                    "redact", f"the redact hook raised; a {kind} was dropped: {error!r}", error
                )
                return False
            if redacted is None:
                return False
            body = redacted
        on_disk = self.outbox.put({"kind": kind, **address, "body": body})
        if self._sender is not None:
            self._sender.wake()
        return on_disk

    # --- Sending ------------------------------------------------------------------------------------------

    def flush(self, timeout_s: float = 10.0) -> bool:
        """Wait until the server has answered for all records in the outbox; without a url, until they are on disk.

        False after the timeout: the rest stays in the outbox and is sent later.
        """
        return bool(self._flush(timeout_s))

    @log_errors
    def _flush(self, timeout_s: float) -> bool:
        return self.outbox.write_waiting() if self._sender is None else self._sender.flush(timeout_s)

    def status(self) -> CollectorStatus:
        """Counts of records. If the outbox cannot be read: zeros and the problem."""
        unreadable = CollectorStatus(
            0, 0, 0, self.outbox.waiting, self.outbox.lost, f"{self.outbox.folder} cannot be read"
        )
        return self._status() or unreadable

    @log_errors
    def _status(self) -> CollectorStatus:
        return CollectorStatus(
            sent=self._sender.sent if self._sender is not None else 0,
            refused=len(self.outbox.refused()),
            pending_bytes=self.outbox.pending_bytes(),
            waiting=self.outbox.waiting,
            lost=self.outbox.lost,
            last_problem=self._sender.last_problem if self._sender is not None else "",
        )

    def refused(self) -> list[dict[str, object]]:
        """Records that the server refused, each with the reason: {reason, record}."""
        return self._refused() or []

    @log_errors
    def _refused(self) -> list[dict[str, object]]:
        return self.outbox.refused()

    def close(self, timeout_s: float = 5.0) -> bool:
        """Flush and end the background thread. Later records stay in the outbox."""
        sent = self.flush(timeout_s)
        _collectors.discard(self)
        if self._sender is not None:
            self._sender.stop(timeout_s)
        return sent

    def __enter__(self) -> TraceCollector:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def exit_timeout_s(self) -> float:
        """Most seconds that the end of the process waits for the server."""
        return self._exit_timeout_s


@atexit.register
def _close_all() -> None:
    for collector in list(_collectors):
        if not collector.close(collector.exit_timeout_s):
            logger.info(
                "%s keeps what was not sent; the next collector on it sends it", collector.outbox.folder
            )
