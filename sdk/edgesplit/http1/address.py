"""Parses server addresses: `http://host:port/prefix`, `https://…`, or `unix:///path/of/a/socket`."""

from __future__ import annotations

from dataclasses import dataclass
from urllib.parse import urlsplit

from edgesplit.errors import UsageError

UNIX = "unix://"


@dataclass(frozen=True)
class Address:
    """The address of one server."""

    host: str = "localhost"
    port: int = 0
    tls: bool = False
    prefix: str = ""
    """Prepended to the path of every request."""
    socket: str = ""
    """Path of the server's Unix socket; empty: TCP."""

    @classmethod
    def parse(cls, url: str) -> Address:
        """The address in `url`; UsageError if it is not one."""
        if url.startswith(UNIX):
            path = url[len(UNIX) :]
            if not path.startswith("/") or path.endswith("/") or "\0" in path:
                raise UsageError(f"not an address: {url[:200]!r} (as in unix:///run/edgesplit/agent.sock)")
            return cls(socket=path)
        try:
            parts = urlsplit(url)
            port = parts.port or (443 if parts.scheme == "https" else 80)
        except ValueError as error:
            raise UsageError(f"not an address: {url[:200]!r} ({error})") from error
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise UsageError(f"not an address: {url[:200]!r} (as in http://127.0.0.1:8600 or unix:///run/agent.sock)")
        return cls(parts.hostname, port, parts.scheme == "https", parts.path.rstrip("/"))

    def __str__(self) -> str:
        """For messages, and for the Host header over TCP."""
        return self.socket or f"{self.host}:{self.port}"

    @property
    def host_header(self) -> str:
        """Value of the Host header."""
        return "localhost" if self.socket else str(self)
