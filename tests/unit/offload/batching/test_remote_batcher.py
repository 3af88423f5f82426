"""Requests that one serving process reads and another runs: handed over, gathered, refused, taken back."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from time import monotonic
from types import TracebackType
from typing import Self

import numpy as np
import pytest

from edgesplit.client.client import Connection, Reply
from edgesplit.errors import Busy, EdgeError, FairShareExceeded, InferenceFailed, MalformedMessage, UsageError
from edgesplit.oip import protocol as oip
from edgesplit.release.manifest import Slice
from edgesplit.runtime import Tensor, Tensors
from edgesplit_offload.batching import ipc
from edgesplit_offload.batching.ipc import Failed, Leave, Link, Message, Ran, Run, TensorHeader
from edgesplit_offload.batching.remote_batcher import RemoteBatcher
from edgesplit_offload.models.remote_half import RemoteHalf
from edgesplit_offload.scheduling import arrivals
from edgesplit_offload.scheduling.run_times import BatchBenefit
from edgesplit_offload.server import OffloadServer
from support.handmade_release import CUT, MID, HandmadeRelease

PATIENCE_S = 20.0
GAINS = BatchBenefit({1: 1.0, 8: 1.0}, 8, 8)


class Gate:
    """A runtime whose runs wait until they may go on."""

    name = "gate"

    def __init__(self) -> None:
        self.may_run = threading.Event()
        self.may_run.set()
        self.begun = threading.Semaphore(0)
        self.fail: Exception | None = None

    def load(self, slice_: Slice, folder: object) -> Gate:
        return self

    def run(self, tensors: Tensors) -> dict[str, Tensor]:
        self.begun.release()
        assert self.may_run.wait(PATIENCE_S)
        if self.fail is not None:
            raise self.fail
        value = next(iter(tensors.values()))
        return {"mid": value, "out": 2 * value, "same": value}


class Pair:
    """Two serving processes' servers, of which `other` gathers what `first` reads; `sever` breaks their link."""

    def __init__(self, release: HandmadeRelease, **silence: float) -> None:
        self.gates = Gate(), Gate()
        self.sought: list[str] = []
        self.elsewhere = RemoteBatcher(self.sought.append, **silence)
        self.first = OffloadServer(
            Path("unused"), b"", open_release=release.open, runtime=self.gates[0], elsewhere=self.elsewhere
        )
        self.other = OffloadServer(
            Path("unused"), b"", open_release=release.open, runtime=self.gates[1], at_once=1, waiting=1,
            elsewhere=RemoteBatcher(lambda kind: None),
        )  # fmt: skip
        for server in (self.first, self.other):
            server.start()
            self.half(server).run_times.enable_batching(GAINS)

    def half(self, server: OffloadServer) -> RemoteHalf:
        return server.models.model(CUT).half

    def link(self) -> None:
        """As the supervisor does it."""
        self.ours, theirs = socket.socketpair()
        self.other.serve_peer(theirs)
        self.elsewhere.set_remote(self.half(self.first).kind, self.ours)

    def sever(self) -> None:
        self.ours.shutdown(socket.SHUT_RDWR)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        for gate in self.gates:
            gate.may_run.set()
        for server in (self.first, self.other):
            server.stop(1.0)


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[Pair]:
    with Pair(HandmadeRelease(tmp_path)) as servers:
        yield servers


def ask(server: OffloadServer, timeout_us: int = 0) -> Reply:
    with closing(Connection("127.0.0.1", server.port)) as connection:
        return ask_by(connection, timeout_us)


def ask_by(connection: Connection, timeout_us: int = 0) -> Reply:
    request = oip.InferRequest({"mid": MID}, id="i", parameters={"timeout": timeout_us} if timeout_us else {})
    buffers, length = oip.encode_request(request)
    return connection.exchange(
        "POST", f"/v2/models/{CUT}/infer", deadline=monotonic() + PATIENCE_S,
        headers={oip.HEADER_LENGTH: str(length)}, body=buffers,
    )  # fmt: skip


def answered(reply: Reply) -> bool:
    assert reply.status == 200, bytes(reply.body)
    found = oip.decode_response(reply.body, oip.header_length(reply.headers)).outputs["out"]
    return bool(np.array_equal(found, 2 * MID))


def asking(server: OffloadServer, count: int) -> tuple[list[threading.Thread], list[Reply]]:
    replies: list[Reply] = []
    threads = [threading.Thread(target=lambda: replies.append(ask(server))) for _ in range(count)]
    for one in threads:
        one.start()
    return threads, replies


def until(holds: Callable[[], bool]) -> None:
    end = monotonic() + PATIENCE_S
    while not holds():
        assert monotonic() < end
        threading.Event().wait(0.002)


def begins(gate: Gate) -> None:
    assert gate.begun.acquire(timeout=PATIENCE_S)


def test_requests_run_locally_until_the_batcher_of_their_kind_is_known(pair: Pair) -> None:
    """The supervisor is asked for the batcher without waiting for its answer; if it is this process, nothing else
    happens."""
    assert answered(ask(pair.first)) and answered(ask(pair.first))
    assert pair.sought == [pair.half(pair.first).kind]
    begins(pair.gates[0])
    pair.elsewhere.set_local(pair.sought[0])
    assert answered(ask(pair.first))
    assert not pair.gates[1].begun.acquire(blocking=False)


def test_requests_of_two_processes_share_a_run_and_each_gets_its_own_answer(pair: Pair) -> None:
    """Requests of both processes wait for the active run, and are batched in the next one."""
    pair.link()
    pair.gates[1].may_run.clear()
    blocking, first = asking(pair.other, 1)
    begins(pair.gates[1])
    beside, second = asking(pair.first, 1)  # as many as run: it begins beside
    begins(pair.gates[1])
    others = [asking(server, 2) for server in (pair.first, pair.other)]
    until(lambda: pair.other.scheduler.waiting == 4)
    pair.gates[1].may_run.set()
    for threads in (blocking, beside, others[0][0], others[1][0]):
        for one in threads:
            one.join(PATIENCE_S)
    replies = [*first, *second, *others[0][1], *others[1][1]]
    assert len(replies) == 6 and all(map(answered, replies))
    assert not pair.gates[0].begun.acquire(blocking=False)
    (told,) = pair.first.statistics.snapshot()
    assert told["inference_count"] == 3
    executions = [server.statistics.snapshot()[0]["execution_count"] for server in (pair.first, pair.other)]
    assert sum(executions) == 3


@pytest.mark.parametrize("reader", ["first", "other"])
def test_batcher_recognises_a_returning_client_whichever_process_reads_it(
    pair: Pair, monkeypatch: pytest.MonkeyPatch, reader: str
) -> None:
    """A client is recognised by its connection, so that a batch may wait for its next request."""
    monkeypatch.setattr(arrivals, "LONGEST_S", 60.0)
    pair.link()
    with closing(Connection("127.0.0.1", getattr(pair, reader).port)) as connection:
        for _ in range(2):
            assert answered(ask_by(connection))
        assert pair.half(pair.other).run_times.returns.forecast(0.0).clients == 1


def test_a_broken_batcher_link_costs_a_second_run_and_no_answer(pair: Pair) -> None:
    """Requests that were forwarded run locally, and so do later ones until the supervisor has named another batcher."""
    pair.link()
    pair.gates[1].may_run.clear()
    threads, replies = asking(pair.first, 2)
    begins(pair.gates[1])
    pair.sever()
    for one in threads:
        one.join(PATIENCE_S)
    assert len(replies) == 2 and all(map(answered, replies))
    assert answered(ask(pair.first))
    assert pair.sought


def test_requests_run_locally_while_the_batcher_hangs(tmp_path: Path) -> None:
    """A batcher that accepts what it is sent and never answers counts as hung: its requests run here, and it is not
    requested again for a while."""
    ours, theirs = socket.socketpair()
    with Pair(HandmadeRelease(tmp_path), silent_s=0.0, silent_runs=0.0) as pair, theirs:  # which is never read from
        pair.elsewhere.set_remote(pair.half(pair.first).kind, ours)
        assert answered(ask(pair.first)) and answered(ask(pair.first))
        assert not pair.sought


def test_refusals_and_failures_of_the_batcher_reach_the_client(pair: Pair) -> None:
    """A full queue of the batcher is 503 with Retry-After here; a model that fails there is 500 with the same text."""
    pair.link()
    pair.gates[1].fail = InferenceFailed("no such thing")
    failed = ask(pair.first)
    assert (failed.status, b"no such thing" in bytes(failed.body)) == (500, True)
    pair.gates[1].fail = None
    pair.gates[1].may_run.clear()
    pair.half(pair.other).run_times.max_batch = 1
    running = asking(pair.first, 1)[0]
    while not pair.other.scheduler.running:
        threading.Event().wait(0.002)
    running += asking(pair.first, 1)[0]
    until(lambda: pair.other.scheduler.waiting == 1)
    refused = ask(pair.first)
    assert (refused.status, "retry-after" in refused.headers) == (503, True)
    pair.gates[1].may_run.set()
    for one in running:
        one.join(PATIENCE_S)


def test_a_kind_that_the_batcher_does_not_batch_runs_locally_from_then_on(pair: Pair) -> None:
    """Two processes may measure differently; a batcher whose own measurement shows no gain would only cost."""
    pair.link()
    there = pair.half(pair.other)
    there.run_times.max_batch = 1
    there.is_measured = True
    assert answered(ask(pair.first)) and answered(ask(pair.first))
    assert not pair.gates[1].begun.acquire(blocking=False)


def test_a_forwarded_request_is_cancelled_when_its_client_disconnects(pair: Pair) -> None:
    """The process that read the request tells the batcher where it waits."""
    pair.link()
    pair.gates[1].may_run.clear()
    threads: list[threading.Thread] = []
    for _ in range(2):  # one runs, and one beside it
        threads += asking(pair.other, 1)[0]
        begins(pair.gates[1])
    buffers, length = oip.encode_request(oip.InferRequest({"mid": MID}))
    body = b"".join(buffers)
    head = f"POST /v2/models/{CUT}/infer HTTP/1.1\r\nhost: x\r\n{oip.HEADER_LENGTH}: {length}\r\n"
    with socket.create_connection(("127.0.0.1", pair.first.port)) as leaving:
        leaving.sendall(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
        until(lambda: pair.other.scheduler.waiting == 1)
    until(lambda: not pair.other.scheduler.waiting)
    pair.gates[1].may_run.set()
    for one in threads:
        one.join(PATIENCE_S)
    assert not pair.gates[1].begun.acquire(blocking=False)


def test_a_request_is_forwarded_only_where_batching_saves_more_than_the_copy(pair: Pair) -> None:
    """A run that saves less than messages and copies cost stays in the process that read it."""
    half = pair.half(pair.first)
    assert half.worth_forwarding
    half.run_times.enable_batching(BatchBenefit({1: 2e-4, 8: 8e-4}, 8, 8))
    assert not half.worth_forwarding


# On the wire


def test_tensors_pass_between_processes_unchanged() -> None:
    """Types, shapes and bits; at the other end they are views of one body."""
    tensors = {"a": np.arange(6, dtype=np.int64).reshape(2, 3), "b": np.float32([[1.5]]), "c": np.zeros((0, 4), bool)}
    told, buffers = ipc.encode_tensors(tensors)
    found = ipc.decode_tensors(told, memoryview(b"".join(buffers)))
    assert {name: (one.dtype, one.shape, one.tobytes()) for name, one in found.items()} == {
        name: (one.dtype, one.shape, one.tobytes()) for name, one in tensors.items()
    }


@pytest.mark.parametrize(
    ("told", "body"),
    [
        (TensorHeader("a", "FP32", (2,)), bytes(7)),
        (TensorHeader("a", "FP32", (2,)), bytes(9)),
        (TensorHeader("a", "FP33", (2,)), bytes(8)),
        (TensorHeader("a", "BYTES", (2,)), bytes(8)),
        (TensorHeader("a", "FP32", (-2,)), bytes(8)),
    ],
)
def test_tensors_that_do_not_fill_their_shape_are_refused(told: TensorHeader, body: bytes) -> None:
    """The length of the data must fit type and shape."""
    with pytest.raises(MalformedMessage):
        ipc.decode_tensors([told], memoryview(body))


def test_messages_arrive_in_order_whatever_their_size() -> None:
    """Small ones many at a time, large bodies in one piece; the end of the other end is the end."""
    ours, theirs = (Link(one) for one in socket.socketpair())
    said = [
        (Run(1, "m", 0.5, "camera-1", 7, (TensorHeader("a", "UINT8", (3,)),)), [memoryview(b"abc")]),
        (Leave(1), []),
        (Ran(2, 0.1, 3, True, 1.5, ()), [memoryview(bytes(300_000))]),
        *((Failed(number, "Busy", "full", 1.0), [memoryview(b"x" * number)]) for number in range(500)),
    ]

    for message, buffers in said:
        ours.send(message, buffers)
    heard: list[tuple[Message, bytes]] = []
    while ours.flush() or ours.is_stuck:
        heard += [(message, bytes(body)) for message, body in theirs.received()]
    ours.release()
    heard += [(message, bytes(body)) for message, body in theirs.received()]
    assert heard == [(message, b"".join(buffers)) for message, buffers in said]
    assert theirs.is_closed
    theirs.release()


def test_a_link_whose_peer_reads_nothing_is_closed() -> None:
    """What the peer did not read in time is dropped, and both ends see the end of the link."""
    ours, theirs = (Link(one) for one in socket.socketpair())
    ours.send(Leave(1), [memoryview(bytes(10_000_000))])
    ours.flush()
    ours.check_progress(monotonic() + ipc.STUCK_AFTER_S / 2)
    assert ours.is_stuck and not ours.is_closed
    ours.check_progress(monotonic() + 2 * ipc.STUCK_AFTER_S)
    assert ours.is_closed and not ours.is_stuck
    assert list(theirs.received()) == [] and theirs.is_closed
    for one in (ours, theirs):
        one.release()


@pytest.mark.parametrize("spoilt", [b"\xff" * 64, b"\0\0\0\1" + bytes(8) + b"\xc1", b"\0\0\0\5"])
def test_malformed_messages_close_the_link_to_a_peer(spoilt: bytes) -> None:
    """Nothing is raised, and no memory is reserved for a length that the peer claims."""
    ours, theirs = socket.socketpair()
    ours.sendall(spoilt)
    ours.close()
    link = Link(theirs)
    assert list(link.received()) == [] and link.is_closed
    link.release()


@pytest.mark.parametrize(
    "error", [Busy("full"), FairShareExceeded("greedy"), UsageError("odd"), RuntimeError("secret")]
)
def test_errors_keep_their_type_between_processes(error: Exception) -> None:
    """Busy keeps its retry time; an exception that is not ours is passed as its type alone."""
    error.retry_after_s = 3.0  # type: ignore[attr-defined]
    found = ipc.decode_error(ipc.encode_error(1, error))
    expected = type(error) if isinstance(error, EdgeError) else InferenceFailed
    assert type(found) is expected
    assert ("secret" in str(found)) is False
    assert not isinstance(found, Busy) or found.retry_after_s == 3.0
