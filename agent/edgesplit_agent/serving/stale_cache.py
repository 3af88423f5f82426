"""Stale answers: the last good answer of each stream whose application accepts a stale one when every other way fails.

Bounded in streams and bytes; only streams that ask for it are cached.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from dataclasses import dataclass

import msgspec

from edgesplit_agent.serving.request import Answer

STREAMS = 64
"""Maximum number of cached streams."""
HELD_BYTES = 32 * 2**20
"""Maximum bytes of cached answers."""
Stream = tuple[str, str]
"""Model and stream name."""


@dataclass(frozen=True)
class _CachedAnswer:
    answer: Answer
    at: float
    size: int


class StaleAnswerCache:
    """Cache of the last good answers. Thread-safe. All times are of one clock, given by the caller."""

    def __init__(self, streams: int = STREAMS, held_bytes: int = HELD_BYTES) -> None:
        self._streams = streams
        self._held_bytes = held_bytes
        self._lock = threading.Lock()
        self._answers: OrderedDict[Stream, _CachedAnswer] = OrderedDict()
        self.given = 0
        """Number of stale answers returned."""

    @property
    def held_bytes(self) -> int:
        """Bytes of the cached answers."""
        return sum(cached.size for cached in self._answers.values())

    def put(self, stream: Stream, answer: Answer, at: float) -> None:
        """Cache a fresh answer of a request that began at `at`, unless one of a newer request is cached."""
        size = sum(tensor.nbytes for tensor in answer.outputs.values())
        with self._lock:
            cached = self._answers.get(stream)
            if cached is not None and cached.at > at:  # of a newer request
                return
            self._answers.pop(stream, None)
            self._answers[stream] = _CachedAnswer(answer, at, size)
            while len(self._answers) > self._streams or self.held_bytes > self._held_bytes:
                self._answers.popitem(last=False)

    def get(self, stream: Stream, now: float, max_age_s: float) -> Answer | None:
        """The cached answer, marked as stale with its age, if it is no older than `max_age_s`; else None."""
        with self._lock:
            cached = self._answers.get(stream)
            if cached is None or now - cached.at > max_age_s:
                return None
            self.given += 1
        age_s = max(0.0, now - cached.at)
        return Answer(cached.answer.outputs, msgspec.structs.replace(cached.answer.report, stale=True, age_s=age_s))

    def forget(self, model: str) -> None:
        """Drop all answers of a model that is served no longer, or by another release."""
        with self._lock:
            for stream in [stream for stream in self._answers if stream[0] == model]:
                del self._answers[stream]
