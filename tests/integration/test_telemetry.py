"""Telemetry, device state and log bundles, over a real broker and the API."""

from __future__ import annotations

import gzip
import hashlib
import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from edgesplit.mqtt import messages
from edgesplit.mqtt.messages import (
    Ack,
    Backlog,
    DeviceJob,
    LogPiece,
    ModelState,
    PowerState,
    Reported,
    Telemetry,
    topic,
)
from edgesplit.mqtt.telemetry import DeviceTime, ReleaseHealth
from support.controller_process import Device, Up, enrolled, eventually

RELEASE = "a" * 64


@pytest.fixture(scope="module")
def up(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Up]:
    """A controller."""
    running = Up(tmp_path_factory.mktemp("controller") / "data")
    assert running.start() == "ready"
    yield running
    if running.process is not None and running.process.poll() is None:
        running.end()


def telemetry(sequence: int, *, session: int = 1, **more: Any) -> Telemetry:
    return Telemetry(
        session=session, sequence=sequence, emulated=True, up_bytes_per_s=1e6, rtt_s=0.01, remote_usable=True,
        models=(),
        **more,
    )  # fmt: skip


def listening(device: Device, *kinds: messages.TopicKind) -> None:
    """It hears these too; what is answered after them was asked for after they counted."""
    device.session.subscribe([topic(device.name, kind) for kind in kinds], qos=1)
    device.fetch("metadata/timestamp.json", 100_000)


def test_offline_telemetry_is_acknowledged_once_it_is_stored(up: Up, tmp_path: Path) -> None:
    """Under its own name, in its own time, once; what it measures now is what is shown."""
    device = enrolled(up, "pi-late", tmp_path)
    listening(device, "ack")
    device.say("telemetry", telemetry(0))
    kept = messages.decode(device.next(topic("pi-late", "ack"))[0], Ack)
    assert (kept.session, kept.sequence) == (1, 0)
    batch = Backlog(
        batch=4,
        sent_at=DeviceTime(unix_s=9.0, boot_id="b", since_boot_s=700.0),
        messages=tuple(
            telemetry(n, session=0, measured_at=DeviceTime(unix_s=5.0, boot_id="b", since_boot_s=100.0 + n))
            for n in range(3)
        ),
    )
    for _ in range(2):
        device.say("backlog", batch, qos=1)
        assert messages.decode(device.next(topic("pi-late", "ack"))[0], Ack).batch == 4
    history = up.ok("GET", "/v1/telemetry/pi-late")
    assert [(one["session"], one["sequence"], one["from_backlog"]) for one in history] == [
        (0, 0, True), (0, 1, True), (0, 2, True), (1, 0, False),
    ]  # fmt: skip
    assert 590 < history[-1]["at"] - history[0]["at"] < 700
    device.session.stop()


def test_state_of_a_dead_device_is_shown_as_unknown(up: Up, tmp_path: Path) -> None:
    """What it said last stays readable, as that; the fleet's counts follow."""
    device = enrolled(up, "pi-dead", tmp_path, group="hall")
    state = ModelState("digits", RELEASE, RELEASE, "running")
    device.say("reported", Reported(1, 1, (state,), report_number=1), qos=1, retain=True)
    health = ReleaseHealth(model="digits", release=RELEASE, requests=7, golden_ok=True)
    power = PowerState(under_voltage=True)

    sequences = itertools.count()

    def told() -> Any:
        device.say("telemetry", telemetry(next(sequences), health=(health,), power=power))
        shown = up.ok("GET", "/v1/devices/pi-dead")
        return shown if shown["health"] and shown["telemetry"] else None

    shown = eventually("its word", told)
    assert shown["health"][0]["requests"] == 7 and shown["models"][0]["state"] == "running"
    assert [one["kind"] for one in shown["conditions"]] == ["under-voltage"]
    assert any(one["kind"] == "under-voltage" for one in up.ok("GET", "/v1/fleet")["conditions"])

    device.vanish()

    def gone() -> Any:
        found = up.ok("GET", "/v1/devices/pi-dead")
        return found if found["state"] == "offline" else None

    shown = eventually("its death", gone)
    assert shown["telemetry"] is None and shown["last_telemetry"] and not shown["health"][0]["current"]
    assert (shown["models"][0]["state"], shown["models"][0]["last_state"]) == ("unknown", "running")
    listed = up.ok("GET", "/v1/devices?state=offline&group=hall")
    assert [one["name"] for one in listed] == ["pi-dead"]
    assert up.ok("GET", "/v1/fleet")["devices"]["offline"] >= 1


def test_a_device_log_bundle_is_requested_and_arrives_in_pieces(up: Up, tmp_path: Path) -> None:
    """The job reaches the device it is for, and its answer the operator who asked; another device hears of nothing."""
    device, other = enrolled(up, "pi-log", tmp_path), enrolled(up, "pi-other", tmp_path)
    listening(device, "job")
    listening(other, "job")
    asked = up.ok("POST", "/v1/devices/pi-log/logs")
    job = messages.decode(device.next(topic("pi-log", "job"))[0], DeviceJob)
    assert (job.id, job.kind) == (asked["id"], "logs")
    content = gzip.compress(json.dumps({"log": [f"line {number}" for number in range(500)]}).encode())
    half = len(content) // 2
    digest = hashlib.sha256(content).hexdigest()
    for offset, data in ((half, content[half:]), (0, content[:half])):
        piece = LogPiece(id=job.id, offset=offset, total=len(content), sha256=digest, data=data)
        other.say("log", piece, qos=1)
        device.say("log", piece, qos=1)

    def here() -> Any:
        found = up.ok("GET", f"/v1/devices/pi-log/logs/{job.id}")
        return found if found["state"] == "complete" else None

    assert len(eventually("the bundle", here)["content"]["log"]) == 500
    assert topic("pi-other", "job") not in other.came and up.ok("GET", "/v1/devices/pi-other/logs") == []
    for one in (device, other):
        one.session.stop()
