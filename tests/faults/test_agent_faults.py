"""What cloud and link can do to a request (reference faults E1 to E10), against a scripted offload server.

The claim of all of them: every accepted request is answered once, or fails with a typed error before its deadline.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable

import numpy as np
import pytest

from edgesplit.errors import DeadlineExceeded, InferenceFailed, LinkError
from edgesplit.http1.server import Request, Response
from edgesplit.offload_client.circuit_breaker import CircuitBreaker
from edgesplit.offload_client.pool import OffloadClient
from edgesplit.plan import Row
from edgesplit_agent.serving.engine import Engine, Settings
from support.agent_engine import (
    CUT,
    DIGEST,
    EXPECTED,
    INPUT,
    REMOTE,
    ScriptedCloud,
    active,
    eventually,
    programs,
    reply,
    unavailable,
    world,
)  # fmt: skip

FIRST = Row(name="cut-1", device=("a",), remote=("b",), sends=("h",), receives=("y",), up_bytes=1, device_s=0.0)
LOCAL = Row(name="local", device=("a", "b"), device_s=5.0)
"""The cut is always predicted the better of the two, however slow a busy host makes its link look."""
ROOMY_S = 1.0
"""Kept back from a deadline where a test looks at it: half of this is how late a busy machine may wake a thread."""


def wrong_model(request: Request, good: Response) -> Response:
    """The other half of another release."""
    return reply("b" * 64 + ".pi4.cut-1", request_id(request), {"y": EXPECTED})


def wrong_id(request: Request, good: Response) -> Response:
    """An answer to another request: a replay."""
    return reply(f"{DIGEST}.pi4.cut-1", "somebody-else", {"y": EXPECTED})


def wrong_shape(request: Request, good: Response) -> Response:
    return reply(f"{DIGEST}.pi4.cut-1", request_id(request), {"y": np.zeros((1, 5), np.float32)})


def wrong_type(request: Request, good: Response) -> Response:
    return reply(f"{DIGEST}.pi4.cut-1", request_id(request), {"y": EXPECTED.astype(np.float64)})


def wrong_name(request: Request, good: Response) -> Response:
    return reply(f"{DIGEST}.pi4.cut-1", request_id(request), {"z": EXPECTED})


def no_body(request: Request, good: Response) -> Response:
    return Response(200, {}, [])


def noise(request: Request, good: Response) -> Response:
    return Response(200, good.headers, [b"\xff" * 200])


def cut_short(request: Request, good: Response) -> Response:
    return Response(200, good.headers, [b"".join(good.body)[:-3]])


def request_id(request: Request) -> str:
    from edgesplit.oip import protocol as oip

    return oip.decode_request(request.body, oip.header_length(request.headers)).id


BAD = [wrong_model, wrong_id, wrong_shape, wrong_type, wrong_name, no_body, noise, cut_short, unavailable]


@pytest.mark.parametrize("script", BAD)
def test_a_bad_answer_is_refused_and_the_device_finishes(script: Callable[[Request, Response], Response]) -> None:
    """E3: wrong shape, type, name, id, release, or no answer at all in it: not believed, finished locally, counted."""
    with world(LOCAL, FIRST) as (engine, cloud, _):
        eventually("the first look at the link", lambda: cloud.probes >= 2)
        cloud.script, cloud.healthy = script, False
        for _ in range(3):
            answer = engine.infer("tiny", {"x": INPUT}, deadline_s=10)
            assert np.array_equal(answer.outputs["y"], EXPECTED)
            assert answer.report.fallback and answer.report.cause == "server"
        assert engine.breaker.state == "open"
        after = engine.infer("tiny", {"x": INPUT}, deadline_s=10).report
        assert (after.row, after.fallback) == ("local", False)


def test_a_refused_connection_opens_the_breaker_at_once() -> None:
    """E1, no server: one fallback, then the local row until the cloud is back; then the cloud again."""
    with world(LOCAL, FIRST) as (engine, cloud, _):
        assert not engine.infer("tiny", {"x": INPUT}, deadline_s=10).report.fallback
        port = cloud.server.port
        cloud.stop()
        gone = engine.infer("tiny", {"x": INPUT}, deadline_s=10).report
        assert gone.fallback and gone.cause in ("refused", "link")
        eventually("the breaker opens", lambda: not engine.conditions.remote_usable or _ask(engine))
        cloud.start(port)
        eventually("the half-open probe finds the server", lambda: engine.conditions.remote_usable)
        while engine.breaker.state == "trial":
            assert not engine.infer("tiny", {"x": INPUT}, deadline_s=10).report.fallback
        assert engine.breaker.state == "closed"


def _ask(engine: Engine) -> bool:
    engine.infer("tiny", {"x": INPUT}, deadline_s=10)
    return False


def test_a_cloud_that_does_not_answer_is_not_waited_for_and_its_late_answer_is_dropped() -> None:
    """E1, E2: the server holds the request; the device finishes; what the server says afterwards changes nothing."""
    with world(LOCAL, FIRST) as (engine, cloud, _):
        cloud.script = cloud.hold
        answer = engine.infer("tiny", {"x": INPUT}, deadline_s=10, request_id="r-1")
        assert answer.report.fallback and answer.report.cause == "timeout"
        assert np.array_equal(answer.outputs["y"], EXPECTED)
        cloud.let_go.set()
        cloud.script = lambda request, good: good
        assert engine.infer("tiny", {"x": INPUT}, deadline_s=10, request_id="r-1") is answer
        assert not engine.infer("tiny", {"x": INPUT}, deadline_s=10).report.fallback


def test_the_clouds_answer_is_used_if_it_comes_before_the_local_tail() -> None:
    """The hedge is a race: the tail has started, the cloud's answer is first, the tail's is never seen."""
    steps = programs()
    steps["b"].may_run.clear()
    with world(LOCAL, FIRST, steps=steps) as (engine, cloud, _):
        cloud.script = cloud.hold
        answers = []
        asking = threading.Thread(target=lambda: answers.append(engine.infer("tiny", {"x": INPUT}, deadline_s=15)))
        asking.start()
        assert steps["b"].entered.wait(10), "the tail starts while the cloud is silent"
        cloud.let_go.set()
        asking.join(15)
        assert np.array_equal(answers[0].outputs["y"], EXPECTED)
        assert not answers[0].report.fallback
        steps["b"].may_run.set()


def test_the_tail_starts_early_enough_to_meet_a_short_deadline() -> None:
    """A deadline shorter than the usual patience: cloud and tail run at once, and the answer is in time."""
    with world(LOCAL, FIRST, margin_s=ROOMY_S) as (engine, cloud, _):
        cloud.script = cloud.hold
        answer = engine.infer("tiny", {"x": INPUT}, deadline_s=1.2)
        assert answer.report.fallback


@pytest.mark.parametrize("script", [None, unavailable])
def test_without_a_fallback_the_failure_is_typed_and_in_time(script: Callable[..., Response] | None) -> None:
    """The plan has no local row: a cloud that is silent or broken gives a typed error before the deadline."""
    with world(REMOTE, margin_s=ROOMY_S) as (engine, cloud, _):
        cloud.script = script or cloud.hold
        with pytest.raises(LinkError if script else DeadlineExceeded):
            engine.infer("tiny", {"x": INPUT}, deadline_s=1.0)


def test_neither_cloud_nor_device_in_time_is_a_typed_error_before_the_deadline() -> None:
    """Both hang: the request does not."""
    steps = programs()
    steps["b"].may_run.clear()
    with world(LOCAL, FIRST, steps=steps, margin_s=ROOMY_S) as (engine, cloud, _):
        cloud.script = cloud.hold
        with pytest.raises(DeadlineExceeded):
            engine.infer("tiny", {"x": INPUT}, deadline_s=1.2)
        steps["b"].may_run.set()


def test_a_failing_local_tail_leaves_the_clouds_answer() -> None:
    """The local tail crashes while the cloud is merely late: the cloud's answer is taken."""
    steps = programs()
    steps["b"].error = InferenceFailed("the accelerator has gone")
    with world(LOCAL, FIRST, steps=steps) as (engine, cloud, _):
        cloud.script = cloud.hold
        answers = []
        asking = threading.Thread(target=lambda: answers.append(engine.infer("tiny", {"x": INPUT}, deadline_s=15)))
        asking.start()
        eventually("the tail has failed", lambda: steps["b"].runs > 0)
        cloud.let_go.set()
        asking.join(15)
        assert np.array_equal(answers[0].outputs["y"], EXPECTED)


def test_a_retry_while_the_request_runs_joins_it() -> None:
    """One id, asked twice at once: the cloud sees it once, both get one answer."""
    with world(LOCAL, FIRST) as (engine, cloud, _):
        cloud.script = cloud.hold
        answers = []

        def asking() -> None:
            answers.append(engine.infer("tiny", {"x": INPUT}, deadline_s=15, request_id="same"))

        threads = [threading.Thread(target=asking) for _ in range(4)]
        for thread in threads:
            thread.start()
        assert cloud.holding.wait(10)
        cloud.let_go.set()
        for thread in threads:
            thread.join(15)
        assert len(answers) == 4 and all(answer is answers[0] for answer in answers)
        assert [one.partition("~")[0] for one in cloud.ids] == ["same"]


def test_a_connection_closed_by_the_server_causes_a_fallback() -> None:
    """E1, during: the connection is closed in the middle of every exchange, after any number of bytes."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        stop, cuts = threading.Event(), iter(range(0, 4000, 37))

        def serve() -> None:
            while not stop.is_set():
                try:
                    accepted, _ = listener.accept()
                except OSError:
                    return
                with accepted:
                    accepted.recv(next(cuts, 1) or 1)
                    accepted.send(b"HTTP/1.1 200 OK\r\ncontent-length: 100\r\n\r\nhalf"[: next(cuts, 1) % 50])

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        engine = Engine(
            "pi4", OffloadClient(f"http://127.0.0.1:{listener.getsockname()[1]}"), settings=Settings(idle_probe_s=1e6)
        )
        engine.serve("tiny", active(LOCAL, FIRST))
        for number in range(12):
            answer = engine.infer("tiny", {"x": INPUT}, deadline_s=10, request_id=f"r-{number}")
            assert np.array_equal(answer.outputs["y"], EXPECTED)
            engine.own_target._breaker = CircuitBreaker()
        stop.set()
        listener.close()
        engine.stop()


def test_a_connection_that_went_stale_is_replaced_without_a_fallback() -> None:
    """The server was restarted while nothing was asked: the next request opens a new connection and is answered."""
    with world(LOCAL, FIRST) as (engine, cloud, _):
        engine.infer("tiny", {"x": INPUT}, deadline_s=10)
        port = cloud.server.port
        cloud.stop()
        cloud.start(port)
        assert not engine.infer("tiny", {"x": INPUT}, deadline_s=10).report.fallback


def test_an_idle_device_measures_the_link_by_its_probe() -> None:
    """On the local row nothing is sent; the small probe keeps round trip and rate known."""
    with world(LOCAL, idle_probe_s=0.01) as (engine, _, release):
        before = engine.conditions.link
        eventually("the probe has measured", lambda: engine.conditions.link != before)
        assert engine.infer("tiny", {"x": INPUT}, deadline_s=10).report.row == "local"
        assert release.plan.rows[0] == LOCAL


def test_faulty_clouds_lose_and_duplicate_no_answer() -> None:
    """Each request meets another fault, many at once: a hundred ids, a hundred answers, all right, each once."""
    with world(LOCAL, FIRST) as (engine, cloud, _):
        scripts = [*BAD, lambda request, good: good]
        lock, turn = threading.Lock(), [0]

        def next_script(request: Request, good: Response) -> Response:
            with lock:
                turn[0] += 1
                script = scripts[turn[0] % len(scripts)]
            return script(request, good)

        cloud.script = next_script
        answers: dict[str, list[bool]] = {}

        def stream(worker: int) -> None:
            for number in range(20):
                name = f"{worker}-{number}"
                answer = engine.infer("tiny", {"x": INPUT}, deadline_s=20, request_id=name)
                with lock:
                    answers.setdefault(name, []).append(bool(np.array_equal(answer.outputs["y"], EXPECTED)))
                    engine.own_target._breaker = CircuitBreaker()

        threads = [threading.Thread(target=stream, args=(worker,)) for worker in range(5)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert len(answers) == 100 and all(right == [True] for right in answers.values())


def test_stopping_closes_connections_that_wait_for_the_cloud() -> None:
    """A clean stop ends offload connections; the request that waited finishes alone."""
    cloud = ScriptedCloud()
    cloud.start()
    engine = Engine("pi4", OffloadClient(cloud.server.url), settings=Settings(idle_probe_s=1e6))
    engine.serve("tiny", active(LOCAL, CUT, FIRST))
    cloud.script = cloud.hold
    answers = []
    asking = threading.Thread(target=lambda: answers.append(engine.infer("tiny", {"x": INPUT}, deadline_s=15)))
    asking.start()
    assert cloud.holding.wait(10)
    engine.own_target._remote.close()  # type: ignore[union-attr]
    asking.join(15)
    assert answers[0].report.fallback
    engine.stop()
    cloud.stop()
