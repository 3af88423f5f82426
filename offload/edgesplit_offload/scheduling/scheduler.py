"""Runs, by whichever thread has time for them: a thin layer around `waiting`.

Promises: whoever is in a run hears what became of it, one that fails among several fails alone (for then each is run by
itself), and work for a client that has gone, or whose time is up, is not begun. No thread waits here for anything but
`take`'s caller: a thread that has nothing else to do asks for the `next_run` and does it (`do`), and when it is over
asks again.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Sequence
from time import monotonic
from typing import Any

from edgesplit.errors import DeadlineExceeded, LinkError
from edgesplit_offload.scheduling.queue import Home, Job, Run, Waiting
from edgesplit_offload.scheduling.run_times import Pace

LOOK_UP_S = 0.25
"""How often it is looked whether the clients of those that wait are still there."""
SMOOTHING = 0.3
GONE = "the client has gone"
LATE = "the queue moved too slowly for this request"
Work = Callable[[], None]


def _on_a_thread(work: Work) -> None:
    threading.Thread(target=work, name="running", daemon=True).start()


def _here(run: Callable[[Any], Any], what: Any) -> Any:
    return run(what)


class Turns:
    """A bounded number of concurrent runs with a bounded queue. Thread-safe."""

    def __init__(
        self,
        at_once: int,
        waiting: int,
        gathered: int = 0,
        lend: Callable[[Work], None] = _on_a_thread,
        away: Callable[[Callable[[Any], Any], Any], Any] = _here,
    ) -> None:
        """`gathered`: so many runs at once of models whose requests come here from other processes too. `lend`: has a
        thread work on what waits. `away`: calls what runs with what it is given, in this thread."""
        self._lock = threading.Lock()
        self._waiting = Waiting(at_once, waiting, gathered)
        self._at_once = at_once
        self._most_waiting = waiting
        self._lend = lend
        self._away = away
        self._over: list[Job] = []
        """Their homes do not know yet: they are told without the lock."""
        self._load = 1.0

    @property
    def load(self) -> float:
        """What others make of a request's seconds, as a factor of at least 1, smoothed: its wait, and its run beside
        theirs, against a run with nothing beside it."""
        return self._load

    @property
    def waiting(self) -> int:
        """Requests in the queue."""
        return len(self._waiting.queue)

    @property
    def begins_by(self) -> float:
        """When what waits for company does so no longer."""
        return self._waiting.begins_by

    @property
    def running(self) -> int:
        """Requests in runs."""
        with self._lock:
            return sum(len(run.members) for run in self._waiting.running)

    def longest_s(self) -> float:
        """For how long the oldest run has been running."""
        with self._lock:
            return max((monotonic() - run.began for run in self._waiting.running), default=0.0)

    def is_full(self) -> bool:
        """Could nothing begin beside what runs, but what shares runs?"""
        return len(self._waiting.running) >= self._at_once

    def is_enough(self, left: int, short_s: float) -> bool:
        """Had what waits better run before more is read, of which so much is left? What is read long before it runs has
        left the processor's caches by then. Not where it gains by company, or takes longer than `short_s`, nor where
        so many come that some must be refused."""
        queue = self._waiting.queue
        return bool(queue) and len(queue) + left <= self._most_waiting and is_short(queue[0].pace, short_s)

    def put(self, job: Job) -> None:
        """Run it some time, by whoever asks for the next run, and tell its home. Busy (Crowding) where there is no
        room."""
        job.arrived = monotonic()
        with self._lock:
            displaced = self._waiting.admit(job, job.arrived)
            if displaced is not None:
                self._end(displaced)
        if self._over:
            self._tell_homes()

    def take(self, job: Job) -> Any:
        """What `job.run` gives for it; this thread waits, or runs what is next. Busy (Crowding) where there is no room,
        DeadlineExceeded where the queue moved too slowly, LinkError where nobody waits for the result any more; else
        whatever running raises."""
        waiter = job.home = _Waiter()
        self.put(job)
        self._work_until_over(job)
        while not waiter.over_by(self._looks_in_s(job)):
            self.look(monotonic())
            self._work_until_over(job)
        if job.error is not None:
            raise job.error
        return job.value

    def work(self) -> None:
        """Do what may begin, until nothing may."""
        while (run := self.next_run()) is not None:
            self.do(run)

    def _work_until_over(self, job: Job) -> None:
        while not job.is_over and (run := self.next_run()) is not None:
            self.do(run)
        if job.is_over and self._waiting.queue:  # else nothing may begin now, whoever asks
            self._lend(self.work)

    def _looks_in_s(self, job: Job) -> float:
        """How long its thread may sleep, should nobody wake it."""
        by = self.begins_by if job.together else min(self.begins_by, job.end)
        return max(0.001, min(LOOK_UP_S, by - monotonic()))

    def next_run(self) -> Run | None:
        """One that begins now, leaving out who needs no answer any more: whoever asks is to `do` it."""
        with self._lock:
            run = self._begun()
        if self._over:
            self._tell_homes()
        return run

    def do(self, run: Run) -> None:
        """Run, and let each home know."""
        began = monotonic()
        results = self._away(_results, run.members)
        seconds = monotonic() - began
        with self._lock:
            self._waiting.end(run, began + seconds)
            went_well = True
            for one, result in zip(run.members, results, strict=True):
                if isinstance(result, BaseException):
                    one.error, went_well = result, False
                else:
                    one.value = result
                one.run_s = seconds
                self._end(one)
            if went_well:
                run.members[0].pace.ran(len(run.members), seconds)
            for one in run.members:
                self._count(one)
        self._tell_homes()

    def look(self, now: float) -> float:
        """Tell those in the queue whose time is up, or whose clients have gone; the moment of the next look, if there
        is anything to look at."""
        with self._lock:
            self._waiting.queue[:] = [one for one in self._waiting.queue if self._still_wanted(one, now)]
            ends = min((one.end for one in self._waiting.queue), default=None)
        self._tell_homes()
        return math.inf if ends is None else min(now + LOOK_UP_S, ends)

    def told_load(self, load: float) -> None:
        """A request of this process ran in another one, which has that load."""
        self._load += SMOOTHING * (load - self._load)

    def _begun(self) -> Run | None:
        """Holds the lock."""
        now = monotonic()
        while (run := self._waiting.begin(now)) is not None:
            staying = [one for one in run.members if self._still_wanted(one, now)]
            if not staying:
                self._waiting.end(run, now)
                continue
            run.members[:] = staying
            for one in staying:
                one.queue_s, one.together = now - one.arrived, len(staying)
            staying[0].leads = True
            return run
        return None

    def _still_wanted(self, job: Job, now: float) -> bool:
        """Does somebody wait for it? If not it is over."""
        if now > job.end:
            job.error = DeadlineExceeded(LATE)
        elif job.is_gone():
            job.error = LinkError(GONE)
        else:
            return True
        self._end(job)
        return False

    def _end(self, job: Job) -> None:
        """It is over, one way or the other. Holds the lock."""
        job.is_over = True
        self._over.append(job)

    def _tell_homes(self) -> None:
        """Those that are over: a home hears of all of its own at once."""
        with self._lock:
            over, self._over = self._over, []
        if len(over) == 1:
            if over[0].home is not None:
                over[0].home.over(over)
            return
        homes: dict[Home, list[Job]] = {}
        for one in over:
            if one.home is not None:
                homes.setdefault(one.home, []).append(one)
        for home, jobs in homes.items():
            home.over(jobs)

    def _count(self, job: Job) -> None:
        alone_s = job.pace.alone_s or job.run_s
        factor = max(1.0, (job.queue_s + job.run_s) / max(1e-6, alone_s))
        self._load += SMOOTHING * (factor - self._load)


def is_short(pace: Pace, short_s: float) -> bool:
    """Does it run alone, and for no longer than that?"""
    return pace.most <= 1 and 0 < pace.seconds() <= short_s


class _Waiter:
    """A thread that waits for its own."""

    def __init__(self) -> None:
        self._over = threading.Event()

    def over(self, jobs: Sequence[Job]) -> None:
        """It is."""
        self._over.set()

    def over_by(self, seconds: float) -> bool:
        """Whether it is, within that time."""
        return self._over.wait(seconds)


def _results(members: Sequence[Job]) -> list[Any]:
    """Each one's value, or the exception that is its answer."""
    try:
        return list(members[0].run([one.given for one in members]))
    except BaseException as error:  # others wait for what becomes of theirs, whatever this is
        if len(members) == 1:
            return [error]
    return [_results([one])[0] for one in members]
