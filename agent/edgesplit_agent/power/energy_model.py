"""Joules per inference: predicted from the plan's power figures and a request's actual times, then scaled to the power
rails where the device has any.

A rail cannot tell requests apart. A measured figure is therefore the prediction times the ratio of measured to
predicted joules over the last minute, idling included; its basis is `measured`, that of any other figure `predicted`.
"""

from __future__ import annotations

import threading
from collections import deque
from typing import Final, Literal

from edgesplit.plan import Plan, Power, Row

Basis = Literal["measured", "predicted", ""]
COMPARED_S = 60.0
"""Seconds over which measured and predicted energy are compared."""
MIN_COMPARED_S = 5.0
"""Minimum seconds of rail readings before the ratio is used."""
MAX_GAP_S = 10.0
"""Maximum seconds between two readings; the time between them is not counted when it is longer (the device slept)."""
MAX_SCALE: Final = 5.0
"""Maximum plausible ratio: rails and plan that differ by more do not measure the same thing."""
MAX_ENTRIES = 8192
"""Maximum number of readings and of requests kept."""


def actual_joules(row: Row, power: Power, busy_s: float, whole_s: float, radio_s: float) -> float:
    """Joules of one inference as it went: `busy_s` of `whole_s` at work, the rest idle, the radio up for `radio_s`.

    The number of bytes moved is taken from `row`. The terms are those of `edgesplit.plan.energy_j` (radio model of
    Huang et al., MobiSys 2012).
    """
    joules = power.busy_watts * busy_s + power.idle_watts * max(0.0, whole_s - busy_s)
    if row.is_local:
        return joules
    bytes_j = row.up_bytes * power.up_joules_per_byte + row.down_bytes * power.down_joules_per_byte
    return joules + power.radio_watts * radio_s + bytes_j + power.wake_joules


class EnergyMeter:
    """Compares measured with predicted energy. Thread-safe."""

    def __init__(self, measures: bool = True) -> None:
        """`measures` False: an emulated device, whose host's rails are not its own."""
        self._measures = measures
        self._lock = threading.Lock()
        self._measured: deque[tuple[float, float, float]] = deque(maxlen=MAX_ENTRIES)
        """Measured intervals: end (monotonic), duration in seconds, joules."""
        self._predicted: deque[tuple[float, float]] = deque(maxlen=MAX_ENTRIES)
        """Predicted inferences: time of the answer (monotonic), joules beyond idling."""
        self._last: tuple[float, float] | None = None
        self._idle_watts = 0.0
        self._factor: float | None = None
        """Measured over predicted power; computed when the rails are read, not per request, which would sum up a minute
        of entries each time."""

    def on_reading(self, watts: float | None, now: float) -> None:
        """Record a reading of the rails in watts at monotonic time `now`; None where they could not be read."""
        with self._lock:
            before, self._last = self._last, None if watts is None else (now, watts)
            if watts is None or before is None or not 0.0 < now - before[0] <= MAX_GAP_S:
                return
            interval_s = now - before[0]
            # Trapezoidal rule between two readings.
            self._measured.append((now, interval_s, interval_s * (watts + before[1]) / 2))
            while self._measured and self._measured[0][0] < now - COMPARED_S:
                self._measured.popleft()
            self._factor = self._measured_over_predicted()

    def record_answer(self, plan: Plan, joules: float, whole_s: float, now: float) -> tuple[float, Basis]:
        """Record one request; return its joules as best known and their basis, or (0, "") where the plan has no power
        figures."""
        if plan.power is None:
            return 0.0, ""
        with self._lock:
            self._idle_watts = plan.power.idle_watts
            self._predicted.append((now, max(0.0, joules - plan.power.idle_watts * whole_s)))
        factor = self.scale(now)
        return (joules, "predicted") if factor is None else (joules * factor, "measured")

    def scale(self, now: float) -> float | None:
        """Recent ratio of measured to predicted power; None where it is unknown."""
        with self._lock:
            known = self._measures and self._measured and self._measured[-1][0] >= now - MAX_GAP_S
            return self._factor if known else None

    def _measured_over_predicted(self) -> float | None:
        """Ratio of measured to predicted energy since the oldest reading; None if too little was read. The caller holds
        the lock."""
        begins, ends = self._measured[0][0] - self._measured[0][1], self._measured[-1][0]
        while self._predicted and self._predicted[0][0] < begins:
            self._predicted.popleft()
        watched_s = sum(interval_s for _, interval_s, _ in self._measured)
        # Idling for the whole time, plus what each inference took beyond it: idle time counts once.
        predicted = self._idle_watts * watched_s + sum(joules for at, joules in self._predicted if at <= ends)
        measured = sum(joules for _, _, joules in self._measured)
        if watched_s < MIN_COMPARED_S or predicted <= 0.0:
            return None
        factor = measured / predicted
        return factor if 1.0 / MAX_SCALE <= factor <= MAX_SCALE else None
