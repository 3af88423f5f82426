"""The last good answer of each stream whose application takes a stale one when no means is left. Bounded in number and
bytes; only streams that have asked for it are remembered."""

from __future__ import annotations

import threading
from collections import OrderedDict
from dataclasses import dataclass

import msgspec

from edgesplit_agent.serving.request import Answer

STREAMS = 64
HELD_BYTES = 32 * 2**20
Stream = tuple[str, str]
"""Model and name."""


@dataclass(frozen=True)
class _Kept:
    answer: Answer
    at: float
    size: int


class LastGood:
    """Thread-safe. Times are of one clock, given by the caller."""

    def __init__(self, streams: int = STREAMS, held_bytes: int = HELD_BYTES) -> None:
        self._streams = streams
        self._held_bytes = held_bytes
        self._lock = threading.Lock()
        self._kept: OrderedDict[Stream, _Kept] = OrderedDict()
        self.given = 0
        """Stale answers so far."""

    @property
    def held(self) -> int:
        """Bytes of the answers that are remembered."""
        return sum(one.size for one in self._kept.values())

    def keep(self, stream: Stream, answer: Answer, at: float) -> None:
        """A fresh answer, of a request that began `at`. One that overtook it stays."""
        size = sum(tensor.nbytes for tensor in answer.outputs.values())
        with self._lock:
            older = self._kept.get(stream)
            if older is not None and older.at > at:
                return
            self._kept.pop(stream, None)
            self._kept[stream] = _Kept(answer, at, size)
            while len(self._kept) > self._streams or self.held > self._held_bytes:
                self._kept.popitem(last=False)

    def give(self, stream: Stream, now: float, oldest_s: float) -> Answer | None:
        """The last good answer, marked, if it is no older than that."""
        with self._lock:
            kept = self._kept.get(stream)
            if kept is None or now - kept.at > oldest_s:
                return None
            self.given += 1
        age_s = max(0.0, now - kept.at)
        return Answer(kept.answer.outputs, msgspec.structs.replace(kept.answer.report, stale=True, age_s=age_s))

    def forget(self, model: str) -> None:
        """It is served no more, or by another release."""
        with self._lock:
            for stream in [stream for stream in self._kept if stream[0] == model]:
                del self._kept[stream]
