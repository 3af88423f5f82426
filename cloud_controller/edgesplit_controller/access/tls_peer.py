"""Who is at the other end of an API connection, by the certificate it showed.

TLS has verified the chain before a request is read; here the name and the serial number are handed to the application,
which decides what they may. uvicorn does not tell an application whom TLS has let in, nor does it bound what comes
before a request is known: a head that is too long, or does not come to its end, costs its connection.
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
HEAD_BYTES = 65_536
"""Of a request line and headers, give or take what is read at once."""
HEAD_S = 20.0
"""From the connection, or a request's first byte, to the end of its headers."""
_Scope = MutableMapping[str, Any]
_Application = Callable[[_Scope, Any, Any], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class Peer:
    """A certificate of our authority, shown in the handshake."""

    name: str
    serial: int


class TellingPeers(HttpToolsProtocol):
    """uvicorn's HTTP, with the `Peer` of the connection (None: it showed no certificate) in each request's scope."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """TLS is done when this is called."""
        super().connection_made(transport)
        self.app = _telling(self.app, peer_of(transport.get_extra_info("ssl_object")))
        self._head_bytes = 0
        self._head_ends = self.loop.call_later(HEAD_S, transport.close)

    def data_received(self, data: bytes) -> None:
        """Some bytes of one request or several."""
        super().data_received(data)
        if not self._head_ends.cancelled():
            self._head_bytes += len(data)
            if self._head_bytes > HEAD_BYTES:
                self.transport.close()

    def on_message_begin(self) -> None:
        """A request's first byte."""
        super().on_message_begin()
        self._head_ends.cancel()
        self._head_bytes = 0
        self._head_ends = self.loop.call_later(HEAD_S, self.transport.close)

    def on_headers_complete(self) -> None:
        """From here on it is the application's."""
        self._head_ends.cancel()
        super().on_headers_complete()

    def connection_lost(self, exc: Exception | None) -> None:
        """Nothing more will come."""
        self._head_ends.cancel()
        super().connection_lost(exc)


def peer_of(tls: ssl.SSLObject | None) -> Peer | None:
    """Whom the handshake verified; None for nobody."""
    shown = tls.getpeercert() if tls is not None else None
    name = peer_name(tls) if tls is not None else None
    return Peer(name, int(str(shown["serialNumber"]), 16)) if shown and name is not None else None


def _telling(application: _Application, peer: Peer | None) -> _Application:
    async def told(scope: _Scope, receive: Any, send: Any) -> None:
        scope[SCOPE] = peer
        await application(scope, receive, send)

    return told
