"""Telemetry of simulated devices: sufficient to exercise every gate of a rollout."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from edgesplit.plan import Link
from edgesplit.testing import in_memory_broker
from edgesplit_controller.messaging.broker import DEVICE_READS, DEVICE_WRITES
from edgesplit_controller.rollout.release_health import evidence_by_device
from edgesplit_controller.rollout.request import RolloutRequest
from edgesplit_simulation.device.sensors import BASIS, COOL_CELSIUS, IDLE_WATTS, PowerModel
from edgesplit_simulation.fleet import EventIntervals, SimulatedFleet
from edgesplit_simulation.releases import HEALTHY, Behaviour
from support.device_storage import imaginary_disks

BUSY = EventIntervals(telemetry_every_s=10.0, request_every_s=3.0, stale_after_s=60.0)
THIN = Link(up_bytes_per_s=50_000.0, down_bytes_per_s=50_000.0, rtt_s=0.1)
"""So thin that the device works alone."""
GATES = ("p95<2s", "errors<20%", "fallbacks<60%", "memory<200MB", "celsius<75", "joules<2.5", "drift<5%")


@pytest.fixture
def folder() -> Iterator[Path]:
    with imaginary_disks() as made:
        yield made


@pytest.mark.parametrize(
    ("gate", "mood", "drift"),
    [
        ("celsius<75", Behaviour(extra_celsius=45.0), 0.0),
        ("joules<2.5", Behaviour(energy_factor=10.0), 0.0),
        ("memory<200MB", Behaviour(leak_bytes=2**23), 0.0),
        ("drift<5%", HEALTHY, 0.2),
    ],
    ids=["hot", "hungry", "leak", "drift"],
)
def test_each_sensor_gate_can_fail(folder: Path, gate: str, mood: Behaviour, drift: float) -> None:
    """A bad release is stopped by the gate that it violates, by the devices' measurements, and by that one alone."""
    with SimulatedFleet(folder, devices=2, seed=3, intervals=BUSY, link=THIN) as fleet:
        fleet.deploy(fleet.release(1))
        fleet.run(60)
        bad = fleet.release(2, mood, drift=drift)
        number = fleet.deploy(bad, request=RolloutRequest(stages=("100%",), gates=GATES, gate_after="20/120s"))
        shown = fleet.controller.rollouts.view

        assert fleet.run(600, lambda: shown(number)["failures"])
        assert {failure["kind"] for failure in shown(number)["failures"]} == {f"gate {gate}"}
        assert shown(number)["simulated"] == 2
        assert not fleet.checker.violations


def test_a_good_release_passes_every_gate(folder: Path) -> None:
    """No gate stays unjudged, and the measurements are marked as simulated."""
    with SimulatedFleet(folder, devices=2, seed=4, intervals=BUSY, link=THIN) as fleet:
        fleet.deploy(fleet.release(1))
        fleet.run(60)
        good = fleet.release(2)
        number = fleet.deploy(good, request=RolloutRequest(stages=("100%",), gates=GATES, gate_after="20/300s"))
        assert fleet.run(280, lambda: fleet.controller.rollouts.view(number)["state"] == "finished")
        with fleet.controller.database.read() as session:
            found = evidence_by_device(session, fleet.names, "sim", good.digest)
        for value in found.values():
            known = (value.latency_p95_s, value.memory_bytes, value.celsius, value.joules, value.drift, value.requests)
            assert None not in known, value
        told = fleet.controller.devices.get(fleet.names[0]).telemetry or {}
        assert told["power"]["watts_source"] == BASIS and told["models"][0]["joules_basis"] == BASIS


def test_offline_telemetry_arrives_late_if_buffered(folder: Path) -> None:
    """Minutes without a network are in the history afterwards, each report once; without a buffer they are lost."""
    for number, keeps_bytes in enumerate((65_536, 0)):
        home = folder / str(number)
        home.mkdir()
        with SimulatedFleet(home, devices=1, seed=5, intervals=BUSY, telemetry_backlog_bytes=keeps_bytes) as fleet:
            fleet.deploy(fleet.release(1))
            fleet.run(60)
            (device,) = fleet.devices.values()
            gone = fleet.hub.time()
            device.cut_network()
            fleet.run(400)
            device.restore_network()
            fleet.run(400)
            told = fleet.controller.devices.history(device.name)
            late = [message for message in told if message["from_backlog"]]
            assert len({(message["session"], message["sequence"]) for message in told}) == len(told)
            if keeps_bytes:
                assert len(late) >= 4 and all(gone - 300 < item["at"] < gone + 700 for item in late)
            else:
                assert late == []
            assert not fleet.checker.violations


def test_the_simulated_broker_enforces_the_real_access_rules() -> None:
    """What a device may publish and subscribe to."""
    assert (in_memory_broker.DEVICE_WRITES, in_memory_broker.DEVICE_READS) == (DEVICE_WRITES, DEVICE_READS)


def test_simulated_heat_and_power_follow_the_load() -> None:
    """An idle device is cool, a busy one warmer, and a bad release adds its own heat."""
    body = PowerModel(0.0)
    idle = body.sample(10.0)
    assert (idle.watts, idle.celsius) == (IDLE_WATTS, COOL_CELSIUS)
    body.add_busy_time(5.0)
    half = body.sample(20.0, [0.0, 45.0])
    assert half.watts is not None and half.celsius is not None
    assert half.watts > IDLE_WATTS and half.celsius == pytest.approx(COOL_CELSIUS + 7.0 + 45.0)
    body.add_busy_time(1_000.0)
    assert body.sample(30.0).celsius == pytest.approx(COOL_CELSIUS + 14.0)
