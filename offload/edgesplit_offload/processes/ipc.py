"""Messages between the supervisor and its serving processes, over a Unix socket that each process inherits.

MessagePack behind a length of four bytes. Both ends are the same program, so there is no version to negotiate; yet
every message is bounded and of a known kind, and a peer that sends anything else is treated as gone.
"""

from __future__ import annotations

import socket
import struct
import threading
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import msgspec

from edgesplit.errors import LinkError
from edgesplit.msgspec_warmup import warm_up_structs

MAX_BYTES = 64 * 2**20
MAX_KIND_BYTES = 64
ACCEPTED_CONNECTION, BATCHER_LINK, PEER_LINK = b"f", b"l", b"g"
"""First byte of the message that hands a socket over: an accepted connection (`ACCEPTED_CONNECTION`); a link to the
batcher of a kind of requests, whose name follows (`BATCHER_LINK`); or the batcher's end of such a link (`PEER_LINK`).
"""
_LENGTH = struct.Struct("!I")


class Ready(msgspec.Struct, frozen=True, tag="ready"):
    """From a serving process: it accepts connections from now on."""


class Alive(msgspec.Struct, frozen=True, tag="alive"):
    """From a serving process: heartbeat; it is alive and no run is suspiciously long."""


class Closed(msgspec.Struct, frozen=True, tag="closed"):
    """From a serving process: a connection that was handed to it has ended."""


class Ask(msgspec.Struct, frozen=True, tag="ask"):
    """From a serving process: a question to all serving processes, to be answered within `timeout_s`."""

    number: int
    question: str
    argument: Any
    timeout_s: float


class Question(msgspec.Struct, frozen=True, tag="question"):
    """From the supervisor: a question to be answered."""

    number: int
    question: str
    argument: Any = None


class Reply(msgspec.Struct, frozen=True, tag="told"):
    """From a serving process: its answer; `known` is false if it has none."""

    number: int
    known: bool
    answer: Any = None


class Answers(msgspec.Struct, frozen=True, tag="answers"):
    """From the supervisor: all answers that arrived in time, to the process that asked."""

    number: int
    answers: list[Any]
    missing: int
    """Number of living processes that failed, or did not answer in time."""


class WantBatcher(msgspec.Struct, frozen=True, tag="seek"):
    """From a serving process: it has requests of this kind, which gain by batching; which process is the batcher?"""

    kind: str


class BatcherSocket(msgspec.Struct, frozen=True, tag="yours"):
    """From the supervisor: the process is the batcher of this kind itself. If another one is, both receive an end of a
    link instead."""

    kind: str


class Drain(msgspec.Struct, frozen=True, tag="drain"):
    """From the supervisor: finish running requests within that time, then end."""

    seconds: float


class Notice(msgspec.Struct, frozen=True, tag="notice"):
    """From the supervisor: report not ready from now on, because the server will stop soon."""


Message = Ready | Alive | Closed | Ask | Question | Reply | Answers | WantBatcher | BatcherSocket | Drain | Notice
_DECODER: msgspec.msgpack.Decoder[Message] = msgspec.msgpack.Decoder(Message)


class IpcConnection:
    """One end of the connection. Any thread may send; only one thread may receive."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._sending = threading.Lock()

    def send(self, message: Message) -> bool:
        """Send `message`; False if the other end has gone."""
        raw = msgspec.msgpack.encode(message)
        with self._sending:
            try:
                self._sock.sendall(_LENGTH.pack(len(raw)) + raw)
            except OSError:
                return False
        return True

    def messages(self) -> Iterator[Message]:
        """The messages of the other end, until it has gone."""
        try:
            while True:
                (length,) = _LENGTH.unpack(self._read(_LENGTH.size))
                if length > MAX_BYTES:
                    return
                yield _DECODER.decode(self._read(length))
        except (OSError, LinkError, msgspec.MsgspecError, UnicodeDecodeError):
            return

    def close(self) -> None:
        """Shut down and close; the other end sees an end of stream."""
        with suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)
        self._sock.close()

    def _read(self, count: int) -> bytes:
        received = bytearray()
        while len(received) < count:
            piece = self._sock.recv(min(count - len(received), 1 << 20))
            if not piece:
                raise LinkError("the other process has ended")
            received += piece
        return bytes(received)


warm_up_structs(__name__)
