"""Messages between agent and worker: small packets over a socket pair; tensors lie in shared memory.

One message is one packet (SOCK_SEQPACKET) of MessagePack of at most `MESSAGE_BYTES`. Descriptors travel beside it, only
towards the worker. The agent checks everything that a worker sends before using it: the model in the worker may have
taken control of it.
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
from edgesplit.msgspec_warmup import warm_up_structs
from edgesplit.release.manifest import Slice
from edgesplit.runtime.options import EngineOptions

MESSAGE_BYTES = 128 * 1024
"""Maximum size of a message in bytes."""
MAX_DESCRIPTORS = 8
"""Maximum number of descriptors beside one message."""
MAX_RANK = 32
"""Maximum number of dimensions of a tensor."""
MAX_TEXT = 2_000
"""Maximum number of characters of an error text."""
FailureKind = Literal["usage", "refused", "failed", "memory"]
Count = Annotated[int, Meta(ge=0, le=2**62)]
Name = Annotated[str, Meta(max_length=4_096)]


class AddSlice(msgspec.Struct, frozen=True, tag="take"):
    """Add a slice to those that `OpenSlices` opens: from its folder, or from the memory files beside this message,
    named in order. No answer."""

    slice: Slice
    folder: str = ""
    files: tuple[str, ...] = ()


class MergeSpec(msgspec.Struct, frozen=True, array_like=True):
    """Neighbouring slices that shall run as one session, and the outputs of that session."""

    order: tuple[str, ...]
    outputs: tuple[str, ...]


class OpenSlices(msgspec.Struct, frozen=True, tag="open"):
    """Open all added slices, in place of what was open. The answer is Opened or Failed."""

    setup: EngineOptions
    """Engine options."""
    optional: tuple[str, ...] = ()
    """Slices that may be refused."""
    input_spec: InputSpec | None = None
    slice_s: dict[str, float] | None = None
    """Emulated device: seconds that each slice takes; None: not emulated."""
    memory_bytes: int = 0
    """Limit of allocated memory in bytes; 0: none."""
    merges: tuple[MergeSpec, ...] = ()
    shares: dict[str, float] = {}
    """Weights, in any unit, by which the time of a merged session is divided among its slices."""


class MapSegment(msgspec.Struct, frozen=True, tag="map"):
    """Map a segment of shared memory, whose descriptor is beside this message. No answer."""

    segment: int
    bytes: int


class UnmapSegments(msgspec.Struct, frozen=True, tag="forget"):
    """Unmap segments that are no longer used. No answer."""

    segments: tuple[int, ...]


class PrepareLanes(msgspec.Struct, frozen=True, tag="desk"):
    """Prepare for lanes: beside this message are the shared state (`direct.shared_state`) and a socket that delivers
    `OpenLane` messages. No answer."""

    words: Count


class OpenLane(msgspec.Struct, frozen=True, tag="lane"):
    """Open a lane: beside this message are its socket and, where shared, its memory.

    Requests on the lane run these slices over tensors at these places. No answer; the lane ends when its socket does.
    """

    number: Count
    place: Count
    """Index of the lane in the shared state."""
    order: tuple[str, ...]
    inputs: tuple[LaneTensor, ...]
    outputs: tuple[LaneTensor, ...]
    answers_at: Count
    bytes: Count
    shared: bool


class SharedTensor(msgspec.Struct, frozen=True, array_like=True):
    """Reference to a tensor in shared memory."""

    name: Name
    segment: Count
    offset: Count
    bytes: Count
    datatype: Annotated[str, Meta(max_length=16)]
    shape: Annotated[tuple[Count, ...], Meta(max_length=MAX_RANK)]


class SharedBuffer(msgspec.Struct, frozen=True, array_like=True):
    """Reference to a buffer in shared memory, where outputs may be written."""

    segment: int
    offset: int
    bytes: int


class RunRequest(msgspec.Struct, frozen=True, tag="run"):
    """Run these slices in order. The answer is RunResult, BufferTooSmall or Failed."""

    number: int
    order: tuple[str, ...]
    inputs: tuple[SharedTensor, ...]
    wants: tuple[str, ...]
    room: SharedBuffer


class GrantBuffer(msgspec.Struct, frozen=True, tag="give"):
    """A larger buffer, in reply to BufferTooSmall; of 0 bytes where there is none. The answer is RunResult or
    Failed."""

    number: int
    room: SharedBuffer


class Opened(msgspec.Struct, frozen=True, tag="opened"):
    """All slices are open."""

    slices: tuple[Name, ...]
    refused: dict[str, str]
    """Reasons by optional slice that could not be opened."""
    notes: tuple[str, ...] = ()
    """Notes for operators, such as an accelerator that is not used and why."""
    merged: Count = 0
    """Number of merged sessions that are open."""


class RunResult(msgspec.Struct, frozen=True, tag="ran"):
    """The run's outputs, in the buffer given."""

    number: int
    outputs: tuple[SharedTensor, ...]
    seconds: dict[str, float]
    late: Count = 0
    notes: tuple[str, ...] = ()
    """Notes for operators, as in Opened."""


class BufferTooSmall(msgspec.Struct, frozen=True, tag="small"):
    """The outputs need this many bytes."""

    number: int
    bytes: Count


class Failed(msgspec.Struct, frozen=True, tag="failed"):
    """The request failed."""

    number: int
    kind: FailureKind
    text: Annotated[str, Meta(max_length=MAX_TEXT)]


ToWorker = AddSlice | OpenSlices | MapSegment | UnmapSegments | RunRequest | GrantBuffer | PrepareLanes
ToAgent = Opened | RunResult | BufferTooSmall | Failed
T = TypeVar("T")


class Channel(Generic[T]):
    """One end of the connection; decodes messages of one union."""

    def __init__(self, end: socket.socket, kind: type[T]) -> None:
        self._socket = end
        end.settimeout(None)
        self._timeout_s: float | None = None
        self._decoder = msgspec.msgpack.Decoder(kind)
        self._encoder = msgspec.msgpack.Encoder()

    def fileno(self) -> int:
        """The descriptor, for poll."""
        return self._socket.fileno()

    def send(self, message: ToWorker | ToAgent, files: Sequence[int] = (), timeout_s: float | None = None) -> None:
        """Send a message. Raises TimeoutError; ConnectionError where the other end is closed; MalformedMessage if it is
        too long."""
        raw = self._encoder.encode(message)
        if len(raw) > MESSAGE_BYTES:
            raise MalformedMessage(f"a message of {len(raw)} bytes to or from a worker, at most {MESSAGE_BYTES}")
        self._set_timeout(timeout_s)
        if files:
            socket.send_fds(self._socket, [raw], list(files))
        else:
            self._socket.send(raw)

    def receive(self, timeout_s: float | None = None) -> T:
        """The next message. Raises TimeoutError, MalformedMessage, and EOFError where the other end is closed.

        Descriptors that come with it are not received.
        """
        self._set_timeout(timeout_s)
        return self._decode(self._socket.recv(MESSAGE_BYTES))

    def receive_files(self) -> tuple[T, list[int]]:
        """The next message, without a timeout, with its descriptors, which the caller must close."""
        self._set_timeout(None)
        raw, files, _, _ = socket.recv_fds(self._socket, MESSAGE_BYTES, MAX_DESCRIPTORS)
        try:
            return self._decode(raw), files
        except BaseException:
            for descriptor in files:
                os.close(descriptor)
            raise

    def shutdown(self) -> None:
        """Shut the connection down in both directions, which wakes a thread that waits on it."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close the descriptor. No thread may be sending or receiving."""
        self._socket.close()

    def _set_timeout(self, timeout_s: float | None) -> None:
        """Set the timeout of the next call; a worker, which always waits without one, makes the system call only
        once."""
        if timeout_s != self._timeout_s:
            self._socket.settimeout(timeout_s)
            self._timeout_s = timeout_s

    def _decode(self, raw: bytes) -> T:
        if not raw:
            raise EOFError
        try:
            return self._decoder.decode(raw)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, ValueError) as error:
            raise MalformedMessage(f"between agent and worker: {error}") from error


warm_up_structs(__name__)
