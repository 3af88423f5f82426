"""Direct lanes of an asyncio client: up to `MAX_LANES` per model, one request at a time on each.

A request that finds all lanes in use goes through the agent. A request that is cancelled or exceeds its deadline closes
its lane, so a late answer can never be taken for the answer to another request. `edgesplit.client.direct.sync_channel`
is the counterpart for threads.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from time import monotonic

import msgspec

from edgesplit.client.answer import Answer
from edgesplit.client.direct.endpoint import LaneClosed, LaneEndpoint, decode_grant
from edgesplit.client.direct.grant import LaneRequest
from edgesplit.client.direct.request_policy import LaneRequestPolicy, grant_timeout_s
from edgesplit.errors import EdgeError
from edgesplit.http1.response import Reply
from edgesplit.oip import protocol as oip

log = logging.getLogger(__name__)

MAX_LANES = 4
"""Lanes per model."""
SendLaneRequest = Callable[[bytes, int, float], Awaitable[Reply]]
"""Sends the request for a lane (body, descriptor of the worker's end, timeout in seconds) to the agent."""


class AsyncLane:
    """One lane. Its socket stays registered with the event loop between requests."""

    def __init__(self, end: LaneEndpoint, loop: asyncio.AbstractEventLoop) -> None:
        self.end = end
        self._loop = loop
        self._into = memoryview(b"")
        self._pending: asyncio.Future[None] | None = None
        end.sock.setblocking(False)
        self._watched = False

    async def infer(
        self, inputs: Mapping[str, oip.Tensor | bytes], outputs: Sequence[str], deadline: float
    ) -> Answer | None:
        """Run one request on the lane; None if the request must go through the agent. LaneClosed if the lane is
        unusable from now on."""
        end = self.end
        within_s = end.start_request(inputs, outputs, deadline, monotonic())
        if not within_s:
            return None
        timer = self._loop.call_later(within_s, self._fail, LaneClosed("silent"))
        try:
            reply_received = self._receive_into(end.reply)
            if end.shared:
                end.sock.send(end.head)
            else:
                await asyncio.wait_for(self._loop.sock_sendall(end.sock, b"".join(end.outgoing)), within_s)
            await reply_received
            if remaining_body := end.remaining_body:
                await self._receive_into(remaining_body)
        except (OSError, asyncio.TimeoutError) as error:
            raise LaneClosed(f"no answer, or closed: {error}") from error
        finally:
            timer.cancel()
        return end.decode_answer(outputs)

    def close(self) -> None:
        """Close the lane; a request in flight fails with LaneClosed."""
        self._fail(LaneClosed("closed"))
        if self.end.sock.fileno() >= 0:
            self._watch(on=False)
            self.end.close()

    def _receive_into(self, into: memoryview) -> asyncio.Future[None]:
        """A future that completes once `into` is filled from the socket."""
        self._into = into
        self._pending = self._loop.create_future()
        self._on_readable()  # the bytes may have arrived already
        if not self._pending.done() and not self._watched:
            self._watch(on=True)
        return self._pending

    def _watch(self, *, on: bool) -> None:
        self._watched = on
        if on:
            self._loop.add_reader(self.end.sock.fileno(), self._on_readable)
        else:
            self._loop.remove_reader(self.end.sock.fileno())

    def _on_readable(self) -> None:
        """Event loop callback: receive into the expected buffer."""
        # No request in flight: the bytes, or the end of stream, are left for the next one.
        if self._pending is None or self._pending.done():
            if self._watched:
                self._watch(on=False)
            return
        try:
            while self._into:
                count = self.end.sock.recv_into(self._into)
                if not count:
                    self._fail(LaneClosed("closed"))
                    return
                self._into = self._into[count:]
        except BlockingIOError:
            return
        except OSError as error:
            self._fail(LaneClosed(str(error)))
            return
        self._pending.set_result(None)

    def _fail(self, error: LaneClosed) -> None:
        """Fail the request in flight, if there is one."""
        if self._pending is not None and not self._pending.done():
            self._pending.set_exception(error)


@dataclass
class _ModelLanes:
    policy: LaneRequestPolicy = field(default_factory=LaneRequestPolicy)
    idle: list[AsyncLane] = field(default_factory=list)
    lanes: int = 0


@dataclass
class AsyncLanes:
    """All lanes of one client, by model."""

    shared: bool
    _models: dict[str, _ModelLanes] = field(default_factory=dict)
    _open: set[AsyncLane] = field(default_factory=set)
    _closed: bool = False

    async def infer(
        self,
        model: str,
        inputs: Mapping[str, oip.Tensor | bytes],
        outputs: Sequence[str],
        deadline: float,
        send_lane_request: SendLaneRequest,
        ask_agent: Callable[[], Awaitable[Answer]],
    ) -> Answer:
        """Run the request on a lane, or by `ask_agent` where there is none or it does not answer.

        `send_lane_request` sends the request for a new lane. A lane that fails is closed.
        """
        state = self._models.get(model) or self._models.setdefault(model, _ModelLanes())
        lane, answer = await self._acquire(model, state, deadline, send_lane_request), None
        if lane is not None:
            is_reusable = False
            try:
                answer = await lane.infer(inputs, outputs, deadline)
                is_reusable = True
            except LaneClosed as error:
                log.debug("the lane to %s is closed: %s", model, error)
            finally:
                self._release(state, lane, is_reusable)
        if answer is None:
            answer = await ask_agent()
            state.policy.has_agent_answered = True  # so that the next request may ask for a lane
        return answer

    def close(self) -> None:
        """Close all lanes; requests in flight on them fail with LaneClosed."""
        self._closed = True
        for lane in list(self._open):
            self._open.discard(lane)
            lane.close()

    async def _acquire(
        self, model: str, state: _ModelLanes, deadline: float, send_lane_request: SendLaneRequest
    ) -> AsyncLane | None:
        """An idle or newly granted lane; None if there is none for this request."""
        if state.idle:
            return state.idle.pop()
        now = monotonic()
        if self._closed or state.lanes >= MAX_LANES or not state.policy.should_request(now):
            return None
        state.lanes += 1
        state.policy.has_agent_answered = False  # only one request for a lane at a time
        try:
            lane = await self._request_lane(model, deadline - now, send_lane_request)
        except BaseException as error:
            state.lanes -= 1
            state.policy.on_refused(now)
            if isinstance(error, (EdgeError, OSError)):
                log.debug("no lane to %s: %s", model, error)
                return None
            raise
        state.policy.on_granted(now)
        self._open.add(lane)
        return lane

    async def _request_lane(self, model: str, left_s: float, send_lane_request: SendLaneRequest) -> AsyncLane:
        """Request a lane from the agent and receive its memory. LaneClosed if it is refused."""
        client_end, worker_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            with worker_end:
                body = msgspec.json.encode(LaneRequest(model, self.shared))
                grant = decode_grant(await send_lane_request(body, worker_end.fileno(), grant_timeout_s(left_s)))
            if self._closed:
                raise LaneClosed("this client was closed")
            end = LaneEndpoint.receive(grant, client_end, shared=self.shared)
            return AsyncLane(end, asyncio.get_running_loop())
        except BaseException:
            client_end.close()
            raise

    def _release(self, state: _ModelLanes, lane: AsyncLane, is_reusable: bool) -> None:
        if is_reusable and not self._closed:
            state.idle.append(lane)
            return
        state.lanes -= 1
        state.policy.on_ended(monotonic())
        self._open.discard(lane)
        lane.close()
