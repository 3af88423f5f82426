"""Lanes over real workers: answers and their accounts, and what crashes, hangs, other releases and dead clients do."""

from __future__ import annotations

import asyncio
import os
import platform
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from time import monotonic
from typing import Any

import numpy as np
import pytest

from edgesplit import Answer, AsyncClient, Client, InferOptions
from edgesplit.client.connection import Connection
from edgesplit.client.direct import endpoint, request_policy
from edgesplit.client.direct.grant import LANE_PATH
from edgesplit.errors import EdgeError, InferenceFailed, NotFound, UsageError
from edgesplit.observability import metrics, trace_context
from edgesplit.oip.options import NONE
from edgesplit_agent.worker.host import WorkerLost
from support.agent_engine import DIGEST, eventually
from support.direct_access import OTHER_DIGEST, DirectAccessHarness, descriptors, lane_world
from support.workers import DEADLY, ENDLESS, GREEDY, SMALL, deadly, double, endless, greedy, signal_worker

only_where_it_traps = pytest.mark.skipif(
    platform.machine() != "x86_64", reason="no other processor traps the division that this model dies of"
)
PATIENCE_S = 60.0


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a machine that stands still for a second no lane is given up for that."""
    monkeypatch.setattr(endpoint, "TIMEOUT_S", PATIENCE_S)
    monkeypatch.setattr(request_policy, "GRANT_TIMEOUT_S", PATIENCE_S)


@pytest.fixture
def harness(socket_folder: Path) -> Iterator[DirectAccessHarness]:
    """Doubles."""
    with lane_world(socket_folder, double()) as own:
        yield own


def ask(client: Client, x: Any = SMALL, deadline_s: float = PATIENCE_S, **how: Any) -> Answer:
    return client.infer("one", {"x": x}, deadline_s=deadline_s, **how)


def warm(client: Client, harness: DirectAccessHarness) -> None:
    """Ask until a lane answers."""

    def by_lane() -> bool:
        before = harness.inferences
        ask(client)
        return harness.inferences == before

    eventually("a lane answers", by_lane, PATIENCE_S)


Ways = Callable[[DirectAccessHarness, dict[str, Any]], "tuple[Callable[[Any], Answer], Callable[[], None]]"]


def by_threads(
    harness: DirectAccessHarness, kind: dict[str, Any]
) -> tuple[Callable[[Any], Answer], Callable[[], None]]:
    client = Client(harness.url, **kind)
    return lambda x: ask(client, x), client.close


def by_asyncio(
    harness: DirectAccessHarness, kind: dict[str, Any]
) -> tuple[Callable[[Any], Answer], Callable[[], None]]:
    loop, client = asyncio.new_event_loop(), AsyncClient(harness.url, **kind)

    def close() -> None:
        loop.run_until_complete(client.close())
        loop.close()

    return lambda x: loop.run_until_complete(client.infer("one", {"x": x}, deadline_s=PATIENCE_S)), close


def test_direct_access_gives_the_agents_answers_and_counts(harness: DirectAccessHarness) -> None:
    """By threads and by asyncio, by shared memory and by bytes: the agent's answer and report, from the second request
    on without the agent; and observers, statistics, gates and metrics know of every one."""
    asked = 0
    for way in (by_threads, by_asyncio):
        for kind in ({}, {"shared_memory": False}):
            inferences = harness.inferences
            infer, close = way(harness, kind)
            for factor in range(1, 8):
                answer = infer(SMALL * np.float32(factor))
                np.testing.assert_array_equal(answer.outputs["y"], 2 * factor * SMALL)
                told = answer.report
                assert told is not None and (told.release, told.row) == (DIGEST, "local")
                assert 0 < told.device_s <= told.latency_s and told.predicted_s > 0 and not told.fallback
                asked += 1
            close()
            assert harness.inferences == inferences + 1
    assert harness.answered() == asked == len(harness.outcomes)
    assert {release for release, _ in harness.outcomes} == {DIGEST}
    assert harness.device_runs and not any(harness.device_runs)
    with Client(harness.url, lane=False) as client:
        statistics = client._exchange("GET", "/v2/models/one/stats").body
        assert f'"success":{{"count":{asked},'.encode() in bytes(statistics).replace(b" ", b"")
        version = harness.engine.serving["one"].manifest.model
        measured = harness.metrics.registry.histogram(metrics.AGENT_REQUEST_S, version, "local")
        assert measured.count == asked
    assert harness.engine.serving["one"].learned()[0][2] > 0


def test_requests_with_options_go_through_the_agent(harness: DirectAccessHarness) -> None:
    """An id of its own, wishes, a trace, a stream, another shape, an output that is none, and whoever wants no lane."""
    with Client(harness.url) as client, Client(harness.url, lane=False) as without:
        warm(client, harness)
        agents: list[Callable[[], object]] = [
            lambda: ask(client, request_id="mine"),
            lambda: ask(client, options=InferOptions(hedge="never")),
            lambda: ask(without),
            lambda: list(client.stream("one", [{"x": SMALL}], deadline_s=PATIENCE_S)),
            lambda: client.infer("one", {"x": SMALL.tolist()}, deadline_s=PATIENCE_S),  # type: ignore[dict-item]
            lambda: ask(client, SMALL.astype(np.float64)),
            lambda: ask(client, outputs=("z",)),
        ]
        for number, do in enumerate(agents):
            before = harness.inferences
            try:
                do()
            except UsageError:
                assert number >= 4
            assert harness.inferences == before + (number != 4), number
        before = harness.inferences
        traced = trace_context.parse("00-" + "a" * 32 + "-" + "b" * 16 + "-01")
        with trace_context.request_context(traced):
            ask(client)
        assert harness.inferences == before + 1
        ask(client, options=NONE, outputs=("y",))
        assert harness.inferences == before + 1


def test_a_new_release_answers_direct_requests_from_its_activation(harness: DirectAccessHarness) -> None:
    """Lanes end when it is activated; the next request is its own, and lanes come back. So when it is dropped."""
    with Client(harness.url) as client:
        warm(client, harness)
        first = harness.hosts[0]
        harness.serve(greedy(), OTHER_DIGEST)
        answer = ask(client)
        assert answer.report is not None and answer.report.release == OTHER_DIGEST
        np.testing.assert_array_equal(answer.outputs["y"], SMALL)
        eventually("the old worker ends", lambda: not first.status()["pid"])
        eventually("a lane answers", lambda: (ask(client), harness.hosts[1].status()["lanes"])[1] == 1, PATIENCE_S)
        answer = ask(client)
        assert answer.report is not None and answer.report.release == OTHER_DIGEST
        before = harness.answered()
        with pytest.raises(InferenceFailed):  # the model cannot: the lane says so, then the agent, which tells why
            ask(client, GREEDY)
        assert any(isinstance(one, InferenceFailed) for one in harness.device_runs)
        ask(client)
        assert harness.answered() == before + 1 and harness.hosts[1].status()["lanes"] == 1
        harness.engine.drop("one")
        with pytest.raises(UsageError):
            ask(client)


def test_a_killed_worker_costs_no_request_and_no_count(harness: DirectAccessHarness) -> None:
    """Between two requests: the next one is answered, the loss is the release's, and what was answered is counted."""
    with Client(harness.url) as client:
        warm(client, harness)
        for _ in range(5):
            ask(client)
        asked = harness.inferences
        answered = harness.answered()
        signal_worker(harness.hosts[0], signal.SIGKILL)
        np.testing.assert_array_equal(ask(client).outputs["y"], 2 * SMALL)
        eventually("the loss is told", lambda: [type(one) for one in harness.lost] == [WorkerLost])
        assert harness.inferences == asked + 1 and harness.answered() >= answered
        everything = harness.answered()
        warm(client, harness)
        assert harness.answered() > everything and harness.hosts[0].status()["lost_in_a_row"] == 0


@only_where_it_traps
def test_a_model_that_crashes_under_direct_access_is_a_typed_error_in_time(socket_folder: Path) -> None:
    """The lane ends with the worker, the agent is asked, and its worker dies too: a typed error; then all is well."""
    with lane_world(socket_folder, deadly()) as harness, Client(harness.url) as client:
        warm(client, harness)
        with pytest.raises(EdgeError):
            ask(client, DEADLY)
        eventually("the losses are told", lambda: len(harness.lost) >= 2)
        np.testing.assert_array_equal(ask(client).outputs["y"], SMALL)


def test_a_model_that_hangs_under_direct_access_is_killed(socket_folder: Path) -> None:
    """Nobody but the agent sees it: since when the worker runs stands in words that both see."""
    with lane_world(socket_folder, endless()) as harness, Client(harness.url) as client:
        warm(client, harness)
        said: list[EdgeError] = []
        asking = threading.Thread(target=lambda: said.append(_error(client)))
        asking.start()
        eventually("the worker is ended", lambda: harness.lost, PATIENCE_S)
        asking.join(PATIENCE_S)
        assert len(said) == 1 and "exceeded its time limit" in str(harness.lost[0])
        np.testing.assert_array_equal(ask(client).outputs["y"], SMALL)


def _error(client: Client) -> EdgeError:
    with pytest.raises(EdgeError) as said:
        ask(client, ENDLESS, deadline_s=2.0)
    return said.value


DIES = """
import sys
import numpy as np
from edgesplit import Client

client = Client(sys.argv[1])
while not client._thread_connection().lanes._lanes:
    client.infer("one", {"x": np.arange(4, dtype=np.float32).reshape(1, 4)}, deadline_s=60)
print("asked", flush=True)
sys.stdin.read()
"""


def test_a_killed_client_leaves_no_lane_and_no_descriptor(harness: DirectAccessHarness) -> None:
    """Its lane and descriptors go, in the agent and in the worker."""
    pid = harness.hosts[0].status()["pid"]
    with Client(harness.url) as first:
        warm(first, harness)
    eventually("the first lane is gone", lambda: not harness.hosts[0].status()["lanes"])
    eventually("its connection too", lambda: _workers_descriptors(pid) and harness.server is not None)
    before, in_worker = descriptors(), _workers_descriptors(pid)
    argv = [sys.executable, "-c", DIES, harness.url]
    client = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    with client:
        assert client.stdout is not None and client.stdout.readline() == b"asked\n"
        assert harness.hosts[0].status()["lanes"] == 1
        client.kill()
    eventually("its lane is gone", lambda: not harness.hosts[0].status()["lanes"])
    eventually("its descriptors are gone", lambda: descriptors() <= before)
    eventually("the worker's too", lambda: _workers_descriptors(pid) <= in_worker)


def _workers_descriptors(pid: int) -> int:
    return len(os.listdir(f"/proc/{pid}/fd"))


def test_direct_and_agent_requests_take_turns(harness: DirectAccessHarness) -> None:
    """A lane that never pauses keeps nobody out."""
    over = threading.Event()

    def flood() -> None:
        with Client(harness.url) as client:
            while not over.is_set():
                ask(client)

    flooding = [threading.Thread(target=flood) for _ in range(2)]
    for thread in flooding:
        thread.start()
    try:
        with Client(harness.url, lane=False) as client:
            for _ in range(20):
                np.testing.assert_array_equal(ask(client).outputs["y"], 2 * SMALL)
    finally:
        over.set()
        for thread in flooding:
            thread.join(PATIENCE_S)


def test_a_stopped_worker_is_killed_by_the_agent(harness: DirectAccessHarness, monkeypatch: pytest.MonkeyPatch) -> None:
    """It reads nothing, so that no word says it is busy: the lane is silent, the agent is asked, and that ends it."""
    monkeypatch.setattr(endpoint, "TIMEOUT_S", 0.2)
    with Client(harness.url) as client:
        warm(client, harness)
        before = harness.inferences
        signal_worker(harness.hosts[0], signal.SIGSTOP)
        np.testing.assert_array_equal(ask(client).outputs["y"], 2 * SMALL)
        assert harness.inferences == before + 1 and "stopped" in str(harness.lost[0])


def test_an_invalid_request_for_direct_access_is_refused_with_its_reason(harness: DirectAccessHarness) -> None:
    """Without a socket, with something else, for a model that is not here, with nonsense: told, and nothing is kept."""
    connection = Connection("localhost", 0, path=str(harness.folder / "a.sock"))
    with Client(harness.url, lane=False) as client:
        ask(client)
    read, write = os.pipe()
    mine, theirs = socket.socketpair()
    good = b'{"model":"one"}'
    connection.exchange("GET", "/v2", deadline=monotonic() + PATIENCE_S)
    before = descriptors()
    for body, descriptor, status in (
        (good, None, 400), (good, read, 400), (b"{", theirs.fileno(), 400), (b'{"model":"none"}', theirs.fileno(), 404),
    ):  # fmt: skip
        reply = connection.exchange(
            "POST", LANE_PATH, deadline=monotonic() + PATIENCE_S, body=[body], descriptor=descriptor
        )
        assert reply.status == status and b"error" in bytes(reply.body)
    assert descriptors() <= before
    connection.shut_down()
    for one in (mine, theirs):
        one.close()
    os.close(read)
    os.close(write)


def test_a_model_named_with_its_version_gets_lanes_too(harness: DirectAccessHarness) -> None:
    """`one@1` where that version runs; another version is refused with the one that does."""
    with Client(harness.url) as client:
        for _ in range(3):
            answer = client.infer("one@1", {"x": SMALL}, deadline_s=PATIENCE_S)
            np.testing.assert_array_equal(answer.outputs["y"], 2 * SMALL)
        assert harness.inferences == 1 and harness.wishes == 1
        with pytest.raises(NotFound, match="version 2 of one does not run here, but one@1"):
            client.infer("one@2", {"x": SMALL}, deadline_s=PATIENCE_S)
