"""Which process sees to what, where several are here: each chunk has one that publishes it, whoever was asked for it.

Rendezvous hashing over the processes that have a place: all of them come to the same answer without a word, and when
one comes or goes only its own part moves. What was passed on to one that has just died is asked for again by the
devices, and by then somebody else's.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from hashlib import blake2b
from time import monotonic
from typing import Protocol

import msgspec
from sqlalchemy import select

from edgesplit.errors import EdgeError
from edgesplit.mqtt.messages import ROOT
from edgesplit_controller.messaging.broker import CONTROLLERS
from edgesplit_controller.storage.database import Database
from edgesplit_controller.storage.leases import clock_of
from edgesplit_controller.storage.tables.leases import LeaseRow

log = logging.getLogger(__name__)

AGAIN_S = 1.0
"""The processes that are here are looked up at most so often."""
MOST_PASSED = 96
"""Chunks in one message, which is as short as a device's may be."""


class PassedOn(msgspec.Struct, frozen=True):
    """A device asked one process for chunks that another sees to. Topic `edgesplit/v1/{process}/passed`, QoS 0."""

    device: str
    release: str
    chunks: tuple[str, ...]
    own: bool = False
    """Of `FetchChunks`."""


class Colleagues(Protocol):
    """Who sees to what."""

    own: int
    """This process' number."""

    def sees_to(self, chunk: str) -> int:
        """The process that publishes this chunk now."""
        ...


class Alone:
    """A process that has no colleagues."""

    own = 1

    def sees_to(self, chunk: str) -> int:
        """This one, whichever chunk it is."""
        return responsible(chunk, (self.own,))


class OnDatabase:
    """The processes that have a lease on a place. One thread."""

    def __init__(self, database: Database, own: int, *, now: Callable[[], float] = monotonic) -> None:
        self.own = own
        self._database = database
        self._now = now
        self._here: tuple[int, ...] = (own,)
        self._read_at = float("-inf")

    def sees_to(self, chunk: str) -> int:
        """The process that publishes this chunk now, as far as is known."""
        if self._now() - self._read_at >= AGAIN_S:
            self._read_at = self._now()
            self._read()
        return responsible(chunk, self._here)

    def _read(self) -> None:
        try:
            with self._database.read() as session:
                held = select(LeaseRow.name).where(
                    LeaseRow.name.startswith("process "), LeaseRow.holder != "", LeaseRow.expires > clock_of(session)
                )
                numbers = {int(name.removeprefix("process ")) for name in session.scalars(held)}
        except EdgeError as error:
            log.info("who else is here could not be read: %s", error)
            return
        self._here = tuple(sorted({*numbers, self.own}))


def responsible(chunk: str, numbers: Iterable[int]) -> int:
    """Of these processes the one for that chunk."""
    return max(numbers, key=lambda number: blake2b(f"{number} {chunk}".encode(), digest_size=8).digest())


def passed_topic(number: int) -> str:
    """Where that process hears what others pass on. No device can be called so, and none may write there."""
    return f"{ROOT}/{CONTROLLERS[number - 1]}/passed"
