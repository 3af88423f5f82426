"""Periodic work of a controller process: renew expiring signatures, end quarantines, and complete what a killed process
left undone. Only the process with the lease does the shared work; each process also checks its own slot, and renews its
own certificates."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from edgesplit.errors import EdgeError
from edgesplit_controller.controller import Controller
from edgesplit_controller.messaging.delivery import Delivery
from edgesplit_controller.messaging.statement_publisher import StatementPublisher
from edgesplit_controller.pki.own_certificates import OwnCertificates
from edgesplit_controller.pki.revocation import Revocations
from edgesplit_controller.storage.leases import Lease
from edgesplit_controller.tuf.repository import Repository
from edgesplit_controller.tuf.rotation import Rotation

log = logging.getLogger(__name__)

CHECK_INTERVAL_S = 0.5
"""Seconds between two checks for changes by other processes."""
RECOVERY_INTERVAL_S = 2.0
"""Seconds between two checks for what a killed process left undone."""
RENEWAL_INTERVAL_S = 60.0
"""Seconds between two renewals."""
REMINDER_INTERVAL_S = 86_400.0
"""Seconds between two log reminders of what an operator must do about the keys."""


@dataclass(slots=True)
class Housekeeping:
    """Housekeeping of one controller process: a job for `PeriodicThread`, every `CHECK_INTERVAL_S`."""

    repository: Repository
    rotation: Rotation
    controller: Controller
    delivery: Delivery
    revocations: Revocations
    statements: StatementPublisher
    certificates: OwnCertificates
    lease: Lease
    """Held by the one process that does the shared work."""
    slot: Lease
    """This process's slot. If it is lost, another process has the same client name at the broker, and this one must
    end."""
    stopping: threading.Event
    _next_run_s: dict[str, float] = field(default_factory=lambda: {"_remind": time.monotonic() + REMINDER_INTERVAL_S})
    """Monotonic time of each method's next run. The first reminder is a day after the start, which prints the same."""

    def __call__(self) -> None:
        """Check for changes by other processes, and do what is due."""
        self._check_processes()
        self._run_if_due(self._renew_certificates, RENEWAL_INTERVAL_S)
        if self.lease.held():
            self._run_if_due(self._sweep, RECOVERY_INTERVAL_S)
            self._run_if_due(self._renew, RENEWAL_INTERVAL_S)
            self._run_if_due(self._remind, REMINDER_INTERVAL_S)

    def _run_if_due(self, work: Callable[[], None], every_s: float) -> None:
        # Names of methods are keys here and words in the log.
        now = time.monotonic()
        if now < self._next_run_s.get(work.__name__, 0.0):
            return
        self._next_run_s[work.__name__] = now + every_s
        try:
            work()
        except EdgeError as error:
            log.error("%s: %s", work.__name__.strip("_"), error)
        except Exception:
            log.exception("%s failed", work.__name__.strip("_"))

    def _check_processes(self) -> None:
        self.revocations.reload_if_changed()
        if self.slot.was_taken_over:
            log.error("another process has this process's number: it did not renew its lease in time, and ends")
            self.stopping.set()

    def _renew_certificates(self) -> None:
        self.certificates.renew()

    def _sweep(self) -> None:
        """Publish what was stored but not published: a process may be killed in between."""
        if due := self.statements.due():
            self.delivery.publish_statements(due)
        self.revocations.publish_if_changed()

    def _renew(self) -> None:
        self.repository.refresh_timestamp()
        self.rotation.renew_held_root()
        if renewed := self.controller.director.renew():
            self.delivery.publish_statements(renewed)
        if self.controller.devices.release_quarantined():
            self.revocations.publish()
        self.revocations.publish_if_due()
        self.controller.restate_gateways()

    def _remind(self) -> None:
        for notice in self.rotation.view()["notices"]:
            log.warning("%s", notice)
