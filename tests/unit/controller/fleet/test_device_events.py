"""Effects of a batch of device messages, and their order."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, cast

import pytest

from edgesplit.mqtt.messages import Ack, Death, Message, Reported
from edgesplit_controller.fleet.device_events import DeviceEvents
from edgesplit_controller.fleet.devices import Devices
from edgesplit_controller.fleet.ingest import IngestResult, Received

ACK = Ack(session=1, sequence=3)


class ScriptedDevices:
    """Devices whose ingestion has the result that a test wants."""

    def __init__(self, result: IngestResult, calls: list[str]) -> None:
        self.result = result
        self.calls = calls
        self.is_known = True

    def ingest(self, received: Received) -> IngestResult:
        self.calls.append(f"ingest {len(received)}")
        return self.result

    def quarantine(self, _device: str, _dropped: int, _unseen_bytes: int) -> bool:
        return self.is_known


class Harness:
    """`DeviceEvents` whose callbacks are written down in their order."""

    def __init__(self, **result: Any) -> None:
        self.calls: list[str] = []
        self.devices = ScriptedDevices(IngestResult(**result), self.calls)
        self.events = DeviceEvents(
            cast(Devices, self.devices),
            acknowledge=self.acknowledge,
            end_session=lambda device: self.calls.append(f"end {device}"),
            publish_revocations=lambda: self.calls.append("revocations"),
            clear_retained=lambda devices: self.calls.append(f"clear {', '.join(devices)}"),
            on_reports=lambda: self.calls.append("reports"),
        )

    def acknowledge(self, acks: Collection[tuple[str, Ack]]) -> None:
        self.calls += [f"ack {device}" for device, _ in acks]


@pytest.mark.parametrize(
    ("result", "message", "calls"),
    [
        ({}, Death(session=1), []),
        ({"acks": [("cam", ACK)]}, Death(session=1), ["ack cam"]),
        ({"superseded": True}, Death(session=1), ["revocations"]),
        ({"intruders": {"gone"}}, Death(session=1), ["end gone"]),
        ({"removed": {"gone"}}, Death(session=1), ["clear gone"]),
        ({}, Reported(session=1, statement_counter=2, models=()), ["reports"]),
        (
            {"acks": [("cam", ACK)], "superseded": True, "intruders": {"gone"}},
            Reported(session=1, statement_counter=2, models=()),
            ["ack cam", "revocations", "end gone", "reports"],
        ),
    ],
)
def test_effects_run_after_the_commit_in_order(result: dict[str, Any], message: Message, calls: list[str]) -> None:
    harness = Harness(**result)

    harness.events.on_messages([("cam", message)])

    assert harness.calls == ["ingest 1", *calls]


def test_a_flooding_device_is_blocked_before_its_session_is_closed() -> None:
    """The revocation list is written first: otherwise the device could reconnect after its session was closed."""
    harness = Harness()
    harness.events.on_flood("cam", 100)
    assert harness.calls == ["revocations", "end cam"]


def test_a_flood_of_an_unknown_name_changes_nothing() -> None:
    harness = Harness()
    harness.devices.is_known = False
    harness.events.on_flood("nobody", 100)
    assert harness.calls == []
