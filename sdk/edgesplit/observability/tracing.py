"""Spans of requests, made by OpenTelemetry where it is configured, by nobody otherwise.

Configured is what the standard says: OTEL_EXPORTER_OTLP_ENDPOINT (or ..._TRACES_ENDPOINT), or OTEL_TRACES_EXPORTER;
headers, sampler, limits and resource attributes are read from the environment by the OpenTelemetry SDK, OTLP travels
over HTTP. Without any of these nothing of OpenTelemetry is imported, and a trace that was given is passed on as it
came. Phases become spans after the fact, from the request's timeline: what is measured once is shown everywhere.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Mapping
from time import perf_counter_ns, time_ns
from typing import TYPE_CHECKING, Any, Literal, Protocol

from edgesplit.observability.phases import Timeline
from edgesplit.observability.trace_context import TraceContext

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.trace import Span as OtelSpan

log = logging.getLogger(__name__)

Side = Literal["server", "client", "internal"]
"""Of a span: answers a request, sends one, or neither."""
Attributes = Mapping[str, str | bool | int | float]
LAST_SPANS_S = 2.0
EXTRA = "pip install 'edgesplit[otel]'"


class Span(Protocol):
    """One stretch of work in a trace; `end` closes it, once."""

    @property
    def context(self) -> TraceContext | None:
        """What is sent from inside names this as its parent; None outside of any trace."""
        ...

    def child(self, name: str, side: Side = "internal") -> Span:
        """Begin a stretch inside this one."""
        ...

    def phases(self, timeline: Timeline) -> None:
        """Each phase of the timeline is a stretch inside this one."""
        ...

    def end(self, attributes: Attributes | None = None, error: str = "") -> None:
        """It is over; `error` says that it failed, and why."""
        ...


class Tracer(Protocol):
    """Begins the spans of a process."""

    def begin(self, name: str, parent: TraceContext | None, side: Side = "server") -> Span:
        """A request's first span here: a child of `parent`, or the root of a new trace."""
        ...

    def stop(self) -> None:
        """Send what has not been sent."""
        ...


class Passing:
    """No span is made: whoever gave the trace is the parent of what is sent."""

    def __init__(self, context: TraceContext | None = None) -> None:
        self.context = context

    def child(self, name: str, side: Side = "internal") -> Passing:
        """The same: nothing is inside nothing."""
        return self

    def phases(self, timeline: Timeline) -> None:
        """Nobody looks."""

    def end(self, attributes: Attributes | None = None, error: str = "") -> None:
        """Nobody looks."""


class PassingTracer:
    """Tracing is off."""

    def begin(self, name: str, parent: TraceContext | None, side: Side = "server") -> Passing:
        """The parent, passed on."""
        return Passing(parent)

    def stop(self) -> None:
        """There is nothing to send."""


OFF = PassingTracer()


class OtelTracer:
    """Tracing is on. `provider` decides by its sampler (parent-based, unless OTEL_TRACES_SAMPLER says otherwise)."""

    def __init__(self, provider: TracerProvider) -> None:
        self._provider = provider
        self._tracer = provider.get_tracer("edgesplit")

    def begin(self, name: str, parent: TraceContext | None, side: Side = "server") -> Span:
        """A span that records where the sampler wants it; one that does not still names the trace."""
        from opentelemetry import trace as api
        from opentelemetry.context import Context

        around = Context()
        if parent is not None:
            around = api.set_span_in_context(api.NonRecordingSpan(_otel_context(parent)), around)
        return _OtelSpan(
            self._tracer, self._tracer.start_span(name, around, _kind(side)), time_ns() - perf_counter_ns()
        )

    def stop(self) -> None:
        """Send what has not been sent, if the collector takes it at once: one that is gone holds up nobody's end."""
        sending = threading.Thread(target=self._provider.shutdown, name="last spans", daemon=True)
        sending.start()
        sending.join(LAST_SPANS_S)
        if sending.is_alive():
            log.warning("the last spans were not taken within %g s", LAST_SPANS_S)


class _OtelSpan:
    def __init__(self, tracer: Any, span: OtelSpan, clock_ns: int) -> None:
        self._tracer = tracer
        self._span = span
        self._clock_ns = clock_ns
        """What turns perf_counter into the time of day, the same for all spans of one request here."""

    @property
    def context(self) -> TraceContext | None:
        here = self._span.get_span_context()
        state = here.trace_state.to_header() if here.trace_state else ""
        return TraceContext(f"{here.trace_id:032x}", f"{here.span_id:016x}", here.trace_flags.sampled, state)

    def child(self, name: str, side: Side = "internal") -> Span:
        span = self._tracer.start_span(name, self._inside(), _kind(side))
        return _OtelSpan(self._tracer, span, self._clock_ns)

    def phases(self, timeline: Timeline) -> None:
        if not self._span.is_recording():
            return
        inside = self._inside()
        for phase in tuple(timeline.phases):
            began, ended = (int(one * 1e9) + self._clock_ns for one in (phase.began, phase.ended))
            self._tracer.start_span(phase.name, inside, start_time=began).end(end_time=ended)

    def end(self, attributes: Attributes | None = None, error: str = "") -> None:
        from opentelemetry.trace import Status, StatusCode

        if attributes:
            self._span.set_attributes(dict(attributes))
        if error:
            self._span.set_status(Status(StatusCode.ERROR, error))
        self._span.end()

    def _inside(self) -> Any:
        from opentelemetry import trace as api
        from opentelemetry.context import Context

        return api.set_span_in_context(self._span, Context())


def wanted(environment: Mapping[str, str]) -> bool:
    """Does the environment ask for spans, as OpenTelemetry's specification words it?"""
    if environment.get("OTEL_SDK_DISABLED", "").strip().lower() == "true":
        return False
    exporter = environment.get("OTEL_TRACES_EXPORTER", "").strip().lower()
    if exporter:
        return exporter != "none"
    return any(environment.get(name) for name in ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT"))


def configured(service: str, attributes: Attributes, environment: Mapping[str, str] | None = None) -> Tracer:
    """The process's tracer, by its environment; one warning where that asks for what cannot be had."""
    environment = os.environ if environment is None else environment
    if not wanted(environment):
        return OFF
    exporter = environment.get("OTEL_TRACES_EXPORTER", "otlp").strip().lower() or "otlp"
    if exporter != "otlp":
        log.warning("no spans are made: OTEL_TRACES_EXPORTER=%s, and only otlp is spoken here", exporter[:40])
        return OFF
    protocol = environment.get("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL") or environment.get("OTEL_EXPORTER_OTLP_PROTOCOL")
    if protocol not in (None, "", "http/protobuf"):
        log.warning("spans go by http/protobuf: the OTLP protocol %s is not spoken here", protocol[:40])
    try:
        return OtelTracer(_provider(service, attributes))
    except ImportError as error:
        log.warning("no spans are made: OpenTelemetry is configured and %s is missing (%s)", error.name, EXTRA)
    except ValueError as error:
        log.warning("no spans are made: the OTEL_ settings were refused: %s", error)
    return OFF


def _provider(service: str, attributes: Attributes) -> TracerProvider:
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    named = Resource({"service.name": service, **attributes}).merge(_from_environment())
    provider = TracerProvider(resource=Resource.create({}).merge(named), shutdown_on_exit=False)
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    return provider


def _from_environment() -> Any:
    """OTEL_RESOURCE_ATTRIBUTES and OTEL_SERVICE_NAME, which go before what we say ourselves."""
    from opentelemetry.sdk.resources import OTELResourceDetector

    return OTELResourceDetector().detect()


def _otel_context(context: TraceContext) -> Any:
    from opentelemetry.trace import SpanContext, TraceFlags, TraceState

    state = TraceState.from_header([context.state]) if context.state else TraceState()
    flags = TraceFlags(TraceFlags.SAMPLED if context.sampled else TraceFlags.DEFAULT)
    return SpanContext(int(context.trace_id, 16), int(context.span_id, 16), True, flags, state)


def _kind(side: Side) -> Any:
    from opentelemetry.trace import SpanKind

    return {"server": SpanKind.SERVER, "client": SpanKind.CLIENT, "internal": SpanKind.INTERNAL}[side]
