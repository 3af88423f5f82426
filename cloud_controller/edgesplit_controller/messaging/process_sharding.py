"""Sharding of chunks over the processes of a controller: each chunk is published by one process, whichever process
received the request.

Rendezvous hashing over the processes that hold a lease: all of them compute the same owner without communication, and
when a process comes or goes only its own share moves. Requests forwarded to a process that has just died are sent again
by the devices, and by then belong to another process.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable
from hashlib import blake2b
from time import monotonic
from typing import Annotated, Protocol

import msgspec
from msgspec import Meta
from sqlalchemy import select

from edgesplit.errors import EdgeError
from edgesplit.mqtt.messages import ROOT
from edgesplit.mqtt.telemetry import Digest
from edgesplit_controller.messaging.broker import CONTROLLERS
from edgesplit_controller.storage.database import Database
from edgesplit_controller.storage.leases import database_time
from edgesplit_controller.storage.tables.leases import LeaseRow

log = logging.getLogger(__name__)

REFRESH_S = 1.0
"""Shortest interval between two queries for the living processes."""
MOST_FORWARDED = 96
"""Chunks in one forwarded message, which may be no longer than a device's."""


class ForwardedChunks(msgspec.Struct, frozen=True):
    """A device's request for chunks, forwarded to the process that publishes them. Topic
    `edgesplit/v1/{process}/passed`, QoS 0."""

    device: Annotated[str, Meta(max_length=63)]
    release: Digest
    chunks: Annotated[tuple[Digest, ...], Meta(max_length=MOST_FORWARDED)]
    direct: bool = False
    """The device accepts a copy of its own, as in `FetchChunks.own`."""


class ProcessSharding(Protocol):
    """Assignment of chunks to processes."""

    own_number: int
    """Number of this process."""

    def owner_of(self, chunk: str) -> int:
        """Number of the process that publishes this chunk now."""
        ...

    def count(self) -> int:
        """Number of the processes now."""
        ...


class SingleProcess:
    """The only process of a controller."""

    own_number = 1

    def owner_of(self, chunk: str) -> int:
        """This process, for every chunk."""
        return owner_by_hash(chunk, (self.own_number,))

    def count(self) -> int:
        """One."""
        return 1


class LeasedProcesses:
    """Sharding over the processes that hold a lease in the database. Thread-safe."""

    def __init__(self, database: Database, own: int, *, now: Callable[[], float] = monotonic) -> None:
        self.own_number = own
        self._database = database
        self._now = now
        self._living: tuple[int, ...] = (own,)
        self._read_at = float("-inf")
        self._lock = threading.Lock()

    def owner_of(self, chunk: str) -> int:
        """Number of the process that publishes this chunk now, as far as is known."""
        return owner_by_hash(chunk, self._refreshed())

    def count(self) -> int:
        """Number of the processes now, as far as is known."""
        return len(self._refreshed())

    def _refreshed(self) -> tuple[int, ...]:
        with self._lock:
            if self._now() - self._read_at >= REFRESH_S:
                self._read_at = self._now()
                self._read()
            return self._living

    def _read(self) -> None:
        try:
            with self._database.read() as session:
                held = select(LeaseRow.name).where(
                    LeaseRow.name.startswith("process "),
                    LeaseRow.holder != "",
                    LeaseRow.expires > database_time(session),
                )
                numbers = {int(name.removeprefix("process ")) for name in session.scalars(held)}
        except EdgeError as error:
            log.info("could not read the other processes: %s", error)
            return
        self._living = tuple(sorted({*numbers, self.own_number}))


def owner_by_hash(chunk: str, numbers: Iterable[int]) -> int:
    """The process, of these, that publishes that chunk (the highest hash wins)."""
    return max(numbers, key=lambda number: blake2b(f"{number} {chunk}".encode(), digest_size=8).digest())


def forwarded_topic(number: int) -> str:
    """Topic on which process `number` receives forwarded requests. No device can have such a name, and none may write
    there."""
    return f"{ROOT}/{CONTROLLERS[number - 1]}/passed"
