"""Many tasks in one thread, each of which runs until it waits; time is virtual, or this machine's.

A task is a greenlet, so code that waits deep inside (`edgesplit.concurrency.Condition`) needs no other shape here than
in a
thread. A virtual hub never sleeps: its clock jumps to the next moment at which there is something to do, and the order
of what falls on one moment is the order in which it was asked for. So a run depends on nothing but its input.
A hub in real time sleeps in `idle`, which may watch sockets meanwhile.
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

from edgesplit.concurrency import Condition, Running

log = logging.getLogger(__name__)

LEAST_S = 1e-4
"""A wait takes at least so long, as it does in truth: who waits for a moment that rounding puts just ahead of the clock
would wait for ever on one that jumps."""


class Ended(BaseException):
    """The task's process is no more: nothing is tidied up on its behalf, nobody is told."""


class Timer:
    """Something to be done at a moment, unless it is cancelled before."""

    __slots__ = ("_hub", "action", "at")

    def __init__(self, hub: Hub, at: float, action: Callable[[], None]) -> None:
        self._hub = hub
        self.at = at
        self.action: Callable[[], None] | None = action

    def cancel(self) -> None:
        """It is not done."""
        if self.action is not None:
            self.action = None
            self._hub.cancelled += 1


class Task:
    """Work that was started on a hub."""

    def __init__(self, hub: Hub, work: Callable[[], None], name: str) -> None:
        self.name = name
        self.ended = False
        self._hub = hub
        self._work = work
        self._done = HubCondition(hub)
        self._greenlet: greenlet | None = greenlet(self._run)
        self._timer = hub.call_at(hub.monotonic(), self.resume)

    def join(self, timeout: float | None = None) -> None:
        """Wait until it has ended; nobody waits for it outside of a task, for then nothing else runs."""
        if self._hub.in_task and not self.ended:
            self._done.wait(timeout)

    def resume(self) -> None:
        """Run it until it waits again. The hub's own business."""
        if self._greenlet is not None:
            self._greenlet.switch()

    def kill(self) -> None:
        """End it where it waits, as `Ended`: what it holds is let go, what it would have done is not done."""
        self._timer.cancel()
        running, self._greenlet = self._greenlet, None
        if running is not None and running is not getcurrent():
            if running:
                running.throw(Ended)
            self._has_ended()

    def _run(self) -> None:
        try:
            self._work()
        except Ended:
            pass
        except Exception:
            log.exception("task %s failed", self.name)
        self._greenlet = None
        self._has_ended()

    def _has_ended(self) -> None:
        self.ended = True
        self._hub.tasks.pop(self, None)
        self._done.notify_all()


LOOK_AGAIN_S = 0.05
"""In real time: how long what is due is done before it is looked again what has come."""


class Hub:
    """A `Pace` whose work is done in turn. With `idle`, in real time: `idle(seconds)` sleeps at most so long."""

    def __init__(
        self, start: float = 0.0, *, seed: int | None = None, idle: Callable[[float], None] | None = None
    ) -> None:
        """`start`: Unix time at which a virtual clock begins; `seed`: of its dice, by chance where there is none."""
        self.dice = random.Random(None if seed is None else f"hub {seed}")
        """Its own: threads that have nothing to do with it draw from others."""
        self._idle = idle
        self._wall = start
        self._now = 0.0
        self._order = itertools.count()
        self._timers: list[tuple[float, int, Timer]] = []
        self._main: greenlet | None = None
        self._stopping = False
        self.cancelled = 0
        """Timers that are still listed and will not be done."""
        self.tasks: dict[Task, None] = {}
        """Those that have not ended, in the order in which they began."""
        self.turns = 0
        """Times that something was done."""

    # A pace

    def monotonic(self) -> float:
        """Seconds since the hub began, or this machine's."""
        return self._now if self._idle is None else time.monotonic()

    def time(self) -> float:
        """Unix time."""
        return self._wall + self._now if self._idle is None else time.time()

    def condition(self) -> Condition:
        """One that tasks may wait for."""
        return HubCondition(self)

    def start(self, work: Callable[[], None], name: str) -> Running:
        """As a task."""
        return self.spawn(work, name)

    def late(self, seconds: float) -> Late:
        """The same pace for work that wakes up late by so much, as that of a busy machine does: what comes meanwhile
        is found together."""
        return Late(self, seconds)

    # What owners call

    def spawn(self, work: Callable[[], None], name: str = "") -> Task:
        """Begin `work` as soon as what runs now waits."""
        task = Task(self, work, name)
        self.tasks[task] = None
        return task

    def call_at(self, when: float, action: Callable[[], None]) -> Timer:
        """Do that at a moment of `monotonic`; it must not wait."""
        if self.cancelled > 1_000 + len(self._timers) // 2:
            self._timers = [one for one in self._timers if one[2].action is not None]
            heapq.heapify(self._timers)
            self.cancelled = 0
        timer = Timer(self, when, action)
        heapq.heappush(self._timers, (when, next(self._order), timer))
        return timer

    def call_later(self, seconds: float, action: Callable[[], None]) -> Timer:
        """Do that after a while; it must not wait."""
        return self.call_at(self.monotonic() + seconds, action)

    def sleep(self, seconds: float) -> None:
        """Of a task."""
        HubCondition(self).wait(seconds)

    def run(self, seconds: float, until: Callable[[], object] | None = None) -> bool:
        """Do what is to be done for so long, or until that holds; did it hold? Not for tasks."""
        self._main, self._stopping = getcurrent(), False
        end = self.monotonic() + seconds
        while not self._stopping:
            if until is not None and until():
                return True
            if not self._turn(end):
                break
        return until is not None and bool(until())

    def stop(self) -> None:
        """Let `run` return after the present turn."""
        self._stopping = True

    def close(self) -> None:
        """End every task where it waits; nothing is done any more."""
        for task in list(self.tasks):
            task.kill()
        self._timers.clear()

    @property
    def in_task(self) -> bool:
        """Is it a task that asks?"""
        return self._main is not None and getcurrent() is not self._main

    # Turns

    def _turn(self, end: float) -> bool:
        """Do the next thing, if it is due before `end`; False when that has come."""
        while self._timers and self._timers[0][2].action is None:
            heapq.heappop(self._timers)
            self.cancelled -= 1
        due = self._timers[0][0] if self._timers else float("inf")
        if self._idle is not None:
            return self._real_turn(due, end, self._idle)
        if due > end:
            self._now = max(self._now, end)
            return False
        self._now = max(self._now, due)
        self._do_next()
        return True

    def _real_turn(self, due: float, end: float, idle: Callable[[float], None]) -> bool:
        now = time.monotonic()
        if now >= end:
            return False
        idle(max(0.0, min(due, end) - now))
        # Who is done makes others due: without an end to it nobody would look at the network any more.
        look_again = time.monotonic() + LOOK_AGAIN_S
        while self._timers and self._timers[0][0] <= time.monotonic() < look_again and not self._stopping:
            self._do_next()
        return True

    def _do_next(self) -> None:
        timer = heapq.heappop(self._timers)[2]
        if timer.action is None:
            self.cancelled -= 1
            return
        action, timer.action = timer.action, None
        self.turns += 1
        with suppress(Ended):  # of the one whose timer it was: the others go on
            action()

    def switch(self) -> None:
        """Let others run until somebody resumes this task. The conditions' business."""
        if not self.in_task or self._main is None:
            raise RuntimeError("only a task may wait on a hub: start the work with `spawn`")
        self._main.switch()


class HubCondition:
    """A condition of a hub's tasks. One thread runs them all, in turn: there is nothing to lock."""

    def __init__(self, hub: Hub, late_s: float = 0.0) -> None:
        self._hub = hub
        self._late_s = late_s
        self._waiting: list[_Waiting] = []

    def __enter__(self) -> HubCondition:
        return self

    def __exit__(self, kind: Any, error: Any, trace: Any, /) -> None:
        return None

    def wait(self, timeout: float | None = None) -> bool:
        """Until notified; False where `timeout` seconds were not enough."""
        one = _Waiting(self._hub, self._late_s)
        if timeout is not None:
            one.timer = self._hub.call_later(max(LEAST_S, timeout), lambda: self._wake(one, notified=False))
        self._waiting.append(one)
        try:
            self._hub.switch()
        finally:
            if one in self._waiting:  # it was killed
                self._waiting.remove(one)
                one.forget()
        return one.notified

    def wait_for(self, predicate: Callable[[], Any], timeout: float | None = None) -> Any:
        """Until that holds; its last value."""
        end = None if timeout is None else self._hub.monotonic() + timeout
        while not (holds := predicate()):
            left = None if end is None else end - self._hub.monotonic()
            if left is not None and left <= 0:
                return holds
            self.wait(left)
        return holds

    def notify(self, n: int = 1) -> None:
        """Wake the first that wait."""
        for one in self._waiting[:n]:
            self._wake(one, notified=True)

    def notify_all(self) -> None:
        """Wake all that wait."""
        self.notify(len(self._waiting))

    def _wake(self, one: _Waiting, *, notified: bool) -> None:
        self._waiting.remove(one)
        one.wake(notified)


class _Waiting:
    """One task that waits."""

    def __init__(self, hub: Hub, late_s: float) -> None:
        self._hub = hub
        self._late_s = late_s
        self._greenlet = getcurrent()
        self.timer: Timer | None = None
        self.notified = False

    def forget(self) -> None:
        if self.timer is not None:
            self.timer.cancel()

    def wake(self, notified: bool) -> None:
        """It goes on as soon as what runs now has ended or waits."""
        self.notified = notified
        self.forget()
        self._hub.call_later(self._late_s if notified else 0.0, self._go_on)

    def _go_on(self) -> None:
        if not self._greenlet.dead:
            self._greenlet.switch()


class Late:
    """A hub's pace, but for conditions: who is notified goes on a while later."""

    def __init__(self, hub: Hub, seconds: float) -> None:
        self._hub, self._seconds = hub, seconds
        self.dice = hub.dice

    def monotonic(self) -> float:
        """The hub's."""
        return self._hub.monotonic()

    def time(self) -> float:
        """The hub's."""
        return self._hub.time()

    def condition(self) -> Condition:
        """One that wakes late."""
        return HubCondition(self._hub, self._seconds)

    def start(self, work: Callable[[], None], name: str) -> Running:
        """As a task."""
        return self._hub.spawn(work, name)
