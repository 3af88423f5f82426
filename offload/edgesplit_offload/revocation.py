"""Whom not to serve: the revocation list that the controller keeps in a file.

The list is read when the file changes, and looked at for each request, because a connection may outlive the right to
it. A list that is not the authority's, or not there any more, changes nothing: what was revoked stays revoked.
"""

from __future__ import annotations

import logging
import threading
from pathlib import Path
from time import monotonic

from edgesplit.errors import TrustError, UsageError
from edgesplit.trust.revocation import authority_key, revoked_in

log = logging.getLogger(__name__)

LOOK_EVERY_S = 0.5


class Revoked:
    """The serial numbers in the list at `path`, signed by the authority in `ca_file`. Thread-safe."""

    def __init__(self, path: Path, ca_file: Path) -> None:
        self._path = path
        self._authority = authority_key(ca_file)
        self._lock = threading.Lock()
        self._seen: tuple[int, int, int] | None = None
        self._looked = 0.0
        self._serials = self._read()

    def __contains__(self, serial: object) -> bool:
        with self._lock:
            if monotonic() - self._looked >= LOOK_EVERY_S:
                try:
                    self._serials = self._read()
                except (TrustError, UsageError) as error:
                    log.error("the revocation list of before stays in force: %s", error)
        return serial in self._serials

    def _read(self) -> frozenset[int]:
        self._looked = monotonic()
        try:
            found = self._path.stat()
            mark = (found.st_ino, found.st_mtime_ns, found.st_size)
            if mark == self._seen:
                return self._serials
            raw = self._path.read_bytes()
        except OSError as error:
            raise UsageError(f"cannot read the revocation list {self._path}: {error.strerror}") from error
        self._seen = mark
        return revoked_in(raw, self._authority, self._path)
