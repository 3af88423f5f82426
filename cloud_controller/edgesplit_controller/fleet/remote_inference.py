"""Remote inferences: an operator's request, signed and sent to a device by the broker, and the device's answer.

Nothing is stored: request and answer are in the memory of the process that got the API call. The device answers on a
topic of that process, so no other one takes part; if the process ends, so do its requests. What a device sends counts
only for its own requests: the device of a topic is the name in its certificate. Each request is bounded in size and
time, each operator and each device in requests.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import threading
import time
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass, field
from time import monotonic
from typing import Protocol

from starlette.concurrency import run_in_threadpool

from edgesplit import errors
from edgesplit.errors import Busy, DeadlineExceeded, EdgeError, LinkError, MalformedMessage, UsageError
from edgesplit.limits import LIMITS
from edgesplit.mqtt.remote_inference import (
    MAX_DEADLINE_S,
    MAX_MODEL_CHARS,
    AnswerHead,
    BodyAssembly,
    BodyHead,
    CancelJob,
    InferenceJob,
    InferencePiece,
    JobFailed,
    JobProgress,
    Reply,
    Request,
    SignedJob,
    pieces,
    too_large,
)
from edgesplit.observability import metrics
from edgesplit.observability.registry import MetricRegistry
from edgesplit.terminal_text import printable
from edgesplit_controller.errors import Conflict
from edgesplit_controller.fleet.connection_state import offline_text
from edgesplit_controller.storage.database import Database
from edgesplit_controller.storage.tables.core import Device

MAX_PER_DEVICE = 2
"""Requests to one device in flight from one controller process."""
MAX_PER_OPERATOR = 4
"""Requests of one operator in flight in one process."""
MAX_IN_FLIGHT = 32
"""Requests in flight in one process: what they may hold in memory."""
DEVICE_PART = 0.9
"""Part of the time left that the device is given, so that its own error arrives before the deadline."""
CLOCK_TOLERANCE_S = 300.0
"""How far a device's clock may be ahead before it takes a request for expired."""
SEND_S = 10.0
"""Timeout, in seconds, of the broker's acknowledgement of one message."""
CHECK_S = 1.0
"""Seconds without a message after which the device's connection is looked at."""
UNANSWERED = {
    "sent": "its agent did not react (agents before 0.3 cannot be asked through the controller)",
    "waiting": "other inferences of operators are before this one, or applications need the processor",
    "running": "the device was still running it",
}
"""What the deadline interrupted, by the last state that the device reported."""


class SendRequest(Protocol):
    """Sends a device a message about a remote inference."""

    def __call__(self, device: str, message: Request, wait_s: float | None, /) -> None:
        """With `wait_s`, LinkError if the broker does not accept the message in that time."""


@dataclass(frozen=True, slots=True)
class Inference:
    """What an operator requests."""

    operator: str
    model: str
    """`name` or `name@version`."""
    body: bytes
    """Open Inference Protocol request."""
    json_bytes: int | None
    """Length of the body's JSON part; None: all of it is JSON."""
    deadline_s: float

    def __post_init__(self) -> None:
        if not 0 < len(self.body) <= LIMITS.remote_inference_bytes:
            raise UsageError(too_large("a request", len(self.body)) if self.body else "the request has no body")
        if self.json_bytes is not None and self.json_bytes > len(self.body):
            raise UsageError(f"a JSON part of {self.json_bytes} bytes in a body of {len(self.body)}")
        if not 0 < self.deadline_s <= MAX_DEADLINE_S:
            raise UsageError(f"a deadline of {self.deadline_s:g} s: more than 0, at most {MAX_DEADLINE_S:g}")
        if not 0 < len(self.model) <= MAX_MODEL_CHARS:
            raise UsageError(f"`model` is NAME or NAME@VERSION, at most {MAX_MODEL_CHARS} characters")


@dataclass(frozen=True, slots=True)
class InferenceAnswer:
    """A device's answer: an Open Inference Protocol response."""

    body: bytes
    json_bytes: int | None


@dataclass(eq=False)
class PendingInference:
    """A request in flight. Its replies arrive on the network's thread, and wake `changed` on the event loop."""

    id: str
    device: str
    request: Inference
    session: int
    start_id: str
    """Start of the agent that the request was sent to."""
    deadline: float
    """By the monotonic clock."""
    loop: asyncio.AbstractEventLoop
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    state: str = "sent"
    assembly: BodyAssembly | None = None
    outcome: InferenceAnswer | EdgeError | None = None
    is_cancelled: bool = False

    def on_reply(self, message: Reply) -> None:
        """Take a message of the device. Called on the network's thread; returns at once."""
        if self.outcome is not None:
            return
        try:
            if isinstance(message, JobProgress):
                self.state = message.state
            elif isinstance(message, AnswerHead):
                self.assembly = self.assembly or BodyAssembly(message.body)
            elif isinstance(message, InferencePiece) and self.assembly is not None:
                if (body := self.assembly.add(message)) is not None:
                    self.outcome = InferenceAnswer(body, self.assembly.head.json_bytes)
            elif isinstance(message, JobFailed):
                self.outcome = errors.of_kind(message.kind)(f"{self.device}: {printable(message.reason)}")
        except MalformedMessage as error:
            self.outcome = MalformedMessage(f"{self.device} sent a spoiled answer: {error}")
        with contextlib.suppress(RuntimeError):  # the loop was closed: the process is stopping
            self.loop.call_soon_threadsafe(self.changed.set)


class RemoteInferences:
    """The remote inferences of one controller process."""

    def __init__(
        self, database: Database, sign: Callable[[InferenceJob], bytes], send: SendRequest, process: int, *,
        registry: MetricRegistry, now: Callable[[], float] = time.time, check_s: float = CHECK_S,
    ) -> None:  # fmt: skip
        """`sign` signs with the director's keys; `process` is the number of this process."""
        self._database = database
        self._sign = sign
        self._send = send
        self._process = process
        self._registry = registry
        self._check_s = check_s
        self._now = now
        self._lock = threading.Lock()
        self._pending: dict[str, PendingInference] = {}

    def on_reply(self, device: str, message: Reply) -> bool:
        """Take a message of a device; False if it belongs to no request to this device."""
        pending = self._pending.get(message.id)
        if pending is None or pending.device != device:
            return False
        pending.on_reply(message)
        return True

    async def begin(self, device: Device, request: Inference) -> PendingInference:
        """Send a request to a device. Conflict if it is offline, Busy if too many are in flight, LinkError if the
        broker does not accept it."""
        birth = device.birth or {}
        if device.revoked or not device.alive:
            raise Conflict(await run_in_threadpool(self._offline_text, device))
        if birth.get("simulated"):
            raise Conflict(f"{device.name} is simulated: it runs no model")
        pending = PendingInference(
            secrets.token_hex(8), device.name, request, device.session, str(birth.get("start_id", "")),
            monotonic() + request.deadline_s, asyncio.get_running_loop(),
        )  # fmt: skip
        self._admit(pending)
        try:
            await run_in_threadpool(self._publish, pending)
        except BaseException:
            self._end(pending)
            raise
        return pending

    async def follow(self, pending: PendingInference) -> AsyncGenerator[str | InferenceAnswer, None]:
        """The states of a request as they change, then its answer. Raises the device's error, DeadlineExceeded, or
        LinkError if the device is lost. Closing the iterator cancels the request."""
        last = pending.state
        try:
            yield last
            while pending.outcome is None:
                left_s = pending.deadline - monotonic()
                if left_s <= 0:
                    within = f"{pending.request.deadline_s:g} s"
                    raise DeadlineExceeded(
                        f"{pending.device} has not answered within {within}: {UNANSWERED[pending.state]}"
                    )
                pending.changed.clear()
                if pending.outcome is None and pending.state == last:
                    with contextlib.suppress(asyncio.TimeoutError):
                        await asyncio.wait_for(pending.changed.wait(), min(self._check_s, left_s))
                if pending.state != last:
                    last = pending.state
                    yield last
                elif pending.outcome is None:
                    await run_in_threadpool(self._check_connected, pending)
            if isinstance(pending.outcome, EdgeError):
                raise pending.outcome
            yield pending.outcome
        except (asyncio.CancelledError, GeneratorExit):
            pending.is_cancelled = True
            raise
        finally:
            self._end(pending)

    def _admit(self, pending: PendingInference) -> None:
        """Note a request; Busy if too many are in flight."""
        device, operator = pending.device, pending.request.operator
        with self._lock:
            for overdue in [other for other in self._pending.values() if other.deadline < monotonic() - CHECK_S]:
                del self._pending[overdue.id]  # its caller left before it was followed
            others = list(self._pending.values())
            if sum(other.device == device for other in others) >= MAX_PER_DEVICE:
                raise Busy(f"{MAX_PER_DEVICE} inferences on {device} are in flight already: wait for one of them")
            if sum(other.request.operator == operator for other in others) >= MAX_PER_OPERATOR:
                raise Busy(f"{operator} has {MAX_PER_OPERATOR} inferences in flight already: wait for one of them")
            if len(others) >= MAX_IN_FLIGHT:
                raise Busy(f"{MAX_IN_FLIGHT} inferences are in flight through this controller: try again")
            self._pending[pending.id] = pending

    def _publish(self, pending: PendingInference) -> None:
        """Sign the job, and send it with its body."""
        now, request = self._now(), pending.request
        left_s = pending.deadline - monotonic()
        job = InferenceJob(
            device=pending.device, id=pending.id, session=pending.session, number=int(now * 1e6),
            process=self._process, model=request.model, deadline_s=max(0.001, left_s * DEVICE_PART),
            expires=int(now + request.deadline_s + CLOCK_TOLERANCE_S),
            body=BodyHead.of(request.body, request.json_bytes),
        )  # fmt: skip
        requests: list[Request] = [SignedJob(self._sign(job)), *pieces(pending.id, request.body)]
        for message in requests:
            self._send(pending.device, message, min(SEND_S, max(0.001, pending.deadline - monotonic())))

    def _check_connected(self, pending: PendingInference) -> None:
        """LinkError if the agent that has the request is gone. Another session of the same agent can still answer."""
        with self._database.read() as session:
            device = session.get(Device, pending.device)
        if device is None:
            raise LinkError(f"{pending.device} was removed")
        if device.revoked or not device.alive:
            raise LinkError(f"{self._offline_text(device)}; it had the request, which may have run")
        if (device.birth or {}).get("start_id", "") != pending.start_id:
            raise LinkError(f"the agent of {pending.device} was restarted while it had the request: send it again")

    def _offline_text(self, device: Device) -> str:
        with self._database.read() as session:
            return offline_text(session, device, self._now())

    def _end(self, pending: PendingInference) -> None:
        """Forget a request, and cancel it on the device unless that has answered."""
        with self._lock:
            if self._pending.pop(pending.id, None) is None:
                return
        if pending.outcome is None:
            with contextlib.suppress(EdgeError):
                self._send(pending.device, CancelJob(pending.id), None)
        answered = isinstance(pending.outcome, InferenceAnswer)
        outcome = "answered" if answered else "cancelled" if pending.is_cancelled else "failed"
        self._registry.count(metrics.CONTROLLER_REMOTE_INFERENCES, outcome)
        if answered:
            seconds = pending.request.deadline_s - (pending.deadline - monotonic())
            self._registry.observe(metrics.CONTROLLER_REMOTE_INFERENCE_S, value=seconds)
