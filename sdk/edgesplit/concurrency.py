"""Clocks, conditions and background tasks as an interface: real threads and this machine's clock, or a simulation's
tasks and virtual time.

Code that waits takes a `Concurrency` as an argument, so that the same code runs in its own thread on a device, and
among thousands of simulated instances in `edgesplit.testing.virtual_time`, where time is virtual or one thread serves
all.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from typing import Any, Protocol


class Condition(Protocol):
    """The part of `threading.Condition` that edgesplit uses."""

    def __enter__(self) -> object:
        """Acquire the lock."""
        ...

    def __exit__(self, kind: Any, error: Any, trace: Any, /) -> object:
        """Release the lock."""
        ...

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until notified; returns False on timeout (seconds)."""
        ...

    def wait_for(self, predicate: Callable[[], Any], timeout: float | None = None) -> Any:
        """Wait until `predicate()` is true or `timeout` seconds have passed; returns the predicate's last value."""
        ...

    def notify(self, n: int = 1) -> None:
        """Wake up to `n` waiting tasks."""
        ...

    def notify_all(self) -> None:
        """Wake all waiting tasks."""
        ...


class TaskHandle(Protocol):
    """Handle of a background task that was started."""

    def join(self, timeout: float | None = None) -> None:
        """Wait until the task has ended, at most `timeout` seconds."""
        ...


class Concurrency(Protocol):
    """Clocks, random numbers, conditions and background tasks."""

    @property
    def rng(self) -> random.Random:
        """Random number generator for jitter; not for secrets."""
        ...

    def monotonic(self) -> float:
        """Monotonic clock, in seconds."""
        ...

    def time(self) -> float:
        """Unix time, in seconds."""
        ...

    def condition(self) -> Condition:
        """A new condition variable."""
        ...

    def start(self, work: Callable[[], None], name: str) -> TaskHandle:
        """Run `work` in the background as a task called `name`."""
        ...


class ThreadConcurrency:
    """The production implementation: this machine's clocks, one daemon thread per background task."""

    def __init__(self) -> None:
        self.rng = random.Random()

    def monotonic(self) -> float:
        """This machine's monotonic clock, in seconds."""
        return time.monotonic()

    def time(self) -> float:
        """This machine's Unix time, in seconds."""
        return time.time()

    def condition(self) -> Condition:
        """A new `threading.Condition`."""
        return threading.Condition()

    def start(self, work: Callable[[], None], name: str) -> TaskHandle:
        """Run `work` in a new daemon thread."""
        thread = threading.Thread(target=work, name=name, daemon=True)
        thread.start()
        return thread


THREAD_CONCURRENCY: Concurrency = ThreadConcurrency()
"""The instance that production code uses."""
