"""What offload servers report: floods become events with the device's name, an expired list a bad component."""

from __future__ import annotations

import json
import ssl
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import select

from edgesplit.errors import LinkError
from edgesplit.mqtt.messages import ENDPOINT_FLOODED, ReportedCondition
from edgesplit_controller.components import offload_status
from edgesplit_controller.components.offload_status import LISTS, SERVING, OffloadStatusProbes
from edgesplit_controller.components.overview import HealthOverview
from edgesplit_controller.components.recorder import StatusRecorder
from edgesplit_controller.fleet.conditions import OFFLOAD_FLOOD_S
from edgesplit_controller.pki.revocation_hook import RevocationCommand
from edgesplit_controller.storage.tables.core import Event
from support.device_fleet import STALE_S, FleetHarness


class OffloadBench:
    """A controller's components beside an offload server that answers what a test sets."""

    def __init__(self, world: FleetHarness, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.world, self.folder = world, folder
        self.answer: Any = {"refused_clients": [], "revocation_list_expires": world.now + 1e6, "keeps_network": ""}
        monkeypatch.setattr(offload_status, "get", lambda *_: self._get())
        self.delivery = RevocationCommand("true", folder / "revoked.pem")
        probes = OffloadStatusProbes(
            "https://hub:8500", ssl.create_default_context(), world.devices.record_offload_flood,
            now=lambda: world.now, delivery=self.delivery,
        )  # fmt: skip
        looks = [probes.lists, probes.confinement]
        self.step = StatusRecorder(world.database, 1, looks, now=lambda: world.now).step

    def _get(self) -> tuple[int, bytes, float]:
        if self.answer is None:
            raise LinkError("no server listens")
        return 200, self.answer if isinstance(self.answer, bytes) else json.dumps(self.answer).encode(), 0.01

    def events(self) -> list[tuple[str, str]]:
        with self.world.database.read() as session:
            return [(row.what, row.subject) for row in session.scalars(select(Event).order_by(Event.id))]

    def component(self, name: str) -> dict[str, Any]:
        overview = HealthOverview(
            self.world.database, self.folder, stale_after_s=STALE_S, unaggregated=lambda: 0, now=lambda: self.world.now
        )
        return next(part for part in overview.to_dicts() if part["name"] == name)


@pytest.fixture
def bench(database_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> OffloadBench:
    return OffloadBench(FleetHarness(database_url), tmp_path, monkeypatch)


def test_the_fleet_said_nothing_is_wrong_while_a_device_attacked_an_offload_server(bench: OffloadBench) -> None:
    """One event with its name for each attack, a condition of the device and of the fleet while it lasts; names that
    are no device's, and answers that are none, change nothing."""
    bench.world.add("cam-1", "cam-2")
    refused = {"device": "cam-1", "refused": 240, "reasons": "bytes, slow"}
    for device in ("cam-1", "operator", "x" * 63, "cam-1"):
        bench.answer["refused_clients"] = [{**refused, "device": device}]
        bench.step()
    assert bench.events() == [("device.flooding_offload", "cam-1")]
    (condition,) = bench.world.shown("cam-1")["conditions"]
    assert condition["kind"] == "flooding offload server" and "240 times" in condition["text"]
    assert "revoke" in condition["remedy"] and bench.world.shown("cam-2")["conditions"] == []
    (counted,) = bench.world.fleet.overview()["conditions"]
    assert (counted["kind"], counted["devices"], counted["example"]) == ("flooding offload server", 1, "cam-1")
    bench.world.now += OFFLOAD_FLOOD_S + 1
    assert bench.world.shown("cam-1")["conditions"] == bench.world.fleet.overview()["conditions"] == []
    bench.answer["refused_clients"] = [refused]
    bench.step()
    assert [what for what, _ in bench.events()] == ["device.flooding_offload"] * 2
    for answer in (b"no JSON", b"[]", b"{}", None):
        bench.answer = answer
        bench.step()


def test_a_program_that_attacks_a_devices_endpoint_is_an_event_with_the_devices_name(bench: OffloadBench) -> None:
    """As the agent reports it; kinds that this controller does not know are ignored."""
    bench.world.add("cam-1")
    text = "user 33 was refused 900 times in two minutes: bytes"
    found = (ReportedCondition(ENDPOINT_FLOODED, text), ReportedCondition("of tomorrow", "x"))
    bench.world.birth("cam-1")
    for sequence in range(2):
        bench.world.tell("cam-1", sequence, conditions=found)
    assert [what for what, _ in bench.events()].count("device.endpoint_flooded") == 1
    (condition,) = [entry for entry in bench.world.shown("cam-1")["conditions"] if entry["kind"] == ENDPOINT_FLOODED]
    assert condition["text"] == text and "by its user" in condition["remedy"]


def test_an_expired_revocation_list_is_an_event_and_a_bad_component(bench: OffloadBench) -> None:
    """Once, until it is renewed; a server without a list is not asked for one."""
    bench.step()
    assert bench.component(LISTS)["state"] == "good" and bench.events() == []
    bench.answer["revocation_list_expires"] = bench.world.now - 1
    bench.step()
    bench.step()
    assert bench.events() == [("revocations.outdated", LISTS)]
    shown = bench.component(LISTS)
    assert shown["state"] == "bad" and "expired" in shown["text"] and "revoked.pem" in shown["remedy"]
    bench.answer["revocation_list_expires"] = None
    bench.step()
    assert bench.component(LISTS)["state"] == "good"


def test_a_list_that_does_not_reach_an_external_broker_is_an_event(bench: OffloadBench) -> None:
    """Also while the offload server does not answer."""
    bench.answer = None
    bench.delivery.problem = "status 1: no route to host"
    bench.step()
    assert bench.events() == [("revocations.outdated", LISTS)]
    assert "no route to host" in bench.component(LISTS)["text"]


def test_a_server_that_keeps_its_network_is_reported(bench: OffloadBench) -> None:
    """With the reason; that is no failure."""
    bench.answer["keeps_network"] = "it sends traces"
    bench.step()
    shown = bench.component(SERVING)
    assert (shown["state"], shown["text"]) == ("unknown", "they can open connections: it sends traces")
    bench.answer["keeps_network"] = ""
    bench.step()
    assert bench.component(SERVING)["state"] == "good"
