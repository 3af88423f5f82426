"""Who waits for a run, who runs, and who is refused: decisions over plain values, no threads, no clock of its own.

A bounded number runs at once and a bounded number waits, first come, first served. Requests for one model may share a
run where its `Pace` says so: a free place takes whoever waits for that model, up to `most`, as long as the run is over
before the first of their deadlines. While a run of the model is on, those that come gather for the next one, until they
are enough for a run beside it. One client (by its certificate's name) may not crowd others out: beyond its share of
the places, while others wait, it is refused; where all places are taken, the newest of the client that has most of
them gives way to one that has fewer.
"""

from __future__ import annotations

import math
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from edgesplit.errors import Busy, Crowding
from edgesplit_offload.pace import Pace


def _held() -> threading.Lock:
    lock = threading.Lock()
    lock.acquire()
    return lock


@dataclass(eq=False)
class Job:
    """One request that wants to run. What runs is `run` on the `given` of all that share the run."""

    given: Any
    run: Callable[[Sequence[Any]], Sequence[Any]]
    pace: Pace
    client: str | None = None
    deadline: float | None = None
    """By the monotonic clock."""
    is_gone: Callable[[], bool] = lambda: False
    arrived: float = 0.0
    queue_s: float = 0.0
    run_s: float = 0.0
    together: int = 0
    """How many were in its run; 0 before one began."""
    mine: Run | None = None
    """The run that this request's thread is to do."""
    value: Any = None
    error: BaseException | None = None
    is_over: bool = False
    wake: threading.Lock = field(default_factory=_held)
    """Released when it is this thread's turn, or all is over: a semaphore that is cheap to make."""

    @property
    def end(self) -> float:
        """Its deadline, or never."""
        return math.inf if self.deadline is None else self.deadline


@dataclass(eq=False)
class Run:
    """Requests that run together, by the thread of the first of them."""

    members: list[Job]
    began: float

    @property
    def expected_end(self) -> float:
        """By what such runs take."""
        return self.began + self.members[0].pace.seconds(len(self.members))


class Waiting:
    """The queue and what runs. Whoever calls holds a lock around it."""

    def __init__(self, at_once: int, most_waiting: int) -> None:
        self._at_once = at_once
        self._most_waiting = most_waiting
        self.queue: list[Job] = []
        self.running: set[Run] = set()

    def admit(self, job: Job, now: float) -> Job | None:
        """Take it into the queue; returns the one that had to give way. Busy or Crowding where it must stay out."""
        self._check_deadline(job, now)
        self._check_share(job, now)
        displaced = None
        if len(self.queue) >= self._most_waiting and len(self.running) >= self._at_once:
            displaced = self._greedier_than(job)
            if displaced is None:
                raise self._later(Busy(f"{len(self.running)} requests run and {len(self.queue)} wait"), now)
            self.queue.remove(displaced)
            displaced.error = self._later(Crowding("others wait, and this client has more than its share"), now)
        self.queue.append(job)
        return displaced

    def begin(self, now: float) -> Iterator[Run]:
        """The runs that start now, each for the thread of its first member."""
        while len(self.running) < self._at_once and (members := self._next(now)):
            for one in members:
                self.queue.remove(one)
            run = Run(members, now)
            self.running.add(run)
            yield run

    def end(self, run: Run) -> None:
        """It is over, however it went."""
        self.running.discard(run)

    def expected_wait_s(self, now: float, joining: Pace | None = None) -> float:
        """Until one that came now would begin, by what runs take; not counting those it could share a run with
        (`joining`)."""
        if len(self.running) < self._at_once:
            return 0.0  # whoever waits all the same gathers, of its own accord
        ahead = Counter(one.pace for one in self.queue if one.pace is not joining)
        ahead_s = sum(pace.seconds_for(count) for pace, count in ahead.items())
        ahead_s += sum(max(0.0, run.expected_end - now) for run in self.running)
        return ahead_s / self._at_once

    def _next(self, now: float) -> list[Job]:
        """Who runs next, together; nobody where all that wait had better gather."""
        for first in self.queue:
            alike = [one for one in self.queue if one.pace is first.pace] if first.pace.most > 1 else [first]
            if self._had_better_gather(alike, now):
                continue
            return _fitting(alike, now)
        return []

    def _had_better_gather(self, alike: Sequence[Job], now: float) -> bool:
        """Another run of this model is on, they are few, and none of them is in a hurry."""
        pace = alike[0].pace
        if pace.most <= 1 or len(alike) >= pace.enough:
            return False
        others = [run for run in self.running if run.members[0].pace is pace]
        if not others:
            return False
        begins = max(now, min(run.expected_end for run in others))
        return min(one.end for one in alike) > begins + pace.seconds(len(alike))

    def _check_deadline(self, job: Job, now: float) -> None:
        """Busy where it could not be over in time, given what is before it. Where nothing is, it is tried."""
        if job.deadline is None or len(self.running) < self._at_once:
            return
        shares = job.pace if job.pace.most > 1 else None
        wait_s = self.expected_wait_s(now, shares)
        beside = sum(one.pace is shares for one in self.queue)
        if wait_s > 0 and now + wait_s + job.pace.seconds_for(beside + 1) > job.end:
            text = f"it would wait about {wait_s:.3f} s, and {max(0.0, job.end - now):.3f} s are left to it"
            raise self._later(Busy(text), now)

    def _check_share(self, job: Job, now: float) -> None:
        """Crowding where it has its share already and others wait."""
        if job.client is None or all(one.client == job.client for one in self.queue):
            return
        present = self._present()
        share = max(1, (self._at_once + self._most_waiting) // len({*present, job.client}))
        if present[job.client] >= share:
            raise self._later(Crowding(f"others wait, and this client has its share of {share} places"), now)

    def _greedier_than(self, job: Job) -> Job | None:
        """The newest that waits of the client with most places, if that has at least two more than this one's."""
        if job.client is None:
            return None
        present = self._present()
        most = max((one.client for one in self.queue), key=lambda client: present[client], default=None)
        if most is None or present[most] <= present[job.client] + 1:
            return None
        return next(one for one in reversed(self.queue) if one.client == most)

    def _present(self) -> Counter[str | None]:
        """How many places each client has."""
        running = (one.client for run in self.running for one in run.members)
        return Counter([*running, *(one.client for one in self.queue)])

    def _later(self, error: Busy, now: float) -> Busy:
        error.retry_after_s = self.expected_wait_s(now)
        return error


def _fitting(alike: Sequence[Job], now: float) -> list[Job]:
    """As many as may, those with the first deadlines, that a run of all of them is over before any; one at least.

    The one that has waited longest is among them, so that nobody is passed over for ever.
    """
    first, pace = alike[0], alike[0].pace
    members = [first]
    for one in sorted(alike[1:], key=lambda one: one.end):
        if len(members) >= pace.most or now + pace.seconds(len(members) + 1) > min(one.end, *(m.end for m in members)):
            break
        members.append(one)
    return members
