"""Runs, each in the thread of a request that is in it: a thin layer of threads around `waiting`.

Nobody waits for a thread that exists only to run: the first of those that run together does it for all and hands each
its result. One that fails among several fails alone, for then each is run by itself. Work for a client that has gone,
or whose time is up, is not begun.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from time import monotonic
from typing import Any

from edgesplit.errors import DeadlineExceeded, LinkError
from edgesplit_offload.waiting import Job, Run, Waiting

LOOK_UP_S = 0.25
"""How often one that waits looks whether its client is still there."""
SMOOTHING = 0.3
_GONE = "the client has gone"
_LATE = "the queue moved too slowly for this request"


class Turns:
    """A bounded number of concurrent runs with a bounded queue."""

    def __init__(self, at_once: int, waiting: int) -> None:
        self._lock = threading.Lock()
        self._waiting = Waiting(at_once, waiting)
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
            displaced = self._waiting.admit(job, job.arrived)
            self._start()
        if displaced is not None:
            displaced.is_over = True
            displaced.wake.release()
        self._wait(job)
        if job.mine is not None:
            self._do(job.mine)
        if job.error is not None:
            raise job.error
        return job.value

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
            staying[0].mine = run
            staying[0].wake.release()

    def _still_wanted(self, job: Job, now: float) -> bool:
        """Does somebody wait for it? If not it is over."""
        if now > job.end:
            job.error = DeadlineExceeded(_LATE)
        elif job.is_gone():
            job.error = LinkError(_GONE)
        else:
            return True
        job.is_over = True
        job.wake.release()
        return False

    def _wait(self, job: Job) -> None:
        """Until it is over or this thread is to run, for as long as somebody waits for the result."""
        while not job.wake.acquire(timeout=self._patience_s(job)):
            with self._lock:
                if job in self._waiting.queue and not self._still_wanted(job, monotonic()):
                    self._waiting.queue.remove(job)
                    self._start()

    @staticmethod
    def _patience_s(job: Job) -> float:
        """Until the next look; one that runs with others needs none."""
        return LOOK_UP_S if job.together else max(0.001, min(LOOK_UP_S, job.end - monotonic()))

    def _do(self, run: Run) -> None:
        """Run, give each its result, and let others run."""
        began = monotonic()
        results = _results(run.members)
        seconds = monotonic() - began
        with self._lock:
            self._waiting.end(run)
            if not any(isinstance(result, BaseException) for result in results):
                run.members[0].pace.ran(len(run.members), seconds)
            for one in run.members:
                one.run_s = seconds
                self._count(one)
            self._start()
        for one, result in zip(run.members, results, strict=True):
            one.error, one.value = (result, None) if isinstance(result, BaseException) else (None, result)
            one.is_over = True
            one.wake.release()

    def _count(self, job: Job) -> None:
        alone_s = job.pace.alone_s or job.run_s
        factor = max(1.0, (job.queue_s + job.run_s) / max(1e-6, alone_s))
        self._load += SMOOTHING * (factor - self._load)


def _results(members: Sequence[Job]) -> list[Any]:
    """Each one's value, or the exception that is its answer."""
    try:
        return list(members[0].run([one.given for one in members]))
    except BaseException as error:  # others wait for what becomes of theirs, whatever this is
        if len(members) == 1:
            return [error]
    return [_results([one])[0] for one in members]
