"""What is seen of the inference requests that come to one serving process: counted, timed by phase, traced.

The server opens a `Visit` per inference request, notes its phases on it, and closes it by leaving the block, with or
without an error. A request that names no model of ours is counted without a name, whatever it called it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from time import perf_counter

from edgesplit.errors import Busy, DeadlineExceeded, EdgeError, LinkError, MalformedMessage, TrustError, UsageError
from edgesplit.http1 import Request
from edgesplit.seen import families, trace
from edgesplit.seen.ledger import Entry, Ledger
from edgesplit.seen.spans import OFF, Attributes, Span, Tracer
from edgesplit.seen.timeline import SERVER_TIMING, Timeline, server_timing

RELAYED = "(relayed)"
"""In a model's place: a gateway handed the whole request on."""
_OUTCOMES: tuple[tuple[type[EdgeError], str], ...] = (
    (Busy, "busy"),
    (DeadlineExceeded, "deadline"),
    (LinkError, "gone"),
    (UsageError, "rejected"),
    (MalformedMessage, "rejected"),
    (TrustError, "refused"),
)


@dataclass(eq=False)
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

    def headers(self) -> dict[str, str]:
        """What its client is told of the phases so far, and of the trace."""
        context = self.span.context
        return {
            SERVER_TIMING: server_timing(self.timeline.seconds()),
            **({trace.TRACEPARENT: context.headers()[trace.TRACEPARENT]} if context is not None else {}),
        }


class Visits:
    """All of one process's. Thread-safe."""

    def __init__(self, tracer: Tracer = OFF) -> None:
        self.ledger = Ledger()
        self._tracer = tracer

    @contextmanager
    def visit(self, request: Request) -> Iterator[Visit]:
        """From the request, whole, to its answer, not sent yet."""
        span = self._tracer.begin("offload", trace.given(request.headers))
        visit = Visit(span, received=len(request.body))
        try:
            with trace.working_for(span.context, request_id=""):
                yield visit
        except Exception as error:
            self._ended(visit, outcome(error), f"{type(error).__name__}: {error}"[:200])
            raise
        self._ended(visit, "answered")

    def refused(self) -> None:
        """A request was turned away before anybody looked at what it asked."""
        self.ledger.count(families.OFFLOAD_REQUESTS, "", "", "refused")

    def _ended(self, visit: Visit, how: str, error: str = "") -> None:
        visit.span.phases(visit.timeline)
        told: Attributes = {"edgesplit.model": visit.model, "edgesplit.row": visit.row, "edgesplit.batch": visit.batch}
        visit.span.end(told, error)
        entries: list[Entry] = [(families.OFFLOAD_REQUESTS, (visit.model, visit.row, how), 1.0)]
        if not error:
            took = perf_counter() - visit.timeline.began
            model = (visit.model,)
            entries += [
                (families.OFFLOAD_REQUEST_S, (visit.model, visit.row), took),
                (families.OFFLOAD_BATCH, model, visit.batch),
                (families.OFFLOAD_RECEIVED, model, visit.received),
                (families.OFFLOAD_SENT, model, visit.sent),
            ]
            phases = visit.timeline.seconds().items()
            entries += [(families.OFFLOAD_PHASE_S, (visit.model, name), seconds) for name, seconds in phases]
        self.ledger.record(entries)


def outcome(error: Exception) -> str:
    """One word of the few that a label may hold."""
    return next((word for kind, word in _OUTCOMES if isinstance(error, kind)), "failed")
