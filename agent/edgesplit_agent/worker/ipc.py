"""What agent and worker say to each other: small messages over a socket pair; tensors lie in shared memory.

One message is one packet (SOCK_SEQPACKET) of MessagePack, at most `MESSAGE_BYTES`; files travel as descriptors beside
it, towards the worker only. The agent believes nothing that a worker says before it has checked it: the model in there
may have made it say anything.
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Sequence
from typing import Annotated, Generic, Literal, TypeVar

import msgspec
from msgspec import Meta

from edgesplit.client.direct.grant import LaneTensor
from edgesplit.errors import MalformedMessage
from edgesplit.input_spec import InputSpec
from edgesplit.msgspec_warmup import settle
from edgesplit.release.manifest import Slice
from edgesplit.runtime.options import Setup

MESSAGE_BYTES = 128 * 1024
MOST_FILES = 8
"""Descriptors beside one message."""
MOST_RANK = 32
TEXT = 2_000
"""Characters of an error."""
Kind = Literal["usage", "refused", "failed", "memory"]
Count = Annotated[int, Meta(ge=0, le=2**62)]
Name = Annotated[str, Meta(max_length=4_096)]


class Take(msgspec.Struct, frozen=True, tag="take"):
    """A slice that is to be opened, from its folder, or from the memory files beside this message, named in order."""

    slice: Slice
    folder: str = ""
    files: tuple[str, ...] = ()


class Merge(msgspec.Struct, frozen=True, array_like=True):
    """Neighbouring slices that are to run as one session, and what that gives."""

    order: tuple[str, ...]
    outputs: tuple[str, ...]


class Open(msgspec.Struct, frozen=True, tag="open"):
    """Open everything taken, in place of what was open. The answer is Opened, or Failed."""

    setup: Setup
    optional: tuple[str, ...] = ()
    """Slices that may be refused."""
    input_spec: InputSpec | None = None
    slice_s: dict[str, float] | None = None
    """Emulated: the seconds that each slice takes."""
    memory_bytes: int = 0
    """May be allocated; 0: as much as there is."""
    merges: tuple[Merge, ...] = ()
    shares: dict[str, float] = {}
    """What merged slices take of their common time, in any unit."""


class Map(msgspec.Struct, frozen=True, tag="map"):
    """A piece of shared memory, by the descriptor beside this message. No answer."""

    segment: int
    bytes: int


class Forget(msgspec.Struct, frozen=True, tag="forget"):
    """Shared memory that is used no more. No answer."""

    segments: tuple[int, ...]


class Desk(msgspec.Struct, frozen=True, tag="desk"):
    """Where lanes come from: beside this message are the words of `lane_words` and a socket of `Lane`s. No answer."""

    words: Count


class Lane(msgspec.Struct, frozen=True, tag="lane"):
    """A lane, by the descriptors beside this message: its socket, and its memory where that is shared. What is asked on
    it runs these slices, over tensors in these places. No answer; it ends when its socket does."""

    number: Count
    place: Count
    """In the words."""
    order: tuple[str, ...]
    inputs: tuple[LaneTensor, ...]
    outputs: tuple[LaneTensor, ...]
    answers_at: Count
    bytes: Count
    shared: bool


class Placed(msgspec.Struct, frozen=True, array_like=True):
    """A tensor in shared memory."""

    name: Name
    segment: Count
    offset: Count
    bytes: Count
    datatype: Annotated[str, Meta(max_length=16)]
    shape: Annotated[tuple[Count, ...], Meta(max_length=MOST_RANK)]


class Room(msgspec.Struct, frozen=True, array_like=True):
    """Where tensors may be put."""

    segment: int
    offset: int
    bytes: int


class Run(msgspec.Struct, frozen=True, tag="run"):
    """Run these slices in order. The answer is Ran, TooSmall or Failed."""

    number: int
    order: tuple[str, ...]
    inputs: tuple[Placed, ...]
    wants: tuple[str, ...]
    room: Room


class Give(msgspec.Struct, frozen=True, tag="give"):
    """More room for what TooSmall was said of. The answer is Ran."""

    number: int
    room: Room


class Opened(msgspec.Struct, frozen=True, tag="opened"):
    """Everything is open."""

    slices: tuple[Name, ...]
    refused: dict[str, str]
    """Optional slices that are not, and why."""
    notes: tuple[str, ...] = ()
    """What people should know: an accelerator that is not used, and why."""
    merged: Count = 0
    """So many of the merges are open."""


class Ran(msgspec.Struct, frozen=True, tag="ran"):
    """The wanted tensors, in the room given."""

    number: int
    outputs: tuple[Placed, ...]
    seconds: dict[str, float]
    late: Count = 0
    notes: tuple[str, ...] = ()
    """As in Opened."""


class TooSmall(msgspec.Struct, frozen=True, tag="small"):
    """The wanted tensors need so much."""

    number: int
    bytes: Count


class Failed(msgspec.Struct, frozen=True, tag="failed"):
    """It could not be done."""

    number: int
    kind: Kind
    text: Annotated[str, Meta(max_length=TEXT)]


ToWorker = Take | Open | Map | Forget | Run | Give | Desk
ToAgent = Opened | Ran | TooSmall | Failed
T = TypeVar("T")


class Channel(Generic[T]):
    """One end. It reads messages of one union."""

    def __init__(self, end: socket.socket, kind: type[T]) -> None:
        self._socket = end
        end.settimeout(None)
        self._timeout_s: float | None = None
        self._decoder = msgspec.msgpack.Decoder(kind)
        self._encoder = msgspec.msgpack.Encoder()

    def fileno(self) -> int:
        """For poll."""
        return self._socket.fileno()

    def send(self, message: ToWorker | ToAgent, files: Sequence[int] = (), timeout_s: float | None = None) -> None:
        """TimeoutError; ConnectionError where nobody listens; MalformedMessage where it is too long to be sent."""
        raw = self._encoder.encode(message)
        if len(raw) > MESSAGE_BYTES:
            raise MalformedMessage(f"a message of {len(raw)} bytes to or from a worker, at most {MESSAGE_BYTES}")
        self._allow(timeout_s)
        if files:
            socket.send_fds(self._socket, [raw], list(files))
        else:
            self._socket.send(raw)

    def receive(self, timeout_s: float | None = None) -> T:
        """The next message. TimeoutError; EOFError where the other end is gone; MalformedMessage. Descriptors that come
        with it are not taken."""
        self._allow(timeout_s)
        return self._decoded(self._socket.recv(MESSAGE_BYTES))

    def receive_files(self) -> tuple[T, list[int]]:
        """The next message, whenever it comes, with its descriptors, which are the caller's to close."""
        self._allow(None)
        raw, files, _, _ = socket.recv_fds(self._socket, MESSAGE_BYTES, MOST_FILES)
        try:
            return self._decoded(raw), files
        except BaseException:
            for one in files:
                os.close(one)
            raise

    def shut(self) -> None:
        """Nothing more comes or goes; who waits here is woken."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Give the descriptor back. Nobody may be sending or receiving."""
        self._socket.close()

    def _allow(self, timeout_s: float | None) -> None:
        """The next call may take so long; a worker, who waits for ever, tells the kernel once."""
        if timeout_s != self._timeout_s:
            self._socket.settimeout(timeout_s)
            self._timeout_s = timeout_s

    def _decoded(self, raw: bytes) -> T:
        if not raw:
            raise EOFError
        try:
            return self._decoder.decode(raw)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, ValueError) as error:
            raise MalformedMessage(f"between agent and worker: {error}") from error


settle(__name__)
