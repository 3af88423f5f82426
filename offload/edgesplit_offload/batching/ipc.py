"""Messages and links between two serving processes, for requests that one process reads and the other runs in batches.

A link is a stream of frames over a Unix socket that the supervisor made: a message, followed by the bytes of its
tensors. Both ends are the same program, so there is no version to negotiate; yet every size is bounded, every tensor
must fill its shape, and a peer that sends anything else is treated as gone.
"""

from __future__ import annotations

import math
import socket
import struct
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import suppress
from time import monotonic

import msgspec
import numpy as np

from edgesplit import errors
from edgesplit.errors import Busy, EdgeError, InferenceFailed, LinkError, MalformedMessage
from edgesplit.limits import LIMITS
from edgesplit.msgspec_warmup import warm_up_structs
from edgesplit.oip import protocol as oip
from edgesplit.runtime import Tensor
from edgesplit.socket_send import send_some

MAX_HEAD_BYTES = 1 << 20
STUCK_AFTER_S = 2.0
"""A peer that reads nothing for this long is given up, because the sender must serve others."""
_LENGTHS = struct.Struct("!IQ")
_SCRATCH_BYTES = 1 << 17


class Alone(EdgeError):
    """The batcher has measured that batching does not pay for requests of this kind."""


class TensorHeader(msgspec.Struct, frozen=True, array_like=True):
    """A tensor whose bytes follow the message."""

    name: str
    datatype: str
    shape: tuple[int, ...]


class Run(msgspec.Struct, frozen=True, array_like=True, tag="run"):
    """Request: run this with others of its kind."""

    number: int
    """Identifies the request on this link."""
    model: str
    left_s: float | None
    """Seconds until its deadline, if it has one."""
    client: str | None
    asker: int
    """Number of the client's connection in the sending process; 0: none."""
    tensors: tuple[TensorHeader, ...]


class Leave(msgspec.Struct, frozen=True, array_like=True, tag="leave"):
    """The request is cancelled: its client is gone or its deadline has passed."""

    number: int


class Ran(msgspec.Struct, frozen=True, array_like=True, tag="ran"):
    """The outputs of a request, and how it was run."""

    number: int
    run_s: float
    together: int
    leads: bool
    load: float
    tensors: tuple[TensorHeader, ...]


class Failed(msgspec.Struct, frozen=True, array_like=True, tag="failed"):
    """The error that a request ended with."""

    number: int
    kind: str
    text: str
    later_s: float = 0.0


Message = Run | Leave | Ran | Failed
_DECODER: msgspec.msgpack.Decoder[Message] = msgspec.msgpack.Decoder(Message)
_ENCODER = msgspec.msgpack.Encoder()
_ERRORS: Mapping[str, type[EdgeError]] = {
    kind.__name__: kind
    for kind in (
        Busy, errors.FairShareExceeded, errors.DeadlineExceeded, InferenceFailed, LinkError, MalformedMessage,
        errors.ModelRefused, errors.NotFound, errors.TrustError, errors.UsageError, Alone,
    )
}  # fmt: skip


def encode_tensors(tensors: Mapping[str, Tensor]) -> tuple[tuple[TensorHeader, ...], list[memoryview]]:
    """The descriptions and bytes of numeric tensors, as sent."""
    flat = {name: np.ascontiguousarray(tensor) for name, tensor in tensors.items()}
    headers = tuple(TensorHeader(name, oip.datatype(array), array.shape) for name, array in flat.items())
    return headers, [array.reshape(-1).view(np.uint8).data for array in flat.values()]


def decode_tensors(headers: Sequence[TensorHeader], body: memoryview) -> dict[str, Tensor]:
    """The received tensors as views of `body`; MalformedMessage unless they fill it exactly."""
    tensors: dict[str, Tensor] = {}
    begin = 0
    for description in headers:
        dtype = oip.DTYPES.get(description.datatype)
        if dtype is None or dtype.hasobject or min(description.shape, default=0) < 0:
            raise MalformedMessage(f"tensor {description.name[:80]!r} cannot be sent")
        end = begin + math.prod(description.shape) * dtype.itemsize
        if end > len(body):
            raise MalformedMessage(f"tensor {description.name[:80]!r} is cut short")
        tensors[description.name] = np.frombuffer(body[begin:end], dtype).reshape(description.shape)
        begin = end
    if begin != len(body):
        raise MalformedMessage("bytes follow the last tensor")
    return tensors


def encode_error(number: int, error: BaseException) -> Failed:
    """The message for an error."""
    name = next((kind.__name__ for kind in type(error).__mro__ if kind.__name__ in _ERRORS), "")
    text = str(error) if name else f"internal error: {type(error).__name__}"
    return Failed(number, name or "InferenceFailed", text[:1_000], getattr(error, "retry_after_s", 0.0))


def decode_error(message: Failed) -> EdgeError:
    """The error in a message."""
    error = _ERRORS.get(message.kind, InferenceFailed)(message.text)
    if isinstance(error, Busy):
        error.retry_after_s = message.later_s
    return error


class Link:
    """One end of a link; never blocks. Used only by the event loop's leader."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self._sock = sock
        self._scratch = memoryview(bytearray(_SCRATCH_BYTES))
        self._begin = self._end = 0
        self._incoming = self._messages()
        self._unsent: list[bytes | memoryview] = []
        self._progress_at = monotonic()
        self.is_closed = False

    @property
    def descriptor(self) -> int:
        """The socket's file descriptor."""
        return self._sock.fileno()

    @property
    def is_stuck(self) -> bool:
        """Whether there are unsent bytes that the peer has not taken."""
        return bool(self._unsent) and not self.is_closed

    def send(self, message: Message, buffers: Sequence[memoryview] = ()) -> None:
        """Queue a message for the next `flush`."""
        head = _ENCODER.encode(message)
        if not self._unsent:
            self._progress_at = monotonic()
        self._unsent += [_LENGTHS.pack(len(head), sum(len(buffer) for buffer in buffers)) + head, *buffers]

    def flush(self) -> None:
        """Send as much as the peer takes now."""
        try:
            while self._unsent and not self.is_closed:
                send_some(self._sock, self._unsent)
                self._progress_at = monotonic()
        except BlockingIOError:
            pass
        except OSError:
            self.close()

    def received(self) -> Iterator[tuple[Message, memoryview]]:
        """The messages received so far, with the bytes behind each; afterwards `is_closed` tells whether the peer has
        gone."""
        for message in self._incoming:
            if message is None:
                return
            yield message
        self.close()

    def check_progress(self, now: float) -> None:
        """Give up a peer that has read nothing for `STUCK_AFTER_S` although bytes wait."""
        if self._unsent and now - self._progress_at > STUCK_AFTER_S:
            self.close()

    def close(self) -> None:
        """Shut the link down, which both ends notice."""
        self.is_closed = True
        self._unsent.clear()
        with suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)

    def release(self) -> None:
        """Close the socket, once it is no longer watched."""
        self.close()
        self._sock.close()

    def _messages(self) -> Iterator[tuple[Message, memoryview] | None]:
        """All messages, and None whenever no more are complete; ends with the stream or with the first invalid
        message."""
        with suppress(OSError, LinkError, msgspec.MsgspecError, UnicodeDecodeError):
            while True:
                head, body = _LENGTHS.unpack((yield from self._read_exactly(_LENGTHS.size)))
                if head > MAX_HEAD_BYTES or body > LIMITS.http_body_bytes:
                    return
                message = _DECODER.decode((yield from self._read_exactly(head)))
                yield message, (yield from self._read_exactly(body))

    def _read_exactly(self, count: int) -> Generator[None, None, memoryview]:
        """The next `count` bytes, in memory of their own; yields None while they are incomplete."""
        buffer = np.empty(count, np.uint8).data
        filled = 0
        while filled < count:
            if self._begin < self._end:
                step = min(count - filled, self._end - self._begin)
                buffer[filled : filled + step] = self._scratch[self._begin : self._begin + step]
                filled, self._begin = filled + step, self._begin + step
                continue
            large = count - filled >= _SCRATCH_BYTES
            try:
                count_received = self._sock.recv_into(buffer[filled:] if large else self._scratch)
            except BlockingIOError:
                yield None
                continue
            if not count_received:
                raise LinkError("the other process has ended")
            if large:
                filled += count_received
            else:
                self._begin, self._end = 0, count_received
        return buffer


warm_up_structs(__name__)
