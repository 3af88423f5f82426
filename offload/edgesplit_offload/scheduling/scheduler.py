"""Scheduler: executes the runs of the `RunQueue` on the threads that call it.

Every job in a run gets its result; if a run of several jobs fails, each is run again by itself, so that only the faulty
ones fail. Work for a client that has disconnected, or whose deadline has passed, is not begun. Only the caller of
`submit_and_wait` blocks here: a free thread fetches the `next_run`, executes it, and fetches the next.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Sequence
from time import monotonic
from typing import Any

from edgesplit.errors import DeadlineExceeded, LinkError
from edgesplit_offload.scheduling.queue import Job, JobOwner, Run, RunQueue
from edgesplit_offload.scheduling.run_times import RunTimes

LOOK_UP_S = 0.25
"""Interval in seconds at which the clients of waiting requests are checked for disconnection."""
SMOOTHING = 0.3
CLIENT_GONE = "the client has disconnected"
"""Error text for a request whose client has disconnected."""
QUEUE_TOO_SLOW = "the queue moved too slowly for this request"
"""Error text for a request whose deadline passed in the queue."""
Work = Callable[[], None]


def _run_in_new_thread(work: Work) -> None:
    threading.Thread(target=work, name="running", daemon=True).start()


def _call(run: Callable[[Any], Any], argument: Any) -> Any:
    return run(argument)


class Scheduler:
    """A bounded number of concurrent runs with a bounded queue. Thread-safe."""

    def __init__(
        self,
        max_runs: int,
        max_waiting: int,
        max_batched_runs: int = 0,
        run_in_thread: Callable[[Work], None] = _run_in_new_thread,
        run_watched: Callable[[Callable[[Any], Any], Any], Any] = _call,
        look_up_s: float = LOOK_UP_S,
    ) -> None:
        """At most `max_runs` runs are active and `max_waiting` requests wait. `max_batched_runs`: limit on active runs
        including batched ones, whose requests come from other processes too. `run_in_thread`: runs a function in
        another thread. `run_watched`: calls a function with an argument in this thread, so that the caller may be
        replaced as leader meanwhile. `look_up_s`: interval between checks of waiting requests' clients."""
        self._lock = threading.Lock()
        self._queue = RunQueue(max_runs, max_waiting, max_batched_runs)
        self._max_runs = max_runs
        self._max_waiting = max_waiting
        self._run_in_thread = run_in_thread
        self._run_watched = run_watched
        self._look_up_s = look_up_s
        self._unreported: list[Job] = []
        """Jobs that are done and whose owners are not notified yet; owners are called without the lock."""
        self._load = 1.0

    @property
    def load(self) -> float:
        """Load factor of at least 1, smoothed: (wait + run time beside other runs) / run time with nothing beside
        it."""
        return self._load

    @property
    def waiting(self) -> int:
        """Number of requests in the queue."""
        return len(self._queue.queue)

    @property
    def recheck_at(self) -> float:
        """When a run that was held back for returning clients may start."""
        return self._queue.recheck_at

    @property
    def running(self) -> int:
        """Number of requests in active runs."""
        with self._lock:
            return sum(len(run.jobs) for run in self._queue.running)

    def longest_run_s(self) -> float:
        """Seconds since the oldest active run started; 0 without one."""
        with self._lock:
            return max((monotonic() - run.started_at for run in self._queue.running), default=0.0)

    def is_full(self) -> bool:
        """Whether all slots are taken, so that only batched runs could start."""
        return len(self._queue.running) >= self._max_runs

    def should_run_now(self, ready: int, short_s: float) -> bool:
        """Whether to run what waits before reading more requests, of which `ready` are at hand: requests read long
        before they run have left the processor's caches by then. Not for models that batch or take longer than
        `short_s` seconds, nor when so many requests arrive that some must be refused."""
        queue = self._queue.queue
        return bool(queue) and len(queue) + ready <= self._max_waiting and is_short(queue[0].run_times, short_s)

    def submit(self, job: Job) -> None:
        """Queue the job for whichever thread fetches its run; its owner is notified when it is done. Raises Busy (or
        FairShareExceeded) if there is no room."""
        job.arrived = monotonic()
        with self._lock:
            displaced = self._queue.admit(job, job.arrived)
            if displaced is not None:
                self._finish(displaced)
        if self._unreported:
            self._notify_owners()

    def submit_and_wait(self, job: Job) -> Any:
        """Queue the job and wait for its result; meanwhile this thread executes runs. Busy or FairShareExceeded if
        there is no room, DeadlineExceeded if the queue moved too slowly, LinkError if the client has disconnected, and
        whatever running raises."""
        waiter = job.owner = _Waiter()
        self.submit(job)
        self._execute_until_done(job)
        while not waiter.wait(self._sleep_s(job)):
            self.on_timer(monotonic())
            self._execute_until_done(job)
        if job.error is not None:
            raise job.error
        return job.result

    def execute_pending(self) -> None:
        """Execute runs until none may start."""
        while (run := self.next_run()) is not None:
            self.execute(run)

    def _execute_until_done(self, job: Job) -> None:
        while not job.is_done and (run := self.next_run()) is not None:
            self.execute(run)
        if job.is_done and self._queue.queue:  # this thread leaves: another one must execute what waits
            self._run_in_thread(self.execute_pending)

    def _sleep_s(self, job: Job) -> float:
        """Seconds that the waiting thread may sleep until it must check again without being woken."""
        until = self.recheck_at if job.batch_size else min(self.recheck_at, job.due_at)
        return max(0.001, min(self._look_up_s, until - monotonic()))

    def next_run(self) -> Run | None:
        """The next run, which starts now, without requests that are late or abandoned; None if none may start. The
        caller must `execute` it."""
        with self._lock:
            run = self._start_run()
        if self._unreported:
            self._notify_owners()
        return run

    def execute(self, run: Run) -> None:
        """Execute the run and notify the owners of its jobs."""
        # The lock is not held while the model runs: only the queue's state is protected by it.
        began = monotonic()
        results = self._run_watched(_run_jobs, run.jobs)
        seconds = monotonic() - began
        with self._lock:
            self._queue.on_run_end(run, began + seconds)
            succeeded = True
            for job, result in zip(run.jobs, results, strict=True):
                if isinstance(result, BaseException):
                    job.error, succeeded = result, False
                else:
                    job.result = result
                job.run_s = seconds
                self._finish(job)
            if succeeded:  # a failed batch ran its members one by one: its time is not that of a batch
                run.jobs[0].run_times.record(len(run.jobs), seconds)
            for job in run.jobs:
                self._update_load(job)
        self._notify_owners()

    def on_timer(self, now: float) -> float:
        """Finish queued requests that are late or abandoned; returns when to check again (infinity: nothing waits)."""
        with self._lock:
            self._queue.queue[:] = [job for job in self._queue.queue if self._is_wanted(job, now)]
            first_due_at = min((job.due_at for job in self._queue.queue), default=None)
        self._notify_owners()
        return math.inf if first_due_at is None else min(now + self._look_up_s, first_due_at)

    def on_remote_load(self, load: float) -> None:
        """A request of this process ran in another process, which reported `load`."""
        self._load += SMOOTHING * (load - self._load)

    def _start_run(self) -> Run | None:
        """The next run without abandoned requests. The caller holds the lock."""
        now = monotonic()
        # A run starts with the requests that are still wanted; if none is, its slot is free for the next run.
        while (run := self._queue.start_next(now)) is not None:
            wanted = [job for job in run.jobs if self._is_wanted(job, now)]
            if not wanted:
                self._queue.on_run_end(run, now)
                continue
            run.jobs[:] = wanted
            for job in wanted:
                job.queue_s, job.batch_size = now - job.arrived, len(wanted)
            wanted[0].counts_run = True  # statistics count the run once, with its first job
            return run
        return None

    def _is_wanted(self, job: Job, now: float) -> bool:
        """Whether the job is neither late nor abandoned; otherwise it is finished with that error."""
        if now > job.due_at:
            job.error = DeadlineExceeded(QUEUE_TOO_SLOW)
        elif job.is_client_gone():
            job.error = LinkError(CLIENT_GONE)
        else:
            return True
        self._finish(job)
        return False

    def _finish(self, job: Job) -> None:
        """The job is done, with a result or an error. The caller holds the lock."""
        job.is_done = True
        self._unreported.append(job)

    def _notify_owners(self) -> None:
        """Notify the owners of finished jobs, each owner once with all of its own."""
        with self._lock:
            done, self._unreported = self._unreported, []
        # One call per owner: the batcher sends all results of a link by one message.
        if len(done) == 1:
            if done[0].owner is not None:
                done[0].owner.on_done(done)
            return
        jobs_by_owner: dict[JobOwner, list[Job]] = {}
        for job in done:
            if job.owner is not None:
                jobs_by_owner.setdefault(job.owner, []).append(job)
        for owner, jobs in jobs_by_owner.items():
            owner.on_done(jobs)

    def _update_load(self, job: Job) -> None:
        """Update the load factor with a finished job."""
        # Exponential moving average of (wait + run) / shortest run: it also shows a crowded processor
        # (docs/decisions/0019).
        alone_s = job.run_times.single_s or job.run_s
        factor = max(1.0, (job.queue_s + job.run_s) / max(1e-6, alone_s))
        self._load += SMOOTHING * (factor - self._load)


def is_short(run_times: RunTimes, short_s: float) -> bool:
    """Whether the model runs requests one by one, in at most `short_s` seconds each."""
    return run_times.max_batch <= 1 and 0 < run_times.expected_s() <= short_s


class _Waiter:
    """Job owner of a thread that waits for its single job."""

    def __init__(self) -> None:
        self._over = threading.Event()

    def on_done(self, jobs: Sequence[Job]) -> None:
        """The job is done: wake the thread."""
        self._over.set()

    def wait(self, seconds: float) -> bool:
        """Whether the job is done within `seconds`."""
        return self._over.wait(seconds)


def _run_jobs(jobs: Sequence[Job]) -> list[Any]:
    """Each job's result, or the exception that is its result."""
    try:
        return list(jobs[0].run([job.inputs for job in jobs]))
    except BaseException as error:  # every job needs a result, whatever was raised
        if len(jobs) == 1:
            return [error]
    return [_run_jobs([job])[0] for job in jobs]
