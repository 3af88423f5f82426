"""What Triton's clients may call beside inference, answered the same by every server of ours.

Shared memory is served (`edgesplit.shared_memory.regions`). Settings of logs and traces are told; changing them is the
operator's. Models come by deployments, so that a client's loading and unloading is refused. CUDA memory is not served.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from typing import Any

import msgspec

from edgesplit.errors import MalformedMessage, NotFound, UsageError
from edgesplit.http1.server import Request, Response, error_response, json_response
from edgesplit.msgspec_warmup import settle
from edgesplit.shared_memory.regions import SEGMENT, Regions
from edgesplit.shared_memory.segment import Segment

EXTENSIONS = ("system_shared_memory", "statistics", "trace", "logging", "model_repository")
SEGMENT_PATH = "/v2/edgesplit/segment"
_SHARED = re.compile(
    r"/v2/(?P<kind>system|cuda)sharedmemory(?:/region/(?P<name>[^/]{1,255}))?/(?P<verb>status|register|unregister)"
)
_REPOSITORY = re.compile(r"/v2/repository/models/(?P<model>[^/]+)/(?P<verb>load|unload)")
_TRACE = re.compile(r"/v2(?:/models/[^/]+)?/trace/setting")
LOGGING_PATH = "/v2/logging"


class Register(msgspec.Struct):
    """The body of a registration."""

    key: str
    byte_size: int
    offset: int = 0


class TritonCalls:
    """Give it each request; it answers those that are its own."""

    def __init__(self, regions: Regions) -> None:
        self._regions = regions

    def __call__(self, request: Request) -> Response | None:
        """The answer, or None for a path that is somebody else's."""
        path = request.path
        if shared := _SHARED.fullmatch(path):
            return self._shared(request, shared["kind"], shared["name"], shared["verb"])
        if path == SEGMENT_PATH:
            return _only("POST", request, lambda: self._segment(request))
        if path == LOGGING_PATH:
            return _settings(request, log_settings(), "logs are set by the options of the server's own command")
        if _TRACE.fullmatch(path):
            return _settings(request, TRACE_SETTINGS, "traces are not switched by clients")
        if found := _REPOSITORY.fullmatch(path):
            return error_response(
                400, f"cannot {found['verb']} {found['model'][:80]!r}: models come by `edgectl deploy`"
            )
        return None

    def _shared(self, request: Request, kind: str, name: str | None, verb: str) -> Response:
        if kind == "cuda":
            return error_response(400, "CUDA shared memory is not served here; system shared memory is")
        if verb == "status":
            return _only("GET", request, lambda: json_response(200, self._regions.status(request.channel, name)))
        return _only("POST", request, lambda: self._changed(request, name, verb))

    def _changed(self, request: Request, name: str | None, verb: str) -> Response:
        if verb == "unregister":
            self._regions.unregister(request.channel, name)
        elif name is None or name == SEGMENT:
            raise NotFound(f"no region can have the name {name!r}")
        else:
            wanted = _registered(request)
            self._regions.register(request.channel, name, wanted.key, wanted.offset, wanted.byte_size)
        return Response(200)

    def _segment(self, request: Request) -> Response:
        """Ours: the file descriptor that came with this request is the connection's segment from now on."""
        channel = request.channel
        descriptor = channel.only_descriptor() if channel is not None else None
        if channel is None or descriptor is None:
            raise UsageError("pass one file descriptor with this request, over the Unix socket")
        segment = Segment.received(descriptor)
        channel.keep(SEGMENT, segment)
        return json_response(200, {"region": SEGMENT, "byte_size": segment.size})


TRACE_SETTINGS: dict[str, Any] = {
    "trace_level": ["OFF"],
    "trace_rate": "1000",
    "trace_count": "-1",
    "log_frequency": "0",
    "trace_file": "",
    "trace_mode": "triton",
}
"""Triton's words for: none of its own."""


def log_settings() -> dict[str, Any]:
    """How this process logs, in Triton's words."""
    level = logging.getLogger().getEffectiveLevel()
    return {
        "log_file": "",
        "log_info": level <= logging.INFO,
        "log_warning": level <= logging.WARNING,
        "log_error": level <= logging.ERROR,
        "log_verbose_level": int(level <= logging.DEBUG),
        "log_format": "default",
    }


def _settings(request: Request, now: dict[str, Any], instead: str) -> Response:
    """The settings; a POST that would change one is refused, one that changes nothing is not."""
    if request.method == "POST" and len(request.body):
        wanted = _decoded(request, dict[str, Any])
        for name, value in wanted.items():
            if name not in now:
                raise UsageError(f"no such setting: {name[:80]!r}; there are {', '.join(now)}")
            if value not in (None, now[name]):
                raise UsageError(f"{name} cannot be changed here: {instead}")
    elif request.method not in ("GET", "POST"):
        return error_response(405, f"{request.method} is not for {request.path[:200]}", {"allow": "GET, POST"})
    return json_response(200, now)


def _registered(request: Request) -> Register:
    wanted: Register = _decoded(request, Register)
    if not 0 < wanted.byte_size < 2**53 or not 0 <= wanted.offset < 2**53:
        raise UsageError(f"a region of {wanted.byte_size} bytes from {wanted.offset}")
    return wanted


def _decoded(request: Request, kind: Any) -> Any:
    try:
        return msgspec.json.decode(request.body, type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, ValueError) as error:
        raise MalformedMessage(f"{request.path[:200]}: {error}") from error


def _only(method: str, request: Request, answer: Callable[[], Response]) -> Response:
    if request.method != method:
        return error_response(405, f"{request.method} is not for {request.path[:200]}", {"allow": method})
    return answer()


settle(__name__)
