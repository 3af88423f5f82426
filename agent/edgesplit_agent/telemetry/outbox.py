"""Telemetry outbox: sends telemetry live, keeps it until the controller acknowledges it, and re-sends it after an
outage.

Live messages stay in memory until an `Ack` names them, because the broker accepts messages that no subscriber stores.
When the link is lost, or no acknowledgement comes for `ACK_TIMEOUT_S`, they go to the disk ring. From there they are
sent in batches, in order, at a bounded rate, one at a time, each until it is acknowledged. The controller stores a
message once however often it is sent. Time, randomness and the network connection belong to the caller.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from edgesplit.backoff import Backoff
from edgesplit.errors import MalformedMessage
from edgesplit.mqtt import messages
from edgesplit.mqtt.messages import Ack, Backlog, Telemetry
from edgesplit.mqtt.telemetry import BacklogState, DeviceTime
from edgesplit_agent.host.clock import current_moment
from edgesplit_agent.telemetry.disk_ring import DiskRing

ACK_TIMEOUT_S = 300.0
"""Seconds after which an unacknowledged live message goes to disk; controllers acknowledge about once a minute."""
MAX_UNACKED = 512
"""Maximum number of unacknowledged live messages in memory; older ones go to disk."""
BATCH_BYTES = 32_768
"""Maximum payload of a batch in bytes."""
BATCH_MESSAGES = 64
"""Maximum number of messages in a batch."""
BYTES_PER_S = 8_192.0
"""Average rate of re-sent telemetry: a slow uplink has more important traffic."""
RESEND = Backoff(first_s=20.0, longest_s=600.0)
"""Time to wait for the acknowledgement of a batch before it is sent again."""
SETTLE_S = 20.0
"""Maximum random delay in seconds of the first batch after connecting: ten thousand devices may come back at once."""
FLUSH_S = 60.0
"""Minimum seconds between two writes to disk."""


@dataclass(frozen=True, slots=True)
class _LiveMessage:
    """A message sent live and not acknowledged yet."""

    session: int
    sequence: int
    at: float
    priority: str
    payload: bytes
    moment: DeviceTime


@dataclass(frozen=True, slots=True)
class _BatchInFlight:
    """A batch in flight, waiting for its acknowledgement."""

    number: int
    upto: int
    size: int
    at: float


@dataclass(frozen=True, slots=True)
class BatchSchedule:
    """When the next batch may be sent, after `tries` batches in a row without an acknowledgement."""

    next_at: float = 0.0
    tries: int = 0

    def connected(self, now: float, jitter: float) -> BatchSchedule:
        """After the link was established: a random delay."""
        return BatchSchedule(now + SETTLE_S * jitter)

    def acknowledged(self, now: float, size: int) -> BatchSchedule:
        """After a batch of `size` bytes was acknowledged: the pause that keeps the average rate."""
        return BatchSchedule(now + size / BYTES_PER_S)

    def unacknowledged(self, now: float, jitter: float) -> BatchSchedule:
        """After a batch was not acknowledged: exponential back-off with jitter, since the receiver may be gone or
        overloaded."""
        return BatchSchedule(now + RESEND.pause_s(self.tries, jitter), self.tries + 1)


class Outbox:
    """Telemetry of one device that the controller may not have yet. Thread-safe. Times are monotonic."""

    def __init__(self, ring: DiskRing, moment: Callable[[], DeviceTime] = current_moment) -> None:
        self._ring = ring
        self._moment = moment
        self._lock = threading.Lock()
        self._live: deque[_LiveMessage] = deque()
        self._sent: _BatchInFlight | None = None
        self._schedule = BatchSchedule()
        self._number = 0
        self._flushed_at = float("-inf")

    def on_sent(self, message: Telemetry, payload: bytes, now: float) -> None:
        """Record a message that was handed to the network."""
        with self._lock:
            priority, moment = priority_of(message), self._moment_of(message)
            live = _LiveMessage(message.session, message.sequence, now, priority, payload, moment)
            self._live.append(live)
            while len(self._live) > MAX_UNACKED or now - self._live[0].at > ACK_TIMEOUT_S:
                self._store(self._live.popleft())

    def on_unsent(self, message: Telemetry, payload: bytes) -> None:
        """Queue a message for which there was no network."""
        with self._lock:
            self._ring.add(priority_of(message), payload, self._moment_of(message))

    def on_connected(self, now: float, jitter: float) -> None:
        """The link was established."""
        with self._lock:
            self._sent = None
            self._schedule = self._schedule.connected(now, jitter)

    def on_disconnected(self) -> None:
        """The link was lost: everything unacknowledged goes to the disk ring."""
        with self._lock:
            self._sent = None
            while self._live:
                self._store(self._live.popleft())

    def on_ack(self, ack: Ack, now: float) -> None:
        """Process an acknowledgement from the controller."""
        with self._lock:
            if ack.sequence is not None:
                self._live = deque(
                    live for live in self._live if live.session != ack.session or live.sequence > ack.sequence
                )
            sent = self._sent
            if sent is not None and ack.batch == sent.number:
                self._ring.acknowledge(sent.upto)
                self._sent, self._schedule = None, self._schedule.acknowledged(now, sent.size)

    def next_batch(self, now: float, jitter: float) -> Backlog | None:
        """The next batch, if one is due; None otherwise, or while one is in flight."""
        with self._lock:
            if self._sent is not None and now - self._sent.at >= RESEND.first_s:
                self._sent, self._schedule = None, self._schedule.unacknowledged(now, jitter)
            if self._sent is not None or now < self._schedule.next_at:
                return None
            return self._take_batch(now)

    def flush(self, now: float, *, at_once: bool = False) -> None:
        """Write the buffered entries to disk if that is due, or now with `at_once`."""
        with self._lock:
            if at_once or now - self._flushed_at >= FLUSH_S:
                self._flushed_at = now
                self._ring.flush(self._moment())

    def to_telemetry(self) -> BacklogState:
        """Fill level and losses, for telemetry."""
        with self._lock:
            return self._ring.to_telemetry()

    def _store(self, live: _LiveMessage) -> None:
        self._ring.add(live.priority, live.payload, live.moment)

    def _moment_of(self, message: Telemetry) -> DeviceTime:
        return message.measured_at or self._moment()

    def _take_batch(self, now: float) -> Backlog | None:
        """Take the oldest messages into a batch; None if nothing is queued. Messages of another agent version are
        skipped."""
        queued = self._ring.batch(BATCH_BYTES, BATCH_MESSAGES)
        measured = []
        for entry in queued:
            try:
                measured.append(messages.decode(entry.payload, Telemetry))
            except MalformedMessage:  # written by another version of the agent
                continue
        if queued and not measured:  # nothing in it can be read: drop it, or it would block the queue
            self._ring.acknowledge(queued[-1].number)
        if not measured:
            return None
        self._number += 1
        size = sum(len(entry.payload) for entry in queued)
        self._sent = _BatchInFlight(self._number, queued[-1].number, size, now)
        return Backlog(batch=self._number, sent_at=self._moment(), messages=tuple(measured))


def priority_of(message: Telemetry) -> str:
    """Priority of a message for eviction: `trouble` for failures, fallbacks or weak power, `busy` for requests, else
    `idle`."""
    power = message.power
    troubled = any(model.failed or model.fallbacks or model.problem for model in message.models)
    weak = power is not None and (power.under_voltage or (power.clock_ratio is not None and power.clock_ratio < 1.0))
    if troubled or weak:
        return "trouble"
    return "busy" if any(model.requests for model in message.models) else "idle"
