"""A django-q2 sentinel that outlives the sudden death of any of its processes.

Pusher, workers and monitor of a cluster share two `multiprocessing` queues. A reader waits while it holds the queue's
lock; killed (out of memory, SIGKILL) it takes the lock with it, and whoever is started in its place waits for ever:
django-q2 1.11 starts it and goes on. Found by killing: a cluster whose worker was killed while idle took no task again.
"""

from __future__ import annotations

import logging
from multiprocessing.process import BaseProcess
from typing import Any

from django.db import InterfaceError, OperationalError, close_old_connections, connection
from django_q.cluster import Sentinel
from django_q.conf import Conf
from django_q.queues import Queue
from django_q.scheduler import scheduler
from django_q.status import Stat

from backend.logs import OutageLog

logger = logging.getLogger("rl.jobs.sentinel")
outage = OutageLog(logger)

LOCK_S = 5.0
"""Seconds to wait for the lock of a worker's clock; one that was killed inside it never gives it back."""
TIMED_OUT = 0
"""Value that django-q2 writes into the clock of a worker whose job took too long."""


class SteadySentinel(Sentinel):
    """Makes new queues and new processes for all where one was killed; one that ended by itself is replaced alone."""

    def guard(self) -> None:
        """django-q2's loop, but that it never waits for the lock of a process that is dead."""
        self.start_event.set()
        logger.info("cluster %s is running", self.queue_name())
        seconds = 0.0
        while True:
            for process in list(self.pool):
                self._check(process)
            for process in (self.monitor, self.pusher):
                if not process.is_alive():
                    self.reincarnate(process)
            seconds += Conf.GUARD_CYCLE
            if seconds >= 30 and Conf.SCHEDULER:
                seconds = 0.0
                self._schedule()
            Stat(self).save()
            if self.stop_event.wait(Conf.GUARD_CYCLE):
                break
        self.stop()

    def _schedule(self) -> None:
        """Hand over what is due. django-q2 logs a database that is away with its traceback, each time."""
        try:
            close_old_connections()
            with connection.cursor() as cursor:
                cursor.execute("SELECT 1")
        except (OperationalError, InterfaceError) as error:
            outage.report("the database cannot be reached, and nothing is scheduled meanwhile", error)
            return
        scheduler(broker=self.broker)

    def _check(self, process: Any) -> None:
        if process not in self.pool:
            return  # all were replaced since
        if not process.is_alive():
            self.reincarnate(process)
            return
        lock = process.timer.get_lock()
        if not lock.acquire(timeout=LOCK_S):
            return  # it was killed this very moment, and the next look finds it dead
        try:
            if process.timer.value == TIMED_OUT:
                self.reincarnate(process)
            elif process.timer.value > 0:
                process.timer.value -= Conf.GUARD_CYCLE
        finally:
            lock.release()

    def reincarnate(self, process: Any) -> None:
        """Replace one process, or all of them where it was killed."""
        if not was_killed(process):
            super().reincarnate(process)
            return
        logger.critical("%s was killed (%s): the cluster starts over", process.name, process.exitcode)
        for one in (*self.pool, self.monitor, self.pusher):
            one.kill()
            one.join(LOCK_S)
        self.task_queue = Queue(maxsize=Conf.QUEUE_LIMIT) if Conf.QUEUE_LIMIT else Queue()
        self.result_queue = Queue()
        self.spawn_cluster()
        self.reincarnations += 1


def was_killed(process: BaseProcess) -> bool:
    """True if a signal ended it, so that it may hold a lock for ever."""
    return not process.is_alive() and process.exitcode is not None and process.exitcode < 0
