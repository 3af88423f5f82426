"""How a route calls the controller: directly, or through the queue of heavy jobs.

Heavy jobs (measure, plan, slice, sign) run one at a time on a thread of their own, so that no other call waits for
them.
"""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future, wait
from contextvars import copy_context
from typing import Any, TypeVar

from fastapi import Request

from edgesplit.errors import Busy
from edgesplit_controller.caller import Caller
from edgesplit_controller.controller import Controller

MAX_HEAVY_JOBS = 16
"""Heavy calls that may be queued or running; further ones are refused with Busy (429)."""
POLL_S = 0.5
"""Interval at which a job of the controller itself is checked for the stop of the controller."""
T = TypeVar("T")


class HeavyJobQueue:
    """Queue of heavy jobs with one worker thread."""

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]]] = queue.SimpleQueue()
        self._waiting = 0
        # A daemon thread: shutdown does not wait for a plan, and unfinished work is repeated on request.
        threading.Thread(target=self._work, name="heavy", daemon=True).start()

    @property
    def waiting(self) -> int:
        """Calls that are queued or running."""
        return self._waiting

    async def run(self, work: Callable[..., T], *arguments: Any) -> T:
        """Queue `work` and await its result; Busy if the queue is full. Call on the event loop."""
        if self._waiting >= MAX_HEAVY_JOBS:
            raise Busy(f"{self._waiting} plans and deployments are queued already; try again later")
        future: Future[T] = Future()
        self._waiting += 1
        try:
            context = copy_context()  # the job sees the same current operator and log context
            self._queue.put((future, lambda: context.run(work, *arguments)))
            return await asyncio.wrap_future(future)
        finally:
            self._waiting -= 1

    def run_blocking(self, work: Callable[[], None], stopping: threading.Event) -> None:
        """Queue `work` for the controller itself, which submits one job at a time and so needs no limit; return when it
        has ended, or when `stopping` is set."""
        future: Future[None] = Future()
        self._queue.put((future, work))
        while not wait([future], POLL_S).done:
            if stopping.is_set():
                future.cancel()
                return
        future.result()

    def _work(self) -> None:
        while True:
            future, work = self._queue.get()
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(work())
                except BaseException as error:
                    future.set_exception(error)


def controller_of(request: Request) -> Controller:
    """The controller, limited to the devices that are visible to the caller of this request."""
    controller: Controller = request.app.state.controller
    caller: Caller | None = getattr(request.state, "caller", None)
    return controller if caller is None else controller.scoped_to(caller.groups)


async def run_heavy(request: Request, work: Callable[..., T], *arguments: Any) -> T:
    """Queue `work` as a heavy job and await its result; Busy if the queue is full."""
    heavy: HeavyJobQueue = request.app.state.heavy
    return await heavy.run(work, *arguments)
