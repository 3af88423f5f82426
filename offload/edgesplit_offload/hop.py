"""What two serving processes of one server say to each other about a request that one reads and the other runs.

A stream of frames over a Unix socket that the supervisor made for them: a message, and behind it the bytes of its
tensors. Both ends are this program, so there is no version to agree on; yet every size is bounded and every tensor must
fill its shape, and a peer that says anything else is one that has gone.
"""

from __future__ import annotations

import math
import socket
import struct
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import islice

import msgspec
import numpy as np

from edgesplit import oip
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
from edgesplit.runtime import Tensor
from edgesplit.settled import settle

LONGEST_HEAD = 1 << 20
TAKEN_WITHIN_S = 2.0
"""A peer that reads nothing for so long is given up: who sends to it has others to answer."""
_LENGTHS = struct.Struct("!IQ")
_SCRATCH = 1 << 17
_TOGETHER = 200
"""Buffers handed to the kernel by one call; it takes 1,024 at most."""
_TIME = struct.Struct("ll")


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
    """One end. Sending is safe from any thread, receiving is one thread's."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        seconds, part = divmod(TAKEN_WITHIN_S, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, _TIME.pack(int(seconds), int(part * 1e6)))
        self._sending = threading.Lock()
        self._scratch = memoryview(bytearray(_SCRATCH))
        self._begin = self._end = 0

    def send(self, messages: Sequence[tuple[Message, Sequence[memoryview]]]) -> bool:
        """Whether all of them went out: the other end may have gone, or not be reading."""
        parts: list[bytes | memoryview] = []
        for message, buffers in messages:
            head = _ENCODER.encode(message)
            parts += [_LENGTHS.pack(len(head), sum(len(one) for one in buffers)) + head, *buffers]
        with self._sending:
            try:
                for one in _runs(parts, _TOGETHER):
                    self._send_all(one)
            except OSError:
                self.end()
                return False
        return True

    def received(self) -> Iterator[tuple[Message, memoryview]]:
        """What the other end says, and the bytes behind it, until it has gone."""
        try:
            while True:
                head, body = _LENGTHS.unpack(self._exactly(_LENGTHS.size))
                if head > LONGEST_HEAD or body > LIMITS.http_body_bytes:
                    return
                yield _DECODER.decode(self._exactly(head)), self._exactly(body)
        except (OSError, LinkError, msgspec.MsgspecError, UnicodeDecodeError):
            return

    def end(self) -> None:
        """Both sides see that it is over; the thread that receives wakes."""
        with suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """By the thread that received."""
        self.end()
        self._sock.close()

    def _send_all(self, parts: Sequence[bytes | memoryview]) -> None:
        sent = self._sock.sendmsg(parts)
        if sent < sum(len(one) for one in parts):
            self._sock.sendall(memoryview(b"".join(parts))[sent:])

    def _exactly(self, count: int) -> memoryview:
        """The next `count` bytes, in memory of their own."""
        taken = np.empty(count, np.uint8).data
        have = 0
        while have < count:
            if self._begin == self._end and count - have >= _SCRATCH:
                have += self._got(self._sock.recv_into(taken[have:]))
                continue
            if self._begin == self._end:
                self._begin, self._end = 0, self._got(self._sock.recv_into(self._scratch))
            step = min(count - have, self._end - self._begin)
            taken[have : have + step] = self._scratch[self._begin : self._begin + step]
            have, self._begin = have + step, self._begin + step
        return taken

    @staticmethod
    def _got(count: int) -> int:
        if not count:
            raise LinkError("the other process has gone")
        return count


def _runs(parts: Sequence[bytes | memoryview], most: int) -> Iterator[list[bytes | memoryview]]:
    """The parts, so many at a time."""
    rest = iter(parts)
    while some := list(islice(rest, most)):
        yield some


settle(__name__)
