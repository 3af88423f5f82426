"""Queue of requested chunks that were not sent yet: when each is due, and whether it is published once for all devices
or sent to the requesting devices separately. Sans I/O: no threads, no clock of its own.

A message on a chunk's own topic is delivered to every subscriber, including devices whose copy is still queued on a
slow link. So where many devices fetch, a chunk is published to all at most every `REPEAT_S`, unless at least half of
the fetching devices requested it together; a device that requests it in between receives a copy of its own.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

GATHER_S = 0.05
"""How long a chunk waits for further devices to request it, while more than one device fetches its release."""
GATHER_PER_DEVICE_S = 0.01
"""Additional wait for each device beyond `FEW`: a published chunk is delivered to all of them, including those that
have it."""
FEW = 8
"""Number of fetching devices up to which the wait does not grow."""
LONGEST_GATHER_S = 1.0
"""Upper bound of the wait."""
RECENT_S = 2.0
"""A device that requested a chunk within this time counts as still fetching."""
CROWD = 32
"""Number of fetching devices above which `REPEAT_S` applies."""
REPEAT_S = 10.0
"""Where more than `CROWD` devices fetch a release, shortest interval between two publications of a chunk to all of
them. Fewer devices share a chunk that only one of them missed."""
WAITING_CHUNKS = 4_096
"""Upper bound of the queue, in chunks."""
WAITING_CHUNKS_PER_DEVICE = 256
"""Share of one device in the queue: twice what an agent has in flight. Further chunks are dropped, so that the rest of
the queue is left to other devices."""


@dataclass(frozen=True, slots=True)
class Due:
    """A chunk to be sent now."""

    sha256: str
    recipients: tuple[str, ...] = ()
    """Devices that each receive a copy of their own; empty: publish once for all subscribers."""


@dataclass(slots=True)
class _QueuedChunk:
    """A queued chunk."""

    due: float
    release: str
    requesters: dict[str, bool]
    """Requesting devices, and whether each accepts a copy of its own: older agents subscribe only to the topic for all.
    """


@dataclass(slots=True)
class _FetchingDevices:
    """Devices that fetch one release, each with the time of its last request."""

    requested_at: dict[str, float] = field(default_factory=dict)
    pruned_at: float = float("-inf")

    def count(self, device: str, now: float) -> int:
        """Note a request of `device` and return the number of devices that fetch now."""
        self.requested_at[device] = now
        if now - self.pruned_at >= GATHER_S:  # pruning on every request would cost O(devices) each
            self.pruned_at = now
            for gone in [name for name, at in self.requested_at.items() if now - at > RECENT_S]:
                del self.requested_at[gone]
        return len(self.requested_at)


@dataclass(slots=True)
class ChunkQueue:
    """All chunks that were requested and not sent yet."""

    _waiting: dict[str, _QueuedChunk] = field(default_factory=dict)
    _queued_of: Counter[str] = field(default_factory=Counter)
    """Queued chunks per device."""
    _fetching: dict[str, _FetchingDevices] = field(default_factory=dict)
    _published_at: dict[str, float] = field(default_factory=dict)
    """Time at which a chunk was last published to all, for those of the last `REPEAT_S`, oldest first."""

    def request(
        self, device: str, release: str, chunks: Sequence[str], now: float, *, accepts_own_copy: bool = False
    ) -> int:
        """Queue the chunks that a device requests; return how many were dropped for lack of room. `accepts_own_copy`:
        the device accepts a copy of its own.

        A lone device is answered at once. A device that requests while others fetch the same release waits `gather_s`
        for them. A chunk that was just sent is sent again, because the device may not have been subscribed then.
        """
        due = now + gather_s(self._fetching.setdefault(release, _FetchingDevices()).count(device, now))
        dropped = 0
        for chunk in chunks:
            waiting = self._waiting.get(chunk)
            if waiting is not None and device in waiting.requesters:
                continue
            if self._queued_of[device] >= WAITING_CHUNKS_PER_DEVICE or (
                waiting is None and len(self) >= WAITING_CHUNKS
            ):
                dropped += 1
                continue
            if waiting is None:
                waiting = self._waiting[chunk] = _QueuedChunk(due, release, {})
            waiting.requesters[device] = accepts_own_copy
            self._queued_of[device] += 1
        return dropped

    def take(self, now: float) -> list[Due]:
        """Remove and return the chunks that are due, in the order in which they were requested."""
        while self._published_at and now - (oldest := next(iter(self._published_at.items())))[1] >= REPEAT_S:
            del self._published_at[oldest[0]]
        ready = [chunk for chunk, waiting in self._waiting.items() if waiting.due <= now]
        return [self._dispatch(chunk, self._waiting.pop(chunk), now) for chunk in ready]

    def __len__(self) -> int:
        return len(self._waiting)

    def next_due(self) -> float | None:
        """Time at which the next chunk is due; None if the queue is empty."""
        return min((waiting.due for waiting in self._waiting.values()), default=None)

    def _dispatch(self, chunk: str, waiting: _QueuedChunk, now: float) -> Due:
        """Decide whether a due chunk goes to all or to its requesters separately, and free their share of the queue."""
        self._queued_of.subtract(waiting.requesters.keys())
        for device in waiting.requesters:
            if not self._queued_of[device]:
                del self._queued_of[device]
        # Published to all subscribers unless three things hold: it was published to all within `REPEAT_S`, every
        # requester accepts a copy of its own, and the requesters are the minority of a crowd. Otherwise a chunk that
        # few devices lost would be sent to hundreds that have it.
        fetching = len(self._fetching[waiting.release].requested_at)
        is_minority = fetching > CROWD and 2 * len(waiting.requesters) < fetching
        if chunk in self._published_at and all(waiting.requesters.values()) and is_minority:
            return Due(chunk, tuple(waiting.requesters))
        self._published_at.pop(chunk, None)  # re-insert at the end: the dictionary is ordered by time of publication
        self._published_at[chunk] = now
        return Due(chunk)


def gather_s(fetching: int) -> float:
    """How long a chunk waits while `fetching` devices fetch its release."""
    return 0.0 if fetching == 1 else min(LONGEST_GATHER_S, GATHER_S + GATHER_PER_DEVICE_S * max(0, fetching - FEW))
