"""The process that gathers a kind of requests: runs what its siblings have read, together with its own.

A link's requests wait in the same queue as this process's, under the same rules; what a run gives goes back by one
message for all of a link. A sibling that goes takes its requests with it. All of it is done by the thread that leads
(`loop`), but for loading a model.
"""

from __future__ import annotations

import logging
import math
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from time import monotonic

from edgesplit.errors import EdgeError, MalformedMessage
from edgesplit_offload.batching import ipc
from edgesplit_offload.frontend.event_loop import Loop
from edgesplit_offload.models.remote_half import FarHalf
from edgesplit_offload.models.repository import Shelf
from edgesplit_offload.scheduling.arrivals import Habit
from edgesplit_offload.scheduling.queue import Job
from edgesplit_offload.scheduling.scheduler import LOOK_UP_S, Turns

_MOST_HABITS = 4_096
log = logging.getLogger(__name__)


@dataclass(eq=False, slots=True)
class _Guest(Job):
    """A request that another process reads."""

    number: int = 0


class Gathering:
    """All links on which others ask."""

    def __init__(self, shelf: Shelf, turns: Turns, loop: Loop, asked: Callable[[FarHalf], None]) -> None:
        """`asked`: told of each half that is asked for, so that it is measured some time."""
        self._shelf = shelf
        self._turns = turns
        self._loop = loop
        self._asked = asked
        self._hosts: list[_Host] = []

    def serve(self, sock: socket.socket) -> None:
        """What comes by this link. From any thread."""
        self._loop.post(partial(self._serve, sock))

    def look(self, now: float) -> float:
        """Give up who reads nothing; the moment of the next look, if there is anything to look at."""
        return min((host.look(now) for host in list(self._hosts)), default=math.inf)

    def _serve(self, sock: socket.socket) -> None:
        host = _Host(self, self._loop, ipc.Link(sock))
        self._hosts.append(host)
        self._loop.watch(sock.fileno(), host.ready)

    def gone(self, host: _Host) -> None:
        """That link is over."""
        self._hosts.remove(host)

    def admit(self, host: _Host, asked: ipc.Run, body: memoryview) -> None:
        """Have it run some time; whatever it is refused for."""
        model = self._shelf.known(asked.model)
        half = None if model is None else model.half
        if half is not None and half.is_measured and half.pace.most == 1:
            raise ipc.Alone("nothing is gained by company here")
        deadline = None if asked.left_s is None else monotonic() + asked.left_s
        tensors = ipc.tensors_of(asked.tensors, body)
        if half is None or not half.is_loaded:
            self._loop.lend(partial(self._load, host, asked, body, deadline))
            return
        guest = _Guest(
            tensors, half.run, half.pace, asked.client, deadline, home=host, number=asked.number,
            habit=host.habit(asked.asker),
        )  # fmt: skip
        host.waiting[guest.number] = guest
        try:
            self._turns.put(guest)
        except BaseException:
            host.waiting.pop(guest.number, None)
            raise
        self._loop.look_by(min(guest.end, guest.arrived + LOOK_UP_S))
        self._asked(half)

    def _load(self, host: _Host, asked: ipc.Run, body: memoryview, deadline: float | None) -> None:
        """On another thread: the model first."""
        try:
            self._shelf.model(asked.model).half.load()
        except Exception as error:  # whatever it is, the process that asked hears of it
            self._loop.post(partial(host.refuse, asked.number, error))
            return
        left_s = None if deadline is None else max(0.0, deadline - monotonic())
        again = ipc.Run(asked.number, asked.model, left_s, asked.client, asked.asker, asked.tensors)
        self._loop.post(partial(host.asked, again, body))

    @property
    def load(self) -> float:
        """What clients are told of it."""
        return self._turns.load


class _Host:
    """One link's."""

    def __init__(self, gathering: Gathering, loop: Loop, link: ipc.Link) -> None:
        self._gathering = gathering
        self._loop = loop
        self._link = link
        self.waiting: dict[int, _Guest] = {}
        self._habits: dict[int, Habit] = {}

    def habit(self, asker: int) -> Habit | None:
        """Of that connection of the other end's; as many are kept as it may have connections."""
        if not asker:
            return None
        if len(self._habits) >= _MOST_HABITS:
            self._habits.clear()
        return self._habits.setdefault(asker, Habit(asker))

    def ready(self, _: int) -> None:
        """Something happened at the link."""
        try:
            for message, body in self._link.received():
                self._heard(message, body)
        except MalformedMessage as error:
            log.error("a serving process spoke nonsense: %s", error)
            self._link.close()
        self._flush()

    def look(self, now: float) -> float:
        """Whether the other end still reads; the moment of the next look."""
        self._link.look(now)
        self._see_end()
        return now + LOOK_UP_S if self._link.is_stuck else math.inf

    def over(self, jobs: Sequence[Job]) -> None:
        """These have been run, or never will be: all of them are this link's. From any thread."""
        told = [(one.number, *self._told(one)) for one in jobs if isinstance(one, _Guest)]
        if self._loop.is_mine:
            self._tell(told)
        else:
            self._loop.post(partial(self._tell, told))

    def asked(self, asked: ipc.Run, body: memoryview) -> None:
        """A request of the other end's."""
        if self._link.is_over:
            return
        try:
            self._gathering.admit(self, asked, body)
        except MalformedMessage:
            raise
        except EdgeError as error:
            self.refuse(asked.number, error)

    def refuse(self, number: int, error: Exception) -> None:
        """It is not run."""
        self._link.send(ipc.failed(number, error))
        self._flush()

    def _tell(self, told: Sequence[tuple[int, ipc.Message, Sequence[memoryview]]]) -> None:
        for number, message, buffers in told:
            self.waiting.pop(number, None)
            self._link.send(message, buffers)
        self._flush()

    def _heard(self, message: ipc.Message, body: memoryview) -> None:
        if isinstance(message, ipc.Leave):
            guest = self.waiting.get(message.number)
            if guest is not None:
                guest.is_gone = _has_gone
        elif isinstance(message, ipc.Run):
            self.asked(message, body)
        else:
            raise MalformedMessage(type(message).__name__)

    def _flush(self) -> None:
        self._link.flush()
        if self._link.is_stuck:
            self._loop.look_by(monotonic() + LOOK_UP_S)
        self._see_end()

    def _see_end(self) -> None:
        descriptor = self._link.descriptor
        if not self._link.is_over or descriptor < 0:
            return
        self._loop.forget(descriptor)
        self._link.release()
        self._gathering.gone(self)
        for guest in self.waiting.values():
            guest.is_gone = _has_gone

    def _told(self, guest: _Guest) -> tuple[ipc.Message, Sequence[memoryview]]:
        if guest.error is not None:
            return ipc.failed(guest.number, guest.error), ()
        try:
            described, buffers = ipc.described(guest.value)
        except (EdgeError, ValueError, TypeError) as error:  # all others of its run are to be told all the same
            return ipc.failed(guest.number, error), ()
        load = self._gathering.load
        return ipc.Ran(guest.number, guest.run_s, guest.together, guest.leads, load, described), buffers


def _has_gone() -> bool:
    return True
