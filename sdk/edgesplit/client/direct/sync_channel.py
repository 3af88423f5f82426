"""Direct lanes of a threaded client: one per thread and model.

A request gets its answer from a lane, or None in time to send it through the agent instead. An answer counts only if it
carries this request's sequence number; a lane on which anything else happens is closed.
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

from edgesplit.client.answer import Answer
from edgesplit.client.direct.endpoint import LaneClosed, LaneEndpoint, decode_grant
from edgesplit.client.direct.grant import ANSWER, LaneRequest
from edgesplit.client.direct.request_policy import LaneRequestPolicy, grant_timeout_s
from edgesplit.errors import EdgeError
from edgesplit.http1.response import Reply
from edgesplit.oip import protocol as oip
from edgesplit.shared_memory.segment import SUPPORTED
from edgesplit.socket_send import send_some

log = logging.getLogger(__name__)

_TIME = struct.Struct("@ll")
_SEND_BUFFER_BYTES = 1 << 20
"""Send buffer in bytes where tensors travel on the lane; the kernel grants less."""
LONGEST_WAIT_S = 3600.0
SendLaneRequest = Callable[[bytes, int, float], Reply]
"""Sends the request for a lane (body, descriptor of the worker's end, timeout in seconds) to the agent."""


class Lane:
    """One lane, used with blocking calls."""

    def __init__(self, end: LaneEndpoint) -> None:
        self.end = end
        self._kernel_timeout_s = 0.0
        end.sock.setblocking(True)
        if not end.shared:
            end.sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BUFFER_BYTES)

    def infer(self, inputs: Mapping[str, oip.Tensor | bytes], outputs: Sequence[str], deadline: float) -> Answer | None:
        """Run one request on the lane; None if the request must go through the agent. LaneClosed if the lane is
        unusable from now on."""
        end, now = self.end, monotonic()
        try:
            within_s = end.start_request(inputs, outputs, deadline, now)
            if not within_s:
                return None
            if not 0.85 * within_s <= self._kernel_timeout_s <= within_s:
                self._set_kernel_timeout(0.95 * within_s)
            if end.shared:
                end.sock.send(end.head)
            else:
                self._send(now + within_s)
            if end.sock.recv_into(end.reply) != ANSWER.size:
                raise LaneClosed("closed")
            if not end.shared and (remaining_body := end.remaining_body):
                self._receive(remaining_body, now + within_s)
        except OSError as error:
            raise LaneClosed(f"no answer, or closed: {error}") from error
        return end.decode_answer(outputs)

    def _set_kernel_timeout(self, seconds: float) -> None:
        """Set the kernel's socket timeouts to `seconds`; done only when the value changes much, to save system
        calls."""
        seconds = min(seconds, LONGEST_WAIT_S)
        whole, part = divmod(seconds, 1)
        for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
            self.end.sock.setsockopt(socket.SOL_SOCKET, option, _TIME.pack(int(whole), int(part * 1e6) + 1))
        self._kernel_timeout_s = seconds

    def _receive(self, into: memoryview, deadline: float) -> None:
        """Fill `into`; LaneClosed at end of stream or after `deadline` (monotonic clock)."""
        while True:
            count = self.end.sock.recv_into(into)
            if not count:
                raise LaneClosed("closed")
            if count == len(into):
                return
            if monotonic() > deadline:
                raise LaneClosed("the answer came too slowly")
            into = into[count:]

    def _send(self, deadline: float) -> None:
        """Send all outgoing parts; LaneClosed after `deadline` (monotonic clock)."""
        parts: list[bytes | memoryview] = [memoryview(part) for part in self.end.outgoing]
        while parts:
            send_some(self.end.sock, parts)
            if parts and monotonic() > deadline:
                raise LaneClosed("the worker does not receive")


@dataclass
class Lanes:
    """The lanes of one thread, by model."""

    shared: bool
    _lanes: dict[str, Lane] = field(default_factory=dict)
    _policies: dict[str, LaneRequestPolicy] = field(default_factory=dict)

    def infer(
        self,
        model: str,
        inputs: Mapping[str, oip.Tensor | bytes],
        outputs: Sequence[str],
        deadline: float,
        send_lane_request: SendLaneRequest,
        ask_agent: Callable[[], Answer],
    ) -> Answer:
        """Run the request on a lane, or by `ask_agent` where there is none or it does not answer.

        `send_lane_request` sends the request for a new lane. A lane that fails is closed.
        """
        policy = self._policies.get(model) or self._policies.setdefault(model, LaneRequestPolicy())
        lane, answer = self._lanes.get(model), None
        if lane is None and policy.should_request(monotonic()):
            lane = self._open(model, policy, deadline, send_lane_request)
        if lane is not None:
            try:
                answer = lane.infer(inputs, outputs, deadline)
            except LaneClosed as error:
                log.debug("the lane to %s is closed: %s", model, error)
                self._discard(model)
            except BaseException:  # a late answer to this request may still arrive on it
                self._discard(model)
                raise
        if answer is None:
            answer = ask_agent()
            policy.has_agent_answered = True  # so that the next request may ask for a lane
        return answer

    def close(self) -> None:
        """Close all lanes; a thread that waits on one is woken."""
        for lane in list(self._lanes.values()):
            lane.end.close()

    def _open(
        self, model: str, policy: LaneRequestPolicy, deadline: float, send_lane_request: SendLaneRequest
    ) -> Lane | None:
        """Request a lane from the agent and receive its memory; None if it is refused."""
        now = monotonic()
        client_end, worker_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            with worker_end:
                body = msgspec.json.encode(LaneRequest(model, self.shared))
                grant = decode_grant(send_lane_request(body, worker_end.fileno(), grant_timeout_s(deadline - now)))
            end = LaneEndpoint.receive(grant, client_end, shared=self.shared)
        except BaseException as error:
            client_end.close()
            policy.on_refused(now)
            if isinstance(error, EdgeError):
                log.debug("no lane to %s: %s", model, error)
                return None
            raise
        policy.on_granted(now)
        lane = self._lanes[model] = Lane(end)
        return lane

    def _discard(self, model: str) -> None:
        """Close the lane to `model` and notify the policy."""
        lane = self._lanes.pop(model, None)
        if lane is not None:
            with contextlib.suppress(OSError):
                lane.end.close()
            self._policies[model].on_ended(monotonic())


def can_use_lanes(socket_path: str, is_wanted: bool) -> bool:
    """Whether a client of the server at `socket_path` may request lanes: only over a Unix socket, where shared memory
    is supported."""
    return is_wanted and bool(socket_path) and SUPPORTED
