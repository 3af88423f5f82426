"""A plan with this device's measured seconds in place of the predicted ones: after tuning, and again after the first
minute of work. No clock, no I/O.

A plan predicts for a class of devices; which engine options one of them chose, and what they take there, is known only
here. What changes later (heat, other load) is the estimate's slow-down, which is then relative to the device itself.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from statistics import median

import msgspec

from edgesplit.plan import Plan, Row

FIRST_WORK_S = 60.0
"""Seconds of work after which its measured times are adopted."""
MIN_RUNS = 5
"""Runs of a slice that count as a measurement."""
MAX_RUNS = 256
"""Most runs of a slice that are kept until then."""


def with_measured_seconds(plan: Plan, seconds: Mapping[str, float]) -> Plan:
    """The plan with these seconds by slice. Slices that were not measured are scaled like all that were; the plan is
    unchanged where none of its slices was."""
    known = {name: seconds[name] for name in plan.slice_s if name in seconds}
    planned_s = sum(plan.slice_s[name] for name in known)
    measured_s = sum(known.values())
    if planned_s <= 0.0 or measured_s <= 0.0:
        return plan
    factor = measured_s / planned_s
    slice_s = {name: known.get(name, planned * factor) for name, planned in plan.slice_s.items()}
    rows = tuple(_with_device_seconds(row, plan.slice_s, slice_s, factor) for row in plan.rows)
    return msgspec.structs.replace(plan, rows=rows, slice_s=slice_s, basis="measured")


def _with_device_seconds(row: Row, planned: Mapping[str, float], measured: Mapping[str, float], factor: float) -> Row:
    """The row with its device's seconds and joules in proportion to those of its slices."""
    before, after = (sum(seconds.get(name, 0.0) for name in row.device) for seconds in (planned, measured))
    ratio = after / before if before > 0.0 else factor
    joules = None if row.device_joules is None else row.device_joules * ratio
    return msgspec.structs.replace(row, device_s=row.device_s * ratio, device_joules=joules)


@dataclass
class FirstWork:
    """Run times of slices from the first request on, until they are adopted."""

    began: float | None = None
    """Monotonic time of the first run."""
    is_adopted: bool = False
    runs: dict[str, list[float]] = field(default_factory=dict)
    """Seconds of the runs of each slice."""

    def add(self, seconds: Mapping[str, float], now: float) -> dict[str, float]:
        """Add a request's seconds by slice. Returns the median of each slice that ran often enough once the time has
        passed, one time only; otherwise an empty dict."""
        if self.is_adopted:
            return {}
        self.began = now if self.began is None else self.began
        for name, run_s in seconds.items():
            runs = self.runs.setdefault(name, [])
            if len(runs) < MAX_RUNS:
                runs.append(run_s)
        if now - self.began < FIRST_WORK_S:
            return {}
        medians = {name: median(runs) for name, runs in self.runs.items() if len(runs) >= MIN_RUNS}
        if medians:
            self.is_adopted = True
            self.runs.clear()
        return medians
