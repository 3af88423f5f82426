"""`AsyncClient`: the inference client for asyncio, with the answers, errors and retry rules of `edgesplit.Client`.

One request id is retried until the deadline. Cancelling an `infer` closes the connection of its exchange. Idle
connections are pooled for the next request, at most `connections` at once; all of them must be used in one event loop.
"""

from __future__ import annotations

import asyncio
import logging
import ssl
import uuid
from collections.abc import AsyncIterable, AsyncIterator, Iterable, Sequence
from time import monotonic
from typing import Any

from edgesplit.client import model_index
from edgesplit.client.accepted_inputs import ByName, Inputs, is_by_name, to_inputs
from edgesplit.client.answer import Answer, answer_from
from edgesplit.client.async_connection import AsyncConnection
from edgesplit.client.direct.async_channel import AsyncLanes
from edgesplit.client.direct.grant import LANE_PATH
from edgesplit.client.direct.request_policy import may_use_lane
from edgesplit.client.direct.sync_channel import can_use_lanes
from edgesplit.client.frame_window import ErrorMode, FrameWindow, Result, StreamSettings
from edgesplit.client.model_interface import InterfaceCache, ModelInterface
from edgesplit.client.request import PLAIN_HEADERS, InferenceRequest, check_deadline
from edgesplit.client.retry import RetryState, never_reached
from edgesplit.errors import Busy, DeadlineExceeded, EdgeError, LinkError, Unreachable, UsageError
from edgesplit.http1.address import Address
from edgesplit.http1.response import Reply
from edgesplit.oip.options import NONE, Drop, InferOptions, to_parameters

log = logging.getLogger(__name__)


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
        """Nothing is connected yet; the other parameters are those of `Client`. At most `connections` requests are in
        flight at once; further ones wait for a connection, which counts against their deadline."""
        self._address = Address.parse(url)
        self._tls = (tls or ssl.create_default_context()) if self._address.tls else None
        self._timeout_s = timeout_s
        self._shared_memory = shared_memory
        self._connection_slots = asyncio.Semaphore(connections)
        self._idle: list[AsyncConnection] = []
        self._busy: set[AsyncConnection] = set()
        self._closed = False
        self._interfaces = InterfaceCache()
        self._reached = False
        """Whether the server has ever been there, so that it may come back."""
        self._lanes = AsyncLanes(shared_memory) if can_use_lanes(self._address.socket, lane) else None

    async def __aenter__(self) -> AsyncClient:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def infer(
        self,
        model: str,
        inputs: Inputs,
        *,
        deadline_s: float = 2.0,
        request_id: str | None = None,
        outputs: Sequence[str] = (),
        options: InferOptions = NONE,
    ) -> Answer:
        """Run the model on `inputs` within `deadline_s` seconds; parameters, answer and errors are those of
        `Client.infer`."""
        check_deadline(deadline_s)
        deadline, lanes = monotonic() + deadline_s, self._lanes
        inputs = await self._to_inputs(model, inputs)
        if lanes is None or not may_use_lane(request_id, options):
            request = InferenceRequest.create(model, inputs, outputs, request_id, to_parameters(options))
            return await self._send_with_retry(request, deadline, deadline_s)
        answer = await lanes.infer(
            model, inputs, outputs, deadline, self._request_lane,
            lambda: self._send_with_retry(InferenceRequest.create(model, inputs, outputs), deadline, deadline_s),
        )  # fmt: skip
        return answer_from(answer, inputs, lambda: self._known_interface(model_index.model_path(model)))

    def stream(
        self,
        model: str,
        frames: AsyncIterable[Inputs] | Iterable[Inputs],
        *,
        in_flight: int = 2,
        drop: Drop = "none",
        deadline_s: float = 2.0,
        errors: ErrorMode = "raise",
        outputs: Sequence[str] = (),
        options: InferOptions = NONE,
    ) -> AsyncIterator[Answer | EdgeError]:
        """Answers to `frames` in order; parameters and errors are those of `Client.stream`.

        A synchronous iterable is read in a thread, so its steps may block.
        """
        settings = StreamSettings(model, in_flight, drop, deadline_s, errors, tuple(outputs), options)
        return self._stream_results(settings, frames)

    async def models(self) -> tuple[str, ...]:
        """Names of the models that can be used now, sorted."""
        return model_index.names(await self._get("POST", model_index.INDEX))

    async def metadata(self, model: str) -> dict[str, Any]:
        """The model's inputs and outputs as Open Inference Protocol metadata. NotFound if the server has no such
        model."""
        path = model_index.model_path(model)
        return model_index.decode_reply(path, await self._get("GET", path), dict[str, Any])

    async def interface(self, model: str) -> ModelInterface:
        """The model's input spec and output kind, as they were pushed. Once this was awaited, answers of the model have
        their `labels` or `boxes`; it is asked for again after ten seconds."""
        path = model_index.model_path(model)
        return self._interfaces.find(path) or self._interfaces.keep(path, await self._get("GET", path))

    async def _to_inputs(self, model: str, inputs: Inputs) -> ByName:
        """Inputs by name; files are read and pictures encoded in a thread."""
        if is_by_name(inputs):
            return inputs
        needs_model = not isinstance(inputs, bytes | bytearray | memoryview)
        interface = await self.interface(model) if needs_model else ModelInterface()
        return await asyncio.to_thread(to_inputs, inputs, lambda: interface)

    def _known_interface(self, path: str) -> ModelInterface:
        """The interface that was awaited before: an answer's attributes cannot wait."""
        if (known := self._interfaces.last(path)) is None:
            raise UsageError("await client.interface(model) once, before reading what its answers mean")
        return known

    async def ready(self, model: str | None = None) -> bool:
        """Whether the server, or `model` on it, can answer now; False if the server does not respond."""
        try:
            return (await self._get("GET", model_index.ready_path(model))).status == 200
        except EdgeError:
            return False

    async def close(self) -> None:
        """Close all connections. Calls in flight raise LinkError."""
        self._closed = True
        if self._lanes is not None:
            self._lanes.close()
        for connection in (*self._idle, *self._busy):
            connection.close()
        self._idle.clear()
        await asyncio.sleep(0)  # transports close in the loop's next round

    async def _send_with_retry(self, request: InferenceRequest, deadline: float, deadline_s: float) -> Answer:
        """Send `request` until it is answered, fails for good, or `deadline` (monotonic clock) has passed:
        DeadlineExceeded."""
        attempts = RetryState(deadline_s, reached=self._reached)
        while monotonic() < deadline:
            try:
                answer = await self._attempt(request, deadline)
                self._reached = True
                return answer_from(answer, request.inputs, lambda: self._known_interface(request.model_path))
            except EdgeError as error:
                if self._closed:
                    raise
                pause_s = attempts.on_failure(error)
                self._reached = True
                log.debug("attempt failed, retrying: %s", error)
            await asyncio.sleep(max(0.0, min(pause_s, deadline - monotonic())))
        raise attempts.deadline_error()

    async def _request_lane(self, body: bytes, descriptor: int, timeout_s: float) -> Reply:
        """Send the request for a direct lane, passing the worker's end of the socket pair as `descriptor`."""
        deadline, good = monotonic() + timeout_s, False
        connection = await self._acquire_connection(deadline)
        try:
            path = self._address.prefix + LANE_PATH
            reply = await connection.exchange("POST", path, deadline=deadline, body=[body], descriptor=descriptor)
            good = True
            return reply
        finally:
            self._release_connection(connection, good)

    async def _attempt(self, request: InferenceRequest, deadline: float) -> Answer:
        connection = await self._acquire_connection(deadline)
        good = False
        try:
            answer = await connection.infer(self._address.prefix, request, deadline)
            good = True
            return answer
        except Busy:
            good = True
            raise
        finally:
            self._release_connection(connection, good)

    async def _get(self, method: str, path: str) -> Reply:
        """One exchange with the client's timeout; a connection that the server closed while it was idle is replaced
        once."""
        deadline = monotonic() + self._timeout_s
        connection = await self._acquire_connection(deadline)
        good, was_open, target = False, connection.is_open, self._address.prefix + path
        try:
            try:
                reply = await connection.exchange(method, target, deadline=deadline, headers=PLAIN_HEADERS)
            except LinkError as error:
                if isinstance(error, Unreachable) and not self._reached:
                    raise never_reached(error) from error
                if not was_open or self._closed:
                    raise
                reply = await connection.exchange(method, target, deadline=deadline, headers=PLAIN_HEADERS)
            good = self._reached = True
            return reply
        finally:
            self._release_connection(connection, good)

    async def _acquire_connection(self, deadline: float) -> AsyncConnection:
        """An idle or new connection, once one of the client's slots is free; DeadlineExceeded if none is by
        `deadline`."""
        if self._closed:
            raise LinkError("this client was closed")
        try:
            await asyncio.wait_for(self._connection_slots.acquire(), max(0.0, deadline - monotonic()))
        except (TimeoutError, asyncio.TimeoutError) as error:
            raise DeadlineExceeded("all connections of this client were busy until the deadline") from error
        connection = self._idle.pop() if self._idle else self._new_connection()
        self._busy.add(connection)
        return connection

    def _new_connection(self) -> AsyncConnection:
        return AsyncConnection(self._address, self._tls, shared_memory=self._shared_memory)

    def _release_connection(self, connection: AsyncConnection, is_reusable: bool) -> None:
        """Return a connection to the pool; it is closed unless it `is_reusable` (no unread response can follow on
        it)."""
        self._busy.discard(connection)
        self._connection_slots.release()
        if is_reusable and not self._closed and connection.is_open:
            self._idle.append(connection)
        else:
            connection.close()

    async def _stream_results(self, settings: StreamSettings, frames: Any) -> AsyncIterator[Result]:
        stream = _Stream(settings, frames, self)
        stream.start()
        try:
            while (numbered_result := await stream.next()) is not None:
                if (result := settings.to_application(*numbered_result)) is not None:
                    yield result
        finally:
            await stream.stop()


class _Stream:
    """The tasks of one stream: one reads the source, and one per frame in flight sends its request."""

    def __init__(self, settings: StreamSettings, frames: Any, client: AsyncClient) -> None:
        self._settings = settings
        self._frames = frames
        self._client = client
        self._name = uuid.uuid4().hex
        self._window: FrameWindow[tuple[Any, float]] = FrameWindow(settings.in_flight, settings.drop)
        self._changed = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        self._source_error: BaseException | None = None

    def start(self) -> None:
        """Start reading the source."""
        self._spawn(self._read_source())

    async def stop(self) -> None:
        """Cancel all tasks of the stream, which closes the connections of their exchanges."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def next(self) -> tuple[int, Result] | None:
        """Number and result of the next frame in order, once available; None at the end. Raises what the source
        raised."""
        while (numbered_result := self._window.next_result()) is None:
            if self._window.is_over:
                if self._source_error is not None:
                    raise self._source_error
                return None
            self._changed.clear()
            await self._changed.wait()
        self._start_frames()
        return numbered_result

    async def _read_source(self) -> None:
        try:
            source = _as_async_iterator(self._frames)
            while True:
                while not self._window.can_accept:
                    self._changed.clear()
                    await self._changed.wait()
                frame = await source.__anext__()
                self._window.add((frame, monotonic() + self._settings.deadline_s))
                self._start_frames()
        except StopAsyncIteration:
            pass
        except Exception as error:
            self._source_error = error
        self._window.end_source()
        self._changed.set()

    def _start_frames(self) -> None:
        """Start a request for every frame that may be in flight now."""
        while (next_frame := self._window.start_next()) is not None:
            number, (frame, deadline) = next_frame
            self._spawn(self._infer_frame(number, frame, deadline))
        self._changed.set()

    async def _infer_frame(self, number: int, frame: Any, deadline: float) -> None:
        """Send one frame's request and store its result; errors become results."""
        try:
            inputs = await self._client._to_inputs(self._settings.model, frame)
            request = self._settings.request(self._name, inputs)
            result: Result = await self._client._send_with_retry(request, deadline, self._settings.deadline_s)
        except EdgeError as error:
            result = error
        except Exception as error:
            result = EdgeError(f"frame {number}: {type(error).__name__}: {error}")
        self._window.set_result(number, result)
        self._start_frames()

    def _spawn(self, work: Any) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def _as_async_iterator(frames: Any) -> AsyncIterator[Any]:
    """`frames` as an asynchronous iterator."""
    if isinstance(frames, AsyncIterable):
        return frames.__aiter__()
    return _iterate_in_thread(iter(frames))


async def _iterate_in_thread(frames: Any) -> AsyncIterator[Any]:
    """The items of a synchronous iterator, each step run in a thread because it may block."""
    end = object()
    while (frame := await asyncio.to_thread(next, frames, end)) is not end:
        yield frame
