"""Lanes of a client that waits in threads: one thread's, by model.

Promises that a request gets its answer from a lane, or None in time for the agent to be asked in its place; an answer
counts only where it is this request's own, and a lane on which anything else happens is given up.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from time import monotonic

import msgspec

from edgesplit.client.direct.endpoint import LaneEnd, LaneEnded, granted, memory_of
from edgesplit.client.direct.grant import ANSWER, LaneWish
from edgesplit.client.direct.request_policy import Hope, granting_s
from edgesplit.client.request import Answer
from edgesplit.errors import EdgeError
from edgesplit.http1.response import Reply
from edgesplit.oip import protocol as oip
from edgesplit.shared_memory.segment import SUPPORTED

log = logging.getLogger(__name__)

_TIME = struct.Struct("@ll")
_ROOM = 1 << 20
"""Bytes that may be on their way where tensors travel on the lane; the kernel gives less."""
LONGEST_WAIT_S = 3600.0
AskAgent = Callable[[bytes, int, float], Reply]
"""Sends the wish, with a descriptor, within so many seconds."""


class Lane:
    """One lane."""

    def __init__(self, end: LaneEnd) -> None:
        self.end = end
        self._waits_s = 0.0
        end.sock.setblocking(True)
        if not end.shared:
            end.sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _ROOM)

    def ask(self, inputs: Mapping[str, oip.Tensor | bytes], outputs: Sequence[str], deadline: float) -> Answer | None:
        """The answer; None where the agent is to be asked. LaneEnded where that is so from now on."""
        end, now = self.end, monotonic()
        try:
            within_s = end.begin(inputs, outputs, deadline, now)
            if not within_s:
                return None
            if not 0.85 * within_s <= self._waits_s <= within_s:
                self._allow(0.95 * within_s)
            if end.shared:
                end.sock.send(end.head)
            else:
                self._send(now + within_s)
            if end.sock.recv_into(end.reply) != ANSWER.size:
                raise LaneEnded("closed")
            if not end.shared and (more := end.more):
                self._receive(more, now + within_s)
        except OSError as error:
            raise LaneEnded(f"silent, or gone: {error}") from error
        return end.answer(outputs)

    def _allow(self, seconds: float) -> None:
        """Let the kernel wait no longer; it is told only when that changes much."""
        seconds = min(seconds, LONGEST_WAIT_S)
        whole, part = divmod(seconds, 1)
        for way in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
            self.end.sock.setsockopt(socket.SOL_SOCKET, way, _TIME.pack(int(whole), int(part * 1e6) + 1))
        self._waits_s = seconds

    def _receive(self, into: memoryview, until: float) -> None:
        while True:
            count = self.end.sock.recv_into(into)
            if not count:
                raise LaneEnded("closed")
            if count == len(into):
                return
            if monotonic() > until:
                raise LaneEnded("too slow")
            into = into[count:]

    def _send(self, until: float) -> None:
        parts = [memoryview(part) for part in self.end.sent]
        while parts:
            sent = self.end.sock.sendmsg(parts)
            while parts and sent >= len(parts[0]):
                sent -= len(parts.pop(0))
            if parts:
                parts[0] = parts[0][sent:]
                if monotonic() > until:
                    raise LaneEnded("takes nothing")


@dataclass
class Lanes:
    """What one thread has."""

    shared: bool
    _lanes: dict[str, Lane] = field(default_factory=dict)
    _hopes: dict[str, Hope] = field(default_factory=dict)

    def answer(
        self,
        model: str,
        inputs: Mapping[str, oip.Tensor | bytes],
        outputs: Sequence[str],
        deadline: float,
        agent: AskAgent,
    ) -> Answer | None:
        """The answer by a lane; None where the agent is to be asked."""
        lane = self._lanes.get(model)
        if lane is None:
            hope = self._hopes.get(model)
            if hope is None or not hope.may_ask(monotonic()):
                return None
            lane = self._open(model, hope, deadline, agent)
            if lane is None:
                return None
        try:
            return lane.ask(inputs, outputs, deadline)
        except LaneEnded as error:
            log.debug("the lane to %s is given up: %s", model, error)
            self._lose(model)
            return None
        except BaseException:  # whatever else comes on it belongs to the past
            self._lose(model)
            raise

    def answered(self, model: str) -> None:
        """The agent has answered for that model: a lane may be worth asking for."""
        hope = self._hopes.get(model)
        if hope is None:
            hope = self._hopes[model] = Hope()
        hope.answered = True

    def close(self) -> None:
        """End all of them; who waits is woken, also in another thread."""
        for lane in list(self._lanes.values()):
            lane.end.close()

    def _open(self, model: str, hope: Hope, deadline: float, agent: AskAgent) -> Lane | None:
        now = monotonic()
        mine, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            with theirs:
                wish = msgspec.json.encode(LaneWish(model, self.shared))
                grant = granted(agent(wish, theirs.fileno(), granting_s(deadline - now)))
            end = LaneEnd(grant, mine, memory_of(grant, mine, shared=self.shared), shared=self.shared)
        except BaseException as error:
            mine.close()
            hope.refused(now)
            if isinstance(error, EdgeError):
                log.debug("no lane to %s: %s", model, error)
                return None
            raise
        hope.got(now)
        lane = self._lanes[model] = Lane(end)
        return lane

    def _lose(self, model: str) -> None:
        lane = self._lanes.pop(model, None)
        if lane is not None:
            with contextlib.suppress(OSError):
                lane.end.close()
            self._hopes[model].lost(monotonic())


def may_have_lanes(socket_path: str, wanted: bool) -> bool:
    """Whether a client at that address asks for lanes at all."""
    return wanted and bool(socket_path) and SUPPORTED
