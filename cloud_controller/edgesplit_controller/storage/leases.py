"""Leases in the database, for work that only one controller process may do at a time (leader election).

    lease = Lease(database, "rollouts")
    while not ending.wait(1.0):
        if lease.held():
            with database.write() as session:
                lease.check(session)        # raises LeaseLost if another process has it by now
                ...

Promises: of all processes on one database at most one holds a lease. A killed process loses it after `LEASE_S`, a
stopped one releases it at once. `held` is true only while no other process can have it, by this process' monotonic
clock; a process that was suspended in between is stopped by `check`, during whose transaction no other process can take
the lease. Expiry is measured by the database's clock.

Leaves to others: the work itself, and that a step which was begun twice does no harm.
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

LEASE_S = 6.0
"""A lease expires when its holder has not renewed it for this long."""
_CLOCKS = {
    POSTGRESQL: "SELECT extract(epoch FROM clock_timestamp())::double precision",
    "sqlite": "SELECT (julianday('now') - 2440587.5) * 86400.0",
}


class LeaseLost(Busy):
    """Another process has the lease by now; work begun under it was not committed."""


def database_time(session: Session) -> float:
    """Unix seconds by the database's clock, the same for every process."""
    return float(session.execute(text(_CLOCKS[session.get_bind().dialect.name])).scalar_one())


class Lease:
    """The lease `name`, as seen by this process. Thread-safe. `held` acquires and renews it, if it is called often;
    with `keep_renewed` a thread does so, for work that takes long."""

    def __init__(
        self, database: Database, name: str, *, life_s: float = LEASE_S,
        clock: Callable[[Session], float] = database_time, monotonic: Callable[[], float] = time.monotonic,
    ) -> None:  # fmt: skip
        self.name = name
        self._database = database
        self._life_s = life_s
        self._clock = clock
        self._monotonic = monotonic
        self._holder = f"{socket.gethostname()}:{os.getpid()}:{secrets.token_hex(8)}"
        self._token = 0
        self._held_until = float("-inf")
        """Monotonic time until which no other process can have the lease."""
        self._renew_at = float("-inf")
        """Monotonic time of the next renewal."""
        self._lock = threading.Lock()
        self.was_taken_over = False
        """This process had the lease and another has taken it over: work that relied on it must stop."""
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None
        self._on_change: Callable[[bool], None] = lambda held: None
        self._notified_state = False

    @property
    def holder(self) -> str:
        """Unique id of this lease's holder, which the lease's row has while this process has the lease."""
        return self._holder

    def held(self) -> bool:
        """Whether this process has the lease. Acquires it if it is free."""
        if self._thread is None:
            self._renew_if_due()
        return self._monotonic() < self._held_until

    def keep_renewed(self, on_change: Callable[[bool], None] = lambda held: None) -> None:
        """Acquire the lease when it is free and renew it, on a thread of its own. `on_change` is called there on each
        change; for the state at the beginning it is called at once."""
        self._on_change = on_change
        self._renew_if_due()
        self._notify_change(at_start=True)
        self._thread = threading.Thread(target=self._renew_loop, name=f"lease-{self.name}", daemon=True)
        self._thread.start()

    def check(self, session: Session) -> None:
        """Raise LeaseLost unless this process has the lease. No other can take it until the transaction ends."""
        with self._lock:
            token = self._token
        query = select(LeaseRow.token).where(
            LeaseRow.name == self.name, LeaseRow.holder == self._holder, LeaseRow.token == token
        )
        # FOR KEY SHARE until the transaction ends: the holder can still renew (FOR NO KEY UPDATE), but a takeover
        # needs FOR UPDATE and waits. The token makes this a fencing check: a holder that was suspended until another
        # process took the lease no longer matches. On SQLite write transactions are serialised anyway.
        if session.execute(query.with_for_update(read=True, key_share=True)).first() is None:
            self._held_until = float("-inf")
            raise LeaseLost(f"another controller process has taken over ({self.name})")

    def release(self) -> None:
        """Release the lease, so that another process need not wait for it to expire."""
        self._stopping.set()
        if self._thread is not None:
            self._thread.join(10)
        if self._held_until == float("-inf"):
            return
        self._held_until = float("-inf")
        try:
            with self._database.write_concurrent() as session:
                row = session.get(LeaseRow, self.name, with_for_update={"key_share": True})
                if row is not None and row.holder == self._holder:
                    row.holder, row.expires = "", 0.0
        except EdgeError as error:
            log.info("could not release lease %s: %s", self.name, error)

    def _renew_loop(self) -> None:
        while not self._stopping.wait(self._life_s / 12):
            self._renew_if_due()
            self._notify_change()

    def _notify_change(self, *, at_start: bool = False) -> None:
        now = self._monotonic() < self._held_until
        if now != self._notified_state:
            self._notified_state = now
            if not at_start:  # at the start it is the usual case
                log.info("lease %r: held by %s process now", self.name, "this" if now else "another")
            self._on_change(now)

    def _renew_if_due(self) -> None:
        with self._lock:
            # Measured before the database is asked, so that the local view of the lease ends before the database's
            # does, however long the answer takes.
            began = self._monotonic()
            if began < self._renew_at:
                return
            self._renew_at = began + self._life_s / 3
            try:
                if self._acquire_or_renew():
                    self._held_until, self.was_taken_over = began + self._life_s, False
                else:
                    # token > 0: this process held the lease before, so another one has taken it over.
                    self._held_until, self.was_taken_over = float("-inf"), self._token > 0
            except IntegrityError:
                return  # another process inserted the row at the same moment
            except EdgeError as error:
                log.warning("lease %s cannot be renewed: %s", self.name, error)
                self._renew_at = began + self._life_s / 12  # retried sooner than the usual third of the lease

    def _acquire_or_renew(self) -> bool:
        """Renew the lease, or acquire it if it is free or expired; False if another process has it."""
        with self._database.write_concurrent() as session:
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
            # FOR UPDATE waits for a holder whose transaction has called `check`. The holder may have renewed the
            # lease in the meantime, so the expiry is read again under the lock.
            session.refresh(row, with_for_update=True)
            if row.expires > (now := self._clock(session)):
                return False
            row.holder, row.token, row.expires = self._holder, row.token + 1, now + self._life_s
            session.flush()
            token = row.token
        self._token = token
        return True


def free_all_leases(database: Database) -> None:
    """Free every lease, when this is known to be the only process, which then need not wait for the lease of a killed
    one."""
    with database.write() as session:
        session.execute(update(LeaseRow).values(holder="", expires=0.0))
