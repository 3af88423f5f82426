"""Addresses of servers that are not ours, as a plan names them: any that speaks the Open Inference Protocol over HTTP.

    triton://host[:port]             Triton over plain HTTP, port 8000 where none is given
    http[s]://host[:port][/path]     any other; the path is what stands before /v2

They are used as they are: without our certificates, headers or zstd. Triton alone is known to undo gzip.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final
from urllib.parse import urlsplit

from edgesplit.errors import UsageError

SCHEMES: Final = {"triton": 8000, "http": 80, "https": 443}
"""With the port that each means."""
LONGEST: Final = 500


@dataclass(frozen=True, slots=True)
class ForeignServer:
    """Where one is."""

    host: str
    port: int
    path: str = ""
    """Before `/v2`; begins with a slash where it is not empty."""
    tls: bool = False
    unpacks_gzip: bool = False
    """Triton does; of others it is not known."""

    @classmethod
    def parse(cls, text: str) -> ForeignServer:
        """UsageError, saying what would do, unless `text` is such an address."""
        try:
            parts = urlsplit(text)
            port = parts.port
        except ValueError as error:
            raise _not_one(text, str(error)) from error
        if parts.scheme not in SCHEMES or not parts.hostname:
            raise _not_one(text, "no known scheme, or no host")
        if len(text) > LONGEST or not text.isprintable() or not text.isascii() or " " in text:
            raise _not_one(text, "too long, or letters that no address has")
        if parts.username is not None or parts.query or parts.fragment:
            raise _not_one(text, "it may hold no user, query or fragment: a plan is no place for secrets")
        if port == 0:
            raise _not_one(text, "port 0 is nobody's")
        path = parts.path.rstrip("/")
        if path.endswith("/v2"):
            path = path.removesuffix("/v2")
        triton = parts.scheme == "triton"
        return cls(parts.hostname, port or SCHEMES[parts.scheme], path, parts.scheme == "https", triton)

    @property
    def url(self) -> str:
        """The same as a URL that an HTTP client takes."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{'https' if self.tls else 'http'}://{host}:{self.port}{self.path}"


def _not_one(text: str, why: str) -> UsageError:
    return UsageError(
        f"not the address of an inference server: {text[:200]!r} ({why}); it is triton://HOST[:PORT] for Triton, or"
        " http(s)://HOST[:PORT] for any that speaks the Open Inference Protocol"
    )
