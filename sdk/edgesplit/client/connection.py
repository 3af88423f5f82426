"""One inference client's connection to a server: over HTTP, with large tensors in shared memory, and its direct lanes.

HTTP is `edgesplit.http1.client_connection`; retries are `edgesplit.client.retry`.
"""

from __future__ import annotations

import ssl
from time import monotonic

from edgesplit.client.answer import Answer
from edgesplit.client.direct.grant import LANE_PATH
from edgesplit.client.direct.sync_channel import Lanes
from edgesplit.client.request import InferenceRequest
from edgesplit.client.shared_memory import SEGMENT_PATH, ClientSharedMemory, segment_request_body
from edgesplit.errors import LinkError
from edgesplit.http1.address import Address
from edgesplit.http1.client_connection import ClientConnection
from edgesplit.http1.response import Reply
from edgesplit.shared_memory.segment import Segment


class Connection(ClientConnection):
    """One connection. Not thread-safe, except that `close` ends an exchange running in another thread."""

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
        """To `host` and `port`, or to the Unix socket at `path`; there large tensors go through shared memory if
        `shared_memory`. Nothing is connected yet."""
        super().__init__(Address(host, port, tls is not None, socket=path), tls, server_name)
        self._uses_shared_memory = bool(path) and shared_memory
        self._shared_memory = ClientSharedMemory()
        self.lanes = Lanes(shared_memory)

    @classmethod
    def to(cls, address: Address, tls: ssl.SSLContext | None = None, *, shared_memory: bool = True) -> Connection:
        """A connection to `address`, not opened yet."""
        return cls(address.host, address.port, tls, path=address.socket, shared_memory=shared_memory)

    def infer(self, prefix: str, request: InferenceRequest, deadline: float) -> Answer:
        """Make one attempt at the inference request `request` and return its answer; large tensors go through shared
        memory where the server supports it. A connection that the server closed while it was idle is replaced once."""
        was_open = self.is_open
        try:
            reply, arena = self._infer_once(prefix, request, deadline)
        except LinkError:
            if not was_open or self._is_shut_down:
                raise
            reply, arena = self._infer_once(prefix, request, deadline)
        answer = request.decode_answer(reply, arena)
        arena.reserve_for(answer.outputs)
        return answer

    def close(self) -> None:
        """Close the connection and its shared memory; the next exchange opens a new one."""
        super().close()
        arena, self._shared_memory = self._shared_memory, self._shared_memory.renewed()
        arena.close()

    def shut_down(self) -> None:
        """Close the connection and its direct lanes for good: later exchanges raise LinkError."""
        self._is_shut_down = True
        self.lanes.close()
        self.close()

    def request_lane(self, body: bytes, descriptor: int, timeout_s: float) -> Reply:
        """Request a direct lane, passing the worker's end of the socket pair as `descriptor`."""
        deadline = monotonic() + timeout_s
        return self.exchange("POST", LANE_PATH, deadline=deadline, body=[body], descriptor=descriptor)

    def _infer_once(self, prefix: str, request: InferenceRequest, deadline: float) -> tuple[Reply, ClientSharedMemory]:
        """The reply, and the shared memory that its outputs may lie in."""
        if self._uses_shared_memory and (segment := self._shared_memory.prepare(request)) is not None:
            self._pass_segment(segment, prefix, deadline)
        arena = self._shared_memory
        inputs_at, answer_at = arena.store_inputs(request)
        headers, body = request.encode(deadline - monotonic(), inputs_at, answer_at)
        path, uses_memory = prefix + request.path, answer_at is not None
        return self.exchange("POST", path, deadline=deadline, headers=headers, body=body, reopen=not uses_memory), arena

    def _pass_segment(self, segment: Segment, prefix: str, deadline: float) -> None:
        """Pass the segment's descriptor to the server, on the connection that the segment will belong to."""
        try:
            reply = self.exchange(
                "POST", prefix + SEGMENT_PATH, deadline=deadline, body=[segment_request_body(segment)],
                descriptor=segment.descriptor,
            )  # fmt: skip
        except BaseException:
            segment.close()
            raise
        self._shared_memory.on_segment_reply(segment, reply)
