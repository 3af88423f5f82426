"""One persistent HTTP/1.1 connection of an asyncio client; `edgesplit.client.connection` is the one for threads.

An exchange that is cancelled or exceeds its deadline closes the connection, so a late response can never be taken for
the answer to another request.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import Coroutine, Mapping
from time import monotonic
from typing import Any, TypeVar

from edgesplit.client.answer import Answer
from edgesplit.client.request import InferenceRequest
from edgesplit.client.shared_memory import SEGMENT_PATH, ClientSharedMemory, segment_request_body
from edgesplit.errors import EdgeError, LinkError
from edgesplit.http1.address import Address
from edgesplit.http1.client_connection import Body, descriptor_message, request_head, translate_failures
from edgesplit.http1.response import IncomingResponse, KnownHead, Reply, new_scratch
from edgesplit.shared_memory.segment import Segment

T = TypeVar("T")


class AsyncConnection(asyncio.BufferedProtocol):
    """One connection, used by one exchange at a time."""

    def __init__(self, address: Address, tls: ssl.SSLContext | None, *, shared_memory: bool = True) -> None:
        self._uses_shared_memory = bool(address.socket) and shared_memory
        self._address = address
        self._tls = tls
        self._sock: socket.socket | None = None
        self._transport: asyncio.Transport | None = None
        self._incoming: IncomingResponse | None = None
        self._pending_reply: asyncio.Future[Reply] | None = None
        self._shared_memory = ClientSharedMemory()
        self._scratch = new_scratch()
        self._last_head: KnownHead | None = None

    @property
    def is_open(self) -> bool:
        """Whether the connection can carry another exchange."""
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
        """Send one request and return its response by `deadline` (monotonic clock); connects first if needed.

        `descriptor` is passed along with the request. With `reopen=False` only the present connection is used.
        DeadlineExceeded, LinkError, or MalformedMessage if the response is not HTTP; the connection is then closed.
        """
        with translate_failures(self._address, self.close):
            if not self.is_open:
                if not reopen:
                    raise LinkError("closed meanwhile")
                await _with_deadline(deadline, self._open())
            assert self._transport is not None
            self._incoming = response = IncomingResponse(self._scratch, self._last_head)
            self._pending_reply = asyncio.get_running_loop().create_future()
            self._send(request_head(self._address, method, path, headers or {}, body), body, descriptor)
            reply = await _with_deadline(deadline, _await_reply(self._pending_reply))
        self._last_head = response.known_head
        if not response.keep_alive:
            self.close()
        return reply

    async def infer(self, prefix: str, request: InferenceRequest, deadline: float) -> Answer:
        """Make one attempt at the inference request `request` and return its answer; large tensors go through shared
        memory where the server supports it. A connection that the server closed while it was idle is replaced once."""
        was_open = self.is_open
        try:
            reply, arena = await self._infer_once(prefix, request, deadline)
        except LinkError:
            if not was_open:
                raise
            reply, arena = await self._infer_once(prefix, request, deadline)
        answer = request.decode_answer(reply, arena)
        arena.reserve_for(answer.outputs)
        return answer

    def close(self) -> None:
        """Close the connection; the next exchange opens a new one."""
        transport, self._transport, self._sock = self._transport, None, None
        arena, self._shared_memory = self._shared_memory, self._shared_memory.renewed()
        self._incoming = None
        if transport is not None:
            transport.abort()
        arena.close()

    async def _infer_once(
        self, prefix: str, request: InferenceRequest, deadline: float
    ) -> tuple[Reply, ClientSharedMemory]:
        """The reply, and the shared memory that its outputs may lie in."""
        if self._uses_shared_memory and (segment := self._shared_memory.prepare(request)) is not None:
            await self._pass_segment(segment, prefix, deadline)
        arena = self._shared_memory
        inputs_at, answer_at = arena.store_inputs(request)
        headers, body = request.encode(deadline - monotonic(), inputs_at, answer_at)
        path, uses_memory = prefix + request.path, answer_at is not None
        reply = await self.exchange("POST", path, deadline=deadline, headers=headers, body=body, reopen=not uses_memory)
        return reply, arena

    async def _pass_segment(self, segment: Segment, prefix: str, deadline: float) -> None:
        """Pass the segment's descriptor to the server, on the connection that the segment will belong to."""
        try:
            reply = await self.exchange(
                "POST", prefix + SEGMENT_PATH, deadline=deadline, body=[segment_request_body(segment)],
                descriptor=segment.descriptor,
            )  # fmt: skip
        except BaseException:
            segment.close()
            raise
        self._shared_memory.on_segment_reply(segment, reply)

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
        assert self._sock is not None  # the transport's buffer is empty between exchanges, so this keeps the order
        whole = b"".join([head, *body])
        sent = self._sock.sendmsg([whole], [descriptor_message(descriptor)])
        if sent < len(whole):
            self._transport.write(whole[sent:])

    # asyncio's protocol callbacks

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """The transport is connected."""
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def get_buffer(self, sizehint: int) -> memoryview:
        """The buffer that asyncio receives the next bytes into."""
        return self._scratch if self._incoming is None else self._incoming.buffer()

    def buffer_updated(self, nbytes: int) -> None:
        """`nbytes` bytes were received into the buffer."""
        if self._incoming is None:  # unsolicited bytes: the connection cannot be trusted any more
            self.close()
            return
        self._on_received(nbytes)

    def eof_received(self) -> bool:
        """The server has closed its side of the connection."""
        if self._incoming is not None:
            self._on_received(0)
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        """The connection is gone: an exchange in flight fails with LinkError."""
        self._transport = None
        if self._pending_reply is not None and not self._pending_reply.done():
            self._pending_reply.set_exception(LinkError(str(exc or "closed without an answer")))

    def _on_received(self, count: int) -> None:
        """Feed `count` received bytes (0: end of stream) to the parser; completes the exchange once the reply is
        whole."""
        assert self._incoming is not None
        waiting = self._pending_reply
        try:
            reply = self._incoming.on_received(count)
        except EdgeError as error:
            self._incoming = None
            if waiting is not None and not waiting.done():
                waiting.set_exception(error)
            return
        if reply is not None:
            self._incoming = None
            if waiting is not None and not waiting.done():
                waiting.set_result(reply)


async def _await_reply(waiting: asyncio.Future[Reply]) -> Reply:
    return await waiting


async def _with_deadline(deadline: float, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`; TimeoutError if it is not there by `deadline` (monotonic clock)."""
    left_s = deadline - monotonic()
    if left_s <= 0:
        work.close()
        raise TimeoutError("the deadline has passed")
    try:
        return await asyncio.wait_for(work, left_s)
    except asyncio.TimeoutError as error:  # before Python 3.11 no TimeoutError
        raise TimeoutError("the deadline has passed") from error
