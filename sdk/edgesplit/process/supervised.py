"""Supervises an edgesplit server as a child process: start, wait until ready, restart with back-off, stop with the
parent."""

from __future__ import annotations

import logging
import subprocess
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from io import BufferedWriter
from pathlib import Path

from edgesplit.atomic_files import write_durably
from edgesplit.backoff import Backoff
from edgesplit.errors import UsageError

log = logging.getLogger(__name__)

RESTART = Backoff(first_s=0.2, longest_s=5.0)
STEADY_S = 10.0
"""A child that ran this long resets the back-off."""
STOP_S = 8.0
"""Seconds between SIGTERM and SIGKILL."""
LOG_BYTES = 20_000_000
"""A log file above this size is deleted when the child restarts."""


class SupervisedProcess:
    """A child process that runs until `stop`, restarted when it dies. It prints a line with `ready_line` once it is
    ready."""

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        *,
        ready_line: str,
        log_file: Path,
        pid_file: Path,
        inherited_fds: Sequence[int] = (),
        environment: Mapping[str, str] | None = None,
    ) -> None:
        """`inherited_fds`: descriptors that stay open in the child, under their numbers. `environment` is by default
        this process's."""
        self.restarts = 0
        self._inherited_fds = tuple(inherited_fds)
        self._environment = environment
        self._name = name
        self._command = list(command)
        self._ready_line = ready_line
        self._log_file = log_file
        self._pid_file = pid_file
        self._process: subprocess.Popen[str] | None = None
        self._ready = threading.Event()
        self._stopping = threading.Event()
        self._lock = threading.Lock()
        self._said: deque[str] = deque(maxlen=5)
        # PR_SET_PDEATHSIG fires when the *thread* that forked ends: this thread forks, and lives as long as the
        # process.
        self._thread = threading.Thread(target=self._supervise, name=f"{name}-supervisor", daemon=True)

    def start(self, timeout_s: float = 60.0) -> None:
        """Start the child and wait until it is ready or `stop` is called. UsageError with the last line of its log if
        it is not ready after `timeout_s` seconds or three restarts."""
        self._thread.start()
        deadline = time.monotonic() + timeout_s
        while not self._ready.wait(0.05) and not self._stopping.is_set():
            if self.restarts >= 3 or time.monotonic() > deadline:
                self.stop()
                raise UsageError(
                    f"the {self._name} does not start: {self._last_log_line()} (its log: {self._log_file})"
                )

    def stop(self) -> None:
        """SIGTERM, then SIGKILL after `STOP_S` seconds. Idempotent."""
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
        failures = 0
        while not self._stopping.is_set():
            began = time.monotonic()
            status = self._run_once()
            if self._stopping.is_set():
                return
            self.restarts += 1
            log.warning("the %s ended (status %s); restarting it", self._name, status)
            failures = 0 if time.monotonic() - began > STEADY_S else failures + 1
            self._stopping.wait(RESTART.pause_s(failures))

    def _run_once(self) -> int | None:
        """Run the child once; returns its exit status."""
        with self._open_log() as errors:
            process = self._spawn(errors.fileno())
            if process is None:
                return None
            assert process.stdout is not None
            with process.stdout as lines:
                for line in lines:
                    if self._ready_line in line:
                        self._ready.set()
            return process.wait()

    def _spawn(self, errors: int) -> subprocess.Popen[str] | None:
        """The new process, or None if `stop` was called meanwhile."""
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
                start_new_session=True,  # Ctrl-C in the terminal goes to the parent only, which stops the child
                pass_fds=self._inherited_fds,
                env=self._environment,
            )
            write_durably(self._pid_file, f"{self._process.pid}\n".encode())
            return self._process

    def _open_log(self) -> BufferedWriter:
        self._log_file.parent.mkdir(parents=True, exist_ok=True)
        if self._log_file.exists() and self._log_file.stat().st_size > LOG_BYTES:
            self._log_file.unlink()
        return self._log_file.open("ab")

    def _last_log_line(self) -> str:
        try:
            lines = self._log_file.read_text(errors="replace").strip().splitlines()
        except OSError:
            lines = []
        return lines[-1][:300] if lines else "it printed nothing"
