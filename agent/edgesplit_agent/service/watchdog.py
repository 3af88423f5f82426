"""The agent's watchdog: its main thread sends the request that an application would send, and only after an answer
is the service manager notified.

A timer thread would go on while everything else hangs. The request passes through the local endpoint and, for the
status, through the locks of every component: a lock that is never released stops the notifications.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from time import monotonic

from edgesplit.errors import EdgeError
from edgesplit.process.lifecycle import WAKE_S
from edgesplit_agent.host.sd_notify import ServiceManager

log = logging.getLogger(__name__)

BEATS_PER_TIMEOUT = 3
"""Watchdog notifications per watchdog timeout of the service manager: two may be missed."""
RETRY_S = 2.0
"""Seconds until the retry after a request that was not answered."""


class Watchdog:
    """Sends one agent's watchdog notifications. `proof` returns a status text, or raises if the agent hangs."""

    def __init__(
        self, manager: ServiceManager, proof: Callable[[], str], clock: Callable[[], float] = monotonic
    ) -> None:
        self._manager = manager
        self._proof = proof
        self._clock = clock
        self._every_s = manager.watchdog_s / BEATS_PER_TIMEOUT
        self._due = clock()

    def run_until(self, stop: threading.Event) -> None:
        """Send notifications until `stop` is set. Runs in the main thread, which also runs signal handlers, and never
        waits for long."""
        while not stop.wait(WAKE_S):
            self.beat()

    def beat(self) -> None:
        """Where a notification is due: check the agent, and notify the service manager."""
        now = self._clock()
        if not self._every_s or now < self._due:
            return
        try:
            status = self._proof()
        except (EdgeError, OSError) as error:
            log.warning("no watchdog notification: %s", error)
            self._due = self._clock() + min(RETRY_S, self._every_s)
            return
        self._manager.alive()
        self._manager.status(status)
        self._due = now + self._every_s
