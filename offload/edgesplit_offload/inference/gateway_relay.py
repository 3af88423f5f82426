"""The further hop: a gateway's server runs its own slices of a row, asks the next tier for the rest, joins the answers.

Promises: what the next tier answers is checked against the manifest as the device would; a row of another release or
another cut never meets it, for each request names release, device class, row and link. Where the next tier is gone,
late or wrong, this one runs the rest too, if it has the slices. A request that this gateway cannot run itself, because
its release is not here yet or no plan of it knows a gateway, is relayed whole. A device that has gone ends what was
asked for it. Leaves to others: whose turn it is to run, and who may ask.
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
from time import monotonic, perf_counter
from typing import TypeVar
from urllib.parse import quote

from edgesplit.errors import Busy, DeadlineExceeded, LinkError, ModelRefused, NotFound, TrustError
from edgesplit.http1.server import Request, Response
from edgesplit.observability import trace_context
from edgesplit.observability.phases import HOP, Timeline
from edgesplit.offload_client.circuit_breaker import Breaker
from edgesplit.offload_client.pool import (
    HOP_CAUSE_HEADER,
    HOP_HEADER,
    HOP_SERVER_HEADER,
    Call,
    Outcome,
    Relayed,
    Remote,
    RemoteAnswer,
    RemoteFailure,
    ask,
)
from edgesplit.oip import protocol as oip
from edgesplit.plan import far_half, near_half
from edgesplit.release import boundary_codecs
from edgesplit.runtime import Tensor
from edgesplit_offload.models.repository import RemoteModel

log = logging.getLogger(__name__)

NOT_HERE = (NotFound, TrustError, ModelRefused)
"""Why a gateway cannot run a row itself."""
UNHURRIED_S = 10.0
"""The next tier is given so long where a request names no deadline."""
MARGIN_S = 0.02
"""Kept back from the deadline for handing the answer over."""
ALONE_FACTOR = 1.2
"""Finishing alone may take this much longer than it did and still meet the deadline."""
UNMEASURED_PART = 0.5
"""Of the time that is left the next tier gets so much, while it is not known how long finishing alone takes."""
USUAL_FACTOR = 4.0
"""The next tier is late when it takes so many times what it usually does..."""
LEAST_S = 0.5
"""...and at least this long."""
SMOOTHING = 0.3
PING_S = 2.0
LOOK_UP_S = 0.1
"""How often one that waits looks whether its client is still there."""
WAITING = 128
"""Requests that may be with the next tier at once."""
REMEMBERED = 256
_PASSED_ON = (
    "content-type",
    "content-encoding",
    oip.HEADER_LENGTH,
    trace_context.TRACEPARENT,
    trace_context.TRACESTATE,
)
_PASSED_BACK = ("content-type", oip.HEADER_LENGTH, "retry-after")
_Result = TypeVar("_Result", bound=object)

Tensors = Mapping[str, Tensor]
Run = Callable[[RemoteModel, Tensors], Tensors]
"""All answers of a model that is here, when its turn has come."""


@dataclass(frozen=True, slots=True)
class Asked:
    """What a device wants of a row."""

    id: str
    inputs: Tensors
    deadline: float | None
    """By the monotonic clock."""
    is_gone: Callable[[], bool]
    timeline: Timeline = field(default_factory=Timeline)

    @property
    def left_s(self) -> float:
        """Until the deadline."""
        return UNHURRIED_S if self.deadline is None else self.deadline - monotonic()


@dataclass(frozen=True, slots=True)
class Finished:
    """A row's answers, and what the device is told of the further hop."""

    outputs: Tensors
    headers: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Known:
    """What a far half took lately, smoothed; None while it never ran."""

    alone_s: float | None = None
    """Here."""
    there_s: float | None = None
    """At the next tier, the link included."""

    def after(self, *, alone_s: float | None = None, there_s: float | None = None) -> Known:
        """Once it ran again."""
        return Known(_smoothed(self.alone_s, alone_s), _smoothed(self.there_s, there_s))


class Onward:
    """The next tier's server, as this gateway sees it. Thread-safe."""

    def __init__(self, remote: Remote) -> None:
        self._remote = remote
        self._threads = ThreadPoolExecutor(WAITING, thread_name_prefix="onward")
        self._lock = threading.Lock()
        self._breaker = Breaker()
        self._pinging = False
        self._waiting = 0
        self._known: OrderedDict[str, Known] = OrderedDict()
        """By far half."""

    def close(self) -> None:
        """Wait for the next tier no more."""
        self._remote.close()
        self._threads.shutdown(wait=False, cancel_futures=True)

    # A row that goes further

    def finish(self, model: RemoteModel, asked: Asked, run: Run) -> Finished:
        """The answers of a row with hops. LinkError where neither the next tier nor this one can finish it."""
        live = dict(asked.inputs)
        near = near_half(model.row)
        if near.remote:
            live.update(run(model.part(near), asked.inputs))
        far = model.part(far_half(model.row))
        sends = {name: live[name] for name in far.row.sends}
        outcome = self._help(far, asked, sends)
        if isinstance(outcome, RemoteAnswer):
            live.update(outcome.outputs)
            told = {HOP_HEADER: f"{outcome.elapsed_s:.6f}", HOP_SERVER_HEADER: f"{outcome.server_s:.6f}"}
        else:
            live.update(self._alone(far, sends, run, outcome))
            told = {HOP_HEADER: f"{outcome.elapsed_s:.6f}", HOP_CAUSE_HEADER: outcome.cause}
        return Finished({name: live[name] for name in model.row.receives}, told)

    def _help(self, far: RemoteModel, asked: Asked, sends: Tensors) -> Outcome:
        """What the next tier makes of its half, if it may be asked and answers in time."""
        with self._lock:
            known = self._known.get(far.name, Known())
        wait_s = patience_s(asked.left_s, known)
        if wait_s <= 0:
            return RemoteFailure("timeout", "no time left to ask")
        if not self._may_ask():
            return RemoteFailure("open", "it did not answer lately")
        body = ask(
            far.name,
            asked.id,
            boundary_codecs.encode_all(sends, far.row.codecs),
            far.outputs,
            left_s=wait_s,
            coding="zstd" if far.row.compress else "",
        )
        with asked.timeline.phase(HOP):
            outcome = self._exchange(lambda call: self._remote.infer(body, call, wait_s), wait_s, asked.is_gone)
        if isinstance(outcome, RemoteAnswer):
            self._took(far.name, there_s=outcome.elapsed_s)
        return outcome

    def _alone(self, far: RemoteModel, sends: Tensors, run: Run, why: RemoteFailure) -> Tensors:
        """The next tier's half, run here."""
        began = perf_counter()
        try:
            made = run(far, sends)
        except NOT_HERE as error:
            raise LinkError(f"the next tier did not answer ({why.cause}: {why.text}), and here {error}") from error
        self._took(far.name, alone_s=perf_counter() - began)
        return made

    def _took(self, far: str, **seconds: float) -> None:
        """Learn how long a half takes, here or there."""
        with self._lock:
            old = self._known.pop(far, Known())
            self._known[far] = old.after(**seconds)
            while len(self._known) > REMEMBERED:
                self._known.popitem(last=False)

    # A row that this gateway knows nothing of

    def relay(self, request: Request, left_s: float | None) -> Response:
        """The whole request to the next tier, and its answer back. LinkError, DeadlineExceeded."""
        if not self._may_ask():
            raise Busy("this gateway has not the release, and the next tier did not answer lately")
        wait_s = UNHURRIED_S if left_s is None else left_s
        headers = {name: request.headers[name] for name in _PASSED_ON if name in request.headers}
        outcome = self._exchange(
            lambda call: self._remote.relay(quote(request.path), headers, request.body, call, wait_s),
            wait_s,
            request.closed,
        )
        if isinstance(outcome, RemoteFailure):
            kind = DeadlineExceeded if outcome.cause == "timeout" else LinkError
            raise kind(f"this gateway has not the release, and the next tier did not answer: {outcome.text}")
        back = {name: outcome.headers[name] for name in _PASSED_BACK if name in outcome.headers}
        told = {HOP_HEADER: f"{outcome.elapsed_s:.6f}", HOP_SERVER_HEADER: f"{outcome.server_s:.6f}"}
        return Response(outcome.status, {**back, **told}, [outcome.body])

    # The next tier

    def _exchange(
        self, do: Callable[[Call], _Result | RemoteFailure], wait_s: float, is_gone: Callable[[], bool]
    ) -> _Result | RemoteFailure:
        """What comes of it within `wait_s`, while somebody waits for it; the breaker learns."""
        with self._lock:
            if self._waiting >= WAITING:
                raise Busy(f"{self._waiting} requests wait for the next tier")
            self._waiting += 1
        try:
            outcome = self._waited(do, Call(), wait_s, is_gone)
        finally:
            with self._lock:
                self._waiting -= 1
        self._learn(outcome)
        return outcome

    def _waited(
        self, do: Callable[[Call], _Result | RemoteFailure], call: Call, wait_s: float, is_gone: Callable[[], bool]
    ) -> _Result | RemoteFailure:
        began = monotonic()
        future: Future[_Result | RemoteFailure] = self._threads.submit(copy_context().run, do, call)
        try:
            while (left_s := began + wait_s - monotonic()) > 0:
                try:
                    return future.result(min(left_s, LOOK_UP_S))
                except NotYet:
                    if is_gone():
                        raise LinkError("the client has gone") from None
            return RemoteFailure("timeout", f"no answer within {wait_s:.2f} s", wait_s)
        finally:
            if not future.done():
                call.drop()
                future.cancel()

    def _may_ask(self) -> bool:
        """Whether requests go on now; a breaker whose pause is over is tried by a ping, beside the request."""
        with self._lock:
            if self._breaker.lets_through:
                return True
            due = not self._pinging and monotonic() >= self._breaker.probe_at
            self._pinging |= due
        if due:
            self._threads.submit(self._ping)
        return False

    def _ping(self) -> None:
        try:
            found = self._remote.ping(PING_S)
            with self._lock:
                if isinstance(found, RemoteFailure):
                    self._breaker = self._breaker.failed(monotonic(), random.random(), probe=True)
                else:
                    log.warning("the next tier is there again, trying it")
                    self._breaker = self._breaker.probed(monotonic())
        finally:
            with self._lock:
                self._pinging = False

    def _learn(self, outcome: object) -> None:
        with self._lock:
            was = self._breaker.state
            if not isinstance(outcome, RemoteFailure):
                well = not isinstance(outcome, Relayed) or outcome.status < 500
                self._breaker = self._breaker.succeeded(monotonic()) if well else self._breaker
            elif outcome.cause != "rejected":
                refused = outcome.cause == "refused"
                self._breaker = self._breaker.failed(monotonic(), random.random(), refused=refused)
            now = self._breaker.state
        if was != now:
            log.warning("breaker of the next tier: %s -> %s", was, now)


def patience_s(left_s: float, known: Known) -> float:
    """Seconds that the next tier gets: so few that finishing alone still meets the deadline, and where it has a usual
    time, no more than some of those."""
    alone_s = known.alone_s
    wait_s = left_s * UNMEASURED_PART if alone_s is None else left_s - alone_s * ALONE_FACTOR - MARGIN_S
    if known.there_s is not None:
        wait_s = min(wait_s, max(LEAST_S, USUAL_FACTOR * known.there_s))
    return max(0.0, wait_s)


def _smoothed(old: float | None, new: float | None) -> float | None:
    if old is None or new is None:
        return old if new is None else new
    return old + SMOOTHING * (new - old)


def deadline_left_s(request: Request, body: oip.Body) -> float | None:
    """What a request to be relayed says of its deadline; None where it says nothing. MalformedMessage."""
    return oip.timeout_s(oip.decode_request(body, oip.header_length(request.headers)).parameters)
