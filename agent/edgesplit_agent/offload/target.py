"""One offload target as the engine sees it: its connections, the estimated link to it, and its circuit breaker.

Requests teach the estimates. Where there are none, a watcher thread probes: a target that failed, when the breaker's
pause is over; one that left a request unanswered, at once, to tell a dead target from a slow one; a link on which
nothing was sent for a while; and after a cancelled request it opens another connection. How the link is estimated is in
`policy.link_estimator`, when the target is avoided in `offload_client.circuit_breaker`. Faults that this design answers
are in docs/decisions/0045-links-that-flap.md.
"""

from __future__ import annotations

import logging
import random
import threading
from collections.abc import Callable
from dataclasses import dataclass
from time import monotonic

import msgspec

from edgesplit.offload_client.circuit_breaker import CircuitBreaker
from edgesplit.offload_client.pool import (
    PROBE_BYTES,
    CancellableCall,
    OffloadAnswer,
    OffloadClient,
    OffloadFailure,
    OffloadRequest,
    OffloadResult,
)
from edgesplit.plan import Conditions, Link, Row
from edgesplit_agent.policy.hedge_timing import MIN_OFFLOAD_WAIT_S
from edgesplit_agent.policy.link_estimator import LinkEstimate, is_probe_due

log = logging.getLogger(__name__)

IDLE_PROBE_S = 2.0
"""The link is probed when nothing else was sent for this many seconds."""
PING_TIMEOUT_S = 1.0
"""Base timeout of a ping in seconds when there is no suspicion."""
DOUBT_S = 0.4
"""Base timeout of a ping to a target that left a request unanswered; a few round trips are added."""
PROBE_TIMEOUT_S = 5.0
"""Timeout of a rate probe in seconds."""
OVERDUE_S = 0.75
"""A request unanswered for this long, and for three times its prediction, while no other was answered: the target is
dead."""
UNHEARD_S = 0.5
"""A target that loses a race is pinged if nothing was heard of it for this many seconds."""
UNANSWERED_S = 10.0
"""A target that loses every race and answered no request for this many seconds counts as failed: pings alone do not
answer requests."""
LONGEST_WAIT_S = 3600.0
"""Maximum sleep of the watcher in seconds."""
INITIAL_LINK = Link(up_bytes_per_s=1e6, down_bytes_per_s=1e6, rtt_s=0.05)
"""Link assumed until the first plan gives the one it was made for."""


@dataclass(frozen=True, slots=True)
class TargetTimeouts:
    """When a target counts as slow, suspect or dead, in seconds."""

    slow_s: float = MIN_OFFLOAD_WAIT_S
    overdue_s: float = OVERDUE_S
    doubt_s: float = DOUBT_S
    unheard_s: float = UNHEARD_S
    unanswered_s: float = UNANSWERED_S


TIMEOUTS = TargetTimeouts()


@dataclass(frozen=True, slots=True)
class TargetSnapshot:
    """An offload target at one moment: everything that selecting a row needs of it."""

    estimate: LinkEstimate
    """Estimates of the link, of the server's load and of the device's speed."""
    breaker: CircuitBreaker
    in_flight: int
    """Requests in flight that were admitted in the breaker's present state."""
    taken_at: float
    """Monotonic time of this view."""
    has_server: bool = True

    @property
    def is_available(self) -> bool:
        """Whether one more request may be sent."""
        # On trial the breaker admits few requests: only those admitted in this state count against its room.
        return self.has_server and self.breaker.has_room(self.in_flight)

    @property
    def conditions(self) -> Conditions:
        """The estimates, as the plan's cost functions take them."""
        return self.estimate.conditions(self.has_server and self.breaker.is_allowing, self.taken_at)


@dataclass(frozen=True, eq=False, slots=True)
class Reservation:
    """A request's place with an offload target."""

    since: float
    """`since` of the breaker's state that admitted it: requests that hang from an earlier state do not use up the
    places of a trial."""


class OffloadTarget:
    """One offload target. Thread-safe. Without a `remote` it is never available, and only the device's speed is
    learnt."""

    def __init__(
        self,
        remote: OffloadClient | None,
        idle_probe_s: float = IDLE_PROBE_S,
        timeouts: TargetTimeouts = TIMEOUTS,
        *,
        clock: Callable[[], float] = monotonic,
        jitter: Callable[[], float] = random.random,
    ) -> None:
        self._remote = remote
        self._idle_probe_s = idle_probe_s
        self.timeouts = timeouts
        self._clock, self._jitter = clock, jitter
        self._lock = threading.Lock()
        self._estimate: LinkEstimate | None = None
        self._breaker = CircuitBreaker()
        self._reservations: set[Reservation] = set()
        """Of the requests in flight."""
        self._last_sent = float("-inf")
        self._answered_at = float("-inf")
        """Monotonic time at which a request was last answered, in full or by a refusal of its input."""
        self._heard_at = float("-inf")
        """Monotonic time of the last answer to a request or a ping."""
        self._suspected_at: float | None = None
        self._needs_connection = False
        """A request was cancelled, and its connection with it: open another before the next request needs one."""
        self._last_bytes = 0
        """Bytes of the last request, which may still be in flight."""
        self._watch = threading.Condition()
        self._stopping = False
        self._watcher = threading.Thread(target=self._watch_link, name="link", daemon=True)

    # Life cycle

    def start(self) -> None:
        """Start watching the link."""
        if self._remote is not None and not self._stopping:
            self._watcher.start()

    def stop(self) -> None:
        """Close the connections; requests that wait for an answer finish locally."""
        with self._watch:
            self._stopping = True
            self._watch.notify_all()
        if self._remote is not None:
            self._remote.close()

    def assume_link(self, link: Link) -> None:
        """Assume the link for which a plan was made, unless one was measured already."""
        with self._lock:
            self._estimate = self._estimate or LinkEstimate.from_link(link)
        self._wake_watcher()

    @property
    def is_warm(self) -> bool:
        """Whether an open connection is free, so that the next request needs no handshake."""
        return self._remote is not None and self._remote.is_warm

    @property
    def breaker(self) -> CircuitBreaker:
        """The current state of the circuit breaker."""
        return self._breaker

    @property
    def in_flight(self) -> int:
        """Number of requests in flight to this target."""
        return len(self._reservations)

    @property
    def conditions(self) -> Conditions:
        """Current estimates of link, server and device."""
        return self.snapshot().conditions

    # One request

    def snapshot(self) -> TargetSnapshot:
        """The target at this moment."""
        with self._lock:
            return self._snapshot()

    def _snapshot(self) -> TargetSnapshot:
        now, breaker = self._clock(), self._breaker
        self._estimate = self._estimate.without_expired_hop(now) if self._estimate is not None else None
        estimate = self._estimate or LinkEstimate.from_link(INITIAL_LINK)
        in_flight = sum(reservation.since == breaker.since for reservation in self._reservations)
        return TargetSnapshot(estimate, breaker, in_flight, now, self._remote is not None)

    def reserve(self) -> Reservation | None:
        """Reserve a place for one request until `release`; None where the breaker has opened since the snapshot, or
        other requests have taken its places."""
        with self._lock:
            snapshot = self._snapshot()
            if not snapshot.is_available:
                return None
            reservation = Reservation(snapshot.breaker.since)
            self._reservations.add(reservation)
            return reservation

    def release(self, reservation: Reservation) -> None:
        """Give a reserved place back."""
        with self._lock:
            self._reservations.remove(reservation)

    def ask(self, asked: OffloadRequest, call: CancellableCall, timeout_s: float) -> OffloadResult:
        """Send one request and learn from the outcome. Never raises; blocks for at most `timeout_s`."""
        sent_at = self._clock()
        with self._lock:
            self._last_sent, self._last_bytes = sent_at, asked.up_bytes
        try:
            if self._remote is None:
                return OffloadFailure("refused", "there is no offload server")
            outcome = self._remote.infer(asked, call, timeout_s)
        except Exception as error:
            log.exception("the exchange with the cloud failed")
            outcome = OffloadFailure("link", str(error))
        if not call.is_cancelled:  # a cancelled request was accounted for by `on_lost_race` or `on_abandoned`
            self._learn(asked.up_bytes, outcome, sent_at)
        return outcome

    def on_lost_race(self, up_bytes: int, waited_s: float) -> None:
        """The device answered before this target was late: a lower bound for the link, and no failure of the target.

        A slow link and a dead target lose races alike. A target that was not heard of for `unheard_s` is therefore
        pinged; one that has answered no request for `unanswered_s`, though it answers pings, counts as failed.
        """
        now = self._clock()
        with self._lock:
            self._needs_connection = True
            unheard = now - self._heard_at > self.timeouts.unheard_s
            unanswered = now - self._answered_at > self.timeouts.unanswered_s
            if self._estimate is not None and not unanswered:  # else `on_abandoned` below records the same bound
                self._estimate = self._estimate.after_timeout(up_bytes, waited_s, now)
        if unanswered:
            self.on_abandoned(up_bytes, waited_s)
        elif unheard:
            self.on_slow(waited_s)
        self._wake_watcher()

    def on_abandoned(self, up_bytes: int, waited_s: float) -> None:
        """The request was abandoned because the target was late: a timeout."""
        self._learn(up_bytes, OffloadFailure("timeout", "abandoned: too late", waited_s), self._clock() - waited_s)

    def on_slow(self, waited_s: float, up_bytes: int = 0) -> None:
        """A request has waited longer than it should: ping the target, and learn a lower bound for the link.

        `up_bytes` are those of the request; 0 where they must not count. The next request is chosen with that lower
        bound.
        """
        sent_at = self._clock() - waited_s
        with self._lock:
            if self._estimate is not None:
                self._estimate = self._estimate.after_timeout(up_bytes, waited_s, self._clock())
            # Heard of since the request was sent: slow, not dead. Breaker open: a probe is scheduled already.
            if self._heard_at >= sent_at or not self._breaker.is_allowing:
                return
            self._suspected_at = self._suspected_at or self._clock()
        self._wake_watcher()

    def on_overdue(self, waited_s: float) -> None:
        """A request has waited for `overdue_s` and several times its prediction. If no other request was answered
        meanwhile, the target counts as dead, even if its connections hold."""
        sent_at = self._clock() - waited_s
        with self._lock:
            if self._answered_at >= sent_at:  # another request was answered meanwhile
                return
        failure = OffloadFailure("timeout", f"nothing answered for {waited_s:.2f} s", waited_s)
        self._learn(0, failure, sent_at, dead=True)

    def on_further_hop(self, row: Row, outcome: OffloadResult) -> None:
        """Learn what a gateway reported about its own uplink in its answer to a request by `row`."""
        if not isinstance(outcome, OffloadAnswer) or not outcome.hop_s:
            return
        with self._lock:
            if self._estimate is not None:
                link_s, answered = outcome.hop_s - outcome.hop_server_s, not outcome.hop_cause
                self._estimate = self._estimate.after_further_hop(row, link_s, self._clock(), answered=answered)

    def on_compute(self, measured_s: float, predicted_s: float) -> None:
        """Learn how fast this device is relative to its plan."""
        with self._lock:
            if self._estimate is not None:
                self._estimate = self._estimate.after_compute(measured_s, predicted_s, self._clock())

    def on_repriced(self) -> None:
        """A plan has this device's own seconds from now on: what it took before relative to the plan says nothing."""
        with self._lock:
            if self._estimate is not None:
                self._estimate = msgspec.structs.replace(self._estimate, device_slowdown=1.0)

    # Learning

    def _learn(self, up_bytes: int, outcome: OffloadResult, sent_at: float, *, dead: bool = False) -> None:
        """Update breaker and estimates from the outcome of a request sent at `sent_at`; `dead` opens the breaker at
        once."""
        now = self._clock()
        with self._lock:
            before = self._breaker.state
            if isinstance(outcome, OffloadAnswer):
                self._breaker = self._breaker.after_success(now)
                self._answered_at = self._heard_at = now
                if self._estimate is not None:
                    measured = self._estimate.after_transfer(up_bytes, outcome.down_bytes, outcome.link_s, now)
                    self._estimate = measured.after_load_report(outcome.load, now)
            elif outcome.cause == "rejected":  # a bad input is no failure of the target
                self._answered_at = self._heard_at = now
            else:
                refused = dead or outcome.cause == "refused"
                self._breaker = self._breaker.after_failure(now, self._jitter(), refused=refused, sent_at=sent_at)
                # Only silence bounds the rate; a refusal or a broken connection may be immediate.
                if outcome.cause == "timeout" and self._estimate is not None:
                    self._estimate = self._estimate.after_timeout(up_bytes, outcome.elapsed_s, now)
            after = self._breaker.state
        if isinstance(outcome, OffloadFailure):
            log.info("cloud: %s: %s", outcome.cause, outcome.text)
            if outcome.cause == "timeout":
                self.on_slow(outcome.elapsed_s)
        self._on_breaker_change(before, after)

    def _on_breaker_change(self, before: str, after: str) -> None:
        """Log a change of the breaker's state and wake the watcher, which schedules the probe."""
        if before != after:
            log.warning("breaker: %s -> %s", before, after)
            self._wake_watcher()

    # Watching

    def _wake_watcher(self) -> None:
        with self._watch:
            self._watch.notify_all()

    def _watch_link(self) -> None:
        assert self._remote is not None
        while True:
            with self._watch:
                if self._stopping:
                    return
                pause_s = self.seconds_until_probe()
                cold, self._needs_connection = self._needs_connection, False
                if pause_s > 0 and not cold:
                    self._watch.wait(pause_s)
                    continue
            try:
                if pause_s > 0:
                    self._remote.warm(PING_TIMEOUT_S)
                else:  # the probe opens a connection too
                    self.probe()
            except Exception:
                log.exception("the link's probe failed")
                with self._watch:
                    self._watch.wait(self._idle_probe_s)

    def seconds_until_probe(self) -> float:
        """Seconds until the next probe is due; 0 or less: now."""
        with self._lock:
            if self._estimate is None:
                return LONGEST_WAIT_S
            if not self._breaker.is_allowing:  # open: the breaker's pause decides
                return min(LONGEST_WAIT_S, self._breaker.probe_at - self._clock())
            if self._suspected_at is not None or is_probe_due(self._clock(), self._last_sent, self._idle_probe_s):
                return 0.0
            return min(LONGEST_WAIT_S, self._last_sent + self._idle_probe_s - self._clock())

    def probe(self) -> None:
        """Measure the round trip on a connection that stays open; then, unless a request is waiting, the rate."""
        remote = self._remote
        assert remote is not None
        sent_at = self._clock()
        with self._lock:
            self._last_sent = sent_at
            doubted, self._suspected_at = self._suspected_at is not None, None
            # Only a suspicious target's last request may still be in flight; otherwise it was answered long ago.
            beside_bytes = self._last_bytes if doubted or not self._breaker.is_allowing else 0
            rtt_s = self._estimate.rtt_s if self._estimate else 0.0
        pinged_s = remote.ping(self.timeouts.doubt_s + 4 * rtt_s if doubted else PING_TIMEOUT_S + 8 * rtt_s)
        if isinstance(pinged_s, OffloadFailure):
            self._on_ping_failure(pinged_s, doubted=doubted)
            return
        now = self._clock()
        with self._lock:
            before = self._breaker.state
            self._breaker = self._breaker.after_probe(now)
            self._heard_at = now
            after = self._breaker.state
            if self._estimate is not None:
                self._estimate = self._estimate.after_round_trip(pinged_s, beside_bytes)
        if before != after:
            log.warning("breaker: the probe succeeded, the cloud is on trial")
        if not doubted:  # a rate probe would delay the waiting request
            self._probe_rate(remote)

    def _on_ping_failure(self, failure: OffloadFailure, *, doubted: bool) -> None:
        """A ping failed. If it was caused by a hanging request or refused, the target counts as dead at once."""
        now = self._clock()
        with self._lock:
            before = self._breaker.state
            certain = doubted or failure.cause == "refused"
            self._breaker = self._breaker.after_failure(now, self._jitter(), refused=certain, probe=True)
            after = self._breaker.state
        log.info("cloud: ping: %s: %s", failure.cause, failure.text)
        self._on_breaker_change(before, after)

    def _probe_rate(self, remote: OffloadClient) -> None:
        """Measure the uplink's rate by a probe body."""
        outcome = remote.probe(PROBE_TIMEOUT_S)
        with self._lock:
            self._last_sent = now = self._clock()
            if self._estimate is None:
                return
            if isinstance(outcome, OffloadAnswer):
                self._estimate = self._estimate.after_transfer(
                    outcome.up_bytes, outcome.down_bytes, outcome.link_s, now
                )
            elif outcome.cause == "timeout":
                self._estimate = self._estimate.after_timeout(PROBE_BYTES, outcome.elapsed_s, now)
