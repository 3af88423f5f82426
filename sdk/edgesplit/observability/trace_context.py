"""W3C trace context: parsed strictly, carried along one request's threads, written on what it sends.

What does not parse is as if it were not there (the recommendation says so, and nobody else's bytes get through). The
vendors' `tracestate` travels beside it, bounded, untouched. No OpenTelemetry here: a trace that an application gave is
forwarded and named in the log whether or not spans are made of it.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from contextvars import ContextVar
from dataclasses import dataclass

TRACEPARENT, TRACESTATE = "traceparent", "tracestate"
LONGEST_STATE = 512
"""Of a tracestate; a longer one is left away, and the trace goes on (trace context, section 3.3.1.5)."""
_VERSION_00 = re.compile(r"00-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})")
_LATER = re.compile(r"(?!ff)[0-9a-f]{2}-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(?:-[\x21-\x7e]{0,200})?")
_STATE = re.compile(r"[\x20-\x7e]+")
_SAMPLED = 1


@dataclass(frozen=True, slots=True)
class TraceContext:
    """A place in a trace: what happens now is a child of span `span_id`."""

    trace_id: str
    """32 lower-case hex digits, not all zero."""
    span_id: str
    """16 lower-case hex digits, not all zero."""
    sampled: bool
    """The caller records its spans; a parent-based sampler does as it did."""
    state: str = ""
    """`tracestate`, as it came."""

    def headers(self) -> dict[str, str]:
        """As request headers."""
        parent = {TRACEPARENT: f"00-{self.trace_id}-{self.span_id}-{'01' if self.sampled else '00'}"}
        return {**parent, TRACESTATE: self.state} if self.state else parent


def parse(traceparent: str, tracestate: str = "") -> TraceContext | None:
    """The context that these headers name, or None where there is none that a correct peer would send."""
    version_00 = traceparent.startswith("00-")
    found = (_VERSION_00 if version_00 else _LATER).fullmatch(traceparent)
    if found is None or not found[1].strip("0") or not found[2].strip("0"):
        return None
    state = tracestate if len(tracestate) <= LONGEST_STATE and _STATE.fullmatch(tracestate) else ""
    return TraceContext(found[1], found[2], bool(int(found[3], 16) & _SAMPLED), state)


def given(headers: Mapping[str, str]) -> TraceContext | None:
    """The context in a request's headers (names in lower case)."""
    parent = headers.get(TRACEPARENT)
    return None if parent is None else parse(parent, headers.get(TRACESTATE, ""))


@dataclass(frozen=True, slots=True)
class Asked:
    """Which request this thread works for."""

    trace: TraceContext | None = None
    request_id: str = ""


_NOBODY = Asked()
_asked: ContextVar[Asked] = ContextVar("edgesplit_asked", default=_NOBODY)


def current() -> Asked:
    """The request that this thread works for; neither trace nor id where it works for none."""
    return _asked.get()


class working_for:
    """What runs inside, on this thread, is for that request: its log lines say so, and what it sends is its child."""

    __slots__ = ("_asked", "_token")

    def __init__(self, trace: TraceContext | None, request_id: str = "") -> None:
        self._asked = Asked(trace, request_id)

    def __enter__(self) -> None:
        self._token = _asked.set(self._asked)

    def __exit__(self, *_: object) -> None:
        _asked.reset(self._token)


def outgoing() -> dict[str, str]:
    """Headers for a request that is sent on behalf of the one that this thread works for."""
    trace = _asked.get().trace
    return trace.headers() if trace is not None else {}


def of_application() -> dict[str, str]:
    """The same for what an application sends; inside a span of its own OpenTelemetry, that is the parent.

    OpenTelemetry is not imported for it: who is inside a span has done so.
    """
    api = sys.modules.get("opentelemetry.trace")
    if api is None or _asked.get().trace is not None:
        return outgoing()
    here = api.get_current_span().get_span_context()
    if not here.is_valid:
        return {}
    state = here.trace_state.to_header()[: LONGEST_STATE + 1] if here.trace_state else ""
    known = parse(f"00-{here.trace_id:032x}-{here.span_id:016x}-{int(here.trace_flags) & 0xFF:02x}", state)
    return known.headers() if known is not None else {}
