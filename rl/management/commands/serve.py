"""Run web, workers and the learner's clock together, as `make serve` does."""

from __future__ import annotations

import shutil
import signal
import threading
from typing import Literal

from django.conf import settings
from pydantic import Field

from backend.command import CommandOptions, RatchetCommand, Result, migrations_applied
from backend.installation import program_here
from feedback.accounts.sign_in import anybody_signed_in, signin_link
from rl.jobs import supervisor
from rl.serving.files import base_prepare


class Options(CommandOptions):
    host: str = "127.0.0.1"
    """Address to listen on; 0.0.0.0 for all (default 127.0.0.1). Example: 0.0.0.0"""
    port: int = 8000
    """Port to listen on (default 8000). Example: --port 8001"""
    web_workers: int = 2
    """N: Number of web processes (default 2). Example: --web-workers 4"""
    web_threads: int = Field(
        supervisor.WEB_THREADS,
        description=f"N: Concurrent requests per web process (default {supervisor.WEB_THREADS}).",
    )
    every: float = 5.0
    """S: Seconds between two checks of online learning (default 5). Example: --every 60"""
    only: Literal["workers", "training"] | None = None
    """Only the workers for short jobs, or only those that train (default: everything). Example: --only training"""


class Command(RatchetCommand[Options, Result]):
    help = (
        "Serve pages and API, with the workers that train and the scheduler of online learning; Ctrl-C "
        "stops all of them. Example: manage.py serve --port 8000"
    )

    def work(self, options: Options) -> Result:
        host, port = options.host, options.port
        migrations_applied()
        stop_event = threading.Event()
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda *_: stop_event.set())
        running = supervisor.services(
            port,
            host,
            options.web_workers,
            options.every,
            options.web_threads,
        )
        if options.only:
            running = [service for service in running if service.name == options.only]
        else:
            supervisor.port_wait(host, port)
            base_prepare()
            # counts of processes that are long gone
            shutil.rmtree(settings.PROMETHEUS_MULTIPROC_DIR, ignore_errors=True)
        greeted = bool(options.only)

        def stop() -> bool:
            nonlocal greeted
            if not greeted and supervisor.port_answers(host, port):
                self._greet(host, port)
                greeted = True
            return stop_event.is_set()

        supervisor.supervise(running, stop)
        return {"ended": [service.name for service in running]}

    def _greet(self, host: str, port: int) -> None:
        """Print the address, and where it is this machine's alone, a sign-in link before anybody signed in."""
        address = f"http://{'localhost' if host in ('127.0.0.1', '0.0.0.0') else host}:{port}"  # noqa: S104
        self._say(f"\nRatchet is at {address} (Ctrl-C stops it)")
        if host == "127.0.0.1" and not anybody_signed_in():
            self._say(f"Sign-in link, good for one use: {signin_link('admin', address).url}\n")
        else:
            self._say(f"For a sign-in link run: {program_here()} login_link --base-url {address}\n")

    def _say(self, text: str) -> None:
        self.stderr.write(text, self.style.MIGRATE_HEADING)

    def show(self, result: Result) -> None:
        self.stdout.write(f"ended: {', '.join(result['ended'])}")
