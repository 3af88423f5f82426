"""What else a machine did while it measured: other processes, time that a hypervisor took, and how far several rounds
of one measurement are apart.

Times from a busy machine are too long by any factor. `measure_in_rounds` measures a few times and returns the round of
least total time, with the load beside it; the caller that stores it decides by `MachineLoad.is_busy`. Linux reports
all of this in /proc; where a figure is missing, the others decide.
"""

from __future__ import annotations

import os
import resource
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Final, TypeVar

import msgspec

T = TypeVar("T")

ROUNDS: Final = 3
"""Rounds of a measurement."""
MAX_OTHERS: Final = 0.25
"""Share of all processors' time that other processes may take on a quiet machine."""
MAX_STEAL: Final = 0.03
"""Share of processor time that a hypervisor may give to other machines."""
MAX_PRESSURE: Final = 0.25
"""Share of the time in which some process waited for a processor."""
MAX_SPREAD: Final = 1.25
"""Median of the rounds over the least of them."""
STEAL_FIELD: Final = 7
"""Position of stolen time in a line of /proc/stat; before it are times in use, but for idle and waiting for disks."""
IDLE_FIELDS: Final = (3, 4)
PROC: Final = Path("/proc")


class MachineLoad(msgspec.Struct, frozen=True, kw_only=True):
    """Load of the machine during a measurement. None: the system does not report it."""

    per_core: float | None = None
    """Load average of the last minute at its end, per core, the measurement's own included."""
    others: float | None = None
    """Share of all processors' time that other processes took."""
    steal: float | None = None
    """Share of processor time that the hypervisor gave to other machines."""
    pressure: float | None = None
    """Share of the time in which some process waited for a processor."""
    spread: float = 1.0
    """Median over least of the rounds' total seconds."""
    rounds: int = 1

    @property
    def is_busy(self) -> bool:
        """Whether other work may have lengthened the measured times."""
        return (
            (self.others or 0.0) > MAX_OTHERS
            or (self.steal or 0.0) > MAX_STEAL
            or (self.pressure or 0.0) > MAX_PRESSURE
            or self.spread > MAX_SPREAD
        )

    def __str__(self) -> str:
        """For operators: what was seen, in one line."""
        shares = (("other work", self.others), ("stolen", self.steal), ("waiting", self.pressure))
        words = [f"{name} {share:.0%}" for name, share in shares if share is not None]
        load = [] if self.per_core is None else [f"load {self.per_core:.1f} per core"]
        apart = [f"median {self.spread:.2f} times the least of {self.rounds} rounds"] if self.rounds > 1 else []
        return ", ".join([*load, *words, *apart])


@dataclass(frozen=True, slots=True)
class Counters:
    """Counters of the machine at one moment, in seconds."""

    at: float
    used: float | None
    stolen: float | None
    waited: float | None
    own: float
    """Processor time of this process's children that have ended."""


def read_counters(proc: Path = PROC) -> Counters:
    """The counters now."""
    used, stolen = _processor_seconds(proc)
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return Counters(perf_counter(), used, stolen, _waited_seconds(proc), children.ru_utime + children.ru_stime)


def load_between(before: Counters, after: Counters, seconds: list[float], cores: int | None = None) -> MachineLoad:
    """The load between two moments, in which a measurement took `seconds` in its rounds."""
    elapsed = max(after.at - before.at, 1e-9)
    count = cores or os.cpu_count() or 1

    def share(later: float | None, earlier: float | None, of: float) -> float | None:
        return None if later is None or earlier is None else round(min(max((later - earlier) / of, 0.0), 1.0), 4)

    own = after.own - before.own
    others = share(None if after.used is None else after.used - own, before.used, elapsed * count)
    least = min(seconds, default=0.0)
    return MachineLoad(
        per_core=_load_average(count),
        others=others,
        steal=share(after.stolen, before.stolen, elapsed * count),
        pressure=share(after.waited, before.waited, elapsed),
        spread=round(statistics.median(seconds) / least, 4) if least > 0.0 else 1.0,
        rounds=max(len(seconds), 1),
    )


def measure_in_rounds(
    measure: Callable[[], T],
    total_s: Callable[[T], float],
    rounds: int = ROUNDS,
    counters: Callable[[], Counters] = read_counters,
) -> tuple[T, MachineLoad]:
    """The result of least `total_s` of several rounds of `measure`, which runs in a child process, with the load."""
    before = counters()
    results = [measure() for _ in range(rounds)]
    load = load_between(before, counters(), [total_s(result) for result in results])
    return min(results, key=total_s), load


def is_quiet(seconds: float, wait: Callable[[float], object], counters: Callable[[], Counters] = read_counters) -> bool:
    """Whether the machine does little for some seconds, in which nothing is measured."""
    before = counters()
    wait(seconds)
    return not load_between(before, counters(), []).is_busy


def _processor_seconds(proc: Path) -> tuple[float | None, float | None]:
    """Seconds in use, and stolen, of all processors since the machine started."""
    try:
        fields = [float(field) for field in (proc / "stat").read_text("ascii").split("\n", 1)[0].split()[1:]]
    except (OSError, ValueError):
        return None, None
    if len(fields) <= STEAL_FIELD:
        return None, None
    ticks = float(os.sysconf("SC_CLK_TCK"))
    used = sum(field for position, field in enumerate(fields[:STEAL_FIELD]) if position not in IDLE_FIELDS)
    return used / ticks, fields[STEAL_FIELD] / ticks


def _waited_seconds(proc: Path) -> float | None:
    """Seconds in which some process waited for a processor, since the machine started; None on kernels without it."""
    try:
        line = (proc / "pressure" / "cpu").read_text("ascii").split("\n", 1)[0]
        return float(line.rpartition("total=")[2]) / 1e6
    except (OSError, ValueError):
        return None


def _load_average(cores: int) -> float | None:
    try:
        return round(os.getloadavg()[0] / cores, 3)
    except OSError:
        return None
