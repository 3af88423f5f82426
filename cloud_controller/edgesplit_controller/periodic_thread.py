"""A background thread that runs a job periodically until the controller stops."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

log = logging.getLogger(__name__)

JOIN_TIMEOUT_S = 10.0
"""How long `stop` waits for a run in progress."""


class PeriodicThread:
    """Runs `job` every `every_s` seconds, or after the seconds that it returned last. An exception is logged, and the
    job runs again after `every_s`."""

    def __init__(
        self, name: str, job: Callable[[], float | None], every_s: float, *, first_s: float | None = None,
        stopping: threading.Event | None = None,
    ) -> None:  # fmt: skip
        """The first run is after `first_s` seconds (None: `every_s`). `stopping` is set by `stop`, and may be shared
        with what the whole process waits for."""
        self._name = name
        self._job = job
        self._every_s = every_s
        self._first_s = every_s if first_s is None else first_s
        self._stopping = stopping or threading.Event()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def stop(self) -> None:
        """Stop after the run in progress. Idempotent."""
        self._stopping.set()
        if self._thread.is_alive():
            self._thread.join(JOIN_TIMEOUT_S)

    def _run(self) -> None:
        pause_s = self._first_s
        while not self._stopping.wait(pause_s):
            pause_s = self._every_s
            try:
                if (wanted_s := self._job()) is not None:
                    pause_s = wanted_s
            except Exception:
                log.exception("%s failed, and is tried again in %g s", self._name, self._every_s)
