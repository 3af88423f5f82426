"""Addresses of third-party inference servers that a plan may use as offload target: any server with the Open Inference
Protocol over HTTP.

    triton://host[:port]             Triton over plain HTTP, port 8000 by default
    http[s]://host[:port][/path]     any other; the path is the part before /v2

They are used unmodified: without edgesplit's certificates, headers or zstd. Of these servers, only Triton is known to
accept gzip.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final
from urllib.parse import urlsplit

from edgesplit.errors import UsageError

SCHEMES: Final = {"triton": 8000, "http": 80, "https": 443}
"""URL schemes with their default ports."""
MAX_ADDRESS_CHARS: Final = 500


@dataclass(frozen=True, slots=True)
class ForeignServer:
    """Address of a third-party inference server."""

    host: str
    port: int
    path: str = ""
    """Path before `/v2`; begins with a slash unless it is empty."""
    tls: bool = False
    accepts_gzip: bool = False
    """True where the server is known to decompress gzip request bodies (Triton)."""

    @classmethod
    def parse(cls, text: str) -> ForeignServer:
        """Parse an address; UsageError lists the accepted forms."""
        try:
            parts = urlsplit(text)
            port = parts.port
        except ValueError as error:
            raise _bad_address(text, str(error)) from error
        if parts.scheme not in SCHEMES or not parts.hostname:
            raise _bad_address(text, "no known scheme, or no host")
        if len(text) > MAX_ADDRESS_CHARS or not text.isprintable() or not text.isascii() or " " in text:
            raise _bad_address(text, "too long, or invalid characters")
        if parts.username is not None or parts.query or parts.fragment:
            raise _bad_address(text, "a user, query or fragment is not allowed: plans are not secret")
        if port == 0:
            raise _bad_address(text, "port 0 is not valid")
        path = parts.path.rstrip("/")
        if path.endswith("/v2"):
            path = path.removesuffix("/v2")
        triton = parts.scheme == "triton"
        return cls(parts.hostname, port or SCHEMES[parts.scheme], path, parts.scheme == "https", triton)

    @property
    def url(self) -> str:
        """Base URL for an HTTP client."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{'https' if self.tls else 'http'}://{host}:{self.port}{self.path}"


def _bad_address(text: str, reason: str) -> UsageError:
    return UsageError(
        f"not the address of an inference server: {text[:200]!r} ({reason}); it is triton://HOST[:PORT] for Triton, or"
        " http(s)://HOST[:PORT] for any that speaks the Open Inference Protocol"
    )
