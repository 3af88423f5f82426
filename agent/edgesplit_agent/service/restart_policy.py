"""What a supervisor decides: when a program that ended is started again, and when one that runs is taken to hang.

Pure; `supervise` acts on it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

FIRST_PAUSE_S = 1.0
LONGEST_PAUSE_S = 60.0
STEADY_S = 60.0
"""Who ran so long did not end because it was started."""
START_S = 900.0
"""A start may load models from a slow card."""
STOP_S = 30.0


@dataclass(frozen=True, slots=True)
class Run:
    """One run of the program, as it is known by what it said."""

    since: float
    watchdog_s: float
    ready: bool = False
    heard: float = 0.0
    told_to_stop: float = math.inf
    was_killed: bool = False

    def hears(self, message: bytes, now: float) -> Run:
        """After a datagram of the program."""
        lines = set(message.split(b"\n"))
        if b"READY=1" in lines:
            return replace(self, ready=True, heard=now)
        return replace(self, heard=now) if b"WATCHDOG=1" in lines else self

    def stops(self, now: float) -> Run:
        """After it was told to end, for the first time or again."""
        return replace(self, told_to_stop=min(now, self.told_to_stop))

    def killed(self) -> Run:
        """After it was killed: there is nothing left to do about it."""
        return replace(self, was_killed=True)

    @property
    def deadline(self) -> float:
        """It is killed then, unless it is heard of before."""
        if self.was_killed:
            return math.inf
        if self.told_to_stop < math.inf:
            return self.told_to_stop + STOP_S
        if not self.ready:
            return self.since + START_S
        return self.heard + self.watchdog_s if self.watchdog_s else math.inf

    def why(self) -> str:
        """What its deadline was for, for people."""
        if self.told_to_stop < math.inf:
            return f"did not end within {STOP_S:g} s"
        return f"gave no sign of life for {self.watchdog_s:g} s" if self.ready else f"was not ready in {START_S:g} s"


def pause_after(failures: int, jitter: float) -> float:
    """Seconds until the next start after so many runs in a row that did not last; `jitter` from 0 to 1: devices that
    lost the same server shall not come back at once."""
    whole: float = min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2.0 ** min(failures, 16))
    return whole * (0.5 + 0.5 * jitter)


def failures_after(failures: int, ran_s: float) -> int:
    """How many runs in a row did not last, after one of so many seconds."""
    return 0 if ran_s >= STEADY_S else failures + 1
