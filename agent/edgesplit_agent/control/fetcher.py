"""Fetches over MQTT: metadata by request and response, chunks by a sliding window (`fetch_window`); chunks are named by
their digest.

Messages may be lost, duplicated, reordered, truncated or forged: each response is matched to its request, bounded and
hashed, and what is missing is requested again with a growing timeout. A stream that stops altogether is a LinkError;
what was received is kept.
"""

from __future__ import annotations

import hashlib
import logging
import os
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias

from edgesplit.concurrency import THREAD_CONCURRENCY, Concurrency
from edgesplit.errors import LinkError, MalformedMessage, TrustError
from edgesplit.mqtt import messages
from edgesplit_agent.control.fetch_window import MIN_BYTES_PER_S, SLOW_RETRIEVAL_S, FetchWindow

log = logging.getLogger(__name__)

LISTEN_CHUNKS = 512
"""Chunks that a device subscribes to at once, where its link is fast enough for them: 64 MiB ahead of what it has."""
TOPICS_AT_ONCE = 128
"""Topics in one subscription."""
LISTEN_FIRST_S = 0.1
"""Longest time at the beginning of a fetch during which a stream for other devices is awaited before anything is
requested."""
LOOK_S = 0.2
"""Seconds within which `stop` is noticed."""
DIGEST_BYTES = 32
"""Length of a chunk's correlation data: its SHA-256."""
REQUEST_TIMEOUTS_S = (1.0, 2.0, 4.0, 8.0)
"""Timeouts of the successive requests for a metadata file; after the last, the link counts as lost."""


StoreChunks: TypeAlias = "Callable[[Sequence[tuple[str, bytes]]], None]"
"""Stores chunks by digest, already hashed; they are durable when it returns."""


class MqttSession(Protocol):
    """The part of an MQTT session that is needed here (`edgesplit.mqtt.session.Session` has it)."""

    def publish(
        self, topic: str, payload: bytes, *, qos: int = 0, retain: bool = False, correlation: bytes | None = None
    ) -> object:
        """Publish one message."""

    def subscribe(self, topics: Sequence[str], qos: int = 1) -> object:
        """Subscribe to these topics."""

    def unsubscribe(self, topics: Sequence[str]) -> object:
        """Unsubscribe from these topics."""


@dataclass
class FetchCounters:
    """Counters of the chunk downloads, for people."""

    chunks: int = 0
    """Chunks received and stored."""
    chunk_bytes: int = 0
    refused: int = 0
    """Chunks with bytes that did not match their topic, or that were not wanted."""
    asked_again: int = 0
    """Chunks that were requested again."""


class MetadataFetcher:
    """Provides `fetch(path, max_bytes)` for edgesplit.trust.store. Fetches one file at a time."""

    def __init__(
        self,
        session: MqttSession,
        device: str,
        timeouts_s: Sequence[float] = REQUEST_TIMEOUTS_S,
        *,
        clock: Callable[[], float] | None = None,
        concurrency: Concurrency = THREAD_CONCURRENCY,
    ) -> None:
        """`clock` replaces the clock of `concurrency`. `timeouts_s`: one timeout for each request."""
        self._session = session
        self._device = device
        self._timeouts_s = timeouts_s
        self._clock = clock or concurrency.monotonic
        self._changed = concurrency.condition()
        self._request: tuple[bytes, str, int] | None = None
        self._pieces: dict[int, bytes] = {}
        self._received_bytes = 0
        """Bytes in `_pieces`: never more than the announced size of the file, however the pieces overlap."""
        self._total: int | None = None

    def fetch(self, path: str, max_bytes: int) -> bytes:
        """The file's content. FileNotFoundError if the controller has none, LinkError if it does not respond,
        TrustError if it is longer than `max_bytes`."""
        request = messages.encode(messages.FetchMetadata(path))
        for timeout_s in self._timeouts_s:
            correlation = os.urandom(16)
            with self._changed:
                self._request, self._pieces = (correlation, path, max_bytes), {}
                self._received_bytes, self._total = 0, None
            self._session.publish(messages.topic(self._device, "fetch"), request, correlation=correlation)
            data = self._wait(path, max_bytes, timeout_s)
            if data is not None:
                return data
        raise LinkError(f"no response from the controller for {path}")

    def on_message(self, payload: bytes, correlation: bytes | None) -> None:
        """Handle a message on this device's `fetch_reply` topic. Called on the network's thread; raises nothing."""
        try:
            piece = messages.decode(payload, messages.FetchReply)
        except MalformedMessage as error:
            log.warning("message dropped: %s", error)
            return
        with self._changed:
            if self._request is None or self._request[:2] != (correlation, piece.path):
                return
            if piece.total <= self._request[2] and 0 <= piece.offset <= piece.total - len(piece.data):
                self._store_piece(piece)
            self._total = piece.total
            self._changed.notify_all()

    def _store_piece(self, piece: messages.FetchReply) -> None:
        """Store a piece. Where pieces overlap, they do not form one file: the earlier ones are dropped, because they
        would only cost memory."""
        if not piece.data:
            return
        received_bytes = self._received_bytes + len(piece.data) - len(self._pieces.get(piece.offset, b""))
        if received_bytes > piece.total:
            self._pieces, received_bytes = {}, len(piece.data)
        self._pieces[piece.offset] = piece.data
        self._received_bytes = received_bytes

    def _wait(self, path: str, max_bytes: int, timeout_s: float) -> bytes | None:
        """The complete file; None after `timeout_s` without a new piece, or where the whole arrives too slowly (TUF:
        slow retrieval attack)."""
        began = last_progress = self._clock()
        received_before = 0
        with self._changed:
            while True:
                if self._total is not None:
                    if self._total < 0:
                        raise FileNotFoundError(path)
                    if self._total > max_bytes:
                        raise TrustError(
                            f"{path} was announced with {self._total} bytes, at most {max_bytes} are allowed"
                        )
                    data = joined_pieces(self._pieces, self._total) if self._received_bytes == self._total else None
                    if data is not None:
                        self._request = None
                        return data
                now = self._clock()
                if self._received_bytes > received_before:
                    received_before, last_progress = self._received_bytes, now
                longest_s = SLOW_RETRIEVAL_S + (self._total or 0) / MIN_BYTES_PER_S
                left_s = min(last_progress + timeout_s, began + longest_s) - now
                if left_s <= 0:
                    return None
                self._changed.wait(left_s)


def chunk_digest(correlation: bytes | None) -> str:
    """The digest, where a message on this device's `fetch_reply` topic is a chunk; empty for a piece of metadata, whose
    correlation data is random and shorter."""
    return correlation.hex() if correlation is not None and len(correlation) == DIGEST_BYTES else ""


def joined_pieces(pieces: Mapping[int, bytes], total: int) -> bytes | None:
    """The file of `total` bytes that the pieces (by offset) form, or None while one is missing."""
    parts, offset = [], 0
    while offset < total:
        part = pieces.get(offset)
        if not part:
            return None
        parts.append(part)
        offset += len(part)
    return b"".join(parts) if offset == total else None


class ChunkFetcher:
    """Fetches chunks by a sliding window; each is hashed before it is stored."""

    def __init__(
        self,
        session: MqttSession,
        device: str,
        *,
        cap_bytes_per_s: float = float("inf"),
        listen_chunks: int = LISTEN_CHUNKS,
        look_s: float = LOOK_S,
        clock: Callable[[], float] | None = None,
        concurrency: Concurrency = THREAD_CONCURRENCY,
    ) -> None:
        """`clock` replaces the clock of `concurrency`."""
        self._listen_chunks = listen_chunks
        self._look_s = look_s
        self._session = session
        self._device = device
        self._cap_bytes_per_s = cap_bytes_per_s
        self._clock = clock or concurrency.monotonic
        self._rng = concurrency.rng
        self._changed = concurrency.condition()
        self._wanted: Mapping[str, int] = {}
        self._received: set[str] = set()
        self._arrived: deque[tuple[str, bytes]] = deque()
        self.counters = FetchCounters()

    def fetch(
        self,
        release: str,
        wanted: Mapping[str, int],
        all_chunks: Sequence[str],
        keep: StoreChunks,
        stop: Callable[[], bool] = lambda: False,
    ) -> None:
        """Fetch the `wanted` chunks (size by digest) of a release and pass them to `keep`. `all_chunks` is the
        release's whole list of chunks, by whose indices they are requested.

        Returns early once `stop()`. LinkError if they are not received, or too slowly; what was received is kept.
        """
        index_of = {sha256: index for index, sha256 in enumerate(all_chunks)}
        jitter = self._rng.random()
        listen_s = LISTEN_FIRST_S * (0.3 + 0.7 * jitter)
        window = FetchWindow(wanted, self._clock(), self._cap_bytes_per_s, jitter, listen_s)
        subscribed: set[str] = set()
        with self._changed:
            self._wanted, self._received = dict(wanted), set()
            self._arrived.clear()
        try:
            while not window.is_done and not stop():
                self._subscribe_ahead(window, subscribed)
                self._send_requests(release, index_of, window, subscribed)
                batch = self._receive_batch(window)
                if batch:
                    # Requests are in flight while this batch is written.
                    self._send_requests(release, index_of, window, subscribed)
                    keep(batch)
                    self.counters.chunks += len(batch)
                    self.counters.chunk_bytes += sum(len(payload) for _, payload in batch)
                elif trouble := window.failure(self._clock()):
                    raise LinkError(f"release {release[:12]} cannot be fetched: {trouble}")
        finally:
            with self._changed:
                self._wanted = {}
            self._session.unsubscribe([messages.chunk_topic(sha256) for sha256 in subscribed])
            self.counters.asked_again += window.repeated_requests

    def on_message(self, sha256: str, payload: bytes) -> None:
        """Handle a message on a chunk's topic. Called on the network's thread: only checks the chunk and queues it."""
        with self._changed:
            if sha256 in self._received:
                return
            if self._wanted.get(sha256) != len(payload) or hashlib.sha256(payload).hexdigest() != sha256:
                self.counters.refused += 1
                return
            self._received.add(sha256)
            self._arrived.append((sha256, payload))
            self._changed.notify_all()

    def _subscribe_ahead(self, window: FetchWindow, subscribed: set[str]) -> None:
        """Subscribe to the next chunks, well ahead of their request: another device may request them first."""
        limit = window.subscribe_ahead_count(self._listen_chunks)
        if len(subscribed) <= 2 * limit and subscribed.issuperset(window.next_chunks(max(1, limit // 2))):
            return
        ahead = window.next_chunks(limit)
        new = [sha256 for sha256 in ahead if sha256 not in subscribed]
        obsolete = subscribed.difference(ahead)
        for start in range(0, len(new), TOPICS_AT_ONCE):
            topics = [messages.chunk_topic(sha256) for sha256 in new[start : start + TOPICS_AT_ONCE]]
            self._session.subscribe(topics, qos=0)
        if obsolete:
            self._session.unsubscribe([messages.chunk_topic(sha256) for sha256 in obsolete])
        subscribed.difference_update(obsolete)
        subscribed.update(new)

    def _send_requests(
        self, release: str, index_of: Mapping[str, int], window: FetchWindow, subscribed: set[str]
    ) -> None:
        while chunks := window.next_request(self._clock(), subscribed):
            indexes = [index_of[sha256] for sha256 in chunks]
            request = messages.encode(messages.FetchChunks.from_indexes(release, indexes))
            self._session.publish(messages.topic(self._device, "fetch"), request)

    def _receive_batch(self, window: FetchWindow) -> list[tuple[str, bytes]]:
        """The chunks received, after waiting until something is received or the window has another event."""
        with self._changed:
            if not self._arrived:
                self._changed.wait(max(0.0, min(self._look_s, window.next_event_at(self._clock()) - self._clock())))
            batch = list(self._arrived)
            self._arrived.clear()
        for sha256, _ in batch:
            window.on_received(sha256, self._clock())
        return batch
