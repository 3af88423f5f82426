"""One connection's requests and answers, step by step: whatever is there is taken, nothing is waited for.

Each step takes the conversation on, or says that it can go no further before something happens: bytes, room to write,
an answer. Promises: whoever answers sees only whole requests of bounded size, one at a time; whatever else arrives is
refused with its reason and the connection ends; neither reading nor writing may take longer than `LIMITS` allows.
Everything here is called by the thread that leads (`loop`).
"""

from __future__ import annotations

import contextlib
import logging
import math
import socket
from collections.abc import Callable, Sequence
from time import monotonic
from typing import Protocol

import numpy as np

from edgesplit.http1.head import CONTINUE, END, Asked, Refused, asked_by, head_bytes, waits_for_leave
from edgesplit.http1.server import Left, Request, Response, refusal_response
from edgesplit.limits import LIMITS
from edgesplit_offload.frontend.event_loop import GONE, READABLE
from edgesplit_offload.frontend.transport import Part, Wire
from edgesplit_offload.scheduling.arrivals import Habit

log = logging.getLogger(__name__)

LINGER_S = 1.0
"""How long a refused peer is listened to, so that the refusal is not lost in a connection reset."""
_LINGER_BYTES = 32 * LIMITS.http_header_bytes
HEAD_BYTES = 16_384
"""Read at once while a head is wanted: small requests come whole."""
_EXPECTED_BYTES = 1 << 20
"""Of a body that comes again: room for more is made only once its head is there."""


class Host(Protocol):
    """Whom a conversation is with."""

    scratch: memoryview
    """Room for what is read of a head; whoever leads uses it."""
    is_stopping: bool

    def begin(self, length: int) -> None:
        """A request with a body of so many bytes comes; raises its refusal."""
        ...

    def end(self, length: int) -> None:
        """One that had begun is over."""
        ...

    def route(self, asked: Asked) -> object:
        """Whatever can be known of requests with this head before there is one: handed to `asked` with each."""
        ...

    def asked(self, conversation: Conversation, request: Request, route: object) -> None:
        """A request is whole: `answer` is to be called some time."""
        ...

    def closed(self, conversation: Conversation) -> None:
        """It is over; the socket is still open."""
        ...

    def soon(self, call: Callable[[], object]) -> None:
        """Have that called, when others had their turn."""
        ...


class Conversation:
    """From the first byte to the last."""

    def __init__(self, host: Host, sock: socket.socket, wire: Wire) -> None:
        self._host = host
        self._sock = sock
        self._wire = wire
        self.habit = Habit(sock.fileno())
        self._step: Callable[[], bool] = self._open
        self._is_readable = True
        self._left = bytearray()
        self._searched = 0
        self._block = b""
        self._comes_again = False
        """Is the next request received as if its head were the last one's?"""
        self._asked: Asked | None = None
        self._route: object = None
        self._body = memoryview(b"")
        self._got = 0
        self._begun: int | None = None
        self._out: Sequence[Part] = ()
        self._after: Callable[[], None] | None = None
        self._keep = True
        self._until = monotonic() + LIMITS.handshake_s
        self._slowest = math.inf
        self._drained = 0
        self.is_gone = False
        """Has the peer closed its side, so that nobody will read the answer?"""
        self.is_over = False

    def ready(self, event: int = READABLE) -> None:
        """Something happened at the socket."""
        if event & READABLE:
            self._is_readable = True
            if event & GONE:
                self.is_gone = True
        self.go_on()

    def go_on(self) -> None:
        """As far as it goes."""
        try:
            while not self.is_over and self._step():
                pass
        except Refused as refusal:
            self._refuse(refusal)
        except (OSError, Left) as error:  # ssl.SSLError is an OSError
            log.debug("connection ended: %s", error)
            self.close()
        except Exception:  # a fault of ours ends this connection, and no other
            log.exception("a connection failed")
            self.close()

    def answer(self, response: Response) -> None:
        """This is the answer to the request that is whole."""
        self._after = response.after
        if self.is_over:
            self._answered()
            return
        assert self._asked is not None
        keep = self._keep = self._asked.keep_alive and not self._host.is_stopping
        self._step = self._write
        length = sum(map(len, response.body))
        try:
            head = head_bytes(response.status, response.headers, length, keep=keep)
        except ValueError:
            log.exception("an answer that cannot be sent")
            self.close()
            return
        self._out = [head] if self._asked.head.method == "HEAD" else [head, *response.body]
        self._until = monotonic() + LIMITS.handshake_s + length / LIMITS.http_bytes_per_s

    def is_late(self, now: float) -> bool:
        """Has it taken longer than it may? It is over then, or will be."""
        if now <= self._until:
            return False
        if self._step == self._read_body and self._has_moved():
            return False
        if self._step in (self._read_head, self._read_body) and (self._left or self._begun is not None):
            what = "the header block took too long" if self._begun is None else "the body came too slowly"
            self._refuse(Refused(408, what))
        else:
            log.debug("connection ended: idle, or too slow")
            self.close()
        return True

    def close(self) -> None:
        """End it now."""
        if self.is_over:
            return
        self.is_over = True
        self._host.closed(self)
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)
        with contextlib.suppress(OSError):
            self._sock.close()
        if self._step != self._wait:  # else the answer still comes
            self._answered()
        self._out = ()

    # Steps: True where the next one may be taken

    def _open(self) -> bool:
        if not self._wire.opened():
            return False
        self._until = monotonic() + LIMITS.idle_connection_s
        self._step = self._read_head
        return True

    def _read_head(self) -> bool:
        """The next header block. Its first byte may take as long as a connection may idle, the whole block may not."""
        block = self._next_block() if self._left else None
        if block is None:
            return self._receive_head()
        if block != self._block:  # clients ask the same thing again and again
            self._asked = asked_by(block)
            self._route, self._block = self._host.route(self._asked), block
            self._comes_again = (
                0 < self._asked.length <= _EXPECTED_BYTES and len(block) < HEAD_BYTES // 2
                and "expect" not in self._asked.head.headers
            )  # fmt: skip
        assert self._asked is not None
        length, waits = self._asked.length, waits_for_leave(self._asked.head)
        self._host.begin(length)
        self._begun = length
        if not length:
            self._whole(b"")
            return True
        if waits and len(self._left) < length and self._wire.send([CONTINUE]):
            raise Left("it has not read its last answer")
        self._begin_body(length)
        return True

    def _next_block(self) -> bytes | None:
        """Taken out of what is left, if it is there whole."""
        left = self._left
        while left[:2] == b"\r\n":  # RFC 9112 2.2: empty lines before a request are ignored
            del left[:2]
            self._searched = 0
        end = left.find(END, self._searched)
        if end >= 0 and end + len(END) <= LIMITS.http_header_bytes:
            block = bytes(left[: end + len(END)])
            del left[: end + len(END)]
            self._searched = 0
            return block
        if end >= 0 or len(left) > LIMITS.http_header_bytes:
            raise Refused(431, f"a header block of more than {LIMITS.http_header_bytes} bytes")
        self._searched = max(0, len(left) - len(END))
        return None

    def _receive_head(self) -> bool:
        if not self._is_readable:
            return False
        if self._comes_again and not self._left:
            return self._receive_again()
        scratch = self._host.scratch
        count = self._received(scratch)
        if count is None:
            return False
        if not self._left:
            self._until = monotonic() + LIMITS.handshake_s
        self._left += scratch[:count]
        return True

    def _receive_again(self) -> bool:
        """The next request, whose head is the last one's, mostly: its body is received to where it belongs."""
        block, asked, scratch = self._block, self._asked, self._host.scratch
        assert asked is not None
        begin, body = len(block), np.empty(asked.length, np.uint8).data
        head, beyond = scratch[:begin], scratch[begin:]
        count = self._received(head, body, beyond)
        if count is None:
            return False
        got = count - begin
        if got < 0 or bytes(head) != block:
            self._until = monotonic() + LIMITS.handshake_s
            for room in (head, body, beyond):
                self._left += room[:count]
                count = max(0, count - len(room))
            return True
        if got > len(body):
            self._left += beyond[: got - len(body)]
        self._host.begin(len(body))
        self._begun = len(body)
        self._await(body, min(got, len(body)))
        return True

    def _begin_body(self, length: int) -> None:
        body = np.empty(length, np.uint8).data
        got = min(length, len(self._left))
        if got:
            body[:got] = self._left[:got]
            del self._left[:got]
        self._await(body, got)

    def _await(self, body: memoryview, got: int) -> None:
        """The rest of this body, of which so much is there."""
        length = len(body)
        self._body, self._got = body, got
        now = monotonic()
        self._slowest = now + LIMITS.handshake_s + length / LIMITS.http_bytes_per_s
        self._until = min(self._slowest, now + LIMITS.handshake_s)
        self._step = self._read_body

    def _read_body(self) -> bool:
        """Exactly as many bytes as were told, into memory of their own; what lies behind them is the next request."""
        body, got, beyond = self._body, self._got, self._host.scratch
        while got < len(body):
            count = self._received(body[got:] if got else body, beyond) if self._is_readable else None
            if count is None:
                if got > self._got:
                    self._got = got
                    self._until = min(self._slowest, monotonic() + LIMITS.handshake_s)
                return False
            got += count
        if got > len(body):
            self._left += beyond[: got - len(body)]
        self._body = memoryview(b"")
        self._whole(body)
        return True

    def _has_moved(self) -> bool:
        """Whether more of the body came since: it is read now, and has as long again."""
        before = self._got
        self._is_readable = True
        self.go_on()
        return self.is_over or self._step != self._read_body or (self._got > before and monotonic() <= self._slowest)

    def _whole(self, body: memoryview | bytes) -> None:
        asked = self._asked
        assert asked is not None
        self._step, self._until = self._wait, math.inf
        request = Request(
            asked.head.method, asked.path, asked.query, asked.head.headers, body, self._wire.peer,
            self._wire.peer_serial, self._has_gone,
        )  # fmt: skip
        self._host.asked(self, request, self._route)

    def _wait(self) -> bool:
        """For the answer. The next request is not read meanwhile."""
        return False

    def _write(self) -> bool:
        self._out = self._wire.send(self._out)
        if self._out:
            return False
        self._answered()
        if not self._keep:
            self.close()
            return False
        self._step = self._read_head
        self._until = monotonic() + (LIMITS.handshake_s if self._left else LIMITS.idle_connection_s)
        if self._left or self._is_readable:  # the next request is here, or it is not known: after the others
            self._host.soon(self.go_on)
        return False

    def _linger(self) -> bool:
        """What a refused peer still sends is read and thrown away for a while."""
        count = self._wire.receive(self._host.scratch)
        if count is None:
            return False
        self._drained += count
        if not count or self._drained > _LINGER_BYTES:
            self.close()
            return False
        return True

    def _received(self, *rooms: memoryview) -> int | None:
        """What came into these, and whether there may be more. The end of all is told together with the last bytes, and
        still to be read."""
        count = self._wire.receive(*rooms)
        self._is_readable = count is not None and (self.is_gone or not self._wire.is_drained)
        if count == 0:
            raise Left("closed by the peer")
        return count

    def _has_gone(self) -> bool:
        return self.is_gone

    def _answered(self) -> None:
        """The request is over, whether its answer went out or not."""
        if self._begun is not None:
            self._host.end(self._begun)
            self._begun = None
        after, self._after = self._after, None
        if after is not None:
            after()

    def _refuse(self, refusal: Refused) -> None:
        """Say why, then listen a while: closing at once would reset the connection before the peer has read it."""
        response = refusal_response(refusal)
        length = sum(map(len, response.body))
        try:
            self._wire.send([head_bytes(response.status, response.headers, length, keep=False), *response.body])
            self._sock.shutdown(socket.SHUT_WR)
        except OSError as error:
            log.debug("refused peer left: %s", error)
            self.close()
            return
        self._answered()
        self._step, self._until = self._linger, monotonic() + LINGER_S
        self._host.soon(self.go_on)
