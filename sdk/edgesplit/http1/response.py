"""Incremental HTTP response parser without sockets, and the error that a response stands for.

A reply is complete and of bounded size, or an error: MalformedMessage if it is not an HTTP response, LinkError if it
ends early. Bytes behind a reply are never taken for the next reply. The header block is parsed by httptools (llhttp, no
leniency); a body of known length is received in place.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import httptools
import msgspec

from edgesplit import errors
from edgesplit.decoding import DECODE_ERRORS
from edgesplit.errors import EdgeError, LinkError, MalformedMessage
from edgesplit.limits import LIMITS

_END = b"\r\n\r\n"
SCRATCH_BYTES = 16_384
_LENGTH = re.compile(r"[0-9]{1,18}")
_ERRORS: Mapping[int, type[EdgeError]] = {
    404: errors.NotFound, 408: LinkError, 410: errors.Dropped, 422: errors.InfeasibleLimits, 424: errors.Unsure,
    429: errors.Busy, 502: LinkError, 503: errors.Busy, 504: errors.DeadlineExceeded,
}  # fmt: skip
"""The error that a status stands for; others are a UsageError (4xx) or InferenceFailed."""


@dataclass(frozen=True)
class Reply:
    """A complete HTTP response."""

    status: int
    headers: Mapping[str, str]
    """By lower-case name."""
    body: memoryview


def new_scratch() -> memoryview:
    """A receive buffer of `SCRATCH_BYTES` for header blocks and bodies of unknown length."""
    return memoryview(bytearray(SCRATCH_BYTES))


class KnownHead(NamedTuple):
    """The last header block of a keep-alive response with a content length. Servers repeat the same block, which then
    need not be parsed again."""

    block: bytes
    status: int
    headers: Mapping[str, str]
    length: int


class IncomingResponse:
    """One response being received. Receive into `buffer()` and pass the byte count to `on_received` until it returns
    the reply."""

    def __init__(self, scratch: memoryview | None = None, known_head: KnownHead | None = None) -> None:
        """`scratch`: a buffer of `SCRATCH_BYTES` that nothing else uses meanwhile. `known_head`: the header block of
        the previous reply, which is not parsed again if it repeats."""
        self._scratch = scratch if scratch is not None else new_scratch()
        self.known_head = known_head
        """The last header block, for the next response."""
        self._head = bytearray()
        self._has_head = False
        self._parser: Any = None
        self._status = 0
        self._headers: dict[str, str] = {}
        self._body = memoryview(b"")
        self._received_bytes = 0
        self._unsized_body: bytearray | None = None
        """A body of unknown length, as far as it was received."""
        self._until_close = False
        self._complete = False
        self._extra = False
        self.keep_alive = False
        """Whether the connection can be reused; set when the reply is complete."""

    def buffer(self) -> memoryview:
        """The buffer for the next bytes."""
        if not self._has_head or self._unsized_body is not None:
            return self._scratch
        return self._body[self._received_bytes :]

    def on_received(self, count: int) -> Reply | None:
        """Process `count` received bytes, 0 at end of stream; returns the reply once it is complete."""
        if not count:
            return self._on_end_of_stream()
        if not self._has_head:
            self._head += self._scratch[:count]
            return self._read_head()
        if self._unsized_body is not None:
            return self._feed_parser(bytes(self._scratch[:count]))
        self._received_bytes += count
        return self._complete_reply() if self._received_bytes == len(self._body) else None

    # httptools' parser callbacks

    def on_header(self, name: bytes, value: bytes) -> None:
        """httptools callback: one header; repeated names are joined."""
        if self._complete:  # an unsolicited second response
            self._extra = True
            return
        key, text = name.decode("latin-1").lower(), value.decode("latin-1").strip()
        self._headers[key] = f"{self._headers[key]}, {text}" if key in self._headers else text

    def on_headers_complete(self) -> None:
        """httptools callback. Keep-alive is read here because the parser forgets it at the end of an empty body."""
        if not self._complete:
            self.keep_alive = self._parser.should_keep_alive()

    def on_body(self, part: bytes) -> None:
        """httptools callback: a piece of a body of unknown length."""
        if self._complete or self._unsized_body is None:
            self._extra = True
            return
        if len(self._unsized_body) + len(part) > LIMITS.http_body_bytes:
            raise MalformedMessage("a body of more than {LIMITS.http_body_bytes} bytes")
        self._unsized_body += part

    def on_message_complete(self) -> None:
        """httptools callback: the response has ended."""
        self._complete = True

    def _read_head(self) -> Reply | None:
        """Parse the header block once it is complete; returns the reply if it has no body. Interim responses (1xx) are
        skipped."""
        while (end := self._head.find(_END)) >= 0:
            block, rest = bytes(self._head[: end + len(_END)]), self._head[end + len(_END) :]
            if len(block) > LIMITS.http_header_bytes:
                break
            if self.known_head is not None and block == self.known_head.block:
                return self._begin_known(self.known_head, rest)
            self._parse(block)
            if 100 <= self._status < 200 and self._status != 101:
                self._head, self._complete = rest, False
                self._headers.clear()
                continue
            return self._begin_body(bytes(rest), block)
        if len(self._head) > LIMITS.http_header_bytes:
            raise MalformedMessage(f"no HTTP response: a header block of more than {LIMITS.http_header_bytes} bytes")
        if not b"HTTP/".startswith(bytes(self._head[:5])):
            raise MalformedMessage(f"no HTTP response: {bytes(self._head[:80])!r}")
        return None

    def _parse(self, block: bytes) -> None:
        self._parser = httptools.HttpResponseParser(self)
        try:
            self._parser.feed_data(block)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            raise MalformedMessage(f"no HTTP response: {error}") from error
        self._status = self._parser.get_status_code()

    def _begin_known(self, known_head: KnownHead, rest: bytes | bytearray) -> Reply | None:
        self._has_head = self.keep_alive = True
        self._status, self._headers = known_head.status, dict(known_head.headers)
        return self._begin_sized_body(known_head.length, rest)

    def _begin_body(self, rest: bytes, block: bytes) -> Reply | None:
        self._has_head = True
        text = self._headers.get("content-length")
        if self._complete:
            self.keep_alive = self.keep_alive and not rest
            return self._complete_reply()
        if text is None:
            self._unsized_body, self._until_close = bytearray(), "transfer-encoding" not in self._headers
            return self._feed_parser(rest) if rest else None
        if not _LENGTH.fullmatch(text) or int(text) > LIMITS.http_body_bytes:
            raise MalformedMessage(f"no HTTP response: a body of {text[:80]!r} bytes")
        length = int(text)
        if self.keep_alive:
            self.known_head = KnownHead(block, self._status, dict(self._headers), length)
        return self._begin_sized_body(length, rest)

    def _begin_sized_body(self, length: int, rest: bytes | bytearray) -> Reply | None:
        """Start a body of `length` bytes, which begins with `rest`."""
        self._body = memoryview(bytearray(length))
        self._received_bytes = min(length, len(rest))
        self._body[: self._received_bytes] = rest[: self._received_bytes]
        self.keep_alive = self.keep_alive and len(rest) <= length  # bytes behind the body are unsolicited
        return self._complete_reply() if self._received_bytes == length else None

    def _feed_parser(self, data: bytes) -> Reply | None:
        """Parse more of a body of unknown length."""
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserCallbackError) as error:
            raise MalformedMessage(f"no HTTP response: {error}") from error
        if not self._complete:
            return None
        self.keep_alive = self.keep_alive and not self._extra
        return self._complete_reply()

    def _on_end_of_stream(self) -> Reply:
        if self._until_close and self._unsized_body is not None:
            self.keep_alive = False
            return self._complete_reply()
        if not self._head and not self._has_head:
            raise LinkError("closed without an answer")
        raise LinkError("closed in the middle of an answer")

    def _complete_reply(self) -> Reply:
        body = self._body if self._unsized_body is None else memoryview(self._unsized_body)
        return Reply(self._status, self._headers, body)


def error_of(reply: Reply) -> EdgeError | None:
    """The error that a response stands for; None for status 200."""
    if reply.status == 200:
        return None
    otherwise = errors.UsageError if 400 <= reply.status < 500 else errors.InferenceFailed
    error = _ERRORS.get(reply.status, otherwise)(f"{_error_text(reply)} (HTTP {reply.status})")
    if isinstance(error, errors.Busy):
        error.retry_after_s = _retry_after_s(reply)
    return error


def _error_text(reply: Reply) -> str:
    """The server's error text, cut to one line."""
    try:
        message = msgspec.json.decode(reply.body[: LIMITS.http_header_bytes], type=dict[str, Any])
    except DECODE_ERRORS:
        message = {}
    text = message.get("error")
    return " ".join(text.split())[:500] if isinstance(text, str) and text else "no reason given"


def _retry_after_s(reply: Reply) -> float:
    """Seconds from the Retry-After header; 0 if absent."""
    text = reply.headers.get("retry-after", "")
    return float(text) if text.isascii() and text.isdigit() and len(text) < 6 else 0.0
