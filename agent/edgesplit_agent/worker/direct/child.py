"""The worker's side of lanes: receives requests of all lanes and answers them one after another.

Nothing a client does is trusted or waited for: a request is two numbers, tensors lie where the agent determined,
anything that is not a request ends the lane, and a client that does not read is left waiting. A client may change its
shared memory at any time, and gets the answer to what was read. The agent's requests and those of all lanes alternate,
one each.
"""

from __future__ import annotations

import contextlib
import logging
import mmap
import os
import select
import socket
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

import msgspec
import numpy as np

from edgesplit.client.direct.grant import ANSWER, ANSWERED, CLOSED, FAILED, REQUEST, LaneTensor
from edgesplit.errors import InferenceFailed
from edgesplit.oip import protocol as oip
from edgesplit.runtime import Tensor, Timing
from edgesplit_agent.worker.direct import shared_state
from edgesplit_agent.worker.direct.shared_state import LaneSharedState
from edgesplit_agent.worker.ipc import LANE_BYTES, OpenLane

log = logging.getLogger(__name__)

MIN_IN_PLACE_BYTES = 4_096
"""Minimum size in bytes of an input that is read in place; smaller ones, and all that are not floats, are copied: a
value by which a model branches must not change while it runs."""
_ENDED = select.POLLHUP | select.POLLERR | select.POLLNVAL
SliceRunner = Callable[[tuple[str, ...], tuple[str, ...], Mapping[str, Tensor], Timing], Mapping[str, Tensor]]
"""Function that runs slices in order, for these of their outputs."""


class LaneClosed(Exception):
    """The lane has ended."""


@dataclass
class LaneConnection:
    """One lane: idle, or with a request that has been received in part."""

    lane: OpenLane
    sock: socket.socket
    memory: memoryview
    is_due: bool = False
    _unsent: memoryview = field(default_factory=lambda: memoryview(b""))

    def __post_init__(self) -> None:
        lane = self.lane
        self._head = memoryview(bytearray(REQUEST.size))
        self._answer = memoryview(bytearray(ANSWER.size))
        self._inputs = [
            (tensor.name, _view(tensor, self.memory), _can_read_in_place(tensor) and lane.shared)
            for tensor in lane.inputs
        ]
        self._outputs = [(tensor.name, _view(tensor, self.memory)) for tensor in lane.outputs]
        self._wants = tuple(tensor.name for tensor in lane.outputs)
        in_place = all(tensor[2] for tensor in self._inputs)
        self._fixed_inputs = {name: view for name, view, _ in self._inputs} if in_place else None
        self._bodies = () if lane.shared else (self.memory[: lane.answers_at],)
        self._reset_request()

    def fileno(self) -> int:
        """The descriptor, for poll."""
        return self.sock.fileno()

    @property
    def poll_event(self) -> int:
        """The poll event that lets the lane proceed."""
        return select.POLLOUT if self._unsent else select.POLLIN

    def serve(self, run: SliceRunner, words: LaneSharedState) -> bool:
        """Proceed as far as possible without waiting: at most one run.

        Returns whether the lane waits for another event than before. Raises LaneOver.
        """
        was_sending = bool(self._unsent)
        try:
            if was_sending:
                self._send_rest()
            elif self._receive():
                self._run_request(run, words)
                self._reset_request()
        except BlockingIOError:
            return False
        except OSError as error:
            raise LaneClosed from error
        return was_sending != bool(self._unsent)

    def close(self) -> None:
        """Close the socket; the client notices. The memory is freed with the last view of it."""
        _close_socket(self.sock)

    def _reset_request(self) -> None:
        """Prepare to receive the next request."""
        self._missing = deque(part for part in (self._head, *self._bodies) if len(part))

    def _receive(self) -> bool:
        """Receive what is available; True once the request is complete. BlockingIOError until then."""
        while self._missing:
            part = self._missing[0]
            count = self.sock.recv_into(part, 0, socket.MSG_DONTWAIT)
            if not count:
                raise LaneClosed
            if count < len(part):
                self._missing[0] = part[count:]
            else:
                self._missing.popleft()
        return True

    def _run_request(self, run: SliceRunner, words: LaneSharedState) -> None:
        number, left_us = REQUEST.unpack(self._head)
        # Checked for each request: the agent may have ended the lane, for instance to serve another release.
        if not words.is_open(self.lane.place, self.lane.number):
            self._reply(number, CLOSED)
            raise LaneClosed
        began = perf_counter()
        words.begin_run(began, left_us / 1e6)
        timing = Timing()
        try:
            live = run(self.lane.order, self._wants, self._fixed_inputs or self._request_inputs(), timing)
            for name, view in self._outputs:
                _write_output(view, live[name])
        except Exception as error:  # of any kind: the client retries through the agent, which counts the failure
            log.warning("a request on a lane failed: %s", error)
            words.record_failure()
            self._reply(number, FAILED)
            return
        finally:  # before the answer is sent: a client that has gone must not leave a run for the watchdog to end
            words.end_run()
        run_s = timing.total_s
        # Recorded before the answer is sent, so that a worker killed in between loses no answer from the statistics.
        words.record_answer(max(perf_counter() - began, run_s), run_s)
        self._reply(number, ANSWERED, run_s, words.predicted_s, words.scale)
        words.record_slice_times([timing.seconds.get(name, 0.0) for name in self.lane.order])

    def _request_inputs(self) -> dict[str, Tensor]:
        return {name: view if in_place else _copied(view) for name, view, in_place in self._inputs}

    def _reply(
        self, number: int, status: int, run_s: float = 0.0, predicted_s: float = 0.0, scale: float = 0.0
    ) -> None:
        """Begin to send the answer, with the outputs where they travel on the socket. What a full socket does not take
        is sent once the client has read."""
        ANSWER.pack_into(self._answer, 0, number, status, run_s, predicted_s, scale)
        has_body = status == ANSWERED and not self.lane.shared
        body = self.memory[self.lane.answers_at : self.lane.bytes] if has_body else b""
        self._unsent = memoryview(b"".join((self._answer, body)))
        self._send_rest()

    def _send_rest(self) -> None:
        try:
            self._unsent = self._unsent[self.sock.send(self._unsent, socket.MSG_DONTWAIT) :]
        except BlockingIOError:
            return


class WorkerLanes:
    """All lanes of this worker, beside the agent's own channel."""

    def __init__(self, channel: int, run: SliceRunner) -> None:
        """`channel`: the descriptor of the agent's channel."""
        self._run = run
        self._channel = channel
        self._lane_socket: socket.socket | None = None
        self.state: LaneSharedState | None = None
        """The state shared with the agent; None before `connect_agent`."""
        self._lanes: dict[int, LaneConnection] = {}
        self._due: deque[LaneConnection] = deque()
        self._poll = select.poll()
        self._poll.register(channel, select.POLLIN)
        self._decoder = msgspec.msgpack.Decoder(OpenLane)

    def connect_agent(self, files: Sequence[int]) -> None:
        """Connect the shared state and the lane socket that came as these descriptors."""
        words, door = files
        self.state = LaneSharedState(memoryview(mmap.mmap(words, shared_state.BYTES)))
        os.close(words)
        self._lane_socket = socket.socket(fileno=door)
        self._poll.register(door, select.POLLIN)

    def serve_one(self) -> bool:
        """Wait for an event, then serve at most one lane. True if the agent's channel is readable."""
        agent_asks = False
        for descriptor, events in self._poll.poll(0 if self._due else None):
            lane = self._lanes.get(descriptor)
            if lane is None:
                if descriptor == self._channel:
                    agent_asks = True
                else:
                    self._accept()
            elif events & _ENDED:
                self._drop(lane)
            elif not lane.is_due:
                lane.is_due = True
                self._due.append(lane)
        # One lane in the order of arrival, then the agent: neither side can starve the other.
        if self._due:
            self._serve(self._due.popleft())
        return agent_asks

    def _serve(self, lane: LaneConnection) -> None:
        """Serve the lane, unless it was dropped since it became due."""
        if not lane.is_due:
            return
        lane.is_due = False
        assert self.state is not None
        try:
            if lane.serve(self._run, self.state):
                self._poll.modify(lane.fileno(), lane.poll_event)
        except LaneClosed:
            self._drop(lane)

    def _drop(self, lane: LaneConnection) -> None:
        lane.is_due = False
        if self._lanes.pop(lane.fileno(), None) is not None:
            self._poll.unregister(lane.fileno())
        lane.close()

    def _accept(self) -> None:
        """Accept a lane from the agent; it arrives without descriptors where this process has none left."""
        assert self._lane_socket is not None
        raw, files, _, _ = socket.recv_fds(self._lane_socket, LANE_BYTES, 2)
        if not raw:
            self._poll.unregister(self._lane_socket.fileno())
            return
        try:
            lane = self._decoder.decode(raw)
            with contextlib.ExitStack() as undo:  # close the socket unless everything succeeds
                sock = socket.socket(fileno=files.pop(0))
                undo.callback(_close_socket, sock)
                memory = memoryview(mmap.mmap(files[0], lane.bytes) if lane.shared else bytearray(lane.bytes))
                connection = LaneConnection(lane, sock, memory)
                self._poll.register(sock.fileno(), select.POLLIN)
                self._lanes[sock.fileno()] = connection
                undo.pop_all()
        except (OSError, ValueError, IndexError, MemoryError, msgspec.MsgspecError) as error:
            log.warning("no lane: %s", error)
        finally:
            for descriptor in files:
                os.close(descriptor)


def _close_socket(sock: socket.socket) -> None:
    with contextlib.suppress(OSError):
        sock.shutdown(socket.SHUT_RDWR)
    sock.close()


def _view(tensor: LaneTensor, memory: memoryview) -> Any:
    dtype = oip.DTYPES[tensor.datatype]
    return np.frombuffer(memory, np.uint8, tensor.bytes, tensor.offset).view(dtype).reshape(tensor.shape)


def _can_read_in_place(tensor: LaneTensor) -> bool:
    return tensor.bytes >= MIN_IN_PLACE_BYTES and tensor.datatype.startswith("FP")


def _copied(view: Any) -> Tensor:
    """A copy. Booleans are normalised, since a byte other than 0 or 1 is undefined as one."""
    if view.dtype == np.bool_:
        flags: Tensor = view.view(np.uint8) != 0
        return flags
    copied: Tensor = view.copy()
    return copied


def _write_output(view: Any, value: Tensor) -> None:
    if value.dtype != view.dtype or value.shape != view.shape:
        raise InferenceFailed(f"an output of {value.dtype} {value.shape}, not {view.dtype} {view.shape}")
    np.copyto(view, value)
