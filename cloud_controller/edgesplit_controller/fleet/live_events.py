"""What changed, told to the pages that are open at this controller process.

Promises: one reading of the database a second serves every follower, and none is made while there is none; for each
follower a subject waits at most once, and of more than `WAITING` subjects nothing is kept but the word to read
everything again, so that a slow one costs no memory; a follower hears something at least every `HEARTBEAT_S`, so that
silence means that the connection is gone. All of it runs on one event loop.
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
HEARTBEAT_S = 15.0
WAITING = 256
FOLLOWERS = 200
"""Pages that may follow at one process."""


class Mailbox:
    """What one follower has not been told yet."""

    def __init__(self, groups: Collection[str] | None) -> None:
        self._groups = groups
        self._waiting: dict[Change, None] = {}
        self._overflown = False
        self.rings = asyncio.Event()

    def put(self, changes: Sequence[Change]) -> None:
        """Keep what this follower may know of; too much becomes one word."""
        mine = [one for one in changes if self._groups is None or one.group is None or one.group in self._groups]
        self._waiting.update(dict.fromkeys(mine))
        if len(self._waiting) > WAITING:
            self._waiting.clear()
            self._overflown = True
        if mine:
            self.rings.set()

    def take(self) -> list[bytes]:
        """All that waits, as server-sent events."""
        self.rings.clear()
        changes, everything = list(self._waiting), self._overflown
        self._waiting, self._overflown = {}, False
        return [as_event("everything", {})] if everything else [as_event(one.kind, _named(one)) for one in changes]


class Hub:
    """The followers of one process, and the one task that reads for them."""

    def __init__(
        self,
        begin: Callable[[], None],
        read: Callable[[], Sequence[Change]],
        *,
        poll_s: float = POLL_S,
        heartbeat_s: float = HEARTBEAT_S,
    ) -> None:
        self._begin, self._read = begin, read
        self._poll_s, self._heartbeat_s = poll_s, heartbeat_s
        self._mailboxes: set[Mailbox] = set()
        self._reading: asyncio.Task[None] | None = None
        self._begun = asyncio.Event()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._ended = False

    @property
    def followers(self) -> int:
        """How many follow."""
        return len(self._mailboxes)

    def follow(
        self, groups: Collection[str] | None = None, allowed: Callable[[], bool] = lambda: True
    ) -> AsyncIterator[bytes]:
        """Changes as server-sent events until the reader goes, the hub is stopped, or `allowed` (asked at each
        heartbeat, in a thread) is false. `groups`: what the reader may see; None is everything."""
        if len(self._mailboxes) >= FOLLOWERS:
            raise Busy(f"{FOLLOWERS} pages follow already; close one or try again later")
        return self._follow(Mailbox(groups), allowed)

    async def _follow(self, mailbox: Mailbox, allowed: Callable[[], bool]) -> AsyncIterator[bytes]:
        self._loop = asyncio.get_running_loop()
        self._mailboxes.add(mailbox)
        try:
            await self._ensure_reading()
            yield as_event("hello", {"heartbeat_s": self._heartbeat_s})
            while not self._ended:
                try:
                    await asyncio.wait_for(mailbox.rings.wait(), self._heartbeat_s)
                except asyncio.TimeoutError:
                    if not await run_in_threadpool(allowed):
                        return
                    yield as_event("heartbeat", {})
                    continue
                for event in mailbox.take():
                    yield event
        finally:
            self._mailboxes.discard(mailbox)

    def stop_soon(self) -> None:
        """End every stream. From any thread."""
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._stop)

    def _stop(self) -> None:
        self._ended = True
        if self._reading is not None:
            self._reading.cancel()
        for mailbox in self._mailboxes:
            mailbox.rings.set()

    async def _ensure_reading(self) -> None:
        """One reader for all; a follower waits until it has noted where the world stands."""
        if self._reading is None or self._reading.done():
            self._begun = asyncio.Event()
            self._reading = asyncio.create_task(self._keep_reading(self._begun))
        await self._begun.wait()

    async def _keep_reading(self, told: asyncio.Event) -> None:
        begun = False
        while self._mailboxes and not self._ended:
            try:
                if not begun:
                    await run_in_threadpool(self._begin)
                    begun = True
                else:
                    changes = await run_in_threadpool(self._read)
                    for mailbox in self._mailboxes:
                        mailbox.put(changes)
            except Exception:  # a database that is away comes back; followers go on waiting, and hear heartbeats
                log.exception("could not read what changed")
            told.set()
            await asyncio.sleep(self._poll_s)


def as_event(kind: str, content: dict[str, Any]) -> bytes:
    """One server-sent event; JSON has no line breaks that would end it."""
    return b"event: %s\ndata: %s\n\n" % (kind.encode(), msgspec.json.encode(content))


def _named(change: Change) -> dict[str, Any]:
    return {"subject": change.subject}
