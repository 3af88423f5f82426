"""The worker's side of lanes: who has asked, whose turn it is, and one request after the other.

Promises that nothing a client does is believed or waited for: a request is two numbers, tensors lie where the agent has
said, what is no request ends the lane, and a client that does not read is left. Its shared memory it may change at any
time, and gets an answer to that. The agent's own requests and those of all lanes take turns, one each.
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

from edgesplit.client.direct.grant import ANSWER, ANSWERED, FAILED, OVER, REQUEST, LaneTensor
from edgesplit.errors import InferenceFailed
from edgesplit.oip import protocol as oip
from edgesplit.runtime import Tensor, Timing
from edgesplit_agent.worker import direct_shared_state
from edgesplit_agent.worker.direct_shared_state import LaneWords
from edgesplit_agent.worker.ipc import MESSAGE_BYTES, Lane

log = logging.getLogger(__name__)

NO_TIMES = (0.0, 0.0, 0.0)
IN_PLACE_FROM = 4_096
"""Smaller inputs are copied, and all that are no floats: what a model goes by must not change while it runs."""
_ENDED = select.POLLHUP | select.POLLERR | select.POLLNVAL
RunSlices = Callable[[tuple[str, ...], tuple[str, ...], Mapping[str, Tensor], Timing], Mapping[str, Tensor]]
"""Runs slices in order, for these of their outputs."""


class LaneOver(Exception):
    """Nothing more is to be done for this lane."""


@dataclass
class Asked:
    """One lane, between requests or in the middle of one that has come in part."""

    lane: Lane
    sock: socket.socket
    memory: memoryview
    due: bool = False
    _unsent: memoryview = field(default_factory=lambda: memoryview(b""))

    def __post_init__(self) -> None:
        lane = self.lane
        self._head = memoryview(bytearray(REQUEST.size))
        self._answer = memoryview(bytearray(ANSWER.size))
        self._inputs = [(one.name, _view(one, self.memory), _in_place(one) and lane.shared) for one in lane.inputs]
        self._outputs = [(one.name, _view(one, self.memory)) for one in lane.outputs]
        self._wants = tuple(one.name for one in lane.outputs)
        in_place = all(one[2] for one in self._inputs)
        self._always = {name: view for name, view, _ in self._inputs} if in_place else None
        self._bodies = () if lane.shared else (self.memory[: lane.answers_at],)
        self._expect()

    def fileno(self) -> int:
        """For poll."""
        return self.sock.fileno()

    @property
    def waits_for(self) -> int:
        """The event that goes on with it."""
        return select.POLLOUT if self._unsent else select.POLLIN

    def serve(self, run: RunSlices, words: LaneWords) -> bool:
        """As far as it goes without waiting: at most one run. Whether it waits for something else now. LaneOver."""
        was_sending = bool(self._unsent)
        try:
            if was_sending:
                self._send_rest()
            elif self._has_come():
                self._serve(run, words)
                self._expect()
        except BlockingIOError:
            return False
        except OSError as error:
            raise LaneOver from error
        return was_sending != bool(self._unsent)

    def close(self) -> None:
        """It is over, for its client too; its memory goes with the last view of it."""
        _end(self.sock)

    def _expect(self) -> None:
        """The next request."""
        self._missing = deque(part for part in (self._head, *self._bodies) if len(part))

    def _has_come(self) -> bool:
        """Take what is there; True once it is a whole request. BlockingIOError."""
        while self._missing:
            part = self._missing[0]
            count = self.sock.recv_into(part, 0, socket.MSG_DONTWAIT)
            if not count:
                raise LaneOver
            if count < len(part):
                self._missing[0] = part[count:]
            else:
                self._missing.popleft()
        return True

    def _serve(self, run: RunSlices, words: LaneWords) -> None:
        number, left_us = REQUEST.unpack(self._head)
        if not words.is_open(self.lane.place, self.lane.number):
            self._reply(number, OVER)
            raise LaneOver
        began = perf_counter()
        words.begin(began, left_us / 1e6)
        timing = Timing()
        try:
            live = run(self.lane.order, self._wants, self._always or self._given(), timing)
            for name, view in self._outputs:
                _put(view, live[name])
        except Exception as error:  # whatever the model did, the client asks the agent, and the agent counts it
            log.warning("asked by a lane: %s", error)
            words.failed()
            words.end()
            self._reply(number, FAILED)
            return
        run_s = timing.total_s
        words.answered(max(perf_counter() - began, run_s), run_s)
        self._reply(number, ANSWERED, run_s, words.predicted_s, words.scale)
        words.end()
        words.took([timing.seconds.get(name, 0.0) for name in self.lane.order])

    def _given(self) -> dict[str, Tensor]:
        return {name: view if in_place else _own(view) for name, view, in_place in self._inputs}

    def _reply(
        self, number: int, status: int, run_s: float = 0.0, predicted_s: float = 0.0, scale: float = 0.0
    ) -> None:
        ANSWER.pack_into(self._answer, 0, number, status, run_s, predicted_s, scale)
        if self.lane.shared or status != ANSWERED:
            if self.sock.send(self._answer, socket.MSG_DONTWAIT) != len(self._answer):
                raise LaneOver
            return
        self._unsent = memoryview(bytes(self._answer) + bytes(self.memory[self.lane.answers_at : self.lane.bytes]))
        self._send_rest()

    def _send_rest(self) -> None:
        try:
            self._unsent = self._unsent[self.sock.send(self._unsent, socket.MSG_DONTWAIT) :]
        except BlockingIOError:
            return


class ChildLanes:
    """All lanes of this worker, beside the agent's own channel."""

    def __init__(self, channel: int, run: RunSlices) -> None:
        """`channel`: the descriptor by which the agent asks."""
        self._run = run
        self._channel = channel
        self._door: socket.socket | None = None
        self._words: LaneWords | None = None
        self._lanes: dict[int, Asked] = {}
        self._due: deque[Asked] = deque()
        self._poll = select.poll()
        self._poll.register(channel, select.POLLIN)
        self._decoder = msgspec.msgpack.Decoder(Lane)

    @property
    def words(self) -> LaneWords | None:
        """What is noted for the agent."""
        return self._words

    def furnish(self, files: Sequence[int]) -> None:
        """From now on lanes may come."""
        words, door = files
        self._words = LaneWords(memoryview(mmap.mmap(words, direct_shared_state.BYTES)))
        os.close(words)
        self._door = socket.socket(fileno=door)
        self._poll.register(door, select.POLLIN)

    def turn(self) -> bool:
        """Wait until there is something to do, then do one thing for one lane. True where the agent asks."""
        agent_asks = False
        for descriptor, what in self._poll.poll(0 if self._due else None):
            lane = self._lanes.get(descriptor)
            if lane is None:
                if descriptor == self._channel:
                    agent_asks = True
                else:
                    self._admit()
            elif what & _ENDED:
                self._drop(lane)
            elif not lane.due:
                lane.due = True
                self._due.append(lane)
        if self._due:
            self._serve(self._due.popleft())
        return agent_asks

    def _serve(self, lane: Asked) -> None:
        """Not of one that was dropped meanwhile: its `due` was taken back."""
        if not lane.due:
            return
        lane.due = False
        assert self._words is not None
        try:
            if lane.serve(self._run, self._words):
                self._poll.modify(lane.fileno(), lane.waits_for)
        except LaneOver:
            self._drop(lane)

    def _drop(self, lane: Asked) -> None:
        lane.due = False
        if self._lanes.pop(lane.fileno(), None) is not None:
            self._poll.unregister(lane.fileno())
        lane.close()

    def _admit(self) -> None:
        """A lane from the agent; without descriptors where this process has none left."""
        assert self._door is not None
        raw, files, _, _ = socket.recv_fds(self._door, MESSAGE_BYTES, 2)
        if not raw:
            self._poll.unregister(self._door.fileno())
            return
        try:
            lane = self._decoder.decode(raw)
            with contextlib.ExitStack() as undo:
                sock = socket.socket(fileno=files.pop(0))
                undo.callback(_end, sock)
                memory = memoryview(mmap.mmap(files[0], lane.bytes) if lane.shared else bytearray(lane.bytes))
                asked = Asked(lane, sock, memory)
                self._poll.register(sock.fileno(), select.POLLIN)
                self._lanes[sock.fileno()] = asked
                undo.pop_all()
        except (OSError, ValueError, IndexError, MemoryError, msgspec.MsgspecError) as error:
            log.warning("no lane: %s", error)
        finally:
            for one in files:
                os.close(one)


def _end(sock: socket.socket) -> None:
    with contextlib.suppress(OSError):
        sock.shutdown(socket.SHUT_RDWR)
    sock.close()


def _view(place: LaneTensor, memory: memoryview) -> Any:
    dtype = oip.DTYPES[place.datatype]
    return np.frombuffer(memory, np.uint8, place.bytes, place.offset).view(dtype).reshape(place.shape)


def _in_place(place: LaneTensor) -> bool:
    return place.bytes >= IN_PLACE_FROM and place.datatype.startswith("FP")


def _own(view: Any) -> Tensor:
    """A copy; what is true or false is nothing else."""
    if view.dtype == np.bool_:
        found: Tensor = view.view(np.uint8) != 0
        return found
    copied: Tensor = view.copy()
    return copied


def _put(view: Any, value: Tensor) -> None:
    if value.dtype != view.dtype or value.shape != view.shape:
        raise InferenceFailed(f"an output of {value.dtype} {value.shape}, not {view.dtype} {view.shape}")
    np.copyto(view, value)
