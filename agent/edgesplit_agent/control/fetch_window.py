"""Congestion window of a chunk download: decides which chunks to request now. Pure bookkeeping of what is wanted, in
flight and received, with the time passed in.

The window is twice the link's bandwidth-delay product (the highest rate observed, times the lowest delay observed:
Cardwell et al., BBR, ACM Queue 2016), so that a long link is filled and a slow one is not flooded. Chunks requested by
other devices of a group arrive by the same topics and count as received. While such a stream flows nothing is
requested, so that one stream feeds the group, and a device that joined late requests only what it missed when the
stream ends.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Container, Mapping
from dataclasses import dataclass, field

from edgesplit.backoff import Backoff
from edgesplit.limits import LIMITS

INITIAL_WINDOW_BYTES = 2 * LIMITS.chunk_bytes
"""Window before anything is known of the link."""
MAX_WINDOW_BYTES = 128 * LIMITS.chunk_bytes
"""Largest window: what is received is held in memory until it is on disk."""
WINDOW_GAIN = 2.0
"""Window as a multiple of the bandwidth-delay product."""
MIN_DELAY_S = 0.03
"""Lower bound of the delay in the bandwidth-delay product: on a faster link the time is spent in threads that wait for
each other, not on the link."""
RATE_SAMPLES = 32
"""Number of chunks over which the highest rate is taken."""
INITIAL_TIMEOUT = Backoff(first_s=20.0, longest_s=80.0)
"""Timeout of chunks in flight before anything is known of the link."""
MAX_TIMEOUT_S = 60.0
"""Longest timeout of chunks in flight once rate and delay are known, back-off of repeated timeouts included."""
TIMEOUT_FACTOR = 4.0
"""Timeout of chunks in flight, as a multiple of the time that they are expected to take."""
OVERTAKEN_WINDOWS = 2.0
"""A chunk counts as lost once this many windows of bytes have been received since its request."""
MAX_TIMEOUTS = 4
"""Number of timeouts in a row after which the link counts as lost. After each, all chunks in flight are requested
again."""
ESTIMATE_TIMEOUTS = 2
"""Number of timeouts in a row after which the observed rate and delay are discarded. A single one is usually the end of
a window that was lost."""
SUBSCRIBE_AHEAD_S = 10.0
"""Seconds of this link's traffic for which chunks are subscribed ahead of their request."""
MIN_SUBSCRIBED = 8
"""Least number of chunks that are subscribed ahead, however slow the link. A slow link gets few: other devices' chunks
arrive at the rate of their link, and would fill this one's queue at the broker."""
OTHER_STREAM_HOLD_S = 0.3
"""Seconds without requests after a chunk that another device requested."""
SLOW_RETRIEVAL_S = 60.0
"""Seconds over which the rate is measured for `MIN_BYTES_PER_S`."""
MIN_BYTES_PER_S = 2_000.0
"""A download slower than this over `SLOW_RETRIEVAL_S` is ended: a link that barely works, or a peer that stalls on
purpose (TUF: slow retrieval attack)."""


@dataclass(slots=True)
class _InFlight:
    """A chunk in flight."""

    requested_at: float
    """When it was requested."""
    received_before: int
    """Bytes that had been received when it was requested."""


@dataclass(slots=True)
class FetchWindow:
    """The congestion window of one release's download. Times are of one monotonic clock, in seconds."""

    wanted: Mapping[str, int]
    """Size by digest, in the order in which chunks are requested."""
    began: float
    """When the download began."""
    cap_bytes_per_s: float = float("inf")
    """Limit of the request rate: over any ten seconds it is exceeded by at most a twentieth, or by one chunk where that
    is more."""
    jitter: float = 0.0
    """In [0, 1): prolongs `OTHER_STREAM_HOLD_S`, so that the devices of a group do not all request at once."""
    listen_first_s: float = 0.0
    """Seconds without requests at the beginning: a stream for other devices may flow already."""
    received_bytes: int = 0
    """Bytes received."""
    repeated_requests: int = 0
    """Number of chunks that were requested again."""
    _to_request: deque[str] = field(default_factory=deque)
    """Chunks that are still to be requested, in order; may contain some that have been received or are in flight."""
    _received: set[str] = field(default_factory=set)
    """Digests of the chunks received."""
    _in_flight: dict[str, _InFlight] = field(default_factory=dict)
    """Chunks in flight by digest, in the order of their requests."""
    _in_flight_bytes: int = 0
    """Bytes in flight."""
    _rates: deque[float] = field(default_factory=lambda: deque(maxlen=RATE_SAMPLES))
    """Rates of the last chunks, in bytes per second."""
    _min_delay_s: float = float("inf")
    """Lowest delay observed between request and receipt of a chunk."""
    _last_progress_at: float = 0.0
    """When something was received last, or was requested after nothing had been in flight."""
    _timeouts: int = 0
    """Timeouts in a row."""
    _held_until: float = 0.0
    """Nothing is requested before."""
    _rate_used_until: float = 0.0
    """Time until which the bytes requested so far use up the permitted rate (token bucket, as a time)."""
    _progress_log: deque[tuple[float, int]] = field(default_factory=deque)
    """Time and bytes received, over the last `SLOW_RETRIEVAL_S`."""

    def __post_init__(self) -> None:
        self._to_request = deque(self.wanted)
        self._last_progress_at = self._rate_used_until = self.began
        self._held_until = self.began + self.listen_first_s
        self._progress_log.append((self.began, 0))

    @property
    def is_done(self) -> bool:
        """Whether everything has been received."""
        return len(self._received) == len(self.wanted)

    @property
    def bytes_per_s(self) -> float:
        """The highest recent rate; 0 while unknown."""
        return max(self._rates, default=0.0)

    @property
    def window_bytes(self) -> float:
        """Window size: bytes that may be in flight at once."""
        estimate = WINDOW_GAIN * self.bytes_per_s * max(self._min_delay_s, MIN_DELAY_S) if self._rates else 0.0
        return min(max(estimate, INITIAL_WINDOW_BYTES), MAX_WINDOW_BYTES)

    def subscribe_ahead_count(self, limit: int) -> int:
        """Number of chunks to subscribe ahead, at most `limit`: chunks published for other devices fill a slow link's
        queue at the broker, and delay what this device requested."""
        if not self._rates:
            return limit
        return min(limit, max(MIN_SUBSCRIBED, int(self.bytes_per_s * SUBSCRIBE_AHEAD_S / LIMITS.chunk_bytes)))

    def next_chunks(self, limit: int) -> list[str]:
        """The next chunks that have not been received, in order, at most `limit`: those worth subscribing to."""
        chunks = list(self._in_flight)
        for sha256 in self._to_request:
            if len(chunks) >= limit:
                break
            if sha256 not in self._received and sha256 not in self._in_flight:
                chunks.append(sha256)
        return chunks[:limit]

    def next_request(self, now: float, subscribed: Container[str] | None = None) -> tuple[str, ...]:
        """The chunks to request now, lost ones first, at most `LIMITS.fetch_window_chunks`; they are in flight from now
        on. Only those in `subscribed` (None: all)."""
        if now < self._held_until:
            return ()
        self._requeue_lost(now)
        chosen: list[str] = []
        while self._to_request and len(chosen) < LIMITS.fetch_window_chunks:
            sha256 = self._to_request[0]
            if sha256 in self._received or sha256 in self._in_flight:
                self._to_request.popleft()
                continue
            size = self.wanted[sha256]
            if subscribed is not None and sha256 not in subscribed:
                break
            # At least one chunk may be in flight, however small the window.
            if (
                self._in_flight_bytes and self._in_flight_bytes + size > self.window_bytes
            ) or now < self._rate_used_until:
                break
            self._to_request.popleft()
            if not self._in_flight_bytes:
                self._last_progress_at = now
            chosen.append(sha256)
            self._in_flight[sha256] = _InFlight(now, self.received_bytes)
            self._in_flight_bytes += size
            self._rate_used_until = max(self._rate_used_until, now - self._burst_s) + size / self.cap_bytes_per_s
        return tuple(chosen)

    def on_received(self, sha256: str, now: float) -> bool:
        """A chunk was received with the right digest. False where it is not wanted, or was received before."""
        if sha256 not in self.wanted or sha256 in self._received:
            return False
        self._received.add(sha256)
        request = self._in_flight.pop(sha256, None)
        self.received_bytes += self.wanted[sha256]
        self._last_progress_at, self._timeouts = now, 0
        if request is None:  # another device requested it: let its stream go on before requesting anything
            self._held_until = now + OTHER_STREAM_HOLD_S * (1 + self.jitter)
            return True
        self._in_flight_bytes -= self.wanted[sha256]
        took_s = max(now - request.requested_at, 1e-6)
        self._min_delay_s = min(self._min_delay_s, took_s)
        # Delivery rate as BBR samples it: all bytes received between the request and the receipt, over that time.
        self._rates.append((self.received_bytes - request.received_before) / took_s)
        return True

    def next_event_at(self, now: float) -> float:
        """The next time at which time alone changes the result of `next_request` or `failure`."""
        times = [self._last_progress_at + self._timeout_s, self._progress_log[0][0] + SLOW_RETRIEVAL_S]
        if self._held_until > now:
            times.append(self._held_until)
        if self._to_request and self._rate_used_until > now:
            times.append(self._rate_used_until)
        return min(times)

    def failure(self, now: float) -> str:
        """Why the download has failed; empty while it may go on."""
        if self._timeouts >= MAX_TIMEOUTS:
            return f"no chunk received after {MAX_TIMEOUTS} requests"
        self._progress_log.append((now, self.received_bytes))
        while now - self._progress_log[0][0] > SLOW_RETRIEVAL_S and len(self._progress_log) > 1:
            since, received_then = self._progress_log.popleft()
            rate = (self.received_bytes - received_then) / (now - since)
            if rate < min(MIN_BYTES_PER_S, self.cap_bytes_per_s / 2):
                return f"only {rate:.0f} bytes per second received in the last {SLOW_RETRIEVAL_S:.0f} s"
        return ""

    @property
    def _burst_s(self) -> float:
        """Burst of the rate limit in seconds: for how long an unused rate may be made up for. With the one chunk that
        may exceed the limit it makes half a second's worth, which is a twentieth of ten seconds."""
        return min(0.25, max(0.0, 0.5 - LIMITS.chunk_bytes / self.cap_bytes_per_s))

    @property
    def _timeout_s(self) -> float:
        """Timeout of chunks in flight: seconds without any receipt."""
        if not self._rates:
            return INITIAL_TIMEOUT.pause_s(self._timeouts - ESTIMATE_TIMEOUTS)
        expected_s = self._min_delay_s + self._in_flight_bytes / self.bytes_per_s
        return Backoff(max(1.0, TIMEOUT_FACTOR * expected_s), MAX_TIMEOUT_S).pause_s(self._timeouts)

    def _requeue_lost(self, now: float) -> None:
        """Request lost chunks again: those that were overtaken by far, and all in flight after a timeout."""
        overtaken = []
        # A dict keeps the order of the requests, so the first chunk that was not overtaken ends the search.
        for sha256, request in self._in_flight.items():
            if self.received_bytes - request.received_before < OVERTAKEN_WINDOWS * self.window_bytes:
                break
            overtaken.append(sha256)
        for sha256 in reversed(overtaken):  # to the front of the queue, in their old order
            del self._in_flight[sha256]
            self._in_flight_bytes -= self.wanted[sha256]
            self._to_request.appendleft(sha256)
        self.repeated_requests += len(overtaken)
        if not self._in_flight or now < self._last_progress_at + self._timeout_s:
            return
        # Timeout: request everything in flight again. After `ESTIMATE_TIMEOUTS` in a row the link may have changed for
        # the worse, so rate and delay are learned anew, from the initial window.
        self.repeated_requests += len(self._in_flight)
        self._to_request.extendleft(reversed(self._in_flight))
        self._in_flight.clear()
        self._in_flight_bytes, self._last_progress_at = 0, now
        self._timeouts += 1
        if self._timeouts >= ESTIMATE_TIMEOUTS:
            self._rates.clear()
            self._min_delay_s = float("inf")
