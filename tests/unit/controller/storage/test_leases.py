"""Leases: one of all processes is the holder, and a process that lost its lease can write nothing any more."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from edgesplit_controller.storage.database import Database, record_event
from edgesplit_controller.storage.leases import LEASE_S, Lease, LeaseLost
from support.postgres import Postgres

PATIENCE_S = 60.0
HOLDER = """
import sys, time
from edgesplit_controller.storage.database import Database
from edgesplit_controller.storage.leases import Lease
lease = Lease(Database(sys.argv[1]), "work", life_s=2.0)
lease.keep_renewed(lambda held: print("held" if held else "lost", flush=True))
time.sleep(600)
"""


class ManualClocks:
    """A monotonic clock for each process, and the database's, moved together or apart."""

    def __init__(self) -> None:
        self.database = 1_000_000.0
        self.process = 5.0

    def pass_s(self, seconds: float) -> None:
        self.database += seconds
        self.process += seconds

    def lease(self, database: Database) -> Lease:
        return Lease(database, "work", clock=lambda _: self.database, monotonic=lambda: self.process)


@pytest.fixture
def database(database_url: str) -> Iterator[Database]:
    opened = Database(database_url)
    yield opened
    opened.close()


def checked(lease: Lease, database: Database) -> bool:
    """Does a transaction under the lease go through?"""
    try:
        with database.write() as session:
            lease.check(session)
            record_event(session, 1.0, "lease", "worked", lease.name)
    except LeaseLost:
        return False
    return True


def test_the_first_line_of_up_was_a_lease(database: Database, caplog: pytest.LogCaptureFixture) -> None:
    """To have it from the start is the usual case, and not logged."""
    caplog.set_level("INFO")
    held: list[bool] = []
    lease = Lease(database, "process 1")
    lease.keep_renewed(held.append)
    lease.release()
    assert held == [True] and "lease" not in caplog.text


def test_a_lease_stays_with_the_holder_that_renews_it(database: Database) -> None:
    """A second process cannot take it while the first renews it."""
    times = ManualClocks()
    first, second = times.lease(database), times.lease(database)
    assert first.held() and not second.held()
    for _ in range(10):
        times.pass_s(LEASE_S / 2)
        assert first.held() and not second.held()
    assert checked(first, database) and not checked(second, database)


def test_a_lease_that_is_not_renewed_expires(database: Database) -> None:
    """Another process takes it; the first detects that by its own clock, and its fenced writes fail."""
    times = ManualClocks()
    first, second = times.lease(database), times.lease(database)
    assert first.held() and not second.held()
    times.database += LEASE_S + 1
    times.process += LEASE_S * 0.9
    assert second.held()
    assert not checked(first, database) and checked(second, database)
    assert not first.held()


def test_a_suspended_process_does_not_hold_its_lease(database: Database) -> None:
    """Its clock went on while it did not run: it renews before it relies on the lease, and that fails."""
    times = ManualClocks()
    first, second = times.lease(database), times.lease(database)
    assert first.held() and not second.held()
    times.pass_s(LEASE_S + 1)
    assert second.held()
    assert not first.held()


def test_a_reacquired_lease_has_a_higher_fencing_token(database: Database) -> None:
    """A holder that lost the lease and got it again is fenced off from its earlier writes."""
    times = ManualClocks()
    first, second = times.lease(database), times.lease(database)
    assert first.held()
    times.pass_s(LEASE_S + 1)
    assert second.held() and not first.held()
    second.release()
    times.pass_s(LEASE_S)
    assert first.held() and checked(first, database) and not checked(second, database)


def test_a_stopped_process_releases_its_lease(database: Database) -> None:
    """The next process takes it without waiting for the expiry."""
    times = ManualClocks()
    first, second = times.lease(database), times.lease(database)
    assert first.held()
    first.release()
    first.release()
    assert second.held()


def test_leases_of_different_names_are_independent(database: Database) -> None:
    """Two names, two holders."""
    one, other = Lease(database, "rollouts"), Lease(database, "planning")
    assert one.held() and other.held()


def test_a_lease_is_not_taken_during_a_fenced_transaction(postgres: Postgres) -> None:
    """On PostgreSQL, a holder inside a transaction keeps the lease past its expiry: the other waits until the
    commit."""
    database = Database(postgres.database())
    times = ManualClocks()
    first, second = times.lease(database), times.lease(database)
    assert first.held()
    took = threading.Event()

    def take() -> None:
        assert second.held()
        took.set()

    thread = threading.Thread(target=take)
    with database.write() as session:
        first.check(session)
        times.pass_s(LEASE_S + 1)
        thread.start()
        waiting = "SELECT count(*) FROM pg_locks WHERE NOT granted"
        while not session.connection().exec_driver_sql(waiting).scalar_one():
            assert not took.is_set()
        record_event(session, 1.0, "lease", "worked", "")
    thread.join(PATIENCE_S)
    assert took.is_set() and not checked(first, database)
    database.close()


def test_no_lease_is_granted_while_the_database_is_unavailable(postgres: Postgres) -> None:
    """While it cannot be renewed it is held until its expiry, and no longer."""
    database = Database(postgres.database())
    times = ManualClocks()
    lease = times.lease(database)
    assert lease.held()
    postgres.kill()
    try:
        times.pass_s(LEASE_S * 0.9)
        assert lease.held()
        times.pass_s(LEASE_S * 0.2)
        assert not lease.held()
    finally:
        postgres.start()
    times.pass_s(LEASE_S)
    assert lease.held()
    database.close()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_the_lease_of_a_killed_process_expires_within_seconds(database_url: str, number: int) -> None:
    """Killed or stopped in another process: the lease is free soon, and a stopped process that continues detects
    that."""
    database = Database(database_url)
    process: subprocess.Popen[Any] = subprocess.Popen(
        [sys.executable, "-c", HOLDER, database_url], stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None and process.stdout.readline() == "held\n"
        took = threading.Event()
        lease = Lease(database, "work", life_s=2.0)
        lease.keep_renewed(lambda held: took.set() if held else None)
        os.kill(process.pid, number)
        assert took.wait(PATIENCE_S) and lease.held() and checked(lease, database)
        if number == signal.SIGSTOP:
            os.kill(process.pid, signal.SIGCONT)
            assert process.stdout.readline() == "lost\n"
        lease.release()
    finally:
        process.kill()
        process.wait()
        database.close()
