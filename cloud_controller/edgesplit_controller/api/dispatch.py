"""How a route calls the controller: directly, or through the queue of heavy jobs.

Heavy jobs (measure, plan, slice, sign) run on threads of their own, so that no other call waits for them: those of one
operator one at a time and in their order, those of several operators side by side.
"""

from __future__ import annotations

import asyncio
import threading
from collections import Counter, deque
from collections.abc import Callable
from concurrent.futures import Future, wait
from contextlib import AbstractContextManager, nullcontext
from contextvars import copy_context
from typing import Any, TypeVar

from fastapi import Request

from edgesplit.errors import Busy
from edgesplit_controller.caller import Caller, current_operator
from edgesplit_controller.controller import Controller
from edgesplit_controller.job_progress import Job

LANES = 3
"""Heavy jobs that run at a time, each of another operator. Every one may take a large model's memory."""
MAX_JOBS_PER_OPERATOR = 16
"""Heavy calls of one operator that may be queued or running; further ones are refused with Busy (429)."""
MAX_HEAVY_JOBS = 64
"""Heavy calls of all operators together."""
POLL_S = 0.5
"""Interval at which a job of the controller itself is checked for the stop of the controller."""
_CONTROLLER = ""
"""Stands for the controller itself where an operator is expected; no operator has this name."""
T = TypeVar("T")
_Job = tuple[Future[Any], Callable[[], Any]]


class HeavyJobQueue:
    """Queues of heavy jobs, one for each operator, and the threads that work on them in turns.

    An operator has one job running at most, and moves behind the others when it ends: a job that takes long delays its
    own operator's, and those of others only while there are more operators than threads.
    """

    def __init__(self, lanes: int = LANES, *, around: Callable[[], AbstractContextManager[None]] = nullcontext) -> None:
        """`around`: opened anew around each job, on its thread."""
        self._around = around
        self._queues: dict[str, deque[_Job]] = {}
        """Jobs by operator, for operators that have a job queued or running."""
        self._turns: deque[str] = deque()
        """Operators that have a job queued and none running, the next one first."""
        self._changed = threading.Condition()
        self._calls: Counter[str] = Counter()
        self._jobs: list[Job] = []
        for lane in range(lanes):
            # Daemon threads: shutdown does not wait for a plan, and unfinished work is repeated on request.
            threading.Thread(target=self._work, name=f"heavy {lane}", daemon=True).start()

    @property
    def waiting(self) -> int:
        """Calls that are queued or running."""
        return self._calls.total()

    def jobs_of(self, operator: str) -> list[Job]:
        """The operator's calls that are queued or running, oldest first."""
        return [job for job in list(self._jobs) if job.operator == operator]

    async def run(self, work: Callable[..., T], *arguments: Any, path: str = "") -> T:
        """Queue `work` for the current operator and await its result; Busy if the queue is full. Call on the event
        loop. `path` names the call in `jobs_of`."""
        operator = current_operator()
        if self._calls[operator] >= MAX_JOBS_PER_OPERATOR:
            raise Busy(f"{self._calls[operator]} of your plans and deployments are queued already; try again later")
        if self.waiting >= MAX_HEAVY_JOBS:
            raise Busy(f"{self.waiting} plans and deployments are queued already; try again later")
        self._calls[operator] += 1
        job = Job(path)

        def run_job() -> T:
            with job.running():
                return work(*arguments)

        self._jobs.append(job)
        try:
            context = copy_context()  # the job sees the same current operator and log context
            return await asyncio.wrap_future(self._put(operator, lambda: context.run(run_job)))
        finally:
            self._jobs.remove(job)
            self._calls[operator] -= 1
            if not self._calls[operator]:
                del self._calls[operator]

    def run_blocking(self, work: Callable[[], None], stopping: threading.Event) -> None:
        """Queue `work` for the controller itself, which submits one job at a time and so needs no limit; return when it
        has ended, or when `stopping` is set."""
        future = self._put(_CONTROLLER, work)
        while not wait([future], POLL_S).done:
            if stopping.is_set():
                future.cancel()
                return
        future.result()

    def _put(self, operator: str, work: Callable[[], T]) -> Future[T]:
        """Queue a job behind the operator's others."""
        future: Future[T] = Future()
        with self._changed:
            if operator not in self._queues:
                self._queues[operator] = deque()
                self._turns.append(operator)
                self._changed.notify()
            self._queues[operator].append((future, work))
        return future

    def _work(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._turns)
                operator = self._turns.popleft()
                future, work = self._queues[operator].popleft()
            if future.set_running_or_notify_cancel():
                try:
                    with self._around():
                        result = work()
                    future.set_result(result)
                except BaseException as error:
                    future.set_exception(error)
            with self._changed:
                if self._queues[operator]:
                    self._turns.append(operator)
                    self._changed.notify()
                else:
                    del self._queues[operator]


def controller_of(request: Request) -> Controller:
    """The controller, limited to the devices that are visible to the caller of this request."""
    controller: Controller = request.app.state.controller
    caller: Caller | None = getattr(request.state, "caller", None)
    return controller if caller is None else controller.scoped_to(caller.groups)


async def run_heavy(request: Request, work: Callable[..., T], *arguments: Any) -> T:
    """Queue `work` as a heavy job and await its result; Busy if the queue is full."""
    heavy: HeavyJobQueue = request.app.state.heavy
    return await heavy.run(work, *arguments, path=request.url.path)
