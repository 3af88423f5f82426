"""Who waits for a run, who runs, and who is refused: decisions over plain values, no threads, no clock of its own.

A bounded number runs at once and a bounded number waits, first come, first served. Requests for one model may share a
run where its `Pace` says so: a free place takes whoever waits for that model, up to `most`, as long as the run is over
before the first of their deadlines. While a run of the model is on, those that come gather for the next one, until they
are as many as run; while two are, until they have most of the gain. So few requests are not held up while cores idle,
and many come together in large runs. Those that may share a run take less of the queue, too. One client (by its
certificate's name) may not crowd others out: beyond its share of the places, while others wait, it is refused; where
all places are taken, the newest of the client that has most of them gives way to one that has fewer.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from edgesplit.errors import Busy, Crowding
from edgesplit_offload.scheduling.arrivals import Habit
from edgesplit_offload.scheduling.run_times import Pace

SIDE_BY_SIDE = 2
"""Runs of one model that shares them, unless enough wait for one more: large runs answer more than many."""
WORTH = 1.5
"""So many times what one run saves over two it may take until all are there: meanwhile cores work on bringing them."""


class Home(Protocol):
    """Where requests come from."""

    def over(self, jobs: Sequence[Job]) -> None:
        """These of its requests are over."""
        ...


@dataclass(eq=False, slots=True)
class Job:
    """One request that wants to run. What runs is `run` on the `given` of all that share the run."""

    given: Any
    run: Callable[[Sequence[Any]], Sequence[Any]]
    pace: Pace
    client: str | None = None
    deadline: float | None = None
    """By the monotonic clock."""
    is_gone: Callable[[], bool] = lambda: False
    habit: Habit | None = None
    """How soon its connection asks again, where that is looked at."""
    arrived: float = 0.0
    queue_s: float = 0.0
    run_s: float = 0.0
    together: int = 0
    """How many were in its run; 0 before one began."""
    leads: bool = False
    """Its run is counted as this request's."""
    value: Any = None
    error: BaseException | None = None
    is_over: bool = False
    home: Home | None = None
    """Told when it is over."""

    @property
    def end(self) -> float:
        """Its deadline, or never."""
        return math.inf if self.deadline is None else self.deadline


@dataclass(eq=False, slots=True)
class Run:
    """Requests that run together."""

    members: list[Job]
    began: float

    @property
    def expected_end(self) -> float:
        """By what such runs take."""
        return self.began + self.members[0].pace.seconds(len(self.members))


class Waiting:
    """The queue and what runs. Whoever calls holds a lock around it."""

    def __init__(self, at_once: int, most_waiting: int, gathered: int = 0) -> None:
        """`gathered`: so many runs at once in all, if that is more: what shares runs has those places besides, for
        other processes' requests are among it."""
        self._at_once = at_once
        self._gathered = max(at_once, gathered)
        self._most_waiting = most_waiting
        self.queue: list[Job] = []
        self.running: set[Run] = set()
        self.begins_by = math.inf
        """Nothing may have begun because others are expected: they are no longer from then on."""

    def admit(self, job: Job, now: float) -> Job | None:
        """Take it into the queue; returns the one that had to give way. Busy or Crowding where it must stay out."""
        if job.habit is not None:
            job.pace.returning.came(job.habit, now)
        self._check_deadline(job, now)
        self._check_share(job, now)
        displaced = None
        if len(self.running) >= self._at_once and self._length() >= self._most_waiting:
            displaced = self._greedier_than(job)
            if displaced is None:
                raise self._later(Busy(f"{len(self.running)} requests run and {len(self.queue)} wait"), now)
            self.queue.remove(displaced)
            displaced.error = self._later(Crowding("others wait, and this client has more than its share"), now)
        self.queue.append(job)
        return displaced

    def begin(self, now: float) -> Run | None:
        """The next run that starts now, if there is one."""
        self.begins_by = math.inf
        if not self.queue or len(self.running) >= self._gathered:
            return None
        first = self.queue[0]
        if first.pace.most <= 1 and len(self.running) < self._at_once:  # mostly, and then it is simple
            members = [self.queue.pop(0)]
        else:
            members = self._next(now)
            if not members:
                return None
            for one in members:
                self.queue.remove(one)
        run = Run(members, now)
        self.running.add(run)
        return run

    def end(self, run: Run, now: float) -> None:
        """It is over, however it went."""
        self.running.discard(run)
        for one in run.members:
            if one.habit is not None and one.pace.most > 1:
                one.pace.returning.left(one.habit, now)

    def expected_wait_s(self, now: float, joining: Pace | None = None) -> float:
        """Until one that came now would begin, by what runs take; not counting those it could share a run with
        (`joining`)."""
        places = self._places(joining)
        if len(self.running) < places:
            return 0.0  # whoever waits all the same gathers, of its own accord
        ahead = Counter(one.pace for one in self.queue if one.pace is not joining)
        ahead_s = sum(pace.seconds_for(count) for pace, count in ahead.items())
        ahead_s += sum(max(0.0, run.expected_end - now) for run in self.running)
        return ahead_s / places

    def _places(self, joining: Pace | None) -> int:
        """Runs at once, of what shares runs with these or of anything."""
        return self._at_once if joining is None else self._gathered

    def _next(self, now: float) -> list[Job]:
        """Who runs next, together; nobody where all that wait had better gather."""
        alone = sum(run.members[0].pace.most <= 1 for run in self.running)
        has_place, looked_at = alone < self._at_once, set[Pace]()
        for first in self.queue:
            shares = first.pace.most > 1
            if first.pace in looked_at or not (has_place or shares):
                continue
            if shares:
                looked_at.add(first.pace)
            alike = [one for one in self.queue if one.pace is first.pace] if shares else [first]
            if self._had_better_gather(alike, now):
                continue
            return _fitting(alike, now)
        return []

    def _had_better_gather(self, alike: Sequence[Job], now: float) -> bool:
        """Runs of this model are on, or others are about to ask, beside these they are few, and none of them is in a
        hurry."""
        pace = alike[0].pace
        if pace.most <= 1 or len(alike) >= pace.most:
            return False
        others = [run for run in self.running if run.members[0].pace is pace]
        if not others:
            return self._had_better_wait_for_them(alike, now)
        if len(alike) >= pace.enough:
            return False
        if len(others) < SIDE_BY_SIDE and len(alike) >= sum(len(run.members) for run in others):
            return False
        begins = max(now, min(run.expected_end for run in others))
        return min(one.end for one in alike) > begins + pace.seconds(len(alike))

    def _had_better_wait_for_them(self, alike: Sequence[Job], now: float) -> bool:
        """Others are about to ask, and one run for all of them is over before two would be."""
        pace = alike[0].pace
        expected = pace.returning.expected(now)
        more = min(expected.clients, pace.most - len(alike))
        if not more:
            return False
        together_s = pace.hoped(len(alike) + more)
        saves_s = pace.seconds(len(alike)) + pace.seconds(more) - together_s
        if expected.usually_by - now >= WORTH * saves_s or min(one.end for one in alike) <= expected.until + together_s:
            return False
        self.begins_by = min(self.begins_by, expected.until)
        return True

    def _length(self) -> float:
        """Of the queue: those that may share a run are one together."""
        return sum(1 / one.pace.most for one in self.queue)

    def _check_deadline(self, job: Job, now: float) -> None:
        """Busy where it could not be over in time, given what is before it. Where nothing is, it is tried."""
        shares = job.pace if job.pace.most > 1 else None
        if job.deadline is None or len(self.running) < self._places(shares):
            return
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

    def _present(self) -> dict[str | None, float]:
        """How many places each client has; those that share a run have one together."""
        places: dict[str | None, float] = defaultdict(float)
        for run in self.running:
            for one in run.members:
                places[one.client] += 1 / len(run.members)
        for one in self.queue:
            places[one.client] += 1 / one.pace.most
        return places

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
