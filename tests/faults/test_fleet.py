"""A simulated fleet: the agents' and the controller's own decisions, in virtual time, and all that goes wrong."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from edgesplit_cli.sim.fleet import SimulatedFleet
from edgesplit_cli.sim.releases import Mood
from power_world import imaginary_disks


@pytest.fixture
def folder() -> Iterator[Path]:
    with imaginary_disks() as made:
        yield made


def test_a_release_reaches_every_device(folder: Path) -> None:
    """It is signed, told, fetched, verified, put on trial and committed, by the code that real devices run."""
    with SimulatedFleet(folder, devices=12, seed=1) as fleet:
        first = fleet.release(1)
        fleet.deploy(first)

        assert fleet.run(60, lambda: fleet.runs(first) == 12)
        fleet.run(60)
        assert all(one.standing.committed == {"sim": first.digest} for one in fleet.devices.values())
        shown = {one.name: fleet.cloud.devices.state(one) for one in fleet.cloud.devices.all()}
        assert set(shown.values()) == {"online"}
        assert not fleet.witness.broken


def test_a_release_that_fails_its_golden_inputs_is_never_answered_by(folder: Path) -> None:
    """Where it fails, the old one runs on; where it does not, the new one runs."""
    with SimulatedFleet(folder, devices=12, seed=2) as fleet:
        first = fleet.release(1)
        fleet.deploy(first)
        fleet.run(60)
        bad = fleet.release(2, Mood(golden=True), share=0.4)
        fleet.deploy(bad)
        fleet.run(120)

        ill = {name for name in fleet.names if fleet.is_ill_with(name, bad.digest)}
        assert 0 < len(ill) < 12
        for name, device in fleet.devices.items():
            assert device.running == {"sim": first.digest if name in ill else bad.digest}
        assert not fleet.witness.broken
