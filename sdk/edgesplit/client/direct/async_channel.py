"""Lanes of an asyncio client: a few for each model, one request at a time on each. For threads:
`edgesplit.client.direct.sync_channel`.

A request that finds all of them in use is the agent's. One that is cancelled, or given up at its deadline, ends its
lane: nothing that arrives later can be taken for the answer to another.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from time import monotonic

import msgspec

from edgesplit.client.direct.endpoint import LaneEnd, LaneEnded, granted, memory_of
from edgesplit.client.direct.grant import LaneWish
from edgesplit.client.direct.request_policy import Hope, granting_s
from edgesplit.client.request import Answer
from edgesplit.errors import EdgeError
from edgesplit.http1.response import Reply
from edgesplit.oip import protocol as oip

log = logging.getLogger(__name__)

MOST = 4
"""Lanes to one model."""
AskAgent = Callable[[bytes, int, float], Awaitable[Reply]]


class AsyncLane:
    """One lane. Its socket stays watched from one request to the next."""

    def __init__(self, end: LaneEnd, loop: asyncio.AbstractEventLoop) -> None:
        self.end = end
        self._loop = loop
        self._into = memoryview(b"")
        self._waiting: asyncio.Future[None] | None = None
        end.sock.setblocking(False)
        self._watched = False

    async def ask(
        self, inputs: Mapping[str, oip.Tensor | bytes], outputs: Sequence[str], deadline: float
    ) -> Answer | None:
        """As `edgesplit.client.direct.sync_channel.Lane.ask`."""
        end = self.end
        within_s = end.begin(inputs, outputs, deadline, monotonic())
        if not within_s:
            return None
        late = self._loop.call_later(within_s, self._over, LaneEnded("silent"))
        try:
            coming = self._expect(end.reply)
            if end.shared:
                end.sock.send(end.head)
            else:
                await asyncio.wait_for(self._loop.sock_sendall(end.sock, b"".join(end.sent)), within_s)
            await coming
            if more := end.more:
                await self._expect(more)
        except (OSError, asyncio.TimeoutError) as error:
            raise LaneEnded(f"silent, or gone: {error}") from error
        finally:
            late.cancel()
        return end.answer(outputs)

    def close(self) -> None:
        """Who waits on it is told."""
        self._over(LaneEnded("closed"))
        if self.end.sock.fileno() >= 0:
            self._watch(on=False)
            self.end.close()

    def _expect(self, into: memoryview) -> asyncio.Future[None]:
        self._into = into
        self._waiting = self._loop.create_future()
        self._readable()  # it may be there already
        if not self._waiting.done() and not self._watched:
            self._watch(on=True)
        return self._waiting

    def _watch(self, *, on: bool) -> None:
        self._watched = on
        if on:
            self._loop.add_reader(self.end.sock.fileno(), self._readable)
        else:
            self._loop.remove_reader(self.end.sock.fileno())

    def _readable(self) -> None:
        if self._waiting is None or self._waiting.done():  # nobody asks for it now: what belongs to it, or its end
            if self._watched:
                self._watch(on=False)
            return
        try:
            while self._into:
                count = self.end.sock.recv_into(self._into)
                if not count:
                    self._over(LaneEnded("closed"))
                    return
                self._into = self._into[count:]
        except BlockingIOError:
            return
        except OSError as error:
            self._over(LaneEnded(str(error)))
            return
        self._waiting.set_result(None)

    def _over(self, error: LaneEnded) -> None:
        if self._waiting is not None and not self._waiting.done():
            self._waiting.set_exception(error)


@dataclass
class _Model:
    hope: Hope = field(default_factory=Hope)
    idle: list[AsyncLane] = field(default_factory=list)
    lanes: int = 0


@dataclass
class AsyncLanes:
    """What a client has."""

    shared: bool
    _models: dict[str, _Model] = field(default_factory=dict)
    _open: set[AsyncLane] = field(default_factory=set)
    _closed: bool = False

    async def answer(
        self,
        model: str,
        inputs: Mapping[str, oip.Tensor | bytes],
        outputs: Sequence[str],
        deadline: float,
        agent: AskAgent,
    ) -> Answer | None:
        """As `edgesplit.client.direct.sync_channel.Lanes.answer`."""
        known = self._models.get(model)
        lane = await self._taken(model, known, deadline, agent) if known is not None else None
        if known is None or lane is None:
            return None
        good = False
        try:
            found = await lane.ask(inputs, outputs, deadline)
            good = True
            return found
        except LaneEnded as error:
            log.debug("the lane to %s is given up: %s", model, error)
            return None
        finally:
            self._given_back(known, lane, good)

    def answered(self, model: str) -> None:
        """The agent has answered for that model: a lane may be worth asking for."""
        self._models.setdefault(model, _Model()).hope.answered = True

    def close(self) -> None:
        """End all of them; who waits is told."""
        self._closed = True
        for lane in list(self._open):
            self._open.discard(lane)
            lane.close()

    async def _taken(self, model: str, known: _Model, deadline: float, agent: AskAgent) -> AsyncLane | None:
        if known.idle:
            return known.idle.pop()
        now = monotonic()
        if self._closed or known.lanes >= MOST or not known.hope.may_ask(now):
            return None
        known.lanes += 1
        known.hope.answered = False  # one asks at a time
        try:
            lane = await self._granted(model, deadline - now, agent)
        except BaseException as error:
            known.lanes -= 1
            known.hope.refused(now)
            if isinstance(error, (EdgeError, OSError)):
                log.debug("no lane to %s: %s", model, error)
                return None
            raise
        known.hope.got(now)
        self._open.add(lane)
        return lane

    async def _granted(self, model: str, left_s: float, agent: AskAgent) -> AsyncLane:
        mine, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            with theirs:
                wish = msgspec.json.encode(LaneWish(model, self.shared))
                grant = granted(await agent(wish, theirs.fileno(), granting_s(left_s)))
            if self._closed:
                raise LaneEnded("this client was closed")
            end = LaneEnd(grant, mine, memory_of(grant, mine, shared=self.shared), shared=self.shared)
            return AsyncLane(end, asyncio.get_running_loop())
        except BaseException:
            mine.close()
            raise

    def _given_back(self, known: _Model, lane: AsyncLane, good: bool) -> None:
        if good and not self._closed:
            known.idle.append(lane)
            return
        known.lanes -= 1
        known.hope.lost(monotonic())
        self._open.discard(lane)
        lane.close()
