"""Carries the faults of a file out on a fleet, at their moments, and in the end makes everything whole again.

All chance comes from one dice per fault, made from the fleet's seed and the fault's place in the file: a fault that is
added changes nothing for the others.
"""

from __future__ import annotations

import random
import shutil
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from edgesplit.links import parse_rate
from edgesplit_cli.sim import spelling
from edgesplit_cli.sim.device import SimulatedDevice
from edgesplit_cli.sim.faults import OF_DEVICES, Fault, How
from edgesplit_cli.sim.fleet import SimulatedFleet
from edgesplit_cli.sim.releases import WELL, Mood, SimulatedRelease

WRITES = 40
"""Power fails at most so many writes after it was drawn that it fails while writing."""
BACKUP_EVERY_S = 86_400.0
MOODS: dict[How, Mood] = {
    "well": WELL,
    "golden": Mood(golden=True),
    "crash": Mood(crash=True),
    "slow": Mood(slow=40.0),
    "leak": Mood(leak_bytes=2**26),
    "drift": WELL,
}
SLOW_BYTES_PER_S = 8_000.0


@dataclass
class Storm:
    """The faults of one fleet. `begin` once it stands; `end` makes everything whole."""

    fleet: SimulatedFleet
    faults: Sequence[Fault]
    counts: Counter[str] = field(default_factory=Counter)
    """How often each kind came."""
    version: int = 0
    """Of the newest release."""
    newest: SimulatedRelease | None = None
    _over: bool = False
    _undo: dict[str, Callable[[], None]] = field(default_factory=dict)
    """How to end what lasts now, by what it is done to."""
    _copies: dict[str, SimulatedDevice] = field(default_factory=dict)
    _backups: list[tuple[float, str]] = field(default_factory=list)

    def begin(self) -> None:
        """From now on things go wrong."""
        self.publish("well", 0.0)
        if any(fault.what == "restore" for fault in self.faults):
            self._back_up()
        for place, fault in enumerate(self.faults):
            dice = random.Random(f"{self.fleet.seed} {place} {fault.what}")
            targets = self._targets(fault, dice)
            for target in targets:
                self._plan(fault, target, random.Random(f"{self.fleet.seed} {place} {fault.what} {target}"))

    def end(self) -> None:
        """Everything is mended, and a last good release is deployed to whoever is left."""
        self._over = True
        for undo in list(self._undo.values()):
            undo()
        self._undo.clear()
        for device in self.fleet.devices.values():
            device.power_on()
        self.publish("well", 0.0)

    @property
    def settled(self) -> bool:
        """Every device that may runs the newest release."""
        newest = self.newest
        return newest is not None and all(
            one.running.get(newest.model) == newest.digest for name, one in self.fleet.devices.items()
            if name not in self.fleet.revoked
        )  # fmt: skip

    def publish(self, how: How, share: float) -> None:
        """Sign a new version and deploy it to everybody."""
        if not self.fleet.cloud.is_running:
            return
        self.version += 1
        drift = 0.2 if how == "drift" else 0.0
        made = self.newest = self.fleet.release(self.version, MOODS[how], share, drift=drift)
        self.fleet.deploy(made, [name for name in self.fleet.names if name not in self.fleet.revoked])

    # When

    def _targets(self, fault: Fault, dice: random.Random) -> list[str]:
        """Whom it happens to: devices by name, or the empty name for the one broker, cloud or controller."""
        if fault.what not in OF_DEVICES:
            return [""]
        names = self.fleet.names
        return sorted(dice.sample(names, max(1, round(fault.share * len(names)))))

    def _plan(self, fault: Fault, target: str, dice: random.Random) -> None:
        hub = self.fleet.hub

        def happen() -> None:
            if self._over:
                return
            self._happen(fault, target, dice)
            if fault.at_s is None:
                hub.call_later(_until_next(fault, dice), happen)

        hub.call_later(fault.at_s if fault.at_s is not None else _until_next(fault, dice), happen)

    # What

    def _happen(self, fault: Fault, target: str, dice: random.Random) -> None:
        if fault.what == "release":
            how = dice.choice(sorted(MOODS)) if fault.how == "any" else fault.how
            self.counts[f"release: {how}"] += 1
            self.publish(how, fault.share)
            return
        key = target or fault.what.partition(" ")[0].replace("restore", "controller")
        if key in self._undo or target in self.fleet.revoked:
            return  # one trouble at a time for each
        undo = self._of_device(fault, self.fleet.devices[target], dice) if target else self._of_cloud(fault)
        if undo is None:
            return
        self.counts[fault.what] += 1

        def end() -> None:
            if self._undo.pop(key, None) is not None:
                undo()

        self._undo[key] = undo
        self.fleet.hub.call_later(dice.uniform(*fault.lasts_s), end)

    def _of_device(self, fault: Fault, device: SimulatedDevice, dice: random.Random) -> Callable[[], None] | None:
        """Do it; how it ends, or None where nothing was done."""
        match fault.what:
            case "offline":
                return self._offline(device)
            case "slow link":
                device.around.way.bytes_per_s = parse_rate(fault.by) if fault.by else SLOW_BYTES_PER_S
                return lambda: setattr(device.around.way, "bytes_per_s", float("inf"))
            case "power cut":
                device.power_cut()
                return device.power_on
            case "power cut while writing":
                self.fleet.disks.cuts[device.name] = dice.randrange(WRITES), device.power_cut
                return lambda: self._on_again(device)
            case "clock off":
                sign = -1 if fault.by.startswith("-") else 1
                device.around.clock_off_s = sign * spelling.span_s((fault.by or "3650d").removeprefix("-"))
                return lambda: setattr(device.around, "clock_off_s", 0.0)
            case "full disk":
                self.fleet.disks.full.add(device.name)
                return lambda: self.fleet.disks.full.discard(device.name)
            case "flipped bits":
                return self._flip(device, dice)
            case "copied card":
                return self._copy(device)
            case "never answers":
                device.hang()
                return device.wake
            case _:  # revoked
                return self._revoke(device)

    def _of_cloud(self, fault: Fault) -> Callable[[], None] | None:
        fleet = self.fleet
        match fault.what:
            case "cloud gone":
                fleet.sky_up = False
                return lambda: setattr(fleet, "sky_up", True)
            case "broker restart":
                fleet.broker.stop(forget=fault.forget)
                return fleet.broker.start
            case "controller kill":
                fleet.cloud.kill()
                return fleet.cloud.start
            case _:  # restore
                return self._restore(spelling.span_s(fault.by) if fault.by else BACKUP_EVERY_S)

    def _offline(self, device: SimulatedDevice) -> Callable[[], None]:
        device.cut()
        return device.mend

    def _on_again(self, device: SimulatedDevice) -> None:
        self.fleet.disks.cuts.pop(device.name, None)
        device.power_on()

    def _flip(self, device: SimulatedDevice, dice: random.Random) -> Callable[[], None] | None:
        """A bit of some release on the card; where it is of what runs, the device is excused until it is repaired."""
        there = sorted({*device.standing.committed.values(), *device.standing.running.values()})
        if not there or not self.fleet.disks.flip(device.name, dice.choice(there), dice):
            return None
        device.damaged("bits on its card flipped")
        return lambda: None

    def _copy(self, device: SimulatedDevice) -> Callable[[], None] | None:
        """A second card with the same identity comes up elsewhere."""
        name = f"{device.name}.copy"
        if not device.is_on or name in self._copies:
            return None
        home = device.folder.path
        target = home.with_name(name)
        shutil.copytree(home, target, symlinks=True)
        copy = self._copies[name] = self.fleet.twin(device, target)
        copy.power_on()

        def end() -> None:
            copy.power_cut()
            del self._copies[name]
            shutil.rmtree(target)

        return end

    def _revoke(self, device: SimulatedDevice) -> Callable[[], None] | None:
        if not self.fleet.cloud.is_running:
            return None
        self.fleet.revoke(device.name)
        return lambda: None

    # Backups

    def _back_up(self) -> None:
        fleet = self.fleet
        if self._over:
            return
        if fleet.cloud.is_running:
            name = f"backup-{int(fleet.hub.monotonic())}"
            fleet.cloud.backup(fleet.folder / name)
            self._backups.append((fleet.hub.monotonic(), name))
        for _, old in self._backups[:-3]:
            shutil.rmtree(fleet.folder / old)
        self._backups = self._backups[-3:]
        fleet.hub.call_later(BACKUP_EVERY_S / 2, self._back_up)

    def _restore(self, age_s: float) -> Callable[[], None] | None:
        """The controller's disk dies, and the newest backup that is so old is put in its place."""
        fleet = self.fleet
        old = [name for at, name in self._backups if at <= fleet.hub.monotonic() - age_s]
        if not old or not fleet.cloud.is_running:
            return None
        fleet.cloud.kill()
        fleet.cloud.restore(fleet.folder / old[-1])
        return fleet.cloud.start


def _until_next(fault: Fault, dice: random.Random) -> float:
    if fault.every_s is not None:
        return fault.every_s
    assert fault.per_s is not None
    return dice.expovariate(fault.per_s)
