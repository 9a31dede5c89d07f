"""Progress of a run's process: phases, heartbeats, figures and its log; requests to stop it."""

from __future__ import annotations

import _thread
import logging
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from django.db import DatabaseError, connection
from django.utils import timezone

from backend.command import Pace
from rl.models import RunMetric, TrainingRun
from rl.models.runs import method_title

logger = logging.getLogger("rl.jobs.progress")

HARDWARE, READING = "looking at the hardware", "reading the feedback"
"""Phases of a training before it has its dataset."""

ProgressCallback = Callable[[int, int, str], None]
"""Function called with steps done, steps in all, and a short figure to show."""

HEARTBEAT_S = 2.0
"""Seconds between signs of life of a running job."""


def phase_callback(progress: ProgressCallback | None) -> Callable[[str], None]:
    """Callback that names a phase before there is a run to store it."""

    def phase(name: str) -> None:
        if progress is not None:
            progress(0, 0, name)

    return phase


class PhaseRecorder:
    """Writes the phase of a run's process into its row, at most every HEARTBEAT_S seconds within one phase, and passes
    it on to a progress bar. A ProgressCallback: a total of 0 names a new phase, with a total the text is a detail."""

    def __init__(self, run: TrainingRun, progress: ProgressCallback | None = None) -> None:
        self.run, self.progress = run, progress
        self.name = self.words = self.written = ""
        self.written_at = 0.0
        self.pace = Pace()

    def __call__(self, done: int, total: int, text: str = "") -> None:
        if self.progress is not None:
            self.progress(done, total, text)
        if not total:
            self.name, self.pace = text, Pace()
        name = self.name or "at work"
        if total and text:
            # a stage of an export, whose total may be bytes: the stage says more than they do
            words = f"{name.partition(', ')[0]}, {text}"
        else:
            words = f"{name}, {done:,} of {total:,}" if total else name
            # a run at work has one clock on pages, that of the whole run: `work_of`
            if total and self.run.status != TrainingRun.Status.RUNNING:
                words = ", ".join(filter(None, (words, self.pace.words(done, total))))
        self.words = words
        self._write(words, new=not total)

    def _write(self, words: str, *, new: bool) -> None:
        now = time.monotonic()
        if words == self.written or (not new and now - self.written_at < HEARTBEAT_S):
            return
        began = {"phase_at": timezone.now()} if new or not self.written else {}
        self.written, self.written_at = words, now
        TrainingRun.objects.filter(pk=self.run.pk).update(phase=words[:200], **began)


class StopRequest:
    """Request to stop a run: Ctrl-C, a TERM, or a cancel. It interrupts at once, unless it is held off.

    Interrupting is raising KeyboardInterrupt in the main thread. `hold` puts it off while a step is written, until
    `release`.
    """

    def __init__(self) -> None:
        self.asked = self.held = False
        self.signals = False
        """True while signals are handled by `stop_signals`."""

    def ask(self) -> None:
        """Request it from another thread."""
        if self.signals:
            _thread.interrupt_main(signal.SIGTERM)
        else:
            self.asked = True

    def take(self, number: int) -> None:
        """Handle a signal. A second Ctrl-C interrupts even what is held; a launcher may send more than one TERM."""
        again, self.asked = self.asked, True
        if again and number != signal.SIGINT:
            return
        if again or not self.held:
            raise KeyboardInterrupt
        logger.warning("stopping after this step and keeping a checkpoint (%s)", signal.Signals(number).name)

    def hold(self) -> None:
        self.held = True

    def release(self) -> None:
        self.held = False
        if self.asked:
            raise KeyboardInterrupt


class RunListener:
    """Writes what the training says into the run's rows, and passes it on to the progress bar."""

    def __init__(self, run: TrainingRun, stop: StopRequest, progress: ProgressCallback | None) -> None:
        self.run = run
        self.stop = stop
        self.progress = progress
        self.phases = PhaseRecorder(run, progress)
        self.figure = ""
        self.beat_at = timezone.now()

    def on_start(self, total_steps: int) -> None:
        TrainingRun.objects.filter(pk=self.run.pk).update(steps_total=total_steps)

    def on_metrics(self, step: int, metrics: dict[str, float]) -> None:
        # a resumed run repeats the steps after its checkpoint: the newer figures stand
        row, made = RunMetric.objects.get_or_create(run=self.run, step=step, defaults={"values": metrics})
        if not made:
            row.values = {**row.values, **metrics}  # an evaluation comes beside the step it follows
            row.save(update_fields=["values"])
        if "loss" in metrics:
            shown = {"accuracy": "rewards/accuracies", "reward": "reward"}
            parts = [f"{name} {metrics[key]:.2f}" for name, key in shown.items() if key in metrics]
            self.figure = ", ".join([f"loss {metrics['loss']:.3f}", *parts])

    def on_step(self, step: int, total: int) -> None:
        if self.progress:
            self.progress(step, total, self.figure)
        if (timezone.now() - self.beat_at).total_seconds() >= HEARTBEAT_S or step == total:
            self.beat_at = timezone.now()
            TrainingRun.objects.filter(pk=self.run.pk).update(steps_done=step, heartbeat_at=self.beat_at)
            # a stage ends with the run that needs it
            run_ids = [self.run.pk, self.run.stage_of_id or self.run.pk]
            if TrainingRun.objects.filter(pk__in=run_ids, cancel_requested=True).exists():
                self.stop.asked = True

    def on_phase(self, name: str, done: int = 0, total: int = 0) -> None:
        if self.run.stage_of_id is not None:
            name = f"{method_title(self.run.method)} stage, {name}"
        if total and name != self.phases.name:
            self.phases(0, 0, name)
        self.phases(done, total, "" if total else name)

    def on_note(self, text: str) -> None:
        logger.info("run %s: %s", self.run.pk, text)

    def should_stop(self) -> bool:
        return self.stop.asked

    def hold(self) -> None:
        self.stop.hold()

    def release(self) -> None:
        self.stop.release()


@contextmanager
def stop_signals() -> Iterator[StopRequest]:
    """The request that Ctrl-C or a TERM makes, which interrupts this block. Only in the main thread."""
    stop = StopRequest()
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return
    earlier = {
        number: signal.signal(number, lambda number, _: stop.take(number))
        for number in (signal.SIGINT, signal.SIGTERM)
    }
    stop.signals = True
    try:
        yield stop
    finally:
        stop.signals = False
        for number, handler in earlier.items():
            signal.signal(number, handler)


@contextmanager
def pulse(run: TrainingRun, request: StopRequest | None = None) -> Iterator[None]:
    """Signs of life beside the steps: loading a model or reading feedback takes longer than a run may be silent.

    Where the run, or the one it is a stage of, was cancelled on a page or over REST, `request` is made.
    """
    stop = threading.Event()
    cancelled = TrainingRun.objects.filter(pk__in=[run.pk, run.stage_of_id or run.pk], cancel_requested=True)

    def write_heartbeats() -> None:
        while not stop.wait(HEARTBEAT_S):
            try:
                TrainingRun.objects.filter(pk=run.pk, worker=run.worker).update(heartbeat_at=timezone.now())
                if request is not None and not request.asked and cancelled.exists():
                    request.ask()
            except DatabaseError as error:
                # the next beat may come through; the training itself meets the same fault and says so
                logger.warning("run %s: the heartbeat could not be written: %s", run.pk, error)
        connection.close()

    thread = threading.Thread(target=write_heartbeats, name=f"pulse of run {run.pk}", daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


@contextmanager
def run_log(path: Path) -> Iterator[None]:
    """Everything logged while a run trains goes to its folder too; a traceback goes there alone."""
    handler = logging.FileHandler(path)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    loggers = [logging.getLogger(name) for name in ("rl", "transformers", "trl")]
    for source in loggers:
        source.addHandler(handler)
    try:
        yield
    except Exception:
        handler.handle(
            logger.makeRecord(
                logger.name, logging.ERROR, __file__, 0, "training ended with", (), sys.exc_info()
            )
        )
        raise
    finally:
        for source in loggers:
            source.removeHandler(handler)
        handler.close()
