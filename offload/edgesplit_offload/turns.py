"""Runs, each in the thread of a request that is in it: a thin layer of threads around `waiting`.

Nobody waits for a thread that exists only to run: the first of those that run together does it for all and hands each
its result. Only runs of requests that no thread of this process waits for (`put`) have threads of their own. One that
fails among several fails alone, for then each is run by itself. Work for a client that has gone, or whose time is up,
is not begun.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable, Sequence
from time import monotonic
from typing import Any

from edgesplit.errors import DeadlineExceeded, LinkError
from edgesplit_offload.waiting import Home, Job, Run, Waiting

log = logging.getLogger(__name__)

LOOK_UP_S = 0.25
"""How often one that waits looks whether its client is still there."""
SMOOTHING = 0.3
STOP_S = 5.0
GONE = "the client has gone"
LATE = "the queue moved too slowly for this request"


def patience_s(job: Job) -> float:
    """Until the next look at who waits; one that runs with others needs none."""
    return LOOK_UP_S if job.together else max(0.001, min(LOOK_UP_S, job.end - monotonic()))


class Turns:
    """A bounded number of concurrent runs with a bounded queue."""

    def __init__(self, at_once: int, waiting: int, gathered: int = 0) -> None:
        """`gathered`: so many runs at once of models whose requests come here from other processes too."""
        self._lock = threading.Lock()
        self._waiting = Waiting(at_once, waiting, gathered)
        self._runners = _Runners(self._do)
        self._away: list[Job] = []
        """Over, and their homes do not know yet: they are told without the lock."""
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
    def running(self) -> int:
        """Requests in runs."""
        with self._lock:
            return sum(len(run.members) for run in self._waiting.running)

    def longest_s(self) -> float:
        """For how long the oldest run has been running."""
        with self._lock:
            return max((monotonic() - run.began for run in self._waiting.running), default=0.0)

    def take(self, job: Job) -> Any:
        """What `job.run` gives for it. Busy (Crowding) where there is no room, DeadlineExceeded where the queue moved
        too slowly, LinkError where nobody waits for the result any more; else whatever running raises."""
        job.arrived = monotonic()
        with self._lock:
            run = self._waiting.at_once(job, job.arrived)
        if run is None:
            self._admit(job)
            self._wait(job)
            run, job.mine = job.mine, None  # they hold each other: nobody wants to wait for the collector of cycles
        else:
            job.together, job.leads = 1, True
        if run is not None:
            self._do(run)
        if job.error is not None:
            raise job.error
        return job.value

    def put(self, job: Job) -> None:
        """Run it some time and tell its home. Busy (Crowding) where there is no room."""
        job.arrived = monotonic()
        self._admit(job)

    def told_load(self, load: float) -> None:
        """A request of this process ran in another one, which has that load."""
        self._load += SMOOTHING * (load - self._load)

    def stop(self) -> None:
        """Begin nothing for others any more, and wait for what runs for them."""
        self._runners.stop()

    def _admit(self, job: Job) -> None:
        with self._lock:
            displaced = self._waiting.admit(job, job.arrived)
            self._start()
            if displaced is not None:
                self._end(displaced)
        self._tell_homes()

    def _end(self, job: Job) -> None:
        """It is over, one way or the other. Holds the lock."""
        job.is_over = True
        if job.home is None:
            job.wake.release()
        else:
            self._away.append(job)

    def _tell_homes(self) -> None:
        """Those that are over and are not waited for here: a home hears of all of its own at once."""
        if not self._away:
            return
        with self._lock:
            away, self._away = self._away, []
        homes: dict[Home, list[Job]] = {}
        for one in away:
            if one.home is not None:
                homes.setdefault(one.home, []).append(one)
        for home, jobs in homes.items():
            home.over(jobs)

    def _start(self) -> None:
        """Begin what can begin, leaving out who needs no answer any more. Holds the lock."""
        now = monotonic()
        for run in self._waiting.begin(now):
            staying = [one for one in run.members if self._still_wanted(one, now)]
            if not staying:
                self._waiting.end(run)
                continue
            run.members[:] = staying
            for one in staying:
                one.queue_s, one.together = now - one.arrived, len(staying)
            first = next((one for one in staying if one.home is None), None)
            (first or staying[0]).leads = True
            if first is None:
                self._runners.begin(run)
            else:
                first.mine = run
                first.wake.release()

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

    def _wait(self, job: Job) -> None:
        """Until it is over or this thread is to run, for as long as somebody waits for the result."""
        while not job.wake.acquire(timeout=patience_s(job)):
            with self._lock:
                if job in self._waiting.queue and not self._still_wanted(job, monotonic()):
                    self._waiting.queue.remove(job)
                    self._start()
            self._tell_homes()

    def _do(self, run: Run) -> None:
        """Run, give each its result, and let others run."""
        began = monotonic()
        results = _results(run.members)
        seconds = monotonic() - began
        with self._lock:
            self._waiting.end(run)
            if not any(isinstance(result, BaseException) for result in results):
                run.members[0].pace.ran(len(run.members), seconds)
            for one, result in zip(run.members, results, strict=True):
                one.error, one.value = (result, None) if isinstance(result, BaseException) else (None, result)
                one.run_s = seconds
                self._count(one)
            self._start()
            for one in run.members:
                self._end(one)
        self._tell_homes()

    def _count(self, job: Job) -> None:
        alone_s = job.pace.alone_s or job.run_s
        factor = max(1.0, (job.queue_s + job.run_s) / max(1e-6, alone_s))
        self._load += SMOOTHING * (factor - self._load)


class _Runners:
    """Threads for runs that no waiting thread can do: as many as there ever were such runs at once."""

    def __init__(self, do: Callable[[Run], None]) -> None:
        self._do = do
        self._runs: queue.SimpleQueue[Run | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._idle = 0
        self._threads: list[threading.Thread] = []

    def begin(self, run: Run) -> None:
        """On one that idles, or on a new one."""
        self._runs.put(run)
        with self._lock:
            if self._idle:
                self._idle -= 1
                return
            thread = threading.Thread(target=self._work, name="running", daemon=True)
            self._threads.append(thread)
        try:
            thread.start()
        except RuntimeError as error:  # the next that is free takes it
            log.warning("no thread for a run: %s", error)
            with self._lock:
                self._threads.remove(thread)

    def stop(self) -> None:
        """Each ends with what it does: an engine must not be at work while its process ends."""
        for _ in self._threads:
            self._runs.put(None)
        for thread in self._threads:
            thread.join(STOP_S)

    def _work(self) -> None:
        while (run := self._runs.get()) is not None:
            self._do(run)
            with self._lock:
                self._idle += 1


def _results(members: Sequence[Job]) -> list[Any]:
    """Each one's value, or the exception that is its answer."""
    try:
        return list(members[0].run([one.given for one in members]))
    except BaseException as error:  # others wait for what becomes of theirs, whatever this is
        if len(members) == 1:
            return [error]
    return [_results([one])[0] for one in members]
