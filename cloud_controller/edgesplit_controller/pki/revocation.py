"""What makes a revocation true: the list that broker and offload servers go by, and the end of the session that lives.

A list only keeps a certificate from connecting again, so the session that exists is ended besides: we connect once
under the device's own name, with a certificate of minutes, and the broker throws the older session of that name off
(MQTT 5, 3.1.4-3). That needs nothing of the broker but what it promises every client. A device that is heard although
it was revoked slipped in between the two: whoever hears it calls `cut` again.
"""

from __future__ import annotations

import fcntl
import logging
import queue
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

from edgesplit.atomic_files import make_folders, write_durably
from edgesplit.mqtt.session import Session
from edgesplit_controller.pki.authority import Authority

log = logging.getLogger(__name__)

CONNECT_S = 3.0
TRIES = 3


class ListReader(Protocol):
    """Somebody who goes by a list in a file, and reads it again when told."""

    def reload(self) -> None:
        """The file has changed."""
        ...


class Revocations:
    """The revocation list of one installation, and the sessions that it ends. `start` before `cut`."""

    def __init__(
        self,
        authority: Authority,
        revoked: Callable[[], Iterable[int]],
        files: Sequence[Path],
        broker: tuple[str, int],
    ) -> None:
        """The first of `files` is what `notice` looks at; the lock lies beside it."""
        self._authority = authority
        self._revoked = revoked
        self._files = files
        self._broker = broker
        self._readers: list[ListReader] = []
        self._watching: list[ListReader] = []
        self._publishing = threading.Lock()
        self._listed: frozenset[int] | None = None
        """What this process published last."""
        self._noticed = 0
        self._due: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._waiting: set[str] = set()
        self._thread = threading.Thread(target=self._work, name="revocations", daemon=True)

    def tell(self, reader: ListReader, *, of_others: bool = False) -> None:
        """Let `reader` know of every list that this process publishes, and with `of_others` of every list."""
        self._readers.append(reader)
        if of_others:
            self._watching.append(reader)

    def publish(self) -> None:
        """Write the list as it is now, and let everybody read it."""
        with self._publishing, self._alone():
            self._listed = frozenset(self._revoked())
            listed = self._authority.revocation_list(self._listed)
            for file in self._files:
                write_durably(file, listed)
            self._noticed = self._changed()
            for reader in self._readers:
                reader.reload()

    def publish_if_changed(self) -> None:
        """Publish where something else is stored than this process published last."""
        if frozenset(self._revoked()) != self._listed:
            self.publish()

    def notice(self) -> None:
        """Let the readers know that another process has published."""
        changed = self._changed()
        if changed != self._noticed:
            self._noticed = changed
            for reader in self._watching:
                reader.reload()

    def _changed(self) -> int:
        try:
            return self._files[0].stat().st_mtime_ns
        except FileNotFoundError:
            return 0

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """No other process publishes meanwhile."""
        lock = self._files[0].with_name(".publishing")
        make_folders(lock.parent)
        with lock.open("ab") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield

    def cut(self, device: str) -> None:
        """End, soon, the session that this device has with the broker. Returns at once."""
        if device not in self._waiting:
            self._waiting.add(device)
            self._due.put(device)

    def start(self) -> None:
        """Begin to end sessions."""
        self._thread.start()

    def stop(self) -> None:
        """No more."""
        self._due.put(None)
        if self._thread.ident is not None:
            self._thread.join(CONNECT_S * TRIES)

    def _work(self) -> None:
        while (device := self._due.get()) is not None:
            self._waiting.discard(device)
            try:
                self._take_over(device)
            except Exception:  # whatever ails one session's end, the next device's must not wait for it
                log.exception("could not end the session of %s", device)

    def _take_over(self, device: str) -> None:
        """Be the device for a moment."""
        host, port = self._broker
        problem = ""
        for _ in range(TRIES):
            session = Session(host, port, device, self._authority.takeover_context(device), on_message=lambda *_: None)
            session.start()
            connected = session.wait_connected(CONNECT_S)
            session.stop()
            if connected:
                log.info("ended the session of %s", device)
                return
            problem = session.problem
        log.error("could not end the session of %s: %s", device, problem)
