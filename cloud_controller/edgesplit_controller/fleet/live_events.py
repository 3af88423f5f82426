"""Broadcasts changes of the fleet to the pages that are open at this controller process, as server-sent events.

Guarantees: one database reading a second serves all followers, and there is none without a follower; each follower's
queue holds a subject at most once, and beyond `MAX_QUEUED` subjects it is replaced by one event to reload everything,
so that a slow follower has bounded memory; each follower receives something at least every `HEARTBEAT_S`, so that
silence means a broken connection; a follower whose access ended receives nothing after the next check, however much
happens, and no operator takes the places of the others. Everything runs on one event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Callable, Collection, Sequence
from typing import Any

import msgspec
from starlette.concurrency import run_in_threadpool

from edgesplit.errors import Busy, LinkError
from edgesplit_controller.fleet.change_feed import Change

log = logging.getLogger(__name__)

POLL_S = 1.0
"""Seconds between two readings of the database."""
HEARTBEAT_S = 15.0
"""Seconds without a change after which a heartbeat is sent."""
CHECK_S = 1.0
"""Seconds after which a follower's access is checked again, whether anything changed or not."""
MAX_QUEUED = 256
"""Changes that are queued for one follower before the queue is replaced by a reload."""
MAX_FOLLOWERS = 200
"""Limit of followers of one process."""
MAX_FOLLOWERS_OF_ONE = 20
"""Limit of followers of one operator in one process."""


class FollowerQueue:
    """Queue of changes for one follower."""

    def __init__(self, groups: Collection[str] | None, operator: str = "") -> None:
        self.operator = operator
        self.is_check_due = False
        """Whether access is to be checked now, before the time for it comes."""
        self._groups = groups
        self._queued: dict[Change, None] = {}
        self._overflown = False
        self.has_events = asyncio.Event()

    def put(self, changes: Sequence[Change]) -> None:
        """Queue the changes that this follower may see; on overflow the queue is replaced by a reload."""
        visible = [
            change for change in changes if self._groups is None or change.group is None or change.group in self._groups
        ]
        self._queued.update(dict.fromkeys(visible))
        # The queue is a set in order of insertion: a subject that changes again keeps its place.
        if len(self._queued) > MAX_QUEUED:
            self._queued.clear()
            self._overflown = True
        if visible:
            self.has_events.set()

    def drain(self) -> list[bytes]:
        """Remove everything that is queued, as encoded server-sent events."""
        self.has_events.clear()
        changes, overflown = list(self._queued), self._overflown
        self._queued, self._overflown = {}, False
        if overflown:
            return [encode_event("everything", {})]
        return [encode_event(change.kind, {"subject": change.subject}) for change in changes]


class LiveEventHub:
    """The followers of one process, and the task that reads changes for them."""

    def __init__(
        self, begin: Callable[[], None], read: Callable[[], Sequence[Change]], *, poll_s: float = POLL_S,
        heartbeat_s: float = HEARTBEAT_S, check_s: float = CHECK_S, max_followers: int = MAX_FOLLOWERS,
        max_of_one: int = MAX_FOLLOWERS_OF_ONE, clock: Callable[[], float] = time.monotonic,
    ) -> None:  # fmt: skip
        """`clock` returns seconds; access is checked and heartbeats are sent by it."""
        self._start_feed, self._read_changes, self._clock = begin, read, clock
        self._poll_s, self._heartbeat_s, self._check_s = poll_s, heartbeat_s, check_s
        self._max_followers, self._max_of_one = max_followers, max_of_one
        self._queues: set[FollowerQueue] = set()
        self._reading: asyncio.Task[None] | None = None
        self._has_started = asyncio.Event()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._is_stopped = False

    def follow(
        self, operator: str = "", groups: Collection[str] | None = None, allowed: Callable[[], bool] = lambda: True
    ) -> AsyncIterator[bytes]:
        """Changes as server-sent events until the reader disconnects, the hub is stopped, or `allowed` returns False.

        `allowed` is called in a thread every `check_s` and after `check_access`. Where it raises LinkError or Busy, the
        database cannot say: nothing but heartbeats is sent until it can. `groups` are those visible to the reader;
        None: all. Busy if there are too many followers, or too many of this operator.
        """
        if refusal := self._refusal(operator):
            raise Busy(refusal)
        return self._follow(FollowerQueue(groups, operator), allowed)

    def check_access(self, operator: str) -> None:
        """Check now whether the followers of this operator may still read. Callable from any thread."""
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._wake, operator)

    def _wake(self, operator: str) -> None:
        for queue in self._queues:
            if queue.operator == operator:
                queue.is_check_due = True
                queue.has_events.set()

    def _refusal(self, operator: str) -> str:
        """Why this operator gets no further stream now; empty if it gets one."""
        if sum(queue.operator == operator for queue in self._queues) >= self._max_of_one:
            return (
                f"{operator or 'this operator'} has {self._max_of_one} pages with live events open already;"
                " close one of them"
            )
        if len(self._queues) >= self._max_followers:
            return f"{self._max_followers} pages receive live events already; close one or try again later"
        return ""

    async def _follow(self, queue: FollowerQueue, allowed: Callable[[], bool]) -> AsyncIterator[bytes]:
        self._loop = asyncio.get_running_loop()
        if self._refusal(queue.operator):  # others began between `follow` and now
            return
        self._queues.add(queue)
        try:
            await self._ensure_reading()
            heartbeat_at = self._clock() + self._heartbeat_s
            check_at, is_known = self._clock() + self._check_s, True
            yield encode_event("hello", {"heartbeat_s": self._heartbeat_s})
            while not self._is_stopped:
                await self._wait_for_work(queue, min(check_at, heartbeat_at) - self._clock(), is_known)
                if self._is_stopped:
                    return
                # Access is checked before anything is sent: a reader that takes a chunk only now, long after it was
                # offered, receives no second one by a check that is as old.
                if queue.is_check_due or self._clock() >= check_at:
                    queue.is_check_due = False
                    verdict = await _ask(allowed)
                    if verdict is False:
                        return
                    check_at, is_known = self._clock() + self._check_s, verdict is not None
                if is_known and (events := queue.drain()):
                    heartbeat_at = self._clock() + self._heartbeat_s
                    yield b"".join(events)
                elif self._clock() >= heartbeat_at:
                    heartbeat_at = self._clock() + self._heartbeat_s
                    yield encode_event("heartbeat", {})
        finally:
            self._queues.discard(queue)

    @staticmethod
    async def _wait_for_work(queue: FollowerQueue, timeout_s: float, is_known: bool) -> None:
        """Wait until something is to be sent or checked, or the time is over. While access is unknown, changes are
        nothing to be sent."""
        if queue.is_check_due:
            return
        if not is_known:
            queue.has_events.clear()
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(queue.has_events.wait(), max(timeout_s, 0.0))

    def request_stop(self) -> None:
        """End every stream. Callable from any thread."""
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._stop)

    def _stop(self) -> None:
        self._is_stopped = True
        if self._reading is not None:
            self._reading.cancel()
        for mailbox in self._queues:
            mailbox.has_events.set()

    async def _ensure_reading(self) -> None:
        """Start the reading task if none runs; wait until it has set its starting point."""
        if self._reading is None or self._reading.done():
            self._has_started = asyncio.Event()
            self._reading = asyncio.create_task(self._read_loop(self._has_started))
        await self._has_started.wait()

    async def _read_loop(self, has_started_event: asyncio.Event) -> None:
        has_started = False
        while self._queues and not self._is_stopped:
            try:
                if not has_started:
                    await run_in_threadpool(self._start_feed)
                    has_started = True
                else:
                    changes = await run_in_threadpool(self._read_changes)
                    for mailbox in self._queues:
                        mailbox.put(changes)
            except Exception:  # a database failure passes; followers keep waiting and receive heartbeats
                log.exception("could not read the changes")
            has_started_event.set()
            await asyncio.sleep(self._poll_s)


async def _ask(allowed: Callable[[], bool]) -> bool | None:
    """Whether the follower may read; None if the database cannot say now."""
    try:
        return await run_in_threadpool(allowed)
    except (LinkError, Busy):
        return None


def encode_event(kind: str, content: dict[str, Any]) -> bytes:
    """One server-sent event; JSON contains no line break that would end it early."""
    return b"event: %s\ndata: %s\n\n" % (kind.encode(), msgspec.json.encode(content))
