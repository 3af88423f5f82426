"""Fetching over MQTT: metadata by request and answer, chunks by a sliding window (`window`), named by their digest.

Messages may be lost, doubled, reordered, cut or forged: each answer is matched, bounded and hashed, and what is missing
is asked for again with growing patience. A stream that stops altogether is a LinkError; what came stays.
"""

from __future__ import annotations

import hashlib
import logging
import os
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias

from edgesplit.concurrency import THREADS, Pace
from edgesplit.errors import LinkError, MalformedMessage, TrustError
from edgesplit.mqtt import messages
from edgesplit_agent.control.fetch_window import LEAST_BYTES_PER_S, WATCH_S, Window

log = logging.getLogger(__name__)

LISTEN_CHUNKS = 512
"""Chunks that a device listens for at once, where its link is not too slow for them: 64 MiB ahead of what it has."""
TOPICS_AT_ONCE = 128
"""In one subscription."""
LISTEN_FIRST_S = 0.1
"""At most so long a fetch listens for a stream that others asked for before it asks itself."""
LOOK_S = 0.2
"""How soon a fetch that shall stop is noticed."""
DIGEST_BYTES = 32
PATIENCE_S = (1.0, 2.0, 4.0, 8.0)
"""How long one round of asking may bring nothing; after the last, the link counts as gone."""


Keep: TypeAlias = "Callable[[Sequence[tuple[str, bytes]]], None]"
"""Takes chunks by digest, hashed, and has them durably when it returns."""


class Wire(Protocol):
    """What is needed of an MQTT session (edgesplit.mqtt.session.Session has it)."""

    def publish(
        self, topic: str, payload: bytes, *, qos: int = 0, retain: bool = False, correlation: bytes | None = None
    ) -> object:
        """Send one message."""
        ...

    def subscribe(self, topics: Sequence[str], qos: int = 1) -> object:
        """Ask for messages."""
        ...

    def unsubscribe(self, topics: Sequence[str]) -> object:
        """Ask for no more."""
        ...


@dataclass
class Counters:
    """What delivery did, for people."""

    chunks: int = 0
    chunk_bytes: int = 0
    refused: int = 0
    """Chunks whose bytes were not what their topic said, or that nobody asked for."""
    asked_again: int = 0


class MetadataFetcher:
    """`fetch(path, max_bytes)` for edgesplit.trust.store. One file at a time."""

    def __init__(
        self,
        wire: Wire,
        device: str,
        patience_s: Sequence[float] = PATIENCE_S,
        *,
        clock: Callable[[], float] | None = None,
        pace: Pace = THREADS,
    ) -> None:
        """`clock` in place of the pace's."""
        self._wire = wire
        self._device = device
        self._patience_s = patience_s
        self._clock = clock or pace.monotonic
        self._changed = pace.condition()
        self._asked: tuple[bytes, str, int] | None = None
        self._pieces: dict[int, bytes] = {}
        self._held = 0
        """Bytes in `_pieces`: never more than the file is said to have, however the pieces overlap."""
        self._total: int | None = None

    def fetch(self, path: str, max_bytes: int) -> bytes:
        """The file; FileNotFoundError if the controller has none, LinkError if it does not answer."""
        request = messages.encode(messages.FetchMetadata(path))
        for patience in self._patience_s:
            correlation = os.urandom(16)
            with self._changed:
                self._asked, self._pieces, self._held, self._total = (correlation, path, max_bytes), {}, 0, None
            self._wire.publish(messages.topic(self._device, "fetch"), request, correlation=correlation)
            data = self._wait(path, max_bytes, patience)
            if data is not None:
                return data
        raise LinkError(f"the controller does not send {path}")

    def received(self, payload: bytes, correlation: bytes | None) -> None:
        """A message on our `fetched` topic. Called on the network's thread; raises nothing."""
        try:
            piece = messages.decode(payload, messages.Fetched)
        except MalformedMessage as error:
            log.warning("dropped: %s", error)
            return
        with self._changed:
            if self._asked is None or self._asked[:2] != (correlation, piece.path):
                return
            if piece.total <= self._asked[2] and 0 <= piece.offset <= piece.total - len(piece.data):
                self._keep(piece)
            self._total = piece.total
            self._changed.notify_all()

    def _keep(self, piece: messages.Fetched) -> None:
        """Pieces that overlap make no file: those before this one are given up, for they would only cost memory."""
        if not piece.data:
            return
        held = self._held + len(piece.data) - len(self._pieces.get(piece.offset, b""))
        if held > piece.total:
            self._pieces, held = {}, len(piece.data)
        self._pieces[piece.offset] = piece.data
        self._held = held

    def _wait(self, path: str, max_bytes: int, patience_s: float) -> bytes | None:
        """The whole file once its pieces are there; None when nothing new came for too long, or all of it comes too
        slowly (TUF: slow retrieval)."""
        began = heard = self._clock()
        before = 0
        with self._changed:
            while True:
                if self._total is not None:
                    if self._total < 0:
                        raise FileNotFoundError(path)
                    if self._total > max_bytes:
                        raise TrustError(f"{path} is said to have {self._total} bytes, at most {max_bytes} are allowed")
                    data = joined(self._pieces, self._total) if self._held == self._total else None
                    if data is not None:
                        self._asked = None
                        return data
                now = self._clock()
                if self._held > before:
                    before, heard = self._held, now
                longest_s = WATCH_S + (self._total or 0) / LEAST_BYTES_PER_S
                left_s = min(heard + patience_s, began + longest_s) - now
                if left_s <= 0:
                    return None
                self._changed.wait(left_s)


def own_chunk(correlation: bytes | None) -> str:
    """The digest of the chunk that a message on our `fetched` topic is; empty for a piece of metadata, whose
    correlation data is what we made up, and shorter."""
    return correlation.hex() if correlation is not None and len(correlation) == DIGEST_BYTES else ""


def joined(pieces: Mapping[int, bytes], total: int) -> bytes | None:
    """The file of `total` bytes that the pieces (by offset) make, or None while one is missing."""
    parts, at = [], 0
    while at < total:
        part = pieces.get(at)
        if not part:
            return None
        parts.append(part)
        at += len(part)
    return b"".join(parts) if at == total else None


class ChunkFetcher:
    """Fetches chunks by a sliding window; each is hashed before it is kept."""

    def __init__(
        self,
        wire: Wire,
        device: str,
        *,
        cap_bytes_per_s: float = float("inf"),
        clock: Callable[[], float] | None = None,
        pace: Pace = THREADS,
    ) -> None:
        """`clock` in place of the pace's."""
        self._wire = wire
        self._device = device
        self._cap_bytes_per_s = cap_bytes_per_s
        self._clock = clock or pace.monotonic
        self._dice = pace.dice
        self._changed = pace.condition()
        self._sizes: Mapping[str, int] = {}
        self._here: set[str] = set()
        self._arrived: deque[tuple[str, bytes]] = deque()
        self.counters = Counters()

    def fetch(
        self,
        release: str,
        wanted: Mapping[str, int],
        listed: Sequence[str],
        keep: Keep,
        stop: Callable[[], bool] = lambda: False,
    ) -> None:
        """Fetch the `wanted` chunks (size by digest) of a release that lists its chunks so, and give them to `keep`.

        Early return once `stop()`; LinkError if they do not come, or too slowly to be worth it. What came is kept.
        """
        places = {sha256: place for place, sha256 in enumerate(listed)}
        jitter = self._dice.random()
        listen_s = LISTEN_FIRST_S * (0.3 + 0.7 * jitter)
        window = Window(wanted, self._clock(), self._cap_bytes_per_s, jitter, listen_s)
        listening: set[str] = set()
        with self._changed:
            self._sizes, self._here = dict(wanted), set()
            self._arrived.clear()
        try:
            while not window.done and not stop():
                self._listen(window, listening)
                self._ask(release, places, window, listening)
                batch = self._take(window)
                if batch:
                    self._ask(release, places, window, listening)  # so that more is on its way while this is written
                    keep(batch)
                    self.counters.chunks += len(batch)
                    self.counters.chunk_bytes += sum(len(payload) for _, payload in batch)
                elif trouble := window.trouble(self._clock()):
                    raise LinkError(f"release {release[:12]} does not come: {trouble}")
        finally:
            with self._changed:
                self._sizes = {}
            self._wire.unsubscribe([messages.chunk_topic(sha256) for sha256 in listening])
            self.counters.asked_again += window.doubled

    def received(self, sha256: str, payload: bytes) -> None:
        """A message on a chunk's topic. Called on the network's thread: only checks and hands over."""
        with self._changed:
            if sha256 in self._here:
                return
            if self._sizes.get(sha256) != len(payload) or hashlib.sha256(payload).hexdigest() != sha256:
                self.counters.refused += 1
                return
            self._here.add(sha256)
            self._arrived.append((sha256, payload))
            self._changed.notify_all()

    def _listen(self, window: Window, listening: set[str]) -> None:
        """Subscribe to what comes next, a good way ahead of what is asked for: others may ask for it before us."""
        most = window.worth_hearing(LISTEN_CHUNKS)
        if len(listening) <= 2 * most and listening.issuperset(window.ahead(max(1, most // 2))):
            return
        ahead = window.ahead(most)
        new = [sha256 for sha256 in ahead if sha256 not in listening]
        heard = listening.difference(ahead)
        for start in range(0, len(new), TOPICS_AT_ONCE):
            self._wire.subscribe([messages.chunk_topic(one) for one in new[start : start + TOPICS_AT_ONCE]], qos=0)
        if heard:
            self._wire.unsubscribe([messages.chunk_topic(sha256) for sha256 in heard])
        listening.difference_update(heard)
        listening.update(new)

    def _ask(self, release: str, places: Mapping[str, int], window: Window, listening: set[str]) -> None:
        while asked := window.ask(self._clock(), listening):
            request = messages.encode(messages.FetchChunks.of(release, [places[sha256] for sha256 in asked]))
            self._wire.publish(messages.topic(self._device, "fetch"), request)

    def _take(self, window: Window) -> list[tuple[str, bytes]]:
        """What has come, after waiting for it as long as there is nothing else to do."""
        with self._changed:
            if not self._arrived:
                self._changed.wait(max(0.0, min(LOOK_S, window.next_look(self._clock()) - self._clock())))
            batch = list(self._arrived)
            self._arrived.clear()
        for sha256, _ in batch:
            window.arrived(sha256, self._clock())
        return batch
