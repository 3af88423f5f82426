"""Broadcasts changes of the fleet to the pages that are open at this controller process, as server-sent events.

Guarantees: one database reading a second serves all followers, and there is none without a follower; each follower's
queue holds a subject at most once, and beyond `WAITING` subjects it is replaced by one event to reload everything, so
that a slow follower has bounded memory; each follower receives something at least every `HEARTBEAT_S`, so that silence
means a broken connection. Everything runs on one event loop.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Collection, Sequence
from typing import Any

import msgspec
from starlette.concurrency import run_in_threadpool

from edgesplit.errors import Busy
from edgesplit_controller.fleet.change_feed import Change

log = logging.getLogger(__name__)

POLL_S = 1.0
"""Seconds between two readings of the database."""
HEARTBEAT_S = 15.0
"""Seconds without a change after which a heartbeat is sent."""
MAX_QUEUED = 256
"""Changes that are queued for one follower before the queue is replaced by a reload."""
MAX_FOLLOWERS = 200
"""Limit of followers of one process."""


class FollowerQueue:
    """Queue of changes for one follower."""

    def __init__(self, groups: Collection[str] | None) -> None:
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
        heartbeat_s: float = HEARTBEAT_S, max_followers: int = MAX_FOLLOWERS,
    ) -> None:  # fmt: skip
        self._start_feed, self._read_changes = begin, read
        self._poll_s, self._heartbeat_s, self._max_followers = poll_s, heartbeat_s, max_followers
        self._queues: set[FollowerQueue] = set()
        self._reading: asyncio.Task[None] | None = None
        self._has_started = asyncio.Event()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._is_stopped = False

    def follow(
        self, groups: Collection[str] | None = None, allowed: Callable[[], bool] = lambda: True
    ) -> AsyncIterator[bytes]:
        """Changes as server-sent events until the reader disconnects, the hub is stopped, or `allowed` returns False
        (it is called at each heartbeat, in a thread). `groups` are those visible to the reader; None: all. Busy if
        there are too many followers."""
        if len(self._queues) >= self._max_followers:
            raise Busy(f"{self._max_followers} pages receive live events already; close one or try again later")
        return self._follow(FollowerQueue(groups), allowed)

    async def _follow(self, queue: FollowerQueue, allowed: Callable[[], bool]) -> AsyncIterator[bytes]:
        self._loop = asyncio.get_running_loop()
        self._queues.add(queue)
        try:
            await self._ensure_reading()
            yield encode_event("hello", {"heartbeat_s": self._heartbeat_s})
            while not self._is_stopped:
                try:
                    await asyncio.wait_for(queue.has_events.wait(), self._heartbeat_s)
                except asyncio.TimeoutError:
                    if not await run_in_threadpool(allowed):
                        return
                    yield encode_event("heartbeat", {})
                    continue
                for event in queue.drain():
                    yield event
        finally:
            self._queues.discard(queue)

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


def encode_event(kind: str, content: dict[str, Any]) -> bytes:
    """One server-sent event; JSON contains no line break that would end it early."""
    return b"event: %s\ndata: %s\n\n" % (kind.encode(), msgspec.json.encode(content))
