"""TLS contexts that follow their files: a certificate that is renewed in place is presented from the next connection
on, without a restart. Connections that are open stay as they are.
"""

from __future__ import annotations

import logging
import ssl
import threading
from collections.abc import Callable
from typing import Any

from edgesplit.errors import EdgeError
from edgesplit.trust.identity import Credentials

log = logging.getLogger(__name__)


class RenewedContext(ssl.SSLContext):
    """A TLS context that `make` makes again whenever a file of `credentials` has changed. Thread-safe.

    Files that do not fit together, as while they are being copied, change nothing until they do. Each connection has
    the context that was newest when it began; settings of this object itself are not used.
    """

    def __new__(cls, credentials: Credentials, make: Callable[[], ssl.SSLContext]) -> RenewedContext:
        """The protocol is that of a context which verifies its peers, and is never used."""
        return super().__new__(cls, ssl.PROTOCOL_TLS_CLIENT)

    def __init__(self, credentials: Credentials, make: Callable[[], ssl.SSLContext]) -> None:
        self._files = (credentials.key_file, credentials.certificate_file, credentials.ca_file)
        self._make = make
        self._lock = threading.Lock()
        self._version = self._read_version()
        self._newest = make()

    def wrap_socket(self, *arguments: Any, **options: Any) -> ssl.SSLSocket:
        """As of `ssl.SSLContext`, by the newest files."""
        return self._current().wrap_socket(*arguments, **options)

    def wrap_bio(self, *arguments: Any, **options: Any) -> ssl.SSLObject:
        """As of `ssl.SSLContext`, by the newest files."""
        return self._current().wrap_bio(*arguments, **options)

    def _current(self) -> ssl.SSLContext:
        with self._lock:
            version = self._read_version()
            if version != self._version:
                self._version = version
                try:
                    self._newest = self._make()
                except EdgeError as error:
                    log.error("the previous certificate stays in use: %s", error)
            return self._newest

    def _read_version(self) -> tuple[tuple[int, int, int] | None, ...]:
        versions: list[tuple[int, int, int] | None] = []
        for file in self._files:
            try:
                status = file.stat()
                versions.append((status.st_ino, status.st_mtime_ns, status.st_size))
            except OSError:
                versions.append(None)
        return tuple(versions)
