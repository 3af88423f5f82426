"""Applies the faults of a faults file to a fleet at their times, and undoes all of them at the end.

Each fault has a random generator of its own, seeded with the fleet's seed and the fault's index in the file: adding a
fault at the end changes nothing for the others.
"""

from __future__ import annotations

import random
import shutil
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

from edgesplit.quantities import parse_duration, parse_rate
from edgesplit_simulation.device.device import SimulatedDevice
from edgesplit_simulation.faults.controller import BEHAVIOURS, DRIFT, ControllerFaults
from edgesplit_simulation.faults.schedule import DEVICE_FAULTS, BehaviourName, Fault
from edgesplit_simulation.fleet import SimulatedFleet
from edgesplit_simulation.fleet_members import BaseFleet
from edgesplit_simulation.real_controller import RealFleet
from edgesplit_simulation.releases import Behaviour

MAX_WRITES_UNTIL_CUT = 40
"""A `power cut while writing` happens at most this many durable writes after its time."""
SLOW_BYTES_PER_S = 8_000.0


@dataclass
class FaultInjector:
    """The faults of one fleet: `begin` once the fleet runs, `end` to undo them all."""

    fleet: BaseFleet
    faults: Sequence[Fault]
    counts: Counter[str] = field(default_factory=Counter)
    """How often each kind of fault was applied."""
    controller_faults: ControllerFaults | None = None
    """Faults of controller and broker; None at a real controller."""
    _is_over: bool = False
    _undo: dict[str, Callable[[], None]] = field(default_factory=dict)
    """Functions that end the faults in effect, by the device or component that they affect."""
    _copies: dict[str, SimulatedDevice] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if isinstance(self.fleet, SimulatedFleet):
            self.controller_faults = ControllerFaults(self.fleet)

    def begin(self) -> None:
        """Schedule every fault."""
        if self.controller_faults is not None:
            self.controller_faults.publish("well", 0.0)
            if any(fault.kind == "restore" for fault in self.faults):
                self.controller_faults.back_up()
        for index, fault in enumerate(self.faults):
            rng = random.Random(f"{self.fleet.seed} {index} {fault.kind}")
            for target in self._targets(fault, rng):
                self._schedule(fault, target, random.Random(f"{self.fleet.seed} {index} {fault.kind} {target}"))

    def end(self) -> None:
        """Undo every fault in effect, switch every device on and deploy a last healthy release."""
        self._is_over = True
        for undo in list(self._undo.values()):
            undo()
        self._undo.clear()
        for device in self.fleet.devices.values():
            device.power_on()
        if self.controller_faults is not None:
            self.controller_faults.is_over = True
            self.controller_faults.publish("well", 0.0)

    @property
    def is_converged(self) -> bool:
        """True once every device that is not revoked runs the newest release."""
        return all(map(self.has_converged, self.fleet.devices.values()))

    def has_converged(self, device: SimulatedDevice) -> bool:
        """True where the device runs the newest release or is revoked."""
        newest = self.controller_faults.newest if self.controller_faults is not None else None
        if newest is None or device.name in self.fleet.revoked:
            return True
        return device.running.get(newest.model) == newest.digest

    # Timing: every fault draws from its own generator, so that adding one does not change the others

    def _targets(self, fault: Fault, rng: random.Random) -> list[str]:
        """Names of the devices that the fault affects; an empty name stands for the broker, offload server or
        controller."""
        if fault.kind not in DEVICE_FAULTS:
            return [""]
        names = self.fleet.names
        return sorted(rng.sample(names, max(1, round(fault.share * len(names)))))

    def _schedule(self, fault: Fault, target: str, rng: random.Random) -> None:
        hub = self.fleet.hub

        def happen() -> None:
            if self._is_over:
                return
            self._apply(fault, target, rng)
            if fault.at_s is None:
                hub.call_later(_delay_s(fault, rng), happen)

        hub.call_later(fault.at_s if fault.at_s is not None else _delay_s(fault, rng), happen)

    # Effects: each returns the function that undoes it, or None where nothing was done

    def _apply(self, fault: Fault, target: str, rng: random.Random) -> None:
        if fault.kind == "release":
            how = rng.choice(sorted(BEHAVIOURS)) if fault.behaviour == "any" else fault.behaviour
            self.counts[f"release: {how}"] += 1
            self._publish_release(how, fault.share)
            return
        key = target or fault.kind.partition(" ")[0].replace("restore", "controller")
        if key in self._undo or target in self.fleet.revoked:
            return  # each device or component has at most one fault at a time
        device = self.fleet.devices.get(target)
        undo = self._apply_to_device(fault, device, rng) if device else self._apply_to_infrastructure(fault)
        if undo is None:
            return
        self.counts[fault.kind] += 1

        def end() -> None:
            if self._undo.pop(key, None) is not None:
                undo()

        self._undo[key] = undo
        self.fleet.hub.call_later(rng.uniform(*fault.duration_range_s), end)

    def _apply_to_device(self, fault: Fault, device: SimulatedDevice, rng: random.Random) -> Callable[[], None] | None:
        """Apply a fault to a device; returns the function that ends it, or None where nothing was done."""
        match fault.kind:
            case "offline":
                device.cut_network()
                return device.restore_network
            case "slow link":
                link = device.environment.broker_link
                link.bytes_per_s = parse_rate(fault.amount) if fault.amount else SLOW_BYTES_PER_S
                return partial(setattr, link, "bytes_per_s", float("inf"))
            case "power cut":
                device.power_cut()
                return device.power_on
            case "power cut while writing":
                self.fleet.disks.power_cuts[device.name] = rng.randrange(MAX_WRITES_UNTIL_CUT), device.power_cut
                return lambda: self._end_write_cut(device)
            case "clock off":
                sign = -1 if fault.amount.startswith("-") else 1
                device.environment.clock_offset_s = sign * parse_duration((fault.amount or "3650d").removeprefix("-"))
                return partial(setattr, device.environment, "clock_offset_s", 0.0)
            case "full disk":
                self.fleet.disks.full_devices.add(device.name)
                return lambda: self.fleet.disks.full_devices.discard(device.name)
            case "flipped bits":
                return self._flip_bit(device, rng)
            case "copied card":
                return self._copy_card(device)
            case "never answers":
                device.hang()
                return device.resume
            case _:  # revoked
                return self._revoke(device)

    def _apply_to_infrastructure(self, fault: Fault) -> Callable[[], None] | None:
        """Apply a fault to offload server, broker or controller; returns the function that ends it, or None."""
        if fault.kind == "cloud gone":
            self.fleet.offload_server_up = False
            return partial(setattr, self.fleet, "offload_server_up", True)
        return self.controller_faults.apply(fault) if self.controller_faults is not None else None

    def _publish_release(self, how: BehaviourName, share: float) -> None:
        """Publish a new version; at a real controller, set how the next release behaves."""
        if self.controller_faults is not None:
            self.controller_faults.publish(how, share)
        elif isinstance(self.fleet, RealFleet):
            self.fleet.next_behaviour = (Behaviour(drift=DRIFT) if how == "drift" else BEHAVIOURS[how]), share

    def _end_write_cut(self, device: SimulatedDevice) -> None:
        self.fleet.disks.power_cuts.pop(device.name, None)
        device.power_on()

    def _flip_bit(self, device: SimulatedDevice, rng: random.Random) -> Callable[[], None] | None:
        """Flip a bit of a release on the device's card and mark the device as damaged until it has repaired itself."""
        releases = sorted({*device.installed_state.committed.values(), *device.installed_state.running.values()})
        if not releases or not self.fleet.disks.flip_bit(device.name, rng.choice(releases), rng):
            return None
        device.mark_damaged("bits on its card flipped")
        return lambda: None

    def _copy_card(self, device: SimulatedDevice) -> Callable[[], None] | None:
        """Start a second device with a copy of the card, hence with the same identity."""
        name = f"{device.name}.copy"
        if not device.is_on or name in self._copies:
            return None
        home = device.folder.path
        target = home.with_name(name)
        shutil.copytree(home, target, symlinks=True)
        copy = self._copies[name] = self.fleet.clone(device, target)
        copy.power_on()

        def end() -> None:
            copy.power_cut()
            del self._copies[name]
            shutil.rmtree(target)

        return end

    def _revoke(self, device: SimulatedDevice) -> Callable[[], None] | None:
        if self.controller_faults is None or not self.controller_faults.revoke(device.name):
            return None
        return lambda: None


def _delay_s(fault: Fault, rng: random.Random) -> float:
    if fault.every_s is not None:
        return fault.every_s
    assert fault.rate_per_s is not None
    return rng.expovariate(fault.rate_per_s)
