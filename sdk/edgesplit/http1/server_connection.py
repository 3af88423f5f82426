"""Server side of one HTTP/1.1 connection, without sockets and without a clock: bytes in, events out.

Receive into `buffers()`, report the number of bytes to `on_received`, and do what `next_event` says until it needs data
again; answer a complete request by `encode_response` and `on_sent`. A request is complete and of bounded size, or
Refused with its reason; `deadline` bounds each wait, and `on_timeout` says what follows once it has passed. The times
passed in are of one monotonic clock. The chunks in which bytes arrive make no difference.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from enum import Enum, auto

from edgesplit.http1.head import END, ParsedHead, Refused, encode_head, expects_continue, parse_request_head
from edgesplit.lazy_import import np
from edgesplit.limits import LIMITS

Part = bytes | memoryview
SCRATCH_BYTES = 16_384
"""Bytes received at once while a header block is expected: small requests arrive whole."""
LINGER_S = 1.0
"""How long input of a refused peer is still received, so that the refusal is not lost to a connection reset."""
_LINGER_BYTES = 16 * 2**20
"""Most input of a refused peer that is received and dropped: a request is refused at its head, and its body comes."""
_PREPARED_BYTES = 1 << 20
"""Largest body for which memory is allocated before its header block has arrived, because the previous request was
alike."""


class PeerClosed(Exception):
    """The peer has disconnected, or the connection is to be closed: there is no response to send."""


class Event(Enum):
    """What the driver of a connection does next."""

    NEED_DATA = auto()
    """Receive into `buffers()`, and call `on_received`."""
    HEAD = auto()
    """`parsed` is the head of a request whose body follows: refuse it now, or go on."""
    CONTINUE = auto()
    """Send CONTINUE: the client waits for it before it sends the body (RFC 9110 10.1.1)."""
    REQUEST = auto()
    """`parsed` and `body` are a complete request: answer it. Further input is not read meanwhile (back-pressure)."""


class _State(Enum):
    """What is expected next. In order, and back to HEAD: HEAD, (REPEATED or ACCEPTED), BODY, ANSWER. REFUSED ends any
    of them."""

    HEAD = auto()
    REPEATED = auto()
    """The head was recognised, and its body is being received, but the driver has not seen the head."""
    ACCEPTED = auto()
    """The driver has seen the head, and has not refused it."""
    BODY = auto()
    ANSWER = auto()
    REFUSED = auto()


NEED_DATA, HEAD, CONTINUE, REQUEST = Event
_HEAD, _REPEATED, _ACCEPTED, _BODY, _ANSWER, _REFUSED = _State


def transfer_s(length: int) -> float:
    """Seconds within which `length` bytes must be received or sent."""
    slow = min(length, LIMITS.http_slow_bytes)
    return LIMITS.handshake_s + slow / LIMITS.http_bytes_per_s + (length - slow) / LIMITS.http_large_bytes_per_s


def progress_bytes(received: int) -> int:
    """Bytes that must arrive within `LIMITS.handshake_s`, after the first `received` of a body."""
    is_slow = received < LIMITS.http_slow_bytes
    return int((LIMITS.http_bytes_per_s if is_slow else LIMITS.http_large_bytes_per_s) * LIMITS.handshake_s)


def new_scratch() -> memoryview:
    """A receive buffer of `SCRATCH_BYTES`."""
    return memoryview(bytearray(SCRATCH_BYTES))


class ServerConnection:
    """The state of one connection."""

    def __init__(self, scratch: memoryview, now: float, *, prepares_bodies: bool = False) -> None:
        """`scratch`: a buffer that nothing else uses between `buffers()` and `on_received`. `prepares_bodies`: where a
        client repeats its head, head and body are received at once, the body into memory of its own; `buffers()`
        allocates that, so it should be called when there is something to receive."""
        self._scratch = scratch
        self._prepares_bodies = prepares_bodies
        self._state = _HEAD
        self._buffered = bytearray()
        self._searched = 0
        self._last_block = b""
        self._expects_repeat = False
        self._waits_for_continue = False
        self.parsed: ParsedHead | None = None
        """Head of the current request, the same object while the client repeats its head."""
        self.body: memoryview | bytes = b""
        self._received_bytes = 0
        self._received_at = now
        self._has_head_begun = False
        """Whether a byte of the next header block is here; blank lines before it are none."""
        self._progress_at = 0
        """Bytes of the body whose arrival extends the deadline."""
        self._body_s = 0.0
        self._body_deadline = math.inf
        self.deadline = now + LIMITS.handshake_s
        self.keep_alive = True
        """Whether another request may follow; set by `encode_response`."""

    @property
    def is_in_body(self) -> bool:
        """Whether the body of a request is being received."""
        return self._state is _BODY

    @property
    def received_bytes(self) -> int:
        """Bytes of the current body that have arrived."""
        return self._received_bytes

    def start(self, now: float) -> None:
        """Expect the first request, after the handshake."""
        self.deadline = now + LIMITS.idle_connection_s

    def buffers(self) -> tuple[memoryview, ...]:
        """The buffers for the next bytes, to be filled in order. Bytes behind a body go into the last one."""
        if self._state is _BODY:
            return memoryview(self.body)[self._received_bytes :], self._scratch
        if self._expects_repeat and self._state is _HEAD and not self._buffered:
            assert self.parsed is not None
            self.body, begin = np.empty(self.parsed.length, np.uint8).data, len(self._last_block)
            return self._scratch[:begin], self.body, self._scratch[begin:]
        return (self._scratch,)

    def on_received(self, count: int, now: float) -> None:
        """Process `count` bytes received into `buffers()`. PeerClosed at end of stream."""
        if not count:
            raise PeerClosed("closed by the peer")
        self._received_at = now
        if self._state is _HEAD:
            if self._expects_repeat and not self._buffered:
                self._receive_repeated(count)
            else:
                self._buffered += self._scratch[:count]
            if self._state is _HEAD and not self._has_head_begun and self._drop_blank_lines():
                self._has_head_begun, self.deadline = True, now + LIMITS.handshake_s
        elif self._state is _BODY:
            received, length = self._received_bytes + count, len(self.body)
            if received > length:
                self._buffered += self._scratch[: received - length]
                received = length
            self._received_bytes = received
            # Progress at the minimum rate extends the deadline, up to that of the whole body. A byte now and then does
            # not: most of a large body may have come fast, and the rest would hold its memory for hours.
            if received >= self._progress_at:
                self._progress_at = received + progress_bytes(received)
                self.deadline = min(self._body_deadline, now + LIMITS.handshake_s)
        else:
            self._received_bytes += count
            if self._received_bytes > _LINGER_BYTES:
                raise PeerClosed("a refused peer goes on sending")

    def next_event(self) -> Event:
        """The next event. Raises Refused for what is not a request that this server takes."""
        state = self._state
        if state is _BODY:
            if self._received_bytes < len(self.body):
                return NEED_DATA
            self._state, self.deadline = _ANSWER, math.inf
            return REQUEST
        if state is _HEAD:
            return HEAD if self._buffered and self._take_head() else NEED_DATA
        if state is _REPEATED:
            self._state = _BODY
            return HEAD
        if state is _ACCEPTED:
            return self._begin_body()
        return NEED_DATA

    def on_timeout(self) -> None:
        """The deadline has passed: raises Refused in the middle of a request, whose sender receives the reason, and
        PeerClosed otherwise."""
        if self._state is _BODY:
            progress = f"{self._received_bytes} of {len(self.body)} bytes"
            raise Refused(408, f"the body came too slowly: {progress}")
        if self._state is _HEAD and self._has_head_begun:
            raise Refused(408, "the header block took too long")
        raise PeerClosed("idle, or too slow")

    def encode_response(
        self, status: int, headers: Mapping[str, str], body: Sequence[Part], now: float, *, keep_alive: bool
    ) -> list[Part]:
        """The parts of the response to the current request. `keep_alive`: whether this side would take another request.
        ValueError for a header that cannot be sent."""
        assert self.parsed is not None
        length = sum(map(len, body))
        self.keep_alive = keep_alive and self.parsed.keep_alive
        self.deadline = now + transfer_s(length)
        self.body = b""
        head = encode_head(status, headers, length, keep_alive=self.keep_alive)
        return [head] if self.parsed.head.method == "HEAD" else [head, *body]

    def on_sent(self, now: float) -> bool:
        """The response was sent, and the next request may come; True if bytes of it are here."""
        self._state, self._received_at = _HEAD, now
        self._has_head_begun = self._drop_blank_lines()
        self.deadline = now + (LIMITS.handshake_s if self._has_head_begun else LIMITS.idle_connection_s)
        return bool(self._buffered)

    def encode_refusal(self, status: int, headers: Mapping[str, str], body: Sequence[Part], now: float) -> list[Part]:
        """The parts of the response to a peer that was refused. Its further input is received for a while and dropped:
        closing at once would reset the connection before the peer has read the response."""
        self._state, self._received_bytes, self.body = _REFUSED, 0, b""
        self.keep_alive = False
        self.deadline = now + LINGER_S
        return [encode_head(status, headers, sum(map(len, body)), keep_alive=False), *body]

    def _take_head(self) -> bool:
        """Take the next header block from the buffered bytes; False if it is incomplete."""
        buffered = self._buffered
        self._drop_blank_lines()
        end = buffered.find(END, self._searched) + len(END)
        if end < len(END) and len(buffered) <= LIMITS.http_header_bytes:
            self._searched = max(0, len(buffered) - len(END))
            return False
        if not len(END) <= end <= LIMITS.http_header_bytes:
            raise Refused(431, f"a header block of more than {LIMITS.http_header_bytes} bytes")
        block = bytes(buffered[:end])
        del buffered[:end]
        self._searched = 0
        if block != self._last_block:  # clients repeat the same header block
            self.parsed = parsed = parse_request_head(block)
            self._waits_for_continue, self._last_block = expects_continue(parsed.head), block
            self._body_s = transfer_s(parsed.length)
            self._expects_repeat = (
                self._prepares_bodies and 0 < parsed.length <= _PREPARED_BYTES and len(block) < SCRATCH_BYTES // 2
                and not self._waits_for_continue
            )  # fmt: skip
        self._state = _ACCEPTED
        return True

    def _drop_blank_lines(self) -> bool:
        """Drop the empty lines before a request (RFC 9112 2.2); whether a byte of its header block is here. They extend
        no deadline: a peer that sends nothing else is idle."""
        buffered = self._buffered
        while buffered[:2] == b"\r\n":
            del buffered[:2]
            self._searched = 0
        return bool(buffered) and buffered != b"\r"

    def _begin_body(self) -> Event:
        """Begin the body with what of it is here."""
        assert self.parsed is not None
        length = self.parsed.length
        self.body = body = np.empty(length, np.uint8).data if length else memoryview(b"")
        received = min(length, len(self._buffered))
        if received:
            body[:received] = self._buffered[:received]
            del self._buffered[:received]
        self._expect_body(_BODY, received)
        return CONTINUE if self._waits_for_continue and received < length else self.next_event()

    def _receive_repeated(self, count: int) -> None:
        """Process `count` bytes received into the three buffers for a request that repeats the last head."""
        begin, length = len(self._last_block), len(self.body)
        received = count - begin
        # Not a repetition: what was received, in whichever buffer it lies, is parsed as usual.
        if received < 0 or bytes(self._scratch[:begin]) != self._last_block:
            for buffer in (self._scratch[:begin], memoryview(self.body), self._scratch[begin:]):
                self._buffered += buffer[:count]
                count = max(0, count - len(buffer))
            return
        if received > length:
            self._buffered += self._scratch[begin : count - length]
            received = length
        self._expect_body(_REPEATED, received)

    def _expect_body(self, state: _State, received: int) -> None:
        """Expect the rest of the body, of which `received` bytes are here."""
        self._state, self._received_bytes = state, received
        self._progress_at = received + progress_bytes(received)
        self._body_deadline = self._received_at + self._body_s
        self.deadline = self._received_at + LIMITS.handshake_s
