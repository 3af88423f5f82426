"""The device's one processor, and the bounded room before it. Thread-safe; `turns` decides, this waits and wakes."""

from __future__ import annotations

import threading
from contextlib import AbstractContextManager
from time import perf_counter

from edgesplit.errors import DeadlineExceeded, Dropped
from edgesplit_agent.serving.queue_policy import Place, Shares, giving_way


class Withdrawn(Exception):
    """Nobody wants this turn any more."""


class Processor:
    """One request at a time has it; of each model `room` may be here at once, whether they run, wait or are away."""

    def __init__(self, room: int) -> None:
        self._room = room
        self._lock = threading.Lock()
        self._here: set[Place] = set()
        self._arrived = 0
        self._waiting: dict[Place, threading.Lock] = {}
        """Each waits to acquire its own lock; who is not in here any more was given the turn, or was sent away."""
        self._holder: Place | None = None
        self._shares = Shares()
        self.dropped = 0
        """Frames that gave way to others or found no place, as their application asked."""

    @property
    def here(self) -> int:
        """Requests that run, wait or are away."""
        return len(self._here)

    @property
    def is_wanted(self) -> bool:
        """Whether somebody waits for a turn."""
        return bool(self._waiting)

    def admitted(self, place: Place) -> AbstractContextManager[None]:
        """Have a place in the queue. Busy or Dropped, at once, where there is none."""
        return _Admitted(self, place)

    def enter(self, place: Place) -> None:
        """As `admitted`, until `leave`."""
        with self._lock:
            self._arrived += 1
            place.number = self._arrived
            try:
                victim = giving_way(place, self._here, self._room)
            except Dropped:
                self.dropped += 1
                raise
            if victim is not None:
                self._drop(victim)
            self._here.add(place)

    def leave(self, place: Place) -> None:
        """Its place is free."""
        with self._lock:
            self._here.discard(place)

    def begin(self, place: Place) -> None:
        """It needs no turn to begin. Dropped, where it gave its place to another frame."""
        with self._lock:
            self._begin(place)

    def turn(self, place: Place, by: float) -> AbstractContextManager[None]:
        """Have the processor. DeadlineExceeded where it is not free `by` then (of perf_counter), Dropped where the
        place was given to another frame meanwhile, Withdrawn after `withdraw`."""
        return _Turn(self, place, by)

    def withdraw(self, place: Place) -> None:
        """End its waiting for a turn, if it waits."""
        with self._lock:
            gate = self._waiting.pop(place, None)
        if gate is not None:
            gate.release()

    def wait(self, place: Place, by: float) -> None:
        """As `turn`, until `pass_on`."""
        with self._lock:
            if self._holder is None:
                self._begin(place)
                self._give(place)
                return
            if place.is_dropped:
                raise Dropped("another frame of the stream took this one's place")
            gate = self._waiting[place] = threading.Lock()
            gate.acquire()
        woken = gate.acquire(timeout=max(0.0, by - perf_counter()))
        with self._lock:
            if self._holder is place:  # perhaps at the very moment when waiting ended
                return
            self._waiting.pop(place, None)
        if place.is_dropped:
            raise Dropped("another frame of the stream took this one's place")
        if woken:
            raise Withdrawn
        raise DeadlineExceeded("the device's processor was not free before the deadline")

    def pass_on(self, place: Place, seconds: float) -> None:
        """It had the processor so long; whoever is next has it now."""
        with self._lock:
            self._holder = None
            self._shares.end(place.model, seconds)
            following = self._shares.next(self._waiting)
            if following is not None:
                gate = self._waiting.pop(following)
                self._begin(following)
                self._give(following)
                gate.release()

    def _give(self, place: Place) -> None:
        self._holder = place
        self._shares.begin(place.model)

    def _begin(self, place: Place) -> None:
        if place.is_dropped:
            raise Dropped("another frame of the stream took this one's place")
        place.has_begun = True

    def _drop(self, victim: Place) -> None:
        """Under the lock: the victim hears of it where it waits, or when it asks for its turn."""
        victim.is_dropped = True
        self.dropped += 1
        self._here.discard(victim)
        gate = self._waiting.pop(victim, None)
        if gate is not None:
            gate.release()


class _Admitted:
    """A place in the queue, while what is inside runs. A class of its own, as `_Turn`: a generator costs each request
    several times as much."""

    __slots__ = ("_place", "_processor")

    def __init__(self, processor: Processor, place: Place) -> None:
        self._processor = processor
        self._place = place

    def __enter__(self) -> None:
        self._processor.enter(self._place)

    def __exit__(self, *_: object) -> None:
        self._processor.leave(self._place)


class _Turn:
    """The processor, while what is inside runs."""

    __slots__ = ("_began", "_by", "_place", "_processor")

    def __init__(self, processor: Processor, place: Place, by: float) -> None:
        self._processor = processor
        self._place = place
        self._by = by

    def __enter__(self) -> None:
        self._processor.wait(self._place, self._by)
        self._began = perf_counter()

    def __exit__(self, *_: object) -> None:
        self._processor.pass_on(self._place, perf_counter() - self._began)
