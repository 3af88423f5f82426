"""`edgesplit.Client` for asyncio: the same answers, the same errors, the same one id until the deadline.

Cancelling an `infer` closes its exchange. Connections are kept for the next request, a bounded number at once; all must
be used in one event loop.
"""

from __future__ import annotations

import asyncio
import logging
import ssl
import uuid
from collections.abc import AsyncIterable, AsyncIterator, Iterable, Mapping, Sequence
from time import monotonic
from typing import Any

from edgesplit.client import model_index
from edgesplit.client.async_connection import AsyncConnection
from edgesplit.client.direct.async_channel import AsyncLanes
from edgesplit.client.direct.grant import LANE_PATH
from edgesplit.client.direct.sync_channel import may_have_lanes
from edgesplit.client.frame_window import Errors, Result, StreamSettings, Window
from edgesplit.client.request import PLAIN, Answer, Question, check_deadline
from edgesplit.client.retry import Attempts
from edgesplit.errors import Busy, DeadlineExceeded, EdgeError, LinkError
from edgesplit.http1.address import Address
from edgesplit.http1.response import Reply
from edgesplit.observability.trace_context import of_application
from edgesplit.oip import protocol as oip
from edgesplit.oip.options import NONE, Drop, Wishes, to_parameters

log = logging.getLogger(__name__)

Frame = Mapping[str, "oip.Tensor | bytes"]


class AsyncClient:
    """Inference on an agent, or on any server of the Open Inference Protocol.

    >>> async with AsyncClient("unix:///var/lib/edgesplit/agent.sock") as client:
    ...     answer = await client.infer("digits", {"frame": jpeg}, deadline_s=0.5)
    ...     async for answer in client.stream("digits", camera(), drop="oldest"):
    ...         show(answer.outputs["prob"])
    """

    def __init__(
        self,
        url: str = "http://127.0.0.1:8600",
        timeout_s: float = 10.0,
        *,
        tls: ssl.SSLContext | None = None,
        shared_memory: bool = True,
        lane: bool = True,
        connections: int = 64,
    ) -> None:
        """As `Client`. As many requests as `connections` are under way at once; more wait, as part of their time."""
        self._address = Address.parse(url)
        self._tls = (tls or ssl.create_default_context()) if self._address.tls else None
        self._timeout_s = timeout_s
        self._shared_memory = shared_memory
        self._room = asyncio.Semaphore(connections)
        self._idle: list[AsyncConnection] = []
        self._busy: set[AsyncConnection] = set()
        self._closed = False
        self._lanes = AsyncLanes(shared_memory) if may_have_lanes(self._address.socket, lane) else None

    async def __aenter__(self) -> AsyncClient:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def infer(
        self,
        model: str,
        inputs: Frame,
        *,
        deadline_s: float = 2.0,
        request_id: str | None = None,
        outputs: Sequence[str] = (),
        wishes: Wishes = NONE,
    ) -> Answer:
        """As `Client.infer`."""
        check_deadline(deadline_s)
        deadline, lanes = monotonic() + deadline_s, self._lanes
        if lanes is None or request_id is not None or wishes is not NONE or of_application():
            question = Question.of(model, inputs, outputs, request_id, to_parameters(wishes))
            return await self._answer(question, deadline, deadline_s)
        answer = await lanes.answer(model, inputs, outputs, deadline, self._wish_lane)
        if answer is None:
            answer = await self._answer(Question.of(model, inputs, outputs), deadline, deadline_s)
            lanes.answered(model)
        return answer

    def stream(
        self,
        model: str,
        frames: AsyncIterable[Frame] | Iterable[Frame],
        *,
        in_flight: int = 2,
        drop: Drop = "none",
        deadline_s: float = 2.0,
        errors: Errors = "raise",
        outputs: Sequence[str] = (),
        wishes: Wishes = NONE,
    ) -> AsyncIterator[Answer | EdgeError]:
        """As `Client.stream`. An ordinary iterable is read in a thread, so that it may block."""
        settings = StreamSettings(model, in_flight, drop, deadline_s, errors, tuple(outputs), wishes)
        return self._streamed(settings, frames)

    async def models(self) -> tuple[str, ...]:
        """As `Client.models`."""
        return model_index.names(await self._get("POST", model_index.INDEX))

    async def metadata(self, model: str) -> dict[str, Any]:
        """As `Client.metadata`."""
        path = model_index.model_path(model)
        found: dict[str, Any] = model_index.said(path, await self._get("GET", path), dict[str, Any])
        return found

    async def ready(self, model: str | None = None) -> bool:
        """As `Client.ready`."""
        try:
            return (await self._get("GET", model_index.ready_path(model))).status == 200
        except EdgeError:
            return False

    async def close(self) -> None:
        """End all connections. A call that waits raises LinkError."""
        self._closed = True
        if self._lanes is not None:
            self._lanes.close()
        for connection in (*self._idle, *self._busy):
            connection.close()
        self._idle.clear()
        await asyncio.sleep(0)  # transports close in the loop's next round

    async def _answer(self, question: Question, deadline: float, deadline_s: float) -> Answer:
        """Ask until it is answered, fails for good, or the deadline has come."""
        attempts = Attempts(deadline_s)
        while monotonic() < deadline:
            try:
                return await self._attempt(question, deadline)
            except EdgeError as error:
                if self._closed:
                    raise
                pause_s = attempts.failed(error)
                log.debug("attempt failed, trying again: %s", error)
            await asyncio.sleep(max(0.0, min(pause_s, deadline - monotonic())))
        raise attempts.over()

    async def _wish_lane(self, wish: bytes, descriptor: int, within_s: float) -> Reply:
        deadline, good = monotonic() + within_s, False
        connection = await self._taken(deadline)
        try:
            path = self._address.prefix + LANE_PATH
            reply = await connection.exchange("POST", path, deadline=deadline, body=[wish], descriptor=descriptor)
            good = True
            return reply
        finally:
            self._given_back(connection, good)

    async def _attempt(self, question: Question, deadline: float) -> Answer:
        connection = await self._taken(deadline)
        good = False
        try:
            answer = await connection.ask(self._address.prefix, question, deadline)
            good = True
            return answer
        except Busy:
            good = True
            raise
        finally:
            self._given_back(connection, good)

    async def _get(self, method: str, path: str) -> Reply:
        """One exchange; a connection that the server had closed meanwhile is replaced at once."""
        deadline = monotonic() + self._timeout_s
        connection = await self._taken(deadline)
        good, was_open, target = False, connection.is_open, self._address.prefix + path
        try:
            try:
                reply = await connection.exchange(method, target, deadline=deadline, headers=PLAIN)
            except LinkError:
                if not was_open or self._closed:
                    raise
                reply = await connection.exchange(method, target, deadline=deadline, headers=PLAIN)
            good = True
            return reply
        finally:
            self._given_back(connection, good)

    async def _taken(self, deadline: float) -> AsyncConnection:
        if self._closed:
            raise LinkError("this client was closed")
        try:
            await asyncio.wait_for(self._room.acquire(), max(0.0, deadline - monotonic()))
        except (TimeoutError, asyncio.TimeoutError) as error:
            raise DeadlineExceeded("all connections of this client were busy until the deadline") from error
        connection = self._idle.pop() if self._idle else self._made()
        self._busy.add(connection)
        return connection

    def _made(self) -> AsyncConnection:
        return AsyncConnection(self._address, self._tls, shared_memory=self._shared_memory)

    def _given_back(self, connection: AsyncConnection, good: bool) -> None:
        self._busy.discard(connection)
        self._room.release()
        if good and not self._closed and connection.is_open:
            self._idle.append(connection)
        else:
            connection.close()

    async def _streamed(self, settings: StreamSettings, frames: Any) -> AsyncIterator[Result]:
        stream = _Stream(settings, frames, self)
        stream.start()
        try:
            while (given := await stream.next()) is not None:
                if (result := settings.given(*given)) is not None:
                    yield result
        finally:
            await stream.stop()


class _Stream:
    """A stream's tasks: one reads the source, one per frame under way asks."""

    def __init__(self, settings: StreamSettings, frames: Any, client: AsyncClient) -> None:
        self._settings = settings
        self._frames = frames
        self._client = client
        self._name = uuid.uuid4().hex
        self._window: Window[tuple[Any, float]] = Window(settings.in_flight, settings.drop)
        self._changed = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        self._broken: BaseException | None = None

    def start(self) -> None:
        """Begin to read."""
        self._run(self._read())

    async def stop(self) -> None:
        """Nobody wants more: what is under way is cancelled, which closes its exchanges."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def next(self) -> tuple[int, Result] | None:
        """The next result, once it is there; None at the end."""
        while (given := self._window.give()) is None:
            if self._window.over:
                if self._broken is not None:
                    raise self._broken
                return None
            self._changed.clear()
            await self._changed.wait()
        self._begin()
        return given

    async def _read(self) -> None:
        try:
            source = _source(self._frames)
            while True:
                while not self._window.wants:
                    self._changed.clear()
                    await self._changed.wait()
                frame = await source.__anext__()
                self._window.take((frame, monotonic() + self._settings.deadline_s))
                self._begin()
        except StopAsyncIteration:
            pass
        except Exception as error:
            self._broken = error
        self._window.ended()
        self._changed.set()

    def _begin(self) -> None:
        """Ask about every frame whose turn has come."""
        while (begun := self._window.begin()) is not None:
            number, (frame, deadline) = begun
            self._run(self._ask(number, frame, deadline))
        self._changed.set()

    async def _ask(self, number: int, frame: Any, deadline: float) -> None:
        try:
            question = self._settings.question(self._name, frame)
            result: Result = await self._client._answer(question, deadline, self._settings.deadline_s)
        except EdgeError as error:
            result = error
        except Exception as error:
            result = EdgeError(f"frame {number}: {type(error).__name__}: {error}")
        self._window.finished(number, result)
        self._begin()

    def _run(self, work: Any) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def _source(frames: Any) -> AsyncIterator[Any]:
    """`frames` as an asynchronous iterator."""
    if isinstance(frames, AsyncIterable):
        return frames.__aiter__()
    return _in_a_thread(iter(frames))


async def _in_a_thread(frames: Any) -> AsyncIterator[Any]:
    """An ordinary iterator, whose every step may block."""
    end = object()
    while (frame := await asyncio.to_thread(next, frames, end)) is not end:
        yield frame
