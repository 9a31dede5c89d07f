"""Policy for answers whose decision neither the database nor the disk takes: refuse them, or give them and say so.

`GATEWAY_WITHOUT_RECORDING` chooses. Either way counters, the log and one notice per outage tell of it.
"""

from __future__ import annotations

import logging
import threading
from typing import Any

from django.conf import settings

from backend import notifications
from feedback.recording.recorder import Recorder, Storage

logger = logging.getLogger("rl.serving")

HEADER = "X-Ratchet-Recorded"
"""Header of an answer whose decision is not recorded; its value is then `no`."""
RETRY_AFTER_S = 5.0


class RecordingImpossible(RuntimeError):
    """An answer that is refused because its decision cannot be recorded, and policy says `refuse`."""

    retry_after_s = RETRY_AFTER_S

    def __init__(self) -> None:
        super().__init__(
            "the decision cannot be recorded, neither in the database nor on disk, and "
            "GATEWAY_WITHOUT_RECORDING is `refuse`"
        )


class Outage:
    """One stretch of time in which decisions cannot be recorded. Tells people when it begins, and when it is over."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._standing = False

    def tell(self, folder: Any) -> None:
        """Say once that decisions are not recorded."""
        with self._lock:
            first, self._standing = not self._standing, True
        if first:
            consequence = "answers are refused" if refuses() else "answers are given without being recorded"
            text = (
                f"Decisions cannot be recorded, neither in the database nor in {folder}, and {consequence} "
                "(GATEWAY_WITHOUT_RECORDING). Free the disk or make it writable, and see that the database "
                "answers."
            )
            logger.error(text)
            # who asks for an answer does not wait for a mail server
            threading.Thread(
                target=notifications.notify,
                args=("recording_impossible", text),
                name="ratchet-notice",
                daemon=True,
            ).start()

    def recover(self) -> None:
        """Say that decisions are recorded again, where it was said that they are not."""
        if not self._standing:
            return
        with self._lock:
            stood, self._standing = self._standing, False
        if stood:
            logger.warning("decisions are recorded again")


outage = Outage()


def refuses() -> bool:
    """True if an answer that cannot be recorded is refused."""
    return bool(settings.GATEWAY_WITHOUT_RECORDING == "refuse")


def before_answer(recorder: Recorder) -> bool:
    """True if the decision can be recorded, as far as is known before a model works for it.

    Raises RecordingImpossible where it cannot and policy refuses.
    """
    if recorder.recordable():
        return True
    outage.tell(recorder.outbox.folder)
    if refuses():
        raise RecordingImpossible
    return False


def after_answer(recorder: Recorder, storage: Storage) -> bool:
    """True if the decision was recorded, from where it lies. Raises RecordingImpossible as
    `before_answer`."""
    if storage.durable:
        outage.recover()
        return True
    outage.tell(recorder.outbox.folder)
    if refuses():
        raise RecordingImpossible
    return False
