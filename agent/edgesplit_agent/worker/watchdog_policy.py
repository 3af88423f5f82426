"""Watchdog policy: when a worker process must be killed and when its successor starts. Pure functions over
observations.

See docs/decisions/0020-workers.md, "When one goes".
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from edgesplit.backoff import Backoff

HUNG_FACTOR = 8.0
"""A run may take this many times its previous duration before it counts as hung."""
STARVED_FACTOR = 4.0
"""Multiple of that limit after which a process that is neither stopped nor busy is killed; until then other processes
may simply have the processor."""
RESTART = Backoff(first_s=0.25, longest_s=30.0)
"""Back-off after the second loss in a row and each further one."""
MIN_STORAGE_BYTES_PER_S = 10e6
"""Slowest storage that loading a model waits for."""


@dataclass(frozen=True, slots=True)
class Bounds:
    """Limits of a worker process, in bytes and seconds."""

    memory_bytes: int
    start_s: float = 60.0
    """Seconds until its model is loaded, in addition to reading the files."""
    first_run_s: float = 30.0
    """Limit in seconds for slices that never ran here."""
    run_s: float = 1.0
    """A run does not count as hung sooner, unless its deadline is near."""


@dataclass(frozen=True, slots=True)
class Task:
    """What a worker is doing, since when (perf_counter), and for how long it may."""

    since: float
    limit_s: float
    description: str


@dataclass(frozen=True, slots=True)
class ProcessStats:
    """The kernel's figures of a process."""

    is_stopped: bool
    """The process is stopped (signal or debugger)."""
    cpu_s: float
    """Processor seconds used in all, on all cores."""
    memory_bytes: int
    """Its own memory: without mapped files."""


def load_limit_s(bounds: Bounds, file_bytes: int) -> float:
    """Seconds that loading `file_bytes` may take."""
    return bounds.start_s + file_bytes / MIN_STORAGE_BYTES_PER_S


def run_limit_s(bounds: Bounds, expected_s: float | None, left_s: float, predicted_s: float = 0.0) -> float:
    """Seconds that a run may take before it is examined more closely.

    - `expected_s`: its previous duration; None if these slices never ran here. A first run fills caches: its limit
      comes from the prediction, or from the bounds where there is none.
    - `left_s`: seconds until the request's deadline. The limit is at least `bounds.run_s`, or half of `left_s` where
      that is less, so that time for another answer remains.
    """
    # A first run also fills caches and arenas: a multiple of the prediction, but no less than a sixth of the fixed
    # limit.
    if expected_s is None:
        return max(bounds.first_run_s / 6, 2 * HUNG_FACTOR * predicted_s) if predicted_s else bounds.first_run_s
    return max(HUNG_FACTOR * expected_s, min(bounds.run_s, left_s / 2))


def watchdog_verdict(task: Task | None, stats: ProcessStats, cpu_before_s: float, now: float, memory_bytes: int) -> str:
    """Why this worker must be killed now; empty if it may live. `cpu_before_s`: its processor seconds when the task
    began."""
    # 1. Memory: held beyond the limit by ways that the kernel's limit (RLIMIT_DATA) does not cover.
    if stats.memory_bytes > memory_bytes:
        return f"took {stats.memory_bytes / 1e6:.0f} MB of memory, its limit is {memory_bytes / 1e6:.0f} MB"
    # 2. Within its time.
    if task is None or now - task.since < task.limit_s:
        return ""
    # 3. Beyond it. A stopped process will not end by itself; one that used processor time of at
    # least half its limit is in an endless loop. One that did not may be starved by others, and gets STARVED_FACTOR
    # times the limit.
    if stats.is_stopped:
        return f"was stopped while it {task.description}"
    seconds = now - task.since
    is_busy = stats.cpu_s - cpu_before_s >= task.limit_s / 2
    if is_busy or seconds >= STARVED_FACTOR * task.limit_s:
        return f"exceeded its time limit: it {task.description} for {seconds:.1f} s"
    return ""


def restart_after_s(losses: int) -> float:
    """Back-off in seconds before the next worker, after so many losses in a row: none at first, then doubling."""
    return 0.0 if losses <= 1 else RESTART.pause_s(losses - 2)


def check_interval_s(task: Task | None, now: float) -> float:
    """Seconds until a worker is examined again: soon while it has a task, else rarely."""
    if task is None:
        return 1.0
    return min(0.1, max(0.01, task.since + task.limit_s - now)) if math.isfinite(task.limit_s) else 0.1
