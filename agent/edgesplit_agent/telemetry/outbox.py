"""Telemetry on its way: sent live, held until the controller has it, kept on disk where it cannot be had, sent late.

Live telemetry waits in memory until a `Kept` names it, for the broker takes what nobody stores. When the link goes, or
no `Kept` comes for `UNKEPT_S`, it goes into the ring; from there it is sent in batches, in order, at a bounded rate,
one at a time, each until the controller says that it has it. Whatever is sent twice the controller stores once. Time,
randomness and the wire are the caller's.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from edgesplit.errors import MalformedMessage
from edgesplit.mqtt import messages
from edgesplit.mqtt.messages import Kept, Late, Telemetry
from edgesplit.mqtt.telemetry import Moment, StoreSeen
from edgesplit_agent.host.clock import moment
from edgesplit_agent.telemetry.disk_ring import Ring

UNKEPT_S = 300.0
"""Controllers say about once a minute what they have."""
UNKEPT = 512
"""Live messages that may wait for that; older ones go to disk."""
BATCH_BYTES = 32_768
BATCH = 64
BYTES_PER_S = 8_192.0
"""Of late telemetry, on average: a slow uplink has better to do."""
ANSWER_S = 20.0
LONGEST_PAUSE_S = 600.0
SETTLE_S = 20.0
"""After a connection nothing late is sent for up to so long: ten thousand devices come back at once."""
FLUSH_S = 60.0
"""What is written to disk is written once in so long."""


@dataclass(frozen=True, slots=True)
class _Live:
    session: int
    sequence: int
    at: float
    worth: str
    payload: bytes
    moment: Moment


@dataclass(frozen=True, slots=True)
class _Sent:
    """A batch that waits for its answer."""

    number: int
    upto: int
    size: int
    at: float


@dataclass(frozen=True, slots=True)
class Pace:
    """When the next batch may go. `tries`: since one was answered."""

    next_at: float = 0.0
    tries: int = 0

    def connected(self, now: float, jitter: float) -> Pace:
        """The link is there (again)."""
        return Pace(now + SETTLE_S * jitter)

    def answered(self, now: float, size: int) -> Pace:
        """A batch of that size is with the controller."""
        return Pace(now + size / BYTES_PER_S)

    def unanswered(self, now: float, jitter: float) -> Pace:
        """It is not: whoever should answer may be gone, or have too much to do."""
        pause_s = min(LONGEST_PAUSE_S, ANSWER_S * 2.0 ** min(self.tries, 10))
        return Pace(now + pause_s * (0.5 + 0.5 * jitter), self.tries + 1)


class Outbox:
    """One device's telemetry that the controller may not have yet. Thread-safe. Times are monotonic."""

    def __init__(self, ring: Ring, moment: Callable[[], Moment] = moment) -> None:
        self._ring = ring
        self._moment = moment
        self._lock = threading.Lock()
        self._live: deque[_Live] = deque()
        self._sent: _Sent | None = None
        self._pace = Pace()
        self._number = 0
        self._flushed_at = float("-inf")

    def sent(self, message: Telemetry, payload: bytes, now: float) -> None:
        """That message was handed to the network."""
        with self._lock:
            one = _Live(message.session, message.sequence, now, worth_of(message), payload, self._when(message))
            self._live.append(one)
            while len(self._live) > UNKEPT or now - self._live[0].at > UNKEPT_S:
                self._put_by(self._live.popleft())

    def unsent(self, message: Telemetry, payload: bytes) -> None:
        """There was no network to hand that message to."""
        with self._lock:
            self._ring.add(worth_of(message), payload, self._when(message))

    def connected(self, now: float, jitter: float) -> None:
        """The link is there (again)."""
        with self._lock:
            self._sent = None
            self._pace = self._pace.connected(now, jitter)

    def lost(self) -> None:
        """The link is gone, and with it whatever was on its way."""
        with self._lock:
            self._sent = None
            while self._live:
                self._put_by(self._live.popleft())

    def kept(self, said: Kept, now: float) -> None:
        """The controller has stored something."""
        with self._lock:
            if said.sequence is not None:
                self._live = deque(
                    one for one in self._live if one.session != said.session or one.sequence > said.sequence
                )
            sent = self._sent
            if sent is not None and said.late == sent.number:
                self._ring.forget(sent.upto)
                self._sent, self._pace = None, self._pace.answered(now, sent.size)

    def due(self, now: float, jitter: float) -> Late | None:
        """The next batch, if it is time to send one."""
        with self._lock:
            if self._sent is not None and now - self._sent.at >= ANSWER_S:
                self._sent, self._pace = None, self._pace.unanswered(now, jitter)
            if self._sent is not None or now < self._pace.next_at:
                return None
            return self._next_batch(now)

    def tend(self, now: float, *, at_once: bool = False) -> None:
        """Write to disk what is due to be written."""
        with self._lock:
            if at_once or now - self._flushed_at >= FLUSH_S:
                self._flushed_at = now
                self._ring.flush(self._moment())

    def seen(self) -> StoreSeen:
        """For telemetry."""
        with self._lock:
            return self._ring.seen()

    def _put_by(self, one: _Live) -> None:
        self._ring.add(one.worth, one.payload, one.moment)

    def _when(self, message: Telemetry) -> Moment:
        return message.moment or self._moment()

    def _next_batch(self, now: float) -> Late | None:
        found = self._ring.batch(BATCH_BYTES, BATCH)
        measured = []
        for entry in found:
            try:
                measured.append(messages.decode(entry.payload, Telemetry))
            except MalformedMessage:  # of an agent that was another version
                continue
        if found and not measured:
            self._ring.forget(found[-1].number)
        if not measured:
            return None
        self._number += 1
        size = sum(len(entry.payload) for entry in found)
        self._sent = _Sent(self._number, found[-1].number, size, now)
        return Late(number=self._number, sent=self._moment(), measured=tuple(measured))


def worth_of(message: Telemetry) -> str:
    """What a message is worth when there is no room for all: trouble before work before idling."""
    power = message.power
    troubled = any(one.failed or one.fallbacks or one.trouble for one in message.models)
    weak = power is not None and (power.under_voltage or (power.speed is not None and power.speed < 1.0))
    if troubled or weak:
        return "trouble"
    return "busy" if any(one.requests for one in message.models) else "idle"
