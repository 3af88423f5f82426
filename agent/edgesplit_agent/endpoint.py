"""The local endpoint: the Open Inference Protocol on localhost, for applications on this device and nobody else.

A page in a browser must not drive it: the Host header has to be a name of this machine, and so has any Origin.
"""

from __future__ import annotations

import http.client
import re
from collections.abc import Callable
from typing import Any
from urllib.parse import urlsplit

from edgesplit import oip
from edgesplit.errors import LinkError, NotFound
from edgesplit.http1 import Request, Response, error_response, json_response
from edgesplit.report import to_parameters
from edgesplit.seen import trace
from edgesplit.seen.exposition import is_scrape
from edgesplit_agent.active import ActiveRelease
from edgesplit_agent.engine import DEADLINE_S, Engine, known

_LOCAL = re.compile(r"(?:https?://)?(?:localhost|127(?:\.\d{1,3}){3}|\[::1\])(?::\d{1,5})?")
_MODEL = re.compile(r"/v2/models/(?P<model>[^/]{1,80})(?:/versions/(?P<version>[^/]{1,80}))?(?:/(?P<rest>[a-z]+))?")
STATUS_PATH = "/edgesplit/status"
ANSWER_S = 5.0


def is_local(request: Request) -> bool:
    """Whether this came from a program on this machine and not through a web page of somebody else's."""
    host, origin = request.headers.get("host", ""), request.headers.get("origin")
    return bool(_LOCAL.fullmatch(host)) and (origin is None or bool(_LOCAL.fullmatch(origin)))


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
    """The handler that edgesplit.http1.Server is given."""

    def __init__(
        self, engine: Engine, status: Callable[[], dict[str, Any]], metrics: Callable[[], Response] | None = None
    ) -> None:
        self._engine = engine
        self._status = status
        self._metrics = metrics

    def __call__(self, request: Request) -> Response:
        """Answer one request; EdgeErrors become what the server makes of them."""
        if not is_local(request):
            return error_response(403, "only programs on this device may ask (Host and Origin must be localhost)")
        fixed = self._fixed(request)
        if fixed is not None:
            return fixed
        match = _MODEL.fullmatch(request.path)
        if match is None:
            raise NotFound(f"no such path: {request.path[:200]}")
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
        if rest:
            raise NotFound(f"no such path: {request.path[:200]}")
        return json_response(200, oip.model_metadata(model, [_version(release)], release.inputs, release.outputs))

    def _fixed(self, request: Request) -> Response | None:
        """Paths without a model in them."""
        if request.path == "/v2":
            return json_response(200, oip.server_metadata())
        if request.path in ("/v2/health/live", "/v2/health/ready"):
            return json_response(200, {request.path.rpartition("/")[2]: True})
        if request.path == "/v2/repository/index":
            serving = self._engine.serving
            index = [
                {"name": name, "version": _version(one), "state": "READY"} for name, one in sorted(serving.items())
            ]
            return json_response(200, index)
        if self._metrics is not None and is_scrape(request):
            return self._metrics()
        return json_response(200, self._status()) if request.path == STATUS_PATH else None

    def _release(self, model: str, version: str | None) -> ActiveRelease:
        release = self._engine.serving.get(model)
        if release is None or version not in (None, _version(release)):
            which = model if version is None else f"{model} version {version}"
            raise NotFound(f"no model {which} runs here; {known(model, self._engine.serving)}")
        return release

    def _infer(self, model: str, release: ActiveRelease, request: Request) -> Response:
        asked = oip.decode_request(request.body, oip.header_length(request.headers))
        deadline_s = oip.timeout_s(asked.parameters) or DEADLINE_S
        with trace.working_for(trace.given(request.headers), asked.id):
            answer = self._engine.infer(model, asked.inputs, deadline_s=deadline_s, request_id=asked.id)
        response = oip.InferResponse(
            model=model,
            version=_version(release),
            id=asked.id,
            outputs=oip.pick_outputs(answer.outputs, asked.outputs),
            parameters=to_parameters(answer.report),
        )
        body, header_length = oip.encode_response(response, asked.binary_outputs)
        headers = {"content-type": "application/json"}
        if header_length is not None:
            headers = {"content-type": "application/octet-stream", oip.HEADER_LENGTH: str(header_length)}
        return Response(200, headers, body)


def _version(release: ActiveRelease) -> str:
    return release.manifest.model.partition("@")[2] or "1"
