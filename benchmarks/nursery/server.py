"""A Ratchet server at a terminal of its own, as a newcomer starts it."""

from __future__ import annotations

import contextlib
import os
import pty
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

from tests.support.server import free_port

ROOT = Path(__file__).resolve().parent.parent.parent
LINK = re.compile(r"http://\S+/accounts/link/\S+")


class Serve:
    """`manage.py serve` at a terminal of its own, as a newcomer starts it; reads the sign-in link it prints."""

    def __init__(self, home: Path) -> None:
        self.port = free_port()
        self.environment = os.environ | {"RATCHET_HOME": str(home)}
        subprocess.run(
            [sys.executable, "manage.py", "migrate", "--verbosity", "0"],
            cwd=ROOT,
            env=self.environment,
            check=True,
        )
        self.terminal, inner = pty.openpty()
        self.process = subprocess.Popen(
            [sys.executable, "manage.py", "serve", "--port", str(self.port)],
            cwd=ROOT,
            env=self.environment,
            stdin=inner,
            stdout=inner,
            stderr=inner,
            start_new_session=True,
        )
        os.close(inner)
        self.output = ""
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        # an OSError is how a pseudo-terminal says that nobody holds its other end any more
        with contextlib.suppress(OSError):
            while block := os.read(self.terminal, 4096):
                self.output += block.decode("utf-8", "replace")

    def address(self) -> str:
        """Address of the server, once it has said that it answers. Raises TimeoutError after five minutes."""
        deadline = time.monotonic() + 300
        while "Ratchet is at" not in self.output:
            if time.monotonic() > deadline:
                raise TimeoutError(f"expected `Ratchet is at` within 300 s, found: {self.output[-500:]}")
            time.sleep(0.2)
        return f"http://localhost:{self.port}"

    def link(self) -> str:
        deadline = time.monotonic() + 300
        while time.monotonic() < deadline:
            if found := LINK.search(re.sub(r"\x1b\[[0-9;]*m", "", self.output)):
                return found[0]
            if self.process.poll() is not None:
                break
            time.sleep(0.2)
        raise SystemExit(f"serve printed no sign-in link; it said: {self.output[-2000:]}")

    def shell(self, code: str) -> None:
        command = [sys.executable, "manage.py", "shell", "-c", code]
        subprocess.run(command, cwd=ROOT, env=self.environment, check=True, stdout=subprocess.DEVNULL)

    def stop(self) -> None:
        self.process.send_signal(signal.SIGINT)
        try:
            self.process.wait(60)
        except subprocess.TimeoutExpired:
            os.killpg(self.process.pid, signal.SIGKILL)
