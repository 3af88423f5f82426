"""Listens on a TCP port or a Unix socket, with a thread that accepts connections and hands them to a callback.

An address that is unavailable is one clear error; running out of file descriptors only delays accepting; once `stop`
has returned, no more connections are handed on. What happens to a connection is the callback's concern.
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

RETRY_S = 0.1
"""Delay before accepting again after a failure, such as running out of file descriptors."""


def listening_socket(host: str, port: int) -> socket.socket:
    """A TCP socket that listens on `host` and `port`. UsageError, in one line, if the address is unavailable."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=128)
    except (OSError, OverflowError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UsageError(f"cannot listen on {host} port {port}: {reason}") from error


def server_url(host: str, port: int, *, tls: bool) -> str:
    """The URL under which clients reach a server on `host` and `port`."""
    return f"{'https' if tls else 'http'}://{f'[{host}]' if ':' in host else host}:{port}"


class Listener:
    """A listener on one TCP address, or on the Unix socket `path`, from `start` to `stop`."""

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
        """`admit` is called with each accepted connection, in the listener's thread."""
        self.host = host
        self._on_connection = admit
        self._port = port
        self._path = path
        self._mode = mode
        self._group = group
        self._socket_identity = (0, 0)
        self._listener: socket.socket | None = None
        self._thread: threading.Thread | None = None
        self._stopping = threading.Event()

    @property
    def port(self) -> int:
        """The port; 0 for a Unix socket. UsageError before `start`."""
        if self._listener is None:
            raise UsageError("the server has not been started")
        if self._path is not None:
            return 0
        return int(self._listener.getsockname()[1]) if self._listener.fileno() >= 0 else self._port

    def url(self, *, tls: bool) -> str:
        """The URL under which clients reach the listener."""
        return f"unix://{self._path}" if self._path is not None else server_url(self.host, self.port, tls=tls)

    def start(self) -> None:
        """Bind and accept. UsageError, in one line, if the address is unavailable."""
        self._listener = self._bind_path(self._path) if self._path else listening_socket(self.host, self._port)
        self._port = self.port
        name = f"http-{self._port}"
        self._thread = threading.Thread(target=self._accept, args=(self._listener,), name=name, daemon=True)
        self._thread.start()

    def stop(self, within_s: float) -> None:
        """Stop accepting; waits at most `within_s` seconds for the thread."""
        self._stopping.set()
        if self._path is not None:
            unix_socket.remove(self._path, self._socket_identity)
        if self._listener is not None:
            with contextlib.suppress(OSError):
                self._listener.shutdown(socket.SHUT_RDWR)
            self._listener.close()
        if self._thread is not None:
            self._thread.join(within_s)

    def _bind_path(self, path: Path) -> socket.socket:
        sock = unix_socket.bind_and_listen(path, self._mode, self._group)
        self._socket_identity = unix_socket.identity(path)
        return sock

    def _accept(self, listener: socket.socket) -> None:
        """Hand each connection to `admit` until the listener is closed."""
        while not self._stopping.is_set():
            try:
                sock, _ = listener.accept()
            except OSError as error:
                if not self._stopping.is_set() and listener.fileno() >= 0:
                    log.warning("cannot accept: %s", error)
                    self._stopping.wait(RETRY_S)
                continue
            self._on_connection(sock)
