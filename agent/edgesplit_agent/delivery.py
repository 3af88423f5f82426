"""Fetching over MQTT: metadata by request and answer, chunks in windows named by their digest.

Messages may be lost, doubled, reordered, cut or forged: each answer is matched, bounded and hashed, and what is missing
is asked for again with growing patience. A stream that stops altogether is a LinkError; what came stays.
"""

from __future__ import annotations

import hashlib
import logging
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from time import monotonic
from typing import Protocol

from edgesplit import messages
from edgesplit.errors import LinkError, MalformedMessage, TrustError
from edgesplit.limits import LIMITS

log = logging.getLogger(__name__)

PATIENCE_S = (1.0, 2.0, 4.0, 8.0)
"""How long one round of asking may bring nothing; after the last, the link counts as gone."""


class Wire(Protocol):
    """What is needed of an MQTT session (edgesplit.mqtt.Session has it)."""

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
    """`fetch(path, max_bytes)` for edgesplit.trust. One file at a time."""

    def __init__(self, wire: Wire, device: str, patience_s: Sequence[float] = PATIENCE_S) -> None:
        self._wire = wire
        self._device = device
        self._patience_s = patience_s
        self._changed = threading.Condition()
        self._asked: tuple[bytes, str, int] | None = None
        self._pieces: dict[int, bytes] = {}
        self._total: int | None = None

    def fetch(self, path: str, max_bytes: int) -> bytes:
        """The file; FileNotFoundError if the controller has none, LinkError if it does not answer."""
        request = messages.encode(messages.FetchMetadata(path))
        for patience in self._patience_s:
            correlation = os.urandom(16)
            with self._changed:
                self._asked, self._pieces, self._total = (correlation, path, max_bytes), {}, None
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
                self._pieces[piece.offset] = piece.data
            self._total = piece.total
            self._changed.notify_all()

    def _wait(self, path: str, max_bytes: int, patience_s: float) -> bytes | None:
        """The whole file once its pieces are there, None when nothing came for too long."""
        with self._changed:
            while True:
                before = len(self._pieces)
                if self._total is not None:
                    if self._total < 0:
                        raise FileNotFoundError(path)
                    if self._total > max_bytes:
                        raise TrustError(f"{path} is said to have {self._total} bytes, at most {max_bytes} are allowed")
                    data = joined(self._pieces, self._total)
                    if data is not None:
                        self._asked = None
                        return data
                if not self._changed.wait(patience_s) and len(self._pieces) == before:
                    return None


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
    """Fetches chunks in windows; each is hashed before it is kept."""

    def __init__(
        self, wire: Wire, device: str, keep: Callable[[str, bytes], None], patience_s: Sequence[float] = PATIENCE_S
    ) -> None:
        self._wire = wire
        self._device = device
        self._keep = keep
        self._patience_s = patience_s
        self._changed = threading.Condition()
        self._open: dict[str, int] = {}
        self._arrived: list[tuple[str, bytes]] = []
        self.counters = Counters()

    def fetch(self, release: str, wanted: Mapping[str, int], stop: Callable[[], bool] = lambda: False) -> None:
        """Fetch and keep all `wanted` chunks (size by digest). Early return once `stop()`; LinkError if none comes."""
        left = list(wanted)
        while left and not stop():
            window, left = left[: LIMITS.window_chunks], left[LIMITS.window_chunks :]
            topics = [messages.chunk_topic(sha256) for sha256 in window]
            self._wire.subscribe(topics, qos=0)
            try:
                self._fetch_window(release, {sha256: wanted[sha256] for sha256 in window}, stop)
            finally:
                self._wire.unsubscribe(topics)

    def received(self, sha256: str, payload: bytes) -> None:
        """A message on a chunk's topic. Called on the network's thread: only checks and hands over."""
        with self._changed:
            size = self._open.get(sha256)
            if size is None or size != len(payload) or hashlib.sha256(payload).hexdigest() != sha256:
                self.counters.refused += 1
                return
            del self._open[sha256]
            self._arrived.append((sha256, payload))
            self._changed.notify_all()

    def _fetch_window(self, release: str, window: Mapping[str, int], stop: Callable[[], bool]) -> None:
        with self._changed:
            self._open, self._arrived = dict(window), []
        silent = 0
        while not stop():
            with self._changed:
                asked = tuple(self._open)
            if not asked:
                return
            if silent >= len(self._patience_s):
                raise LinkError(f"{len(asked)} chunks of release {release[:12]} do not come")
            request = messages.encode(messages.FetchChunks(release, asked))
            self._wire.publish(messages.topic(self._device, "fetch"), request)
            silent = 0 if self._collect(len(asked), self._patience_s[silent], stop) else silent + 1
            self.counters.asked_again += bool(self._open)

    def _collect(self, expected: int, patience_s: float, stop: Callable[[], bool]) -> bool:
        """Keep chunks as they come, until all are there or none came for `patience_s`; False if nothing came at all."""
        got, quiet_until = 0, monotonic() + patience_s
        while got < expected and not stop():
            with self._changed:
                if not self._arrived:
                    self._changed.wait(max(0.0, min(0.2, quiet_until - monotonic())))
                batch, self._arrived = self._arrived, []
            for sha256, payload in batch:
                self._keep(sha256, payload)
                self.counters.chunks += 1
                self.counters.chunk_bytes += len(payload)
            got += len(batch)
            if batch:
                quiet_until = monotonic() + patience_s
            elif monotonic() >= quiet_until:
                break
        return got > 0
