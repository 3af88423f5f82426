"""What two serving processes of one server say to each other about a request that one reads and the other runs.

A stream of frames over a Unix socket that the supervisor made for them: a message, and behind it the bytes of its
tensors. Both ends are this program, so there is no version to agree on; yet every size is bounded and every tensor must
fill its shape, and a peer that says anything else is one that has gone.
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

from edgesplit.errors import (
    Busy,
    Crowding,
    DeadlineExceeded,
    EdgeError,
    InferenceFailed,
    LinkError,
    MalformedMessage,
    ModelRefused,
    NotFound,
    TrustError,
    UsageError,
)
from edgesplit.limits import LIMITS
from edgesplit.msgspec_warmup import settle
from edgesplit.oip import protocol as oip
from edgesplit.runtime import Tensor

LONGEST_HEAD = 1 << 20
TAKEN_WITHIN_S = 2.0
"""A peer that reads nothing for so long is given up: who sends to it has others to answer."""
_LENGTHS = struct.Struct("!IQ")
_SCRATCH = 1 << 17
_TOGETHER = 200
"""Buffers handed to the kernel by one call; it takes 1,024 at most."""


class Alone(EdgeError):
    """That process has measured that requests of this kind gain nothing by company."""


class Described(msgspec.Struct, frozen=True, array_like=True):
    """A tensor whose bytes are behind the message."""

    name: str
    datatype: str
    shape: tuple[int, ...]


class Run(msgspec.Struct, frozen=True, array_like=True, tag="run"):
    """Please run this with others of its kind."""

    number: int
    """By which its answer is known, on this link."""
    model: str
    left_s: float | None
    """Until its deadline, if it has one."""
    client: str | None
    asker: int
    """The connection that it came by, of those that this process reads; 0 is none."""
    tensors: tuple[Described, ...]


class Leave(msgspec.Struct, frozen=True, array_like=True, tag="leave"):
    """Nobody waits for that one any more."""

    number: int


class Ran(msgspec.Struct, frozen=True, array_like=True, tag="ran"):
    """Its outputs, and how it went."""

    number: int
    run_s: float
    together: int
    leads: bool
    load: float
    tensors: tuple[Described, ...]


class Failed(msgspec.Struct, frozen=True, array_like=True, tag="failed"):
    """Why there are none."""

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
        Busy, Crowding, DeadlineExceeded, InferenceFailed, LinkError, MalformedMessage, ModelRefused, NotFound,
        TrustError, UsageError, Alone,
    )
}  # fmt: skip


def described(tensors: Mapping[str, Tensor]) -> tuple[tuple[Described, ...], list[memoryview]]:
    """Tensors of numbers as they travel."""
    flat = {name: np.ascontiguousarray(tensor) for name, tensor in tensors.items()}
    told = tuple(Described(name, oip.datatype(one), one.shape) for name, one in flat.items())
    return told, [one.reshape(-1).view(np.uint8).data for one in flat.values()]


def tensors_of(told: Sequence[Described], body: memoryview) -> dict[str, Tensor]:
    """The same at the other end, views of `body`; MalformedMessage where they are not exactly what fills it."""
    found: dict[str, Tensor] = {}
    begin = 0
    for one in told:
        dtype = oip.DTYPES.get(one.datatype)
        if dtype is None or dtype.hasobject or min(one.shape, default=0) < 0:
            raise MalformedMessage(f"tensor {one.name[:80]!r} does not travel")
        end = begin + math.prod(one.shape) * dtype.itemsize
        if end > len(body):
            raise MalformedMessage(f"tensor {one.name[:80]!r} is cut short")
        found[one.name] = np.frombuffer(body[begin:end], dtype).reshape(one.shape)
        begin = end
    if begin != len(body):
        raise MalformedMessage("bytes follow the last tensor")
    return found


def failed(number: int, error: BaseException) -> Failed:
    """That error, for the other end."""
    name = next((kind.__name__ for kind in type(error).__mro__ if kind.__name__ in _ERRORS), "")
    text = str(error) if name else f"internal error: {type(error).__name__}"
    return Failed(number, name or "InferenceFailed", text[:1_000], getattr(error, "retry_after_s", 0.0))


def error_of(told: Failed) -> EdgeError:
    """The error that the other end told of."""
    error = _ERRORS.get(told.kind, InferenceFailed)(told.text)
    if isinstance(error, Busy):
        error.retry_after_s = told.later_s
    return error


class Link:
    """One end, which never waits. Looked after by the thread that leads (`loop`)."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self._sock = sock
        self._scratch = memoryview(bytearray(_SCRATCH))
        self._begin = self._end = 0
        self._received = self._messages()
        self._out: list[bytes | memoryview] = []
        self._taken_at = monotonic()
        self.is_over = False

    @property
    def descriptor(self) -> int:
        """Of the socket."""
        return self._sock.fileno()

    @property
    def is_stuck(self) -> bool:
        """Is there something that the other end has not taken?"""
        return bool(self._out) and not self.is_over

    def send(self, message: Message, buffers: Sequence[memoryview] = ()) -> None:
        """Have it sent by the next `flush`."""
        head = _ENCODER.encode(message)
        if not self._out:
            self._taken_at = monotonic()
        self._out += [_LENGTHS.pack(len(head), sum(len(one) for one in buffers)) + head, *buffers]

    def flush(self) -> None:
        """Send as much as the other end takes now."""
        try:
            while self._out and not self.is_over:
                some = self._out[:_TOGETHER]
                sent = self._sock.sendmsg(some)
                self._taken_at = monotonic()
                done = 0
                while done < len(some) and sent >= len(some[done]):
                    sent -= len(some[done])
                    done += 1
                del self._out[:done]
                if sent:
                    self._out[0] = memoryview(self._out[0])[sent:]
        except BlockingIOError:
            pass
        except OSError:
            self.close()

    def received(self) -> Iterator[tuple[Message, memoryview]]:
        """What the other end has said, and the bytes behind it; then it may have gone (`is_over`)."""
        for one in self._received:
            if one is None:
                return
            yield one
        self.close()

    def look(self, now: float) -> None:
        """A peer that reads nothing for so long is given up."""
        if self._out and now - self._taken_at > TAKEN_WITHIN_S:
            self.close()

    def close(self) -> None:
        """Both sides see that it is over."""
        self.is_over = True
        self._out.clear()
        with suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)

    def release(self) -> None:
        """Give the socket up, once nobody watches it."""
        self.close()
        self._sock.close()

    def _messages(self) -> Iterator[tuple[Message, memoryview] | None]:
        """All of them; None where there is no more now. The end is an end."""
        with suppress(OSError, LinkError, msgspec.MsgspecError, UnicodeDecodeError):
            while True:
                head, body = _LENGTHS.unpack((yield from self._exactly(_LENGTHS.size)))
                if head > LONGEST_HEAD or body > LIMITS.http_body_bytes:
                    return
                message = _DECODER.decode((yield from self._exactly(head)))
                yield message, (yield from self._exactly(body))

    def _exactly(self, count: int) -> Generator[None, None, memoryview]:
        """The next `count` bytes, in memory of their own."""
        taken = np.empty(count, np.uint8).data
        have = 0
        while have < count:
            if self._begin < self._end:
                step = min(count - have, self._end - self._begin)
                taken[have : have + step] = self._scratch[self._begin : self._begin + step]
                have, self._begin = have + step, self._begin + step
                continue
            large = count - have >= _SCRATCH
            try:
                got = self._sock.recv_into(taken[have:] if large else self._scratch)
            except BlockingIOError:
                yield None
                continue
            if not got:
                raise LinkError("the other process has gone")
            if large:
                have += got
            else:
                self._begin, self._end = 0, got
        return taken


settle(__name__)
