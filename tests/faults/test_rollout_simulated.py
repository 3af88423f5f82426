"""Rollouts to 200 simulated devices: the real agents' decisions in virtual time, over a broker in this process, against
the real controller (reference fault F1). The seed is printed."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from edgesplit_controller.rollout.request import RolloutRequest
from edgesplit_simulation.fleet import SimulatedFleet
from edgesplit_simulation.releases import Behaviour

SEED = int(os.environ.get("EDGESPLIT_SEED", "1"))
DEVICES = 200


@pytest.fixture(scope="module")
def fleet() -> Iterator[SimulatedFleet]:
    """200 devices that run version 1."""
    print(f"seed {SEED}")
    memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    with (
        tempfile.TemporaryDirectory(prefix="es-rollout-", dir=memory) as folder,
        SimulatedFleet(Path(folder), devices=DEVICES, seed=SEED) as made,
    ):
        number = made.deploy(made.release(1))
        assert ended(made, number)["states"]["succeeded"] == DEVICES
        yield made


def shown(fleet: SimulatedFleet, number: int) -> dict[str, Any]:
    """As the API shows a rollout."""
    return fleet.controller.rollouts.view(number)


def ended(fleet: SimulatedFleet, number: int, seconds: float = 3_600.0) -> dict[str, Any]:
    """Virtual time passes until the rollout has ended."""
    for _ in range(int(seconds / 30)):
        if (one := shown(fleet, number))["ended"] is not None:
            return one
        fleet.run(30.0)
    raise AssertionError(f"it goes on: {shown(fleet, number)}")


def notified_devices(fleet: SimulatedFleet, number: int) -> set[str]:
    """Devices to which the rollout has ever published a statement."""
    found = fleet.controller.rollouts.device_views(number, states=(), after=-1, most=1_000)
    return {row["device"] for row in found if row["counter"]}


def test_a_bad_release_stops_at_its_threshold(fleet: SimulatedFleet) -> None:
    """F1: version 2 answers its golden inputs wrongly. The canaries refuse it, run version 1 on and are told so; the
    other 180 never hear of it."""
    first = next(iter(fleet.releases.values()))
    bad = fleet.release(2, Behaviour(wrong_golden=True))
    one = ended(fleet, fleet.deploy(bad, request=RolloutRequest(stages=("10%", "100%"), abort_when_failed="5%")))
    assert one["state"] == "failed" and one["states"]["rolled back"] == 20 and one["states"]["skipped"] == 180
    assert fleet.count_running(first) == DEVICES and len(notified_devices(fleet, one["id"])) == 20
    assert one["failures"][0]["count"] == 20 and not fleet.checker.violations
