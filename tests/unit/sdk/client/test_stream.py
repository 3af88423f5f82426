"""`Client.stream` and `AsyncClient.stream` against a real server of ours: order, back-pressure, drops, errors,
cancellation."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from typing import Any

import numpy as np
import pytest

from edgesplit import AsyncClient, Client
from edgesplit.client.answer import Answer
from edgesplit.errors import Dropped, EdgeError, InferenceFailed, LinkError, UsageError
from edgesplit.http1.server import Request, Response, Server
from edgesplit.oip import protocol as oip

PATIENCE_S = 20.0
Frame = dict[str, Any]


class Doubler:
    """Doubles `x`. `gate(number)` may wait or raise, for the frame whose number is in its tensor."""

    def __init__(self) -> None:
        self.gate: Callable[[int], None] = lambda number: None
        self.asked: list[dict[str, oip.Scalar]] = []
        self.running = 0
        self.most = 0
        self.lock = threading.Lock()

    def __call__(self, request: Request) -> Response:
        asked = oip.decode_request(request.body, oip.header_length(request.headers))
        number = int(asked.inputs["x"][0])
        with self.lock:
            self.asked.append(dict(asked.parameters))
            self.running += 1
            self.most = max(self.most, self.running)
        try:
            self.gate(number)
        finally:
            with self.lock:
                self.running -= 1
        outputs = {"y": 2 * asked.inputs["x"]}
        buffers, length = oip.encode_response(oip.InferResponse("m", outputs, id=asked.id))
        return Response(200, {oip.HEADER_LENGTH: str(length)}, buffers)


@pytest.fixture
def doubler() -> Doubler:
    return Doubler()


@pytest.fixture
def url(doubler: Doubler) -> Iterator[str]:
    server = Server(doubler)
    server.start()
    yield server.url
    server.stop(0.5)


def frames(count: int, taken: list[int] | None = None) -> Iterator[Frame]:
    """Frames that say their number; `taken` notes each that was asked for."""
    for number in range(count):
        if taken is not None:
            taken.append(number)
        yield {"x": np.array([number], np.int64)}


Results = list["Answer | EdgeError"]


def with_threads(url: str, source: Iterable[Frame], **how: Any) -> Results:
    """All results of `Client.stream`."""
    with Client(url) as client:
        return list(client.stream("m", source, deadline_s=PATIENCE_S, **how))


def with_asyncio(url: str, source: Iterable[Frame], **how: Any) -> Results:
    """All results of `AsyncClient.stream`."""

    async def run() -> Results:
        async with AsyncClient(url) as client:
            return [result async for result in client.stream("m", source, deadline_s=PATIENCE_S, **how)]

    return asyncio.run(run())


Way = Callable[..., Results]
both = pytest.mark.parametrize("way", [with_threads, with_asyncio], ids=["threads", "asyncio"])


def values(results: Results) -> list[tuple[int | None, int]]:
    return [(result.frame, int(result.outputs["y"][0])) for result in results if isinstance(result, Answer)]


@both
def test_answers_are_in_frame_order(url: str, doubler: Doubler, way: Way) -> None:
    """Although each pair of frames is answered in reverse order."""
    second_is_done = {n: threading.Event() for n in range(10)}

    def overtake(number: int) -> None:
        if number % 2 == 0:
            assert second_is_done[number // 2].wait(PATIENCE_S)
        else:
            second_is_done[number // 2].set()

    doubler.gate = overtake
    assert values(way(url, frames(10), in_flight=2)) == [(n, 2 * n) for n in range(10)]
    assert doubler.most == 2
    names = {options["edgesplit_stream"] for options in doubler.asked}
    assert len(names) == 1 and not any("edgesplit_drop" in options for options in doubler.asked)


def test_back_pressure_with_threads(url: str) -> None:
    """A slow consumer holds up the source: it is never read further ahead than the window allows."""
    taken: list[int] = []
    with Client(url) as client:
        for given, _ in enumerate(client.stream("m", frames(12, taken), in_flight=3, deadline_s=PATIENCE_S), 1):
            assert len(taken) <= given + 3
    assert len(taken) == 12


def test_back_pressure_with_asyncio(url: str) -> None:
    """A slow consumer holds up an asynchronous source: it is never read further ahead than the window allows."""
    taken: list[int] = []

    async def source() -> AsyncIterator[Frame]:
        for frame in frames(12, taken):
            yield frame

    async def run() -> int:
        given = 0
        async with AsyncClient(url) as client:
            async for _ in client.stream("m", source(), in_flight=3, deadline_s=PATIENCE_S):
                given += 1
                assert len(taken) <= given + 3
        return given

    assert asyncio.run(run()) == 12


def all_while_the_first_runs(doubler: Doubler) -> Callable[[], Iterator[Frame]]:
    """A source of nine frames: eight of them come while the server works on the first."""
    begun, all_came = threading.Event(), threading.Event()

    def hold(number: int) -> None:
        begun.set()
        assert all_came.wait(PATIENCE_S)

    def source() -> Iterator[Frame]:
        for frame in frames(9):
            yield frame
            assert begun.wait(PATIENCE_S)
        all_came.set()

    doubler.gate = hold
    return source


@both
def test_policy_oldest_answers_the_last_waiting_frame(url: str, doubler: Doubler, way: Way) -> None:
    """While the first is in flight all others arrive: with `oldest` the last is answered, the rest are `Dropped`."""
    source = all_while_the_first_runs(doubler)
    results = way(url, source(), in_flight=1, drop="oldest", errors="yield")
    assert len(results) == 9
    assert [n for n, _ in values(results)] == [0, 8]
    assert all(isinstance(result, Dropped) for result in results[1:8])
    assert {options["edgesplit_drop"] for options in doubler.asked} == {"oldest"}


@both
def test_policy_newest_answers_the_first_waiting_frame(url: str, doubler: Doubler, way: Way) -> None:
    """Dropped frames are left out unless requested; the answers name their frames."""
    source = all_while_the_first_runs(doubler)
    assert [n for n, _ in values(way(url, source(), in_flight=1, drop="newest"))] == [0, 1]


def fail_third(number: int) -> None:
    if number == 2:
        raise InferenceFailed("the third")


@both
def test_frame_error_ends_the_stream_or_is_a_result(url: str, doubler: Doubler, way: Way) -> None:
    """As the application chose; earlier answers are returned before it."""
    doubler.gate = fail_third
    with pytest.raises(InferenceFailed, match="the third"):
        way(url, frames(5), in_flight=2)
    results = way(url, frames(5), in_flight=2, errors="yield")
    assert [type(result).__name__ for result in results] == ["Answer", "Answer", "InferenceFailed", "Answer", "Answer"]


@both
def test_unsendable_frame_is_an_error_of_that_frame(url: str, way: Way) -> None:
    """The others are answered."""
    bad: list[Any] = [{"x": np.array([0])}, {"x": "text"}, 5, {"x": np.array([3])}]
    results = way(url, bad, errors="yield")
    assert [type(result).__name__ for result in results] == ["Answer", "UsageError", "UsageError", "Answer"]


@both
def test_source_exception_is_raised_after_earlier_answers(url: str, way: Way) -> None:
    """Unchanged, so that the application recognises its own error."""

    def source() -> Iterator[Frame]:
        yield from frames(2)
        raise KeyError("camera unplugged")

    with pytest.raises(KeyError, match="unplugged"):
        way(url, source(), in_flight=4)


@both
def test_empty_stream_ends(url: str, way: Way) -> None:
    """A source without frames gives no results, with threads and with asyncio."""
    assert way(url, []) == []


def test_leaving_the_loop_cancels_frames_in_flight(url: str, doubler: Doubler) -> None:
    """The server sees its clients go; the client itself is not closed."""
    hold, begun = threading.Event(), threading.Event()

    def wait_from_second(number: int) -> None:
        if number:
            begun.set()
            hold.wait(PATIENCE_S)

    doubler.gate = wait_from_second
    before = {thread.ident for thread in threading.enumerate()}
    with Client(url) as client:
        for _ in client.stream("m", frames(6), in_flight=3, deadline_s=100 * PATIENCE_S):
            assert begun.wait(PATIENCE_S)
            break
        streaming = [
            thread for thread in threading.enumerate() if thread.name == "stream" and thread.ident not in before
        ]
        for thread in streaming:
            thread.join(PATIENCE_S)
            assert not thread.is_alive()
        hold.set()
        assert values([client.infer("m", {"x": np.array([0])}, deadline_s=PATIENCE_S)]) == [(None, 0)]


def test_cancelled_infer_closes_its_connection(url: str, doubler: Doubler) -> None:
    """The server sees the client go, and the next request has a connection of its own."""
    gone, begun = threading.Event(), threading.Event()
    requests: list[Request] = []
    server = Server(lambda request: requests.append(request) or doubler(request))  # type: ignore[func-returns-value]
    server.start()

    def wait_until_gone(number: int) -> None:
        begun.set()
        while number == 0 and not requests[0].is_closed():
            threading.Event().wait(0.01)
        gone.set()

    doubler.gate = wait_until_gone

    async def run() -> None:
        async with AsyncClient(server.url) as client:
            call = asyncio.create_task(client.infer("m", {"x": np.array([0])}, deadline_s=PATIENCE_S))
            await asyncio.to_thread(begun.wait, PATIENCE_S)
            call.cancel()
            with pytest.raises(asyncio.CancelledError):
                await call
            assert await asyncio.to_thread(gone.wait, PATIENCE_S)
            assert (await client.infer("m", {"x": np.array([1])}, deadline_s=PATIENCE_S)).outputs["y"][0] == 2

    asyncio.run(run())
    server.stop(0.5)


def test_stream_settings_are_checked_before_the_first_frame(url: str) -> None:
    """When `stream` is called, not when its first result is requested."""
    with Client(url) as client, pytest.raises(UsageError):
        client.stream("m", [], in_flight=0)
    with pytest.raises(UsageError):
        AsyncClient(url).stream("m", [], drop="all")  # type: ignore[arg-type]


def test_closed_client_refuses_a_stream(url: str) -> None:
    """At once."""

    async def run() -> None:
        client = AsyncClient(url)
        await client.close()
        with pytest.raises(LinkError, match="closed"):
            await client.infer("m", {"x": np.array([0])}, deadline_s=PATIENCE_S)

    asyncio.run(run())
