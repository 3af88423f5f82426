"""A server of ours as a child process: started, awaited, started again when it dies, ended with us."""

from __future__ import annotations

import logging
import subprocess
import threading
import time
from collections import deque
from collections.abc import Sequence
from io import BufferedWriter
from pathlib import Path

from edgesplit.atomic_files import write_durably
from edgesplit.errors import UsageError

log = logging.getLogger(__name__)

FIRST_DELAY_S = 0.2
LONGEST_DELAY_S = 5.0
STEADY_S = 10.0
"""A child that ran so long did not die of its start."""
STOP_S = 8.0
LOG_BYTES = 20_000_000
"""A log longer than this is begun anew when the child is."""


class Child:
    """One process that should run until it is told to stop. It prints `announces` once it is ready."""

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        *,
        announces: str,
        log_file: Path,
        pid_file: Path,
        inherits: Sequence[int] = (),
    ) -> None:
        """`inherits`: descriptors that stay open in it, under their numbers."""
        self.restarts = 0
        self._inherits = tuple(inherits)
        self._name = name
        self._command = list(command)
        self._announces = announces
        self._log_file = log_file
        self._pid_file = pid_file
        self._process: subprocess.Popen[str] | None = None
        self._ready = threading.Event()
        self._stopping = threading.Event()
        self._lock = threading.Lock()
        self._said: deque[str] = deque(maxlen=5)
        # The kernel's "parent died" signal follows the thread that forked: this one forks, and lives as long as we do.
        self._thread = threading.Thread(target=self._supervise, name=f"{name}-supervisor", daemon=True)

    def start(self, patience_s: float = 60.0) -> None:
        """Start it and wait until it is ready, or told to stop; UsageError with its last words if it does not come."""
        self._thread.start()
        deadline = time.monotonic() + patience_s
        while not self._ready.wait(0.05) and not self._stopping.is_set():
            if self.restarts >= 3 or time.monotonic() > deadline:
                self.stop()
                raise UsageError(f"the {self._name} does not start: {self._last_words()} (its log: {self._log_file})")

    def stop(self) -> None:
        """SIGTERM, then SIGKILL if it does not go. Idempotent."""
        self._stopping.set()
        with self._lock:
            process = self._process
            if process is not None and process.poll() is None:
                process.terminate()
        if process is not None:
            try:
                process.wait(STOP_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        if self._thread.is_alive():
            self._thread.join(STOP_S)
        self._pid_file.unlink(missing_ok=True)

    def _supervise(self) -> None:
        delay_s = FIRST_DELAY_S
        while not self._stopping.is_set():
            began = time.monotonic()
            status = self._run_once()
            if self._stopping.is_set():
                return
            self.restarts += 1
            log.warning("the %s ended (status %s); starting it again", self._name, status)
            delay_s = FIRST_DELAY_S if time.monotonic() - began > STEADY_S else min(2 * delay_s, LONGEST_DELAY_S)
            self._stopping.wait(delay_s)

    def _run_once(self) -> int | None:
        """One life of the child; its status."""
        with self._open_log() as errors:
            process = self._spawn(errors.fileno())
            if process is None:
                return None
            assert process.stdout is not None
            with process.stdout as lines:
                for line in lines:
                    if self._announces in line:
                        self._ready.set()
            return process.wait()

    def _spawn(self, errors: int) -> subprocess.Popen[str] | None:
        """None if we were told to stop meanwhile."""
        with self._lock:
            if self._stopping.is_set():
                return None
            self._process = subprocess.Popen(
                self._command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                errors="replace",
                start_new_session=True,  # a Ctrl-C at our terminal is for us to handle
                pass_fds=self._inherits,
            )
            write_durably(self._pid_file, f"{self._process.pid}\n".encode())
            return self._process

    def _open_log(self) -> BufferedWriter:
        self._log_file.parent.mkdir(parents=True, exist_ok=True)
        if self._log_file.exists() and self._log_file.stat().st_size > LOG_BYTES:
            self._log_file.unlink()
        return self._log_file.open("ab")

    def _last_words(self) -> str:
        try:
            lines = self._log_file.read_text(errors="replace").strip().splitlines()
        except OSError:
            lines = []
        return lines[-1][:300] if lines else "it said nothing"
