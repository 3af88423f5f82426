"""Parses and validates request heads of HTTP/1.1, and writes response heads. No sockets, no clock.

A header block is accepted whole or refused with an HTTP status that names the reason. Contradictory lengths, chunked
bodies and bodies beyond the limits are refused before any byte of them is read. The connection that heads are a part of
is `edgesplit.http1.server_connection`.
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
"""End of a header block."""
CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
_REASONS = {int(status): status.phrase for status in HTTPStatus}


class Refused(Exception):
    """The request is refused: answer with `status` and close the connection."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.status = status


@dataclass
class Head:
    """A request's header block; the `on_` methods are httptools' parser callbacks."""

    method: str = ""
    url: bytes = b""
    version: str = "1.1"
    headers: dict[str, str] = field(default_factory=dict)
    names: list[str] = field(default_factory=list)
    is_complete: bool = False

    def on_url(self, url: bytes) -> None:
        self.url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        key, text = name.decode("latin-1").lower(), value.decode("latin-1").strip()
        self.headers[key] = f"{self.headers[key]}, {text}" if key in self.headers else text
        self.names.append(key)

    def on_headers_complete(self) -> None:
        self.is_complete = True

    @property
    def keep_alive(self) -> bool:
        """Whether the client keeps the connection for another request."""
        options = {option.strip().lower() for option in self.headers.get("connection", "").split(",")}
        return "close" not in options and (self.version == "1.1" or "keep-alive" in options)


def parse_head(block: bytes) -> Head:
    """Parse the header block `block`, which includes its final empty line. Raises Refused for a block that is not a
    valid request."""
    head = Head()
    parser = httptools.HttpRequestParser(head)
    try:
        parser.feed_data(block)
    except httptools.HttpParserUpgrade:
        pass  # RFC 9110 7.8: a server may ignore Upgrade
    except httptools.HttpParserError as error:
        raise Refused(400, f"not an HTTP request: {error}") from error
    if not head.is_complete:
        raise Refused(400, "not an HTTP request")
    head.method, head.version = parser.get_method().decode("latin-1"), parser.get_http_version()
    if head.version not in ("1.0", "1.1"):
        raise Refused(505, f"HTTP/{head.version} is not supported here")
    return head


def body_length(head: Head) -> int:
    """Content length in bytes of the request's body. Raises Refused if it is ambiguous, chunked or above the limit."""
    lengths, chunked = head.names.count("content-length"), "transfer-encoding" in head.names
    if lengths > 1 or (lengths and chunked):  # RFC 9112 6.3: request smuggling
        raise Refused(400, "the length of the body is given twice")
    if chunked:
        raise Refused(411, "send a Content-Length: chunked bodies are not supported")
    text = head.headers.get("content-length", "0")
    if not (text.isascii() and text.isdigit() and len(text) <= 18):
        raise Refused(400, "Content-Length is not a number")
    length = int(text)
    if length > LIMITS.http_body_bytes:
        raise Refused(413, f"a body of {length} bytes, at most {LIMITS.http_body_bytes}")
    return length


def split_target(url: bytes) -> tuple[str, str]:
    """Decoded path and raw query of a request target in origin or absolute form. Raises Refused for a malformed
    path."""
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


class ParsedHead(NamedTuple):
    """A parsed and validated header block."""

    head: Head
    length: int
    path: str
    query: str
    keep_alive: bool


def parse_request_head(block: bytes) -> ParsedHead:
    """Parse and validate the header block `block`. Raises Refused."""
    head = parse_head(block)
    return ParsedHead(head, body_length(head), *split_target(head.url), head.keep_alive)


def expects_continue(head: Head) -> bool:
    """Whether the client waits for 100 Continue before it sends the body (RFC 9110 10.1.1). Raises Refused for any
    other expectation."""
    expected = head.headers.get("expect")
    if expected is None or head.version == "1.0":
        return False
    if expected.lower() != "100-continue":
        raise Refused(417, "the only supported expectation is 100-continue")
    return True


def encode_head(status: int, headers: Mapping[str, str], length: int, *, keep_alive: bool) -> bytes:
    """Status line and headers of a response with a body of `length` bytes. ValueError for a header with a line break,
    which is a programming error."""
    lines = "".join([f"{name}: {value}\r\n" for name, value in headers.items()])
    if not lines.count("\r") == lines.count("\n") == len(headers):
        broken = next(name for name, value in headers.items() if "\r" in f"{name}{value}" or "\n" in f"{name}{value}")
        raise ValueError(f"line break in header {broken!r}")
    return (
        f"HTTP/1.1 {status} {_REASONS.get(status, 'Unknown')}\r\n{lines}content-length: {length}\r\n"
        f"connection: {'keep-alive' if keep_alive else 'close'}\r\n\r\n"
    ).encode("latin-1", "replace")
