"""Gateway offload: runs the gateway's own slices of a row, sends the rest to the next tier, and merges the outputs.

The next tier's answer is checked against the manifest as a device would check it; each request names release, device
class, row and link, so a row of another release or another cut is never combined with it. If the next tier fails or is
late, the gateway runs the rest as well, if it has the slices (fallback). A request that the gateway cannot run, because
its release is not here yet or no plan of it has a gateway, is relayed whole. When the device disconnects, what was
requested for it is cancelled. Scheduling of runs and access control are the server's concern.
"""

from __future__ import annotations

import logging
import random
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as NotYet
from contextvars import copy_context
from dataclasses import dataclass, field
from functools import partial
from time import monotonic, perf_counter
from typing import TypeVar
from urllib.parse import quote

from edgesplit.errors import Busy, DeadlineExceeded, LinkError, ModelRefused, NotFound, TrustError
from edgesplit.http1.server import Request, Response
from edgesplit.observability import trace_context
from edgesplit.observability.phases import NEXT_TIER, Timeline
from edgesplit.offload_client import pool
from edgesplit.offload_client.circuit_breaker import CircuitBreaker
from edgesplit.offload_client.pool import CancellableCall, OffloadAnswer, OffloadClient, OffloadFailure
from edgesplit.oip import protocol as oip
from edgesplit.plan import gateway_part, remote_half_beyond
from edgesplit.release import boundary_codecs
from edgesplit.runtime import Tensor
from edgesplit_offload.models.repository import RemoteModel

log = logging.getLogger(__name__)

NOT_HERE = (NotFound, TrustError, ModelRefused)
"""Errors for which a gateway relays a request instead."""
DEFAULT_TIMEOUT_S = 10.0
"""Timeout of the next tier for a request without a deadline."""
MARGIN_S = 0.02
"""Time kept back from the deadline for returning the answer."""
FALLBACK_FACTOR = 1.2
"""Safety factor on the measured time of the fallback."""
UNMEASURED_RATIO = 0.5
"""Share of the remaining time that the next tier gets while the fallback's duration is unknown."""
USUAL_FACTOR = 4.0
"""The next tier is late when it takes this multiple of its usual time, and at least `MIN_TIMEOUT_S`."""
MIN_TIMEOUT_S = 0.5
"""Least timeout of the next tier in seconds, where its usual time is known."""
SMOOTHING = 0.3
PING_S = 2.0
CLIENT_CHECK_S = 0.1
"""Interval in seconds at which a waiting request checks whether its client is still connected."""
MAX_WAITING = 128
"""Most requests at the next tier at once."""
MAX_DURATIONS = 256
_REQUEST_HEADERS = (
    "content-type", "content-encoding", oip.HEADER_LENGTH, trace_context.TRACEPARENT, trace_context.TRACESTATE
)  # fmt: skip
_RESPONSE_HEADERS = ("content-type", oip.HEADER_LENGTH, "retry-after")
_Result = TypeVar("_Result", bound=object)

Tensors = Mapping[str, Tensor]
Run = Callable[[RemoteModel, Tensors], Tensors]
"""Runs a model that is here, through the scheduler, and returns its outputs."""


@dataclass(frozen=True, slots=True)
class RowRequest:
    """A device's request for a row."""

    id: str
    inputs: Tensors
    deadline: float | None
    """Monotonic time; None: no deadline."""
    is_client_gone: Callable[[], bool]
    timeline: Timeline = field(default_factory=Timeline)

    @property
    def left_s(self) -> float:
        """Seconds until the deadline; `DEFAULT_TIMEOUT_S` without one."""
        return DEFAULT_TIMEOUT_S if self.deadline is None else self.deadline - monotonic()


@dataclass(frozen=True, slots=True)
class RowResult:
    """The outputs of a row, and the headers that report the hop to the device."""

    outputs: Tensors
    headers: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Durations:
    """Smoothed durations of one remote half; None before its first run."""

    fallback_s: float | None = None
    """Run here, as the fallback."""
    remote_s: float | None = None
    """At the next tier, including the link."""

    def updated(self, *, alone_s: float | None = None, there_s: float | None = None) -> Durations:
        """The durations after another run."""
        return Durations(_smoothed(self.fallback_s, alone_s), _smoothed(self.remote_s, there_s))


class NextTier:
    """The next tier's server, as used by this gateway. Thread-safe."""

    def __init__(self, remote: OffloadClient) -> None:
        self._client = remote
        self._threads = ThreadPoolExecutor(MAX_WAITING, thread_name_prefix="onward")
        self._lock = threading.Lock()
        self._breaker = CircuitBreaker()
        self._pinging = False
        self._waiting = 0
        self._durations: OrderedDict[str, Durations] = OrderedDict()
        """By name of the remote half, least recently used first."""

    def close(self) -> None:
        """Cancel all waiting requests."""
        self._client.close()
        self._threads.shutdown(wait=False, cancel_futures=True)

    # A row with a hop to the next tier

    def finish(self, model: RemoteModel, request: RowRequest, run: Run) -> RowResult:
        """The outputs of a row with hops. LinkError if neither the next tier nor this one can finish it."""
        live = dict(request.inputs)
        near = gateway_part(model.row)
        if near.remote:
            live.update(run(model.part(near), request.inputs))
        far = model.part(remote_half_beyond(model.row))
        sends = {name: live[name] for name in far.row.sends}
        outcome = self._offload(far, request, sends)
        if isinstance(outcome, OffloadAnswer):
            live.update(outcome.outputs)
            hop_headers = _hop_headers(outcome)
        else:
            live.update(self._run_fallback(far, sends, run, outcome))
            hop_headers = {pool.HOP_HEADER: f"{outcome.elapsed_s:.6f}", pool.HOP_CAUSE_HEADER: outcome.cause}
        return RowResult({name: live[name] for name in model.row.receives}, hop_headers)

    def _offload(self, far: RemoteModel, request: RowRequest, sends: Tensors) -> pool.OffloadResult:
        """The next tier's result for its half, within the timeout that the deadline allows; a failure at once if the
        circuit breaker is open or no time is left."""
        with self._lock:
            durations = self._durations.get(far.name, Durations())
        wait_s = timeout_s(request.left_s, durations)
        if wait_s <= 0:
            return OffloadFailure("timeout", "no time left for the next tier")
        if not self._is_allowed():
            return OffloadFailure("open", "its circuit breaker is open")
        body = pool.encode_offload_request(
            far.name, request.id, boundary_codecs.encode_tensors(sends, far.row.codecs, far.row.clips), far.outputs,
            left_s=wait_s, coding="zstd" if far.row.compress else "",
        )  # fmt: skip
        with request.timeline.phase(NEXT_TIER):
            call_next = partial(self._client.infer, body, timeout_s=wait_s)
            outcome = self._exchange(call_next, wait_s, request.is_client_gone)
        if isinstance(outcome, OffloadAnswer):
            self._update_durations(far.name, there_s=outcome.elapsed_s)
        return outcome

    def _run_fallback(self, far: RemoteModel, sends: Tensors, run: Run, why: OffloadFailure) -> Tensors:
        """Fallback: run the next tier's half here. LinkError if this gateway does not have it."""
        began = perf_counter()
        try:
            outputs = run(far, sends)
        except NOT_HERE as error:
            raise LinkError(f"the next tier did not answer ({why.cause}: {why.text}), and here {error}") from error
        self._update_durations(far.name, alone_s=perf_counter() - began)
        return outputs

    def _update_durations(self, far: str, **seconds: float) -> None:
        """Update the durations of a half."""
        with self._lock:
            durations = self._durations.pop(far, Durations())
            self._durations[far] = durations.updated(**seconds)
            while len(self._durations) > MAX_DURATIONS:
                self._durations.popitem(last=False)

    # A row that this gateway cannot run itself

    def relay(self, request: Request, left_s: float | None) -> Response:
        """Forward the whole request to the next tier and return its response. Raises Busy, LinkError or
        DeadlineExceeded."""
        if not self._is_allowed():
            raise Busy("this gateway does not have the release, and the next tier's circuit breaker is open")
        wait_s = DEFAULT_TIMEOUT_S if left_s is None else left_s
        headers = {name: request.headers[name] for name in _REQUEST_HEADERS if name in request.headers}
        call_next = partial(self._client.relay, quote(request.path), headers, request.body, timeout_s=wait_s)
        outcome = self._exchange(call_next, wait_s, request.is_closed)
        if isinstance(outcome, OffloadFailure):
            kind = DeadlineExceeded if outcome.cause == "timeout" else LinkError
            raise kind(f"this gateway does not have the release, and the next tier did not answer: {outcome.text}")
        back = {name: outcome.headers[name] for name in _RESPONSE_HEADERS if name in outcome.headers}
        return Response(outcome.status, {**back, **_hop_headers(outcome)}, [outcome.body])

    # The next tier

    def _exchange(
        self, do: Callable[[CancellableCall], _Result | OffloadFailure], wait_s: float, is_gone: Callable[[], bool]
    ) -> _Result | OffloadFailure:
        """Call the next tier with a timeout, and update the circuit breaker. Raises Busy while too many requests wait
        for it, LinkError if the client disconnects."""
        with self._lock:
            if self._waiting >= MAX_WAITING:
                raise Busy(f"{self._waiting} requests wait for the next tier")
            self._waiting += 1
        try:
            outcome = self._wait_for_result(do, wait_s, is_gone)
        finally:
            with self._lock:
                self._waiting -= 1
        self._update_breaker(outcome)
        return outcome

    def _wait_for_result(
        self, do: Callable[[CancellableCall], _Result | OffloadFailure], wait_s: float, is_gone: Callable[[], bool]
    ) -> _Result | OffloadFailure:
        began, call = monotonic(), CancellableCall()
        future: Future[_Result | OffloadFailure] = self._threads.submit(copy_context().run, do, call)
        try:
            while (left_s := began + wait_s - monotonic()) > 0:
                try:
                    return future.result(min(left_s, CLIENT_CHECK_S))
                except NotYet:
                    if is_gone():
                        raise LinkError("the client has disconnected") from None
            return OffloadFailure("timeout", f"no answer within {wait_s:.2f} s", wait_s)
        finally:
            if not future.done():
                call.cancel()
                future.cancel()

    def _is_allowed(self) -> bool:
        """Whether the circuit breaker allows requests. An open breaker whose pause is over is probed by a ping in
        another thread."""
        with self._lock:
            if self._breaker.is_allowing:
                return True
            due = not self._pinging and monotonic() >= self._breaker.probe_at
            self._pinging |= due
        if due:
            self._threads.submit(self._ping)
        return False

    def _ping(self) -> None:
        try:
            result = self._client.ping(PING_S)
            with self._lock:
                if isinstance(result, OffloadFailure):
                    self._breaker = self._breaker.after_failure(monotonic(), random.random(), probe=True)
                else:
                    log.warning("the probe succeeded, the next tier is on trial")
                    self._breaker = self._breaker.after_probe(monotonic())
        finally:
            with self._lock:
                self._pinging = False

    def _update_breaker(self, outcome: object) -> None:
        with self._lock:
            previous = self._breaker.state
            if not isinstance(outcome, OffloadFailure):
                succeeded = not isinstance(outcome, pool.RelayedResponse) or outcome.status < 500
                self._breaker = self._breaker.after_success(monotonic()) if succeeded else self._breaker
            elif outcome.cause != "rejected":
                refused = outcome.cause == "refused"
                self._breaker = self._breaker.after_failure(monotonic(), random.random(), refused=refused)
            current = self._breaker.state
        if previous != current:
            log.warning("breaker of the next tier: %s -> %s", previous, current)


def _hop_headers(answer: OffloadAnswer | pool.RelayedResponse) -> dict[str, str]:
    """The headers that report the seconds at the next tier to the device."""
    return {pool.HOP_HEADER: f"{answer.elapsed_s:.6f}", pool.HOP_SERVER_HEADER: f"{answer.server_s:.6f}"}


def timeout_s(left_s: float, durations: Durations) -> float:
    """Timeout of the next tier in seconds: short enough that the fallback still meets the deadline, and no more than a
    few times the next tier's usual duration."""
    # The fallback must still fit behind the timeout: left - measured fallback * safety factor - margin. While the
    # fallback was never measured, half of the time left. A next tier with a usual time counts as late after a multiple
    # of it, so that the breaker and the fallback react long before a generous deadline.
    alone_s = durations.fallback_s
    wait_s = left_s * UNMEASURED_RATIO if alone_s is None else left_s - alone_s * FALLBACK_FACTOR - MARGIN_S
    if durations.remote_s is not None:
        wait_s = min(wait_s, max(MIN_TIMEOUT_S, USUAL_FACTOR * durations.remote_s))
    return max(0.0, wait_s)


def _smoothed(old: float | None, new: float | None) -> float | None:
    if old is None or new is None:
        return old if new is None else new
    return old + SMOOTHING * (new - old)


def request_timeout_s(request: Request, body: oip.Body) -> float | None:
    """Timeout of a request to be relayed; None if it has none. MalformedMessage if it cannot be decoded."""
    return oip.timeout_s(oip.decode_request(body, oip.header_length(request.headers)).parameters)
