"""Telemetry measured while the link is down: kept within bounds, sent in order, stored once, dropped only in the
documented order."""

from __future__ import annotations

import errno
import os
import random
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgesplit.mqtt import messages
from edgesplit.mqtt.messages import Ack, Backlog, PowerState, Telemetry, TelemetryWindow
from edgesplit.mqtt.telemetry import ROW_NAME_CHARS, BacklogState, DeviceTime
from edgesplit_agent.control.mqtt_uplink import TelemetrySchedule
from edgesplit_agent.host.clock import age_s
from edgesplit_agent.telemetry import disk_ring as ring_module
from edgesplit_agent.telemetry.disk_ring import DiskRing, Entry, parse_entries
from edgesplit_agent.telemetry.outbox import (
    BATCH_MESSAGES,
    MAX_UNACKED,
    RESEND,
    SETTLE_S,
    BatchSchedule,
    Outbox,
    priority_of,
)

NOW = 1_800_000_000.0
DAY = 86_400.0


def at(seconds: float, boot: str = "b") -> DeviceTime:
    return DeviceTime(unix_s=NOW + seconds, boot_id=boot, since_boot_s=1_000.0 + seconds)


def message(sequence: int, *, session: int = 5, requests: int = 0, failed: int = 0) -> Telemetry:
    window = TelemetryWindow(model="m", release="r", row="local", requests=requests, failed=failed)
    return Telemetry(
        session=session, sequence=sequence, emulated=False, up_bytes_per_s=1e6, rtt_s=0.01, remote_usable=True,
        models=(window,), measured_at=at(sequence),
    )  # fmt: skip


def put(ring: DiskRing, count: int, *, worth: str = "idle", size: int = 100, first: int = 0) -> None:
    for number in range(first, first + count):
        ring.add(worth, f"{number}:".encode().ljust(size, b"x"), at(number))


def numbers(found: list[Entry]) -> list[int]:
    return [int(entry.payload.split(b":")[0]) for entry in found]


def test_flushed_entries_survive_in_order(tmp_path: Path) -> None:
    """Of several priorities, over several segments, read by the ring of another process."""
    ring = DiskRing(tmp_path)
    for number in range(3_000):
        ring.add(("idle", "busy", "trouble")[number % 3], f"{number}:".encode().ljust(90, b"x"), at(number))
    ring.flush(at(3_000))
    again = DiskRing(tmp_path)
    assert again.to_telemetry().messages == 3_000 and len(list(tmp_path.iterdir())) > 3
    taken: list[int] = []
    while batch := again.batch(5_000, 64):
        taken += numbers(batch)
        again.acknowledge(batch[-1].number)
    assert taken == list(range(3_000)) and again.is_empty and list(tmp_path.iterdir()) == []


def test_power_cut_loses_only_unflushed_entries(tmp_path: Path) -> None:
    """The card is written to at most once a minute."""
    ring = DiskRing(tmp_path)
    put(ring, 5)
    ring.flush(at(5))
    put(ring, 5, first=5)
    assert numbers(DiskRing(tmp_path).batch(10**6, 100)) == [0, 1, 2, 3, 4]
    assert numbers(ring.batch(10**6, 100)) == list(range(10))


@given(st.lists(st.binary(max_size=60), max_size=6), st.data())
def test_segment_is_read_up_to_its_first_damage(payloads: list[bytes], data: st.DataObject) -> None:
    """Every prefix, and a flipped byte anywhere, gives the entries before it and never one that was not written."""
    written = [Entry(number, 1.5, 2.5, 7, payload) for number, payload in enumerate(payloads, start=1)]
    raw = b"".join(entry.encoded() for entry in written)
    cut = data.draw(st.integers(0, len(raw)))
    assert list(parse_entries(raw[:cut])) == written[: len(list(parse_entries(raw[:cut])))]
    if raw:
        place = data.draw(st.integers(0, len(raw) - 1))
        spoilt = raw[:place] + bytes([raw[place] ^ 1 << data.draw(st.integers(0, 7))]) + raw[place + 1 :]
        assert list(parse_entries(spoilt)) == written[: len(list(parse_entries(spoilt)))]


def test_torn_tail_is_overwritten(tmp_path: Path) -> None:
    """A half-written entry after a power cut hides nothing that is written after it."""
    ring = DiskRing(tmp_path)
    put(ring, 3)
    ring.flush(at(3))
    (file,) = tmp_path.iterdir()
    with file.open("ab") as open_file:
        open_file.write(b"\0\0\0\x40 half an entry")
    again = DiskRing(tmp_path)
    put(again, 3, first=3)
    again.flush(at(6))
    assert again.to_telemetry().corrupt == 1 and numbers(DiskRing(tmp_path).batch(10**6, 100)) == list(range(6))


def test_foreign_and_empty_files_are_ignored(tmp_path: Path) -> None:
    """Neither foreign file names nor a segment without a readable entry do harm."""
    (tmp_path / "notes.txt").write_text("hello")
    (tmp_path / "000000000000000007.busy").write_bytes(b"garbage")
    ring = DiskRing(tmp_path)
    assert (
        ring.is_empty
        and ring.to_telemetry().corrupt == 1
        and [entry.name for entry in tmp_path.iterdir()] == ["notes.txt"]
    )


def test_full_ring_drops_idle_then_busy_then_error_entries(tmp_path: Path) -> None:
    """A8: the lowest class first, the oldest of it first, and drops are counted."""
    ring = DiskRing(tmp_path, quota_bytes=400_000)
    put(ring, 1_000, worth="trouble")
    put(ring, 1_000, worth="idle", first=1_000)
    put(ring, 1_000, worth="busy", first=2_000)
    put(ring, 2_000, worth="idle", first=3_000)
    ring.flush(at(5_000))
    seen = ring.to_telemetry()
    assert seen.bytes <= 400_000 + ring_module.BUFFER_BYTES
    assert seen.dropped_idle > 0 and (seen.dropped_busy, seen.dropped_failures) == (0, 0)
    put(ring, 3_000, worth="trouble", first=5_000)
    ring.flush(at(8_000))
    seen = ring.to_telemetry()
    assert (seen.dropped_idle, seen.dropped_busy) == (3_000, 1_000) and seen.dropped_failures > 0
    left = numbers(ring.batch(10**7, 10**5))
    assert left == sorted(left) and left[-1] == 7_999


def test_entries_age_by_the_monotonic_clock(tmp_path: Path) -> None:
    """A wall clock that jumps by fifty years ages nothing; nor does one that is set back."""
    ring = DiskRing(tmp_path, max_age_s=DAY)
    ring.add("busy", b"0:", DeviceTime(unix_s=100.0, boot_id="b", since_boot_s=10.0))  # before the clock was set
    ring.flush(DeviceTime(unix_s=NOW, boot_id="b", since_boot_s=60.0))
    assert ring.to_telemetry().messages == 1
    ring.flush(DeviceTime(unix_s=NOW + 90, boot_id="b", since_boot_s=10.0 + 2 * DAY))
    assert ring.to_telemetry() == BacklogState(dropped_busy=1)
    ring.add("busy", b"1:", at(0, boot="one"))
    ring.flush(at(DAY / 2, boot="two"))
    assert ring.to_telemetry().messages == 1
    ring.flush(at(2 * DAY, boot="two"))
    assert ring.to_telemetry().messages == 0
    assert age_s(at(0, "one"), at(-50, "two")) == 0.0


def test_failing_disk_costs_entries_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory stays bounded, idle entries go first, and the rest is written once there is room again."""
    ring = DiskRing(tmp_path / "late")
    real = os.write

    def full(descriptor: int, data: bytes) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "write", full)
    put(ring, 3_000, worth="idle", size=1_000)
    put(ring, 50, worth="trouble", size=1_000, first=3_000)
    ring.flush(at(3_050))
    seen = ring.to_telemetry()
    assert seen.bytes <= ring_module.MAX_BUFFER_BYTES and seen.dropped_idle > 2_000 and not seen.dropped_failures
    monkeypatch.setattr(os, "write", real)
    ring.flush(at(3_051))
    kept = numbers(DiskRing(tmp_path / "late").batch(10**7, 10**4))
    assert kept == sorted(kept) and kept[-50:] == list(range(3_000, 3_050))


@pytest.mark.parametrize(
    ("said", "worth"),
    [
        (message(1), "idle"),
        (message(1, requests=3), "busy"),
        (message(1, requests=3, failed=1), "trouble"),
        (Telemetry(
            session=1, sequence=1, emulated=False, up_bytes_per_s=1.0, rtt_s=0.0, remote_usable=True, models=(),
            power=PowerState(under_voltage=True),
        ), "trouble"),
    ],
)  # fmt: skip
def test_entry_priorities(said: Telemetry, worth: str) -> None:
    """Errors before requests before idling."""
    assert priority_of(said) == worth


class Wire:
    """A device's outbox, with a controller that can be there or not."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.now = 100.0
        self.outbox = Outbox(DiskRing(folder), lambda: at(self.now))
        self.stored: list[tuple[int, int]] = []

    def live(self, sequence: int, *, session: int = 5) -> None:
        one = message(sequence, session=session, requests=1)
        self.outbox.on_sent(one, messages.encode(one), self.now)

    def offline(self, sequence: int, *, session: int = 5) -> None:
        one = message(sequence, session=session, requests=1)
        self.outbox.on_unsent(one, messages.encode(one))

    def due(self) -> Backlog | None:
        late = self.outbox.next_batch(self.now, 0.5)
        return None if late is None else messages.decode(messages.encode(late), Backlog)

    def forward(self, *, answered: bool = True) -> None:
        """Send all that waits."""
        for _ in range(10_000):
            late = self.due()
            if late is None:
                if self.outbox.to_telemetry().messages == 0:
                    return
                self.now += 1.0
                continue
            self.stored += [(message.session, message.sequence) for message in late.messages]
            if answered:
                self.outbox.on_ack(Ack(batch=late.batch), self.now)
        raise AssertionError("it never ends")


def test_backlog_is_sent_in_order_after_reconnection(tmp_path: Path) -> None:
    """After a pause of its own, in batches, with what was in flight when the link went down."""
    wire = Wire(tmp_path)
    wire.live(0)
    wire.outbox.on_disconnected()
    for sequence in range(1, 300):
        wire.offline(sequence)
    wire.outbox.on_connected(wire.now, 0.5)
    assert wire.due() is None
    wire.now += SETTLE_S
    first = wire.due()
    assert first is not None and len(first.messages) <= BATCH_MESSAGES and wire.due() is None
    wire.outbox.on_ack(Ack(batch=first.batch), wire.now)
    wire.stored += [(message.session, message.sequence) for message in first.messages]
    wire.forward()
    assert wire.stored == [(5, sequence) for sequence in range(300)]


def test_acknowledged_messages_are_not_stored(tmp_path: Path) -> None:
    """A live message that was stored by the controller is not sent again when the link goes down."""
    wire = Wire(tmp_path)
    for sequence in range(10):
        wire.live(sequence)
    wire.outbox.on_ack(Ack(session=5, sequence=7), wire.now)
    wire.outbox.on_ack(Ack(session=4, sequence=10**6), wire.now)
    wire.outbox.on_disconnected()
    wire.now += SETTLE_S
    wire.forward()
    assert wire.stored == [(5, 8), (5, 9)]


def test_unacknowledged_live_messages_go_to_disk(tmp_path: Path) -> None:
    """With the broker up and the controller down, they are kept after a while, bounded in memory, and sent until they
    are stored."""
    wire = Wire(tmp_path)
    for sequence in range(MAX_UNACKED + 200):
        wire.live(sequence)
        wire.now += 2.0
    assert wire.outbox.to_telemetry().messages >= 200
    late = wire.due()
    assert late is not None and late.messages[0].sequence == 0
    wire.now += RESEND.first_s
    assert wire.due() is None  # nobody answered: it waits, longer each time
    wire.now += 60.0
    again = wire.due()
    assert again is not None and again.messages[0].sequence == 0 and again.batch != late.batch


def test_ack_of_another_batch_is_ignored(tmp_path: Path) -> None:
    """A late ack for a batch that was given up is not taken for the one in flight."""
    wire = Wire(tmp_path)
    for sequence in range(100):
        wire.offline(sequence)
    first = wire.due()
    assert first is not None
    wire.now += RESEND.first_s
    wire.due()
    wire.now += 60.0
    second = wire.due()
    assert second is not None
    wire.outbox.on_ack(Ack(batch=first.batch), wire.now)
    assert wire.outbox.to_telemetry().messages == 100
    wire.outbox.on_ack(Ack(batch=second.batch), wire.now)
    wire.forward()
    assert {sequence for _, sequence in wire.stored} == set(range(len(first.messages), 100))


def test_backlog_retries_back_off_with_jitter() -> None:
    """Ten thousand devices that a controller does not answer ask it more and more seldom."""
    pace, pauses = BatchSchedule(), []
    for _ in range(12):
        pace = pace.unacknowledged(0.0, 1.0)
        pauses.append(pace.next_at)
    assert pauses == sorted(pauses) and pauses[-1] == 600.0
    assert BatchSchedule().unacknowledged(0.0, 0.0).next_at == RESEND.first_s / 2
    assert pace.acknowledged(5.0, 8_192).next_at == pytest.approx(6.0) and pace.acknowledged(5.0, 1).tries == 0


def test_restart_resends_unacknowledged_entries(tmp_path: Path) -> None:
    """The controller stores an entry once; the device must only not lose it."""
    wire = Wire(tmp_path)
    for sequence in range(10):
        wire.offline(sequence)
    assert wire.due() is not None
    wire.outbox.flush(wire.now, at_once=True)
    after = Wire(tmp_path)
    after.forward()
    assert after.stored == [(5, sequence) for sequence in range(10)]


def test_batch_fits_into_one_message(tmp_path: Path) -> None:
    """Seeded sizes up to the largest telemetry that is allowed."""
    rng = random.Random(int(os.environ["EDGESPLIT_SEED"]))
    outbox = Outbox(DiskRing(tmp_path))
    for sequence in range(60):
        text = "x" * rng.choice([10, 300])
        windows = tuple(
            TelemetryWindow(model=f"m{n}", release="r" * 64, row=text[:ROW_NAME_CHARS], problem=text)
            for n in range(rng.choice([1, 20]))
        )
        one = Telemetry(
            session=1,
            sequence=sequence,
            emulated=False,
            up_bytes_per_s=1.0,
            rtt_s=0.0,
            remote_usable=True,
            models=windows,
        )
        outbox.on_unsent(one, messages.encode(one))
    seen = 0
    for now in range(0, 60 * 200, 100):  # a batch holds at least one of the 60, and two calls make one
        late = outbox.next_batch(now, 0.0)
        if late is not None:
            assert len(messages.encode(late)) < 100_000
            seen += len(late.messages)
            outbox.on_ack(Ack(batch=late.batch), now + 100.0)
    assert seen == 60


@pytest.mark.parametrize(
    ("connected", "changed", "since_s", "due"),
    [
        (True, False, 1.0, False), (True, False, 2.0, True), (True, True, 0.5, True),
        (False, False, 2.0, False), (False, True, 2.0, False), (False, True, 11.0, True), (False, False, 61.0, True),
    ],
)  # fmt: skip
def test_telemetry_interval_grows_without_a_link(connected: bool, changed: bool, since_s: float, due: bool) -> None:
    """Each message then covers all that happened since the previous one."""
    assert TelemetrySchedule().is_due(connected, changed, since_s) == due
