"""The Python way in: `Client.infer` returns one answer or raises a typed error by its deadline, whatever happens.

One request id is retried over lost connections, restarts and "no room just now" until the deadline; an answer counts
only under that id, so a late or duplicate one of an earlier attempt is never returned. Over the agent's Unix socket
large tensors lie in shared memory and are not copied through the kernel. Works with any server of the Open Inference
Protocol that echoes ids; what only the agent tells (`Answer.report`) is None elsewhere. `edgesplit.AsyncClient` is the
same for asyncio.
"""

from __future__ import annotations

import logging
import ssl
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from time import monotonic
from typing import Any

from edgesplit.client import model_index
from edgesplit.client.connection import Connection
from edgesplit.client.direct.sync_channel import may_have_lanes
from edgesplit.client.frame_window import Errors, StreamSettings
from edgesplit.client.request import PLAIN, Answer, Question, check_deadline
from edgesplit.client.retry import Attempts
from edgesplit.client.stream import answers
from edgesplit.errors import Busy, EdgeError, LinkError
from edgesplit.http1.address import Address
from edgesplit.http1.response import Reply, error_of
from edgesplit.observability.trace_context import of_application
from edgesplit.oip import protocol as oip
from edgesplit.oip.options import NONE, Drop, Wishes, to_parameters

__all__ = ["Answer", "Client", "Connection", "Reply", "error_of"]

log = logging.getLogger(__name__)


class Client:
    """Inference on an agent, or on any server of the Open Inference Protocol. Usable from any number of threads.

    >>> with Client("unix:///var/lib/edgesplit/agent.sock") as client:
    ...     answer = client.infer("digits", {"frame": jpeg}, deadline_s=0.5)
    ...     answer.outputs["prob"], answer.report.row
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
        """`url`: `http://…`, `https://…` or `unix:///path/of/the/agent.sock`; `timeout_s` is for `models` and such.

        `shared_memory=False`: tensors travel as bytes over a Unix socket too. `lane=False`: every request goes through
        the agent, also where there is nothing for it to decide."""
        address = Address.parse(url)
        secured = (tls or ssl.create_default_context()) if address.tls else None
        self._begin(address, secured, timeout_s, shared_memory)
        self._takes_lanes = may_have_lanes(address.socket, lane)

    def _begin(self, address: Address, tls: ssl.SSLContext | None, timeout_s: float, shared_memory: bool) -> None:
        self._takes_lanes = False
        self._address = address
        self._tls = tls
        self._timeout_s = timeout_s
        self._shared_memory = shared_memory
        self._own = threading.local()
        self._lock = threading.Lock()
        self._connections: dict[threading.Thread, Connection] = {}
        self._closed = threading.Event()

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def infer(
        self,
        model: str,
        inputs: Mapping[str, oip.Tensor | bytes],
        *,
        deadline_s: float = 2.0,
        request_id: str | None = None,
        outputs: Sequence[str] = (),
        wishes: Wishes = NONE,
    ) -> Answer:
        """The model's answer to `inputs` (bytes, such as a JPEG, are one UINT8 tensor), within `deadline_s`.

        `wishes` say how it is to be answered: `Wishes(hedge="never", stale_ok_s=1.0)`.
        Over the agent's Unix socket, where the device answers alone, the answer comes from the model's own process.
        Raises NotFound or UsageError for what no retry mends, InferenceFailed where the model failed, and
        DeadlineExceeded, which says what stood in the way, once the time is up.
        """
        check_deadline(deadline_s)
        deadline = monotonic() + deadline_s
        if not (self._takes_lanes and request_id is None and wishes is NONE) or of_application():
            question = Question.of(model, inputs, outputs, request_id, to_parameters(wishes))
            return self.answer(question, deadline, deadline_s)
        connection = getattr(self._own, "connection", None) or self._connection()
        answer = connection.lanes.answer(model, inputs, outputs, deadline, connection.wish_lane)
        if answer is not None:
            return answer
        answer = self.answer(Question.of(model, inputs, outputs), deadline, deadline_s)
        connection.lanes.answered(model)
        return answer

    def stream(
        self,
        model: str,
        frames: Iterable[Mapping[str, oip.Tensor | bytes]],
        *,
        in_flight: int = 2,
        drop: Drop = "none",
        deadline_s: float = 2.0,
        errors: Errors = "raise",
        outputs: Sequence[str] = (),
        wishes: Wishes = NONE,
    ) -> Iterator[Answer | EdgeError]:
        """Answers to `frames`, in their order, up to `in_flight` of them under way at once.

        `drop` says what gives way where frames come faster than answers. `none`: the source waits, and never more than
        `in_flight` frames are taken from it ahead of the answers that were given out. `oldest`: the source never waits,
        and a frame that has not begun gives way to the next. `newest`: a frame that finds no room is dropped.
        `errors="raise"` raises a frame's error and ends the stream; dropped frames are left out (`Answer.frame` counts
        them). `errors="yield"` gives the error, `Dropped` too, in the frame's place, and goes on. The deadline of each
        frame begins when it is taken from `frames`, which is read in a thread of its own. Leaving the loop, or
        `close()` on what this returns, ends what is under way.

        >>> for answer in client.stream("digits", camera(), in_flight=3, drop="oldest"):
        ...     show(answer.frame, answer.outputs["prob"])
        """
        settings = StreamSettings(model, in_flight, drop, deadline_s, errors, tuple(outputs), wishes)
        twin = Client.__new__(type(self))  # its connections end with the stream, and only they
        twin._begin(self._address, self._tls, self._timeout_s, self._shared_memory)
        return answers(settings, frames, twin)

    def models(self) -> tuple[str, ...]:
        """Names of the models that can be asked for now."""
        return model_index.names(self._exchange("POST", model_index.INDEX))

    def metadata(self, model: str) -> dict[str, Any]:
        """The model's inputs and outputs, as the Open Inference Protocol words them. NotFound if there is no such."""
        path = model_index.model_path(model)
        found: dict[str, Any] = model_index.said(path, self._exchange("GET", path), dict[str, Any])
        return found

    def ready(self, model: str | None = None) -> bool:
        """Could the server, or this model on it, answer now?"""
        try:
            return self._exchange("GET", model_index.ready_path(model)).status == 200
        except EdgeError:
            return False

    def close(self) -> None:
        """End all connections. A call that waits raises LinkError."""
        self._closed.set()
        with self._lock:
            connections = list(self._connections.values())
        for connection in connections:
            connection.end()

    def answer(self, question: Question, deadline: float, deadline_s: float) -> Answer:
        """Ask until it is answered, fails for good, or `deadline` (of the monotonic clock) has come."""
        attempts = Attempts(deadline_s)
        while monotonic() < deadline:
            connection = self._connection()
            try:
                return connection.ask(self._address.prefix, question, deadline)
            except EdgeError as error:
                if self._closed.is_set():
                    raise
                pause_s = attempts.failed(error)
                log.debug("attempt failed, trying again: %s", error)
                if not isinstance(error, Busy):
                    connection.close()  # whatever else arrives on it belongs to the past
            self._closed.wait(max(0.0, min(pause_s, deadline - monotonic())))
        raise attempts.over()

    def _exchange(self, method: str, path: str) -> Reply:
        """One exchange on this thread's connection; one that the server had closed meanwhile is replaced at once."""
        connection, deadline = self._connection(), monotonic() + self._timeout_s
        was_open, target = connection.is_open, self._address.prefix + path
        try:
            return connection.exchange(method, target, deadline=deadline, headers=PLAIN)
        except LinkError:
            if not was_open or self._closed.is_set():
                raise
        return connection.exchange(method, target, deadline=deadline, headers=PLAIN)

    def _connection(self) -> Connection:
        """This thread's own. Those of threads that have ended are closed on the way."""
        if self._closed.is_set():
            raise LinkError("this client was closed")
        own: Connection | None = getattr(self._own, "connection", None)
        if own is None:
            own = Connection.to(self._address, self._tls, shared_memory=self._shared_memory)
            with self._lock:
                if self._closed.is_set():  # meanwhile: `close` did not see this one
                    raise LinkError("this client was closed")
                self._connections[threading.current_thread()] = own
                ended = [thread for thread in self._connections if not thread.is_alive()]
                for thread in ended:
                    self._connections.pop(thread).end()
            self._own.connection = own
        return own
