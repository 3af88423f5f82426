"""Messages of any size between agent and worker, in parts, and what a worker may send instead."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Iterator

import pytest

from edgesplit.errors import MalformedMessage
from edgesplit.limits import LIMITS
from edgesplit.release.manifest import Slice, SliceFile, TensorSpec, chunk_of
from edgesplit_agent.worker import ipc
from edgesplit_agent.worker.ipc import AddSlice, Channel, Failed, Opened

PATIENCE_S = 30.0
Ends = tuple[Channel[ipc.ToAgent], Channel[ipc.ToWorker], socket.socket]


@pytest.fixture
def ends() -> Iterator[Ends]:
    """The agent's end, the worker's end, and the worker's socket."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        yield Channel(ours, ipc.ToAgent), Channel(theirs, ipc.ToWorker), theirs  # type: ignore[arg-type]


def note_of(size: int) -> Opened:
    """A message that has as many bytes as this when encoded, or a few more."""
    return Opened((), {}, ("x" * size,))


@pytest.mark.parametrize("size", [0, 1, ipc.PART_BYTES - 60, ipc.PART_BYTES, 2 * ipc.PART_BYTES, 1_000_000])
def test_a_message_of_more_than_128_kib_was_refused(ends: Ends, size: int) -> None:
    """A message of any size arrives whole, and the next one after it."""
    agent, worker, _ = ends
    sender = threading.Thread(target=lambda: [worker.send(note_of(size)), worker.send(note_of(1))])
    sender.start()
    assert agent.receive(PATIENCE_S) == note_of(size)
    assert agent.receive(PATIENCE_S) == note_of(1)
    sender.join()


def test_messages_have_room_for_whatever_a_manifest_causes(ends: Ends) -> None:
    """The longest name, chunk list and shape of the largest manifest."""
    agent, worker, _ = ends
    size = LIMITS.manifest_bytes
    names = tuple(TensorSpec(f"{place:08}", "FP32", (1, -1)) for place in range(size // 50))
    chunks = tuple(chunk_of(bytes([place])) for place in range(256)) * (size // 100 // 256)
    for slice_ in (
        Slice("s", "onnx", ("s",), names, ()),
        Slice("s", "onnx", ("s",), (TensorSpec("n" * size, "FP32", ()),), ()),
        Slice("s", "onnx", ("s",), (), (), (SliceFile("weights.bin", len(chunks), "0" * 64, chunks),)),
    ):
        sender = threading.Thread(target=agent.send, args=(AddSlice(slice_, "/folder"), (0,), PATIENCE_S))
        sender.start()
        received, files = worker.receive_files()
        sender.join()
        assert received == AddSlice(slice_, "/folder") and len(files) == 1
        os.close(files[0])
    assert LIMITS.manifest_bytes <= ipc.MESSAGE_BYTES
    with pytest.raises(MalformedMessage, match="at most"):
        agent.send(AddSlice(Slice("s", "onnx", (), (), ()), "f" * ipc.MESSAGE_BYTES))


def test_a_message_that_was_sent_in_part_is_completed_by_the_next_call(ends: Ends) -> None:
    """A receiver that is busy for longer than the timeout loses no message, and none is mixed with another."""
    agent, worker, _ = ends
    large = AddSlice(Slice("s", "onnx", (), (), ()), "f" * 3_000_000)
    with pytest.raises(TimeoutError):
        agent.send(large, (), 0.01)
    received: list[object] = []
    reader = threading.Thread(target=lambda: received.extend(worker.receive_files()[0] for _ in range(2)))
    reader.start()
    agent.send(ipc.UnmapSegments((7,)), (), PATIENCE_S)
    reader.join()
    assert received == [large, ipc.UnmapSegments((7,))]
    with pytest.raises(TimeoutError):
        agent.send(large, (), 0.01)
    answerer = threading.Thread(target=lambda: (worker.receive_files(), worker.send(Opened((), {}))))
    answerer.start()
    assert agent.receive(PATIENCE_S) == Opened((), {})
    answerer.join()


def test_a_message_that_was_received_in_part_is_completed_by_the_next_call(ends: Ends) -> None:
    """A timeout between two parts loses none of them."""
    agent, _, raw = ends
    message = note_of(2 * ipc.PART_BYTES)
    encoded = agent._encoder.encode(message)
    raw.send(ipc.MORE + encoded[: ipc.PART_BYTES])
    with pytest.raises(TimeoutError):
        agent.receive(0.01)
    rest = threading.Thread(
        target=lambda: [
            raw.send(ipc.MORE + encoded[ipc.PART_BYTES : 2 * ipc.PART_BYTES]),
            raw.send(ipc.LAST + encoded[2 * ipc.PART_BYTES :]),
        ]
    )
    rest.start()
    assert agent.receive(PATIENCE_S) == message
    rest.join()


@pytest.mark.parametrize(
    "packet",
    [ipc.MORE, ipc.MORE + b"x", b"\x02", b"\x02" + bytes(ipc.PART_BYTES)],
    ids=["empty", "short", "kind", "full"],
)
def test_a_packet_that_belongs_to_no_message_is_refused(ends: Ends, packet: bytes) -> None:
    """Parts without an end cannot be endless either, because all but the last are full; the next message is read."""
    agent, worker, raw = ends
    raw.send(packet)
    with pytest.raises(MalformedMessage):
        agent.receive(PATIENCE_S)
    worker.send(Failed(0, "failed", "x"))
    assert agent.receive(PATIENCE_S) == Failed(0, "failed", "x")


def test_parts_without_an_end_are_refused_at_the_limit(ends: Ends) -> None:
    """What the agent holds of a message is bounded."""
    agent, _, raw = ends
    sender = threading.Thread(target=_send_endlessly, args=(raw,))
    sender.start()
    with pytest.raises(MalformedMessage):
        agent.receive(PATIENCE_S)
    agent.shutdown()
    sender.join()


def _send_endlessly(raw: socket.socket) -> None:
    try:
        while True:
            raw.send(ipc.MORE + bytes(ipc.PART_BYTES))
    except OSError:
        return
