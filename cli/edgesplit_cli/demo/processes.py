"""Child processes of the demo: each has a log file and is restarted when it dies unexpectedly.

Children are killed with the demo (PR_SET_PDEATHSIG), so that killing it leaves no process behind.
"""

from __future__ import annotations

import os
import signal
import subprocess
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

from edgesplit.errors import EdgeError
from edgesplit.process.lifecycle import die_with_starting_thread


class DemoProcess:
    """A process that should run until it is stopped."""

    def __init__(self, name: str, argv: Sequence[str], log: Path, environment: dict[str, str] | None = None) -> None:
        self.name = name
        self.argv = list(argv)
        self.log = log
        self.restarts = 0
        self._environment = {**os.environ, **(environment or {})}
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int | None:
        """Process id while it runs, else None."""
        return self._process.pid if self.is_running and self._process else None

    @property
    def is_running(self) -> bool:
        """True while the process runs."""
        return self._process is not None and self._process.poll() is None

    def start(self) -> None:
        """Start the process; its output is appended to its log."""
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                self.argv, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=self._environment,
                preexec_fn=die_with_starting_thread(signal.SIGKILL),
            )  # fmt: skip

    def kill(self) -> None:
        """Send SIGKILL and wait until the process has ended."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    def stop(self, seconds: float = 10.0) -> None:
        """Send SIGTERM, then SIGKILL after `seconds`."""
        if not self.is_running or self._process is None:
            return
        self._process.terminate()
        try:
            self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            self.kill()

    def log_tail(self, lines: int = 5) -> str:
        """The last lines of its log."""
        text = self.log.read_text(errors="replace") if self.log.exists() else ""
        return "\n".join(text.splitlines()[-lines:])


class Supervisor:
    """Restarts children that die unexpectedly."""

    def __init__(self, on_event: Callable[[str], None], max_restarts: int = 20) -> None:
        self._children: dict[str, DemoProcess] = {}
        self._on_event = on_event
        self._max_restarts = max_restarts
        self._kept_running: set[str] = set()
        self._lock = threading.Lock()

    def add(self, child: DemoProcess) -> DemoProcess:
        """Start a child and keep it running."""
        with self._lock:
            self._children[child.name] = child
            self._kept_running.add(child.name)
            child.start()
        return child

    def hold(self, child: DemoProcess) -> None:
        """Kill a child and do not restart it until `resume`."""
        with self._lock:
            self._kept_running.discard(child.name)
            child.kill()

    def resume(self, child: DemoProcess) -> None:
        """Start a held child again."""
        with self._lock:
            self._kept_running.add(child.name)
            child.start()

    def restart_dead(self) -> None:
        """Restart children that died; EdgeError when one exceeds the limit of restarts."""
        with self._lock:
            for name in sorted(self._kept_running):
                child = self._children[name]
                if child.is_running:
                    continue
                child.restarts += 1
                if child.restarts > self._max_restarts:
                    raise EdgeError(f"{name} exits again and again; its log {child.log} ends:\n{child.log_tail()}")
                self._on_event(f"{name} exited; starting it again")
                child.start()

    def stop(self) -> None:
        """Stop all children, in reverse order of their start."""
        with self._lock:
            self._kept_running.clear()
            for child in reversed(list(self._children.values())):
                child.stop()
