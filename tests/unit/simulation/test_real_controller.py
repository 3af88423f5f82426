"""Simulated devices at a real controller, and the links that they emulate."""

from __future__ import annotations

from pathlib import Path

from edgesplit.controller_client.client import ControllerClient
from edgesplit.links import LINKS
from edgesplit.testing.in_memory_broker import NetworkPath
from edgesplit_agent.control.mqtt_uplink import TelemetrySchedule
from edgesplit_simulation.real_controller import RealFleet


class UnusedClient(ControllerClient):
    """A client of no controller: nothing is requested while a fleet is only created."""

    def __init__(self) -> None:
        pass


def test_the_link_option_of_a_real_fleet_was_not_emulated(tmp_path: Path) -> None:
    """`edgectl sim --link 3g` once wrote 3g into the claims and let requests travel over the default link."""
    with RealFleet(
        tmp_path, UnusedClient(), devices=1, link="3g", telemetry_schedule=TelemetrySchedule(10.0, 1.0)
    ) as fleet:
        assert fleet._environment(NetworkPath()).offload_server.link == LINKS["3g"]
