"""The offload server when its processes die or hang, clients are slow or cut off, and it is stopped under load."""

from __future__ import annotations

import os
import random
import select
import signal
import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from time import monotonic

import numpy as np
import pytest

from edgesplit.client.connection import Connection
from edgesplit.oip import protocol as oip
from edgesplit.release.manifest import Slice
from edgesplit.runtime import Tensor, Tensors
from edgesplit_offload.server import OffloadServer
from support.edgesplit_processes import eventually
from support.handmade_release import CUT, MID, HandmadeRelease
from support.offload_processes import PATIENCE_S, Askers, Serving, Signed, signed_release

SEED = int(os.environ["EDGESPLIT_SEED"])
KILLS = int(os.environ.get("EDGESPLIT_OFFLOAD_KILLS", "2"))
CUTS = int(os.environ.get("EDGESPLIT_OFFLOAD_CUTS", "60"))
SLOW = 100


@pytest.fixture(scope="module")
def signed(tmp_path_factory: pytest.TempPathFactory) -> Signed:
    return signed_release(tmp_path_factory.mktemp("release"))


@pytest.fixture(scope="module")
def serving(signed: Signed) -> Iterator[Serving]:
    with Serving(signed, "--processes", 2) as running:
        yield running


def begun(askers: Askers) -> bool:
    """Has every one been answered, again since it was last asked?"""
    return min(askers.answered) > 0


def goes_on(askers: Askers, before: list[int]) -> None:
    """Everybody is answered again."""
    eventually("all go on", lambda: all(now > was for now, was in zip(askers.answered, before, strict=True)))


def replaced(serving: Serving, victim: int) -> None:
    """Another process took its place."""
    eventually("another took its place", lambda: len(serving.workers) == 2 and victim not in serving.workers)


def test_a_killed_serving_process_ends_only_its_own_connections_and_is_replaced(serving: Serving) -> None:
    """SIGKILL under load, again and again: the others go on on theirs, nobody is refused, no answer is wrong."""
    rng = random.Random(SEED)
    askers = Askers(serving, 4).start()
    try:
        eventually("everybody was answered", lambda: begun(askers))
        for _ in range(KILLS):
            workers = eventually("both processes live", lambda: w if len(w := serving.workers) == 2 else None)
            victim = rng.choice(workers)
            os.kill(victim, signal.SIGKILL)
            replaced(serving, victim)
            goes_on(askers, list(askers.answered))
    finally:
        askers.stop()
    assert (askers.wrong, askers.refused) == ([], [0] * 4)
    assert max(askers.broken) <= KILLS
    assert serving.answer() == [2.0] * 4


def test_a_hung_serving_process_is_replaced(signed: Signed) -> None:
    """SIGSTOP: it says nothing any more, is killed, and the next one serves who connected to it."""
    with Serving(signed, "--processes", 2, "--hung-after", "3") as serving:
        victim = serving.workers[0]
        os.kill(victim, signal.SIGSTOP)
        replaced(serving, victim)
        for value in range(4):
            eventually("it is answered", lambda value=value: serving.answer(value) == [2.0 * value] * 4)


def test_stopping_under_load_cuts_no_answer(signed: Signed) -> None:
    """SIGTERM: exit code 0, no process is left, no answer is cut or wrong."""
    with Serving(signed, "--processes", 2) as serving:
        askers = Askers(serving, 4).start()
        eventually("everybody was answered", lambda: begun(askers))
        workers = serving.workers
        assert serving.end() == 0
        askers.stop()
    assert askers.wrong == []
    assert not any(Path(f"/proc/{pid}").exists() for pid in workers)


def test_serving_processes_end_with_their_supervisor(signed: Signed) -> None:
    """SIGKILL of the supervisor leaves nothing behind, and the port is free."""
    with Serving(signed, "--processes", 2) as serving:
        workers = [os.pidfd_open(pid) for pid in serving.workers]
        serving.process.kill()
        for descriptor in workers:
            assert select.select([descriptor], [], [], PATIENCE_S)[0]
            os.close(descriptor)
    with socket.create_server(("127.0.0.1", serving.port)):
        pass


class Slow:
    """A runtime whose runs wait for leave, and whose answers are large."""

    name = "slow"

    def __init__(self, answer_bytes: int = 16) -> None:
        self.leave = threading.Event()
        self.begun = threading.Semaphore(0)
        self.runs = 0
        self._out = np.zeros((1, answer_bytes // 4), np.float32)

    def load(self, slice_: Slice, folder: Path) -> Slow:
        return self

    def run(self, tensors: Tensors) -> dict[str, Tensor]:
        self.runs += 1
        self.begun.release()
        assert self.leave.wait(PATIENCE_S)
        return {"mid": MID, "out": self._out, "same": MID}


@pytest.fixture
def release(tmp_path: Path) -> HandmadeRelease:
    return HandmadeRelease(tmp_path)


def request() -> bytes:
    """One inference as it travels."""
    buffers, length = oip.encode_request(oip.InferRequest({"mid": MID}))
    body = b"".join(buffers)
    sizes = [f"content-length: {len(body)}", f"{oip.HEADER_LENGTH}: {length}"]
    return "\r\n".join([f"POST /v2/models/{CUT}/infer HTTP/1.1", "host: x", *sizes, "", ""]).encode() + body


def test_accepted_requests_are_answered_when_the_server_stops(release: HandmadeRelease) -> None:
    """Two run and four wait when it is told to stop: not ready any more, nobody new comes in, and all six are
    answered."""
    slow = Slow()
    server = OffloadServer(Path("unused"), b"", open_release=release.open, runtime=slow, at_once=2)
    server.start()
    got: list[tuple[int, str]] = []

    def ask() -> None:
        with socket.create_connection(("127.0.0.1", server.port), timeout=PATIENCE_S) as sock:
            sock.sendall(request())
            answer = b"".join(iter(lambda: sock.recv(65536), b""))
            got.append((int(answer.split()[1]), "close" if b"connection: close" in answer else "kept"))

    threads = [threading.Thread(target=ask) for _ in range(6)]
    for thread in threads:
        thread.start()
    eventually("two run and four wait", lambda: (server.scheduler.running, server.scheduler.waiting) == (2, 4))
    with closing(Connection("127.0.0.1", server.port)) as other:
        server.set_not_ready()
        ready = other.exchange("GET", "/v2/health/ready", deadline=monotonic() + PATIENCE_S)
        assert ready.status == 503
    stopping = threading.Thread(target=server.stop, args=(PATIENCE_S,))
    stopping.start()
    eventually("nobody new comes in", lambda: not _connects(server.port))
    slow.leave.set()
    for thread in (*threads, stopping):
        thread.join(PATIENCE_S)
    assert got == [(200, "close")] * 6


def _connects(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), timeout=PATIENCE_S).close()
    except OSError:
        return False
    return True


def test_a_hundred_clients_that_do_not_read_block_no_run_and_no_queue_place(release: HandmadeRelease) -> None:
    """Each has asked for 8 MB and reads nothing: no run and no place in the queue is theirs any more."""
    slow = Slow(8_000_000)
    slow.leave.set()
    server = OffloadServer(Path("unused"), b"", open_release=release.open, runtime=slow, at_once=2, waiting=SLOW)
    server.start()
    with ExitStack() as stack:
        for _ in range(SLOW):
            sock = socket.socket()
            stack.callback(sock.close)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            sock.connect(("127.0.0.1", server.port))
            sock.sendall(request())
        for _ in range(SLOW):
            assert slow.begun.acquire(timeout=PATIENCE_S)
        eventually("all have run", lambda: (server.scheduler.running, server.scheduler.waiting) == (0, 0))
        with closing(Connection("127.0.0.1", server.port)) as other:
            reply = other.exchange("GET", "/v2/health/ready", deadline=monotonic() + PATIENCE_S)
            assert reply.status == 200
            buffers, length = oip.encode_request(oip.InferRequest({"mid": MID}, outputs=("same",)))
            headers = {oip.HEADER_LENGTH: str(length)}
            path = f"/v2/models/{CUT}/infer"
            asked = other.exchange("POST", path, deadline=monotonic() + PATIENCE_S, headers=headers, body=buffers)
            assert asked.status == 200
    server.stop(1.0)


def test_a_request_cut_at_any_byte_runs_nothing(release: HandmadeRelease) -> None:
    """Closed, or reset, after each of many places from the first byte to the last but one."""
    print(f"EDGESPLIT_SEED={SEED}")
    rng = random.Random(SEED)
    slow = Slow()
    slow.leave.set()
    server = OffloadServer(Path("unused"), b"", open_release=release.open, runtime=slow)
    server.start()
    whole = request()
    places = sorted({1, len(whole) - 1, *(rng.randrange(1, len(whole)) for _ in range(CUTS))})
    for place in places:
        sock = socket.create_connection(("127.0.0.1", server.port), timeout=PATIENCE_S)
        if rng.random() < 0.5:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")  # a reset in place of a close
        sock.sendall(whole[:place])
        sock.close()
    with closing(Connection("127.0.0.1", server.port)) as other:
        assert other.exchange("GET", "/v2/health/live", deadline=monotonic() + PATIENCE_S).status == 200
    server.stop(PATIENCE_S)
    assert slow.runs == 0


def test_a_client_that_leaves_a_batch_delays_no_other_request_in_it(release: HandmadeRelease) -> None:
    """One of three that wait for the same model goes: the run that follows has the two that stayed."""
    from edgesplit_offload.scheduling.run_times import BatchBenefit

    slow = Slow()
    server = OffloadServer(Path("unused"), b"", open_release=release.open, runtime=slow, at_once=1)
    server.start()
    half = server.models.model(CUT).half
    half.run_times.enable_batching(BatchBenefit({}, 8, 8))
    with ExitStack() as stack:
        socks = [stack.enter_context(socket.create_connection(("127.0.0.1", server.port))) for _ in range(4)]
        for place, sock in enumerate(socks):
            sock.settimeout(PATIENCE_S)
            sock.sendall(request())
            eventually(
                "it runs or waits", lambda n=place: server.scheduler.waiting == n and server.scheduler.running == 1
            )
        socks[2].close()
        eventually("its place is free", lambda: server.scheduler.waiting == 2)
        slow.leave.set()
        answers = [socks[place].recv(65536) for place in (0, 1, 3)]
    assert [answer.split()[1] for answer in answers] == [b"200"] * 3
    server.stop(PATIENCE_S)
    (told,) = server.statistics.snapshot()
    assert [(one["batch_size"], one["compute_infer"]["count"]) for one in told["batch_stats"]] == [(1, 1), (2, 1)]
