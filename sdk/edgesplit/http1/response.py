"""An HTTP response read without sockets: bytes go in, one whole reply comes out, and what it says as an error.

Promises: a reply is whole and of bounded size, or there is none; what is no HTTP response is a MalformedMessage, one
that ends early a LinkError; bytes behind a reply are never taken for the next one's. The header block is parsed by
httptools (llhttp, no leniency), a body of known length is received where it stays.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import httptools
import msgspec

from edgesplit.errors import (
    Busy,
    DeadlineExceeded,
    Dropped,
    EdgeError,
    InferenceFailed,
    LinkError,
    MalformedMessage,
    NotFound,
    UsageError,
)
from edgesplit.limits import LIMITS

_END = b"\r\n\r\n"
PIECE = 16_384
_LENGTH = re.compile(r"[0-9]{1,18}")


@dataclass(frozen=True)
class Reply:
    """An HTTP response, whole."""

    status: int
    headers: Mapping[str, str]
    """By lower-case name."""
    body: memoryview


def new_scratch() -> memoryview:
    """Memory for the parts of responses that do not stay where they are received."""
    return memoryview(bytearray(PIECE))


class Known(NamedTuple):
    """What a header block said that came before, of a response whose length was told and that others may follow:
    servers answer in the same words again and again."""

    block: bytes
    status: int
    headers: Mapping[str, str]
    length: int


class Incoming:
    """One response on its way. Receive into `buffer()`, tell `received` how much that was, until it gives the reply."""

    def __init__(self, scratch: memoryview | None = None, known: Known | None = None) -> None:
        """`scratch`: memory to receive into, of `PIECE` bytes, that is used for nothing else meanwhile. `known`: the
        header block of the reply before, which is not read again where it is the same."""
        self._scratch = scratch if scratch is not None else new_scratch()
        self.known = known
        """The header block that is known now."""
        self._head = bytearray()
        self._has_head = False
        self._parser: Any = None
        self._status = 0
        self._headers: dict[str, str] = {}
        self._body = memoryview(b"")
        self._got = 0
        self._growing: bytearray | None = None
        """A body whose length is not told beforehand."""
        self._until_close = False
        self._complete = False
        self._extra = False
        self.keep = False
        """May the connection be used again? Known with the reply."""

    def buffer(self) -> memoryview:
        """Where the next bytes are to be received."""
        if not self._has_head or self._growing is not None:
            return self._scratch
        return self._body[self._got :]

    def received(self, count: int) -> Reply | None:
        """`count` bytes have come, none at the connection's end: the reply, once it is whole."""
        if not count:
            return self._at_the_end()
        if not self._has_head:
            self._head += self._scratch[:count]
            return self._read_head()
        if self._growing is not None:
            return self._feed(bytes(self._scratch[:count]))
        self._got += count
        return self._whole() if self._got == len(self._body) else None

    # What httptools calls

    def on_header(self, name: bytes, value: bytes) -> None:
        """One header; several of a name are joined."""
        if self._complete:  # of a second response, which nobody asked for
            self._extra = True
            return
        key, text = name.decode("latin-1").lower(), value.decode("latin-1").strip()
        self._headers[key] = f"{self._headers[key]}, {text}" if key in self._headers else text

    def on_headers_complete(self) -> None:
        """Asked now, for the parser forgets it with the end of an empty body."""
        if not self._complete:
            self.keep = self._parser.should_keep_alive()

    def on_body(self, part: bytes) -> None:
        """A piece of a body of unknown length."""
        if self._complete or self._growing is None:
            self._extra = True
            return
        if len(self._growing) + len(part) > LIMITS.http_body_bytes:
            raise MalformedMessage("an endless body")
        self._growing += part

    def on_message_complete(self) -> None:
        """The parser has seen the response's end."""
        self._complete = True

    def _read_head(self) -> Reply | None:
        """Look for the header block's end; a reply if that was all. Interim responses (1xx) are passed over."""
        while (end := self._head.find(_END)) >= 0:
            block, rest = bytes(self._head[: end + len(_END)]), self._head[end + len(_END) :]
            if len(block) > LIMITS.http_header_bytes:
                break
            if self.known is not None and block == self.known.block:
                return self._begin_known(self.known, rest)
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

    def _begin_known(self, known: Known, rest: bytes | bytearray) -> Reply | None:
        self._has_head = self.keep = True
        self._status, self._headers = known.status, dict(known.headers)
        return self._take(known.length, rest)

    def _begin_body(self, rest: bytes, block: bytes) -> Reply | None:
        self._has_head = True
        text = self._headers.get("content-length")
        if self._complete:
            self.keep = self.keep and not rest
            return self._whole()
        if text is None:
            self._growing, self._until_close = bytearray(), "transfer-encoding" not in self._headers
            return self._feed(rest) if rest else None
        if not _LENGTH.fullmatch(text) or int(text) > LIMITS.http_body_bytes:
            raise MalformedMessage(f"no HTTP response: a body of {text[:80]!r} bytes")
        length = int(text)
        if self.keep:
            self.known = Known(block, self._status, dict(self._headers), length)
        return self._take(length, rest)

    def _take(self, length: int, rest: bytes | bytearray) -> Reply | None:
        """A body of that length, which begins with `rest`."""
        self._body = memoryview(bytearray(length))
        self._got = min(length, len(rest))
        self._body[: self._got] = rest[: self._got]
        self.keep = self.keep and len(rest) <= length  # more than was asked for: whatever it is, it is nobody's answer
        return self._whole() if self._got == length else None

    def _feed(self, data: bytes) -> Reply | None:
        """More of a body whose length is not told."""
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserCallbackError) as error:
            raise MalformedMessage(f"no HTTP response: {error}") from error
        if not self._complete:
            return None
        self.keep = self.keep and not self._extra
        return self._whole()

    def _at_the_end(self) -> Reply:
        if self._until_close and self._growing is not None:
            self.keep = False
            return self._whole()
        if not self._head and not self._has_head:
            raise LinkError("closed without an answer")
        raise LinkError("closed amid an answer")

    def _whole(self) -> Reply:
        body = self._body if self._growing is None else memoryview(self._growing)
        return Reply(self._status, self._headers, body)


def error_of(reply: Reply) -> EdgeError | None:
    """The error that a response tells of, or None for a good one."""
    if reply.status == 200:
        return None
    text = f"{_error_text(reply)} (HTTP {reply.status})"
    if reply.status == 404:
        return NotFound(text)
    if reply.status in (429, 503):
        busy = Busy(text)
        busy.retry_after_s = _retry_after_s(reply)
        return busy
    if reply.status == 410:
        return Dropped(text)
    if reply.status in (408, 502):
        return LinkError(text)
    if reply.status == 504:
        return DeadlineExceeded(text)
    return UsageError(text) if 400 <= reply.status < 500 else InferenceFailed(text)


def _error_text(reply: Reply) -> str:
    """The server's own words, cut to a line's length."""
    try:
        said = msgspec.json.decode(reply.body[: LIMITS.http_header_bytes], type=dict[str, Any])
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, ValueError):
        said = {}
    text = said.get("error")
    return " ".join(text.split())[:500] if isinstance(text, str) and text else "no reason given"


def _retry_after_s(reply: Reply) -> float:
    """How long the server asks to be left alone; 0 where it does not say."""
    text = reply.headers.get("retry-after", "")
    return float(text) if text.isascii() and text.isdigit() and len(text) < 6 else 0.0
