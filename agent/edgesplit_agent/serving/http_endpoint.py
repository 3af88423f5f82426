"""The local HTTP endpoint: the Open Inference Protocol for applications on this device only.

It listens on localhost and on a Unix socket. A web page must not be able to use it, nor may one of another port of
this machine: on localhost the Host header must be a name of this machine, and on both any Origin must be that of the
Host, and the browser's Sec-Fetch-Site must not say that another site sent the request. Tensors come as bytes,
compressed or not, as JSON, or in shared memory.
"""

from __future__ import annotations

import http.client
import re
from collections.abc import Callable, Mapping
from functools import partial
from time import perf_counter
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import msgspec

from edgesplit.client.direct.grant import LANE_PATH
from edgesplit.errors import LinkError, NotFound
from edgesplit.http1.content_coding import (
    DECODERS,
    MIN_COMPRESSED_BYTES,
    UnknownCoding,
    choose_coding,
    decode_body,
    encode_body,
)
from edgesplit.http1.head import Refused
from edgesplit.http1.server import Request, Response, error_response, json_response
from edgesplit.lazy_import import lazy_import
from edgesplit.observability import trace_context
from edgesplit.observability.prometheus import is_scrape
from edgesplit.oip import protocol as oip
from edgesplit.oip.options import from_parameters
from edgesplit.oip.report import Report, to_parameters
from edgesplit.oip_server.statistics import ModelStatistics
from edgesplit.oip_server.triton_extensions import EXTENSIONS, TritonExtensions
from edgesplit.release.manifest import Manifest
from edgesplit.shared_memory.regions import Regions
from edgesplit_agent.releases.loaded_release import LoadedRelease
from edgesplit_agent.serving.engine import DEADLINE_S, Engine, find_release
from edgesplit_agent.serving.request import served_name
from edgesplit_agent.telemetry.request_record import RequestRecord

if TYPE_CHECKING:
    import numpy as np
else:
    np = lazy_import("numpy")

_LOCAL = re.compile(r"(?:https?://)?(?:localhost|127(?:\.\d{1,3}){3}|\[::1\])(?::\d{1,5})?")
_OWN_SITE = ("none", "same-origin")
"""Values of Sec-Fetch-Site for requests that no other page sent. Ports of one host are one site to a browser, so
`same-site` is not among them."""
_MODEL = re.compile(r"/v2/models/(?P<model>[^/]{1,80})(?:/versions/(?P<version>[^/]{1,80}))?(?:/(?P<rest>[a-z]+))?")
ALL_STATS_PATH = "/v2/models/stats"
STATUS_PATH = "/edgesplit/status"
MAX_CONTROL_BODY_BYTES = 2**20
"""Longest body of a request that is no inference."""
_ONLY_LOCAL = "only programs on this device may send requests, and no web page (Host must be localhost)"
TIMEOUT_S = 5.0
"""Timeout in seconds of the check that the endpoint answers."""


def is_local(request: Request) -> bool:
    """Whether the request came from a program on this machine and not through a foreign web page."""
    headers = request.headers
    host, origin = headers.get("host", ""), headers.get("origin")
    if origin is not None and not (_LOCAL.fullmatch(origin) and urlsplit(origin).netloc == host):
        return False
    on_socket = request.connection_peer is not None and request.connection_peer.is_local_socket
    return (on_socket or bool(_LOCAL.fullmatch(host))) and headers.get("sec-fetch-site", "none") in _OWN_SITE


def check_live(url: str) -> None:
    """Check that the endpoint at `url` is live; LinkError if not."""
    try:
        status, _ = _get(url, "/v2/health/live")
    except (OSError, http.client.HTTPException) as error:
        raise LinkError(f"the local endpoint does not answer: {error}") from error
    if status != 200:
        raise LinkError(f"the local endpoint answers {status}")


def read_status(url: str) -> dict[str, Any]:
    """The status of the agent whose endpoint is at `url`; LinkError with the reason if it does not answer."""
    try:
        return msgspec.json.decode(_get(url, STATUS_PATH)[1], type=dict[str, Any])
    except (OSError, ValueError, RecursionError, msgspec.MsgspecError, http.client.HTTPException) as error:
        raise LinkError(f"does not answer at {url}: {error}") from error


def _get(url: str, path: str) -> tuple[int, bytes]:
    parts = urlsplit(url)
    connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=TIMEOUT_S)
    try:
        connection.request("GET", path)
        response = connection.getresponse()
        return response.status, response.read()
    finally:
        connection.close()


class Endpoint:
    """Request handler for `edgesplit.http1.server.Server`."""

    def __init__(
        self, engine: Engine, status: Callable[[], dict[str, Any]], metrics: Callable[[], Response] | None = None
    ) -> None:
        self._engine = engine
        self._status = status
        self._metrics = metrics
        self._regions = Regions()
        self._triton_calls = TritonExtensions(self._regions)
        self._statistics = _EndpointStatistics()
        self._up_to_date_statistics = engine.observe(self._statistics)

    def __call__(self, request: Request) -> Response:
        """Answer one request; EdgeErrors are converted into responses by the server."""
        if not is_local(request):
            return error_response(403, _ONLY_LOCAL)
        try:
            match = _MODEL.fullmatch(request.path)
            if match is not None and request.path != ALL_STATS_PATH:
                return self._handle_model_path(request, match)
            answer = self._handle_fixed_path(request) or self._triton_calls(request)
            if answer is None:
                raise NotFound(f"no such path: {request.path[:200]}")
            return answer
        except UnknownCoding as error:
            return error_response(415, str(error), {"accept-encoding": ", ".join(DECODERS)})

    def check_head(self, request: Request) -> None:
        """Judge a request by its head, before its body is let in: raises Refused or NotFound. A body may be long only
        where it is an inference for a model that runs here."""
        if not is_local(request):
            raise Refused(403, _ONLY_LOCAL)
        match = _MODEL.fullmatch(request.path)
        if match is not None and match["rest"] == "infer":
            if request.method != "POST":
                raise Refused(405, f"{request.method} is not for {request.path[:200]}")
            find_release(match["model"], self._engine.serving, match["version"])
        elif int(request.headers["content-length"]) > MAX_CONTROL_BODY_BYTES:
            raise Refused(413, f"a body of more than {MAX_CONTROL_BODY_BYTES} bytes, which only an inference may have")

    def close(self) -> None:
        """Release the shared memory that clients registered."""
        self._regions.close()

    def _handle_model_path(self, request: Request, match: re.Match[str]) -> Response:
        """Handle paths below a model."""
        release = find_release(match["model"], self._engine.serving, match["version"])
        model, rest = served_name(match["model"]), match["rest"] or ""
        if request.method == "POST" and rest == "infer":
            return self._infer(model, release, request)
        if request.method != "GET" or rest == "infer":
            return error_response(405, f"{request.method} is not for {request.path[:200]}")
        if rest == "ready":
            return json_response(200, {"name": model, "ready": True})
        if rest == "config":
            return json_response(200, oip.model_config(model, release.inputs, release.outputs))
        if rest == "stats":
            return json_response(200, {"model_stats": [self._up_to_date_statistics().to_dict(model, release.version)]})
        if rest:
            raise NotFound(f"no such path: {request.path[:200]}")
        interface = _interface(release.manifest)
        metadata = oip.model_metadata(model, [release.version], release.inputs, release.outputs, interface)
        return json_response(200, metadata)

    def _handle_fixed_path(self, request: Request) -> Response | None:
        """Handle paths without a model; None if there is no such path."""
        if request.path == "/v2":
            return json_response(200, oip.server_metadata(*EXTENSIONS))
        if request.path in ("/v2/health/live", "/v2/health/ready"):
            return json_response(200, {request.path.rpartition("/")[2]: True})
        serving = sorted(self._engine.serving.items())
        if request.path == "/v2/repository/index":
            index = [{"name": name, "version": release.version, "state": "READY"} for name, release in serving]
            return json_response(200, index)
        if request.path == LANE_PATH:
            return self._engine.direct.answer(request)
        if self._metrics is not None and is_scrape(request):
            return self._metrics()
        if request.path == ALL_STATS_PATH:
            statistics = self._up_to_date_statistics()
            entries = [statistics.to_dict(name, release.version) for name, release in serving]
            return json_response(200, {"model_stats": entries})
        return json_response(200, self._status()) if request.path == STATUS_PATH else None

    def _infer(self, model: str, release: LoadedRelease, request: Request) -> Response:
        began = perf_counter()
        try:
            response, report = self._run_inference(model, release, request)
        except Exception:
            self._statistics.failed(model, release.version, perf_counter() - began)
            raise
        self._engine.accounting.defer(
            partial(self._statistics.answered, model, release, perf_counter() - began, report)
        )
        return response

    def _run_inference(self, model: str, release: LoadedRelease, request: Request) -> tuple[Response, Report]:
        """Run one inference; the response and its report."""
        memory = self._regions.view_for(request.connection_peer)
        parsed = oip.decode_request(_decoded_body(request), oip.header_length(request.headers), memory)
        if parsed.outputs:
            oip.pick_outputs({spec.name: spec for spec in release.outputs}, parsed.outputs)
        deadline_s = oip.timeout_s(parsed.parameters) or DEADLINE_S
        inputs, options = _with_passed_copied(parsed.inputs, release), from_parameters(parsed.parameters)
        with trace_context.request_context(trace_context.from_headers(request.headers), parsed.id):
            answer = self._engine.infer(
                model, inputs, deadline_s=deadline_s, request_id=parsed.id, options=options, defer_accounting=True
            )
        response = oip.InferResponse(
            model=model, version=release.version, id=parsed.id,
            outputs=oip.pick_outputs(answer.outputs, parsed.outputs), parameters=to_parameters(answer.report),
        )  # fmt: skip
        body, header_length = oip.encode_response(
            response, parsed.binary_outputs, at=parsed.outputs_at, room=parsed.answer_at, memory=memory
        )
        headers = {"content-type": "application/json"}
        if header_length is not None:
            headers = {"content-type": "application/octet-stream", oip.HEADER_LENGTH: str(header_length)}
        headers, body = _compressed(headers, body, request.headers.get("accept-encoding", ""))
        return Response(200, headers, body, after=self._engine.accounting.deliver), answer.report


class _EndpointStatistics(ModelStatistics):
    """Counts the requests that the endpoint answers, by the whole time that they took it, and those of lanes."""

    def answered(self, model: str, release: LoadedRelease, duration_s: float, report: Report) -> None:
        """Count one answered request."""
        self.succeeded(model, release.version, duration_s, statistics_parts(report, duration_s))

    def finished(self, record: RequestRecord) -> None:
        """Count an answer of a lane: the endpoint never saw its request."""
        if record.is_direct and isinstance(record.outcome, Report):
            self.answered(record.model, record.release, record.outcome.latency_s, record.outcome)


def _decoded_body(request: Request) -> Any:
    """The request body without its content coding."""
    coding = request.headers.get("content-encoding", "")
    return decode_body(request.body, coding) if coding else request.body


def _compressed(headers: dict[str, str], body: oip.Buffers, accepts: str) -> tuple[dict[str, str], oip.Buffers]:
    """Headers and body in a content coding that the client accepts, if the body is large enough to be worth it."""
    coding = choose_coding(accepts) if accepts else ""
    if not coding or sum(map(len, body)) < MIN_COMPRESSED_BYTES:
        return headers, body
    return {**headers, "content-encoding": coding}, [encode_body(body, coding)]


def _with_passed_copied(inputs: Mapping[str, oip.Tensor], release: LoadedRelease) -> Mapping[str, oip.Tensor]:
    """The inputs, copied where one is an output too: a cached answer must not change with the client's memory."""
    passed = release.passed_through & inputs.keys()
    return {**inputs, **{name: np.array(inputs[name]) for name in passed}} if passed else inputs


def statistics_parts(report: Report, duration_s: float) -> dict[str, float]:
    """The seconds of a request that took `duration_s` as Triton's statistics divide them; the remainder is queueing.

    Device and target may have worked at the same time, and a request that joined another one's answer was there for a
    part of it only: so the parts are capped by the whole.
    """
    whole_s = min(report.latency_s, duration_s)
    input_s = min(report.encode_s, whole_s)
    infer_s = min(report.device_s + report.link_s + report.remote_s, whole_s - input_s)
    return {"queue": whole_s - input_s - infer_s, "compute_input": input_s, "compute_infer": infer_s}


def _interface(manifest: Manifest) -> dict[str, Any]:
    """A model's input spec and output kind, as `edgesplit.client.model_interface` reads them; empty without either."""
    parts = {"input_spec": manifest.input_spec, "output_kind": manifest.output_kind or None}
    return {name: msgspec.to_builtins(part) for name, part in parts.items() if part is not None}
