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
from edgesplit_simulation import quantities
from edgesplit_simulation.device.device import SimulatedDevice
from edgesplit_simulation.faults.controller import DRIFT, MOODS, CloudFaults
from edgesplit_simulation.faults.schedule import OF_DEVICES, Fault, How
from edgesplit_simulation.fleet import SimulatedFleet
from edgesplit_simulation.fleet_members import Members
from edgesplit_simulation.real_controller import RealFleet
from edgesplit_simulation.releases import Mood

WRITES = 40
"""Power fails at most so many writes after it was drawn that it fails while writing."""
SLOW_BYTES_PER_S = 8_000.0


@dataclass
class Storm:
    """The faults of one fleet. `begin` once it stands; `end` makes everything whole."""

    fleet: Members
    faults: Sequence[Fault]
    counts: Counter[str] = field(default_factory=Counter)
    """How often each kind came."""
    cloud: CloudFaults | None = None
    """What is done to controller and broker, where they are ours."""
    _over: bool = False
    _undo: dict[str, Callable[[], None]] = field(default_factory=dict)
    """How to end what lasts now, by what it is done to."""
    _copies: dict[str, SimulatedDevice] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if isinstance(self.fleet, SimulatedFleet):
            self.cloud = CloudFaults(self.fleet)

    def begin(self) -> None:
        """From now on things go wrong."""
        if self.cloud is not None:
            self.cloud.publish("well", 0.0)
            if any(fault.what == "restore" for fault in self.faults):
                self.cloud.back_up()
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
        if self.cloud is not None:
            self.cloud.over = True
            self.cloud.publish("well", 0.0)

    @property
    def settled(self) -> bool:
        """Every device that may runs the newest release."""
        return all(map(self.has_settled, self.fleet.devices.values()))

    def has_settled(self, device: SimulatedDevice) -> bool:
        """It runs the newest release, or may not."""
        newest = self.cloud.newest if self.cloud is not None else None
        if newest is None or device.name in self.fleet.revoked:
            return True
        return device.running.get(newest.model) == newest.digest

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
            self._release(how, fault.share)
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
                device.around.clock_off_s = sign * quantities.span_s((fault.by or "3650d").removeprefix("-"))
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
        if fault.what == "cloud gone":
            fleet.sky_up = False
            return lambda: setattr(fleet, "sky_up", True)
        return self.cloud.happens(fault) if self.cloud is not None else None

    def _release(self, how: How, share: float) -> None:
        """A new version; at a real controller, how the next one behaves."""
        if self.cloud is not None:
            self.cloud.publish(how, share)
        elif isinstance(self.fleet, RealFleet):
            self.fleet.next_mood = (Mood(drift=DRIFT) if how == "drift" else MOODS[how]), share

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
        if self.cloud is None or not self.cloud.revoke(device.name):
            return None
        return lambda: None


def _until_next(fault: Fault, dice: random.Random) -> float:
    if fault.every_s is not None:
        return fault.every_s
    assert fault.per_s is not None
    return dice.expovariate(fault.per_s)
