"""Metrics, phases and traces of the inference requests of one serving process.

A `RequestMetrics` is opened per inference request, its phases are recorded on it, and it is closed by `finish`, with or
without an error. A request for an unknown model is counted without a model name, whatever name it used.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import lru_cache
from time import perf_counter

from edgesplit.errors import Busy, DeadlineExceeded, EdgeError, LinkError, MalformedMessage, TrustError, UsageError
from edgesplit.http1.admission import REVOKED
from edgesplit.http1.server import Request
from edgesplit.observability import metrics, trace_context
from edgesplit.observability.phases import SERVER_TIMING, Timeline, format_server_timing
from edgesplit.observability.registry import MetricRegistry, RecordTemplate
from edgesplit.observability.tracing import TRACING_OFF, Attributes, Span, Tracer

RELAYED = "(relayed)"
"""Used as the model's name for a request that a gateway relayed whole."""
_NOTHING = nullcontext()
_OUTCOMES: tuple[tuple[type[EdgeError], str], ...] = (
    (Busy, "busy"), (DeadlineExceeded, "deadline"), (LinkError, "gone"), (UsageError, "rejected"),
    (MalformedMessage, "rejected"), (TrustError, "refused"),
)  # fmt: skip


@dataclass(eq=False, slots=True)
class RequestMetrics:
    """Metrics of one inference request. Phases may be recorded from any thread."""

    span: Span
    model: str = ""
    """`name@version`, once the model is known to be here."""
    row: str = ""
    batch: int = 1
    """Number of requests in its run, itself included."""
    counts_run: bool = True
    """Whether the run is counted with this request, so that each run is counted once."""
    received: int = 0
    sent: int = 0
    timeline: Timeline = field(default_factory=Timeline)

    def trace_scope(self) -> AbstractContextManager[None]:
        """A context manager for work that belongs to the request's trace."""
        context = self.span.context
        return _NOTHING if context is None else trace_context.request_context(context)

    def add_headers(self, headers: dict[str, str], seconds: Mapping[str, float]) -> None:
        """Add the response headers to `headers`, with `seconds` by phase."""
        headers[SERVER_TIMING] = format_server_timing(seconds)
        context = self.span.context
        if context is not None:
            headers[trace_context.TRACEPARENT] = context.headers()[trace_context.TRACEPARENT]


class MetricsRecorder:
    """Records the metrics of all requests of one process. Thread-safe."""

    def __init__(self, tracer: Tracer = TRACING_OFF) -> None:
        self.registry = MetricRegistry()
        self._tracer = tracer

    def begin(self, request: Request) -> RequestMetrics:
        """Metrics of a complete request; `finish` must be called with them."""
        span = self._tracer.begin("offload", trace_context.from_headers(request.headers))
        return RequestMetrics(span, received=len(request.body))

    def on_refused(self) -> None:
        """Count a request that was refused before its content was looked at."""
        self.registry.count(metrics.OFFLOAD_REQUESTS, "", "", "refused")

    def on_client_refused(self, certificate: str, reason: str) -> None:
        """Count that a client was refused a connection or a request; `certificate` is the name in its certificate,
        empty without one."""
        self.registry.count(metrics.OFFLOAD_REFUSED, certificate, reason)
        if reason == REVOKED:
            self.on_refused()

    def finish(
        self, request: RequestMetrics, result: str, error: str = "", *, seconds: Mapping[str, float] | None = None
    ) -> None:
        """Record the finished request with its outcome `result`. `seconds` by phase, if they were computed already."""
        if request.span.context is not None:
            request.span.phases(request.timeline)
            attributes: Attributes = {
                "edgesplit.model": request.model, "edgesplit.row": request.row, "edgesplit.batch": request.batch
            }  # fmt: skip
            request.span.end(attributes, error)
        if error:
            self.registry.count(metrics.OFFLOAD_REQUESTS, request.model, request.row, result)
            return
        took_s = perf_counter() - request.timeline.began
        phases = request.timeline.seconds_by_phase() if seconds is None else seconds
        self.registry.record_batch(
            _samples(request.model, request.row, result, tuple(phases)),
            (1.0, took_s, request.batch, request.received, request.sent, *phases.values()),
        )


@lru_cache(512)
def _samples(model: str, row: str, result: str, phases: tuple[str, ...]) -> RecordTemplate:
    """The metric samples recorded for an answered request."""
    return (
        (metrics.OFFLOAD_REQUESTS, (model, row, result)), (metrics.OFFLOAD_REQUEST_S, (model, row)),
        (metrics.OFFLOAD_BATCH, (model,)), (metrics.OFFLOAD_RECEIVED, (model,)), (metrics.OFFLOAD_SENT, (model,)),
        *((metrics.OFFLOAD_PHASE_S, (model, name)) for name in phases),
    )  # fmt: skip


def outcome_label(error: BaseException) -> str:
    """The metric label for an error, from a fixed set."""
    return next((word for kind, word in _OUTCOMES if isinstance(error, kind)), "failed")
