"""The offload server's front end: connections of HTTP/1.1, all looked after by the thread that leads (`loop`).

Promises what `edgesplit.http1.server.Server` does, and the same to whoever starts and stops it: bounded connections,
bodies
and times, whole requests only, running requests finish at `stop`. Different is who answers: the handler is called by
the leader with each request as soon as it is whole, must not wait, and calls `answer` some time, from any thread.
"""

from __future__ import annotations

import logging
import math
import socket
import ssl
import threading
from collections.abc import Callable
from functools import partial
from time import monotonic
from typing import Protocol

from edgesplit.http1.head import Asked, Refused
from edgesplit.http1.listener import Accepting
from edgesplit.http1.server import Left, Request, Response, error_response, turn_away
from edgesplit.limits import LIMITS
from edgesplit_offload.frontend.connection import HEAD_BYTES, Conversation
from edgesplit_offload.frontend.event_loop import Loop
from edgesplit_offload.frontend.transport import Plain, Tls
from edgesplit_offload.scheduling.arrivals import Habit

log = logging.getLogger(__name__)

LOOK_EVERY_S = 1.0
"""How often it is looked for connections that have taken too long."""
Answer = Callable[[Response], None]


class Handler(Protocol):
    """Who answers."""

    def route(self, asked: Asked) -> object:
        """What can be known of all requests with this head: asked once while a connection's heads are the same."""
        ...

    def handle(self, request: Request, route: object, habit: Habit, answer: Answer) -> None:
        """Have it answered, without waiting: `answer` is called once, from any thread. `habit`: the connection's."""
        ...


class Front:
    """Answers HTTP/1.1 on one address, or what is handed to `admit`."""

    def __init__(
        self,
        handler: Handler,
        loop: Loop,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        tls: ssl.SSLContext | None = None,
        max_connections: int = 256,
        on_closed: Callable[[], None] = lambda: None,
    ) -> None:
        self._handler = handler
        self._loop = loop
        self._tls = tls
        self._most = max_connections
        self._on_closed = on_closed
        self._accepting = Accepting(self.admit, host=host, port=port)
        self._conversations: dict[Conversation, int] = {}
        """And their sockets' descriptors."""
        self._running = 0
        self._bodies = 0
        self._is_over = False
        self._finished = threading.Event()
        self._look_at = math.inf
        self._asking: Conversation | None = None
        """Whose request the handler has just now."""
        self.scratch = memoryview(bytearray(HEAD_BYTES))
        self.is_stopping = False

    @property
    def port(self) -> int:
        """The port that it listens on."""
        return self._accepting.port

    @property
    def url(self) -> str:
        """Where clients reach it."""
        return self._accepting.url(tls=self._tls is not None)

    def start(self) -> None:
        """Listen. UsageError, in one line, where the address cannot be had."""
        self._accepting.start()

    def stop(self, drain_s: float = 5.0) -> None:
        """Accept no more, let running requests finish for `drain_s`, then end every connection."""
        self.is_stopping = True
        self._accepting.stop(drain_s)
        self._loop.post(self._is_finished)
        self._finished.wait(drain_s)
        ended = threading.Event()
        self._loop.post(partial(self._end_all, ended))
        ended.wait(LOOK_EVERY_S)

    def admit(self, sock: socket.socket) -> None:
        """Serve a connection that was accepted, here or by another process; or turn it away where there are too many
        already. `on_closed` is called when it has ended. From any thread."""
        self._loop.post(partial(self._admit, sock))

    def look(self, now: float) -> float:
        """End what takes too long; the moment of the next look. By the leader."""
        if now >= self._look_at:
            for one in list(self._conversations):
                one.is_late(now)
            self._look_at = now + min(LOOK_EVERY_S, LIMITS.handshake_s) if self._conversations else math.inf
        return self._look_at

    # For conversations

    def begin(self, length: int) -> None:
        """A request with a body of `length` runs, until its `end`. Once the last one was waited for, none begins; and
        none while there is no memory for its body."""
        if self._is_over:
            raise Left("the server ends")
        if self._bodies and self._bodies + length > LIMITS.http_bodies_bytes:
            raise Refused(503, f"requests of {self._bodies} bytes are being received or answered: come back later")
        self._running += 1
        self._bodies += length

    def end(self, length: int) -> None:
        """One that had begun is over."""
        self._running -= 1
        self._bodies -= length
        self._is_finished()

    def route(self, asked: Asked) -> object:
        """As the handler says."""
        return self._handler.route(asked)

    def asked(self, conversation: Conversation, request: Request, route: object) -> None:
        """The handler answers."""
        self._asking = conversation
        try:
            self._handler.handle(request, route, conversation.habit, partial(self._answer, conversation))
        except Exception as error:  # whatever it is, the client hears of it
            log.exception("%s %s failed", request.method, request.path)
            conversation.answer(error_response(500, f"internal error: {type(error).__name__}"))
        finally:
            self._asking = None

    def closed(self, conversation: Conversation) -> None:
        """Forget it."""
        descriptor = self._conversations.pop(conversation, None)
        if descriptor is not None:
            self._loop.forget(descriptor)
            self._on_closed()

    def soon(self, call: Callable[[], object]) -> None:
        """After what else is ready."""
        self._loop.post(call)

    def _answer(self, conversation: Conversation, response: Response) -> None:
        """From any thread."""
        if not self._loop.is_mine:
            self._loop.post(partial(_reply, conversation, response))
        elif self._asking is conversation:
            conversation.answer(response)  # which goes on by itself
        else:
            _reply(conversation, response)

    def _admit(self, sock: socket.socket) -> None:
        if self.is_stopping or len(self._conversations) >= self._most:
            why = "the server ends" if self.is_stopping else "too many connections"
            log.warning("%s, at most %d: turned one away", why, self._most)
            turn_away(sock, why, in_words=self._tls is None)
            self._on_closed()
            return
        try:
            sock.setblocking(False)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if self._tls is not None:
                sock = self._tls.wrap_socket(sock, server_side=True, do_handshake_on_connect=False)
            wire = Tls(sock) if isinstance(sock, ssl.SSLSocket) else Plain(sock)
            conversation = Conversation(self, sock, wire)
            self._loop.watch(sock.fileno(), conversation.ready)
        except OSError as error:  # the peer left already
            log.warning("cannot serve a connection: %s", error)
            sock.close()
            self._on_closed()
            return
        self._conversations[conversation] = sock.fileno()
        if self._look_at == math.inf:
            self._look_at = monotonic() + min(LOOK_EVERY_S, LIMITS.handshake_s)
            self._loop.look_by(self._look_at)

    def _is_finished(self) -> None:
        if self.is_stopping and not self._running:
            self._finished.set()

    def _end_all(self, ended: threading.Event) -> None:
        self._is_over = True
        for one in list(self._conversations):
            one.close()
        ended.set()


def _reply(conversation: Conversation, response: Response) -> None:
    conversation.answer(response)
    conversation.go_on()
