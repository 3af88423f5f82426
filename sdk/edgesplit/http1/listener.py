"""The accepting side of a server: a TCP port, or a Unix socket, and a thread that hands on what connects.

Promises: an address that cannot be had is one clear error; being out of file descriptors ends nothing; once `stop` has
returned nothing is handed on any more. Leaves to others: what becomes of a connection.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
from collections.abc import Callable
from pathlib import Path

from edgesplit.errors import UsageError
from edgesplit.http1 import unix_socket

log = logging.getLogger(__name__)

AGAIN_S = 0.1
"""Until the next try, when no more file descriptors were to be had."""


def listening_socket(host: str, port: int) -> socket.socket:
    """A socket that listens there. UsageError, in one line, where the address cannot be had."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=128)
    except (OSError, OverflowError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UsageError(f"cannot listen on {host} port {port}: {reason}") from error


def server_url(host: str, port: int, *, tls: bool) -> str:
    """Where clients reach what listens there."""
    return f"{'https' if tls else 'http'}://{f'[{host}]' if ':' in host else host}:{port}"


class Accepting:
    """One address, or the Unix socket `path`, from `start` to `stop`."""

    def __init__(
        self,
        admit: Callable[[socket.socket], None],
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        path: Path | None = None,
        mode: int = 0o600,
        group: str | None = None,
    ) -> None:
        """`admit`: given each connection."""
        self.host = host
        self._admit = admit
        self._port = port
        self._path = path
        self._mode = mode
        self._group = group
        self._at_path = (0, 0)
        self._listener: socket.socket | None = None
        self._thread: threading.Thread | None = None
        self._stopping = threading.Event()

    @property
    def port(self) -> int:
        """The port; 0 for a Unix socket. Known from `start` on."""
        if self._listener is None:
            raise UsageError("the server has not been started")
        if self._path is not None:
            return 0
        return int(self._listener.getsockname()[1]) if self._listener.fileno() >= 0 else self._port

    def url(self, *, tls: bool) -> str:
        """Where clients reach it."""
        return f"unix://{self._path}" if self._path is not None else server_url(self.host, self.port, tls=tls)

    def start(self) -> None:
        """Listen. UsageError, in one line, where the address cannot be had."""
        self._listener = self._at(self._path) if self._path else listening_socket(self.host, self._port)
        self._port = self.port
        self._thread = threading.Thread(
            target=self._accept, args=(self._listener,), name=f"http-{self._port}", daemon=True
        )
        self._thread.start()

    def stop(self, within_s: float) -> None:
        """Accept no more."""
        self._stopping.set()
        if self._path is not None:
            unix_socket.remove(self._path, self._at_path)
        if self._listener is not None:
            with contextlib.suppress(OSError):
                self._listener.shutdown(socket.SHUT_RDWR)
            self._listener.close()
        if self._thread is not None:
            self._thread.join(within_s)

    def _at(self, path: Path) -> socket.socket:
        sock = unix_socket.listening(path, self._mode, self._group)
        self._at_path = unix_socket.identity(path)
        return sock

    def _accept(self, listener: socket.socket) -> None:
        """Hand on each connection until the listener is closed."""
        while not self._stopping.is_set():
            try:
                sock, _ = listener.accept()
            except OSError as error:
                if not self._stopping.is_set() and listener.fileno() >= 0:
                    log.warning("cannot accept: %s", error)
                    self._stopping.wait(AGAIN_S)
                continue
            self._admit(sock)
