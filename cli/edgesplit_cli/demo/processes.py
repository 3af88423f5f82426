"""Child processes of the demo: started with a log file each, watched, restarted when they die on their own.

Children die with the demo (PR_SET_PDEATHSIG), so killing it leaves nothing behind.
"""

from __future__ import annotations

import os
import signal
import subprocess
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

from edgesplit.errors import EdgeError
from edgesplit.process.lifecycle import ending_with_us


class Child:
    """One process that should run until it is told to stop."""

    def __init__(self, name: str, argv: Sequence[str], log: Path, environment: dict[str, str] | None = None) -> None:
        self.name = name
        self.argv = list(argv)
        self.log = log
        self.restarts = 0
        self._environment = {**os.environ, **(environment or {})}
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int | None:
        """Of the running process."""
        return self._process.pid if self.running and self._process else None

    @property
    def running(self) -> bool:
        """Is it there?"""
        return self._process is not None and self._process.poll() is None

    def start(self) -> None:
        """Start it; its output goes to the end of its log."""
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                self.argv,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=self._environment,
                preexec_fn=ending_with_us(signal.SIGKILL),
            )

    def kill(self) -> None:
        """SIGKILL, and wait until it is gone."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    def stop(self, seconds: float = 10.0) -> None:
        """SIGTERM, then SIGKILL if it does not go."""
        if not self.running or self._process is None:
            return
        self._process.terminate()
        try:
            self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            self.kill()

    def last_words(self, lines: int = 5) -> str:
        """The end of its log."""
        text = self.log.read_text(errors="replace") if self.log.exists() else ""
        return "\n".join(text.splitlines()[-lines:])


class Watch:
    """Restarts children that die although nobody asked them to."""

    def __init__(self, tell: Callable[[str], None], most_restarts: int = 20) -> None:
        self._children: dict[str, Child] = {}
        self._tell = tell
        self._most = most_restarts
        self._wanted: set[str] = set()
        self._lock = threading.Lock()

    def add(self, child: Child) -> Child:
        """Start a child and keep it running."""
        with self._lock:
            self._children[child.name] = child
            self._wanted.add(child.name)
            child.start()
        return child

    def hold(self, child: Child) -> None:
        """Kill a child and leave it dead until `resume`."""
        with self._lock:
            self._wanted.discard(child.name)
            child.kill()

    def resume(self, child: Child) -> None:
        """Start a held child again."""
        with self._lock:
            self._wanted.add(child.name)
            child.start()

    def tend(self) -> None:
        """Restart what died; EdgeError when something dies again and again."""
        with self._lock:
            for name in sorted(self._wanted):
                child = self._children[name]
                if child.running:
                    continue
                child.restarts += 1
                if child.restarts > self._most:
                    raise EdgeError(f"{name} keeps dying; its log {child.log} ends:\n{child.last_words()}")
                self._tell(f"{name} died; starting it again")
                child.start()

    def stop(self) -> None:
        """Stop all, last started first."""
        with self._lock:
            self._wanted.clear()
            for child in reversed(list(self._children.values())):
                child.stop()
