"""What the link, the server and the device are like just now, estimated from what real transfers took.

Everything here is a value and arithmetic: `meter.transferred(...)` gives the next meter. The uplink is estimated as
seconds per byte, so its average is the harmonic one (an arithmetic mean of rates is far too hopeful on a link that
varies). A small transfer says little about the rate, because the round trip's jitter hides it, and weighs so. Beside
the estimate stands how wrong it tends to be: `spread` and `fades`, from which `odds` tells what a wait is worth.
"""

from __future__ import annotations

import math

import msgspec
from msgspec.structs import replace

from edgesplit.msgspec_warmup import settle
from edgesplit.plan import Conditions, Link, Row, further_link
from edgesplit_agent.policy.completion_time import Odds

SLOWEST_BYTES_PER_S = 500.0
FASTEST_BYTES_PER_S = 1e10
CHANGE = 0.7
"""How far, as a part of itself, the rate is believed to move from one transfer to the next."""
QUICKEST = 0.8
"""The weight of one transfer is at most this: one stray measurement does not turn the plan over."""
JITTER_S = 0.001
JITTER_PART = 0.1
"""A round trip is uncertain by a millisecond or this part of itself, whichever is more."""
FIRST_SPREAD, FIRST_FADES = 0.3, 0.0
"""Believed before anything was measured: the plan's link, until it shows otherwise."""
LEARNS_SPREAD = 0.2
REMEMBERS_FADES = 50
"""Fades are rare and costly: how often they come is averaged over so many transfers."""
FADE = 2.0
"""An exchange that takes more than so many times what was expected of it, round trip and all, met a fade."""
FADED = 100.0
"""How many times slower than believed a link may be that has just faded."""
DRIFT = 0.3
"""How much wider, per root of a second, the belief becomes while nothing is heard of the link."""
FURTHER_S = 60.0
"""So long what a gateway told of the link beyond it is believed."""
WIDEST = 1.5
"""A belief is never wider than this: a factor of 4.5 either way."""


class LinkMeter(msgspec.Struct, frozen=True):
    """The estimates. Starts from the link that the plan was made for."""

    rtt_s: float
    up_s_per_byte: float
    down_s_per_byte: float
    server_load: float = 1.0
    device_slowdown: float = 1.0
    transfers: int = 0
    spread: float = FIRST_SPREAD
    """Of the logarithm of a transfer's seconds per byte around what was expected of it."""
    fades: float = FIRST_FADES
    """The part of transfers that took far longer than expected, of late."""
    heard_at: float = -math.inf
    """Of the monotonic clock: when a transfer last told something of the rate. Before: the plan's link is
    believed."""
    unanswered: int = 0
    """Transfers that had no answer for longer than they should have taken: the link is not what was believed."""
    further: LinkMeter | None = None
    """Of the link beyond, by what a gateway tells of it; None: nothing was told of late."""
    further_at: float = -math.inf
    """When that was."""

    @classmethod
    def of(cls, link: Link) -> LinkMeter:
        """Before anything was measured."""
        return cls(link.rtt_s, 1.0 / link.up_bytes_per_s, 1.0 / link.down_bytes_per_s)

    @property
    def link(self) -> Link:
        """The link as it seems now."""
        return Link(
            up_bytes_per_s=1.0 / self.up_s_per_byte, down_bytes_per_s=1.0 / self.down_s_per_byte, rtt_s=self.rtt_s
        )

    def conditions(self, remote_ok: bool) -> Conditions:
        """What a plan chooses by."""
        return Conditions(
            link=self.link, server_load=self.server_load, device_slowdown=self.device_slowdown, remote_ok=remote_ok,
            further=self.further.link if self.further is not None else None,
        )  # fmt: skip

    def odds(self, up_bytes: int, rest_s: float, now: float) -> Odds:
        """When an answer will be here for which `up_bytes` must go up, and whose other parts take `rest_s`."""
        silent_s = max(0.0, now - self.heard_at) if self.heard_at > -math.inf else 0.0
        spread = min(WIDEST, math.sqrt(self.spread**2 + DRIFT**2 * min(silent_s, 1e3)))
        return Odds(rest_s, up_bytes * self.up_s_per_byte, spread, self.fades)

    def round_trip(self, seconds: float, beside_bytes: int = 0) -> LinkMeter:
        """After an exchange so small that only the round trip counts (the server's own time already taken off).

        `beside_bytes` of ours may have been on their way up, by a link that may just have faded: an exchange that took
        longer than believed may have waited behind them. One that took longer than even that tells of the round trip.
        """
        seconds = max(seconds, 0.0)
        if self.rtt_s < seconds <= self.rtt_s + FADED * beside_bytes * self.up_s_per_byte:
            return self
        weight = 0.5 if seconds < self.rtt_s else 0.3
        return replace(self, rtt_s=self.rtt_s + weight * (seconds - self.rtt_s))

    def transferred(self, up_bytes: int, down_bytes: int, seconds: float, now: float | None = None) -> LinkMeter:
        """After an answered request whose time on the link (elapsed less the server's own) was `seconds`."""
        rtt_s = min(self.rtt_s, max(seconds, 0.0))  # an exchange cannot be quicker than the round trip inside it
        up_s = max(0.0, seconds - rtt_s - down_bytes * self.down_s_per_byte)
        return replace(self._believing(up_bytes, up_s, rtt_s, now), rtt_s=rtt_s)

    def gave_up(self, up_bytes: int, seconds: float, now: float | None = None) -> LinkMeter:
        """After a transfer without an answer for `seconds`: the link is at least that slow, and only that is learnt."""
        up_s = seconds - self.rtt_s
        if up_bytes <= 0 or up_s / up_bytes <= self.up_s_per_byte:
            return self
        return replace(self._believing(up_bytes, up_s, self.rtt_s, now), unanswered=self.unanswered + 1)

    def _believing(self, up_bytes: int, up_s: float, rtt_s: float, now: float | None) -> LinkMeter:
        """The next belief: a scalar Kalman step, the transfer's uncertainty being the round trip's jitter."""
        if up_bytes <= 0:
            return self
        belief = (CHANGE * self.up_s_per_byte) ** 2
        noise = (max(JITTER_S, JITTER_PART * rtt_s) / up_bytes) ** 2
        told = belief / (belief + noise)
        measured = max(up_s / up_bytes, 1.0 / FASTEST_BYTES_PER_S)
        blended = self.up_s_per_byte + min(QUICKEST, told) * (measured - self.up_s_per_byte)
        off = abs(math.log(measured / self.up_s_per_byte))
        faded = rtt_s + up_s > FADE * (rtt_s + up_bytes * self.up_s_per_byte)
        return replace(
            self,
            up_s_per_byte=min(1.0 / SLOWEST_BYTES_PER_S, max(1.0 / FASTEST_BYTES_PER_S, blended)),
            # A normal's mean absolute deviation is 0.8 of its standard deviation; a fade is counted for itself.
            spread=self.spread + LEARNS_SPREAD * told * (1.25 * min(off, math.log(FADE)) - self.spread),
            fades=self.fades + told / min(REMEMBERS_FADES, 5 + self.transfers) * (float(faded) - self.fades),
            transfers=self.transfers + 1,
            heard_at=now if now is not None and told > 0.5 else self.heard_at,
        )

    def went_further(self, row: Row, seconds: float, now: float, *, answered: bool) -> LinkMeter:
        """After a gateway waited `seconds` for the tier beyond it, that tier's own time taken off."""
        planned = further_link(row)
        if planned is None:
            return self
        hop, before = row.hops[0], self.further or LinkMeter.of(planned)
        moving_s = hop.up_bytes * before.up_s_per_byte + hop.down_bytes * before.down_s_per_byte
        if not answered:
            after = before.gave_up(hop.up_bytes, seconds, now)
        elif moving_s < before.rtt_s:  # so few bytes tell of the round trip, and nothing of the rate
            after = before.round_trip(seconds - moving_s)
        else:
            after = before.transferred(hop.up_bytes, hop.down_bytes, seconds, now)
        return replace(self, further=after, further_at=now)

    def forgetting(self, now: float) -> LinkMeter:
        """Without what was told of the link beyond too long ago. Nothing probes it: as planned, it is tried again."""
        return self if self.further is None or now - self.further_at < FURTHER_S else replace(self, further=None)

    def loaded(self, factor: float) -> LinkMeter:
        """After an answer that told how loaded the server is (1 is idle)."""
        return replace(self, server_load=max(1.0, self.server_load + 0.5 * (min(factor, 1000.0) - self.server_load)))

    def computed(self, measured_s: float, predicted_s: float) -> LinkMeter:
        """After the device ran slices for which the plan predicts `predicted_s`."""
        if predicted_s <= 0.0:
            return self
        factor = min(50.0, max(0.05, measured_s / predicted_s))
        return replace(self, device_slowdown=self.device_slowdown + 0.3 * (factor - self.device_slowdown))


def probe_due(now: float, last_sent: float, idle_s: float) -> bool:
    """Whether the link should be probed: only when nothing else was sent for a while."""
    return now - last_sent >= idle_s


settle(__name__)
