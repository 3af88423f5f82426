"""Fetching over MQTT with a wire that loses, doubles, cuts and forges."""

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


def test_metadata_comes_in_pieces_of_any_order() -> None:
    """B3: reordered and doubled pieces, and those of other requests and files, make the one file."""
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


def test_what_is_not_there_is_said_and_what_does_not_come_is_a_lost_link() -> None:
    """Two different things: one is an answer, the other may come later."""
    with pytest.raises(FileNotFoundError):
        metadata(lambda c: [(piece(0, b"", -1), c)]).fetch("metadata/a.json", 100)
    with pytest.raises(LinkError):
        metadata(lambda c: []).fetch("metadata/a.json", 100)


def test_endless_metadata_is_refused() -> None:
    """B8: more than allowed is not even collected; a lying piece beyond its total neither."""
    with pytest.raises(TrustError):
        metadata(lambda c: [(piece(0, b"x" * 200, 200), c)]).fetch("metadata/a.json", 100)
    with pytest.raises(LinkError):
        metadata(lambda c: [(piece(6, b"xxxx", 8), c), (piece(-2, b"xx", 8), c)]).fetch("metadata/a.json", 100)


def test_malformed_answers_are_dropped() -> None:
    """D13: what is no message raises nothing on the network's thread."""
    fetcher = metadata(lambda c: [])
    for raw in (b"", b"\xc1", os.urandom(100), b"\xdf" * 20):
        fetcher.on_message(raw, None)


@pytest.mark.parametrize(
    ("pieces", "total", "expected"),
    [({}, 0, b""), ({0: b"ab"}, 2, b"ab"), ({0: b"ab"}, 3, None), ({1: b"b"}, 2, None), ({0: b"a", 1: b"bc"}, 2, None)],
)
def test_joined(pieces: dict[int, bytes], total: int, expected: bytes | None) -> None:
    """Whole, or not at all."""
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


def test_all_chunks_come_once() -> None:
    """Each asked for once, and no topic left subscribed."""
    cloud = Cloud(lambda number, sha256, data: [data])
    cloud.fetch()
    assert cloud.kept == CHUNKS and cloud.sent == len(CHUNKS) + cloud.fetcher.counters.asked_again
    assert not cloud.wire.topics


def test_a_large_release_is_listened_for_a_bounded_way_ahead() -> None:
    """Never more topics than that, and all chunks come."""
    cloud = Cloud(lambda number, sha256, data: [data], listen_chunks=8)
    cloud.fetch()
    assert cloud.kept == CHUNKS
    assert cloud.wire.most_topics <= 2 * 8 and not cloud.wire.topics


@pytest.mark.parametrize("listened", [2, 8, 16, 39])
def test_chunks_beyond_what_was_listened_for_were_asked_for(listened: int) -> None:
    """They were published to nobody, and came a time-out later: a release larger than what is listened for at once."""
    cloud = Cloud(lambda number, sha256, data: [data], listen_chunks=listened)
    cloud.fetch()
    assert cloud.kept == CHUNKS
    assert cloud.unheard == 0


def test_lost_doubled_and_spoilt_chunks_are_asked_for_again() -> None:
    """B3, B4: every third is lost, every fifth corrupt, every seventh short, long and doubled: all arrive right."""

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


def test_a_stream_that_stops_is_a_lost_link_and_keeps_what_came() -> None:
    """The first ten came; the rest never does: LinkError, and what came is kept for the next try."""
    cloud = Cloud(lambda number, sha256, data: [data] if number <= 10 else [])
    with pytest.raises(LinkError):
        cloud.fetch()
    assert len(cloud.kept) == 10 and not cloud.wire.topics


def test_a_forged_stream_is_not_progress() -> None:
    """B4: bytes that are not what their name says are counted, never kept, and do not keep the fetch alive."""
    cloud = Cloud(lambda number, sha256, data: [b"forged!" + data[7:]])
    with pytest.raises(LinkError):
        cloud.fetch()
    assert not cloud.kept and cloud.fetcher.counters.refused > 0


def test_a_superseded_fetch_stops() -> None:
    """Something newer came: no LinkError, no more asking."""
    cloud = Cloud(lambda number, sha256, data: [])
    cloud.fetch(stop=lambda: True)
    assert not cloud.wire.asked


def test_chunks_nobody_asked_for_are_dropped() -> None:
    """A hostile publisher cannot fill the disk."""
    cloud = Cloud(lambda number, sha256, data: [data])
    cloud.fetcher.on_message(digest(b"mine"), b"mine")
    assert not cloud.kept and cloud.fetcher.counters.refused == 1
