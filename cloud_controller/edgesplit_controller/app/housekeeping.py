"""What a controller does by itself, now and then: signs anew what grows old, lets in again who was held off, and makes
good what a killed process left undone. Only the process that holds the lease does it; each process looks after itself.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from edgesplit.errors import EdgeError
from edgesplit_controller.controller import Controller
from edgesplit_controller.messaging.delivery import Delivery
from edgesplit_controller.messaging.statement_publisher import Stating
from edgesplit_controller.pki.revocation import Revocations
from edgesplit_controller.storage.leases import Lease
from edgesplit_controller.tuf.repository import Repository
from edgesplit_controller.tuf.rotation import Rotation

log = logging.getLogger(__name__)

LOOK_S = 0.5
"""Between two looks for what other processes did."""
SWEEP_S = 2.0
"""Between two looks for what a killed process left undone."""
TEND_S = 60.0
TELL_S = 86_400.0
"""Between two times that the log is told what an operator must do about the keys."""


@dataclass(slots=True)
class Tending:
    """One controller process' own housekeeping. `start`, then `stop`."""

    repository: Repository
    rotation: Rotation
    controller: Controller
    delivery: Delivery
    revocations: Revocations
    stating: Stating
    lease: Lease
    """To do what is done once."""
    place: Lease
    """To be here at all: another process that has our number has our name at the broker."""
    ending: threading.Event
    _due: dict[str, float] = field(default_factory=dict)
    _thread: threading.Thread | None = None

    def start(self) -> None:
        """Begin, on a thread of its own."""
        self._thread = threading.Thread(target=self._work, name="tend", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """No more."""
        self.ending.set()
        if self._thread is not None:
            self._thread.join(10)

    def _work(self) -> None:
        while True:
            self._look()
            if self.lease.held():
                self._now_and_then(self._sweep, SWEEP_S)
                self._now_and_then(self._renew, TEND_S)
                self._now_and_then(self._remind, TELL_S)
            if self.ending.wait(LOOK_S):
                return

    def _now_and_then(self, work: Callable[[], None], every_s: float) -> None:
        now = time.monotonic()
        if now < self._due.get(work.__name__, 0.0):
            return
        self._due[work.__name__] = now + every_s
        try:
            work()
        except EdgeError as error:
            log.error("%s: %s", work.__name__.strip("_"), error)
        except Exception:
            log.exception("%s failed", work.__name__.strip("_"))

    def _look(self) -> None:
        self.revocations.notice()
        if self.place.overtaken:
            log.error("another process has our place: this one was away for too long, and ends")
            self.ending.set()

    def _sweep(self) -> None:
        """A process may be killed between what it stored and what follows from that."""
        if due := self.stating.due():
            self.delivery.tell(due)
        self.revocations.publish_if_changed()

    def _renew(self) -> None:
        self.repository.refresh_timestamp()
        self.rotation.renew_held_root()
        if renewed := self.controller.director.renew():
            self.delivery.tell(renewed)
        if self.controller.devices.end_holds():
            self.revocations.publish()
        self.controller.settle()

    def _remind(self) -> None:
        for notice in self.rotation.shown()["notices"]:
            log.warning("%s", notice)
