"""Leases: what has to run once runs in the process that holds the right to it.

    lease = Lease(database, "rollouts")
    while not ending.wait(1.0):
        if lease.held():
            with database.write() as session:
                lease.check(session)        # refused if somebody else has it by now
                ...

Promises: of all processes on one database one holds a lease at a time; whoever was killed has lost it after `LIFE_S`,
whoever stops lets go at once. `held` is true only while no other can have it, by this process' own monotonic clock; a
process that slept in between finds out in `check`, whose transaction nobody can overtake. The database's clock counts.
Leaves to others: what is done under it, and that a step which was begun twice does no harm.
"""

from __future__ import annotations

import logging
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable

from sqlalchemy import select, text, update
from sqlalchemy.exc import IntegrityError
from sqlalchemy.orm import Session

from edgesplit.errors import Busy, EdgeError
from edgesplit_controller.storage.database import Database
from edgesplit_controller.storage.engines import POSTGRESQL
from edgesplit_controller.storage.tables.leases import LeaseRow

log = logging.getLogger(__name__)

LIFE_S = 6.0
"""A holder that was silent for so long has lost it."""
_CLOCKS = {
    POSTGRESQL: "SELECT extract(epoch FROM clock_timestamp())::double precision",
    "sqlite": "SELECT (julianday('now') - 2440587.5) * 86400.0",
}


class LeaseLost(Busy):
    """Another process has the lease by now: what was begun under it is not done."""


def clock_of(session: Session) -> float:
    """Unix seconds by the database's clock, the same for every process."""
    return float(session.execute(text(_CLOCKS[session.get_bind().dialect.name])).scalar_one())


class Lease:
    """The lease `name`, as this process sees it. Thread-safe. `held` takes it and keeps it, if it is called often; with
    `keep` a thread does so, for work that takes long."""

    def __init__(
        self,
        database: Database,
        name: str,
        *,
        life_s: float = LIFE_S,
        clock: Callable[[Session], float] = clock_of,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self.name = name
        self._database = database
        self._life_s = life_s
        self._clock = clock
        self._monotonic = monotonic
        self._holder = f"{socket.gethostname()}:{os.getpid()}:{secrets.token_hex(8)}"
        self._token = 0
        self._until = float("-inf")
        """Until then nobody else can have it."""
        self._due = float("-inf")
        """When the database is to be asked again."""
        self._lock = threading.Lock()
        self.overtaken = False
        """We had it, and another has it now: whoever did something by it alone must end."""
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None
        self._on_change: Callable[[bool], None] = lambda held: None
        self._before = False

    def held(self) -> bool:
        """Is it ours? Takes it where nobody has it."""
        if self._thread is None:
            self._renew_if_due()
        return self._monotonic() < self._until

    def keep(self, on_change: Callable[[bool], None] = lambda held: None) -> None:
        """Take it when it is free, and keep it, on a thread of its own; `on_change` is told there of each change, of
        the first one at once."""
        self._on_change = on_change
        self._renew_if_due()
        self._tell()
        self._thread = threading.Thread(target=self._keep, name=f"lease-{self.name}", daemon=True)
        self._thread.start()

    def check(self, session: Session) -> None:
        """LeaseLost unless it is ours, and stays so until this transaction ends: nobody can take it meanwhile."""
        with self._lock:
            token = self._token
        ours = select(LeaseRow.token).where(
            LeaseRow.name == self.name, LeaseRow.holder == self._holder, LeaseRow.token == token
        )
        if session.execute(ours.with_for_update(read=True, key_share=True)).first() is None:
            self._until = float("-inf")
            raise LeaseLost(f"another controller process has taken over ({self.name})")

    def release(self) -> None:
        """Let go of it, so that another need not wait."""
        self._stopping.set()
        if self._thread is not None:
            self._thread.join(10)
        if self._until == float("-inf"):
            return
        self._until = float("-inf")
        try:
            with self._database.hear() as session:
                row = session.get(LeaseRow, self.name, with_for_update={"key_share": True})
                if row is not None and row.holder == self._holder:
                    row.holder, row.expires = "", 0.0
        except EdgeError as error:
            log.info("could not let go of lease %s: %s", self.name, error)

    def _keep(self) -> None:
        while not self._stopping.wait(self._life_s / 12):
            self._renew_if_due()
            self._tell()

    def _tell(self) -> None:
        now = self._monotonic() < self._until
        if now != self._before:
            self._before = now
            log.info("lease %s: %s", self.name, "ours" if now else "lost")
            self._on_change(now)

    def _renew_if_due(self) -> None:
        with self._lock:
            asked = self._monotonic()
            if asked < self._due:
                return
            self._due = asked + self._life_s / 3
            try:
                if self._take():
                    self._until, self.overtaken = asked + self._life_s, False
                else:
                    self._until, self.overtaken = float("-inf"), self._token > 0
            except IntegrityError:
                return  # another made the row at the same moment
            except EdgeError as error:
                log.warning("lease %s cannot be renewed: %s", self.name, error)
                self._due = asked + self._life_s / 12

    def _take(self) -> bool:
        """Renew it, or take it from nobody or from a holder that was silent; False if another has it."""
        with self._database.hear() as session:
            row = session.get(LeaseRow, self.name, with_for_update={"key_share": True})
            if row is None:
                row = LeaseRow(name=self.name, holder="", token=0, expires=0.0)
                session.add(row)
                session.flush()
            if row.holder == self._holder:
                row.expires = self._clock(session) + self._life_s
                return True
            if row.expires > self._clock(session):
                return False
            # Whoever is in a transaction that was checked keeps this waiting, and may then have renewed it.
            session.refresh(row, with_for_update=True)
            if row.expires > (now := self._clock(session)):
                return False
            row.holder, row.token, row.expires = self._holder, row.token + 1, now + self._life_s
            session.flush()
            token = row.token
        self._token = token
        return True


def forget_leases(database: Database) -> None:
    """Free every lease: a process that knows itself to be alone need not wait for one that was killed."""
    with database.write() as session:
        session.execute(update(LeaseRow).values(holder="", expires=0.0))
