"""Trace of one request through the agent: where its time goes, and the spans that show it.

Every thread that works for a request writes here, so the spans show the work of the losers of a race too. What the
request itself cost is in its report, where only the winner counts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from time import perf_counter

from edgesplit.observability import trace_context
from edgesplit.observability.phases import Timeline
from edgesplit.observability.tracing import Span, Tracer
from edgesplit.offload_client.pool import OffloadFailure, OffloadResult
from edgesplit.oip.report import Report
from edgesplit.runtime import Timing
from edgesplit_agent.releases.loaded_release import LoadedRelease

QUEUE, DECODE, DEVICE, ENCODE = "queue", "decode", "device", "encode"
TAIL, TAIL_QUEUE, OFFLOAD = "tail", "tail queue", "offload"


@dataclass(eq=False)
class RequestTrace:
    """Timeline and span of one request."""

    span: Span = field(default_factory=Span)
    timeline: Timeline = field(default_factory=Timeline)

    @classmethod
    def begin(cls, tracer: Tracer, model: str) -> RequestTrace:
        """Start the span of a request, as a child of the caller's trace context on this thread."""
        return cls(tracer.begin(f"infer {model}", trace_context.current_request().trace))

    def waited(self, began: float, *, tail: bool = False) -> None:
        """The request waited for the device's processor from `began` until now."""
        self.timeline.add(TAIL_QUEUE if tail else QUEUE, began, perf_counter())

    def ran(self, slices: Iterable[str], release: LoadedRelease, timing: Timing, began: float, *, tail: bool) -> None:
        """These slices ran on the device, one after another, from `began` until now."""
        ended, decoders = perf_counter(), release.input_decoders
        if tail:
            self.timeline.add(TAIL, began, ended)
            return
        decoded_at = began
        if decoders:
            decoded_at += sum(timing.seconds.get(name, 0.0) for name in slices if name in decoders)
        if decoded_at > began:
            self.timeline.add(DECODE, began, decoded_at)
        self.timeline.add(DEVICE, decoded_at, ended)

    @contextmanager
    def offloading(self, request_id: str) -> Iterator[Callable[[OffloadResult], None]]:
        """Context manager for the exchange with the offload target, under a span of its own; call the yielded function
        with the outcome."""
        span, outcomes = self.span.child(OFFLOAD, "client"), list[OffloadResult]()
        try:
            with trace_context.request_context(span.context, request_id):
                yield outcomes.append
        finally:
            outcome = outcomes[-1] if outcomes else None
            span.end(error=f"{outcome.cause}: {outcome.text}"[:200] if isinstance(outcome, OffloadFailure) else "")

    @property
    def trace_id(self) -> str:
        """Id of the trace; empty if the request is not traced."""
        context = self.span.context
        return context.trace_id if context is not None else ""

    def answered(self, report: Report) -> None:
        """End the span of an answered request."""
        self.span.phases(self.timeline)
        attributes: dict[str, str | bool] = {
            "edgesplit.row": report.row, "edgesplit.after": report.split_after,
            "edgesplit.release": report.release[:12], "edgesplit.fallback": report.fallback,
            "edgesplit.cause": report.cause, "edgesplit.emulated": report.emulated,
        }  # fmt: skip
        self.span.end({name: value for name, value in attributes.items() if value})

    def failed(self, error: Exception) -> None:
        """End the span of a failed request."""
        self.span.phases(self.timeline)
        self.span.end(error=f"{type(error).__name__}: {error}"[:200])
