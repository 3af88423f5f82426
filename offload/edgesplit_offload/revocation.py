"""Certificate revocation list (CRL) file that the controller maintains, reloaded when it changes.

It is checked for each request, because a connection may outlive the validity of its certificate. A list that is not
signed by the authority, or is missing, is ignored: what was revoked stays revoked.
"""

from __future__ import annotations

import logging
import threading
from pathlib import Path
from time import monotonic

from edgesplit.errors import TrustError, UsageError
from edgesplit.trust.revocation import authority_key, revoked_serials

log = logging.getLogger(__name__)

LOOK_EVERY_S = 0.5
"""Least interval between checks of the file."""


class RevokedSerials:
    """The serial numbers in the CRL at `path`, signed by the authority in `ca_file`. Thread-safe.

    UsageError or TrustError if the list cannot be read or verified at first.
    """

    def __init__(self, path: Path, ca_file: Path, *, look_every_s: float = LOOK_EVERY_S) -> None:
        self._path = path
        self._look_every_s = look_every_s
        self._authority = authority_key(ca_file)
        self._lock = threading.Lock()
        self._version: tuple[int, int, int] | None = None
        self._checked_at = 0.0
        self._serials = self._read()

    def __contains__(self, serial: object) -> bool:
        with self._lock:
            if monotonic() - self._checked_at >= self._look_every_s:
                try:
                    self._serials = self._read()
                except (TrustError, UsageError) as error:
                    log.error("the previous revocation list stays in force: %s", error)
        return serial in self._serials

    def _read(self) -> frozenset[int]:
        self._checked_at = monotonic()
        try:
            status = self._path.stat()
            version = (status.st_ino, status.st_mtime_ns, status.st_size)
            if version == self._version:
                return self._serials
            raw = self._path.read_bytes()
        except OSError as error:
            raise UsageError(f"cannot read the revocation list {self._path}: {error.strerror}") from error
        self._version = version
        return revoked_serials(raw, self._authority, self._path)
