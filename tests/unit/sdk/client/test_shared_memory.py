"""`Client` and `AsyncClient` over the Unix socket: large tensors in shared memory, and the same answers without it."""

from __future__ import annotations

import asyncio
import gc
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from edgesplit import AsyncClient, Client
from edgesplit.client.direct.grant import LANE_PATH
from edgesplit.errors import LinkError, UsageError
from edgesplit.http1.server import Request, Response, Server, error_response
from edgesplit.oip import protocol as oip
from edgesplit.release.manifest import TensorSpec
from edgesplit.shared_memory.segment import Segment
from edgesplit_agent.serving.engine import Engine
from edgesplit_agent.serving.http_endpoint import Endpoint
from support.agent_engine import LOCAL, Step, active, eventually

PATIENCE_S = 20.0
COUNT = 50_000
X = np.linspace(0, 1, COUNT, dtype=np.float32).reshape(1, COUNT)


class SharedMemoryAgent:
    """An agent's endpoint on a Unix socket and on localhost, with a model that doubles 200 KB."""

    def __init__(self, folder: Path) -> None:
        self.saw: list[bool] = []
        """For each run: did the input lie in shared memory?"""
        self.bodies: list[int] = []
        self.engine = Engine("pi4", None)
        self.step = Step("x", "h", self._noted)
        release = active(LOCAL, steps={"a": self.step, "b": Step("h", "y", lambda h: 2 * h)})
        specs = {name: (TensorSpec(name, "FP32", (1, COUNT)),) for name in ("x", "y")}
        import dataclasses

        import msgspec

        described = msgspec.structs.replace(release.manifest, inputs=specs["x"], outputs=specs["y"])
        self.engine.serve("big", dataclasses.replace(release, manifest=described))
        self.endpoint = Endpoint(self.engine, dict)
        self.refuse = False
        self.server = Server(self._handle, path=folder / "a.sock")
        self.server.start()
        self.url = f"unix://{(folder / 'a.sock').absolute()}"

    def _noted(self, x: np.ndarray) -> np.ndarray:  # type: ignore[type-arg]
        self.saw.append(Segment.containing(x) is not None)
        return x

    def _handle(self, request: Request) -> Response:
        if request.path == LANE_PATH:
            return error_response(404, "no such path")
        if self.refuse and request.path.endswith("/segment"):
            return error_response(404, "no such path")
        self.bodies.append(len(request.body))
        return self.endpoint(request)

    def stop(self) -> None:
        self.server.stop(0.5)
        self.engine.stop()
        self.endpoint.close()


@pytest.fixture
def agent(socket_folder: Path) -> Iterator[SharedMemoryAgent]:
    own = SharedMemoryAgent(socket_folder)
    yield own
    own.stop()


Ask = Callable[..., oip.Tensor]


@pytest.fixture(params=["threads", "asyncio"])
def ask(request: pytest.FixtureRequest, agent: SharedMemoryAgent) -> Iterator[Ask]:
    """One way to ask the agent's model."""
    if request.param == "threads":
        with Client(agent.url) as client:
            yield lambda x=X, **how: client.infer("big", {"x": x}, deadline_s=PATIENCE_S, **how).outputs["y"]
        return
    loop = asyncio.new_event_loop()
    asynchronous = AsyncClient(agent.url)

    def run(x: oip.Tensor = X, **how: object) -> oip.Tensor:
        answer = loop.run_until_complete(asynchronous.infer("big", {"x": x}, deadline_s=PATIENCE_S, **how))  # type: ignore[arg-type]
        return answer.outputs["y"]

    yield run
    loop.run_until_complete(asynchronous.close())
    loop.close()


def test_large_tensors_use_shared_memory(agent: SharedMemoryAgent, ask: Ask) -> None:
    """Inputs in place, outputs not in the body; one segment serves all requests of a connection."""
    for factor in (1, 2, 3):
        np.testing.assert_array_equal(ask(factor * X), 2 * factor * X)
    assert agent.saw == [True] * 3
    offers, *bodies = agent.bodies
    assert offers < 100 and all(size < 2_000 for size in bodies)


def test_answer_is_not_overwritten_by_the_next_request(ask: Ask) -> None:
    """The next request reuses the memory; returned arrays do not change."""
    first = ask(X)
    kept = first.copy()
    ask(7 * X)
    np.testing.assert_array_equal(first, kept)


def test_server_without_segments_gets_bytes(agent: SharedMemoryAgent, ask: Ask) -> None:
    """An older agent, or a foreign server: asked once per connection, and then never again."""
    agent.refuse = True
    for _ in range(2):
        np.testing.assert_array_equal(ask(), 2 * X)
    assert agent.saw == [False, False] and all(size > X.nbytes for size in agent.bodies)


def test_non_contiguous_inputs_are_copied(ask: Ask) -> None:
    """A slice with strides, read backwards."""
    scattered = np.repeat(X, 2, axis=1)[:, ::2][:, ::-1]
    np.testing.assert_array_equal(ask(scattered), 2 * X[:, ::-1])


def test_segment_is_usable_after_an_error(agent: SharedMemoryAgent, ask: Ask) -> None:
    """A wrong shape is refused; the next request on the connection is answered."""
    with pytest.raises(UsageError, match="shape"):
        ask(np.concatenate([X, X]))
    np.testing.assert_array_equal(ask(), 2 * X)


def test_segment_is_registered_again_after_a_server_restart(agent: SharedMemoryAgent, ask: Ask) -> None:
    """The new process does not know the old one's segments: the client registers its memory again."""
    np.testing.assert_array_equal(ask(), 2 * X)
    path = Path(agent.url.removeprefix("unix://"))
    agent.server.stop(0.5)
    agent.server = Server(agent._handle, path=path)
    agent.server.start()
    np.testing.assert_array_equal(ask(), 2 * X)
    assert agent.saw == [True, True]


def test_shared_memory_can_be_disabled(agent: SharedMemoryAgent) -> None:
    """By the application."""
    with Client(agent.url, shared_memory=False) as client:
        client.infer("big", {"x": X}, deadline_s=PATIENCE_S)
    assert agent.saw == [False]


def test_closed_client_leaves_no_descriptors_or_mappings(agent: SharedMemoryAgent) -> None:
    """Also when it closed while its request ran."""

    def held() -> int:
        return sum("memfd:edgesplit" in line for line in Path("/proc/self/maps").read_text().splitlines())

    gc.collect()  # what earlier tests left behind would go at any moment
    before = held()
    agent.step.may_run.clear()
    client = Client(agent.url)
    errors: list[str] = []

    def ask(client: Client) -> None:
        try:
            client.infer("big", {"x": X}, deadline_s=PATIENCE_S)
        except LinkError as error:
            errors.append(str(error))

    thread = threading.Thread(target=ask, args=(client,))
    thread.start()
    assert agent.step.entered.wait(PATIENCE_S)
    client.close()
    thread.join(PATIENCE_S)
    assert held() > before
    agent.step.may_run.set()
    del client
    eventually("the server has let go of the segment", lambda: held() <= before)
    assert len(errors) == 1
