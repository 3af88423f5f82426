"""Fetching over MQTT through a transport that loses, duplicates, truncates and forges messages."""

from __future__ import annotations

import hashlib
import itertools
import os
from collections.abc import Callable, Sequence

import pytest

from edgesplit.errors import LinkError, TrustError
from edgesplit.limits import LIMITS
from edgesplit.mqtt import messages
from edgesplit_agent.control.fetcher import ChunkFetcher, MetadataFetcher, joined_pieces

QUICK = (0.2, 0.2, 0.2)


def digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


class FakeWire:
    """Hands each published fetch to the test's controller, which answers at once: what happens, and in which order,
    hangs on nobody's scheduling."""

    def __init__(self, answer: Callable[[messages.Message, bytes | None], None]) -> None:
        self.answer = answer
        self.asked: list[messages.Message] = []
        self.topics: set[str] = set()
        self.most_topics = 0

    def publish(
        self, topic: str, payload: bytes, *, qos: int = 0, retain: bool = False, correlation: bytes | None = None
    ) -> bool:
        assert topic == "edgesplit/v1/cam/fetch"
        wish = messages.decode(payload, messages.FetchMetadata | messages.FetchChunks)  # type: ignore[arg-type]
        self.asked.append(wish)
        self.answer(wish, correlation)
        return True

    def subscribe(self, topics: Sequence[str], qos: int = 1) -> None:
        self.topics |= set(topics)
        self.most_topics = max(self.most_topics, len(self.topics))

    def unsubscribe(self, topics: Sequence[str]) -> None:
        self.topics -= set(topics)


def metadata(pieces: Callable[[bytes | None], list[tuple[messages.FetchReply, bytes | None]]]) -> MetadataFetcher:
    def answer(wish: messages.Message, correlation: bytes | None) -> None:
        for piece, under in pieces(correlation):
            fetcher.on_message(messages.encode(piece), under)

    wire = FakeWire(answer)
    fetcher = MetadataFetcher(wire, "cam", QUICK)
    return fetcher


def piece(offset: int, data: bytes, total: int, path: str = "metadata/a.json") -> messages.FetchReply:
    return messages.FetchReply(path=path, offset=offset, total=total, data=data)


def test_metadata_pieces_may_arrive_in_any_order() -> None:
    """B3: reordered and duplicated pieces give the one file, and pieces of other requests and files are ignored."""
    fetcher = metadata(
        lambda c: [
            (piece(4, b"5678", 8), c),
            (piece(0, b"xxxx", 8), b"another request"),
            (piece(0, b"yyyy", 8, "metadata/b.json"), c),
            (piece(4, b"5678", 8), c),
            (piece(0, b"1234", 8), c),
        ]
    )
    assert fetcher.fetch("metadata/a.json", 100) == b"12345678"


def test_missing_file_and_lost_link_are_told_apart() -> None:
    """ "Not found" is an answer; silence is a link error, and a retry may succeed."""
    with pytest.raises(FileNotFoundError):
        metadata(lambda c: [(piece(0, b"", -1), c)]).fetch("metadata/a.json", 100)
    with pytest.raises(LinkError):
        metadata(lambda c: []).fetch("metadata/a.json", 100)


def test_oversized_metadata_is_refused() -> None:
    """B8: more than the allowed size is not collected, nor is a piece that lies beyond its own total."""
    with pytest.raises(TrustError):
        metadata(lambda c: [(piece(0, b"x" * 200, 200), c)]).fetch("metadata/a.json", 100)
    with pytest.raises(LinkError):
        metadata(lambda c: [(piece(6, b"xxxx", 8), c), (piece(-2, b"xx", 8), c)]).fetch("metadata/a.json", 100)


def test_malformed_answers_are_dropped() -> None:
    """D13: bytes that are no message raise nothing on the network thread."""
    fetcher = metadata(lambda c: [])
    for raw in (b"", b"\xc1", os.urandom(100), b"\xdf" * 20):
        fetcher.on_message(raw, None)


@pytest.mark.parametrize(
    ("pieces", "total", "expected"),
    [({}, 0, b""), ({0: b"ab"}, 2, b"ab"), ({0: b"ab"}, 3, None), ({1: b"b"}, 2, None), ({0: b"a", 1: b"bc"}, 2, None)],
)
def test_joined_pieces_are_complete_or_none(pieces: dict[int, bytes], total: int, expected: bytes | None) -> None:
    """Pieces join to the whole file, or to nothing."""
    assert joined_pieces(pieces, total) == expected


CHUNKS = {digest(data): data for data in (bytes([number]) * 60_000 for number in range(40))}
SIZES = {sha256: len(data) for sha256, data in CHUNKS.items()}


class Cloud:
    """Publishes chunks, as twisted as a test wants."""

    def __init__(self, twist: Callable[[int, str, bytes], list[bytes]], listen_chunks: int = 512) -> None:
        self.twist = twist
        self.sent = 0
        self.unheard = 0
        self.kept: dict[str, bytes] = {}
        self.wire = FakeWire(self._answer)
        clock = itertools.count(0.0, 0.5)  # half a second passes at each look, so that nobody's patience is waited out
        self.fetcher = ChunkFetcher(
            self.wire, "cam", listen_chunks=listen_chunks, look_s=0.001, clock=lambda: next(clock)
        )

    def fetch(self, stop: Callable[[], bool] = lambda: False) -> None:
        self.fetcher.fetch("r" * 64, SIZES, tuple(SIZES), self.kept.update, stop)

    def _answer(self, wish: messages.Message, correlation: bytes | None) -> None:
        assert isinstance(wish, messages.FetchChunks) and len(wish.indexes) <= LIMITS.fetch_window_chunks
        for sha256 in (tuple(SIZES)[place] for place in wish.indexes):
            self.sent += 1
            if messages.chunk_topic(sha256) not in self.wire.topics:
                self.unheard += 1  # published, and nobody there to hear it
                continue
            for payload in self.twist(self.sent, sha256, CHUNKS[sha256]):
                self.fetcher.on_message(sha256, payload)


def test_each_chunk_is_requested_once() -> None:
    """And no topic stays subscribed afterwards."""
    cloud = Cloud(lambda number, sha256, data: [data])
    cloud.fetch()
    assert cloud.kept == CHUNKS and cloud.sent == len(CHUNKS) + cloud.fetcher.counters.asked_again
    assert not cloud.wire.topics


def test_subscriptions_ahead_are_bounded() -> None:
    """A large release never holds more topic subscriptions than the bound, and all chunks arrive."""
    cloud = Cloud(lambda number, sha256, data: [data], listen_chunks=8)
    cloud.fetch()
    assert cloud.kept == CHUNKS
    assert cloud.wire.most_topics <= 2 * 8 and not cloud.wire.topics


@pytest.mark.parametrize("listened", [2, 8, 16, 39])
def test_chunks_without_a_subscription_were_requested(listened: int) -> None:
    """In a release larger than the subscription bound, chunks were requested before their topic was subscribed: they
    were published to no subscriber and arrived only after a timeout."""
    cloud = Cloud(lambda number, sha256, data: [data], listen_chunks=listened)
    cloud.fetch()
    assert cloud.kept == CHUNKS
    assert cloud.unheard == 0


def test_lost_duplicated_and_corrupt_chunks_are_requested_again() -> None:
    """B3, B4: every third chunk is lost, every fifth corrupt, every seventh truncated, too long and duplicated: all
    arrive intact."""

    def twist(number: int, sha256: str, data: bytes) -> list[bytes]:
        if number % 3 == 0:
            return []
        if number % 5 == 0:
            return [b"\x00" + data[1:] + b"!"]
        return [data[:-1], data + b"x", data, data] if number % 7 == 0 else [data]

    cloud = Cloud(twist)
    cloud.fetch()
    assert cloud.kept == CHUNKS
    assert cloud.fetcher.counters.refused > 0 and cloud.fetcher.counters.asked_again > 0


def test_stream_that_stops_is_a_link_error_and_keeps_received_chunks() -> None:
    """Ten chunks arrive and the rest never does: LinkError, and the ten are kept for the next attempt."""
    cloud = Cloud(lambda number, sha256, data: [data] if number <= 10 else [])
    with pytest.raises(LinkError):
        cloud.fetch()
    assert len(cloud.kept) == 10 and not cloud.wire.topics


def test_forged_chunks_are_not_progress() -> None:
    """B4: bytes that do not match their digest are counted, never stored, and do not extend the timeout."""
    cloud = Cloud(lambda number, sha256, data: [b"forged!" + data[7:]])
    with pytest.raises(LinkError):
        cloud.fetch()
    assert not cloud.kept and cloud.fetcher.counters.refused > 0


def test_superseded_fetch_stops() -> None:
    """A newer statement arrived: no LinkError, and no further requests."""
    cloud = Cloud(lambda number, sha256, data: [])
    cloud.fetch(stop=lambda: True)
    assert not cloud.wire.asked


def test_unsolicited_chunks_are_dropped() -> None:
    """A hostile publisher cannot fill the disk."""
    cloud = Cloud(lambda number, sha256, data: [data])
    cloud.fetcher.on_message(digest(b"mine"), b"mine")
    assert not cloud.kept and cloud.fetcher.counters.refused == 1
