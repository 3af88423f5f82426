"""What the supervisor and its serving processes say to each other, over a Unix socket that they were born with.

MessagePack behind a length of four bytes. Both ends are this program, so there is no version to agree on; yet each
message is bounded and of a known kind, and a peer that says anything else is one that has gone.
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
from edgesplit.msgspec_warmup import settle

LONGEST_BYTES = 64 * 2**20
LONGEST_KIND = 64
FRESH, LINK, GATHER = b"f", b"l", b"g"
"""What goes with a socket that is handed over: a connection that was just accepted; a link to the process that gathers
a kind of requests, whose name follows; or the other end of such a link."""
_LENGTH = struct.Struct("!I")


class Ready(msgspec.Struct, frozen=True, tag="ready"):
    """A serving process takes connections from now on."""


class Alive(msgspec.Struct, frozen=True, tag="alive"):
    """It still is, and none of its runs lasts suspiciously long."""


class Closed(msgspec.Struct, frozen=True, tag="closed"):
    """A connection that was handed to it has ended."""


class Ask(msgspec.Struct, frozen=True, tag="ask"):
    """It wants to know something of all of them."""

    number: int
    question: str
    argument: Any = None


class Question(msgspec.Struct, frozen=True, tag="question"):
    """The supervisor passes it on to each."""

    number: int
    question: str
    argument: Any = None


class Told(msgspec.Struct, frozen=True, tag="told"):
    """One's answer; `known` is false where it has none."""

    number: int
    known: bool
    answer: Any = None


class Answers(msgspec.Struct, frozen=True, tag="answers"):
    """All that came in time, back to who asked."""

    number: int
    answers: list[Any]


class Seek(msgspec.Struct, frozen=True, tag="seek"):
    """It has requests of this kind, which gain by company: which process gathers them?"""

    kind: str


class Yours(msgspec.Struct, frozen=True, tag="yours"):
    """It does itself. Where another one does, both are given the ends of a link instead."""

    kind: str


class Drain(msgspec.Struct, frozen=True, tag="drain"):
    """Finish what runs within that time, and end."""

    seconds: float


class Notice(msgspec.Struct, frozen=True, tag="notice"):
    """Say from now on that this server is not ready: it will end soon."""


Message = Ready | Alive | Closed | Ask | Question | Told | Answers | Seek | Yours | Drain | Notice
_DECODER: msgspec.msgpack.Decoder[Message] = msgspec.msgpack.Decoder(Message)


class Talk:
    """One end. Sending is safe from any thread, receiving is one thread's."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._sending = threading.Lock()

    def send(self, message: Message) -> bool:
        """Whether it went out: the other end may have gone."""
        raw = msgspec.msgpack.encode(message)
        with self._sending:
            try:
                self._sock.sendall(_LENGTH.pack(len(raw)) + raw)
            except OSError:
                return False
        return True

    def messages(self) -> Iterator[Message]:
        """What the other end says, until it has gone."""
        try:
            while True:
                (length,) = _LENGTH.unpack(self._read(_LENGTH.size))
                if length > LONGEST_BYTES:
                    return
                yield _DECODER.decode(self._read(length))
        except (OSError, LinkError, msgspec.MsgspecError, UnicodeDecodeError):
            return

    def close(self) -> None:
        """The other end sees it go."""
        with suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)
        self._sock.close()

    def _read(self, count: int) -> bytes:
        received = bytearray()
        while len(received) < count:
            piece = self._sock.recv(min(count - len(received), 1 << 20))
            if not piece:
                raise LinkError("the other process has gone")
            received += piece
        return bytes(received)


settle(__name__)
