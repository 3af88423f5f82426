"""The process that gathers a kind of requests: runs what its siblings have read, together with its own.

A link's requests wait in the same queue as this process's, under the same rules; what a run gives goes back by one
message for all of a link. A sibling that goes takes its requests with it.
"""

from __future__ import annotations

import logging
import socket
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import monotonic

from edgesplit.errors import EdgeError, MalformedMessage
from edgesplit_offload import hop
from edgesplit_offload.half import FarHalf
from edgesplit_offload.shelf import Shelf
from edgesplit_offload.turns import Turns
from edgesplit_offload.waiting import Job

log = logging.getLogger(__name__)


@dataclass(eq=False)
class _Guest(Job):
    """A request that another process reads."""

    number: int = 0


class Gathering:
    """All links on which others ask."""

    def __init__(self, shelf: Shelf, turns: Turns, asked: Callable[[FarHalf], None]) -> None:
        """`asked`: told of each half that is asked for, so that it is measured some time."""
        self._shelf = shelf
        self._turns = turns
        self._asked = asked

    def serve(self, sock: socket.socket) -> None:
        """What comes by this link, on a thread of its own."""
        threading.Thread(target=_Host(self, hop.Link(sock)).listen, name="gathering", daemon=True).start()

    def admit(self, host: _Host, asked: hop.Run, body: memoryview) -> None:
        """Have it run some time; whatever it is refused for."""
        half = self._shelf.model(asked.model).half
        if half.is_measured and half.pace.most == 1:
            raise hop.Alone("nothing is gained by company here")
        if not half.is_loaded:
            half.load()
        deadline = None if asked.left_s is None else monotonic() + asked.left_s
        tensors = hop.tensors_of(asked.tensors, body)
        guest = _Guest(tensors, half.run, half.pace, asked.client, deadline, home=host, number=asked.number)
        host.waiting[guest.number] = guest
        try:
            self._turns.put(guest)
        except BaseException:
            host.waiting.pop(guest.number, None)
            raise
        self._asked(half)

    @property
    def load(self) -> float:
        """What clients are told of it."""
        return self._turns.load


class _Host:
    """One link's."""

    def __init__(self, gathering: Gathering, link: hop.Link) -> None:
        self._gathering = gathering
        self._link = link
        self.waiting: dict[int, _Guest] = {}

    def listen(self) -> None:
        """Until the other end has gone."""
        try:
            for message, body in self._link.received():
                self._heard(message, body)
        except MalformedMessage as error:
            log.error("a serving process spoke nonsense: %s", error)
        finally:
            self._link.close()
            for guest in list(self.waiting.values()):
                guest.is_gone = _has_gone

    def over(self, jobs: Sequence[Job]) -> None:
        """These have been run, or never will be: all of them are this link's."""
        guests = [one for one in jobs if isinstance(one, _Guest)]
        for one in guests:
            self.waiting.pop(one.number, None)
        self._link.send([self._told(one) for one in guests])

    def _heard(self, message: hop.Message, body: memoryview) -> None:
        if isinstance(message, hop.Leave):
            guest = self.waiting.get(message.number)
            if guest is not None:
                guest.is_gone = _has_gone
        elif isinstance(message, hop.Run):
            try:
                self._gathering.admit(self, message, body)
            except MalformedMessage:
                raise
            except EdgeError as error:
                self._link.send([(hop.failed(message.number, error), ())])
        else:
            raise MalformedMessage(type(message).__name__)

    def _told(self, guest: _Guest) -> tuple[hop.Message, Sequence[memoryview]]:
        if guest.error is not None:
            return hop.failed(guest.number, guest.error), ()
        try:
            described, buffers = hop.described(guest.value)
        except (EdgeError, ValueError, TypeError) as error:  # all others of its run are to be told all the same
            return hop.failed(guest.number, error), ()
        load = self._gathering.load
        return hop.Ran(guest.number, guest.run_s, guest.together, guest.leads, load, described), buffers


def _has_gone() -> bool:
    return True
