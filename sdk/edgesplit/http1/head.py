"""The head of a request of HTTP/1.1, read and judged, and that of an answer, written. No sockets, no clock.

Promises: a header block is taken whole or refused with a status that says why; two lengths, chunked bodies and bodies
beyond every bound are refused before a byte of them is read. Both servers of edgesplit read heads here alone: the one
with a thread per connection (`http1`) and the offload server's (`edgesplit_offload.frontend.connection`).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import NamedTuple
from urllib.parse import unquote

import httptools

from edgesplit.limits import LIMITS

END = b"\r\n\r\n"
"""Of a header block."""
CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
_REASONS = {int(status): status.phrase for status in HTTPStatus}


class Refused(Exception):
    """This peer gets `status` and is left."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.status = status


@dataclass
class Head:
    """A request's header block, as httptools reports it."""

    method: str = ""
    url: bytes = b""
    version: str = "1.1"
    headers: dict[str, str] = field(default_factory=dict)
    seen: list[str] = field(default_factory=list)
    complete: bool = False

    def on_url(self, url: bytes) -> None:
        self.url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        key, text = name.decode("latin-1").lower(), value.decode("latin-1").strip()
        self.headers[key] = f"{self.headers[key]}, {text}" if key in self.headers else text
        self.seen.append(key)

    def on_headers_complete(self) -> None:
        self.complete = True

    @property
    def keep_alive(self) -> bool:
        """Does the client want another request on this connection?"""
        words = {word.strip().lower() for word in self.headers.get("connection", "").split(",")}
        return "close" not in words and (self.version == "1.1" or "keep-alive" in words)


def parse_head(block: bytes) -> Head:
    """The header block `block`, which ends with its empty line; raises the refusal that it deserves."""
    head = Head()
    parser = httptools.HttpRequestParser(head)
    try:
        parser.feed_data(block)
    except httptools.HttpParserUpgrade:
        pass  # RFC 9110 7.8: a server may ignore Upgrade
    except httptools.HttpParserError as error:
        raise Refused(400, f"not an HTTP request: {error}") from error
    if not head.complete:
        raise Refused(400, "not an HTTP request")
    head.method, head.version = parser.get_method().decode("latin-1"), parser.get_http_version()
    if head.version not in ("1.0", "1.1"):
        raise Refused(505, f"HTTP/{head.version} is not spoken here")
    return head


def body_length(head: Head) -> int:
    """How many bytes follow this header block; raises the refusal where that is unsure or too much."""
    lengths, chunked = head.seen.count("content-length"), "transfer-encoding" in head.seen
    if lengths > 1 or (lengths and chunked):  # RFC 9112 6.3: request smuggling
        raise Refused(400, "the length of the body is given twice")
    if chunked:
        raise Refused(411, "send a Content-Length: chunked bodies are not taken")
    text = head.headers.get("content-length", "0")
    if not (text.isascii() and text.isdigit() and len(text) <= 18):
        raise Refused(400, "Content-Length is not a number")
    length = int(text)
    if length > LIMITS.http_body_bytes:
        raise Refused(413, f"a body of {length} bytes, at most {LIMITS.http_body_bytes}")
    return length


def split_target(url: bytes) -> tuple[str, str]:
    """Decoded path and raw query of a request target, in origin or absolute form."""
    if url[:1] == b"/" and b"%" not in url:
        plain, _, rest = url.partition(b"?")
        if plain.isascii():
            return plain.decode("ascii"), rest.decode("latin-1")
    target = re.sub(r"^https?://[^/?]*", "", url.decode("latin-1"), flags=re.IGNORECASE)
    path, _, query = target.partition("?")
    try:
        decoded = unquote(path, errors="strict") or "/"
    except UnicodeDecodeError as error:
        raise Refused(400, "the path is not UTF-8") from error
    if not decoded.startswith("/"):
        raise Refused(400, "the path does not begin with /")
    return decoded, query


class Asked(NamedTuple):
    """What a header block asks."""

    head: Head
    length: int
    path: str
    query: str
    keep_alive: bool


def asked_by(block: bytes) -> Asked:
    """What the header block `block` asks; raises the refusal that it deserves."""
    head = parse_head(block)
    return Asked(head, body_length(head), *split_target(head.url), head.keep_alive)


def waits_for_leave(head: Head) -> bool:
    """RFC 9110 10.1.1: does the client wait for leave to send its body? Raises the refusal of any other expectation."""
    expected = head.headers.get("expect")
    if expected is None or head.version == "1.0":
        return False
    if expected.lower() != "100-continue":
        raise Refused(417, "only 100-continue can be expected")
    return True


def head_bytes(status: int, headers: Mapping[str, str], length: int, *, keep: bool) -> bytes:
    """Status line and headers. A header with a line break in it is a programming error and is never sent."""
    told = "".join([f"{name}: {value}\r\n" for name, value in headers.items()])
    if not told.count("\r") == told.count("\n") == len(headers):
        broken = next(name for name, value in headers.items() if "\r" in f"{name}{value}" or "\n" in f"{name}{value}")
        raise ValueError(f"line break in header {broken!r}")
    return (
        f"HTTP/1.1 {status} {_REASONS.get(status, 'Unknown')}\r\n{told}content-length: {length}\r\n"
        f"connection: {'keep-alive' if keep else 'close'}\r\n\r\n"
    ).encode("latin-1", "replace")
