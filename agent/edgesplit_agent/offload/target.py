"""One offload server as the engine sees it: its connections, what the link to it is like, whether it is left alone.

Requests teach it; where none do, a thread probes: a cloud that failed, when its pause is over; one that left a request
unanswered, at once, to tell a dead one from a slow one; a link on which nothing was sent for a while. How the link is
estimated is `link_meter`, when the cloud is left alone `breaker`.
"""

from __future__ import annotations

import logging
import random
import threading
from collections.abc import Callable
from time import monotonic

from edgesplit.offload_client.circuit_breaker import Breaker
from edgesplit.offload_client.pool import PROBE_BYTES, Ask, Call, Outcome, Remote, RemoteAnswer, RemoteFailure
from edgesplit.plan import Conditions, Link, Row
from edgesplit_agent.policy.link_estimator import LinkMeter, probe_due
from edgesplit_agent.policy.row_selection import Choice, Situation

log = logging.getLogger(__name__)

IDLE_PROBE_S = 2.0
"""The link is probed when nothing else was sent for this long."""
PING_TIMEOUT_S = 1.0
DOUBT_S = 0.4
"""A cloud that left a request unanswered is given this, and a few round trips, to show that it lives."""
PROBE_TIMEOUT_S = 5.0
OVERDUE_S = 0.75
"""A request unanswered for so long, and three times what it should take, with no other answered since: nobody there."""
UNHEARD_S = 0.5
"""A cloud that loses every race is believed to live for so long since it was last heard of; then it is pinged."""
UNANSWERED_S = 10.0
"""Pings do not answer requests: a cloud that loses every race and answered none for so long is as good as gone."""
LONGEST_WAIT_S = 3600.0
WAKE_UP = Link(up_bytes_per_s=1e6, down_bytes_per_s=1e6, rtt_s=0.05)
"""Assumed until the first plan says what link it was made for."""


class Cloud:
    """Thread-safe. With no `remote` it is never there, and only what the device teaches is kept."""

    def __init__(self, remote: Remote | None, idle_probe_s: float = IDLE_PROBE_S) -> None:
        self._remote = remote
        self._idle_probe_s = idle_probe_s
        self._lock = threading.Lock()
        self._meter: LinkMeter | None = None
        self._breaker = Breaker()
        self._leaves: dict[int, float] = {}
        """Requests that may go to it and are not back, by thread: since when the breaker's state is, in which they were
        let go. Those that hang from before take nobody's room on trial."""
        self._last_sent = float("-inf")
        self._answered_at = float("-inf")
        """When a request was last answered, in full or by a refusal of its input."""
        self._heard_at = float("-inf")
        """When anything was."""
        self._doubted_at: float | None = None
        self._cold = False
        """A request was called off, and its connection with it: another is opened before the next request needs it."""
        self._last_bytes = 0
        """That the last request sent up, and which may still be on their way."""
        self._watch = threading.Condition()
        self._stopping = False
        self._watcher = threading.Thread(target=self._watch_link, name="link", daemon=True)

    # What owners call

    def start(self) -> None:
        """Begin to watch the link."""
        if self._remote is not None and not self._stopping:
            self._watcher.start()

    def stop(self) -> None:
        """Close the connections; what waits on them finishes alone."""
        with self._watch:
            self._stopping = True
            self._watch.notify_all()
        if self._remote is not None:
            self._remote.close()

    def suppose(self, link: Link) -> None:
        """The link that a plan was made for: as good as any until one was measured."""
        with self._lock:
            self._meter = self._meter or LinkMeter.of(link)
        self._wake_watcher()

    @property
    def is_warm(self) -> bool:
        """A connection is open and free: the next request pays no handshake."""
        return self._remote is not None and self._remote.is_warm

    @property
    def breaker(self) -> Breaker:
        """How it is doing."""
        return self._breaker

    @property
    def out(self) -> int:
        """Requests that are with it, or on their way."""
        return len(self._leaves)

    @property
    def conditions(self) -> Conditions:
        """What is known of link, server and device now."""
        with self._lock:
            return self._conditions(self._breaker.lets_through)

    # One request

    def decide(self, choose: Callable[[Situation], Choice | None]) -> Choice | None:
        """What `choose` takes in today's situation. A row that needs this cloud may go there until `leave`."""
        with self._lock:
            breaker = self._breaker
            out = sum(since == breaker.since for since in self._leaves.values())
            there = self._remote is not None and breaker.has_room(out)
            now = monotonic()
            self._meter = self._meter.forgetting(now) if self._meter is not None else None
            choice = choose(Situation(self._meter or LinkMeter.of(WAKE_UP), now, there))
            if choice is not None and not choice.row.is_local:
                self._leaves[threading.get_ident()] = breaker.since
            return choice

    def leave(self) -> None:
        """The request of this thread needs the cloud no more."""
        with self._lock:
            self._leaves.pop(threading.get_ident(), None)

    def ask(self, asked: Ask, call: Call, timeout_s: float) -> Outcome:
        """The exchange, and what it teaches. Never raises; blocks until `timeout_s` at the most."""
        sent_at = monotonic()
        with self._lock:
            self._last_sent, self._last_bytes = sent_at, asked.up_bytes
        try:
            if self._remote is None:
                return RemoteFailure("refused", "there is no offload server")
            outcome = self._remote.infer(asked, call, timeout_s)
        except Exception as error:
            log.exception("the exchange with the cloud failed")
            outcome = RemoteFailure("link", str(error))
        if not call.dropped:
            self._learn(asked.up_bytes, outcome, sent_at)
        return outcome

    def outrun(self, up_bytes: int, waited_s: float) -> None:
        """The device was quicker, before the cloud was late: the link is no quicker than that, and nobody failed. A
        cloud that was not heard of for a while is asked whether it lives, for a slow link and a dead cloud lose races
        alike; one that lives, and only ever loses, is in the end as good as one that failed."""
        now = monotonic()
        with self._lock:
            self._cold = True
            unheard, unanswered = now - self._heard_at > UNHEARD_S, now - self._answered_at > UNANSWERED_S
            if self._meter is not None and not unanswered:
                self._meter = self._meter.gave_up(up_bytes, waited_s, now)
        if unanswered:
            self.gave_up(up_bytes, waited_s)
        elif unheard:
            self.doubt(waited_s)
        self._wake_watcher()

    def gave_up(self, up_bytes: int, waited_s: float) -> None:
        """Nobody waits for an answer any more: the cloud was slow."""
        self._learn(up_bytes, RemoteFailure("timeout", "given up", waited_s), monotonic() - waited_s)

    def doubt(self, waited_s: float, up_bytes: int = 0) -> None:
        """A request of so many bytes has had no answer for longer than it should take: see whether anybody is there.
        The next one is chosen knowing that the link is at least that slow."""
        sent_at = monotonic() - waited_s
        with self._lock:
            if self._meter is not None:
                self._meter = self._meter.gave_up(up_bytes, waited_s, monotonic())
            if self._heard_at >= sent_at or not self._breaker.lets_through:
                return
            self._doubted_at = self._doubted_at or monotonic()
        self._wake_watcher()

    def overdue(self, waited_s: float) -> None:
        """A request has had no answer for `OVERDUE_S`, and long beyond what it should take. Where no other had one
        since either, nobody is there, though connections may hold."""
        sent_at = monotonic() - waited_s
        with self._lock:
            if self._answered_at >= sent_at:
                return
        self._learn(0, RemoteFailure("timeout", f"nothing answered for {waited_s:.2f} s", waited_s), sent_at, dead=True)

    def went_further(self, row: Row, outcome: Outcome) -> None:
        """What a gateway told of the link beyond it, in its answer to a request by this row."""
        if not isinstance(outcome, RemoteAnswer) or not outcome.hop_s:
            return
        with self._lock:
            if self._meter is not None:
                link_s, answered = outcome.hop_s - outcome.hop_server_s, not outcome.hop_cause
                self._meter = self._meter.went_further(row, link_s, monotonic(), answered=answered)

    def computed(self, measured_s: float, predicted_s: float) -> None:
        """How fast this device is beside its plan."""
        with self._lock:
            if self._meter is not None:
                self._meter = self._meter.computed(measured_s, predicted_s)

    # What is learnt

    def _conditions(self, remote_ok: bool) -> Conditions:
        meter = self._meter or LinkMeter.of(WAKE_UP)
        return meter.conditions(self._remote is not None and remote_ok)

    def _learn(self, up_bytes: int, outcome: Outcome, sent_at: float, *, dead: bool = False) -> None:
        now = monotonic()
        with self._lock:
            was = self._breaker.state
            if isinstance(outcome, RemoteAnswer):
                self._breaker = self._breaker.succeeded(now)
                self._answered_at = self._heard_at = now
                if self._meter is not None:
                    down = outcome.down_bytes
                    self._meter = self._meter.transferred(up_bytes, down, outcome.link_s, now).loaded(outcome.load)
            elif outcome.cause == "rejected":  # a bad input says nothing about the cloud
                self._answered_at = self._heard_at = now
            else:
                refused = dead or outcome.cause == "refused"
                self._breaker = self._breaker.failed(now, random.random(), refused=refused, sent_at=sent_at)
                if outcome.cause == "timeout" and self._meter is not None:
                    self._meter = self._meter.gave_up(up_bytes, outcome.elapsed_s, now)
            state = self._breaker.state
        if isinstance(outcome, RemoteFailure):
            log.info("cloud: %s: %s", outcome.cause, outcome.text)
            if outcome.cause == "timeout":
                self.doubt(outcome.elapsed_s)
        self._moved(was, state)

    def _moved(self, was: str, now: str) -> None:
        if was != now:
            log.warning("breaker: %s -> %s", was, now)
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
                pause_s = self._until_probe()
                cold, self._cold = self._cold, False
                if pause_s > 0 and not cold:
                    self._watch.wait(pause_s)
                    continue
            try:
                if pause_s > 0:
                    self._remote.warm(PING_TIMEOUT_S)
                else:  # which warms, too
                    self._probe(self._remote)
            except Exception:
                log.exception("the link's probe failed")
                with self._watch:
                    self._watch.wait(self._idle_probe_s)

    def _until_probe(self) -> float:
        with self._lock:
            if self._meter is None:
                return LONGEST_WAIT_S
            if not self._breaker.lets_through:
                return min(LONGEST_WAIT_S, self._breaker.probe_at - monotonic())
            if self._doubted_at is not None or probe_due(monotonic(), self._last_sent, self._idle_probe_s):
                return 0.0
            return min(LONGEST_WAIT_S, self._last_sent + self._idle_probe_s - monotonic())

    def _probe(self, remote: Remote) -> None:
        """First the round trip, on a connection that is open afterwards; then, if there is no hurry, the rate."""
        sent_at = monotonic()
        with self._lock:
            self._last_sent = sent_at
            doubted, self._doubted_at = self._doubted_at is not None, None
            beside_bytes = self._last_bytes if doubted or not self._breaker.lets_through else 0  # else: long through
            rtt_s = self._meter.rtt_s if self._meter else 0.0
        pinged_s = remote.ping(DOUBT_S + 4 * rtt_s if doubted else PING_TIMEOUT_S + 8 * rtt_s)
        if isinstance(pinged_s, RemoteFailure):
            self._unreachable(pinged_s, doubted=doubted)
            return
        now = monotonic()
        with self._lock:
            was = self._breaker.state
            self._breaker = self._breaker.probed(now)
            self._heard_at = now
            state = self._breaker.state
            if self._meter is not None:
                self._meter = self._meter.round_trip(pinged_s, beside_bytes)
        if was != state:
            log.warning("breaker: the cloud is there again, trying it")
        if not doubted:
            self._rate(remote)

    def _unreachable(self, failure: RemoteFailure, *, doubted: bool) -> None:
        """A ping failed. One that was sent because a request hung settles it: nobody is there."""
        now = monotonic()
        with self._lock:
            was = self._breaker.state
            certain = doubted or failure.cause == "refused"
            self._breaker = self._breaker.failed(now, random.random(), refused=certain, probe=True)
            state = self._breaker.state
        log.info("cloud: ping: %s: %s", failure.cause, failure.text)
        self._moved(was, state)

    def _rate(self, remote: Remote) -> None:
        outcome = remote.probe(PROBE_TIMEOUT_S)
        with self._lock:
            self._last_sent = now = monotonic()
            if self._meter is None:
                return
            if isinstance(outcome, RemoteAnswer):
                self._meter = self._meter.transferred(outcome.up_bytes, outcome.down_bytes, outcome.link_s, now)
            elif outcome.cause == "timeout":
                self._meter = self._meter.gave_up(PROBE_BYTES, outcome.elapsed_s, now)
