"""`edgesplit.Client` against a real server of ours: what it sends, what it returns, what it raises."""

from __future__ import annotations

import asyncio
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import edgesplit
from edgesplit.client.async_client import AsyncClient
from edgesplit.client.client import Client
from edgesplit.client.connection import Connection
from edgesplit.errors import (
    Busy,
    DeadlineExceeded,
    EdgeError,
    InferenceFailed,
    LinkError,
    MalformedMessage,
    NotFound,
    Unreachable,
    UsageError,
)
from edgesplit.http1.server import Request, Response, Server, json_response
from edgesplit.oip import protocol as oip
from edgesplit.oip import report

PATIENCE_S = 20.0
FRAME = np.arange(6, dtype=np.float32).reshape(2, 3)


@dataclass
class Doubler:
    """A server that doubles `x`; `before` may raise or wait."""

    before: Callable[[Request], None] = lambda _: None
    seen: list[oip.InferRequest] = field(default_factory=list)
    report: report.Report | None = None

    def __call__(self, request: Request) -> Response:
        self.before(request)
        if request.path == "/v2/repository/index":
            return json_response(200, [{"name": "b"}, {"name": "a", "version": "1", "state": "READY"},
                                       {"name": "c", "state": "UNAVAILABLE"}])  # fmt: skip
        if request.path.endswith("/ready"):
            return Response(200)
        if request.method == "GET":
            return json_response(200, oip.model_metadata("double", ["1"], [], []))
        asked = oip.decode_request(request.body, oip.header_length(request.headers))
        self.seen.append(asked)
        outputs = {"y": 2 * next(iter(asked.inputs.values()))}
        parameters = report.to_parameters(self.report) if self.report else {}
        buffers, length = oip.encode_response(
            oip.InferResponse("double", outputs, id=asked.id, parameters=parameters), asked.binary_outputs
        )
        return Response(200, {} if length is None else {oip.HEADER_LENGTH: str(length)}, buffers)


@pytest.fixture
def doubler() -> Doubler:
    return Doubler()


@pytest.fixture
def server(doubler: Doubler) -> Iterator[Server]:
    running = Server(doubler)
    running.start()
    yield running
    running.stop(0.5)


@pytest.fixture
def client(server: Server) -> Iterator[Client]:
    with Client(server.url) as own:
        yield own


def test_answer_has_outputs_id_and_report(client: Client, doubler: Doubler) -> None:
    """The report travels as response parameters; where there is none, it is None."""
    plain = client.infer("double", {"x": FRAME}, request_id="é-7")
    assert (plain.id, plain.report) == ("é-7", None)
    np.testing.assert_array_equal(plain.outputs["y"], 2 * FRAME)
    doubler.report = report.Report(release="ab", row="cut-1", fallback=True, cause="timeout", latency_s=0.25)
    assert client.infer("double", {"x": FRAME}).report == doubler.report


def test_bytes_are_sent_as_one_uint8_tensor(client: Client, doubler: Doubler) -> None:
    """A JPEG is sent as it is; any other input that is no array is refused before it is sent."""
    client.infer("double", {"frame": b"\x01\x02"})
    assert doubler.seen[0].inputs["frame"].tolist() == [1, 2]
    with pytest.raises(UsageError, match="list"):
        client.infer("double", {"x": [1, 2]})  # type: ignore[dict-item]


def test_remaining_time_is_sent_as_timeout(client: Client, doubler: Doubler) -> None:
    """In microseconds; where no id is given, each request gets a new one."""
    client.infer("double", {"x": FRAME}, deadline_s=5)
    client.infer("double", {"x": FRAME}, deadline_s=5)
    left = oip.timeout_s(doubler.seen[0].parameters)
    assert left is not None
    assert 0 < left <= 5
    assert doubler.seen[0].id != doubler.seen[1].id


def test_models_and_their_inputs_are_listed(client: Client) -> None:
    """Only models that are ready."""
    assert client.models() == ("a", "b")
    assert client.metadata("double")["name"] == "double"
    assert client.ready()
    assert client.ready("double")


@pytest.mark.parametrize(
    ("raised", "expected"),
    [(NotFound("no such"), NotFound), (UsageError("wrong shape"), UsageError), (MalformedMessage("bad"), UsageError),
     (InferenceFailed("kernel"), InferenceFailed), (RuntimeError("x"), InferenceFailed)],
)  # fmt: skip
def test_permanent_errors_are_not_retried(
    client: Client, doubler: Doubler, raised: Exception, expected: type[EdgeError]
) -> None:
    """With the server's text, in the class that names who must act; the connection stays usable."""
    calls = []

    def refuse(_: Request) -> None:
        calls.append(1)
        raise raised

    doubler.before = refuse
    with pytest.raises(expected, match=str(raised) if isinstance(raised, EdgeError) else "internal error"):
        client.infer("double", {"x": FRAME}, deadline_s=PATIENCE_S)
    assert calls == [1]
    doubler.before = lambda _: None
    client.infer("double", {"x": FRAME})


def test_busy_is_retried(client: Client, doubler: Doubler) -> None:
    """While there is time left, under one id."""
    refusals = iter([Busy("full"), Busy("full")])

    def refuse(_: Request) -> None:
        if error := next(refusals, None):
            raise error

    doubler.before = refuse
    assert client.infer("double", {"x": FRAME}, deadline_s=PATIENCE_S, request_id="one").id == "one"


def test_deadline_error_after_busy_contains_the_servers_text(client: Client, doubler: Doubler) -> None:
    """Also where the deadline cuts the last attempt short."""

    def refuse(_: Request) -> None:
        raise Busy("the queue is full")

    doubler.before = refuse
    with pytest.raises(DeadlineExceeded, match=r"within 1 s; last: .*the queue is full \(HTTP 503\)"):
        client.infer("double", {"x": FRAME}, deadline_s=1.0)


def test_deadline_error_names_earlier_refusal_and_last_timeout(client: Client, doubler: Doubler) -> None:
    """Refused once, then silence: the error contains both."""
    over, refusals = threading.Event(), iter([Busy("the queue is full")])

    def refuse_then_hang(_: Request) -> None:
        if error := next(refusals, None):
            raise error
        over.wait(PATIENCE_S)

    doubler.before = refuse_then_hang
    try:
        with pytest.raises(DeadlineExceeded, match=r"no answer in time; before that: the queue is full"):
            client.infer("double", {"x": FRAME}, deadline_s=1.0)
    finally:
        over.set()


def test_restarting_server_is_retried(doubler: Doubler) -> None:
    """One call spans the outage: the server that dies during it, the port that refuses, the server that is back."""
    first, arrived, over = Server(doubler), threading.Event(), threading.Event()
    first.start()
    port = first.port

    def die(_: Request) -> None:
        arrived.set()
        over.wait(PATIENCE_S)

    doubler.before = die
    answers = []
    with Client(first.url) as client:
        call = threading.Thread(
            target=lambda: answers.append(client.infer("double", {"x": FRAME}, deadline_s=PATIENCE_S, request_id="r"))
        )
        call.start()
        assert arrived.wait(PATIENCE_S)
        first.stop(drain_s=0)
        doubler.before = lambda _: None
        second = Server(doubler, port=port)
        second.start()
        call.join(PATIENCE_S)
        over.set()
        second.stop()
    assert [answer.id for answer in answers] == ["r"]


def test_stale_connection_is_replaced_without_a_pause(server: Server, client: Client) -> None:
    """An idle keep-alive connection that the server has closed."""
    client.infer("double", {"x": FRAME})
    server.stop()
    again = Server(Doubler(), port=int(server.port))
    again.start()
    client.infer("double", {"x": FRAME})
    again.stop()


def test_threads_do_not_get_each_others_answers(client: Client) -> None:
    """Each thread has a connection of its own; connections of threads that ended are closed."""
    wrong: list[int] = []

    def ask(n: int) -> None:
        for k in range(20):
            value = np.full(3, 100 * n + k, np.int64)
            if not np.array_equal(client.infer("double", {"x": value}, deadline_s=PATIENCE_S).outputs["y"], 2 * value):
                wrong.append(n)

    threads = [threading.Thread(target=ask, args=(n,)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_S)
    assert not wrong
    client.infer("double", {"x": FRAME})
    assert len(client._connections) == 1


def test_close_ends_a_waiting_call(client: Client, doubler: Doubler) -> None:
    """From another thread, with a typed error, long before its deadline."""
    arrived, ended = threading.Event(), threading.Event()
    errors: list[Exception] = []
    doubler.before = lambda _: (arrived.set(), ended.wait(PATIENCE_S))[0]

    def ask() -> None:
        try:
            client.infer("double", {"x": FRAME}, deadline_s=10 * PATIENCE_S)
        except EdgeError as error:
            errors.append(error)

    thread = threading.Thread(target=ask)
    thread.start()
    assert arrived.wait(PATIENCE_S)
    client.close()
    thread.join(PATIENCE_S)
    ended.set()
    assert [type(error) for error in errors] == [LinkError]


@pytest.mark.parametrize("step", ["to", "_connect"])
def test_close_during_connect_ends_the_call(
    server: Server, doubler: Doubler, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    """A call whose client another thread closes while it connects ends, and does not wait for an answer."""
    make = getattr(Connection, step)

    with Client(f"http://127.0.0.1:{server.port}") as client:

        def made_too_late(*given: Any, **named: Any) -> object:
            made = make(*given, **named)
            client.close()
            return made

        monkeypatch.setattr(Connection, step, staticmethod(made_too_late) if step == "to" else made_too_late)
        with pytest.raises(LinkError, match="closed"):
            client.infer("double", {"x": FRAME}, deadline_s=PATIENCE_S)
    assert not doubler.seen


@pytest.mark.parametrize("url", ["", "127.0.0.1:8600", "ftp://host", "http://", "http://host:99999999"])
def test_malformed_address_is_refused(url: str) -> None:
    """Before anything is sent."""
    with pytest.raises(UsageError, match="not an address"):
        Client(url)


def test_package_import_is_light() -> None:
    """Neither numpy nor a runtime until `Client` is used; an unknown name is still an AttributeError."""
    code = "import sys, edgesplit; print('numpy' in sys.modules, edgesplit.__version__); print(edgesplit.Client)"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.splitlines()
    assert out[0] == f"False {edgesplit.__version__}"
    assert "edgesplit.client.client.Client" in out[1]
    with pytest.raises(AttributeError):
        edgesplit.Cleint  # noqa: B018


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as sock:
        return int(sock.getsockname()[1])


@pytest.mark.parametrize("kind", ["tcp", "unix"])
def test_no_agent_was_waited_for_until_the_deadline(kind: str, socket_folder: Path) -> None:
    """Nothing listens there and nothing ever has: both clients say at once what to start."""
    url = f"http://127.0.0.1:{free_port()}" if kind == "tcp" else f"unix://{socket_folder}/agent.sock"

    async def ask() -> None:
        async with AsyncClient(url) as client:
            await client.infer("double", {"x": FRAME}, deadline_s=3600.0)

    with Client(url) as client:
        with pytest.raises(Unreachable, match="nothing has answered there yet"):
            client.infer("double", {"x": FRAME}, deadline_s=3600.0)
        with pytest.raises(Unreachable, match="Start the agent"):
            client.models()
        assert not client.ready()
    with pytest.raises(Unreachable, match="Start the agent"):
        asyncio.run(ask())


def test_an_agent_that_was_there_is_waited_for(doubler: Doubler) -> None:
    """It may be restarting: the request that finds nothing listening is repeated until the agent is back."""
    first = Server(doubler)
    first.start()
    port = first.port
    with Client(first.url) as client:
        client.infer("double", {"x": FRAME}, deadline_s=PATIENCE_S)
        first.stop(0.5)
        with pytest.raises(DeadlineExceeded, match="refused"):
            client.infer("double", {"x": FRAME}, deadline_s=0.05)
        assert not client.ready()
        with pytest.raises(LinkError):
            client.models()
        again = Server(doubler, port=port)
        again.start()
        try:
            assert client.infer("double", {"x": FRAME}, deadline_s=PATIENCE_S).outputs["y"].shape == FRAME.shape
        finally:
            again.stop(0.5)


@pytest.mark.parametrize("given", [None, 7, [1, 2]])
def test_an_input_without_a_name_was_an_attribute_error(client: Client, given: Any) -> None:
    """`infer(model, array)` says how inputs are given and where their names are listed."""
    with pytest.raises(UsageError, match=r"given by name, not as one .*metadata\(model\)"):
        client.infer("double", given)
