"""How a route reaches the controller: at once, or in its turn.

Heavy work runs one at a time in a thread of its own, so that nothing else waits for it.
"""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextvars import copy_context
from typing import Any, TypeVar

from fastapi import Request

from edgesplit.errors import Busy
from edgesplit_controller.caller import Caller
from edgesplit_controller.controller import Controller

WAITING_HEAVY = 16
"""Heavy calls that may wait; more are told to come back."""
T = TypeVar("T")


class Heavy:
    """One thread for what measures, plans, cuts and signs; the rest of the API never waits for it."""

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]]] = queue.SimpleQueue()
        self._waiting = 0
        # A daemon: at the end nothing waits for a plan, and what is half done is done again.
        threading.Thread(target=self._work, name="heavy", daemon=True).start()

    @property
    def waiting(self) -> int:
        """Calls that wait, or run."""
        return self._waiting

    async def run(self, work: Callable[..., T], *arguments: Any) -> T:
        """Run `work` when its turn comes; Busy when too many wait. Called on the event loop."""
        if self._waiting >= WAITING_HEAVY:
            raise Busy(f"{self._waiting} plans and deployments wait already; try again later")
        future: Future[T] = Future()
        self._waiting += 1
        try:
            context = copy_context()  # who asks for it
            self._queue.put((future, lambda: context.run(work, *arguments)))
            return await asyncio.wrap_future(future)
        finally:
            self._waiting -= 1

    def submit(self, work: Callable[[], T]) -> Future[T]:
        """Run `work` when its turn comes; for what the controller does by itself, which comes one at a time."""
        future: Future[T] = Future()
        self._queue.put((future, work))
        return future

    def _work(self) -> None:
        while True:
            future, work = self._queue.get()
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(work())
                except BaseException as error:
                    future.set_exception(error)


def controller_of(request: Request) -> Controller:
    """The controller that this application is of, for who calls: devices of other groups do not exist for them."""
    controller: Controller = request.app.state.controller
    caller: Caller | None = getattr(request.state, "caller", None)
    return controller if caller is None else controller.within(caller.groups)


async def heavily(request: Request, work: Callable[..., T], *arguments: Any) -> T:
    """Run `work` when its turn comes."""
    heavy: Heavy = request.app.state.heavy
    return await heavy.run(work, *arguments)
