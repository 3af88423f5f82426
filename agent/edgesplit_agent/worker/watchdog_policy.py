"""When a worker must go, and when the next one comes: pure functions over what was seen of it."""

from __future__ import annotations

import math
from dataclasses import dataclass

PATIENCE = 8.0
"""A run may take so many times what it took before..."""
STARVED = 4.0
"""...and so many times that where the process is neither stopped nor busy: others may have the processor."""
FIRST_RESTART_S = 0.25
LONGEST_RESTART_S = 30.0
BYTES_PER_S = 10e6
"""Slower storage than this is waited for no longer, when a model is loaded."""


@dataclass(frozen=True, slots=True)
class Bounds:
    """What a worker may take. Sizes in bytes, times in seconds."""

    memory_bytes: int
    start_s: float = 60.0
    """Until its model is loaded, besides reading the files."""
    first_run_s: float = 30.0
    """Of slices that never ran here before."""
    run_s: float = 1.0
    """A run is not called hung sooner, unless its deadline is near."""


@dataclass(frozen=True, slots=True)
class Task:
    """What a worker is at."""

    since: float
    limit_s: float
    what: str


@dataclass(frozen=True, slots=True)
class Vitals:
    """What the kernel says of a process."""

    stopped: bool
    cpu_s: float
    """That it has computed in all, on all cores."""
    memory_bytes: int
    """Its own: without files that are mapped."""


def load_limit_s(bounds: Bounds, file_bytes: int) -> float:
    """How long loading so much may take."""
    return bounds.start_s + file_bytes / BYTES_PER_S


def run_limit_s(bounds: Bounds, expected_s: float | None, left_s: float, predicted_s: float = 0.0) -> float:
    """How long a run may take before it is looked at more closely; half of what is left, where that is less, so that
    there is time for another answer. What never ran here has caches to fill, and only a prediction to go by."""
    if expected_s is None:
        return max(bounds.first_run_s / 6, 2 * PATIENCE * predicted_s) if predicted_s else bounds.first_run_s
    return max(PATIENCE * expected_s, min(bounds.run_s, left_s / 2))


def verdict(task: Task | None, seen: Vitals, cpu_before_s: float, now: float, memory_bytes: int) -> str:
    """Why this worker must go now; empty where it may live. `cpu_before_s`: what it had computed as the task began."""
    if seen.memory_bytes > memory_bytes:
        return f"took {seen.memory_bytes / 1e6:.0f} MB of memory, its limit is {memory_bytes / 1e6:.0f} MB"
    if task is None or now - task.since < task.limit_s:
        return ""
    if seen.stopped:
        return f"was stopped while it {task.what}"
    seconds = now - task.since
    busy = seen.cpu_s - cpu_before_s >= task.limit_s / 2
    if busy or seconds >= STARVED * task.limit_s:
        return f"did not come to an end: it {task.what} for {seconds:.1f} s"
    return ""


def restart_after_s(losses: int) -> float:
    """Seconds until another worker is started, after so many were lost in a row: at once, then ever longer."""
    return 0.0 if losses <= 1 else min(LONGEST_RESTART_S, FIRST_RESTART_S * 2.0 ** min(losses - 2, 16))


def looks_again_s(task: Task | None, now: float) -> float:
    """When to look at a worker again: often while it is at something, rarely else."""
    if task is None:
        return 1.0
    return min(0.1, max(0.01, task.since + task.limit_s - now)) if math.isfinite(task.limit_s) else 0.1
