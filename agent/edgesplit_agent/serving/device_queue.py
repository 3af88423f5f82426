"""The device's single processor and the bounded queue before it. `queue_policy` decides, this module waits and
wakes."""

from __future__ import annotations

import threading
from contextlib import AbstractContextManager
from dataclasses import dataclass
from time import perf_counter

from edgesplit.errors import DeadlineExceeded, Dropped
from edgesplit_agent.serving.queue_policy import FairShares, QueueEntry, entry_to_drop


class Withdrawn(Exception):
    """The wait for the processor was cancelled by `withdraw`."""


class DeviceQueue:
    """One request at a time has the processor; at most `room` requests per model are in flight. Thread-safe.

    In flight means: running here, waiting for the processor, or away at the offload target.
    """

    def __init__(self, room: int) -> None:
        self._room = room
        self._lock = threading.Lock()
        self._admitted: set[QueueEntry] = set()
        self._arrived = 0
        self._waiting: dict[QueueEntry, threading.Lock] = {}
        """Waiting entries and the lock that each waits to acquire; other entries were granted the processor or dropped.
        """
        self._holder: QueueEntry | None = None
        self._shares = FairShares()
        self.dropped = 0
        """Number of frames dropped for others or for lack of room, as their application requested."""

    @property
    def in_flight(self) -> int:
        """Number of requests in flight."""
        return len(self._admitted)

    @property
    def has_waiting(self) -> bool:
        """Whether a request waits for the processor."""
        return bool(self._waiting)

    def admitted(self, entry: QueueEntry) -> AbstractContextManager[None]:
        """Context manager: admit the request for the duration of the block. Raises Busy or Dropped at once if there is
        no room."""
        return _Admitted(self, entry)

    def enter(self, entry: QueueEntry) -> None:
        """Admit the request until `leave`. Raises Busy or Dropped if there is no room."""
        with self._lock:
            self._arrived += 1
            entry.number = self._arrived
            try:
                victim = entry_to_drop(entry, self._admitted, self._room)
            except Dropped:
                self.dropped += 1
                raise
            if victim is not None:
                self._drop(victim)
            self._admitted.add(entry)

    def leave(self, entry: QueueEntry) -> None:
        """End the request's admission."""
        with self._lock:
            self._admitted.discard(entry)

    def begin(self, entry: QueueEntry) -> None:
        """Mark a request that needs no processor as started; Dropped if its place was given to another frame."""
        with self._lock:
            self._begin(entry)

    def turn(self, entry: QueueEntry, deadline: float) -> AbstractContextManager[None]:
        """Context manager: hold the processor for the duration of the block.

        Raises DeadlineExceeded if it is not free by `deadline` (a perf_counter time), Dropped if the entry was dropped
        for another frame meanwhile, Withdrawn after `withdraw`.
        """
        return _Turn(self, entry, deadline)

    def withdraw(self, entry: QueueEntry) -> None:
        """Cancel the entry's wait for the processor, if it waits."""
        with self._lock:
            wakeup = self._waiting.pop(entry, None)
        if wakeup is not None:
            wakeup.release()

    def wait(self, entry: QueueEntry, deadline: float) -> None:
        """Acquire the processor until `hand_over`. Raises like `turn`."""
        with self._lock:
            if self._holder is None:
                self._begin(entry)
                self._grant(entry)
                return
            if entry.is_dropped:
                raise Dropped("replaced by another frame of its stream")
            wakeup = self._waiting[entry] = threading.Lock()
            wakeup.acquire()
        # The lock is held already, so acquiring it waits for the release by `hand_over`, `withdraw` or `_drop`.
        woken = wakeup.acquire(timeout=max(0.0, deadline - perf_counter()))
        with self._lock:
            # The processor may be granted between the end of the wait and this lock: the grant counts.
            if self._holder is entry:
                return
            self._waiting.pop(entry, None)
        if entry.is_dropped:
            raise Dropped("replaced by another frame of its stream")
        if woken:  # without the processor and not dropped: `withdraw` released it
            raise Withdrawn
        raise DeadlineExceeded("the device's processor was not free before the deadline")

    def hand_over(self, entry: QueueEntry, seconds: float) -> None:
        """Release the processor after `seconds` of use, and hand it to the next entry."""
        with self._lock:
            self._holder = None
            self._shares.end(entry.model, seconds)
            following = self._shares.next(self._waiting)
            if following is not None:
                wakeup = self._waiting.pop(following)
                self._begin(following)
                self._grant(following)
                wakeup.release()

    def _grant(self, entry: QueueEntry) -> None:
        self._holder = entry
        self._shares.begin(entry.model)

    def _begin(self, entry: QueueEntry) -> None:
        if entry.is_dropped:
            raise Dropped("replaced by another frame of its stream")
        entry.has_begun = True

    def _drop(self, victim: QueueEntry) -> None:
        """Drop the victim; the lock is held. It learns of it in `wait`, or when it asks for the processor."""
        victim.is_dropped = True
        self.dropped += 1
        self._admitted.discard(victim)
        wakeup = self._waiting.pop(victim, None)
        if wakeup is not None:
            wakeup.release()


@dataclass(slots=True, eq=False)
class _Admitted:
    """Context manager of `admitted`. A class, like `_Turn`: a generator costs each request several times as much."""

    queue: DeviceQueue
    entry: QueueEntry

    def __enter__(self) -> None:
        self.queue.enter(self.entry)

    def __exit__(self, *_: object) -> None:
        self.queue.leave(self.entry)


@dataclass(slots=True, eq=False)
class _Turn:
    """Context manager of `turn`."""

    queue: DeviceQueue
    entry: QueueEntry
    deadline: float
    began: float = 0.0

    def __enter__(self) -> None:
        self.queue.wait(self.entry, self.deadline)
        self.began = perf_counter()

    def __exit__(self, *_: object) -> None:
        self.queue.hand_over(self.entry, perf_counter() - self.began)
