"""Triton's extensions of the Open Inference Protocol beside inference: shared memory, log and trace settings.

System shared memory is served (`edgesplit.shared_memory.regions`), CUDA memory is not. Log and trace settings can be
read; changing them is refused. Models are installed by deployments, so loading and unloading by clients is refused.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from typing import Any

import msgspec

from edgesplit.decoding import decode_json
from edgesplit.errors import NotFound, UsageError
from edgesplit.http1.server import Request, Response, error_response, json_response
from edgesplit.msgspec_warmup import warm_up_structs
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


class RegisterRegion(msgspec.Struct):
    """Body of a request that registers a shared memory region."""

    key: str
    byte_size: int
    offset: int = 0


class TritonExtensions:
    """Request handler of the extension paths."""

    def __init__(self, regions: Regions) -> None:
        self._regions = regions

    def __call__(self, request: Request) -> Response | None:
        """The response, or None if the path belongs to no extension."""
        path = request.path
        if shared := _SHARED.fullmatch(path):
            return self._shared(request, shared["kind"], shared["name"], shared["verb"])
        if path == SEGMENT_PATH:
            return _require_method("POST", request, lambda: self._segment(request))
        if path == LOGGING_PATH:
            return _settings(request, log_settings(), "log settings are options of the server's command")
        if _TRACE.fullmatch(path):
            return _settings(request, TRACE_SETTINGS, "clients cannot change trace settings")
        if match := _REPOSITORY.fullmatch(path):
            return error_response(
                400, f"cannot {match['verb']} {match['model'][:80]!r}: models come by `edgectl deploy`"
            )
        return None

    def _shared(self, request: Request, kind: str, name: str | None, verb: str) -> Response:
        if kind == "cuda":
            return error_response(400, "CUDA shared memory is not served here; system shared memory is")
        if verb == "status":
            return _require_method(
                "GET", request, lambda: json_response(200, self._regions.status(request.connection_peer, name))
            )
        return _require_method("POST", request, lambda: self._change_region(request, name, verb))

    def _change_region(self, request: Request, name: str | None, verb: str) -> Response:
        if verb == "unregister":
            self._regions.unregister(request.connection_peer, name)
        elif name is None or name == SEGMENT:
            raise NotFound(f"no region can have the name {name!r}")
        else:
            peer, new = request.connection_peer, _parse_registration(request)
            self._regions.register(peer, name, new.key, new.offset, new.byte_size)
        return Response(200)

    def _segment(self, request: Request) -> Response:
        """edgesplit's own extension: the file descriptor that came with the request becomes the connection's
        segment."""
        peer = request.connection_peer
        descriptor = peer.received_fd() if peer is not None else None
        if peer is None or descriptor is None:
            raise UsageError("pass one file descriptor with this request, over the Unix socket")
        segment = Segment.from_descriptor(descriptor)
        peer.attach(SEGMENT, segment)
        return json_response(200, {"region": SEGMENT, "byte_size": segment.size})


TRACE_SETTINGS: dict[str, Any] = {
    "trace_level": ["OFF"], "trace_rate": "1000", "trace_count": "-1", "log_frequency": "0", "trace_file": "",
    "trace_mode": "triton",
}  # fmt: skip
"""Triton's trace settings for a server without Triton traces."""


def log_settings() -> dict[str, Any]:
    """This process's log settings in Triton's format."""
    level = logging.getLogger().getEffectiveLevel()
    return {
        "log_file": "", "log_info": level <= logging.INFO, "log_warning": level <= logging.WARNING,
        "log_error": level <= logging.ERROR, "log_verbose_level": int(level <= logging.DEBUG), "log_format": "default",
    }  # fmt: skip


def _settings(request: Request, now: dict[str, Any], hint: str) -> Response:
    """The current settings. UsageError for a POST that would change one; a POST that changes nothing is accepted."""
    if request.method == "POST" and len(request.body):
        for name, value in decode_json(request.body, dict[str, Any], request.path[:200]).items():
            if name not in now:
                raise UsageError(f"no such setting: {name[:80]!r}; there are {', '.join(now)}")
            if value not in (None, now[name]):
                raise UsageError(f"{name} cannot be changed here: {hint}")
    elif request.method not in ("GET", "POST"):
        return error_response(405, f"{request.method} is not for {request.path[:200]}", {"allow": "GET, POST"})
    return json_response(200, now)


def _parse_registration(request: Request) -> RegisterRegion:
    registration = decode_json(request.body, RegisterRegion, request.path[:200])
    if not 0 < registration.byte_size < 2**53 or not 0 <= registration.offset < 2**53:
        raise UsageError(f"not a valid region: {registration.byte_size} bytes from {registration.offset}")
    return registration


def _require_method(method: str, request: Request, answer: Callable[[], Response]) -> Response:
    if request.method != method:
        return error_response(405, f"{request.method} is not for {request.path[:200]}", {"allow": method})
    return answer()


warm_up_structs(__name__)
