"""By what clocks work goes on, and how it waits: threads and this machine's time, or a simulation's tasks and time.

What waits takes its `Pace` as an argument, so that the same code runs in a thread of its own on a device, and beside
thousands of others in `edgesplit.testing.virtual_time`, where time is virtual or one thread serves all.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from typing import Any, Protocol


class Condition(Protocol):
    """What is used of `threading.Condition`."""

    def __enter__(self) -> object:
        """Hold its lock."""
        ...

    def __exit__(self, kind: Any, error: Any, trace: Any, /) -> object:
        """Let go of it."""
        ...

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until notified; False if that took too long."""
        ...

    def wait_for(self, predicate: Callable[[], Any], timeout: float | None = None) -> Any:
        """Wait until that holds."""
        ...

    def notify(self, n: int = 1) -> None:
        """Wake one that waits."""
        ...

    def notify_all(self) -> None:
        """Wake all that wait."""
        ...


class Running(Protocol):
    """Work that was started."""

    def join(self, timeout: float | None = None) -> None:
        """Wait until it has ended."""
        ...


class Pace(Protocol):
    """Clocks, dice, conditions and work beside other work."""

    @property
    def dice(self) -> random.Random:
        """By which waits are spread; not for secrets."""
        ...

    def monotonic(self) -> float:
        """Seconds that only ever grow."""
        ...

    def time(self) -> float:
        """Unix seconds."""
        ...

    def condition(self) -> Condition:
        """A new one."""
        ...

    def start(self, work: Callable[[], None], name: str) -> Running:
        """Begin `work` beside what runs now."""
        ...


class Threads:
    """The usual pace: this machine's clocks, a daemon thread for each piece of work."""

    def __init__(self) -> None:
        self.dice = random.Random()

    def monotonic(self) -> float:
        """Of this machine."""
        return time.monotonic()

    def time(self) -> float:
        """Of this machine."""
        return time.time()

    def condition(self) -> Condition:
        """Of threads."""
        return threading.Condition()

    def start(self, work: Callable[[], None], name: str) -> Running:
        """On a thread of its own."""
        thread = threading.Thread(target=work, name=name, daemon=True)
        thread.start()
        return thread


THREADS: Pace = Threads()
