"""The run queue: which requests wait, which run, batched how, and which are refused. Plain values: no threads, no
clock.

A bounded number of runs is active at once and a bounded number of requests waits, first come, first served. Requests
for one model may share a run (a batch) if its `RunTimes` allow it: a free slot takes the waiting requests of that
model, up to `max_batch`, as long as the run ends before the first of their deadlines. While one run of the model is
active, new requests are collected for the next run until they are as many as run; while two are active, until they
reach the sufficient batch. So few requests are not held up while cores idle, and many are combined into large runs.
Requests that can share a run count less against the queue's limit.

Fairness: a client (by its certificate's name) that has its share of the slots is refused while others wait; if all
slots are taken, the newest request of the client with most slots is displaced by one of a client with fewer.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from edgesplit.errors import Busy, FairShareExceeded
from edgesplit_offload.scheduling.arrivals import ArrivalStats
from edgesplit_offload.scheduling.run_times import RunTimes

PARALLEL_BATCHES = 2
"""Parallel runs of one model with batching, unless enough requests for a full run wait: large runs answer more requests
than many runs."""
WAIT_FACTOR = 1.5
"""Waiting for returning clients may take this multiple of what one run saves over two, because the cores serve the
returning clients meanwhile."""


class JobOwner(Protocol):
    """The owner of requests, notified of their results."""

    def on_done(self, jobs: Sequence[Job]) -> None:
        """These of the owner's jobs are done. Called without the scheduler's lock, from any thread."""
        ...


@dataclass(eq=False, slots=True)
class Job:
    """One request to be run: `run` is called with the `inputs` of all jobs that share the run."""

    inputs: Any
    run: Callable[[Sequence[Any]], Sequence[Any]]
    run_times: RunTimes
    client: str | None = None
    deadline: float | None = None
    """Monotonic time; None: no deadline."""
    is_client_gone: Callable[[], bool] = lambda: False
    arrival_stats: ArrivalStats | None = None
    """Return times of its connection, if they are tracked."""
    arrived: float = 0.0
    queue_s: float = 0.0
    run_s: float = 0.0
    batch_size: int = 0
    """Number of jobs in its run; 0 before the run began."""
    counts_run: bool = False
    """Whether its run is counted with this job: true for one job per run."""
    result: Any = None
    error: BaseException | None = None
    is_done: bool = False
    owner: JobOwner | None = None
    """Notified when the job is done."""

    @property
    def due_at(self) -> float:
        """The deadline, or infinity."""
        return math.inf if self.deadline is None else self.deadline


@dataclass(eq=False, slots=True)
class Run:
    """Jobs that run together."""

    jobs: list[Job]
    started_at: float

    @property
    def expected_end(self) -> float:
        """When the run should end, by the model's run times."""
        return self.started_at + self.jobs[0].run_times.expected_s(len(self.jobs))


class RunQueue:
    """The queue and the active runs. The caller holds a lock around every call."""

    def __init__(self, max_runs: int, max_waiting: int, max_batched_runs: int = 0) -> None:
        """At most `max_runs` runs are active and `max_waiting` requests wait. `max_batched_runs`: limit on active runs
        including batched ones, if larger; the difference is for batched runs only, which also serve requests of other
        processes."""
        self._max_runs = max_runs
        self._max_batched_runs = max(max_runs, max_batched_runs)
        self._max_waiting = max_waiting
        self.queue: list[Job] = []
        self.running: set[Run] = set()
        self.recheck_at = math.inf
        """When `start_next` is worth another call although nothing happened: returning clients that a run was held back
        for are given up then. Infinity if no run was held back."""

    def admit(self, job: Job, now: float) -> Job | None:
        """Add the job to the queue; returns the job that it displaced, if any. Raises Busy if it cannot end in time or
        there is no room, FairShareExceeded if its client has its share already."""
        if job.arrival_stats is not None:
            job.run_times.returns.on_request(job.arrival_stats, now)
        self._check_deadline(job, now)
        self._check_share(job, now)
        displaced = None
        # Full: all slots are taken and the queue, counted in runs, is at its limit. A fair share has priority over the
        # order of arrival: the greediest client's newest request gives way, or else the new one is refused.
        if len(self.running) >= self._max_runs and self._length_in_runs() >= self._max_waiting:
            displaced = self._job_to_displace(job)
            if displaced is None:
                raise self._with_retry_after(Busy(f"{len(self.running)} requests run and {len(self.queue)} wait"), now)
            self.queue.remove(displaced)
            displaced.error = self._with_retry_after(
                FairShareExceeded("other clients wait, and this one has more than its share"), now
            )
        self.queue.append(job)
        return displaced

    def start_next(self, now: float) -> Run | None:
        """Start the next run, if one may start now."""
        self.recheck_at = math.inf
        if not self.queue or len(self.running) >= self._max_batched_runs:
            return None
        first = self.queue[0]
        if (
            first.run_times.max_batch <= 1 and len(self.running) < self._max_runs
        ):  # the common case, first come first served
            members = [self.queue.pop(0)]
        else:
            members = self._next_batch(now)
            if not members:
                return None
            for job in members:
                self.queue.remove(job)
        run = Run(members, now)
        self.running.add(run)
        return run

    def on_run_end(self, run: Run, now: float) -> None:
        """The run has ended, successfully or not."""
        self.running.discard(run)
        for job in run.jobs:
            if (
                job.arrival_stats is not None and job.run_times.max_batch > 1
            ):  # only batched models wait for returning clients
                job.run_times.returns.on_answered(job.arrival_stats, now)

    def expected_wait_s(self, now: float, joining: RunTimes | None = None) -> float:
        """Seconds until a request that arrived now would start, by the models' run times. Requests that it could share
        a run with (`joining`) do not count."""
        slots = self._max_active(joining)
        if len(self.running) < slots:
            return 0.0  # a free slot: what waits nevertheless is collected into a batch by choice
        # Work ahead divided by the slots that share it: the queue in the largest batches allowed, plus what is left of
        # the active runs.
        ahead = Counter(job.run_times for job in self.queue if job.run_times is not joining)
        ahead_s = sum(pace.total_s(count) for pace, count in ahead.items())
        ahead_s += sum(max(0.0, run.expected_end - now) for run in self.running)
        return ahead_s / slots

    def _max_active(self, joining: RunTimes | None) -> int:
        """Limit on active runs: for batched runs of `joining`, or for any run if None."""
        return self._max_runs if joining is None else self._max_batched_runs

    def _next_batch(self, now: float) -> list[Job]:
        """The jobs of the next run; empty if none may start, or all that wait should collect more requests first."""
        # Unbatched runs may only take the process's own slots. A batched run may start beyond them (up to
        # `max_batched_runs`), because it also serves what other processes read (docs/decisions/0034).
        unbatched = sum(run.jobs[0].run_times.max_batch <= 1 for run in self.running)
        has_slot, considered = unbatched < self._max_runs, set[RunTimes]()
        for first in self.queue:
            is_batched = first.run_times.max_batch > 1
            if first.run_times in considered or not (has_slot or is_batched):
                continue
            if is_batched:  # each batched model is looked at once, with all of its waiting jobs
                considered.add(first.run_times)
            candidates = [job for job in self.queue if job.run_times is first.run_times] if is_batched else [first]
            if self._should_collect_more(candidates, now):
                continue
            return _select_batch(candidates, now)
        return []

    def _should_collect_more(self, jobs: Sequence[Job], now: float) -> bool:
        """Whether these jobs of one model should wait for more requests: its runs are active or its clients are about
        to return, they are few in comparison, and no deadline is at risk."""
        pace = jobs[0].run_times
        # Nothing to gain: not batched, or a full batch already.
        if pace.max_batch <= 1 or len(jobs) >= pace.max_batch:
            return False
        active = [run for run in self.running if run.jobs[0].run_times is pace]
        if not active:  # no run to wait for: only clients that are about to return (docs/decisions/0044)
            return self._should_await_returns(jobs, now)
        # How many must wait before a further run starts beside the active ones (docs/decisions/0034). Beside one run:
        # as many as it has, so that few clients run side by side. Beside two or more: the sufficient batch. Half as
        # many beside one run was measured to give four small runs, and more processor time per request.
        if len(jobs) >= pace.sufficient_batch:
            return False
        if len(active) < PARALLEL_BATCHES and len(jobs) >= sum(len(run.jobs) for run in active):
            return False
        # Collect on, unless waiting for the first active run to end would miss the earliest deadline.
        starts_at = max(now, min(run.expected_end for run in active))
        return min(job.due_at for job in jobs) > starts_at + pace.expected_s(len(jobs))

    def _should_await_returns(self, jobs: Sequence[Job], now: float) -> bool:
        """Whether to wait for returning clients: one run for all of them should end sooner than two would."""
        pace = jobs[0].run_times
        expected = pace.returns.forecast(now)
        returning = min(expected.clients, pace.max_batch - len(jobs))
        if not returning:
            return False
        # docs/decisions/0044: with n waiting and m returning, one run saves T(n) + T(m) - T(n + m) over two, where T of
        # the joint run is optimistic, so that sizes that were slow once are tried again. Waiting pays if the clients
        # are back within WAIT_FACTOR times that, and must not endanger any deadline: the run starts at the latest when
        # they are given up.
        together_s = pace.optimistic_s(len(jobs) + returning)
        saves_s = pace.expected_s(len(jobs)) + pace.expected_s(returning) - together_s
        if (
            expected.typically_by - now >= WAIT_FACTOR * saves_s
            or min(job.due_at for job in jobs) <= expected.until + together_s
        ):
            return False
        self.recheck_at = min(self.recheck_at, expected.until)
        return True

    def _length_in_runs(self) -> float:
        """Length of the queue in runs: n jobs that can share a run of n count as one."""
        return sum(1 / job.run_times.max_batch for job in self.queue)

    def _check_deadline(self, job: Job, now: float) -> None:
        """Raise Busy if the job cannot end in time behind what is queued. If nothing is, it is always tried."""
        joining = job.run_times if job.run_times.max_batch > 1 else None
        if job.deadline is None or len(self.running) < self._max_active(joining):
            return
        # Refused if it would end after its deadline: wait, then the jobs of its model in the queue and itself, batched.
        # With no work ahead it is tried, so that a wrong estimate corrects itself.
        wait_s = self.expected_wait_s(now, joining)
        ahead = sum(queued.run_times is joining for queued in self.queue)
        if wait_s > 0 and now + wait_s + job.run_times.total_s(ahead + 1) > job.due_at:
            text = (
                f"it would wait about {wait_s:.3f} s, and {max(0.0, job.due_at - now):.3f} s are left to its deadline"
            )
            raise self._with_retry_after(Busy(text), now)

    def _check_share(self, job: Job, now: float) -> None:
        """Raise FairShareExceeded if the client has its share of the slots and others wait."""
        if job.client is None or all(queued.client == job.client for queued in self.queue):
            return
        slots = self._slots_by_client()
        # Equal shares of all slots (active and waiting) among the clients that are present now.
        share = max(1, (self._max_runs + self._max_waiting) // len({*slots, job.client}))
        if slots[job.client] >= share:
            raise self._with_retry_after(
                FairShareExceeded(f"other clients wait, and this one has its share of {share} slots"), now
            )

    def _job_to_displace(self, job: Job) -> Job | None:
        """The newest waiting job of the client with most slots, if that client has at least two more than this
        job's."""
        if job.client is None:
            return None
        slots = self._slots_by_client()
        greediest = max((queued.client for queued in self.queue), key=lambda client: slots[client], default=None)
        # A difference of one slot would only swap the roles of the two clients.
        if greediest is None or slots[greediest] <= slots[job.client] + 1:
            return None
        return next(queued for queued in reversed(self.queue) if queued.client == greediest)

    def _slots_by_client(self) -> dict[str | None, float]:
        """Slots per client; jobs that share a run, or can, have one together."""
        slots: dict[str | None, float] = defaultdict(float)
        for run in self.running:
            for job in run.jobs:
                slots[job.client] += 1 / len(run.jobs)
        for job in self.queue:
            slots[job.client] += 1 / job.run_times.max_batch
        return slots

    def _with_retry_after(self, error: Busy, now: float) -> Busy:
        """`error` with the expected wait as its Retry-After."""
        error.retry_after_s = self.expected_wait_s(now)
        return error


def _select_batch(candidates: Sequence[Job], now: float) -> list[Job]:
    """A batch of at least one job that should end before the first deadline in it, preferring early deadlines.

    The job that has waited longest is always included, so that none starves.
    """
    first, pace = candidates[0], candidates[0].run_times
    # Earliest deadline first. Adding one more job makes the run longer for all in it, so the batch is complete when the
    # longer run would miss any member's deadline.
    members = [first]
    for job in sorted(candidates[1:], key=lambda job: job.due_at):
        if len(members) >= pace.max_batch or now + pace.expected_s(len(members) + 1) > min(
            job.due_at, *(m.due_at for m in members)
        ):
            break
        members.append(job)
    return members
