"""Faults of the controller and the broker of a fleet in virtual time, and the releases that are published to it."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping

from edgesplit.quantities import parse_duration
from edgesplit_simulation.faults.schedule import BehaviourName, Fault
from edgesplit_simulation.fleet import SimulatedFleet
from edgesplit_simulation.releases import HEALTHY, Behaviour, SimulatedRelease

BACKUP_EVERY_S = 43_200.0
KEPT_BACKUPS = 3
"""How many backups are kept."""
DRIFT = 0.2
"""Output drift of a release that drifts, as a fraction."""
BEHAVIOURS: Mapping[BehaviourName, Behaviour] = {
    "well": HEALTHY,
    "golden": Behaviour(wrong_golden=True),
    "crash": Behaviour(crashes=True),
    "slow": Behaviour(slowdown=40.0),
    "leak": Behaviour(leak_bytes=2**26),
    "drift": HEALTHY,
    "hot": Behaviour(extra_celsius=45.0),
    "hungry": Behaviour(energy_factor=10.0),
}
"""How a release behaves, by the word in the faults file."""


class ControllerFaults:
    """Applies the faults of one fleet's controller and broker."""

    def __init__(self, fleet: SimulatedFleet) -> None:
        self.newest: SimulatedRelease | None = None
        self.version = 0
        """Version number of the newest release."""
        self.is_over = False
        self._fleet = fleet
        self._backups: list[tuple[float, str]] = []

    def publish(self, how: BehaviourName, share: float) -> None:
        """Sign a new version that behaves as `how` on a fraction `share` of the devices, and deploy it to all devices
        that are not revoked."""
        fleet = self._fleet
        if fleet.controller.is_running:
            self.version += 1
            drift = DRIFT if how == "drift" else 0.0
            self.newest = fleet.release(self.version, BEHAVIOURS[how], share, drift=drift)
            fleet.deploy(self.newest)

    def apply(self, fault: Fault) -> Callable[[], None] | None:
        """Apply the fault; returns the function that ends it, or None where nothing was done."""
        fleet = self._fleet
        if fault.kind == "broker restart":
            fleet.broker.stop(clear_retained=fault.loses_retained)
            return fleet.broker.start
        if fault.kind == "controller kill":
            fleet.controller.kill()
            return fleet.controller.start
        return self._restore(parse_duration(fault.amount) if fault.amount else 2 * BACKUP_EVERY_S)

    def revoke(self, device: str) -> bool:
        """Revoke a device; False while the controller does not run."""
        if not self._fleet.controller.is_running:
            return False
        self._fleet.revoke(device)
        return True

    def back_up(self) -> None:
        """Make a backup now and then every `BACKUP_EVERY_S` seconds."""
        fleet = self._fleet
        if self.is_over:
            return
        if fleet.controller.is_running:
            name = f"backup-{int(fleet.hub.monotonic())}"
            fleet.controller.backup(fleet.folder / name)
            self._backups.append((fleet.hub.monotonic(), name))
        for _, outdated in self._backups[:-KEPT_BACKUPS]:
            shutil.rmtree(fleet.folder / outdated)
        self._backups = self._backups[-KEPT_BACKUPS:]
        fleet.hub.call_later(BACKUP_EVERY_S, self.back_up)

    def _restore(self, age_s: float) -> Callable[[], None] | None:
        """Simulate the loss of the controller's disk: restore the newest backup that is at least `age_s` old. Returns
        the function that starts the controller again, or None where no such backup exists."""
        fleet = self._fleet
        candidates = [name for at, name in self._backups if at <= fleet.hub.monotonic() - age_s]
        if not candidates or not fleet.controller.is_running:
            return None
        fleet.controller.kill()
        fleet.controller.restore(fleet.folder / candidates[-1])
        return fleet.controller.start
