"""Scores of reward models for the web process: a client of the scorer, a child process that holds torch and the model.

The web process never imports torch. One scorer serves all web processes of a data folder: it listens on the loopback
address, asks for a token that only the owner of the folder can read, is started by whoever needs it first, and ends by
itself when nobody asked for a while.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from django.conf import settings

from backend import limits
from backend.installation import PROGRAM, command_arguments
from rl.jobs.child_process import dies_with_parent
from rl.models import RewardModelVersion
from rl.reward_models.service import reward_model_champion

logger = logging.getLogger("rl.evaluation.scorer")

MAX_RESPONSES = limits.SCORED_RESPONSES
"""Responses scored by one call."""
MAX_CHARS = limits.SCORED_CHARACTERS
"""Characters of prompt and responses of one call together."""
START_S = 20.0
"""Seconds a caller waits for a scorer to start; torch and a small model take about ten."""
ANSWER_S = 60.0
"""Seconds a caller waits for its scores."""
RETRY_S = 5
"""Seconds a caller is asked to wait where no scorer can answer."""


class ScoringRefused(ValueError):
    """A score that cannot be given: no reward model, or more than one call may ask."""

    def __init__(self, message: str, *, code: str = "invalid", fields: dict[str, str] | None = None) -> None:
        super().__init__(message)
        self.code, self.fields = code, fields or {}


class ScorerAway(Exception):
    """Nobody scores now; `retry_after_s` says when to come back."""

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.retry_after_s = RETRY_S


@dataclass(frozen=True)
class ScoreResult:
    """Scores of responses to one prompt, by one reward model."""

    version: RewardModelVersion
    scores: list[float]
    """The head's numbers, any real; comparable within one model alone."""
    rewards: list[float]
    """The same as raw rewards in [-2, 2]: what PPO and GRPO learn from."""


def responses_score(
    agent: str, messages: list[dict[str, Any]], responses: Sequence[str], name: str = ""
) -> ScoreResult:
    """Score responses to a prompt with the agent's champion among reward models, or the one named.

    Raises ScoringRefused where there is none or too much is asked, ScorerAway where nobody can score now.
    """
    chars = sum(len(str(message.get("content") or "")) for message in messages) + sum(map(len, responses))
    if not 1 <= len(responses) <= MAX_RESPONSES or chars > MAX_CHARS:
        fault = f"expected 1 to {MAX_RESPONSES} responses and {MAX_CHARS:,} characters in all"
        raise ScoringRefused(f"{fault}, found {len(responses)} and {chars:,}", fields={"responses": fault})
    version = _version(agent, name)
    answer = _ask({"name": version.name, "messages": messages, "responses": list(responses)})
    if "refused" in answer:
        raise ScoringRefused(str(answer["refused"]), code="conflict")
    return ScoreResult(version, answer["scores"], answer["rewards"])


def _version(agent: str, name: str) -> RewardModelVersion:
    if not name:
        version = reward_model_champion(agent)
        if version is None:
            raise ScoringRefused(
                f"agent {agent} has no reward model that was promoted; train one: {PROGRAM} train_reward_model --agent "
                f"{agent}",
                code="not_found",
                fields={"agent": "has no reward model"},
            )
        return version
    version = RewardModelVersion.objects.filter(agent=agent, name=name).first()
    if version is None:
        raise ScoringRefused(
            f"agent {agent} has no reward model {name[:80]!r}",
            code="not_found",
            fields={"rewardModel": "does not exist"},
        )
    return version


# --- The scorer's place ---------------------------------------------------------------------------------------


def place() -> Path:
    """Path of the file with a running scorer's port and token, readable by the owner alone."""
    return Path(settings.RATCHET_HOME) / "cache" / "scorer.json"


CALLS = 4
"""Threads of one web process that may wait for the scorer at once: the others go on serving."""

_calls = threading.BoundedSemaphore(CALLS)


def _ask(body: dict[str, Any]) -> dict[str, Any]:
    if not _calls.acquire(blocking=False):
        raise ScorerAway("too many requests wait for scores already")
    try:
        return _ask_patiently(body)
    finally:
        _calls.release()


def _ask_patiently(body: dict[str, Any]) -> dict[str, Any]:
    deadline = time.monotonic() + START_S
    started = False
    while True:
        try:
            return _ask_once(body)
        except (OSError, ValueError) as error:
            if isinstance(error, TimeoutError) or time.monotonic() > deadline:
                raise ScorerAway("the scorer did not answer in time") from error
        if not started:
            started = _start()
        time.sleep(0.2)


def _ask_once(body: dict[str, Any]) -> dict[str, Any]:
    where = json.loads(place().read_text("utf-8"))
    with socket.create_connection(("127.0.0.1", int(where["port"])), timeout=2.0) as connection:
        connection.settimeout(ANSWER_S)
        connection.sendall(json.dumps({**body, "token": where["token"]}).encode() + b"\n")
        with connection.makefile("rb") as stream:
            line = stream.readline()
    if not line:
        raise ConnectionResetError("the scorer closed the connection")
    answer: dict[str, Any] = json.loads(line)
    if "busy" in answer:
        raise ScorerAway("the scorer is busy")
    return answer


def _start() -> bool:
    """Start a scorer unless one is starting. Returns True: this caller asks no second time."""
    with _start_lock() as alone:
        if alone:
            log = Path(settings.RATCHET_HOME) / "scorer.log"
            with log.open("ab") as log_file:
                subprocess.Popen(  # noqa: S603
                    [sys.executable, *command_arguments("score_worker")],
                    cwd=settings.BASE_DIR, stdin=subprocess.DEVNULL, stdout=log_file, stderr=log_file,
                    start_new_session=True, preexec_fn=dies_with_parent(),
                )  # fmt: skip
            logger.info("a scorer is started; its log: %s", log)
    return True


@contextmanager
def _start_lock() -> Iterator[bool]:
    """True inside if nobody else starts or runs a scorer now: a running one holds this lock."""
    with lock_file() as descriptor:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
            return
        fcntl.flock(descriptor, fcntl.LOCK_UN)  # for the child to take: of two, one ends at once
        yield True


@contextmanager
def lock_file() -> Iterator[int]:
    """A descriptor of the file that the running scorer holds locked."""
    path = place().with_suffix(".lock")
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        yield descriptor
    finally:
        os.close(descriptor)
