"""The client's end of a direct lane, without waiting: requests are written into its memory, answers decoded from it.

Prepared once per lane, so that a request costs two views, one `pack_into` and a report.
`edgesplit.client.direct.sync_channel` does the waiting for threads, `edgesplit.client.direct.async_channel` for
asyncio. After a fork only the parent may use a lane that was granted before it.
"""

from __future__ import annotations

import array
import contextlib
import os
import socket
from collections.abc import Iterator, Mapping, Sequence
from time import monotonic
from typing import Any

from edgesplit.client.answer import Answer
from edgesplit.client.direct import grant as wire
from edgesplit.client.direct.grant import Grant, LaneTensor
from edgesplit.client.request_id import new_request_id
from edgesplit.decoding import decode_json
from edgesplit.errors import EdgeError
from edgesplit.http1.response import Reply
from edgesplit.lazy_import import np
from edgesplit.oip import protocol as oip
from edgesplit.oip.report import Report
from edgesplit.shared_memory.segment import Segment

TIMEOUT_FACTOR = 8.0
"""Timeout of an answer as a multiple of the typical run time, the same factor as the agent uses with its worker. The
timeout is never below `TIMEOUT_S`."""
TIMEOUT_S = 1.0
"""Least timeout of an answer in seconds, or half of the time left if that is less; the request then goes through the
agent with the time that remains."""
SMOOTHING = 0.2
_NOTHING = memoryview(b"")
_forks = 0


def _count_fork() -> None:
    global _forks
    _forks += 1


os.register_at_fork(after_in_child=_count_fork)


class LaneClosed(EdgeError):
    """The lane cannot be used any more: requests go through the agent."""


class LaneEndpoint:
    """One lane's buffers and sequence number, for one request at a time."""

    def __init__(self, grant: Grant, sock: socket.socket, memory: memoryview, *, shared: bool) -> None:
        self.sock = sock
        self.head = bytearray(wire.REQUEST.size)
        self.reply = memoryview(bytearray(wire.ANSWER.size))
        self.shared = shared
        self.outgoing: list[bytearray | memoryview | bytes] = [self.head]
        """Parts of the next request, as sent to the worker."""
        self._answer_memory = memory[grant.outputs_offset : grant.bytes]
        views = {tensor.name: (tensor, _view(tensor, memory)) for tensor in grant.inputs}
        self._inputs = {name: (tensor, view, view.dtype, view.shape) for name, (tensor, view) in views.items()}
        self._outputs = {tensor.name: _view(tensor, memory) for tensor in grant.outputs}
        self._grant = grant
        self._number = 0
        self._typical_s = 0.0
        self._started_at = 0.0
        self._forks = _forks

    @classmethod
    def receive(cls, grant: Grant, sock: socket.socket, *, shared: bool) -> LaneEndpoint:
        """The endpoint of a granted lane, whose memory comes by `sock`; LaneClosed if it is not as agreed."""
        return cls(grant, sock, receive_memory(grant, sock, shared=shared), shared=shared)

    def start_request(
        self, inputs: Mapping[str, oip.Tensor | bytes], outputs: Sequence[str], deadline: float, now: float
    ) -> float:
        """Write a request into the lane; returns the answer's timeout in seconds, or 0.0 if the request does not fit
        the lane (other tensors, no time left). LaneClosed in a forked child."""
        if self._forks != _forks:
            raise LaneClosed("it was granted to the process that this one was forked from")
        expected, left_s = self._inputs, deadline - now
        if len(inputs) != len(expected) or left_s <= 0.0:
            return 0.0
        for name, (_, _, dtype, shape) in expected.items():
            tensor = inputs.get(name)
            if not isinstance(tensor, np.ndarray) or tensor.dtype != dtype or tensor.shape != shape:
                return 0.0
        for name in outputs:
            if name not in self._outputs:
                return 0.0
        self._started_at = now
        if not self.shared:
            self.outgoing = [self.head, *self._tensor_bytes(inputs)]
        else:
            for name, (_, view, _, _) in expected.items():
                np.copyto(view, inputs[name])
        self._number += 1
        wire.REQUEST.pack_into(self.head, 0, self._number, min(wire.MAX_TIME_US, max(1, int(left_s * 1e6))))
        return min(left_s, max(TIMEOUT_FACTOR * self._typical_s, min(TIMEOUT_S, left_s / 2)))

    def _tensor_bytes(self, inputs: Mapping[str, Any]) -> Iterator[memoryview | bytes]:
        """The inputs' bytes in the layout of the lane's memory."""
        for name, (tensor, *_) in self._inputs.items():
            yield np.ascontiguousarray(inputs[name]).reshape(-1).view(np.uint8).data
            if pad := -tensor.bytes % wire.ALIGN:
                yield bytes(pad)

    @property
    def remaining_body(self) -> memoryview:
        """The buffer for the tensors that follow the received reply header; empty if none follow."""
        is_there = self.shared or wire.ANSWER.unpack(self.reply)[1] != wire.ANSWERED
        return _NOTHING if is_there else self._answer_memory

    def decode_answer(self, outputs: Sequence[str]) -> Answer | None:
        """The answer in the received reply, its tensors copied. None if the request must be repeated through the agent;
        LaneClosed if all further ones must be, too."""
        number, status, run_s, predicted_s, scale = wire.ANSWER.unpack(self.reply)
        if number != self._number or status == wire.CLOSED:
            raise LaneClosed("the agent has ended it" if status == wire.CLOSED else "an answer to another request")
        if status != wire.ANSWERED:
            return None
        views = self._outputs
        outputs_copied = {name: views[name].copy() for name in (outputs or views)}
        elapsed_s = monotonic() - self._started_at
        self._typical_s += SMOOTHING * (elapsed_s - self._typical_s) if self._typical_s else elapsed_s
        grant = self._grant
        joules, basis = 0.0, ""
        if grant.busy_watts is not None and grant.idle_watts is not None:
            joules = (grant.busy_watts * run_s + grant.idle_watts * max(0.0, elapsed_s - run_s)) * (scale or 1.0)
            basis = "measured" if scale else "predicted"
        report = Report(
            release=grant.release, row=grant.row, split_after=grant.split_after, latency_s=elapsed_s,
            predicted_s=predicted_s,
            device_s=run_s, joules=joules, joules_basis=basis,
        )  # fmt: skip
        return Answer(outputs_copied, report, new_request_id())

    def close(self) -> None:
        """Close the lane and wake a thread that waits on it; in a forked child only the descriptor is closed."""
        if self._forks == _forks:
            with contextlib.suppress(OSError):
                self.sock.shutdown(socket.SHUT_RDWR)
        self.sock.close()


def decode_grant(reply: Reply) -> Grant:
    """The grant in the agent's reply; LaneClosed if it grants nothing."""
    if reply.status != 200:
        raise LaneClosed(f"not granted ({reply.status})")
    grant = decode_json(reply.body, Grant, "not a grant", error=LaneClosed)
    if not grant.is_valid:
        raise LaneClosed("a grant with an invalid memory layout")
    return grant


def receive_memory(grant: Grant, sock: socket.socket, *, shared: bool) -> memoryview:
    """The lane's memory: the segment whose descriptor came with the first byte on the socket, or private memory if
    `shared` is false. LaneClosed if the greeting is not as agreed. The first byte must have arrived already."""
    width, flags = array.array("i").itemsize, socket.MSG_DONTWAIT | socket.MSG_CMSG_CLOEXEC
    try:
        first, ancillary, _, _ = sock.recvmsg(1, socket.CMSG_SPACE(width), flags)
    except OSError as error:
        raise LaneClosed(f"its greeting cannot be received: {error}") from error
    received = array.array("i")
    for level, kind, content in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            received.frombytes(content[: len(content) - len(content) % width])
    if first != wire.READY or len(received) != int(shared):
        for descriptor in received:
            os.close(descriptor)
        raise LaneClosed("an invalid greeting")
    if not shared:
        return memoryview(bytearray(grant.bytes))
    try:
        segment = Segment.from_descriptor(received[0])
    except (EdgeError, OSError, ValueError) as error:
        raise LaneClosed(f"its memory cannot be used: {error}") from error
    segment.close()  # the pages stay for as long as a view of them does
    if segment.size < grant.bytes:
        raise LaneClosed("its memory is too small")
    return segment.memory


def _view(tensor: LaneTensor, memory: memoryview) -> Any:
    """A numpy array over the tensor's place in `memory`."""
    dtype = oip.DTYPES[tensor.datatype].newbyteorder("<")
    flat = np.frombuffer(memory, np.uint8, tensor.bytes, tensor.offset)
    return flat.view(dtype).reshape(tensor.shape)
