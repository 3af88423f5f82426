"""A sequential test: whether the share of answers that differ keeps its limit, looked at after every audited frame.

Test by betting (Waudby-Smith and Ramdas, "Estimating means of bounded random variables by betting", J. R. Stat. Soc. B
86, 2024, section 4): a gambler with a capital of 1 bets on each audited frame that its answer differs. With x = 1 if it
does, else 0, a bet b turns c into c (1 + b (x - allowed)). While the share, given the past, is at most `allowed`, no
bet from 0 to 1/allowed gains in expectation, so the capital is a non-negative supermartingale, and the probability that
it ever reaches 1/delta is at most delta (Ville, 1939). It may be looked at at any time: after each frame, or never.

The capital is a mixture of constant bets, each the best one against some share above the limit (Kelly, 1956), and of
the frames at which betting starts: of the capital, 1/(s (s+1)) enters the game at frame s. Capital that plays from the
first frame on is lost by the time that a good stream turns bad; what enters late is not, so the alarm's delay grows
with the logarithm of the good frames and not with their number (compare e-detectors: Shin, Ramdas and Rinaldo,
2203.03532).

Frames are drawn for audit at random, before their outcome is known. With a probability that depends on the past alone,
the audited frames are themselves an unbiased sample, and each has weight 1. Where it depends on the frame (its score,
its size), a frame's weight is the least probability that any frame could have had then, divided by its own, which is
logged: a frame's chance to be audited times its weight is then the same for all. With q the frame's probability, the
gain b (least/q) (x - allowed) with chance q, else 0, has the expectation b least (share - allowed): at most 0 as
before.

After the k-th alarm testing restarts with delta 6/(pi² k²). The sum over all k is delta: a limit that is kept raises
its first alarm with probability at most delta, and any further ones, all together, again at most delta.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import overload

import msgspec

from edgesplit.lazy_import import Tensor
from edgesplit.msgspec_warmup import warm_up_structs

SHARE_RATIO = math.sqrt(2.0)
"""Ratio of neighbouring shares against which bets are placed, from the limit up to one half of what lies above it."""


class SequentialTest(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """The state of the test, which is written to disk as it is; `observe` returns the next one."""

    allowed: float
    """Greatest share of answers that may differ, between 0 and 1."""
    delta: float
    """Greatest probability of a first alarm while that is kept."""
    alarms: int = 0
    """Alarms so far."""
    observed: int = 0
    """Audited frames since the last alarm."""
    changed: int = 0
    """Those of them whose answers differ."""
    capital: tuple[float, ...] = ()
    """Capital of each bet; empty before the first frame."""

    def __post_init__(self) -> None:
        """ValueError where no test can have this state."""
        if not (0.0 < self.allowed < 1.0 and 0.0 < self.delta < 1.0):
            raise ValueError(f"allowed share {self.allowed} and delta {self.delta} lie between 0 and 1")
        if min(self.alarms, self.observed, self.changed) < 0 or self.changed > self.observed:
            raise ValueError(f"{self.changed} of {self.observed} frames changed, {self.alarms} alarms")
        if self.capital and len(self.capital) != len(bets(self.allowed)):
            raise ValueError(f"{len(self.capital)} bets where {len(bets(self.allowed))} are placed")
        if not all(0.0 <= part < math.inf for part in self.capital):
            raise ValueError("a capital is a finite number of at least 0")

    @property
    def alarm_delta(self) -> float:
        """Probability of the next alarm at most, while the limit is kept."""
        return delta_after(self.alarms, self.delta)

    @property
    def wealth(self) -> float:
        """The whole capital, in units of what the test began with: the evidence against the limit."""
        mean = sum(self.capital) / len(self.capital) if self.capital else 0.0
        return mean + not_yet_entered(self.observed)

    def observe(self, differs: bool, weight: float = 1.0) -> SequentialTest:
        """The test after one more audited frame; `alarms` is greater by one where the limit is no longer kept.

        `weight`: the least audit probability of any frame then, divided by this frame's; ValueError unless it lies
        above 0 and is at most 1.
        """
        if not 0.0 < weight <= 1.0:
            raise ValueError(f"a weight of {weight} is not above 0 and at most 1")
        placed = bets(self.allowed)
        enters = not_yet_entered(self.observed) - not_yet_entered(self.observed + 1)
        before = self.capital or (0.0,) * len(placed)
        after = SequentialTest(
            allowed=self.allowed,
            delta=self.delta,
            alarms=self.alarms,
            observed=self.observed + 1,
            changed=self.changed + differs,
            capital=tuple(
                (part + enters) * growth(bet, self.allowed, differs, weight)
                for part, bet in zip(before, placed, strict=True)
            ),
        )
        if after.wealth < 1.0 / self.alarm_delta:
            return after
        return SequentialTest(self.allowed, self.delta, alarms=self.alarms + 1)


@overload
def growth(bet: float, allowed: float, differs: bool, weight: float = 1.0) -> float: ...
@overload
def growth(bet: Tensor, allowed: float, differs: Tensor, weight: float = 1.0) -> Tensor: ...
def growth(bet: float | Tensor, allowed: float, differs: bool | Tensor, weight: float = 1.0) -> float | Tensor:
    """Factor by which a bet's capital grows with one audited frame; of many bets and streams where they are arrays."""
    return 1.0 + bet * weight * (differs - allowed)


def not_yet_entered(observed: int) -> float:
    """Part of the capital that has not entered the game after so many frames: 1 less the sum of 1/(s (s+1))."""
    return 1.0 / (observed + 1)


def delta_after(alarms: int, delta: float) -> float:
    """Probability that a test which begins after so many alarms may spend: delta, then delta 6/(pi² k²)."""
    return delta if alarms == 0 else delta * 6.0 / (math.pi * alarms) ** 2


@lru_cache(maxsize=64)
def bets(allowed: float) -> tuple[float, ...]:
    """The bets, (share - allowed)/(allowed (1 - allowed)): each grows fastest against one share above `allowed`."""
    most = (1.0 + allowed) / 2
    shares = [allowed * SHARE_RATIO]
    while shares[-1] * SHARE_RATIO < most:
        shares.append(shares[-1] * SHARE_RATIO)
    return tuple((min(share, most) - allowed) / (allowed * (1.0 - allowed)) for share in shares)


warm_up_structs(__name__)
