"""Revocation of certificates: publishes the revocation list that broker and offload servers check, and ends the broker
session of a revoked device.

A list is published when it changes, and renewed when a third of its validity has passed. It only keeps a certificate
from connecting again, so the existing session is ended besides: the controller connects once under the device's own
name, with a certificate valid for minutes, and the broker disconnects the older session of that client id (MQTT 5,
3.1.4-3). That needs only behaviour that every broker guarantees. A device that is heard although it was revoked
connected between the two steps; the receiver of its message calls `end_session` again.
"""

from __future__ import annotations

import fcntl
import logging
import queue
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Protocol

from edgesplit.atomic_files import make_folders, write_durably
from edgesplit.errors import TrustError
from edgesplit.mqtt.session import Session
from edgesplit.trust.revocation import authority_key, parse_revocation_list
from edgesplit_controller.pki.authority import Authority

log = logging.getLogger(__name__)

CONNECT_S = 3.0
"""Timeout of one attempt to connect."""
TRIES = 3
"""Attempts to end one session."""


class ListReader(Protocol):
    """A server that checks a revocation list in a file."""

    def reload(self) -> None:
        """Read the file again, because it has changed."""
        ...


class Revocations:
    """The revocation list of one installation, and the end of revoked sessions. Call `start` before `end_session`."""

    def __init__(
        self, authority: Authority, revoked: Callable[[], Iterable[int]], files: Mapping[Path, timedelta],
        broker: tuple[str, int], *, now: Callable[[], float] = time.time,
    ) -> None:  # fmt: skip
        """`revoked` returns the serial numbers to list. The list is written to each of `files`, with that validity;
        `reload_if_changed` checks the first, and the lock file lies beside it."""
        self._authority = authority
        self._revoked = revoked
        self._files = files
        self._first_file = next(iter(files))
        self._broker = broker
        self._now = now
        self._readers: list[ListReader] = []
        self._readers_of_all: list[ListReader] = []
        self._publishing = threading.Lock()
        self._listed: frozenset[int] | None = None
        """Serial numbers that this process published last."""
        self._seen_modified_ns = 0
        self._queue: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._queued: set[str] = set()
        self._thread = threading.Thread(target=self._run, name="revocations", daemon=True)

    def add_reader(self, reader: ListReader, *, of_others: bool = False) -> None:
        """Register a reader for lists published by this process, and with `of_others` also for those of other
        processes."""
        self._readers.append(reader)
        if of_others:
            self._readers_of_all.append(reader)

    def publish(self) -> None:
        """Write the current list and make every registered reader reload it."""
        # The serial numbers are read under both locks: otherwise an older list could be written over a newer one.
        with self._publishing, self._file_lock():
            self._listed = frozenset(self._revoked())
            for file, life in self._files.items():
                write_durably(file, self._authority.revocation_list(self._listed, life))
            self._seen_modified_ns = self._modified_ns()
            for reader in self._readers:
                reader.reload()

    def publish_if_changed(self) -> None:
        """Publish if the revoked serial numbers differ from those this process published last."""
        if frozenset(self._revoked()) != self._listed:
            self.publish()

    def publish_if_due(self) -> None:
        """Publish if a published list is missing, is not ours, or must be renewed by the clock."""
        if any(self._is_due(file) for file in self._files):
            self.publish()

    def _is_due(self, file: Path) -> bool:
        try:
            published = parse_revocation_list(file.read_bytes(), authority_key(self._authority.certificate_file), file)
        except (OSError, TrustError) as error:
            log.error("publishing the revocation list again: %s", error)
            return True
        return published.is_due(self._now())

    def reload_if_changed(self) -> None:
        """Make readers reload if another process has published a list."""
        changed = self._modified_ns()
        if changed != self._seen_modified_ns:
            self._seen_modified_ns = changed
            for reader in self._readers_of_all:
                reader.reload()

    def _modified_ns(self) -> int:
        try:
            return self._first_file.stat().st_mtime_ns
        except FileNotFoundError:
            return 0

    @contextmanager
    def _file_lock(self) -> Iterator[None]:
        """Exclude publication by other processes (lock file)."""
        lock = self._first_file.with_name(".publishing")
        make_folders(lock.parent)
        with lock.open("ab") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield

    def end_session(self, device: str) -> None:
        """End the broker session of this device, soon. Returns at once."""
        if device not in self._queued:
            self._queued.add(device)
            self._queue.put(device)

    def start(self) -> None:
        """Start the thread that ends sessions."""
        self._thread.start()

    def stop(self) -> None:
        """Stop the thread after the session it is ending."""
        self._queue.put(None)
        if self._thread.ident is not None:
            self._thread.join(CONNECT_S * TRIES)

    def _run(self) -> None:
        while (device := self._queue.get()) is not None:
            self._queued.discard(device)  # before the attempt, so that a request made during it is not lost
            try:
                self._end_session_now(device)
            except Exception:  # a failure for one device must not stop the thread for the next
                log.exception("could not end the session of %s", device)

    def _end_session_now(self, device: str) -> None:
        """Connect as the device for a moment, so that the broker ends its session."""
        host, port = self._broker
        problem = ""
        for _ in range(TRIES):
            # MQTT 5, 3.1.4-3: a second connection with the same client id ends the first.
            session = Session(host, port, device, self._authority.takeover_context(device), on_message=lambda *_: None)
            session.start()
            connected = session.wait_connected(CONNECT_S)
            session.stop()
            if connected:
                log.info("ended the session of %s", device)
                return
            problem = session.problem
        log.error("could not end the session of %s: %s", device, problem)
