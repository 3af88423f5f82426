"""One persistent HTTP/1.1 connection of a client, on a blocking socket: TCP, TLS, or a Unix socket.

Every wait is bounded by what is left of the deadline, also when the server drips its answer byte by byte, or reads none
of the request. Parsing is `edgesplit.http1.response`, repeating `edgesplit.client.retry`.
"""

from __future__ import annotations

import array
import contextlib
import select
import socket
import ssl
from collections.abc import Callable, Iterator, Mapping, Sequence
from time import monotonic

from edgesplit.client.direct.grant import LANE_PATH
from edgesplit.client.direct.sync_channel import Lanes
from edgesplit.client.request import Answer, Question
from edgesplit.client.shared_memory import SEGMENT_PATH, Arena, offer
from edgesplit.errors import DeadlineExceeded, LinkError, MalformedMessage
from edgesplit.http1.address import Address
from edgesplit.http1.response import Incoming, Known, Reply, new_scratch
from edgesplit.shared_memory.segment import Segment

_SEND = 262_144
_LONGEST_WAIT_S = 3600.0
Body = Sequence[bytes | memoryview]


def request_head(address: Address, method: str, path: str, headers: Mapping[str, str], body: Body) -> bytes:
    """The header block of a request; ValueError for a header that cannot be sent."""
    length = {"content-length": str(sum(len(part) for part in body))} if method != "GET" else {}
    lines = [f"{name}: {value}" for name, value in {"host": address.host_header, **length, **headers}.items()]
    return "\r\n".join([f"{method} {path} HTTP/1.1", *lines, "", ""]).encode("latin-1")


@contextlib.contextmanager
def failures_told(address: Address, close: Callable[[], None]) -> Iterator[None]:
    """An exchange that fails closes its connection, and what failed is told by `address`: DeadlineExceeded, LinkError,
    or MalformedMessage. Anything else closes it too, and rises as it is."""
    try:
        yield
    except TimeoutError as error:
        close()
        raise DeadlineExceeded(f"{address}: no answer in time") from error
    except OSError as error:
        close()
        raise LinkError(f"{address}: {error or type(error).__name__}") from error
    except (LinkError, MalformedMessage) as error:
        close()
        raise type(error)(f"{address}: {error}") from error
    except BaseException:
        close()
        raise


class Connection:
    """One connection; not thread-safe, except that `close` ends a running exchange."""

    def __init__(
        self,
        host: str,
        port: int,
        tls: ssl.SSLContext | None = None,
        server_name: str | None = None,
        *,
        path: str = "",
        shared_memory: bool = True,
    ) -> None:
        """To `host` and `port`, or to the Unix socket at `path`, with large tensors in shared memory where they can."""
        self._address = Address(host, port, tls is not None, socket=path)
        self._tls = tls
        self._server_name = server_name or host
        self._sock: socket.socket | None = None
        self._may_share = bool(path) and shared_memory
        self._arena = Arena()
        self._ended = False
        self._scratch = new_scratch()
        self._known: Known | None = None
        """The header block of the last reply."""
        self.lanes = Lanes(shared_memory)

    @classmethod
    def to(cls, address: Address, tls: ssl.SSLContext | None = None, *, shared_memory: bool = True) -> Connection:
        """To that address."""
        return cls(address.host, address.port, tls, path=address.socket, shared_memory=shared_memory)

    @property
    def is_open(self) -> bool:
        """Is there a connection left over from the last exchange? The other side may have closed it since."""
        return self._sock is not None

    def exchange(
        self,
        method: str,
        path: str,
        *,
        deadline: float,
        headers: Mapping[str, str] | None = None,
        body: Body = (),
        descriptor: int | None = None,
        reopen: bool = True,
    ) -> Reply:
        """One request and its response by `deadline` (of the monotonic clock); `descriptor` goes with it. Without
        `reopen`, only on the connection that there is.

        DeadlineExceeded, LinkError, or MalformedMessage where the response is none; the connection is closed then.
        """
        incoming = Incoming(self._scratch, self._known)
        with failures_told(self._address, self.close):
            sock = self._opened(deadline, reopen)
            head = request_head(self._address, method, path, headers or {}, body)
            self._send(sock, head, body, deadline, descriptor)
            reply = self._receive(sock, incoming, deadline)
        self._known = incoming.known
        if not incoming.keep:
            self.close()
        return reply

    def ask(self, prefix: str, question: Question, deadline: float) -> Answer:
        """One attempt at `question`, its large tensors in shared memory where the server takes that. A connection that
        the server had closed meanwhile is replaced at once."""
        was_open = self.is_open
        try:
            reply, arena = self._asked(prefix, question, deadline)
        except LinkError:
            if not was_open or self._ended:
                raise
            reply, arena = self._asked(prefix, question, deadline)
        answer = question.answer(reply, arena)
        arena.learn(answer.outputs)
        return answer

    def close(self) -> None:
        """End the connection; the next exchange opens another."""
        sock, self._sock = self._sock, None
        arena, self._arena = self._arena, Arena(room=self._arena.room)
        if sock is not None:
            with contextlib.suppress(OSError):
                socket.socket.shutdown(sock, socket.SHUT_RDWR)
            sock.close()
        arena.close()

    def end(self) -> None:
        """Close it for good, and the lanes that were granted to it."""
        self._ended = True
        self.lanes.close()
        self.close()

    def wish_lane(self, wish: bytes, descriptor: int, within_s: float) -> Reply:
        """Ask for a lane, passing the end that is the worker's."""
        until = monotonic() + within_s
        return self.exchange("POST", LANE_PATH, deadline=until, body=[wish], descriptor=descriptor)

    def _asked(self, prefix: str, question: Question, deadline: float) -> tuple[Reply, Arena]:
        """The reply, and the memory that it may lie in."""
        if self._may_share and (segment := self._arena.begin(question)) is not None:
            self._offer(segment, prefix, deadline)
        arena = self._arena
        inputs_at, answer_at = arena.lend(question)
        headers, body = question.body(deadline - monotonic(), inputs_at, answer_at)
        path, lent = prefix + question.path, answer_at is not None
        return self.exchange("POST", path, deadline=deadline, headers=headers, body=body, reopen=not lent), arena

    def _offer(self, segment: Segment, prefix: str, deadline: float) -> None:
        """Pass the segment to the server, on the connection that it will belong to."""
        try:
            reply = self.exchange(
                "POST", prefix + SEGMENT_PATH, deadline=deadline, body=[offer(segment)], descriptor=segment.descriptor
            )
        except BaseException:
            segment.close()
            raise
        self._arena.offered(segment, reply)

    def _opened(self, deadline: float, reopen: bool) -> socket.socket:
        """The connection, made where there is none."""
        if self._sock is not None and not (self._tls is None and _is_ready(self._sock, select.POLLIN, 0.0)):
            return self._sock  # readable between two exchanges: closed by the server, or an answer nobody asked for
        self.close()
        if self._ended:
            raise LinkError("this client was closed")
        if not reopen:
            raise LinkError("closed meanwhile")
        self._sock = sock = self._connected(deadline)
        if self._tls is not None:
            sock.settimeout(_remaining(deadline))
            self._sock = sock = self._tls.wrap_socket(sock, server_hostname=self._server_name)
        else:
            sock.setblocking(False)
        if self._ended:  # while it was made: `end` found nothing to close
            self.close()
            raise LinkError("this client was closed")
        return sock

    def _connected(self, deadline: float) -> socket.socket:
        if self._address.socket:
            sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            try:
                sock.settimeout(_remaining(deadline))
                sock.connect(self._address.socket)
            except BaseException:
                sock.close()
                raise
            return sock
        sock = socket.create_connection((self._address.host, self._address.port), timeout=_remaining(deadline))
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return sock

    def _send(self, sock: socket.socket, head: bytes, body: Body, deadline: float, descriptor: int | None) -> None:
        """All of it, piece by piece, so that the deadline also bounds a peer that reads too slowly."""
        small = sum(len(part) for part in body) <= _SEND
        parts = [b"".join([head, *body])] if small else [head, *body]
        for part in parts:
            view = memoryview(part)
            while len(view):
                try:
                    self._may_wait(sock, deadline)
                    if descriptor is None:
                        view = view[sock.send(view[:_SEND]) :]
                    else:
                        view, descriptor = view[sock.sendmsg([view], [passing(descriptor)]) :], None
                except BlockingIOError:
                    _wait(sock, select.POLLOUT, deadline)

    def _receive(self, sock: socket.socket, incoming: Incoming, deadline: float) -> Reply:
        """The response, each wait no longer than is left."""
        while True:
            if self._tls is None:
                _wait(sock, select.POLLIN, deadline)
            try:
                self._may_wait(sock, deadline)
                reply = incoming.received(sock.recv_into(incoming.buffer()))
            except BlockingIOError:  # whatever made it ready has gone
                continue
            if reply is not None:
                return reply

    def _may_wait(self, sock: socket.socket, deadline: float) -> None:
        """Over TLS a call waits by itself, no longer than is left; a plain socket never does, and is asked first."""
        if self._tls is not None:
            sock.settimeout(_remaining(deadline))


def passing(descriptor: int) -> tuple[int, int, array.array[int]]:
    """What sends a file descriptor along with a message."""
    return socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [descriptor])


def _remaining(deadline: float) -> float:
    """Seconds left; TimeoutError if none is."""
    left = deadline - monotonic()
    if left <= 0:
        raise TimeoutError("the deadline has passed")
    return left


def _wait(sock: socket.socket, what: int, deadline: float) -> None:
    """Until the socket is ready for that. TimeoutError at the deadline."""
    while not _is_ready(sock, what, _remaining(deadline)):
        pass


def _is_ready(sock: socket.socket, what: int, within_s: float) -> bool:
    """Ready for that, closed or broken, within so many seconds."""
    descriptor = sock.fileno()
    if descriptor < 0:  # another thread has ended it
        raise LinkError("closed meanwhile")
    poll = select.poll()
    poll.register(descriptor, what)
    return bool(poll.poll(1e3 * min(within_s, _LONGEST_WAIT_S)))
