"""Certificate revocation list (CRL) file that the controller maintains, reloaded when it changes.

It is checked for each request, because a connection may outlive the validity of its certificate. A list that is not
signed by the authority, or is missing, is ignored: what was revoked stays revoked. So does what an expired list names:
refusing every device instead would let an attacker who delays the list stop the fleet. It is logged, and reported to
operators.
"""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Callable
from pathlib import Path
from time import monotonic, time

from edgesplit.errors import TrustError, UsageError
from edgesplit.trust.revocation import RevocationList, authority_key, parse_revocation_list

log = logging.getLogger(__name__)

LOOK_EVERY_S = 0.5
"""Least interval between checks of the file."""
EXPIRED_LOG_S = 3_600.0
"""Interval at which an expired list is logged."""


class RevokedSerials:
    """The serial numbers in the CRL at `path`, signed by the authority in `ca_file`. Thread-safe.

    UsageError or TrustError if the list cannot be read or verified at first.
    """

    def __init__(
        self, path: Path, ca_file: Path, *, look_every_s: float = LOOK_EVERY_S, now: Callable[[], float] = time
    ) -> None:
        self._path = path
        self._look_every_s = look_every_s
        self._authority = authority_key(ca_file)
        self._lock = threading.Lock()
        self._version: tuple[int, int, int] | None = None
        self._checked_at = 0.0
        self._now = now
        self._expired_logged_at = -math.inf
        self._list = self._read()

    @property
    def expires(self) -> float:
        """Unix time at which the list expires."""
        return self._list.expires

    def __contains__(self, serial: object) -> bool:
        with self._lock:
            if monotonic() - self._checked_at >= self._look_every_s:
                try:
                    self._list = self._read()
                except (TrustError, UsageError) as error:
                    log.error("the previous revocation list stays in force: %s", error)
                self._log_expired()
        return serial in self._list.serials

    def _log_expired(self) -> None:
        if self._now() >= self._list.expires and self._checked_at - self._expired_logged_at >= EXPIRED_LOG_S:
            self._expired_logged_at = self._checked_at
            log.error(
                "the revocation list %s has expired: it stays in force, but newer revocations may be missing; copy the"
                " file from the controller's data folder again",
                self._path,
            )

    def _read(self) -> RevocationList:
        self._checked_at = monotonic()
        try:
            status = self._path.stat()
            version = (status.st_ino, status.st_mtime_ns, status.st_size)
            if version == self._version:
                return self._list
            raw = self._path.read_bytes()
        except OSError as error:
            raise UsageError(f"cannot read the revocation list {self._path}: {error.strerror}") from error
        self._version = version
        return parse_revocation_list(raw, self._authority, self._path)
