"""From the spool to the server: one record at a time, in the background, until the server has it or refuses it."""

from __future__ import annotations

import http.client
import json
import logging
import random
import ssl
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from uuid import UUID

from ratchet_client.json_values import cut
from ratchet_client.outbox import Progress, Record, Spool, locked, renew_after_fork
from ratchet_client.problem_log import Problems

PATIENCE = 10
"""Records in a row that may fail with 500 before the whole server counts as failing."""
IDLE_S = 5.0
"""How often an idle sender looks for what other processes left in the spool."""
BUSY_S = 0.2
"""How often it looks whether another process has stopped sending."""
FIRST_DELAY_S, LONGEST_DELAY_S = 0.5, 60.0
LONGEST_RETRY_AFTER_S = 600.0

_CONFIGURATION = {401, 403, 404, 405, 407}
_SERVER_DOWN = {408, 425, 429, 502, 503, 504}


@dataclass(frozen=True)
class Answer:
    """What the server said: HTTP status, body text (at most 2,000 characters), seconds it asked us to wait."""

    status: int
    text: str
    retry_after_s: float | None


class Server:
    """One kept-alive HTTP connection to `url`. Not thread-safe: the sender's alone."""

    def __init__(self, url: str, api_key: str | None, timeout_s: float) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.fragment:
            raise ValueError(f"expected a url such as http://localhost:8000, found {url!r}")
        self.url = url
        self._prefix = parts.path.rstrip("/")
        self._secure = parts.scheme == "https"
        self._host, self._port = parts.hostname, parts.port
        self._timeout_s = timeout_s
        self._headers = {"Content-Type": "application/json", "User-Agent": "ratchet-collector"}
        if api_key:
            self._headers["Authorization"] = f"Bearer {api_key}"
        self._connection: http.client.HTTPConnection | None = None

    def post(self, path: str, body: bytes) -> Answer:
        """POST JSON; raises OSError or http.client.HTTPException when no answer comes."""
        kept_alive = self._connection is not None
        try:
            return self._post(path, body)
        except (ConnectionError, http.client.BadStatusLine, http.client.CannotSendRequest):
            # a server may close a kept-alive connection at any moment; on a fresh one the same fault is real
            self.close()
            if not kept_alive:
                raise
            return self._post(path, body)
        except (OSError, http.client.HTTPException):
            self.close()
            raise

    def _post(self, path: str, body: bytes) -> Answer:
        if self._connection is None:
            self._connection = (
                http.client.HTTPSConnection(
                    self._host, self._port, timeout=self._timeout_s, context=ssl.create_default_context()
                )
                if self._secure
                else http.client.HTTPConnection(self._host, self._port, timeout=self._timeout_s)
            )
        self._connection.request("POST", self._prefix + path, body, self._headers)
        response = self._connection.getresponse()
        text = response.read(65_536).decode("utf-8", "replace")
        if not response.isclosed():
            self.close()  # a longer answer would have to be read before the connection serves again
        return Answer(response.status, cut(text, 2_000), _seconds(response.getheader("Retry-After")))

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def forget(self) -> None:
        """In the child of a fork the connection is the parent's: use a new one."""
        self._connection = None


def _seconds(retry_after: str | None) -> float | None:
    # the header may hold a date instead: our own delays do then
    if retry_after is None or not retry_after.strip().isdigit():
        return None
    return min(float(retry_after), LONGEST_RETRY_AFTER_S)


class Fate(Enum):
    """What becomes of a record after one attempt."""

    DONE = "the server has it"
    REFUSED = "the server will never take it"
    HELD = "the server failed on it; others may go through"
    STOP = "no record can be sent now"


@dataclass(frozen=True)
class Attempt:
    fate: Fate
    reason: str = ""
    retry_after_s: float | None = None


def route(record: dict[str, Any]) -> tuple[str, Any]:
    """Address and JSON body of a spooled record; raises ValueError for one that is not ours."""
    kind, body, decision = record.get("kind"), record.get("body"), record.get("decision")
    if isinstance(body, dict):
        if kind == "trace":
            return "/api/traces/", body
        if kind in ("rating", "outcome") and isinstance(decision, str):
            return f"/api/decisions/{UUID(decision)}/{kind}s/", body
    raise ValueError(f"expected a trace, a rating or an outcome, found kind {kind!r}")


def judge(answer: Answer, kind: str, trace_held: Callable[[], bool]) -> Attempt:
    """What an HTTP answer means for the record it answers.

    200, 201: taken. 409: known with another body, so the server has one; done. Wrong key, wrong address, a redirect,
    a busy or absent server: everything waits. 500: this record waits. Any other 4xx: refused for good.
    """
    status, said = answer.status, f"HTTP {answer.status}: {cut(answer.text, 500)}"
    if 200 <= status < 300 or status == 409:
        return Attempt(Fate.DONE, said if status == 409 else "")
    if status == 404 and kind != "trace":
        # the decision is not there; it may be in a trace that is held, and otherwise it never will be
        return Attempt(Fate.HELD if trace_held() else Fate.REFUSED, said)
    if status < 400 or status in _CONFIGURATION or status in _SERVER_DOWN:
        return Attempt(Fate.STOP, said, answer.retry_after_s)
    return Attempt(Fate.HELD if status >= 500 else Fate.REFUSED, said, answer.retry_after_s)


class Sender:
    """The background thread. Of all senders on one spool, in all processes, one works at a time."""

    def __init__(self, spool: Spool, server: Server, problems: Problems) -> None:
        self.spool, self.server, self.problems = spool, server, problems
        self.last_problem = ""
        self._thread: threading.Thread | None = None
        self._renew()
        renew_after_fork(self)

    def _renew(self) -> None:
        self._signal = threading.Condition()
        self._news = self._hurry = self._stop = False

    def after_fork(self) -> None:
        """Threads do not survive a fork."""
        self._thread = None
        self.server.forget()
        self._renew()

    def wake(self, *, hurry: bool = False) -> None:
        """There is something to send; with hurry, do not wait out a delay after failures."""
        with self._signal:
            if self._stop:
                return
            self._news = True
            self._hurry = self._hurry or hurry
            if self._thread is None or not self._thread.is_alive():
                self._thread = threading.Thread(target=self._run, name="ratchet-collector", daemon=True)
                self._thread.start()
            self._signal.notify_all()

    def flush(self, timeout_s: float) -> bool:
        """Wait until the server has, or refused, all that is in the spool now. False when time ran out."""
        deadline = time.monotonic() + timeout_s
        self.spool.write_waiting()
        goals: dict[Path, int] | None = self.spool.unhandled()
        while goals:
            goals = self.spool.unhandled(goals)
            left = deadline - time.monotonic()
            if not goals or left <= 0:
                break
            self.wake(hurry=True)
            with self._signal:
                self._signal.wait(min(left, BUSY_S))  # until a round has ended
            if self.last_problem:
                time.sleep(min(left, BUSY_S))  # hurried, not hammering
        return not goals and not self.spool.waiting

    def stop(self, timeout_s: float) -> None:
        """End the thread after the request it is in."""
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
                self._news = self._hurry = False
                if self._stop:
                    break
            try:
                self.spool.write_waiting()
                outcome = self._round()
            except Exception as error:
                # the spool cannot be read, a fault of ours: keep everything, say it, try again later
                self.problems.say("sender", f"sending from {self.spool.folder} failed: {error!r}", error)
                outcome = Attempt(Fate.STOP, repr(error))
            failures = failures + 1 if outcome is not None and outcome.fate is Fate.STOP else 0
            self.last_problem = outcome.reason if outcome is not None else ""
            with self._signal:
                self._signal.notify_all()
                if failures:
                    assert outcome is not None
                    self._signal.wait_for(lambda: self._hurry or self._stop, _delay(failures, outcome))
                else:
                    idle = BUSY_S if outcome is not None else IDLE_S
                    self._signal.wait_for(lambda: self._news or self._stop, idle)
        self.server.close()

    def _round(self) -> Attempt | None:
        """Send all there is. None: nothing is left; HELD: something is, or another process is at it; STOP: failing."""
        if not self.spool.unhandled():
            return None
        with locked(self.spool.folder / "sender.lock", wait=False) as free:
            if not free:
                return Attempt(Fate.HELD)
            failed: Attempt | None = None
            for day in self.spool.unhandled():
                found = _Day(self, day).send()
                failed = found or failed
                if self._stop:
                    return None
                if found is not None and found.fate is Fate.STOP:
                    break
            self.spool.sweep()
        if failed is None:
            self.problems.over("server", f"{self.server.url} takes what is sent again")
            return None
        self.problems.say(
            "server", f"{self.server.url} does not take everything now ({failed.reason}); the spool keeps it"
        )
        return Attempt(Fate.STOP, failed.reason, failed.retry_after_s)

    def stopping(self) -> bool:
        return self._stop

    def attempt(self, record: dict[str, Any], trace_held: Callable[[], bool]) -> Attempt:
        """Send one record; `trace_held` says whether a trace that it may belong to has yet to arrive."""
        try:
            path, body = route(record)
        except ValueError as error:
            return Attempt(Fate.REFUSED, str(error))
        try:
            answer = self.server.post(path, json.dumps(body).encode("ascii"))
        except (OSError, http.client.HTTPException) as error:
            return Attempt(Fate.STOP, f"no answer: {error!r}")
        found = judge(answer, str(record["kind"]), trace_held)
        if found.fate is Fate.DONE and found.reason:
            said = f"{path}: id {body.get('id')} is known with another body ({found.reason})"
            self.problems.say("conflict", said, level=logging.WARNING)
        return found


class _Day:
    """One day's file on its way to the server."""

    def __init__(self, sender: Sender, day: Path) -> None:
        self.sender, self.day = sender, day
        self.progress: Progress = sender.spool.progress(day)
        self.doubtful: list[int] = []

    def send(self) -> Attempt | None:
        """All new records, then those held back before.

        None: the end was reached, or the collector closes. HELD: records stay behind that the server fails on. STOP:
        it takes nothing.
        """
        new = self._send_new()
        if new is not None and new.fate is Fate.STOP:
            return new
        return self._send_held() or new

    def _send_new(self) -> Attempt | None:
        # Records the server fails on count as held only once it takes one after them: while everything fails, the
        # position stays where it was, and the list of held ones cannot grow without end.
        attempt: Attempt | None = None
        for record in self.sender.spool.records(self.day, self.progress.position):
            if self.sender.stopping():
                return None
            attempt = self._attempt(record)
            if attempt.fate is Fate.STOP:
                return attempt
            if attempt.fate is Fate.HELD:
                self.doubtful.append(record.start)
                if len(self.doubtful) >= PATIENCE:
                    return Attempt(Fate.STOP, attempt.reason, attempt.retry_after_s)
            else:
                self.progress.position = record.end
                self.progress.held += self.doubtful
                self.doubtful.clear()
                self._settle(record, attempt)
        return attempt if self.doubtful else None

    def _send_held(self) -> Attempt | None:
        failures = 0
        failed: Attempt | None = None
        for start in list(self.progress.held):
            if self.sender.stopping() or failures >= PATIENCE:
                break
            record = self.sender.spool.record_at(self.day, start)
            attempt = Attempt(Fate.DONE) if record is None else self._attempt(record)
            if attempt.fate is Fate.STOP:
                return attempt
            self.progress.held.remove(start)
            if attempt.fate is Fate.HELD:
                failures, failed = failures + 1, attempt
                self.progress.held.append(start)  # to the end: the others have their turn first
            elif record is not None:
                self._settle(record, attempt)
        if failed:
            self.sender.spool.progress_save(self.day, self.progress)
        return failed

    def _attempt(self, record: Record) -> Attempt:
        if record.body is None:
            return Attempt(Fate.REFUSED, record.fault) if record.fault else Attempt(Fate.DONE)
        return self.sender.attempt(record.body, self._trace_held)

    def _trace_held(self) -> bool:
        spool = self.sender.spool
        found = (spool.record_at(self.day, start) for start in [*self.progress.held, *self.doubtful])
        return any(r is not None and r.body is not None and r.body.get("kind") == "trace" for r in found)

    def _settle(self, record: Record, attempt: Attempt) -> None:
        """Note what became of a record, on disk, before the next one is sent."""
        if attempt.fate is Fate.REFUSED:
            self.sender.spool.refuse(self.day, record, attempt.reason)
            self.sender.problems.say(
                "refused",
                f"a record was refused ({attempt.reason}); it is kept in {self.day.stem}.refused.jsonl",
            )
            self.progress.refused += 1
        elif record.body is not None:
            self.progress.sent += 1
        self.sender.spool.progress_save(self.day, self.progress)


def _delay(failures: int, outcome: Attempt, jitter: Callable[[], float] = random.random) -> float:
    """Seconds to wait after that many failing rounds: doubled each time, at most a minute, by half at random."""
    delay = min(FIRST_DELAY_S * 2.0 ** min(failures - 1, 20), LONGEST_DELAY_S) * (0.5 + 0.5 * jitter())
    return max(delay, outcome.retry_after_s or 0.0)
