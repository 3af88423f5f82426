"""W3C trace context: parsed strictly, propagated along a request's threads, added to outgoing requests.

An invalid header is ignored, as the recommendation requires, and is never forwarded. The vendors' `tracestate` is
forwarded with it, bounded and unmodified. This module does not use OpenTelemetry: an application's trace is forwarded
and logged whether or not spans are exported.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from contextvars import ContextVar
from dataclasses import dataclass

TRACEPARENT, TRACESTATE = "traceparent", "tracestate"
MAX_STATE_CHARS = 512
"""Maximum length of a `tracestate`; a longer one is dropped and the trace continues (trace context, section 3.3.1.5).
"""
_VERSION_00 = re.compile(r"00-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})")
_LATER_VERSION = re.compile(r"(?!ff)[0-9a-f]{2}-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(?:-[\x21-\x7e]{0,200})?")
_STATE = re.compile(r"[\x20-\x7e]+")
_SAMPLED = 1


@dataclass(frozen=True, slots=True)
class TraceContext:
    """A position in a trace: new spans are children of span `span_id`."""

    trace_id: str
    """32 lower-case hex digits, not all zero."""
    span_id: str
    """16 lower-case hex digits, not all zero."""
    sampled: bool
    """The caller records its spans; a parent-based sampler follows it."""
    state: str = ""
    """The `tracestate` as received."""

    def headers(self) -> dict[str, str]:
        """The context as HTTP request headers."""
        parent = {TRACEPARENT: f"00-{self.trace_id}-{self.span_id}-{'01' if self.sampled else '00'}"}
        return {**parent, TRACESTATE: self.state} if self.state else parent


def parse(traceparent: str, tracestate: str = "") -> TraceContext | None:
    """Parse the two header values; None where they are not valid."""
    # Version 00 must match exactly; of a later version (but ff, which is invalid) the first four fields are used and
    # any further ones ignored (trace context, section 3.2.4). All-zero ids are invalid.
    version_00 = traceparent.startswith("00-")
    match = (_VERSION_00 if version_00 else _LATER_VERSION).fullmatch(traceparent)
    if match is None or not match[1].strip("0") or not match[2].strip("0"):
        return None
    state = tracestate if len(tracestate) <= MAX_STATE_CHARS and _STATE.fullmatch(tracestate) else ""
    return TraceContext(match[1], match[2], bool(int(match[3], 16) & _SAMPLED), state)


def from_headers(headers: Mapping[str, str]) -> TraceContext | None:
    """The trace context in a request's headers (names in lower case), or None."""
    parent = headers.get(TRACEPARENT)
    return None if parent is None else parse(parent, headers.get(TRACESTATE, ""))


@dataclass(frozen=True, slots=True)
class RequestContext:
    """The request that a thread is working on."""

    trace: TraceContext | None = None
    request_id: str = ""


_NO_REQUEST = RequestContext()
_current_request: ContextVar[RequestContext] = ContextVar("edgesplit_asked", default=_NO_REQUEST)


def current_request() -> RequestContext:
    """The request that this thread is working on; trace and id are empty where there is none."""
    return _current_request.get()


class request_context:
    """Context manager: on this thread, its body works on this request. Log lines carry the request, and outgoing
    requests are its children."""

    __slots__ = ("_asked", "_token")

    def __init__(self, trace: TraceContext | None, request_id: str = "") -> None:
        self._asked = RequestContext(trace, request_id)

    def __enter__(self) -> None:
        self._token = _current_request.set(self._asked)

    def __exit__(self, *_: object) -> None:
        _current_request.reset(self._token)


def outgoing_headers() -> dict[str, str]:
    """Headers for an outgoing request on behalf of the current one."""
    trace = _current_request.get().trace
    return trace.headers() if trace is not None else {}


def application_headers() -> dict[str, str]:
    """Headers for a request that an application sends: inside one of the application's own OpenTelemetry spans, that
    span is the parent.

    This does not import OpenTelemetry: an application that is inside a span has already imported it.
    """
    api = sys.modules.get("opentelemetry.trace")
    if api is None or _current_request.get().trace is not None:
        return outgoing_headers()
    span_context = api.get_current_span().get_span_context()
    if not span_context.is_valid:
        return {}
    state = span_context.trace_state.to_header()[: MAX_STATE_CHARS + 1] if span_context.trace_state else ""
    context = parse(
        f"00-{span_context.trace_id:032x}-{span_context.span_id:016x}-{int(span_context.trace_flags) & 0xFF:02x}", state
    )
    return context.headers() if context is not None else {}
