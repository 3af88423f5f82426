"""Where a server is: `http://host:port/prefix`, `https://…`, or `unix:///path/of/a/socket`."""

from __future__ import annotations

from dataclasses import dataclass
from urllib.parse import urlsplit

from edgesplit.errors import UsageError

UNIX = "unix://"


@dataclass(frozen=True)
class Address:
    """One server's."""

    host: str = "localhost"
    port: int = 0
    tls: bool = False
    prefix: str = ""
    """Of every path."""
    socket: str = ""
    """Path of its Unix socket; empty: TCP."""

    @classmethod
    def parse(cls, url: str) -> Address:
        """The address that `url` names; UsageError where it names none."""
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
        """For people, and for the Host header of TCP."""
        return self.socket or f"{self.host}:{self.port}"

    @property
    def host_header(self) -> str:
        """Of every request."""
        return "localhost" if self.socket else str(self)
