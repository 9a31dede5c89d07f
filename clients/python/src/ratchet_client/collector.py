"""Collector of an agent's traces, ratings and outcomes: it writes to the outbox and sends in the background."""

from __future__ import annotations

import atexit
import uuid
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ratchet_client.decisions import validate_agent
from ratchet_client.json_values import to_json
from ratchet_client.outbox import Outbox
from ratchet_client.problem_log import ProblemLog, logger
from ratchet_client.sender import Sender
from ratchet_client.traces import Trace, last_decision, log_errors, trace_current
from ratchet_client.transport import HttpConnection

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
        redact: Callable[[dict[str, Any]], dict[str, Any] | None] | None = None,
        metadata: Mapping[str, Any] | None = None,
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
        metadata: Mapping[str, Any] | None = None,
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

    def submit(self, kind: str, decision: str | uuid.UUID, body: dict[str, Any]) -> bool:
        """Write a rating or an outcome, in the API's form, to the outbox. True if it is on disk."""
        return bool(self._submit(kind, decision, body))

    @log_errors
    def _submit(self, kind: str, decision: str | uuid.UUID, body: dict[str, Any]) -> bool:
        body = {"id": str(uuid.uuid4()), **to_json(body, text=1_000_000, total=2_000_000)}
        return self._put(kind, body, decision=str(uuid.UUID(str(decision))))

    @log_errors
    def _add(self, trace: dict[str, Any]) -> bool:
        return self._put("trace", trace)

    def add(self, trace: dict[str, Any]) -> bool:
        """Write a finished trace, such as CheckpointLoader yields, to the outbox. True if it is on disk."""
        return bool(self._add(trace))

    def _put(self, kind: str, body: dict[str, Any], **address: str) -> bool:
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

    def refused(self) -> list[dict[str, Any]]:
        """Records that the server refused, each with the reason: {reason, record}."""
        return self._refused() or []

    @log_errors
    def _refused(self) -> list[dict[str, Any]]:
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
