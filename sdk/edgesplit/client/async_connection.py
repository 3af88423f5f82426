"""One persistent HTTP/1.1 connection of an asyncio client. What `edgesplit.client.connection` is for threads.

An exchange that is cancelled, or given up at its deadline, ends the connection: nothing that arrives later can be taken
for the answer to another request.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import Coroutine, Mapping
from time import monotonic
from typing import Any, TypeVar

from edgesplit.client.connection import Body, failures_told, passing, request_head
from edgesplit.client.request import Answer, Question
from edgesplit.client.shared_memory import SEGMENT_PATH, Arena, offer
from edgesplit.errors import EdgeError, LinkError
from edgesplit.http1.address import Address
from edgesplit.http1.response import Incoming, Known, Reply, new_scratch
from edgesplit.shared_memory.segment import Segment

T = TypeVar("T")


class AsyncConnection(asyncio.BufferedProtocol):
    """One connection, for one exchange at a time."""

    def __init__(self, address: Address, tls: ssl.SSLContext | None, *, shared_memory: bool = True) -> None:
        self._may_share = bool(address.socket) and shared_memory
        self._address = address
        self._tls = tls
        self._sock: socket.socket | None = None
        self._transport: asyncio.Transport | None = None
        self._incoming: Incoming | None = None
        self._waiting: asyncio.Future[Reply] | None = None
        self._arena = Arena()
        self._scratch = new_scratch()
        self._known: Known | None = None

    @property
    def is_open(self) -> bool:
        """Can it carry another exchange?"""
        return self._transport is not None and not self._transport.is_closing()

    async def exchange(
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
        """One request and its response by `deadline`; as `edgesplit.client.connection.Connection.exchange`."""
        with failures_told(self._address, self.close):
            if not self.is_open:
                if not reopen:
                    raise LinkError("closed meanwhile")
                await _by(deadline, self._open())
            assert self._transport is not None
            self._incoming = incoming = Incoming(self._scratch, self._known)
            self._waiting = asyncio.get_running_loop().create_future()
            self._send(request_head(self._address, method, path, headers or {}, body), body, descriptor)
            reply = await _by(deadline, _result(self._waiting))
        self._known = incoming.known
        if not incoming.keep:
            self.close()
        return reply

    async def ask(self, prefix: str, question: Question, deadline: float) -> Answer:
        """One attempt at `question`; as `edgesplit.client.connection.Connection.ask`."""
        was_open = self.is_open
        try:
            reply, arena = await self._asked(prefix, question, deadline)
        except LinkError:
            if not was_open:
                raise
            reply, arena = await self._asked(prefix, question, deadline)
        answer = question.answer(reply, arena)
        arena.learn(answer.outputs)
        return answer

    def close(self) -> None:
        """End the connection; the next exchange opens another."""
        transport, self._transport, self._sock = self._transport, None, None
        arena, self._arena = self._arena, Arena(room=self._arena.room)
        self._incoming = None
        if transport is not None:
            transport.abort()
        arena.close()

    async def _asked(self, prefix: str, question: Question, deadline: float) -> tuple[Reply, Arena]:
        if self._may_share and (segment := self._arena.begin(question)) is not None:
            await self._offer(segment, prefix, deadline)
        arena = self._arena
        inputs_at, answer_at = arena.lend(question)
        headers, body = question.body(deadline - monotonic(), inputs_at, answer_at)
        path, lent = prefix + question.path, answer_at is not None
        reply = await self.exchange("POST", path, deadline=deadline, headers=headers, body=body, reopen=not lent)
        return reply, arena

    async def _offer(self, segment: Segment, prefix: str, deadline: float) -> None:
        try:
            reply = await self.exchange(
                "POST", prefix + SEGMENT_PATH, deadline=deadline, body=[offer(segment)], descriptor=segment.descriptor
            )
        except BaseException:
            segment.close()
            raise
        self._arena.offered(segment, reply)

    async def _open(self) -> None:
        loop = asyncio.get_running_loop()
        self.close()
        if not self._address.socket:
            name = self._address.host if self._tls is not None else None
            host, port = self._address.host, self._address.port
            await loop.create_connection(lambda: self, host, port, ssl=self._tls, server_hostname=name)
            return
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        sock.setblocking(False)
        try:
            await loop.sock_connect(sock, self._address.socket)
            await loop.create_unix_connection(lambda: self, sock=sock)
        except BaseException:
            sock.close()
            raise
        self._sock = sock

    def _send(self, head: bytes, body: Body, descriptor: int | None) -> None:
        assert self._transport is not None
        if descriptor is None:
            self._transport.writelines([head, *body])
            return
        assert self._sock is not None  # between two exchanges nothing waits to be sent, so this does not overtake it
        whole = b"".join([head, *body])
        sent = self._sock.sendmsg([whole], [passing(descriptor)])
        if sent < len(whole):
            self._transport.write(whole[sent:])

    # What asyncio calls

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """It is open."""
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def get_buffer(self, sizehint: int) -> memoryview:
        """Where the next bytes go."""
        return self._scratch if self._incoming is None else self._incoming.buffer()

    def buffer_updated(self, nbytes: int) -> None:
        """Bytes have come."""
        if self._incoming is None:  # nobody asked: whatever it is, the connection is spoilt
            self.close()
            return
        self._took(nbytes)

    def eof_received(self) -> bool:
        """The other side has closed."""
        if self._incoming is not None:
            self._took(0)
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        """It is gone."""
        self._transport = None
        if self._waiting is not None and not self._waiting.done():
            self._waiting.set_exception(LinkError(str(exc or "closed without an answer")))

    def _took(self, count: int) -> None:
        assert self._incoming is not None
        waiting = self._waiting
        try:
            reply = self._incoming.received(count)
        except EdgeError as error:
            self._incoming = None
            if waiting is not None and not waiting.done():
                waiting.set_exception(error)
            return
        if reply is not None:
            self._incoming = None
            if waiting is not None and not waiting.done():
                waiting.set_result(reply)


async def _result(waiting: asyncio.Future[Reply]) -> Reply:
    return await waiting


async def _by(deadline: float, work: Coroutine[Any, Any, T]) -> T:
    """The work's result; TimeoutError if it is not there by the deadline."""
    left_s = deadline - monotonic()
    if left_s <= 0:
        work.close()
        raise TimeoutError("the deadline has passed")
    try:
        return await asyncio.wait_for(work, left_s)
    except asyncio.TimeoutError as error:  # before Python 3.11 no TimeoutError
        raise TimeoutError("the deadline has passed") from error
