"""Child process of the scorer: holds reward models in memory and answers `rl.evaluation.scorer`, a call at a time."""

from __future__ import annotations

import fcntl
import hmac
import json
import logging
import os
import secrets
import socketserver
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

from django.db import connection

from rl.evaluation.scorer import MAX_CHARS, lock_file, place
from rl.reward_models.service import RewardModelRefused, reward_model_folder, reward_model_get

logger = logging.getLogger("rl.evaluation.scorer")

MODELS = 2
"""Reward models held at once; the one asked least lately makes room."""
WAITING = 16
"""Calls that may wait for the one in hand; further ones are told to come back."""
LINE = 8 * MAX_CHARS
"""Bytes of a call at most."""


class Scorer:
    """Loaded reward models by name, used one at a time. `load` opens a registered one."""

    def __init__(self, load: Callable[[str], Any]) -> None:
        self.load = load
        self.models: OrderedDict[str, Any] = OrderedDict()
        self.hand = threading.Lock()
        self.places = threading.BoundedSemaphore(WAITING)
        self.asked_at = time.monotonic()

    def answer(self, call: dict[str, Any]) -> dict[str, Any]:
        """{"scores", "rewards"}, {"refused": why}, or {"busy": true}."""
        if not self.places.acquire(blocking=False):
            return {"busy": True}
        try:
            with self.hand:
                self.asked_at = time.monotonic()
                model = self._model(call["name"])
                scores = model.scores([(call["messages"], response) for response in call["responses"]])
                return {
                    "scores": [round(score, 6) for score in scores],
                    "rewards": [round(model.to_raw(score), 6) for score in scores],
                }
        except ValueError as refusal:
            return {"refused": str(refusal)}
        finally:
            self.places.release()

    def _model(self, name: str) -> Any:
        if name not in self.models:
            self.models[name] = self.load(name)
        self.models.move_to_end(name)
        while len(self.models) > MODELS:
            self.models.popitem(last=False)
        return self.models[name]


def registered_load(name: str) -> Any:
    """A registered reward model, its files checked, on this machine's processor: the accelerator is the trainings'.

    Raises RewardModelRefused, and the training package's PolicyLoadError.
    """
    from rl.jobs.hardware import hardware_detect
    from rl.training.reward_scores import RewardModel

    folder = reward_model_folder(reward_model_get(name))
    try:
        return RewardModel.load(folder, hardware_detect("cpu_only"))
    except OSError as error:
        raise RewardModelRefused(f"{name} cannot be opened: {error}") from error
    finally:
        connection.close()  # every call has a thread of its own, and this one ends with it


def scorer_run(idle_s: float) -> bool:
    """Answer calls until none came for `idle_s` seconds. Returns False at once where another scorer runs here."""
    with lock_file() as descriptor:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        scorer, token = Scorer(registered_load), secrets.token_hex(32)
        with _Server(("127.0.0.1", 0), _handler(scorer, token)) as server:
            server.timeout = 1.0
            _announce(server.server_address[1], token)
            try:
                while time.monotonic() - scorer.asked_at < idle_s:
                    server.handle_request()
            finally:
                place().unlink(missing_ok=True)
        return True


class _Server(socketserver.ThreadingTCPServer):
    daemon_threads = True


def _announce(port: int, token: str) -> None:
    half = place().with_suffix(f".{os.getpid()}")
    descriptor = os.open(half, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "w") as file:
        json.dump({"port": port, "token": token}, file)
    half.replace(place())


def _handler(scorer: Scorer, token: str) -> type[socketserver.StreamRequestHandler]:
    class ScorerHandler(socketserver.StreamRequestHandler):
        timeout = 10

        def handle(self) -> None:
            try:
                call = json.loads(self.rfile.readline(LINE))
                given = str(call.pop("token"))
            except (ValueError, KeyError, AttributeError, OSError):
                return  # not one of ours
            if hmac.compare_digest(given.encode(), token.encode()):
                self.wfile.write(json.dumps(scorer.answer(call)).encode() + b"\n")

    return ScorerHandler
