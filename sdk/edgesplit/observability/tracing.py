"""Tracing: spans of requests, exported by OpenTelemetry where it is configured.

It is configured by the standard variables: OTEL_EXPORTER_OTLP_ENDPOINT (or ..._TRACES_ENDPOINT), or
OTEL_TRACES_EXPORTER. Headers, sampler, limits and resource attributes are read from the environment by the
OpenTelemetry SDK; OTLP travels over HTTP. Otherwise OpenTelemetry is not imported, and an incoming trace is forwarded
unchanged. Phases become spans after the fact, from the request's timeline: one measurement serves all outputs.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Mapping
from time import perf_counter_ns, time_ns
from typing import TYPE_CHECKING, Any, Literal

from edgesplit.observability.phases import Timeline
from edgesplit.observability.trace_context import TraceContext

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.trace import Span as OtelSpan

log = logging.getLogger(__name__)

SpanSide = Literal["server", "client", "internal"]
"""Kind of a span: it serves a request, sends one, or neither."""
Attributes = Mapping[str, str | bool | int | float]
SHUTDOWN_TIMEOUT_S = 2.0
"""Timeout for exporting the last spans when a process stops."""
INSTALL_HINT = "pip install 'edgesplit[otel]'"


class Span:
    """A unit of work in a trace; `end` must be called once. This one records nothing: requests that are sent within it
    are children of the incoming context."""

    def __init__(self, context: TraceContext | None = None) -> None:
        self._incoming = context

    @property
    def context(self) -> TraceContext | None:
        """Parent for requests that are sent from within this span; None outside of any trace."""
        return self._incoming

    def child(self, name: str, side: SpanSide = "internal") -> Span:
        """Start a child span."""
        return self

    def phases(self, timeline: Timeline) -> None:
        """Add a child span for each phase of the timeline."""

    def end(self, attributes: Attributes | None = None, error: str = "") -> None:
        """End the span; a non-empty `error` marks it as failed and gives the reason."""


class Tracer:
    """Starts the root spans of a process. This one is used while tracing is off: its spans record nothing."""

    def begin(self, name: str, parent: TraceContext | None, side: SpanSide = "server") -> Span:
        """Start a request's first span in this process: a child of `parent`, or the root of a new trace."""
        return Span(parent)

    def stop(self) -> None:
        """Export the spans that have not been exported."""


TRACING_OFF = Tracer()
"""The tracer used while tracing is off."""


class OtelTracer(Tracer):
    """Tracer used while tracing is on. The sampler of `provider` decides which spans are recorded (parent-based, unless
    OTEL_TRACES_SAMPLER is set)."""

    def __init__(self, provider: TracerProvider) -> None:
        self._provider = provider
        self._tracer = provider.get_tracer("edgesplit")

    def begin(self, name: str, parent: TraceContext | None, side: SpanSide = "server") -> Span:
        """Start a span, which is recorded where the sampler selects it; one that is not recorded still propagates the
        trace."""
        from opentelemetry import trace as api
        from opentelemetry.context import Context

        otel_context = Context()
        if parent is not None:
            otel_context = api.set_span_in_context(api.NonRecordingSpan(_otel_context(parent)), otel_context)
        return _OtelSpan(
            self._tracer, self._tracer.start_span(name, otel_context, _otel_kind(side)), time_ns() - perf_counter_ns()
        )

    def stop(self) -> None:
        """Export the remaining spans, with a timeout: an unreachable collector must not delay the process's end."""
        shutdown = threading.Thread(target=self._provider.shutdown, name="last spans", daemon=True)
        shutdown.start()
        shutdown.join(SHUTDOWN_TIMEOUT_S)
        if shutdown.is_alive():
            log.warning("the last spans were not exported within %g s", SHUTDOWN_TIMEOUT_S)


class _OtelSpan(Span):
    def __init__(self, tracer: Any, span: OtelSpan, clock_ns: int) -> None:
        self._tracer = tracer
        self._span = span
        self._wall_offset_ns = clock_ns
        """Unix time minus perf_counter in nanoseconds; the same for all spans of one request in this process."""

    @property
    def context(self) -> TraceContext | None:
        span_context = self._span.get_span_context()
        state = span_context.trace_state.to_header() if span_context.trace_state else ""
        return TraceContext(
            f"{span_context.trace_id:032x}", f"{span_context.span_id:016x}", span_context.trace_flags.sampled, state
        )

    def child(self, name: str, side: SpanSide = "internal") -> Span:
        span = self._tracer.start_span(name, self._child_context(), _otel_kind(side))
        return _OtelSpan(self._tracer, span, self._wall_offset_ns)

    def phases(self, timeline: Timeline) -> None:
        if not self._span.is_recording():
            return
        parent = self._child_context()
        for phase in tuple(timeline.phases):
            began, ended = (int(seconds * 1e9) + self._wall_offset_ns for seconds in (phase.began, phase.ended))
            self._tracer.start_span(phase.name, parent, start_time=began).end(end_time=ended)

    def end(self, attributes: Attributes | None = None, error: str = "") -> None:
        from opentelemetry.trace import Status, StatusCode

        if attributes:
            self._span.set_attributes(dict(attributes))
        if error:
            self._span.set_status(Status(StatusCode.ERROR, error))
        self._span.end()

    def _child_context(self) -> Any:
        from opentelemetry import trace as api
        from opentelemetry.context import Context

        return api.set_span_in_context(self._span, Context())


def is_tracing_enabled(environment: Mapping[str, str]) -> bool:
    """True if the environment enables tracing, by OpenTelemetry's specification."""
    if environment.get("OTEL_SDK_DISABLED", "").strip().lower() == "true":
        return False
    exporter = environment.get("OTEL_TRACES_EXPORTER", "").strip().lower()
    if exporter:
        return exporter != "none"
    return any(environment.get(name) for name in ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT"))


def make_tracer(service: str, attributes: Attributes, environment: Mapping[str, str] | None = None) -> Tracer:
    """The process's tracer, configured by its environment. Logs one warning and turns tracing off where the
    configuration is not supported."""
    environment = os.environ if environment is None else environment
    if not is_tracing_enabled(environment):
        return TRACING_OFF
    exporter = environment.get("OTEL_TRACES_EXPORTER", "otlp").strip().lower() or "otlp"
    if exporter != "otlp":
        log.warning("tracing is off: OTEL_TRACES_EXPORTER=%s, and only otlp is supported", exporter[:40])
        return TRACING_OFF
    protocol = environment.get("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL") or environment.get("OTEL_EXPORTER_OTLP_PROTOCOL")
    if protocol not in (None, "", "http/protobuf"):
        log.warning("spans are exported by http/protobuf: the OTLP protocol %s is not supported", protocol[:40])
    try:
        return OtelTracer(_make_provider(service, attributes))
    except ImportError as error:
        log.warning("tracing is off: OpenTelemetry is configured and %s is missing (%s)", error.name, INSTALL_HINT)
    except ValueError as error:
        log.warning("tracing is off: the OTEL_ settings were refused: %s", error)
    return TRACING_OFF


def _make_provider(service: str, attributes: Attributes) -> TracerProvider:
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    resource = Resource({"service.name": service, **attributes}).merge(_environment_resource())
    provider = TracerProvider(resource=Resource.create({}).merge(resource), shutdown_on_exit=False)
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    return provider


def _environment_resource() -> Any:
    """Resource of OTEL_RESOURCE_ATTRIBUTES and OTEL_SERVICE_NAME, which take precedence over ours."""
    from opentelemetry.sdk.resources import OTELResourceDetector

    return OTELResourceDetector().detect()


def _otel_context(context: TraceContext) -> Any:
    from opentelemetry.trace import SpanContext, TraceFlags, TraceState

    state = TraceState.from_header([context.state]) if context.state else TraceState()
    flags = TraceFlags(TraceFlags.SAMPLED if context.sampled else TraceFlags.DEFAULT)
    return SpanContext(int(context.trace_id, 16), int(context.span_id, 16), True, flags, state)


def _otel_kind(side: SpanSide) -> Any:
    from opentelemetry.trace import SpanKind

    return {"server": SpanKind.SERVER, "client": SpanKind.CLIENT, "internal": SpanKind.INTERNAL}[side]
