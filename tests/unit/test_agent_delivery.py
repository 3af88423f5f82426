"""Fetching over MQTT with a wire that loses, doubles, cuts and forges; and the chunk store beneath it."""

from __future__ import annotations

import hashlib
import itertools
import os
import shutil
import threading
from collections import namedtuple
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from edgesplit import messages, release
from edgesplit.errors import EdgeError, LinkError, MalformedMessage, TrustError
from edgesplit.limits import LIMITS
from edgesplit_agent.chunks import ChunkStore
from edgesplit_agent.delivery import ChunkFetcher, MetadataFetcher, joined
from trust_world import sample_release

QUICK = (0.2, 0.2, 0.2)


def digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


class FakeWire:
    """Hands each published fetch to the test's controller, on a thread as the network would."""

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
        threading.Thread(target=self.answer, args=(wish, correlation), daemon=True).start()
        return True

    def subscribe(self, topics: Sequence[str], qos: int = 1) -> None:
        self.topics |= set(topics)
        self.most_topics = max(self.most_topics, len(self.topics))

    def unsubscribe(self, topics: Sequence[str]) -> None:
        self.topics -= set(topics)


def metadata(pieces: Callable[[bytes | None], list[tuple[messages.Fetched, bytes | None]]]) -> MetadataFetcher:
    def answer(wish: messages.Message, correlation: bytes | None) -> None:
        for piece, under in pieces(correlation):
            fetcher.received(messages.encode(piece), under)

    wire = FakeWire(answer)
    fetcher = MetadataFetcher(wire, "cam", QUICK)
    return fetcher


def piece(offset: int, data: bytes, total: int, path: str = "metadata/a.json") -> messages.Fetched:
    return messages.Fetched(path=path, offset=offset, total=total, data=data)


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
        fetcher.received(raw, None)


@pytest.mark.parametrize(
    ("pieces", "total", "expected"),
    [({}, 0, b""), ({0: b"ab"}, 2, b"ab"), ({0: b"ab"}, 3, None), ({1: b"b"}, 2, None), ({0: b"a", 1: b"bc"}, 2, None)],
)
def test_joined(pieces: dict[int, bytes], total: int, expected: bytes | None) -> None:
    """Whole, or not at all."""
    assert joined(pieces, total) == expected


CHUNKS = {digest(data): data for data in (bytes([number]) * 60_000 for number in range(40))}
SIZES = {sha256: len(data) for sha256, data in CHUNKS.items()}


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Looks follow each other closely; the clock above says how much time has passed."""
    monkeypatch.setattr("edgesplit_agent.delivery.LOOK_S", 0.001)


class Cloud:
    """Publishes chunks, as twisted as a test wants."""

    def __init__(self, twist: Callable[[int, str, bytes], list[bytes]]) -> None:
        self.twist = twist
        self.sent = 0
        self.unheard = 0
        self.kept: dict[str, bytes] = {}
        self.wire = FakeWire(self._answer)
        clock = itertools.count(0.0, 0.5)  # half a second passes at each look, so that nobody's patience is waited out
        self.fetcher = ChunkFetcher(self.wire, "cam", self.kept.update, clock=lambda: next(clock))

    def _answer(self, wish: messages.Message, correlation: bytes | None) -> None:
        assert isinstance(wish, messages.FetchChunks) and len(wish.chunks) <= LIMITS.window_chunks
        for sha256 in wish.chunks:
            self.sent += 1
            if messages.chunk_topic(sha256) not in self.wire.topics:
                self.unheard += 1  # published, and nobody there to hear it
                continue
            for payload in self.twist(self.sent, sha256, CHUNKS[sha256]):
                self.fetcher.received(sha256, payload)


def test_all_chunks_come_once() -> None:
    """Each asked for once, and no topic left subscribed."""
    cloud = Cloud(lambda number, sha256, data: [data])
    cloud.fetcher.fetch("r" * 64, SIZES)
    assert cloud.kept == CHUNKS and cloud.sent == len(CHUNKS)
    assert not cloud.wire.topics


def test_a_large_release_is_listened_for_a_bounded_way_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    """Never more topics than that, and all chunks come."""
    monkeypatch.setattr("edgesplit_agent.delivery.LISTEN_CHUNKS", 8)
    cloud = Cloud(lambda number, sha256, data: [data])
    cloud.fetcher.fetch("r" * 64, SIZES)
    assert cloud.kept == CHUNKS
    assert cloud.wire.most_topics <= 2 * 8 and not cloud.wire.topics


@pytest.mark.parametrize("listened", [2, 8, 16, 39])
def test_chunks_beyond_what_was_listened_for_were_asked_for(listened: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """They were published to nobody, and came a time-out later: a release larger than what is listened for at once."""
    monkeypatch.setattr("edgesplit_agent.delivery.LISTEN_CHUNKS", listened)
    cloud = Cloud(lambda number, sha256, data: [data])
    cloud.fetcher.fetch("r" * 64, SIZES)
    assert cloud.kept == CHUNKS
    assert cloud.unheard == 0 and cloud.sent == len(CHUNKS)


def test_lost_doubled_and_spoilt_chunks_are_asked_for_again() -> None:
    """B3, B4: every third is lost, every fifth corrupt, every seventh short, long and doubled: all arrive right."""

    def twist(number: int, sha256: str, data: bytes) -> list[bytes]:
        if number % 3 == 0:
            return []
        if number % 5 == 0:
            return [b"\x00" + data[1:] + b"!"]
        return [data[:-1], data + b"x", data, data] if number % 7 == 0 else [data]

    cloud = Cloud(twist)
    cloud.fetcher.fetch("r" * 64, SIZES)
    assert cloud.kept == CHUNKS
    assert cloud.fetcher.counters.refused > 0 and cloud.fetcher.counters.asked_again > 0


def test_a_stream_that_stops_is_a_lost_link_and_keeps_what_came() -> None:
    """The first ten came; the rest never does: LinkError, and what came is kept for the next try."""
    cloud = Cloud(lambda number, sha256, data: [data] if number <= 10 else [])
    with pytest.raises(LinkError):
        cloud.fetcher.fetch("r" * 64, SIZES)
    assert len(cloud.kept) == 10 and not cloud.wire.topics


def test_a_forged_stream_is_not_progress() -> None:
    """B4: bytes that are not what their name says are counted, never kept, and do not keep the fetch alive."""
    cloud = Cloud(lambda number, sha256, data: [b"forged!" + data[7:]])
    with pytest.raises(LinkError):
        cloud.fetcher.fetch("r" * 64, SIZES)
    assert not cloud.kept and cloud.fetcher.counters.refused > 0


def test_a_superseded_fetch_stops() -> None:
    """Something newer came: no LinkError, no more asking."""
    cloud = Cloud(lambda number, sha256, data: [])
    cloud.fetcher.fetch("r" * 64, SIZES, stop=lambda: True)
    assert not cloud.wire.asked


def test_chunks_nobody_asked_for_are_dropped() -> None:
    """A hostile publisher cannot fill the disk."""
    cloud = Cloud(lambda number, sha256, data: [data])
    cloud.fetcher.received(digest(b"mine"), b"mine")
    assert not cloud.kept and cloud.fetcher.counters.refused == 1


@pytest.fixture
def store(tmp_path: Path) -> ChunkStore:
    return ChunkStore(tmp_path / "chunks", tmp_path / "releases")


def test_a_chunk_is_kept_under_its_digest_or_not_at_all(store: ChunkStore) -> None:
    """What is not what its name says is not stored."""
    store.put(digest(b"data"), b"data")
    assert store.get(digest(b"data")) == b"data"
    with pytest.raises(MalformedMessage):
        store.put(digest(b"data"), b"dada")
    assert store.get(digest(b"other")) is None


def test_several_chunks_are_kept_together(store: ChunkStore) -> None:
    """All that are what their names say, and the error of the one that is not."""
    good = [(digest(data), data) for data in (bytes([number]) * 100 for number in range(20))]
    store.put_all(good)
    assert all(store.get(sha256) == data for sha256, data in good)
    more = (digest(b"more"), b"more")
    with pytest.raises(MalformedMessage):
        store.put_all([(digest(b"right"), b"wrong"), more])
    assert store.get(digest(b"right")) is None and store.get(more[0]) == b"more"


def test_a_flipped_bit_on_disk_makes_a_chunk_missing(store: ChunkStore) -> None:
    """A9: found out when it is looked at, thrown away, asked for again."""
    store.put(digest(b"data"), b"data")
    store.path(digest(b"data")).write_bytes(b"dat\x00")
    assert store.missing({digest(b"data"): 4}) == {digest(b"data"): 4}
    assert not store.path(digest(b"data")).exists()


def test_chunks_inside_releases_here_are_not_fetched_again(store: ChunkStore, tmp_path: Path) -> None:
    """A new version that shares weights with the one on disk asks only for what is new; spoilt ones are not taken."""
    raw, chunks = sample_release(1)
    home = tmp_path / "releases" / release.release_digest(raw)
    for one in release.decode_manifest(raw).slices:
        for file in one.files:
            path = home / "slices" / one.name / file.name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(b"".join(chunks[chunk.sha256] for chunk in file.chunks))
    (home / "manifest.json").write_bytes(raw)
    newer = release.decode_manifest(sample_release(2)[0]).chunks()

    missing = store.missing(newer)

    assert set(missing) == {digest(b"tail graph 2")}
    assert store.get(digest(b"w" * 1000)) == b"w" * 1000
    store.forget(())
    weights = home / "slices" / "head" / "weights.bin"
    weights.write_bytes(b"X" + weights.read_bytes()[1:])
    assert set(store.missing(newer)) == {digest(b"tail graph 2"), digest(b"w" * 1000)}


def test_what_cannot_fit_is_refused_before_the_first_byte(store: ChunkStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """A8: with a full disk the release fails with a reason, and nothing is asked for."""
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(10**9, 10**9, 10**6))
    with pytest.raises(EdgeError, match="no room"):
        store.check_room({digest(b"x"): 10**8}, 10**8)


def test_forgetting_leaves_what_is_kept(store: ChunkStore) -> None:
    """Chunks that nothing wants go, half-written files too."""
    for data in (b"keep", b"drop"):
        store.put(digest(data), data)
    part = store.path(digest(b"keep")).with_name(".half.part")
    part.write_bytes(b"ha")
    assert store.forget([digest(b"keep")]) == 2
    assert store.get(digest(b"keep")) == b"keep" and not part.exists()
