"""Delivery: chunks shared by many devices, bounded floods, dropped garbage, statements republished after a
reconnection."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgesplit.errors import LinkError, MalformedMessage
from edgesplit.limits import LIMITS
from edgesplit.mqtt import messages
from edgesplit_controller.messaging.chunk_queue import CROWD
from edgesplit_controller.messaging.delivery import (
    PIECE_BYTES,
    WAITING_PER_DEVICE,
    Delivery,
    Inbox,
    Sources,
    check_chunk_request,
    pieces,
)

PATIENCE_S = 20.0
A, B = "a" * 64, "b" * 64


def test_a_repeated_request_keeps_its_place_and_is_answered_once() -> None:
    """The newest request is answered; another file, or another device, is a request of its own."""
    inbox, wish, other = Inbox(), *map(messages.FetchMetadata, ("metadata/timestamp.json", "metadata/2.root.json"))
    for device, asked, correlation in (
        ("a", wish, b"1"), ("b", wish, b"2"), ("a", wish, b"3"), ("a", other, b"4"),
    ):  # fmt: skip
        assert inbox.put(device, asked, correlation)

    batch = inbox.take(10)
    assert batch is not None and [(device, correlation) for device, _, correlation in batch] == [
        ("a", b"3"), ("b", b"2"), ("a", b"4"),
    ]  # fmt: skip
    inbox.put("a", wish, b"5")
    again = inbox.take(10)
    assert again is not None and again[0][2] == b"5"


def test_the_inbox_is_bounded_per_device() -> None:
    """A flood drops only the flooding device's messages."""
    inbox = Inbox()
    wish = messages.FetchChunks.from_indexes(A, [1])
    taken = [inbox.put("flood", wish) for _ in range(WAITING_PER_DEVICE + 10)]
    assert taken.count(False) == 10 and inbox.put("quiet", wish)
    first = inbox.take(100)
    assert first is not None and len(first) == 100 and inbox.put("flood", wish)
    inbox.close()
    rest = inbox.take(10_000)
    assert rest is not None and len(rest) == WAITING_PER_DEVICE - 100 + 2
    assert inbox.take(1) is None


@pytest.mark.parametrize("size", [0, 1, PIECE_BYTES, PIECE_BYTES + 1, 3 * PIECE_BYTES])
def test_a_metadata_file_is_sent_in_ordered_parts(size: int) -> None:
    """In order, without gap, each small enough; a missing file is one part that reports it."""
    data = bytes(range(256)) * (size // 256) + b"x" * (size % 256)
    made = pieces("p", data)
    assert b"".join(piece.data for piece in made) == data
    assert all(len(messages.encode(piece)) < LIMITS.message_bytes and piece.total == size for piece in made)
    assert [piece.total for piece in pieces("p", None)] == [-1]


def test_requests_outside_a_known_release_are_malformed() -> None:
    """Chunks of other releases, and too many at once."""
    listed = tuple(f"{place:064x}" for place in range(1000))

    def chunks_of(release: str) -> tuple[str, ...]:
        return listed if release == A else ()

    assert check_chunk_request(messages.FetchChunks.from_indexes(A, [999, 0, 17]), chunks_of) == (
        listed[0],
        listed[17],
        listed[999],
    )
    for wish in (
        messages.FetchChunks.from_indexes(B, [0]),
        messages.FetchChunks.from_indexes(A, [1000]),
        messages.FetchChunks.from_indexes("../x", [0]),
        messages.FetchChunks(A, 0, b"\x00\x00"),
        messages.FetchChunks.from_indexes(A, range(LIMITS.fetch_window_chunks + 1)),
    ):
        with pytest.raises(MalformedMessage):
            check_chunk_request(wish, chunks_of)


@given(st.sets(st.integers(0, 8 * LIMITS.bitmap_bytes - 1), min_size=1, max_size=LIMITS.fetch_window_chunks))
def test_a_chunk_request_round_trips_its_chunk_numbers(places: set[int]) -> None:
    """Any few places of any list; always within the limits of a request."""
    raw = messages.encode(messages.FetchChunks.from_indexes(A, places))
    assert len(raw) <= LIMITS.request_bytes
    assert messages.decode(raw, messages.FetchChunks, LIMITS.request_bytes).indexes == sorted(places)


def test_requests_are_small() -> None:
    """Sixteen neighbours cost two bytes beyond the release's name; gaps all over a slice of 2 GiB two kilobytes."""
    neighbours = messages.encode(messages.FetchChunks.from_indexes(A, range(5_000, 5_016)))
    gaps = messages.encode(messages.FetchChunks.from_indexes(A, range(0, 2**31 // LIMITS.chunk_bytes, 64)))
    assert len(neighbours) < 128 and len(gaps) < 2_200


@given(st.binary(max_size=LIMITS.request_bytes))
def test_a_decoded_request_names_at_most_one_window(raw: bytes) -> None:
    """Any bytes decode to few places or are malformed."""
    try:
        wish = messages.decode(raw, messages.FetchChunks, LIMITS.request_bytes)
        assert 0 < len(wish.indexes) <= LIMITS.fetch_window_chunks
    except MalformedMessage:
        pass


class Channel:
    """Takes what is published; can be cut."""

    def __init__(self) -> None:
        self.sent: queue.Queue[tuple[str, bytes, bool, bytes | None]] = queue.Queue()
        self.cut = False
        self.failed = threading.Event()

    def publish(
        self,
        topic: str,
        payload: bytes,
        *,
        qos: int = 0,
        retain: bool = False,
        correlation: bytes | None = None,
        wait_s: float | None = None,
    ) -> bool:
        """Keep it, or LinkError."""
        if self.cut:
            self.failed.set()
            raise LinkError("cut")
        self.sent.put((topic, payload, retain, correlation))
        return True

    def next(self) -> tuple[str, bytes, bool, bytes | None]:
        return self.sent.get(timeout=PATIENCE_S)


class DeliveryHarness:
    """A delivery with a release of one chunk."""

    def __init__(self) -> None:
        self.heard: queue.Queue[tuple[str, messages.Message]] = queue.Queue()
        self.told = {"cam": b"signed"}
        self.channel = Channel()
        self.delivery = Delivery(
            Sources(
                metadata=self.metadata,
                chunk=lambda sha256: b"weights",
                release_chunks=lambda release: (B,) if release == A else (),
                ingest=lambda batch: [self.heard.put(message) for message in batch] and None,
                statements=lambda names: {n: s for n, s in self.told.items() if names is None or n in names},
            )
        )
        self.delivery.start(self.channel)

    @staticmethod
    def metadata(path: str) -> bytes:
        if path != "metadata/timestamp.json":
            raise FileNotFoundError(path)
        return b"{}"

    def say(self, kind: messages.TopicKind, payload: bytes, correlation: bytes | None = None) -> None:
        self.delivery.on_message(messages.topic("cam", kind), payload, correlation)


@pytest.fixture
def bench() -> Iterator[DeliveryHarness]:
    made = DeliveryHarness()
    yield made
    made.delivery.stop()


def test_metadata_answers_carry_the_correlation_data(bench: DeliveryHarness) -> None:
    """For an existing file, a missing one, and an invalid path."""
    for path, total in (("metadata/timestamp.json", 2), ("metadata/9.root.json", -1), ("targets/../../ca.key", -1)):
        bench.say("fetch", messages.encode(messages.FetchMetadata(path)), path.encode())
        topic, raw, retained, correlation = bench.channel.next()
        piece = messages.decode(raw, messages.FetchReply)
        assert (topic, piece.total, retained) == (messages.topic("cam", "fetch_reply"), total, False)
        assert correlation == path.encode()


def test_a_fetch_publishes_chunks_and_marks_the_device_alive(bench: DeliveryHarness) -> None:
    """A chunk goes out on its own topic."""
    bench.say("fetch", messages.encode(messages.FetchChunks.from_indexes(A, [0])))
    assert bench.channel.next()[:2] == (messages.chunk_topic(B), b"weights")
    assert bench.heard.get(timeout=PATIENCE_S) == ("cam", messages.FetchChunks.from_indexes(A, [0]))
    bench.say("fetch", messages.encode(messages.FetchChunks.from_indexes(A, [1])))
    bench.say("fetch", messages.encode(messages.FetchChunks.from_indexes(A, [0])))
    assert bench.channel.next()[0] == messages.chunk_topic(B)
    assert bench.delivery.dropped["cam"] == 1


def test_a_late_request_is_answered_on_the_devices_own_topic(bench: DeliveryHarness) -> None:
    """Under the chunk's digest; an agent that does not know that topic gets the shared copy."""
    wish = messages.encode(messages.FetchChunks.from_indexes(A, [0]))
    for number in range(CROWD + 2):
        bench.delivery.on_message(messages.topic(f"cam-{number}", "fetch"), wish, None)
    assert bench.channel.next()[0] == messages.chunk_topic(B)
    bench.delivery.on_message(messages.topic("late", "fetch"), wish, None)
    assert bench.channel.next() == (messages.topic("late", "fetch_reply"), b"weights", False, bytes.fromhex(B))


def test_statements_are_republished_after_a_reconnection(bench: DeliveryHarness) -> None:
    """The broker may have lost its retained messages."""
    bench.delivery.on_connect()
    assert bench.channel.next() == (messages.topic("cam", "desired"), b"signed", True, None)
    bench.told["cam"] = b"newer"
    bench.delivery.on_connect()
    assert bench.channel.next()[1] == b"newer"


def test_a_failed_statement_publish_is_retried(bench: DeliveryHarness) -> None:
    """A link that fails in the middle delays statements, whether a new connection is made or not."""
    bench.channel.cut = True
    bench.delivery.clear_retained(["gone"])
    bench.delivery.publish_statements(["cam"])
    assert bench.channel.failed.wait(PATIENCE_S)
    bench.channel.cut = False
    assert [bench.channel.next()[:2] for _ in range(4)][-1] == (messages.topic("cam", "desired"), b"signed")


def test_a_deleted_device_leaves_no_retained_messages(bench: DeliveryHarness) -> None:
    """Every retained topic of the device is cleared, then its statement is published."""
    bench.delivery.clear_retained(["cam"])
    bench.delivery.publish_statements(["cam"])
    cleared = [bench.channel.next() for _ in range(3)]
    assert {topic.rpartition("/")[2] for topic, payload, retained, _ in cleared if not payload and retained} == {
        "desired",
        "birth",
        "reported",
    }
    assert bench.channel.next()[1] == b"signed"


@given(st.binary(max_size=400), st.sampled_from(["birth", "reported", "telemetry", "fetch", "desired", "strange"]))
def test_no_device_message_raises_in_the_network_thread(payload: bytes, kind: str) -> None:
    """Every message is handled, answered or counted as malformed."""
    delivery = Delivery(
        Sources(lambda path: b"", lambda sha256: b"", lambda digest: (), lambda batch: None, lambda names: {})
    )
    delivery.on_message(f"edgesplit/v1/cam/{kind}", payload, None)
    delivery.on_message(kind, payload, None)
    delivery.on_message(messages.topic("cam", "birth"), b"\xff" * (LIMITS.message_bytes + 1), None)
    assert delivery.dropped["cam"] >= 1
