"""What goes wrong with the controller and the broker of a fleet in virtual time, and the releases that come."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping

from edgesplit_simulation import quantities
from edgesplit_simulation.faults.schedule import Fault, How
from edgesplit_simulation.fleet import SimulatedFleet
from edgesplit_simulation.releases import WELL, Mood, SimulatedRelease

BACKUP_EVERY_S = 43_200.0
BACKUPS = 3
"""That are kept."""
DRIFT = 0.2
MOODS: Mapping[How, Mood] = {
    "well": WELL,
    "golden": Mood(golden=True),
    "crash": Mood(crash=True),
    "slow": Mood(slow=40.0),
    "leak": Mood(leak_bytes=2**26),
    "drift": WELL,
    "hot": Mood(hotter=45.0),
    "hungry": Mood(hungry=10.0),
}


class CloudFaults:
    """Of one fleet."""

    def __init__(self, fleet: SimulatedFleet) -> None:
        self.newest: SimulatedRelease | None = None
        self.version = 0
        """Of the newest release."""
        self.over = False
        self._fleet = fleet
        self._backups: list[tuple[float, str]] = []

    def publish(self, how: How, share: float) -> None:
        """Sign a new version that behaves so on that share of the devices, and deploy it to everybody."""
        fleet = self._fleet
        if fleet.cloud.is_running:
            self.version += 1
            drift = DRIFT if how == "drift" else 0.0
            self.newest = fleet.release(self.version, MOODS[how], share, drift=drift)
            fleet.deploy(self.newest)

    def happens(self, fault: Fault) -> Callable[[], None] | None:
        """Do it; how it ends, or None where nothing was done."""
        fleet = self._fleet
        if fault.what == "broker restart":
            fleet.broker.stop(forget=fault.forget)
            return fleet.broker.start
        if fault.what == "controller kill":
            fleet.cloud.kill()
            return fleet.cloud.start
        return self._restore(quantities.span_s(fault.by) if fault.by else 2 * BACKUP_EVERY_S)

    def revoke(self, device: str) -> bool:
        """Take a device's right away; False where nobody can just now."""
        if not self._fleet.cloud.is_running:
            return False
        self._fleet.revoke(device)
        return True

    def back_up(self) -> None:
        """Now, and then twice a day."""
        fleet = self._fleet
        if self.over:
            return
        if fleet.cloud.is_running:
            name = f"backup-{int(fleet.hub.monotonic())}"
            fleet.cloud.backup(fleet.folder / name)
            self._backups.append((fleet.hub.monotonic(), name))
        for _, old in self._backups[:-BACKUPS]:
            shutil.rmtree(fleet.folder / old)
        self._backups = self._backups[-BACKUPS:]
        fleet.hub.call_later(BACKUP_EVERY_S, self.back_up)

    def _restore(self, age_s: float) -> Callable[[], None] | None:
        """The controller's disk dies, and the newest backup that is so old is put in its place."""
        fleet = self._fleet
        old = [name for at, name in self._backups if at <= fleet.hub.monotonic() - age_s]
        if not old or not fleet.cloud.is_running:
            return None
        fleet.cloud.kill()
        fleet.cloud.restore(fleet.folder / old[-1])
        return fleet.cloud.start
