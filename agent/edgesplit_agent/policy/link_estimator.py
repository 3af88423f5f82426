"""Estimates of link, server load and device speed, learnt from what real transfers took.

`LinkEstimate` is an immutable value: each measurement (`after_transfer(...)`) returns the next estimate. The uplink is
kept as seconds per byte, so that its average is the harmonic mean of the rates (an arithmetic mean is far too
optimistic on a link that varies). A small transfer says little about the rate, because the jitter of the round trip
hides it, and therefore has little weight. `spread` and `fades` record how wrong the estimate tends to be; from them
`completion_time` derives the probability of an answer in time. See docs/decisions/0025-deciding.md.

What is believed of the device's speed and of the server's load comes from requests alone, and a row that is avoided for
it brings no more of them. Such a belief therefore fades to the usual value while nothing confirms it (`fade`), until
the row is chosen, and so measured, again. See docs/decisions/0059-beliefs-that-fade.md.
"""

from __future__ import annotations

import math

import msgspec
from msgspec.structs import replace

from edgesplit.msgspec_warmup import warm_up_structs
from edgesplit.plan import Conditions, Link, Row, further_link
from edgesplit_agent.policy.completion_time import CompletionTime

SLOWEST_BYTES_PER_S = 500.0
"""Lower bound of the estimated uplink."""
FASTEST_BYTES_PER_S = 1e10
"""Upper bound of the estimated uplink."""
RATE_CHANGE_STD = 0.7
"""Process noise of the filter: standard deviation of the change in rate between two transfers, relative to the rate."""
MAX_GAIN = 0.8
"""Upper bound of the filter's gain: a single outlier must not turn the choice of rows over."""
JITTER_S = 0.001
"""Minimum uncertainty of a round trip in seconds."""
JITTER_RATIO = 0.1
"""Uncertainty of a round trip relative to itself; the larger of this and `JITTER_S` counts."""
INITIAL_SPREAD = 0.3
"""Initial `spread`, before anything was measured."""
INITIAL_FADES = 0.0
"""Initial `fades`, before anything was measured: the plan's link counts as reliable until a measurement contradicts it.
"""
SPREAD_WEIGHT = 0.2
"""Weight of one transfer in the exponential average of `spread`."""
FADE_MEMORY = 50
"""Number of transfers over which the rate of fades is averaged: fades are rare and costly."""
FADE_FACTOR = 2.0
"""An exchange that takes more than this many times its expected duration, round trip included, counts as a fade."""
FADED_LINK_FACTOR = 100.0
"""A link that has just faded may be this many times slower than estimated."""
SPREAD_DRIFT = 0.3
"""Growth of the spread per square root of a second without any measurement."""
SLOWDOWN_WEIGHT = 0.3
"""Weight of one run in the exponential average of the device's slowdown."""
BELIEF_HALF_LIFE_S = 10.0
"""Half-life in seconds of the difference between what is believed and what is usual, while nothing is measured."""
USUAL_HALF_LIFE_S = 300.0
"""Half-life in seconds of work by which the usual slowdown approaches a higher one that stays."""
USUAL_MEMORY_S = 3600.0
"""Half-life in seconds of a usual slowdown above 1 while nothing runs here: a device that was busy for long is tested
again, too."""
MAX_WORK_GAP_S = 60.0
"""The time between two runs counts as work for at most this many seconds: a run after a pause says more of what is
usual than the next run of a busy minute."""
SLOW = 1.2
"""Slowdown from which the device counts as slow (`slow_since`)."""
FURTHER_HOP_TTL_S = 60.0
"""Lifetime in seconds of what a gateway reported about its own uplink."""
MAX_SPREAD = 1.5
"""Upper bound of the spread used for decisions: a factor of e^1.5 = 4.5 either way."""


class LinkEstimate(msgspec.Struct, frozen=True):
    """Current estimates of link, server and device. Starts from the link for which the plan was made."""

    rtt_s: float
    up_s_per_byte: float
    down_s_per_byte: float
    server_load: float = 1.0
    """As of `load_heard_at`; `load_believed` is today's."""
    device_slowdown: float = 1.0
    """As of `computed_at`; `slowdown_believed` is today's."""
    transfers: int = 0
    spread: float = INITIAL_SPREAD
    """Standard deviation of the logarithm of a transfer's seconds per byte, relative to what was expected."""
    fades: float = INITIAL_FADES
    """Recent ratio of transfers that took far longer than expected (`FADE_FACTOR`)."""
    heard_at: float = -math.inf
    """Monotonic time of the last transfer that was informative about the rate; -inf before the first."""
    unanswered: int = 0
    """Transfers without an answer for longer than they should have taken: evidence against the plan's link."""
    further: LinkEstimate | None = None
    """Estimate of the gateway's own uplink, from what the gateway reports; None without a recent report."""
    further_at: float = -math.inf
    """Monotonic time of the last report about the further link."""
    load_heard_at: float = -math.inf
    """Monotonic time of the last report of the server's load; -inf before the first."""
    computed_at: float = -math.inf
    """Monotonic time of the last run on the device; -inf before the first."""
    usual_slowdown: float = 1.0
    """The slowdown when nothing else occupies the device: at once the least that was believed, and slowly a higher one
    that stays, as where the plan is wrong."""
    slow_since: float = -math.inf
    """Monotonic time since which the device has been `SLOW`; -inf: it is not."""

    @classmethod
    def from_link(cls, link: Link) -> LinkEstimate:
        """The initial estimate: the planned link."""
        return cls(link.rtt_s, 1.0 / link.up_bytes_per_s, 1.0 / link.down_bytes_per_s)

    @property
    def link(self) -> Link:
        """The estimated link, as rates in bytes per second and round-trip time in seconds."""
        return Link(
            up_bytes_per_s=1.0 / self.up_s_per_byte, down_bytes_per_s=1.0 / self.down_s_per_byte, rtt_s=self.rtt_s
        )

    def conditions(self, remote_usable: bool, now: float) -> Conditions:
        """The conditions by which a plan's row is chosen; `remote_usable` False excludes rows that offload."""
        return Conditions(
            link=self.link, server_load=self.load_believed(now), device_slowdown=self.slowdown_believed(now),
            remote_usable=remote_usable,
            further=self.further.link if self.further is not None else None,
        )  # fmt: skip

    def slowdown_believed(self, now: float) -> float:
        """The device's slowdown as believed at `now`: it fades to the usual one without runs on the device."""
        return fade(self.device_slowdown, self._usual_at(now), now - self.computed_at)

    def _usual_at(self, now: float) -> float:
        # A usual slowdown below 1 is kept: the plan's higher one would make the device look worse, and be tested less.
        return min(self.usual_slowdown, fade(self.usual_slowdown, 1.0, now - self.computed_at, USUAL_MEMORY_S))

    def load_believed(self, now: float) -> float:
        """The server's load as believed at `now`: without reports it fades to that of an idle server."""
        return fade(self.server_load, 1.0, now - self.load_heard_at)

    def completion_time(self, up_bytes: int, rest_s: float, now: float) -> CompletionTime:
        """Distribution of the time to an answer that needs `up_bytes` sent up and `rest_s` seconds for everything else.

        The spread grows with the silence since the last measurement (`SPREAD_DRIFT`), up to `MAX_SPREAD`.
        """
        silent_s = max(0.0, now - self.heard_at) if self.heard_at > -math.inf else 0.0
        spread = min(MAX_SPREAD, math.sqrt(self.spread**2 + SPREAD_DRIFT**2 * min(silent_s, 1e3)))
        return CompletionTime(rest_s, up_bytes * self.up_s_per_byte, spread, self.fades)

    def after_round_trip(self, seconds: float, beside_bytes: int = 0) -> LinkEstimate:
        """The estimate after an exchange so small that only the round trip counts; `seconds` excludes the server's own
        time.

        Up to `beside_bytes` of this device's data may have been on their way up at the same time, over a link that may
        just have faded. A longer round trip than estimated is ignored if waiting behind those bytes can explain it
        (docs/decisions/0045-links-that-flap.md).
        """
        seconds = max(seconds, 0.0)
        # The excess may be the time that the bytes beside it needed, even on a link FADED_LINK_FACTOR slower.
        if self.rtt_s < seconds <= self.rtt_s + FADED_LINK_FACTOR * beside_bytes * self.up_s_per_byte:
            return self
        # A shorter round trip is certain knowledge and weighs more; a longer one may be jitter.
        weight = 0.5 if seconds < self.rtt_s else 0.3
        return replace(self, rtt_s=self.rtt_s + weight * (seconds - self.rtt_s))

    def after_transfer(self, up_bytes: int, down_bytes: int, seconds: float, now: float | None = None) -> LinkEstimate:
        """The estimate after an answered request that spent `seconds` on the link (without the server's own time)."""
        rtt_s = min(self.rtt_s, max(seconds, 0.0))  # an exchange cannot be quicker than the round trip inside it
        up_s = max(0.0, seconds - rtt_s - down_bytes * self.down_s_per_byte)
        return replace(self._updated(up_bytes, up_s, rtt_s, now), rtt_s=rtt_s)

    def after_timeout(self, up_bytes: int, seconds: float, now: float | None = None) -> LinkEstimate:
        """The estimate after `seconds` without an answer: only a lower bound, the link is at least that slow."""
        up_s = seconds - self.rtt_s
        # A wait shorter than the estimated transfer teaches nothing: the answer was not yet due.
        if up_bytes <= 0 or up_s / up_bytes <= self.up_s_per_byte:
            return self
        return replace(self._updated(up_bytes, up_s, self.rtt_s, now), unanswered=self.unanswered + 1)

    def _updated(self, up_bytes: int, up_s: float, rtt_s: float, now: float | None) -> LinkEstimate:
        """One scalar Kalman step on the seconds per byte; the measurement noise is the round trip's jitter."""
        if up_bytes <= 0:
            return self
        # State: seconds per byte. Between transfers it performs a random walk with a deviation of
        # RATE_CHANGE_STD times its value. A transfer measures it with the round trip's jitter divided by its bytes as
        # noise, so small transfers have little gain.
        prior_variance = (RATE_CHANGE_STD * self.up_s_per_byte) ** 2
        noise_variance = (max(JITTER_S, JITTER_RATIO * rtt_s) / up_bytes) ** 2
        gain = prior_variance / (prior_variance + noise_variance)
        measured = max(up_s / up_bytes, 1.0 / FASTEST_BYTES_PER_S)
        blended = self.up_s_per_byte + min(MAX_GAIN, gain) * (measured - self.up_s_per_byte)
        log_error = abs(math.log(measured / self.up_s_per_byte))
        # Judged on the whole exchange: on a short transfer the jitter alone can double the transfer's own time.
        faded = rtt_s + up_s > FADE_FACTOR * (rtt_s + up_bytes * self.up_s_per_byte)
        return replace(
            self,
            up_s_per_byte=min(1.0 / SLOWEST_BYTES_PER_S, max(1.0 / FASTEST_BYTES_PER_S, blended)),
            # |log error| averages 0.8 (sqrt(2 / pi)) standard deviations for a normal distribution, hence 1.25. It is
            # capped at a fade, which `fades` counts separately.
            spread=self.spread + SPREAD_WEIGHT * gain * (1.25 * min(log_error, math.log(FADE_FACTOR)) - self.spread),
            # Averages over the first 5 transfers at the start, later over FADE_MEMORY.
            fades=self.fades + gain / min(FADE_MEMORY, 5 + self.transfers) * (float(faded) - self.fades),
            transfers=self.transfers + 1,
            # Only a transfer that determined the rate ends the silence by which the spread grows.
            heard_at=now if now is not None and gain > 0.5 else self.heard_at,
        )

    def after_further_hop(self, row: Row, seconds: float, now: float, *, answered: bool) -> LinkEstimate:
        """The estimate after a gateway waited `seconds` for the next tier, that tier's own time excluded.

        `answered` False: the next tier did not answer, so only a lower bound is learnt.
        """
        planned = further_link(row)
        if planned is None:
            return self
        hop, before = row.hops[0], self.further or LinkEstimate.from_link(planned)
        transfer_s = hop.up_bytes * before.up_s_per_byte + hop.down_bytes * before.down_s_per_byte
        if not answered:  # a lower bound only
            after = before.after_timeout(hop.up_bytes, seconds, now)
        elif transfer_s < before.rtt_s:  # so few bytes tell of the round trip, and nothing of the rate
            after = before.after_round_trip(seconds - transfer_s)
        else:
            after = before.after_transfer(hop.up_bytes, hop.down_bytes, seconds, now)
        return replace(self, further=after, further_at=now)

    def without_expired_hop(self, now: float) -> LinkEstimate:
        """The estimate without an expired report about the further link. That link is not probed: the planned values
        apply again."""
        has_expired = self.further is not None and now - self.further_at >= FURTHER_HOP_TTL_S
        return replace(self, further=None) if has_expired else self

    def after_load_report(self, factor: float, now: float) -> LinkEstimate:
        """The estimate after an answer that reported the server's load factor (1: idle)."""
        load = self.load_believed(now)
        return replace(self, server_load=max(1.0, load + 0.5 * (min(factor, 1000.0) - load)), load_heard_at=now)

    def after_compute(self, measured_s: float, predicted_s: float, now: float) -> LinkEstimate:
        """The estimate after the device ran slices in `measured_s` for which the plan predicts `predicted_s`."""
        if predicted_s <= 0.0:
            return self
        factor = min(50.0, max(0.05, measured_s / predicted_s))
        believed = self.slowdown_believed(now)
        slowdown = believed + SLOWDOWN_WEIGHT * (factor - believed)
        # A busy minute passes, and a plan that is wrong stays so: the usual slowdown is the lower envelope, which rises
        # with the time that the higher one lasts (as BBR's least round trip does by its window: Cardwell et al., 2016).
        work_s = min(max(0.0, now - self.computed_at), MAX_WORK_GAP_S) if self.computed_at > -math.inf else 0.0
        usual = min(slowdown, fade(self._usual_at(now), factor, work_s, USUAL_HALF_LIFE_S))
        was_slow = believed >= SLOW and self.slow_since > -math.inf
        slow_since = (self.slow_since if was_slow else now) if slowdown >= SLOW else -math.inf
        return replace(
            self, device_slowdown=slowdown, computed_at=now, usual_slowdown=usual, slow_since=slow_since
        )  # fmt: skip


def fade(believed: float, usual: float, age_s: float, half_life_s: float = BELIEF_HALF_LIFE_S) -> float:
    """What is left of a belief after `age_s` seconds without a measurement: usual + (believed - usual) * 2^(-age/T),
    the mean of a process that returns to its usual value (Uhlenbeck and Ornstein, 1930).

    A belief that was never measured (infinite age) stays as it is.
    """
    if believed == usual or not 0.0 < age_s < math.inf:
        return believed
    return usual + (believed - usual) * math.pow(2.0, -age_s / half_life_s)


def is_probe_due(now: float, last_sent: float, idle_s: float) -> bool:
    """Whether the link should be probed: only when nothing was sent for `idle_s` seconds."""
    return now - last_sent >= idle_s


warm_up_structs(__name__)
