"""The agent's proof that it lives: its main thread asks the agent what an application would ask, and only an answer
becomes a sign of life for the service manager.

A thread that only counts time would live on while everything else hangs. The question goes through the local endpoint
and, for the status, through the locks of every part: one that is never given back keeps the sign of life from coming.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from time import monotonic

from edgesplit.errors import EdgeError
from edgesplit.process.lifecycle import WAKE_S
from edgesplit_agent.host.sd_notify import Manager

log = logging.getLogger(__name__)

PART = 3
"""Signs of life in the time that the manager waits for one: two may fail."""
AGAIN_S = 2.0
"""After a question that was not answered."""


class Pulse:
    """Signs of life of one agent. `proof` returns what goes on, or raises where the agent does not answer."""

    def __init__(self, manager: Manager, proof: Callable[[], str], clock: Callable[[], float] = monotonic) -> None:
        self._manager = manager
        self._proof = proof
        self._clock = clock
        self._every_s = manager.watchdog_s / PART
        self._due = clock()

    def keep(self, stop: threading.Event) -> None:
        """Until `stop`, in the main thread, which runs the handlers of signals meanwhile: it never waits for long."""
        while not stop.wait(WAKE_S):
            self.beat()

    def beat(self) -> None:
        """Where one is due: ask, and tell the manager."""
        now = self._clock()
        if not self._every_s or now < self._due:
            return
        try:
            said = self._proof()
        except (EdgeError, OSError) as error:
            log.warning("no sign of life: %s", error)
            self._due = self._clock() + min(AGAIN_S, self._every_s)
            return
        self._manager.alive()
        self._manager.status(said)
        self._due = now + self._every_s
