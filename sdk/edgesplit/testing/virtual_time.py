"""Event loop in virtual time: many tasks in one thread, each of which runs until it waits. Also available in real time.

A task is a greenlet, so code that waits deep in its call stack (`edgesplit.concurrency.Condition`) is the same here as
in a thread. A virtual hub (event loop) never sleeps: its clock jumps to the time of the next timer, and timers for the
same time run in the order in which they were set. So a run depends on its input only. A hub in real time sleeps in
`idle`, which may watch sockets meanwhile.
"""

from __future__ import annotations

import heapq
import itertools
import logging
import random
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from greenlet import getcurrent, greenlet

from edgesplit.concurrency import Condition, TaskHandle

log = logging.getLogger(__name__)

MIN_WAIT_S = 1e-4
"""Minimum duration of a wait. Rounding can put a timeout just after the current time; on a clock that jumps, such a
wait would repeat for ever."""


class TaskKilled(BaseException):
    """Raised in a task that is killed: its process has ended, so it must do no cleanup and notify no other task."""


class Timer:
    """A callback at a given time, unless it is cancelled before."""

    __slots__ = ("_hub", "action", "at")

    def __init__(self, hub: Hub, at: float, action: Callable[[], None]) -> None:
        self._hub = hub
        self.at = at
        self.action: Callable[[], None] | None = action

    def cancel(self) -> None:
        """Cancel the callback."""
        if self.action is not None:
            self.action = None
            self._hub.cancelled_timers += 1


class Task:
    """A task of a hub."""

    def __init__(self, hub: Hub, work: Callable[[], None], name: str) -> None:
        self.name = name
        self.ended = False
        self._hub = hub
        self._work = work
        self._done = HubCondition(hub)
        self._greenlet: greenlet | None = greenlet(self._run)
        self._timer = hub.call_at(hub.monotonic(), self.resume)

    def join(self, timeout: float | None = None) -> None:
        """Wait until the task has ended. Outside of a task this returns at once: waiting would block the hub."""
        if self._hub.in_task and not self.ended:
            self._done.wait(timeout)

    def resume(self) -> None:
        """Run the task until it waits again. Called by the hub only."""
        if self._greenlet is not None:
            self._greenlet.switch()

    def kill(self) -> None:
        """End the task where it waits by raising `TaskKilled` in it: its context managers release what they hold."""
        self._timer.cancel()
        running, self._greenlet = self._greenlet, None
        if running is not None and running is not getcurrent():
            if running:
                running.throw(TaskKilled)
            self._on_end()

    def _run(self) -> None:
        try:
            self._work()
        except TaskKilled:
            pass
        except Exception:
            log.exception("task %s failed", self.name)
        self._greenlet = None
        self._on_end()

    def _on_end(self) -> None:
        self.ended = True
        self._hub.tasks.pop(self, None)
        self._done.notify_all()


MAX_BATCH_S = 0.05
"""In real time: how long due timers are run before the network is checked again."""


class Hub:
    """Event loop that implements `edgesplit.concurrency.Concurrency` with tasks. With `idle` it runs in real time:
    `idle(seconds)` sleeps for at most that long."""

    def __init__(
        self, start: float = 0.0, *, seed: int | None = None, idle: Callable[[float], None] | None = None
    ) -> None:
        """`start`: Unix time at which a virtual clock begins. `seed`: seed of its random numbers; None: random."""
        self.rng = random.Random(None if seed is None else f"hub {seed}")
        """The hub's own generator, so that unrelated threads do not change its sequence."""
        self._idle = idle
        self._wall = start
        self._now = 0.0
        self._order = itertools.count()
        self._timers: list[tuple[float, int, Timer]] = []
        self._main: greenlet | None = None
        self._stopping = False
        self.cancelled_timers = 0
        """Number of cancelled timers that are still in the heap."""
        self.tasks: dict[Task, None] = {}
        """Tasks that have not ended, in the order in which they were started (a dict as an ordered set)."""
        self.steps = 0
        """Number of timers that were run."""

    # Implementation of Concurrency

    def monotonic(self) -> float:
        """Seconds since the hub began, or this machine's monotonic clock in real time."""
        return self._now if self._idle is None else time.monotonic()

    def time(self) -> float:
        """Unix time."""
        return self._wall + self._now if self._idle is None else time.time()

    def condition(self) -> Condition:
        """A condition for tasks of this hub."""
        return HubCondition(self)

    def start(self, work: Callable[[], None], name: str) -> TaskHandle:
        """Start a task."""
        return self.spawn(work, name)

    def with_wakeup_delay(self, seconds: float) -> DelayedHub:
        """The hub's clocks and tasks, with conditions that wake up `seconds` late, as on a busy machine: events that
        arrive in between are then handled together."""
        return DelayedHub(self, seconds)

    # Public methods

    def spawn(self, work: Callable[[], None], name: str = "") -> Task:
        """Start a task, which runs as soon as the current one waits."""
        task = Task(self, work, name)
        self.tasks[task] = None
        return task

    def call_at(self, when: float, action: Callable[[], None]) -> Timer:
        """Call `action` at a time of `monotonic`; it must not wait."""
        # Cancelled timers stay in the heap until they are due; rebuild it once most of it is cancelled ones.
        if self.cancelled_timers > 1_000 + len(self._timers) // 2:
            self._timers = [entry for entry in self._timers if entry[2].action is not None]
            heapq.heapify(self._timers)
            self.cancelled_timers = 0
        timer = Timer(self, when, action)
        heapq.heappush(self._timers, (when, next(self._order), timer))
        return timer

    def call_later(self, seconds: float, action: Callable[[], None]) -> Timer:
        """Call `action` after a delay; it must not wait."""
        return self.call_at(self.monotonic() + seconds, action)

    def sleep(self, seconds: float) -> None:
        """Sleep; for tasks only."""
        HubCondition(self).wait(seconds)

    def run(self, seconds: float, until: Callable[[], object] | None = None) -> bool:
        """Run the hub for `seconds`, or until `until()` is true; returns whether it was. Must not be called from a
        task."""
        self._main, self._stopping = getcurrent(), False
        end = self.monotonic() + seconds
        while not self._stopping:
            if until is not None and until():
                return True
            if not self._step(end):
                break
        return until is not None and bool(until())

    def stop(self) -> None:
        """Make `run` return after the current step."""
        self._stopping = True

    def close(self) -> None:
        """Kill every task and discard all timers."""
        for task in list(self.tasks):
            task.kill()
        self._timers.clear()

    @property
    def in_task(self) -> bool:
        """True if called from a task."""
        return self._main is not None and getcurrent() is not self._main

    # The loop

    def _step(self, end: float) -> bool:
        """Run the next timer, if it is due before `end`; False once `end` has come."""
        while self._timers and self._timers[0][2].action is None:
            heapq.heappop(self._timers)
            self.cancelled_timers -= 1
        due = self._timers[0][0] if self._timers else float("inf")
        if self._idle is not None:
            return self._real_time_step(due, end, self._idle)
        # Virtual time: jump to the next timer, or to the end if that comes first.
        if due > end:
            self._now = max(self._now, end)
            return False
        self._now = max(self._now, due)
        self._run_next_timer()
        return True

    def _real_time_step(self, due: float, end: float, idle: Callable[[float], None]) -> bool:
        now = time.monotonic()
        if now >= end:
            return False
        idle(max(0.0, min(due, end) - now))
        # Each timer can make further ones due at once: without this limit the network would never be served.
        batch_end = time.monotonic() + MAX_BATCH_S
        while self._timers and self._timers[0][0] <= time.monotonic() < batch_end and not self._stopping:
            self._run_next_timer()
        return True

    def _run_next_timer(self) -> None:
        timer = heapq.heappop(self._timers)[2]
        if timer.action is None:
            self.cancelled_timers -= 1
            return
        action, timer.action = timer.action, None
        self.steps += 1
        with suppress(TaskKilled):  # only the task of this timer was killed
            action()

    def switch(self) -> None:
        """Let other tasks run until this one is resumed. Called by conditions only."""
        if not self.in_task or self._main is None:
            raise RuntimeError("only a task may wait on a hub: start the work with `spawn`")
        self._main.switch()


class HubCondition:
    """A condition for a hub's tasks. All tasks run in one thread, so there is nothing to lock."""

    def __init__(self, hub: Hub, wakeup_delay_s: float = 0.0) -> None:
        self._hub = hub
        self._wakeup_delay_s = wakeup_delay_s
        self._waiters: list[_Waiter] = []

    def __enter__(self) -> HubCondition:
        return self

    def __exit__(self, kind: Any, error: Any, trace: Any, /) -> None:
        return None

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until notified; False on timeout."""
        waiter = _Waiter(self._hub, self._wakeup_delay_s)
        if timeout is not None:
            waiter.timer = self._hub.call_later(max(MIN_WAIT_S, timeout), lambda: self._wake(waiter, notified=False))
        self._waiters.append(waiter)
        try:
            self._hub.switch()
        finally:
            if waiter in self._waiters:  # the task was killed while it waited
                self._waiters.remove(waiter)
                waiter.cancel_timer()
        return waiter.notified

    def wait_for(self, predicate: Callable[[], Any], timeout: float | None = None) -> Any:
        """Wait until the predicate is true or the timeout has passed; returns the predicate's last value."""
        end = None if timeout is None else self._hub.monotonic() + timeout
        while not (holds := predicate()):
            remaining = None if end is None else end - self._hub.monotonic()
            if remaining is not None and remaining <= 0:
                return holds
            self.wait(remaining)
        return holds

    def notify(self, n: int = 1) -> None:
        """Wake the first `n` waiting tasks."""
        for waiter in self._waiters[:n]:
            self._wake(waiter, notified=True)

    def notify_all(self) -> None:
        """Wake all waiting tasks."""
        self.notify(len(self._waiters))

    def _wake(self, waiter: _Waiter, *, notified: bool) -> None:
        self._waiters.remove(waiter)
        waiter.wake(notified)


class _Waiter:
    """A task that waits."""

    def __init__(self, hub: Hub, wakeup_delay_s: float) -> None:
        self._hub = hub
        self._wakeup_delay_s = wakeup_delay_s
        self._greenlet = getcurrent()
        self.timer: Timer | None = None
        self.notified = False

    def cancel_timer(self) -> None:
        if self.timer is not None:
            self.timer.cancel()

    def wake(self, notified: bool) -> None:
        """Schedule the task to continue as soon as the current one has ended or waits."""
        self.notified = notified
        self.cancel_timer()
        self._hub.call_later(self._wakeup_delay_s if notified else 0.0, self._resume)

    def _resume(self) -> None:
        if not self._greenlet.dead:
            self._greenlet.switch()


class DelayedHub:
    """The hub's clocks and tasks, with conditions whose waiters continue some time after they were notified."""

    def __init__(self, hub: Hub, seconds: float) -> None:
        self._hub, self._seconds = hub, seconds
        self.rng = hub.rng

    def monotonic(self) -> float:
        """The hub's monotonic clock, in seconds."""
        return self._hub.monotonic()

    def time(self) -> float:
        """The hub's Unix time, in seconds."""
        return self._hub.time()

    def condition(self) -> Condition:
        """A condition whose waiters wake up late."""
        return HubCondition(self._hub, self._seconds)

    def start(self, work: Callable[[], None], name: str) -> TaskHandle:
        """Start a task."""
        return self._hub.spawn(work, name)
