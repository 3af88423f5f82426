"""The agent's MQTT session: what it accepts from the controller's acknowledgements."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from edgesplit.errors import MalformedMessage
from edgesplit.limits import LIMITS
from edgesplit.mqtt import messages
from edgesplit.mqtt.messages import Ack, ModelState, Reported, Telemetry
from edgesplit.testing.virtual_time import Hub
from edgesplit_agent.control.mqtt_uplink import TelemetrySchedule, Uplink, within_limits
from edgesplit_agent.state.data_folder import DataFolder, Identity

HOUR_S = 3_600.0


class Wire:
    """A session that is always up."""

    problem = ""
    connected = True

    def __init__(self, *_where: Any, on_message: Any = None, on_connect: Any = None, **_callbacks: Any) -> None:
        self.sent: list[tuple[str, bytes]] = []
        self.heard = on_message
        self.came_up = on_connect

    def start(self) -> None:
        """It is there."""

    def stop(self) -> None:
        """It goes."""

    def subscribe(self, _topics: Any, **_options: Any) -> None:
        """All is heard."""

    def publish(self, topic: str, payload: bytes, **_options: Any) -> bool:
        """Keep what is sent."""
        self.sent.append((topic, payload))
        return True

    def telemetry(self) -> int:
        """How many messages of it were sent."""
        return sum(topic.endswith("/telemetry") for topic, _ in self.sent)


def sample(session: int, sequence: int, *, take: bool) -> tuple[Telemetry | None, object]:
    """Nothing ever changes."""
    if not take:
        return None, None
    return Telemetry(session=session, sequence=sequence, emulated=False, up_bytes_per_s=0.0, rtt_s=0.0,
                     remote_usable=False, models=()), None  # fmt: skip


@pytest.fixture
def hub() -> Hub:
    return Hub()


@pytest.fixture
def link(tmp_path: Path, hub: Hub) -> tuple[Uplink, Wire]:
    """An uplink in virtual time, and its wire."""
    wires: list[Wire] = []

    def connect(*where: Any, **callbacks: Any) -> Wire:
        wires.append(Wire(*where, **callbacks))
        return wires[-1]

    identity = Identity(
        device="cam", device_class="raspberrypi4", controller="", broker="localhost:1", offload="", tuf_root=""
    )
    uplink = Uplink(
        DataFolder(tmp_path), identity, ("localhost", 1), None, sample=sample, emulated=False, local_url="",
        schedule=TelemetrySchedule(every_s=2.0), connect=connect, concurrency=hub,
    )  # type: ignore[arg-type]  # fmt: skip
    return uplink, wires[0]


def begin(uplink: Uplink, wire: Wire, hub: Hub) -> None:
    """Connected, with a first message behind it."""
    uplink.start(lambda raw: None, lambda online: None)
    uplink.session_number = 1
    wire.came_up()
    hub.run(10.0)


def say(wire: Wire, kept: Ack) -> None:
    wire.heard(messages.topic("cam", "ack"), messages.encode(kept), None)


def test_controller_sets_the_telemetry_interval(link: tuple[Uplink, Wire], hub: Hub) -> None:
    """Ten thousand devices that each report every two seconds would be more than any controller takes in."""
    uplink, wire = link
    begin(uplink, wire, hub)
    for every_s, expected in ((60.0, 60), (5.0, 720)):
        say(wire, Ack(session=1, sequence=0, telemetry_interval_s=every_s))
        hub.run(every_s)
        before = wire.telemetry()
        hub.run(HOUR_S)
        assert wire.telemetry() - before == pytest.approx(expected, rel=0.05)
        say(wire, Ack(session=1, sequence=0))  # of a controller that wants nothing else
    uplink.stop()


@pytest.mark.parametrize("every_s", [0.0, 0.01, -5.0, 1e9])
def test_telemetry_interval_out_of_range_is_refused(link: tuple[Uplink, Wire], hub: Hub, every_s: float) -> None:
    """The controller can order neither a flood nor silence."""
    uplink, wire = link
    begin(uplink, wire, hub)
    with pytest.raises(MalformedMessage):
        say(wire, Ack(session=1, sequence=0, telemetry_interval_s=every_s))
    before = wire.telemetry()
    hub.run(100.0)
    assert wire.telemetry() - before == pytest.approx(50, rel=0.1)
    uplink.stop()


@pytest.mark.parametrize("models", [0, 1, LIMITS.models_per_device, LIMITS.reported_models + 5])
@pytest.mark.parametrize("gateway_models", [0, LIMITS.gateway_releases + 5])
def test_the_text_of_a_failure_does_not_make_a_report_malformed(models: int, gateway_models: int) -> None:
    """Reasons of 100,000 letters are cut, however many there are; what fits stays as it was."""
    reason = "é" * 100_000

    def failed(count: int) -> tuple[ModelState, ...]:
        return tuple(ModelState(f"m{at}", "a" * 64, "b" * 64, "failed", reason) for at in range(count))

    whole = Reported(1, 2, failed(models), reason, reason, failed(gateway_models), report_number=3)
    sent = messages.encode(within_limits(whole))
    assert len(sent) <= LIMITS.message_bytes
    heard = messages.decode(sent, Reported)
    assert len(heard.models) == min(models, LIMITS.reported_models) and heard.safe_mode.endswith("…")
    assert all(model.detail.startswith("é") for model in heard.models)
    short = Reported(1, 2, (ModelState("m", "", "b" * 64, "failed", "its file is damaged"),), report_number=3)
    assert within_limits(short) == short
