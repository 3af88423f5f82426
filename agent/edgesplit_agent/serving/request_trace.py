"""The course of one request through the agent: where its time goes, and the spans that show it.

Every thread that works for a request writes here; what it cost the request is in its report, for only the winner of a
race with the cloud counts there. The spans show all of it, the losers' work too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from time import perf_counter

from edgesplit.observability import trace_context
from edgesplit.observability.phases import Timeline
from edgesplit.observability.tracing import Passing, Span, Tracer
from edgesplit.offload_client.pool import Outcome, RemoteFailure
from edgesplit.oip.report import Report
from edgesplit.runtime import Timing
from edgesplit_agent.releases.loaded_release import ActiveRelease

QUEUE, DECODE, DEVICE, ENCODE = "queue", "decode", "device", "encode"
TAIL, TAIL_QUEUE, OFFLOAD = "tail", "tail queue", "offload"


@dataclass(eq=False)
class Course:
    """One request's timeline and its span here."""

    span: Span = field(default_factory=Passing)
    timeline: Timeline = field(default_factory=Timeline)

    @classmethod
    def begin(cls, tracer: Tracer, model: str) -> Course:
        """A request begins, under the trace of whoever asked (on this thread)."""
        return cls(tracer.begin(f"infer {model}", trace_context.current().trace))

    def waited(self, began: float, *, tail: bool = False) -> None:
        """The device's processor was waited for, until now."""
        self.timeline.add(TAIL_QUEUE if tail else QUEUE, began, perf_counter())

    def ran(self, slices: Iterable[str], release: ActiveRelease, timing: Timing, began: float, *, tail: bool) -> None:
        """These slices ran on the device, one after the other, until now."""
        ended, decodes = perf_counter(), release.decoding
        if tail:
            self.timeline.add(TAIL, began, ended)
            return
        decoded = began
        if decodes:
            decoded += sum(timing.seconds.get(name, 0.0) for name in slices if name in decodes)
        if decoded > began:
            self.timeline.add(DECODE, began, decoded)
        self.timeline.add(DEVICE, decoded, ended)

    @contextmanager
    def offloading(self, request_id: str) -> Iterator[Callable[[Outcome], None]]:
        """The exchange with the cloud runs inside, on this thread, under a span of its own; then tell how it ended."""
        span, outcomes = self.span.child(OFFLOAD, "client"), list[Outcome]()
        try:
            with trace_context.working_for(span.context, request_id):
                yield outcomes.append
        finally:
            ended = outcomes[-1] if outcomes else None
            span.end(error=f"{ended.cause}: {ended.text}"[:200] if isinstance(ended, RemoteFailure) else "")

    @property
    def trace_id(self) -> str:
        """Of the trace that shows this request; empty where none does."""
        context = self.span.context
        return context.trace_id if context is not None else ""

    def answered(self, report: Report) -> None:
        """It has its answer."""
        self.span.phases(self.timeline)
        told: dict[str, str | bool] = {
            "edgesplit.row": report.row,
            "edgesplit.after": report.after,
            "edgesplit.release": report.release[:12],
            "edgesplit.fallback": report.fallback,
            "edgesplit.cause": report.cause,
            "edgesplit.emulated": report.emulated,
        }
        self.span.end({name: value for name, value in told.items() if value})

    def failed(self, error: Exception) -> None:
        """It will have none."""
        self.span.phases(self.timeline)
        self.span.end(error=f"{type(error).__name__}: {error}"[:200])
