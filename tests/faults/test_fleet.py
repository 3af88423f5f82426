"""A simulated fleet: the agents' and the controller's own decisions, in virtual time, and all that goes wrong."""

from __future__ import annotations

import os
import random
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from edgesplit_simulation.faults.injector import FaultInjector
from edgesplit_simulation.faults.schedule import USUAL_FAULTS, parse_faults
from edgesplit_simulation.fleet import LONG_RUN_INTERVALS, SimulatedFleet
from edgesplit_simulation.releases import Behaviour
from support.device_storage import imaginary_disks

SEED = int(os.environ.get("EDGESPLIT_SEED", "1"))
DEVICES = int(os.environ.get("EDGESPLIT_SIM_DEVICES", "5"))
DAYS = float(os.environ.get("EDGESPLIT_SIM_DAYS", "0.5"))
"""`make soak` asks for 40 devices and 30 days."""


@pytest.fixture
def folder() -> Iterator[Path]:
    with imaginary_disks() as made:
        yield made


def test_a_release_reaches_every_device(folder: Path) -> None:
    """It is signed, told, fetched, verified, put on trial and committed, by the code that real devices run."""
    with SimulatedFleet(folder, devices=12, seed=1) as fleet:
        first = fleet.release(1)
        fleet.deploy(first)

        assert fleet.run(60, lambda: fleet.count_running(first) == 12)
        fleet.run(60)
        assert all(one.installed_state.committed == {"sim": first.digest} for one in fleet.devices.values())
        shown = {one.name: fleet.controller.devices.state(one) for one in fleet.controller.devices.all()}
        assert set(shown.values()) == {"online"}
        assert not fleet.checker.violations


def test_a_release_that_fails_its_golden_inputs_never_serves(folder: Path) -> None:
    """Where it fails, the old one runs on; where it does not, the new one runs."""
    with SimulatedFleet(folder, devices=12, seed=2) as fleet:
        first = fleet.release(1)
        fleet.deploy(first)
        fleet.run(60)
        bad = fleet.release(2, Behaviour(wrong_golden=True), share=0.4)
        fleet.deploy(bad)
        fleet.run(120)

        ill = {name for name in fleet.names if fleet.misbehaves(name, bad.digest)}
        assert 0 < len(ill) < 12
        for name, device in fleet.devices.items():
            assert device.running == {"sim": first.digest if name in ill else bad.digest}
        assert not fleet.checker.violations


def test_a_fleet_survives_a_month_of_random_faults(folder: Path) -> None:
    """Whatever goes wrong, by chance: no unsigned byte is loaded, no counter falls, what was healthy answers, and no
    request is lost; when it is over every device comes to the newest release."""
    print(f"EDGESPLIT_SEED={SEED} EDGESPLIT_SIM_DEVICES={DEVICES} EDGESPLIT_SIM_DAYS={DAYS:g}")
    with SimulatedFleet(folder, devices=DEVICES, seed=SEED, intervals=LONG_RUN_INTERVALS, health_s=600) as fleet:
        storm = FaultInjector(fleet, parse_faults(USUAL_FAULTS))
        storm.begin()
        fleet.run(DAYS * 86_400)
        storm.end()

        assert fleet.run(6 * 3_600, lambda: storm.is_converged), _late(fleet, storm)
        fleet.run(60)
        fleet.check()
        print(dict(storm.counts), dict(fleet.checker.outcomes), fleet.checker.fingerprint)
        assert not fleet.checker.violations
        assert sum(storm.counts.values()) > DEVICES * DAYS
        assert fleet.checker.outcomes.total() == fleet.checker.request_count


def test_a_run_depends_on_its_seed_alone(folder: Path) -> None:
    """Every message and outcome comes at the same moment again, whatever the host does meanwhile."""
    assert _fingerprint(folder / "a", 5) == _fingerprint(folder / "b", 5) != _fingerprint(folder / "c", 6)


def test_other_threads_do_not_change_a_simulated_fleets_randomness(folder: Path) -> None:
    """They draw from the process's dice; the fleet has its own."""
    alone = _fingerprint(folder / "a", 5)
    over = threading.Event()
    beside = threading.Thread(target=lambda: _draw_until(over))
    beside.start()
    try:
        accompanied = _fingerprint(folder / "b", 5)
    finally:
        over.set()
        beside.join()
    assert accompanied == alone


def _draw_until(over: threading.Event) -> None:
    while not over.wait(0.001):
        random.random()


def test_a_replayed_statement_after_a_restore_is_refused(folder: Path) -> None:
    """A controller that says again what it said before a restored backup is caught by the witness and obeyed by no
    device; what the backup wants it says anew, under a counter that is newer than all."""
    with SimulatedFleet(folder, devices=3, seed=4) as fleet:
        first = fleet.release(1)
        fleet.deploy(first)
        fleet.run(60)
        fleet.controller.backup(folder / "backup")
        fleet.run(3_600)
        second = fleet.release(2)
        fleet.deploy(second)
        fleet.run(60)
        fleet.controller.kill()
        fleet.controller.restore(folder / "backup", restate=False)
        fleet.controller.start()
        fleet.run(10)
        assert "was sent" in fleet.checker.violations[0]
        assert fleet.count_running(second) == 3

        assert fleet.run(300, lambda: fleet.count_running(first) == 3)  # it has heard what they know, and says it anew
        assert not [text for text in fleet.checker.violations if "obeys" in text]


def test_a_copied_card_has_the_damage_of_its_original(folder: Path) -> None:
    """The copy starts on what was flipped, and cannot repair it while the other holds the name: nobody's fault."""
    with SimulatedFleet(folder, devices=1, seed=5) as fleet:
        release = fleet.release(1)
        fleet.deploy(release)
        fleet.run(120)
        (device,) = fleet.devices.values()
        assert fleet.disks.flip_bit(device.name, release.digest, random.Random(1))
        device.mark_damaged("bits on its card flipped")
        card = device.folder.path.with_name("copy")
        shutil.copytree(device.folder.path, card, symlinks=True)
        copy = fleet.clone(device, card)
        copy.power_on()
        copy.check_serving()
        assert not copy.running
        copy.power_cut()
        assert not fleet.checker.violations


def _fingerprint(folder: Path, seed: int) -> str:
    with SimulatedFleet(folder, devices=2, seed=seed, intervals=LONG_RUN_INTERVALS, health_s=600) as fleet:
        storm = FaultInjector(fleet, parse_faults(USUAL_FAULTS))
        storm.begin()
        fleet.run(0.25 * 86_400)
        return fleet.checker.fingerprint


def _late(fleet: SimulatedFleet, storm: FaultInjector) -> str:
    """Who does not run the newest release, and what it says of it."""
    late = [one for one in fleet.devices.values() if not storm.has_converged(one)]
    return "; ".join(f"{one.name}: on {one.is_on}, connected {one.is_connected}, {one.states}" for one in late)
