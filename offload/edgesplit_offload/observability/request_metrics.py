"""What is seen of the inference requests that come to one serving process: counted, timed by phase, traced.

The server opens a `Visit` per inference request, notes its phases on it, and closes it by leaving the block, with or
without an error. A request that names no model of ours is counted without a name, whatever it called it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import lru_cache
from time import perf_counter

from edgesplit.errors import Busy, DeadlineExceeded, EdgeError, LinkError, MalformedMessage, TrustError, UsageError
from edgesplit.http1.server import Request
from edgesplit.observability import metrics, trace_context
from edgesplit.observability.phases import SERVER_TIMING, Timeline, server_timing
from edgesplit.observability.registry import Form, Ledger
from edgesplit.observability.tracing import OFF, Attributes, Span, Tracer

RELAYED = "(relayed)"
"""In a model's place: a gateway handed the whole request on."""
_NOTHING = nullcontext()
_OUTCOMES: tuple[tuple[type[EdgeError], str], ...] = (
    (Busy, "busy"),
    (DeadlineExceeded, "deadline"),
    (LinkError, "gone"),
    (UsageError, "rejected"),
    (MalformedMessage, "rejected"),
    (TrustError, "refused"),
)


@dataclass(eq=False, slots=True)
class Visit:
    """One inference request in here. Phases may be noted from any thread."""

    span: Span
    model: str = ""
    """`name@version`, once it is known to be here."""
    row: str = ""
    batch: int = 1
    """Requests that ran together with it, itself among them."""
    leads: bool = True
    """Its thread did that run, which so is counted once."""
    received: int = 0
    sent: int = 0
    timeline: Timeline = field(default_factory=Timeline)

    def working(self) -> AbstractContextManager[None]:
        """A block that works for its trace."""
        context = self.span.context
        return _NOTHING if context is None else trace_context.working_for(context)

    def headers(self) -> dict[str, str]:
        """What its client is told of the phases so far, and of the trace."""
        told: dict[str, str] = {}
        self.tell(told, self.timeline.seconds())
        return told

    def tell(self, headers: dict[str, str], seconds: Mapping[str, float]) -> None:
        """The same, of `seconds` by phase, into `headers`."""
        headers[SERVER_TIMING] = server_timing(seconds)
        context = self.span.context
        if context is not None:
            headers[trace_context.TRACEPARENT] = context.headers()[trace_context.TRACEPARENT]


class Visits:
    """All of one process's. Thread-safe."""

    def __init__(self, tracer: Tracer = OFF) -> None:
        self.ledger = Ledger()
        self._tracer = tracer

    def begin(self, request: Request) -> Visit:
        """Of a request that is whole: `ended` is to be called."""
        span = self._tracer.begin("offload", trace_context.given(request.headers))
        return Visit(span, received=len(request.body))

    @contextmanager
    def visit(self, request: Request) -> Iterator[Visit]:
        """A block from the request to its answer, not sent yet; gives its `Visit`."""
        visit = self.begin(request)
        try:
            with visit.working():
                yield visit
        except Exception as error:
            self.ended(visit, outcome(error), f"{type(error).__name__}: {error}"[:200])
            raise
        self.ended(visit, "answered")

    def refused(self) -> None:
        """A request was turned away before anybody looked at what it asked."""
        self.ledger.count(metrics.OFFLOAD_REQUESTS, "", "", "refused")

    def ended(self, visit: Visit, how: str, error: str = "", *, seconds: Mapping[str, float] | None = None) -> None:
        """It has its answer, or the error that is one. `seconds`: by phase, where they were worked out already."""
        if visit.span.context is not None:
            visit.span.phases(visit.timeline)
            told: Attributes = {
                "edgesplit.model": visit.model, "edgesplit.row": visit.row, "edgesplit.batch": visit.batch
            }  # fmt: skip
            visit.span.end(told, error)
        if error:
            self.ledger.count(metrics.OFFLOAD_REQUESTS, visit.model, visit.row, how)
            return
        took_s = perf_counter() - visit.timeline.began
        phases = visit.timeline.seconds() if seconds is None else seconds
        self.ledger.record_alike(
            _form(visit.model, visit.row, how, tuple(phases)),
            (1.0, took_s, visit.batch, visit.received, visit.sent, *phases.values()),
        )


@lru_cache(512)
def _form(model: str, row: str, how: str, phases: tuple[str, ...]) -> Form:
    """What is counted of one that was answered."""
    return (
        (metrics.OFFLOAD_REQUESTS, (model, row, how)),
        (metrics.OFFLOAD_REQUEST_S, (model, row)),
        (metrics.OFFLOAD_BATCH, (model,)),
        (metrics.OFFLOAD_RECEIVED, (model,)),
        (metrics.OFFLOAD_SENT, (model,)),
        *((metrics.OFFLOAD_PHASE_S, (model, name)) for name in phases),
    )


def outcome(error: BaseException) -> str:
    """One word of the few that a label may hold."""
    return next((word for kind, word in _OUTCOMES if isinstance(error, kind)), "failed")
