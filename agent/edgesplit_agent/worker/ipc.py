"""Messages between agent and worker: MessagePack over a socket pair; tensors lie in shared memory.

A message has any size that a manifest may cause, at most `MESSAGE_BYTES`. It travels as packets (SOCK_SEQPACKET), each
a byte that tells whether more follow (`MORE`, `LAST`) and a part of the message; all parts but the last have
`PART_BYTES`. Descriptors travel beside the first packet, only towards the worker. The agent checks everything that a
worker sends before using it: the model in the worker may have taken control of it.
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections import deque
from collections.abc import Sequence
from time import perf_counter
from typing import Annotated, Final, Generic, Literal, TypeVar

import msgspec
from msgspec import Meta

from edgesplit.client.direct.grant import LaneTensor
from edgesplit.errors import MalformedMessage
from edgesplit.input_spec import InputSpec
from edgesplit.limits import LIMITS
from edgesplit.msgspec_warmup import warm_up_structs
from edgesplit.release.manifest import Slice
from edgesplit.runtime.options import EngineOptions

MESSAGE_BYTES: Final = 4 * LIMITS.manifest_bytes
"""Maximum size of a message in bytes. Messages name slices, chunks and tensors of one manifest, each of them at most
once or with a few numbers beside it: four times the largest manifest has room for all of them."""
PART_BYTES: Final = 128 * 1024 - 1
"""Size in bytes of each part of a message but the last. With its first byte a part fits into a socket's buffer."""
LANE_BYTES: Final = 128 * 1024
"""Maximum size in bytes of the description of a lane (`OpenLane`), which is one packet. A model whose description is
longer gets no lane, and its requests go through the agent."""
MORE, LAST = b"\x01", b"\x00"
"""First byte of a packet: other parts of the message follow, or this is its last one."""
MAX_DESCRIPTORS = 8
"""Maximum number of descriptors beside one message."""
MAX_RANK = 32
"""Maximum number of dimensions of a tensor."""
MAX_TEXT = 2_000
"""Maximum number of characters of an error text."""
FailureKind = Literal["usage", "refused", "failed", "memory"]
Count = Annotated[int, Meta(ge=0, le=2**62)]
Name = Annotated[str, Meta(max_length=LIMITS.manifest_bytes)]


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
    input_specs: dict[str, InputSpec] = {}
    """By input slice, of which a family has one per variant."""
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
        self._unsent: deque[memoryview] = deque()
        """Parts of a message whose first part was sent: the other end waits for them."""
        self._received: list[bytes] = []
        """Parts of a message of which more follow."""

    def fileno(self) -> int:
        """The descriptor, for poll."""
        return self._socket.fileno()

    def send(self, message: ToWorker | ToAgent, files: Sequence[int] = (), timeout_s: float | None = None) -> None:
        """Send a message. Raises TimeoutError; ConnectionError where the other end is closed; MalformedMessage if it is
        too long.

        A message that was sent in part when the time was over is completed by the next call, of `receive` as well.
        """
        raw = self._encoder.encode(message)
        if len(raw) > MESSAGE_BYTES:
            raise MalformedMessage(f"a message of {len(raw)} bytes to or from a worker, at most {MESSAGE_BYTES}")
        until = _end_of(timeout_s)
        self._send_rest(until)
        first = raw if len(raw) <= PART_BYTES else memoryview(raw)[:PART_BYTES]
        self._set_timeout(_left_s(until))
        packet = [LAST if first is raw else MORE, first]
        if files:
            socket.send_fds(self._socket, packet, list(files))
        else:
            self._socket.sendmsg(packet)
        if first is not raw:
            view = memoryview(raw)
            self._unsent.extend(view[at : at + PART_BYTES] for at in range(PART_BYTES, len(view), PART_BYTES))
            self._send_rest(until)

    def receive(self, timeout_s: float | None = None) -> T:
        """The next message. Raises TimeoutError, MalformedMessage, and EOFError where the other end is closed.

        Descriptors that come with it are not received. A message that was received in part when the time was over is
        completed by the next call.
        """
        until = _end_of(timeout_s)
        self._send_rest(until)
        while True:
            self._set_timeout(_left_s(until))
            message = self._add_part(self._socket.recv(1 + PART_BYTES))
            if message is not None:
                return self._decode(message)

    def receive_files(self) -> tuple[T, list[int]]:
        """The next message, without a timeout, with its descriptors, which the caller must close."""
        self._set_timeout(None)
        raw, files, _, _ = socket.recv_fds(self._socket, 1 + PART_BYTES, MAX_DESCRIPTORS)
        try:
            message = self._add_part(raw)
            while message is None:
                message = self._add_part(self._socket.recv(1 + PART_BYTES))
            return self._decode(message), files
        except BaseException:
            for descriptor in files:
                os.close(descriptor)
            raise

    def _send_rest(self, until: float | None) -> None:
        """Send what is left of a message that was sent in part."""
        while self._unsent:
            self._set_timeout(_left_s(until))
            self._socket.sendmsg([MORE if len(self._unsent) > 1 else LAST, self._unsent[0]])
            self._unsent.popleft()

    def _add_part(self, packet: bytes) -> bytes | memoryview | None:
        """The message that this packet completes, or None. EOFError for the end of the connection; MalformedMessage for
        a packet of another kind, and as soon as a message is too long."""
        if not packet:
            raise EOFError
        part = memoryview(packet)[1:]
        if packet[:1] == LAST:
            if not self._received:
                return part
            message = b"".join((*self._received, part))
            self._received.clear()
            return message
        # Full parts only, so that their number bounds the size.
        if packet[:1] != MORE or len(part) != PART_BYTES or len(self._received) >= MESSAGE_BYTES // PART_BYTES:
            self._received.clear()
            raise MalformedMessage(
                f"between agent and worker: a packet that belongs to no message of {MESSAGE_BYTES} bytes"
            )
        self._received.append(packet[1:])
        return None

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

    def _decode(self, raw: bytes | memoryview) -> T:
        try:
            return self._decoder.decode(raw)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, ValueError) as error:
            raise MalformedMessage(f"between agent and worker: {error}") from error


def _end_of(timeout_s: float | None) -> float | None:
    """When a call with this timeout ends, by perf_counter; None: never."""
    return None if timeout_s is None else perf_counter() + timeout_s


def _left_s(until: float | None) -> float | None:
    """Seconds until then, at least 1 ms: a socket treats a timeout of 0 as non-blocking."""
    return None if until is None else max(0.001, until - perf_counter())


warm_up_structs(__name__)
