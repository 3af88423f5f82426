"""The client's end of a lane, without its waiting: inputs into their places, the answer out of them.

Made once for each lane, so that a request costs two views, one `pack_into` and a report.
`edgesplit.client.direct.sync_channel` waits with
threads, `edgesplit.client.direct.async_channel` with asyncio. A lane that was granted before a fork is the parent's
alone.
"""

from __future__ import annotations

import array
import contextlib
import os
import socket
from collections.abc import Iterator, Mapping, Sequence
from time import monotonic
from typing import TYPE_CHECKING, Any

import msgspec

from edgesplit.client.direct.grant import ALIGN, ANSWER, ANSWERED, LONGEST_US, OVER, READY, REQUEST, Grant, LaneTensor
from edgesplit.client.request import Answer
from edgesplit.client.request_id import fresh_id
from edgesplit.errors import EdgeError
from edgesplit.http1.response import Reply
from edgesplit.lazy_import import later
from edgesplit.oip import protocol as oip
from edgesplit.oip.report import Report
from edgesplit.shared_memory.segment import Segment

if TYPE_CHECKING:
    import numpy as np
else:
    np = later("numpy")

PATIENCE = 8.0
"""As the agent with its worker: so many times what it took before may an answer take..."""
PATIENCE_S = 1.0
"""...or so long, or half of what is left where that is less; then the agent is asked with what is left."""
SMOOTHING = 0.2
_NOTHING = memoryview(b"")
_forks = 0


def _forked() -> None:
    global _forks
    _forks += 1


os.register_at_fork(after_in_child=_forked)


class LaneEnded(EdgeError):
    """This lane answers no more: the agent is to be asked."""


class LaneEnd:
    """One lane, for one request at a time."""

    def __init__(self, grant: Grant, sock: socket.socket, memory: memoryview, *, shared: bool) -> None:
        self.sock = sock
        self.head = bytearray(REQUEST.size)
        self.reply = memoryview(bytearray(ANSWER.size))
        self.shared = shared
        self.sent: list[bytearray | memoryview | bytes] = [self.head]
        """What travels to the worker."""
        self._answer_memory = memory[grant.answers_at : grant.bytes]
        views = {one.name: (one, _view(one, memory)) for one in grant.inputs}
        self._inputs = {name: (one, view, view.dtype, view.shape) for name, (one, view) in views.items()}
        self._outputs = {one.name: _view(one, memory) for one in grant.outputs}
        self._grant = grant
        self._number = 0
        self._typical_s = 0.0
        self._began = 0.0
        self._forks = _forks

    def begin(
        self, inputs: Mapping[str, oip.Tensor | bytes], outputs: Sequence[str], deadline: float, now: float
    ) -> float:
        """Put a request there; how long its answer may take, 0.0 where it is none for a lane. LaneEnded."""
        if self._forks != _forks:
            raise LaneEnded("it was granted to the process that this one was forked from")
        places, left_s = self._inputs, deadline - now
        if len(inputs) != len(places) or left_s <= 0.0:
            return 0.0
        for name, (_, _, dtype, shape) in places.items():
            tensor = inputs.get(name)
            if not isinstance(tensor, np.ndarray) or tensor.dtype != dtype or tensor.shape != shape:
                return 0.0
        for name in outputs:
            if name not in self._outputs:
                return 0.0
        self._began = now
        if not self.shared:
            self.sent = [self.head, *self._raw(inputs)]
        else:
            for name, (_, view, _, _) in places.items():
                np.copyto(view, inputs[name])
        self._number += 1
        REQUEST.pack_into(self.head, 0, self._number, min(LONGEST_US, max(1, int(left_s * 1e6))))
        return min(left_s, max(PATIENCE * self._typical_s, min(PATIENCE_S, left_s / 2)))

    def _raw(self, inputs: Mapping[str, Any]) -> Iterator[memoryview | bytes]:
        """Their bytes, as they lie in a lane's memory."""
        for name, (place, *_) in self._inputs.items():
            yield np.ascontiguousarray(inputs[name]).reshape(-1).view(np.uint8).data
            if pad := -place.bytes % ALIGN:
                yield bytes(pad)

    @property
    def more(self) -> memoryview:
        """What else belongs to the reply that is there: where it goes, empty if nothing does."""
        is_there = self.shared or ANSWER.unpack(self.reply)[1] != ANSWERED
        return _NOTHING if is_there else self._answer_memory

    def answer(self, outputs: Sequence[str]) -> Answer | None:
        """The answer that is there now; it is the application's own. None where the agent is to be asked; LaneEnded
        where that is so from now on."""
        number, status, run_s, predicted_s, scale = ANSWER.unpack(self.reply)
        if number != self._number or status == OVER:
            raise LaneEnded("the agent has ended it" if status == OVER else "an answer to another request")
        if status != ANSWERED:
            return None
        there = self._outputs
        found = {name: there[name].copy() for name in (outputs or there)}
        took_s = monotonic() - self._began
        self._typical_s += SMOOTHING * (took_s - self._typical_s) if self._typical_s else took_s
        grant = self._grant
        joules, basis = 0.0, ""
        if grant.busy_watts is not None and grant.idle_watts is not None:
            joules = (grant.busy_watts * run_s + grant.idle_watts * max(0.0, took_s - run_s)) * (scale or 1.0)
            basis = "measured" if scale else "predicted"
        report = Report(
            release=grant.release, row=grant.row, after=grant.after, latency_s=took_s, predicted_s=predicted_s,
            device_s=run_s, joules=joules, joules_basis=basis,
        )  # fmt: skip
        return Answer(found, report, fresh_id())

    def close(self) -> None:
        """No more; who waits on it is woken, unless it is another process."""
        if self._forks == _forks:
            with contextlib.suppress(OSError):
                self.sock.shutdown(socket.SHUT_RDWR)
        self.sock.close()


def granted(reply: Reply) -> Grant:
    """The grant in the agent's reply; LaneEnded where it grants nothing."""
    if reply.status != 200:
        raise LaneEnded(f"not granted ({reply.status})")
    try:
        grant = msgspec.json.decode(reply.body, type=Grant)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, ValueError) as error:
        raise LaneEnded(f"not a grant: {error}") from error
    if not grant.is_sound:
        raise LaneEnded("a grant of places that are none")
    return grant


def memory_of(grant: Grant, sock: socket.socket, *, shared: bool) -> memoryview:
    """The lane's memory: what comes beside its first byte, which is there already, or this process's own."""
    width, flags = array.array("i").itemsize, socket.MSG_DONTWAIT | socket.MSG_CMSG_CLOEXEC
    try:
        first, ancillary, _, _ = sock.recvmsg(1, socket.CMSG_SPACE(width), flags)
    except OSError as error:
        raise LaneEnded(f"nothing came of it: {error}") from error
    came = array.array("i")
    for level, kind, content in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            came.frombytes(content[: len(content) - len(content) % width])
    if first != READY or len(came) != int(shared):
        for one in came:
            os.close(one)
        raise LaneEnded("not how a lane begins")
    if not shared:
        return memoryview(bytearray(grant.bytes))
    try:
        segment = Segment.received(came[0])
    except (EdgeError, OSError, ValueError) as error:
        raise LaneEnded(f"its memory is none: {error}") from error
    segment.close()  # the pages stay for as long as a view of them does
    if segment.size < grant.bytes:
        raise LaneEnded("its memory is too small")
    return segment.memory


def _view(place: LaneTensor, memory: memoryview) -> Any:
    dtype = oip.DTYPES[place.datatype].newbyteorder("<")
    flat = np.frombuffer(memory, np.uint8, place.bytes, place.offset)
    return flat.view(dtype).reshape(place.shape)
