"""`Client`: the inference client for threads. `Client.infer` returns one answer or raises a typed error by its
deadline.

One request id is retried over lost connections, server restarts and refusals for lack of room until the deadline. An
answer counts only under that id, so a late or duplicate answer to an earlier attempt is never returned. Over the
agent's Unix socket large tensors lie in shared memory and are not copied through the kernel. Works with any server of
the Open Inference Protocol that echoes request ids; `Answer.report`, which only the agent sends, is None for other
servers. `edgesplit.AsyncClient` is the client for asyncio.
"""

from __future__ import annotations

import logging
import ssl
import threading
from collections.abc import Iterable, Iterator, Sequence
from time import monotonic
from typing import Any

from edgesplit.client import model_index
from edgesplit.client.accepted_inputs import Inputs, is_by_name, to_inputs
from edgesplit.client.answer import Answer, answer_from
from edgesplit.client.connection import Connection
from edgesplit.client.direct.request_policy import may_use_lane
from edgesplit.client.direct.sync_channel import can_use_lanes
from edgesplit.client.frame_window import ErrorMode, StreamSettings
from edgesplit.client.model_interface import InterfaceCache, ModelInterface
from edgesplit.client.request import PLAIN_HEADERS, InferenceRequest, check_deadline
from edgesplit.client.retry import RetryState, never_reached
from edgesplit.client.stream import stream_answers
from edgesplit.errors import Busy, EdgeError, LinkError, Unreachable
from edgesplit.http1.address import Address
from edgesplit.http1.response import Reply, error_of
from edgesplit.oip.options import NONE, Drop, InferOptions, to_parameters

__all__ = ["Answer", "Client", "Connection", "Reply", "error_of"]

log = logging.getLogger(__name__)


class Client:
    """Inference on an agent, or on any server of the Open Inference Protocol. Usable from any number of threads.

    >>> with Client("unix:///var/lib/edgesplit/agent.sock") as client:
    ...     answer = client.infer("digits", {"frame": jpeg}, deadline_s=0.5)
    ...     answer.labels[0].name, answer.outputs["prob"], answer.report.row
    """

    def __init__(
        self,
        url: str = "http://127.0.0.1:8600",
        timeout_s: float = 10.0,
        *,
        tls: ssl.SSLContext | None = None,
        shared_memory: bool = True,
        lane: bool = True,
    ) -> None:
        """`url`: `http://…`, `https://…` or `unix:///path/of/the/agent.sock`. `timeout_s` bounds `models`, `metadata`
        and `ready`.

        `shared_memory=False` sends tensors as bytes over a Unix socket too. `lane=False` sends every request through
        the agent; otherwise, where the device runs the model alone, a direct lane to the model's worker process is
        used.
        """
        address = Address.parse(url)
        context = (tls or ssl.create_default_context()) if address.tls else None
        self._initialise(address, context, timeout_s, shared_memory)
        self._uses_lanes = can_use_lanes(address.socket, lane)

    def _initialise(self, address: Address, tls: ssl.SSLContext | None, timeout_s: float, shared_memory: bool) -> None:
        self._uses_lanes = False
        self._address = address
        self._tls = tls
        self._timeout_s = timeout_s
        self._shared_memory = shared_memory
        self._reached = False
        """Whether the server has ever been there, so that it may come back."""
        self._thread_local = threading.local()
        self._lock = threading.Lock()
        self._interfaces = InterfaceCache()
        self._connections: dict[threading.Thread, Connection] = {}
        self._closed = threading.Event()

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def infer(
        self,
        model: str,
        inputs: Inputs,
        *,
        deadline_s: float = 2.0,
        request_id: str | None = None,
        outputs: Sequence[str] = (),
        options: InferOptions = NONE,
    ) -> Answer:
        """The answer of `model` (`name` or `name@version`) to `inputs`, within `deadline_s` seconds (`edgectl infer`
        has 5 by default). A `bytes` input, such as a JPEG, is one UINT8 tensor. In place of inputs by name, one may be
        given alone: the frame of a model that was pushed with an input spec as bytes, a path, an open file, a Pillow
        picture or its pixels (uint8 [height, width, 3], RGB); an array for a model with one input; a path of an .npz or
        .npy. `answer.labels`, `boxes`, `mask` and `embedding` are what the outputs mean.

        `options` are per-request settings: `InferOptions(hedge="never", stale_ok_s=1.0)`. `outputs` names the outputs
        to return (empty: all). `request_id` is generated if absent. Over the agent's Unix socket, where the device runs
        the model alone, the answer comes straight from the model's worker process. Raises NotFound or UsageError for
        errors that no retry can repair, InferenceFailed if the model failed, Unreachable at once where nothing listens
        at the address and this client has never reached it, and DeadlineExceeded, with the last obstacle in its text,
        once the time is up.
        """
        check_deadline(deadline_s)
        deadline = monotonic() + deadline_s
        named = inputs if is_by_name(inputs) else to_inputs(inputs, lambda: self.interface(model))
        if not (self._uses_lanes and may_use_lane(request_id, options)):
            request = InferenceRequest.create(model, named, outputs, request_id, to_parameters(options))
            return self.send_with_retry(request, deadline, deadline_s)
        connection = getattr(self._thread_local, "connection", None) or self._thread_connection()
        answer = connection.lanes.infer(
            model, named, outputs, deadline, connection.request_lane,
            lambda: self.send_with_retry(InferenceRequest.create(model, named, outputs), deadline, deadline_s),
        )  # fmt: skip
        return answer_from(answer, named, lambda: self.interface(model))

    def stream(
        self,
        model: str,
        frames: Iterable[Inputs],
        *,
        in_flight: int = 2,
        drop: Drop = "none",
        deadline_s: float = 2.0,
        errors: ErrorMode = "raise",
        outputs: Sequence[str] = (),
        options: InferOptions = NONE,
    ) -> Iterator[Answer | EdgeError]:
        """Answers to `frames`, each as `infer` takes it, in order, with up to `in_flight` of them in flight at once.

        `drop` is the policy for frames that come faster than answers. `none`: the source waits (back-pressure), and
        never more than `in_flight` frames are read ahead of the answers that were yielded. `oldest`: the source never
        waits, and the oldest frame that has not been sent is dropped for the next one. `newest`: a new frame that finds
        no room is dropped. `errors="raise"` raises a frame's error and ends the stream; dropped frames are left out
        (`Answer.frame` counts them). `errors="yield"` yields the error, `Dropped` too, in the frame's place, and
        continues. Each frame's deadline starts when the frame is read from `frames`, which happens in a thread of its
        own. Leaving the loop, or calling `close()` on the returned iterator, cancels what is in flight.

            >>> for answer in client.stream("digits", camera(), in_flight=3, drop="oldest"):
            ...     show(answer.frame, answer.outputs["prob"])
        """
        settings = StreamSettings(
            model, in_flight, drop, deadline_s, errors, tuple(outputs), options,
            lambda frame: to_inputs(frame, lambda: self.interface(model)),
        )  # fmt: skip
        stream_client = Client.__new__(type(self))  # a client of its own: closing it ends only the stream's connections
        stream_client._initialise(self._address, self._tls, self._timeout_s, self._shared_memory)

        def send(request: InferenceRequest, deadline: float, left_s: float) -> Answer:
            # The stream's own connections are closed at its end; what an answer means may be asked for after that.
            answer = stream_client.send_with_retry(request, deadline, left_s)
            return answer_from(answer, request.inputs, lambda: self._interface_at(request.model_path))

        return stream_answers(settings, frames, send, stream_client.close)

    def models(self) -> tuple[str, ...]:
        """Names of the models that can be used now, sorted."""
        return model_index.names(self._exchange("POST", model_index.INDEX))

    def metadata(self, model: str) -> dict[str, Any]:
        """The model's inputs and outputs as Open Inference Protocol metadata. NotFound if the server has no such
        model."""
        path = model_index.model_path(model)
        return model_index.decode_reply(path, self._exchange("GET", path), dict[str, Any])

    def interface(self, model: str) -> ModelInterface:
        """The model's input spec and output kind, as they were pushed; asked for again after ten seconds."""
        return self._interface_at(model_index.model_path(model))

    def _interface_at(self, path: str) -> ModelInterface:
        return self._interfaces.find(path) or self._interfaces.keep(path, self._exchange("GET", path))

    def ready(self, model: str | None = None) -> bool:
        """Whether the server, or `model` on it, can answer now; False if the server does not respond."""
        try:
            return self._exchange("GET", model_index.ready_path(model)).status == 200
        except EdgeError:
            return False

    def close(self) -> None:
        """Close all connections. Calls in flight raise LinkError."""
        self._closed.set()
        with self._lock:
            connections = list(self._connections.values())
        for connection in connections:
            connection.shut_down()

    def send_with_retry(self, request: InferenceRequest, deadline: float, deadline_s: float) -> Answer:
        """Send `request` until it is answered, fails for good, or `deadline` (monotonic clock) has passed:
        DeadlineExceeded."""
        attempts = RetryState(deadline_s, reached=self._reached)
        while monotonic() < deadline:
            connection = self._thread_connection()
            try:
                answer = connection.infer(self._address.prefix, request, deadline)
                self._reached = True
                return answer_from(answer, request.inputs, lambda: self._interface_at(request.model_path))
            except EdgeError as error:
                if self._closed.is_set():
                    raise
                pause_s = attempts.on_failure(error)
                self._reached = True
                log.debug("attempt failed, retrying: %s", error)
                if not isinstance(error, Busy):
                    connection.close()  # a late response to this attempt may still arrive on it
            self._closed.wait(max(0.0, min(pause_s, deadline - monotonic())))
        raise attempts.deadline_error()

    def _exchange(self, method: str, path: str) -> Reply:
        """One exchange on this thread's connection; a connection that the server closed while it was idle is replaced
        once."""
        connection, deadline = self._thread_connection(), monotonic() + self._timeout_s
        was_open, target = connection.is_open, self._address.prefix + path
        try:
            reply = connection.exchange(method, target, deadline=deadline, headers=PLAIN_HEADERS)
            self._reached = True
            return reply
        except LinkError as error:
            if isinstance(error, Unreachable) and not self._reached:
                raise never_reached(error) from error
            if not was_open or self._closed.is_set():
                raise
        return connection.exchange(method, target, deadline=deadline, headers=PLAIN_HEADERS)

    def _thread_connection(self) -> Connection:
        """This thread's connection, made on first use. Connections of threads that have ended are closed here."""
        if self._closed.is_set():
            raise LinkError("this client was closed")
        own: Connection | None = getattr(self._thread_local, "connection", None)
        if own is None:
            own = Connection.to(self._address, self._tls, shared_memory=self._shared_memory)
            with self._lock:
                if self._closed.is_set():  # closed in between: `close` did not see this connection
                    raise LinkError("this client was closed")
                self._connections[threading.current_thread()] = own
                ended = [thread for thread in self._connections if not thread.is_alive()]
                for thread in ended:
                    self._connections.pop(thread).shut_down()
            self._thread_local.connection = own
        return own
