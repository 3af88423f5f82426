"""The local endpoint: the Open Inference Protocol on this device, for its own applications and nobody else.

On localhost and on a Unix socket. A page in a browser must not drive it: on localhost the Host header has to be a name
of this machine, and any Origin has to be one everywhere. Tensors come as bytes, compressed ones too, as JSON, or in
shared memory.
"""

from __future__ import annotations

import http.client
import os
import re
from collections.abc import Callable, Mapping
from functools import partial
from time import perf_counter
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import msgspec

from edgesplit.client.direct.grant import LANE_PATH, LaneWish
from edgesplit.errors import LinkError, MalformedMessage, NotFound, UsageError
from edgesplit.http1.content_coding import CODINGS, COMPRESSED_FROM, UnknownCoding, accepted, decoded, encoded
from edgesplit.http1.server import Request, Response, error_response, json_response
from edgesplit.lazy_import import later
from edgesplit.observability import trace_context
from edgesplit.observability.prometheus import is_scrape
from edgesplit.oip import protocol as oip
from edgesplit.oip.options import from_parameters
from edgesplit.oip.report import Report, to_parameters
from edgesplit.oip_server.statistics import ModelStatistics
from edgesplit.oip_server.triton_extensions import EXTENSIONS, TritonCalls
from edgesplit.shared_memory.regions import Regions
from edgesplit_agent.releases.loaded_release import ActiveRelease
from edgesplit_agent.serving.engine import DEADLINE_S, Engine, known

if TYPE_CHECKING:
    import numpy as np
else:
    np = later("numpy")

_LOCAL = re.compile(r"(?:https?://)?(?:localhost|127(?:\.\d{1,3}){3}|\[::1\])(?::\d{1,5})?")
_MODEL = re.compile(r"/v2/models/(?P<model>[^/]{1,80})(?:/versions/(?P<version>[^/]{1,80}))?(?:/(?P<rest>[a-z]+))?")
ALL_STATS_PATH = "/v2/models/stats"
STATUS_PATH = "/edgesplit/status"
ANSWER_S = 5.0


def is_local(request: Request) -> bool:
    """Whether this came from a program on this machine and not through a web page of somebody else's."""
    host, origin = request.headers.get("host", ""), request.headers.get("origin")
    on_socket = request.channel is not None and request.channel.is_local_socket
    return (on_socket or bool(_LOCAL.fullmatch(host))) and (origin is None or bool(_LOCAL.fullmatch(origin)))


def answers(url: str) -> None:
    """LinkError unless applications are answered at `url`."""
    parts = urlsplit(url)
    connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=ANSWER_S)
    try:
        connection.request("GET", "/v2/health/live")
        status = connection.getresponse().status
    except (OSError, http.client.HTTPException) as error:
        raise LinkError(f"the local endpoint does not answer: {error}") from error
    finally:
        connection.close()
    if status != 200:
        raise LinkError(f"the local endpoint answers {status}")


class Endpoint:
    """The handler that edgesplit.http1.server.Server is given."""

    def __init__(
        self, engine: Engine, status: Callable[[], dict[str, Any]], metrics: Callable[[], Response] | None = None
    ) -> None:
        self._engine = engine
        self._status = status
        self._metrics = metrics
        self._regions = Regions()
        self._triton_calls = TritonCalls(self._regions)
        self._statistics = ModelStatistics()
        engine.watch_lanes(lambda model, release, told: self._succeeded(model, release, told.latency_s, told))

    def __call__(self, request: Request) -> Response:
        """Answer one request; EdgeErrors become what the server makes of them."""
        if not is_local(request):
            return error_response(403, "only programs on this device may ask (Host and Origin must be localhost)")
        try:
            found = _MODEL.fullmatch(request.path)
            if found is not None and request.path != ALL_STATS_PATH:
                return self._of_model(request, found)
            answer = self._fixed(request) or self._triton_calls(request)
            if answer is None:
                raise NotFound(f"no such path: {request.path[:200]}")
            return answer
        except UnknownCoding as error:
            return error_response(415, str(error), {"accept-encoding": ", ".join(CODINGS)})

    def close(self) -> None:
        """Give up what clients have registered."""
        self._regions.close()

    def _of_model(self, request: Request, match: re.Match[str]) -> Response:
        """Paths with a model in them."""
        model, rest = match["model"], match["rest"] or ""
        release = self._release(model, match["version"])
        if request.method == "POST" and rest == "infer":
            return self._infer(model, release, request)
        if request.method != "GET" or rest == "infer":
            return error_response(405, f"{request.method} is not for {request.path[:200]}")
        if rest == "ready":
            return json_response(200, {"name": model, "ready": True})
        if rest == "config":
            return json_response(200, oip.model_config(model, release.inputs, release.outputs))
        if rest == "stats":
            self._engine.catch_up()
            return json_response(200, {"model_stats": [self._statistics.described(model, release.version)]})
        if rest:
            raise NotFound(f"no such path: {request.path[:200]}")
        return json_response(200, oip.model_metadata(model, [release.version], release.inputs, release.outputs))

    def _fixed(self, request: Request) -> Response | None:
        """Paths without a model in them."""
        if request.path == "/v2":
            return json_response(200, oip.server_metadata(*EXTENSIONS))
        if request.path in ("/v2/health/live", "/v2/health/ready"):
            return json_response(200, {request.path.rpartition("/")[2]: True})
        serving = self._engine.serving
        if request.path == "/v2/repository/index":
            index = [{"name": name, "version": one.version, "state": "READY"} for name, one in sorted(serving.items())]
            return json_response(200, index)
        if request.path == LANE_PATH:
            return self._lane(request)
        if self._metrics is not None and is_scrape(request):
            return self._metrics()
        if request.path == ALL_STATS_PATH:
            self._engine.catch_up()
            told = [self._statistics.described(name, one.version) for name, one in sorted(serving.items())]
            return json_response(200, {"model_stats": told})
        return json_response(200, self._status()) if request.path == STATUS_PATH else None

    def _lane(self, request: Request) -> Response:
        """An application's way past this endpoint, over the socket whose other end it keeps."""
        if request.method != "POST":
            return error_response(405, f"{request.method} is not for {LANE_PATH}", {"allow": "POST"})
        channel = request.channel
        descriptor = channel.only_descriptor() if channel is not None and channel.is_local_socket else None
        if descriptor is None:
            raise UsageError("pass one end of a socket pair with this request, over the Unix socket")
        try:
            wish = msgspec.json.decode(request.body, type=LaneWish)
            return json_response(200, self._engine.open_lane(wish.model, descriptor, shared=wish.shared))
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise MalformedMessage(f"{LANE_PATH}: {error}") from error
        finally:
            os.close(descriptor)

    def _release(self, model: str, version: str | None) -> ActiveRelease:
        release = self._engine.serving.get(model)
        if release is None or version not in (None, release.version):
            which = model if version is None else f"{model} version {version}"
            raise NotFound(f"no model {which} runs here; {known(model, self._engine.serving)}")
        return release

    def _infer(self, model: str, release: ActiveRelease, request: Request) -> Response:
        began = perf_counter()
        try:
            response, report = self._answered(model, release, request)
        except Exception:
            self._statistics.failed(model, release.version, perf_counter() - began)
            self._engine.catch_up()
            raise
        self._engine.later(partial(self._succeeded, model, release, perf_counter() - began, report))
        return response

    def _succeeded(self, model: str, release: ActiveRelease, took_s: float, report: Report) -> None:
        self._statistics.succeeded(model, release.version, took_s, parts_of(report))

    def _answered(self, model: str, release: ActiveRelease, request: Request) -> tuple[Response, Report]:
        memory = self._regions.seen_by(request.channel)
        asked = oip.decode_request(_plain(request), oip.header_length(request.headers), memory)
        if asked.outputs:
            oip.pick_outputs({spec.name: spec for spec in release.outputs}, asked.outputs)
        deadline_s = oip.timeout_s(asked.parameters) or DEADLINE_S
        inputs, wishes = _kept(asked.inputs, release), from_parameters(asked.parameters)
        with trace_context.working_for(trace_context.given(request.headers), asked.id):
            answer = self._engine.infer(
                model, inputs, deadline_s=deadline_s, request_id=asked.id, wishes=wishes, at_leisure=True
            )
        response = oip.InferResponse(
            model=model,
            version=release.version,
            id=asked.id,
            outputs=oip.pick_outputs(answer.outputs, asked.outputs),
            parameters=to_parameters(answer.report),
        )
        body, header_length = oip.encode_response(
            response, asked.binary_outputs, at=asked.outputs_at, room=asked.answer_at, memory=memory
        )
        headers = {"content-type": "application/json"}
        if header_length is not None:
            headers = {"content-type": "application/octet-stream", oip.HEADER_LENGTH: str(header_length)}
        headers, body = _coded(headers, body, request.headers.get("accept-encoding", ""))
        return Response(200, headers, body, after=self._engine.catch_up), answer.report


def _plain(request: Request) -> Any:
    """The body without its content coding."""
    coding = request.headers.get("content-encoding", "")
    return decoded(request.body, coding) if coding else request.body


def _coded(headers: dict[str, str], body: oip.Buffers, accepts: str) -> tuple[dict[str, str], oip.Buffers]:
    """The response in a content coding that the client asks for, where it has one and the body is worth it."""
    coding = accepted(accepts) if accepts else ""
    if not coding or sum(map(len, body)) < COMPRESSED_FROM:
        return headers, body
    return {**headers, "content-encoding": coding}, [encoded(body, coding)]


def _kept(inputs: Mapping[str, oip.Tensor], release: ActiveRelease) -> Mapping[str, oip.Tensor]:
    """The inputs, copied where one is an output too: an answer that is remembered must not change with the client's
    memory."""
    passed = release.passed & inputs.keys()
    return {**inputs, **{name: np.array(inputs[name]) for name in passed}} if passed else inputs


def parts_of(report: Report) -> dict[str, float]:
    """What a request's time went into; what is left of it was waiting. Device and cloud may have worked at the same
    time: the parts are never more than the whole."""
    input_s = min(report.encode_s, report.latency_s)
    infer_s = min(report.device_s + report.link_s + report.remote_s, report.latency_s - input_s)
    return {
        "queue": report.latency_s - input_s - infer_s,
        "compute_input": input_s,
        "compute_infer": infer_s,
    }
