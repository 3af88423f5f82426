"""A private PostgreSQL for one test run: no TCP, a Unix socket in a folder of its own, gone with the process."""

from __future__ import annotations

import os
import pwd
import shutil
import signal
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

import psycopg

from edgesplit.process.lifecycle import die_with_starting_thread

PATIENCE_S = 60.0
PROGRAMS = "/usr/lib/postgresql"
USER = "edgesplit"


class NoPostgres(Exception):
    """PostgreSQL is not installed here; the text says how it can be."""


class Postgres:
    """A cluster that is started, killed and started again as a test wants. Its databases are made by `database`."""

    def __init__(self) -> None:
        self._programs = _programs()
        self._folder = Path(tempfile.mkdtemp(prefix="es-pg-", dir="/tmp"))
        self._as = _somebody_else()
        if self._as:
            shutil.chown(self._folder, self._as)
        self._made = 0
        self._process: subprocess.Popen[bytes] | None = None
        self._run("initdb", "-D", self._data, "-U", USER, "-A", "trust", "-E", "UTF8", "--locale=C", "--no-sync", "-N")
        self.start()

    @property
    def _data(self) -> Path:
        return self._folder / "data"

    def start(self, *settings: str) -> None:
        """Start it and wait until it answers."""
        log = (self._folder / "log").open("ab")
        values = ("listen_addresses=", f"unix_socket_directories={self._folder}", "fsync=off", "shared_buffers=16MB")
        options = [word for value in (*values, "max_connections=100", *settings) for word in ("-c", value)]
        with log:
            self._process = subprocess.Popen(
                [self._programs / "postgres", "-D", self._data, *options], stdin=subprocess.DEVNULL, stdout=log,
                stderr=log, cwd=self._folder, preexec_fn=die_with_starting_thread(signal.SIGQUIT), **self._identity(),
            )  # fmt: skip
        deadline = time.monotonic() + PATIENCE_S
        while True:
            try:
                psycopg.connect(self._conninfo("postgres"), connect_timeout=5).close()
                return
            except psycopg.OperationalError as error:
                if self._process.poll() is not None or time.monotonic() > deadline:
                    raise AssertionError(f"PostgreSQL does not start: {error}; {self.log()}") from error
                time.sleep(0.02)

    def kill(self) -> None:
        """End it at once: connections break, what was committed stays."""
        assert self._process is not None
        self._process.send_signal(signal.SIGQUIT)  # PostgreSQL's immediate shutdown
        self._process.wait(PATIENCE_S)

    def stop(self) -> None:
        """End it for good, and forget everything."""
        if self._process is not None and self._process.poll() is None:
            self.kill()
        shutil.rmtree(self._folder, ignore_errors=True)

    def database(self) -> str:
        """The URL of a fresh, empty database."""
        self._made += 1
        name = f"test_{self._made}"
        self.execute(f"CREATE DATABASE {name}")
        return f"postgresql+psycopg://{USER}@/{name}?host={self._folder}"

    def execute(self, statement: str) -> None:
        """Run one statement as the superuser, outside a transaction."""
        with psycopg.connect(self._conninfo("postgres"), autocommit=True) as connection:
            connection.execute(statement.encode())

    def log(self) -> str:
        """The last that it said."""
        return (self._folder / "log").read_text(errors="replace")[-2_000:]

    def _conninfo(self, name: str) -> str:
        return f"host={self._folder} user={USER} dbname={name}"

    def _identity(self) -> dict[str, Any]:
        return {"user": self._as, "group": pwd.getpwnam(self._as).pw_gid, "extra_groups": []} if self._as else {}

    def _run(self, program: str, *words: object) -> None:
        done = subprocess.run(
            [self._programs / program, *map(str, words)], capture_output=True, text=True, cwd=self._folder,
            **self._identity(),
        )  # fmt: skip
        assert done.returncode == 0, done.stderr


def _programs() -> Path:
    """The folder of the newest PostgreSQL's programs."""
    found = sorted(Path(PROGRAMS).glob("*/bin/initdb"), key=lambda path: int(path.parts[-3]))
    if found:
        return found[-1].parent
    if on_path := shutil.which("initdb"):
        return Path(on_path).resolve().parent
    raise NoPostgres("no PostgreSQL is installed (on Debian: `tools/setup dev`, or apt-get install postgresql)")


def _somebody_else() -> str:
    """PostgreSQL refuses to run as root: whom it shall run as instead; empty for ourselves."""
    if os.geteuid() != 0:
        return ""
    known = {entry.pw_name for entry in pwd.getpwall()}
    return next(name for name in ("postgres", "nobody") if name in known)
