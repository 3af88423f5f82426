"""Flood control: a token bucket for each device, and the block of one that empties it. The clock is manual."""

from __future__ import annotations

import threading
from collections.abc import Callable
from itertools import pairwise

import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from edgesplit.limits import LIMITS
from edgesplit.mqtt import messages
from edgesplit_cli.main import cli
from edgesplit_controller.fleet.devices import QUARANTINE, quarantine_s
from edgesplit_controller.messaging.broker import parse_accepted_client
from edgesplit_controller.messaging.broker_traffic import parse_peer
from edgesplit_controller.messaging.chunk_queue import WAITING_CHUNKS_PER_DEVICE, ChunkQueue
from edgesplit_controller.messaging.delivery import Delivery, Sources
from edgesplit_controller.messaging.flood_control import (
    CAPACITY,
    MESSAGE_UNITS,
    REMEMBERED_REQUESTS,
    REPEAT_WINDOW_S,
    REPEATED_CHUNK_UNITS,
    REPORT_EVERY_S,
    UNITS_PER_S,
    TokenBuckets,
)

PATIENCE_S = 20.0
FIVE_MINUTES = 300


def test_the_fastest_regular_fetch_is_not_a_flood() -> None:
    """A device on a local network that asks 800 times a second for minutes, and loses one chunk in twenty."""
    buckets = TokenBuckets()
    for step in range(FIVE_MINUTES * 800):
        now = step / 800
        buckets.consume("cam", MESSAGE_UNITS["fetch"] + 250 / 4_096, now)
        if step % 20 == 0:
            buckets.consume("cam", REPEATED_CHUNK_UNITS, now)
    assert not buckets.is_limited("cam")


def test_regular_agent_traffic_is_not_a_flood() -> None:
    """Everything an agent does at its busiest, on a link that breaks four times a second."""
    buckets = TokenBuckets()
    for step in range(FIVE_MINUTES * 4):
        buckets.consume("cam", 100.0 + 1.0 + 1.0 + 1.0, step / 4)
    assert not buckets.is_limited("cam")


def test_a_sustained_flood_is_reported_periodically_until_it_ends() -> None:
    """At ten times the rate: reported when the token bucket is empty, then every few seconds; over when the bucket is
    half full."""
    buckets = TokenBuckets()
    told = [step / 10_000 for step in range(200_000) if buckets.consume("cam", 1.0, step / 10_000)]
    assert buckets.is_limited("cam") and told[0] == pytest.approx(CAPACITY / 9_000, rel=0.01)
    assert all(later - sooner >= REPORT_EVERY_S for sooner, later in pairwise(told))
    buckets.consume("cam", 0.0, 20.0 + CAPACITY / 2 / UNITS_PER_S + 0.1)
    assert not buckets.is_limited("cam")


def test_token_buckets_are_per_device() -> None:
    """Only buckets that are not full are kept in memory."""
    buckets = TokenBuckets()
    for _ in range(20_000):
        buckets.consume("bad", 1.0, 1.0)
    buckets.consume("good", 1.0, 1.0)
    assert buckets.is_limited("bad") and not buckets.is_limited("good")
    buckets.consume("another", 1.0, 1_000.0)
    assert set(buckets.buckets) == {"another"}


def test_repeated_chunk_requests_are_charged_and_expire() -> None:
    """A chunk that the device requested a moment ago costs it extra; one requested long ago or by another device does
    not; memory is bounded."""
    buckets = TokenBuckets()
    assert buckets.count_repeated("cam", ("a", "b"), 0.0) == 0
    assert buckets.count_repeated("cam", ("b", "c"), 1.0) == 1
    assert buckets.count_repeated("other", ("b",), 1.0) == 0
    assert buckets.count_repeated("cam", ("b",), 1.5 + REPEAT_WINDOW_S) == 0
    buckets.count_repeated("cam", tuple(map(str, range(REMEMBERED_REQUESTS + 10))), 2.0)
    assert buckets.count_repeated("cam", ("10",), 2.0) == 1
    assert buckets.count_repeated("cam", ("9",), 2.0) == 0


@given(st.lists(st.tuples(st.sampled_from("ab"), st.floats(0, 1e9), st.floats(0, 1e6)), max_size=60))
def test_a_token_bucket_stays_between_zero_and_its_capacity(spent: list[tuple[str, float, float]]) -> None:
    """Whatever is spent at whatever time."""
    buckets, now = TokenBuckets(), 0.0
    for device, units, later in spent:
        now += later
        buckets.consume(device, units, now)
        assert all(0.0 <= bucket.units <= CAPACITY for bucket in buckets.buckets.values())


def test_the_chunk_queue_is_bounded_per_device() -> None:
    """A device that requests everything at once has its share of the queue; another device's few chunks find room and
    are sent."""
    chunks = ChunkQueue()
    refused = sum(chunks.request("bad", "r", (f"{n}",), now=1.0) for n in range(10_000))
    assert refused == 10_000 - WAITING_CHUNKS_PER_DEVICE
    assert chunks.request("good", "s", ("x", "y"), now=1.0) == 0
    assert {"x", "y"} <= {chunk.sha256 for chunk in chunks.take(2.0)}
    assert chunks.request("bad", "r", ("again",), now=3.0) == 0


class FloodedDelivery:
    """A delivery whose network thread is the test."""

    def __init__(self, hear: Callable[[list[tuple[str, messages.Message]]], None]) -> None:
        self.told: list[str] = []
        self.was_told = threading.Event()
        self.delivery = Delivery(
            Sources(
                metadata=lambda path: b"x" * 400_000,
                chunk=lambda digest: b"",
                release_chunks=lambda release: ["c" * 64],
                ingest=hear,
                statements=lambda devices: {},
                on_flood=self._flooding,
            )
        )
        self.delivery.start(self)

    def _flooding(self, device: str, dropped: int, unseen_bytes: int) -> None:
        self.told.append(device)
        self.unseen_bytes = unseen_bytes
        self.was_told.set()

    def publish(self, *_: object, **__: object) -> bool:
        return True

    def send(self, device: str, kind: messages.TopicKind, raw: bytes, times: int = 1) -> None:
        for _ in range(times):
            self.delivery.on_message(messages.topic(device, kind), raw, b"c")


@pytest.fixture()
def ingested() -> list[tuple[str, messages.Message]]:
    return []


@pytest.fixture()
def flooded(ingested: list[tuple[str, messages.Message]]) -> FloodedDelivery:
    return FloodedDelivery(ingested.extend)


TELEMETRY = messages.encode(
    messages.Telemetry(session=1, sequence=1, emulated=True, up_bytes_per_s=1, rtt_s=1, remote_usable=True, models=())
)
FLOODS = {
    "telemetry": ("telemetry", TELEMETRY, 40_000),
    "huge payloads": ("telemetry", b"\xc1" * LIMITS.message_bytes, 1_000),
    "garbage": ("birth", b"\xc1garbage", 5_000),
    "nothing": ("birth", b"", 40_000),
    "metadata": ("fetch", messages.encode(messages.FetchMetadata("metadata/1.targets.json")), 60_000),
    "the same chunk": ("fetch", messages.encode(messages.FetchChunks.from_indexes("b" * 64, [0])), 60_000),
}


@pytest.mark.parametrize(("kind", "raw", "times"), FLOODS.values(), ids=FLOODS.keys())
def test_each_kind_of_flood_is_detected_and_dropped(
    flooded: FloodedDelivery, kind: messages.TopicKind, raw: bytes, times: int
) -> None:
    """Small messages, large ones, malformed ones, empty ones, and large requests: reported, then dropped undecoded."""
    flooded.send("bad", kind, raw, times)
    assert flooded.was_told.wait(PATIENCE_S)
    assert flooded.told[0] == "bad" and flooded.delivery.dropped["bad"] > 0
    flooded.send("good", "telemetry", TELEMETRY)
    assert flooded.delivery.dropped["good"] == 0
    flooded.delivery.stop()


def test_reconnecting_in_a_loop_is_a_flood(flooded: FloodedDelivery) -> None:
    """Each handshake costs the broker: a hundred in a moment are no reconnection."""
    for _ in range(150):
        flooded.delivery.on_client_connected("bad")
    assert flooded.was_told.wait(PATIENCE_S) and flooded.told == ["bad"]
    flooded.delivery.stop()


def test_the_brokers_log_line_for_a_client_is_parsed() -> None:
    """The line of mosquitto 2 that names an admitted client, and none that only looks like it."""
    for kind, address in (("client", "127.0.0.1"), ("bridge", "2001:db8::7")):  # a device may set the bridge's bit
        line = f"New {kind} connected from {address}:40952 as cam-1 (p5, c1, k30, u'cam-1')."
        assert parse_accepted_client(line) == ("cam-1", parse_peer(address, "40952"))
    assert parse_accepted_client("Client x New client connected from 1.2.3.4:1 as cam-1 (") is None


def test_bytes_that_the_controller_never_received_are_a_flood(flooded: FloodedDelivery) -> None:
    """Reported at once, with their number; the device's messages are dropped as in any other flood."""
    flooded.delivery.on_unseen_flood("bad", 3_000_000)
    assert flooded.was_told.wait(PATIENCE_S)
    assert flooded.told == ["bad"] and flooded.unseen_bytes == 3_000_000
    flooded.send("bad", "telemetry", TELEMETRY)
    assert flooded.delivery.dropped["bad"] == 1
    flooded.delivery.stop()


def test_one_unstorable_message_does_not_lose_the_batch() -> None:
    """A batch that cannot be stored is retried message by message: only the unstorable one is lost."""
    kept: list[str] = []
    both = threading.Event()

    def hear(said: list[tuple[str, messages.Message]]) -> None:
        if any(device == "bad" for device, _ in said):
            raise OverflowError("too large for the database")
        kept.extend(device for device, _ in said)
        if len(kept) == 2:
            both.set()

    flooded = FloodedDelivery(hear)
    for device in ("good", "bad", "other"):
        flooded.send(device, "telemetry", TELEMETRY)
    assert both.wait(PATIENCE_S) and sorted(kept) == ["good", "other"]
    flooded.delivery.stop()


@pytest.mark.parametrize(
    ("times", "seconds"),
    [(1, QUARANTINE.first_s), (2, 2 * QUARANTINE.first_s), (4, 8 * QUARANTINE.first_s), (99, QUARANTINE.longest_s)],
)
def test_the_block_doubles_for_repeated_floods(times: int, seconds: float) -> None:
    """Up to an hour."""
    assert quarantine_s(times) == seconds


def test_device_texts_are_escaped_on_the_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """Escape sequences and markup in a hostile device's texts are printed as letters."""
    evil = "\x1b]0;owned\x07[red]\x9b31m[/nonsense]"
    told = {
        "name": "bad", "state": "online", "device_class": "pi4", "link": "", "group": "", "labels": {},
        "copied": 1.0, "local_url": evil, "session": 1, "last_seen": 1.0, "emulated": False,
        "flooded": {"at": 1.0, "times": 3, "dropped": 9, "held_until": 2.0},
        "models": [{"model": evil, "state": "running", "release": "r", "desired_release": "r", "detail": evil}],
        "telemetry": {"models": [], "up_bytes_per_s": 1.0, "rtt_s": 0.1},
    }  # fmt: skip

    class DeviceApi:
        def get(self, path: str) -> object:
            return told if path.endswith("/bad") else [told]

        def get_all(self, path: str, **asked: object) -> list[object]:
            return [told]

    monkeypatch.setattr("edgesplit_cli.commands.device.connect", lambda data: DeviceApi())
    for words in (["show", "bad"], ["list"]):
        shown = CliRunner().invoke(cli, ["device", *words], catch_exceptions=False).output
        assert "\x1b]" not in shown and "\x07" not in shown and "\x9b" not in shown
        assert "[/nonsense]" in shown.replace("\n", "") or words == ["list"]
    shown = CliRunner().invoke(cli, ["device", "show", "bad"]).output
    assert "it flooded the broker (3 times" in shown and "edgectl device revoke bad" in shown
