"""Identifies the client of an API connection by its TLS certificate, and bounds its request heads.

TLS verifies the chain before a request is read; this module passes the certificate's name and serial number to the
application, which decides what they permit. uvicorn does neither: it hides the client certificate from the application,
and it does not limit a request head. A head that is too long or does not end in time closes its connection, and so does
a handshake that does not end (`HandshakeDeadlineLoop`).
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Awaitable, Callable, MutableMapping
from dataclasses import dataclass
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from edgesplit.trust.identity import peer_name

SCOPE = "edgesplit.peer"
"""Key of the `Peer` (or None) in the ASGI scope."""
HEAD_BYTES = 65_536
"""Limit of a request line with headers, give or take one read from the socket."""
HEAD_S = 20.0
"""Seconds from the connection, or from a request's first byte, to the end of its headers."""
HANDSHAKE_S = 20.0
"""Seconds from the connection to the end of the TLS handshake."""
_Scope = MutableMapping[str, Any]
_Application = Callable[[_Scope, Any, Any], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class Peer:
    """A client certificate of one of our authorities, verified in the handshake."""

    name: str
    serial: int


class HandshakeDeadlineLoop(asyncio.SelectorEventLoop):
    """Event loop whose TLS servers close a connection without a handshake in time. uvicorn has no option for it, and
    asyncio's default is a minute."""

    handshake_timeout_s = HANDSHAKE_S

    async def create_server(self, *arguments: Any, **options: Any) -> asyncio.Server:
        """A server with that timeout, where it has TLS."""
        if options.get("ssl") is not None:
            options.setdefault("ssl_handshake_timeout", self.handshake_timeout_s)
        return await super().create_server(*arguments, **options)


class PeerAwareHttp(HttpToolsProtocol):
    """uvicorn's HTTP protocol; adds the connection's `Peer` (None without a certificate) to each request's scope."""

    head_timeout_s = HEAD_S

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """The TLS handshake is complete: read the client certificate and start the timeout of the first head."""
        super().connection_made(transport)
        self.app = _with_peer(self.app, parse_peer(transport.get_extra_info("ssl_object")))
        self._head_bytes = 0
        self._head_timeout = self.loop.call_later(self.head_timeout_s, transport.close)

    def data_received(self, data: bytes) -> None:
        """Parse bytes, which may belong to several requests; close the connection if the current head is too long."""
        super().data_received(data)
        if not self._head_timeout.cancelled():
            self._head_bytes += len(data)
            if self._head_bytes > HEAD_BYTES:
                self.transport.close()

    def on_message_begin(self) -> None:
        """The first byte of a request: restart the head's timeout and size."""
        super().on_message_begin()
        self._head_timeout.cancel()
        self._head_bytes = 0
        self._head_timeout = self.loop.call_later(self.head_timeout_s, self.transport.close)

    def on_headers_complete(self) -> None:
        """The head is complete: cancel its timeout; the body's limits are the application's (`request_limits`)."""
        self._head_timeout.cancel()
        super().on_headers_complete()

    def connection_lost(self, exc: Exception | None) -> None:
        """The connection is closed: cancel the timeout."""
        self._head_timeout.cancel()
        super().connection_lost(exc)


def parse_peer(tls: ssl.SSLObject | None) -> Peer | None:
    """The client certificate that the handshake verified; None without one."""
    certificate = tls.getpeercert() if tls is not None else None
    name = peer_name(tls) if tls is not None else None
    return Peer(name, int(str(certificate["serialNumber"]), 16)) if certificate and name is not None else None


def _with_peer(application: _Application, peer: Peer | None) -> _Application:
    async def with_peer(scope: _Scope, receive: Any, send: Any) -> None:
        scope[SCOPE] = peer
        await application(scope, receive, send)

    return with_peer
