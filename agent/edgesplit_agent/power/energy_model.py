"""Joules per inference: predicted from the plan's power figures and the times that a request really took, scaled to
what the rails measured where there are rails.

A rail cannot tell requests apart. So a measured figure is the prediction times the factor by which the rails' joules
over the last minute differ from the predicted ones, idling included; its basis says `measured`, any other `predicted`.
"""

from __future__ import annotations

import threading
from collections import deque
from typing import Final, Literal

from edgesplit.plan import Plan, Power, Row

Basis = Literal["measured", "predicted", ""]
WINDOW_S = 60.0
ENOUGH_S = 5.0
"""Rails that were watched for less say nothing yet."""
LONGEST_GAP_S = 10.0
"""Between two looks; a longer one (the device slept) is not counted."""
MOST_SCALE: Final = 5.0
"""Rails and plan that differ by more do not measure the same thing."""
MOST_BOOKED = 8192


def spent_j(row: Row, power: Power, busy_s: float, whole_s: float, moving_s: float) -> float:
    """Joules of one inference as it went: `busy_s` of `whole_s` at work, idle for the rest, the radio up for
    `moving_s`. `row` says how many bytes moved."""
    joules = power.busy_watts * busy_s + power.idle_watts * max(0.0, whole_s - busy_s)
    if row.is_local:
        return joules
    bytes_j = row.up_bytes * power.up_joules_per_byte + row.down_bytes * power.down_joules_per_byte
    return joules + power.radio_watts * moving_s + bytes_j + power.wake_joules


class EnergyLedger:
    """What was drawn and what should have been. Thread-safe."""

    def __init__(self, measures: bool = True) -> None:
        """`measures` False: an emulated device, whose host's rails are not its own."""
        self._measures = measures
        self._lock = threading.Lock()
        self._drawn: deque[tuple[float, float, float]] = deque(maxlen=MOST_BOOKED)
        """Until when, how long, and how many joules."""
        self._spent: deque[tuple[float, float]] = deque(maxlen=MOST_BOOKED)
        """When, and how many joules beyond idling."""
        self._last: tuple[float, float] | None = None
        self._idle_watts = 0.0
        self._factor: float | None = None
        """Measured over predicted power, worked out when the rails are read: never for a request, which would add up
        a minute's."""

    def saw(self, watts: float | None, now: float) -> None:
        """The rails, read once more."""
        with self._lock:
            before, self._last = self._last, None if watts is None else (now, watts)
            if watts is None or before is None or not 0.0 < now - before[0] <= LONGEST_GAP_S:
                return
            long_s = now - before[0]
            self._drawn.append((now, long_s, long_s * (watts + before[1]) / 2))
            while self._drawn and self._drawn[0][0] < now - WINDOW_S:
                self._drawn.popleft()
            self._factor = self._measured_over_predicted()

    def answered(self, plan: Plan, joules: float, whole_s: float, now: float) -> tuple[float, Basis]:
        """Book one request; its joules as best known, and their basis. (0, "") where the plan has no power figures."""
        if plan.power is None:
            return 0.0, ""
        with self._lock:
            self._idle_watts = plan.power.idle_watts
            self._spent.append((now, max(0.0, joules - plan.power.idle_watts * whole_s)))
        factor = self.scale(now)
        return (joules, "predicted") if factor is None else (joules * factor, "measured")

    def scale(self, now: float) -> float | None:
        """Measured over predicted power of late; None where it is unknown."""
        with self._lock:
            known = self._measures and self._drawn and self._drawn[-1][0] >= now - LONGEST_GAP_S
            return self._factor if known else None

    def _measured_over_predicted(self) -> float | None:
        """Of the last minute, as far as the rails have been read. Holds the lock."""
        begins, ends = self._drawn[0][0] - self._drawn[0][1], self._drawn[-1][0]
        while self._spent and self._spent[0][0] < begins:
            self._spent.popleft()
        watched_s = sum(long_s for _, long_s, _ in self._drawn)
        predicted = self._idle_watts * watched_s + sum(joules for at, joules in self._spent if at <= ends)
        measured = sum(joules for _, _, joules in self._drawn)
        if watched_s < ENOUGH_S or predicted <= 0.0:
            return None
        factor = measured / predicted
        return factor if 1.0 / MOST_SCALE <= factor <= MOST_SCALE else None
