"""The offload server: the Open Inference Protocol over HTTP for the far halves of releases.

Promises: a request names its release, so halves of different releases never meet; tensors are checked against the
manifest before anything runs; a bounded number runs at once and waits, the rest hears 503 with Retry-After; work for a
client that has gone is skipped. Each response tells the seconds spent in here (`edgesplit-seconds`) and how much
waiting stretches a run (`edgesplit-load`, at least 1). Leaves to others: batching, eviction by memory, several
processes. tests/conformance runs Triton's own client against it.
"""

from __future__ import annotations

import dataclasses
import logging
import os
import re
import ssl
from collections.abc import Callable, Container, Mapping
from pathlib import Path
from time import monotonic, perf_counter

import edgesplit
from edgesplit import codecs, oip
from edgesplit.bodies import CODINGS, UnknownCoding, decoded
from edgesplit.errors import EdgeError, NotFound
from edgesplit.http1 import Request, Response, Server, error_response, json_response, response_to
from edgesplit.runtime import Runtime, Tensor, execute
from edgesplit.runtime.by_format import EngineByFormat
from edgesplit.seen import families
from edgesplit.seen.ledger import Series, gauge
from edgesplit.seen.spans import OFF, Tracer
from edgesplit.seen.timeline import DECODE, ENCODE, HOP, QUEUE, RUN
from edgesplit_offload.onward import NOT_HERE, Asked, Finished, Onward, deadline_left_s
from edgesplit_offload.shelf import VERSION, Opener, OpenRelease, RemoteModel, Shelf
from edgesplit_offload.turns import Turns
from edgesplit_offload.visits import RELAYED, Visit, Visits

log = logging.getLogger(__name__)

SECONDS_HEADER = "edgesplit-seconds"
LOAD_HEADER = "edgesplit-load"
_MODEL = re.compile(r"/v2/models/(?P<model>[^/]+)(?:/versions/(?P<version>[^/]+))?(?P<verb>/ready|/config|/infer)?")


def releases_in(folder: Path, bootstrap_root: bytes) -> Opener:
    """Opens releases under `folder`, believing what leads from `bootstrap_root` to them."""

    def open_(digest: str) -> OpenRelease:
        from edgesplit.key_file import read_keys
        from edgesplit.release import remote_slices
        from edgesplit.releases import open_release
        from edgesplit.sealed import needed_keys
        from edgesplit.wrapping import fitting

        if not (folder / digest).is_dir():
            raise NotFound(f"release {digest[:12]} is not here")
        release = open_release(folder, digest, bootstrap_root)
        needed = needed_keys(release.manifest, remote_slices(release.manifest), golden=False)
        return dataclasses.replace(release, keys=fitting(read_keys(release.folder), needed)) if needed else release

    return open_


class OffloadServer:
    """Serves the far halves of the releases in a folder."""

    def __init__(
        self,
        folder: Path,
        bootstrap_root: bytes,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        tls: ssl.SSLContext | None = None,
        open_release: Opener | None = None,
        runtime: Runtime | None = None,
        at_once: int | None = None,
        waiting: int | None = None,
        revoked: Container[object] = frozenset(),
        tracer: Tracer = OFF,
        onward: Onward | None = None,
    ) -> None:
        """`onward`: of a gateway, the next tier."""
        self._revoked = revoked
        self._visits = Visits(tracer)
        self._onward = onward
        runs = at_once or os.cpu_count() or 1
        self._shelf = Shelf(open_release or releases_in(folder, bootstrap_root), runtime or EngineByFormat())
        self._turns = Turns(runs, 8 * runs if waiting is None else waiting)
        self._server = Server(self._answer, host=host, port=port, tls=tls)
        self._fixed: dict[str, tuple[str, Callable[[Request], Response]]] = {
            "/v2": ("GET", lambda _: json_response(200, oip.server_metadata())),
            "/v2/health/live": ("GET", lambda _: Response()),
            "/v2/health/ready": ("GET", lambda _: Response(503 if self._server.is_stopping else 200)),
            "/v2/repository/index": ("POST", self._index),
            "/v2/edgesplit/probe": ("POST", lambda _: Response()),
        }

    @property
    def port(self) -> int:
        """The port that it listens on."""
        return self._server.port

    @property
    def url(self) -> str:
        """Where clients reach it."""
        return self._server.url

    def start(self) -> None:
        """Listen; UsageError where the address cannot be had."""
        self._server.start()

    def stop(self, drain_s: float = 5.0) -> None:
        """Accept no more, finish what runs, close."""
        self._server.stop(drain_s)
        if self._onward is not None:
            self._onward.close()

    def series(self) -> list[Series]:
        """What this process has counted, and how it is now; for /metrics."""
        return [
            *self._visits.ledger.series(),
            gauge(families.OFFLOAD_INFO, 1.0, edgesplit.__version__),
            gauge(families.OFFLOAD_PROCESSES, 1.0),
            gauge(families.OFFLOAD_RUNNING, self._turns.running),
            gauge(families.OFFLOAD_WAITING, self._turns.waiting),
            gauge(families.OFFLOAD_LOAD, max(1.0, self._turns.load)),
            gauge(families.OFFLOAD_LOADED_MODELS, len(self._shelf.model_names())),
        ]

    def _answer(self, request: Request) -> Response:
        """The response, with what it took in here and how loaded that is."""
        began = perf_counter()
        try:
            if request.peer_serial in self._revoked:
                self._visits.refused()
                return error_response(403, "this certificate was revoked")
            response = self._route(request)
        except UnknownCoding as error:
            response = error_response(415, str(error), {"accept-encoding": ", ".join(CODINGS)})
        except EdgeError as error:
            response = response_to(error)
        told = {SECONDS_HEADER: f"{perf_counter() - began:.6f}", LOAD_HEADER: f"{max(1.0, self._turns.load):.3f}"}
        return dataclasses.replace(response, headers={**response.headers, **told})

    def _route(self, request: Request) -> Response:
        path = request.path.rstrip("/")
        if path in self._fixed:
            method, handle = self._fixed[path]
            return handle(request) if request.method == method else _not_allowed(method)
        found = _MODEL.fullmatch(path)
        if found is None:
            raise NotFound(f"nothing is at {request.path[:200]}")
        verb, method = found["verb"], "POST" if found["verb"] == "/infer" else "GET"
        if request.method != method:
            return _not_allowed(method)
        if found["version"] not in (None, VERSION):
            raise NotFound(f"model {found['model'][:200]!r} has no version {found['version'][:80]!r}")
        if verb == "/infer":
            with self._visits.visit(request) as visit:
                if self._onward is not None:
                    return self._infer_or_relay(request, found["model"], self._onward, visit)
                return self._infer(request, self._shelf.model(found["model"]), visit)
        return self._of_model(self._shelf.model(found["model"]), verb)

    def _infer_or_relay(self, request: Request, name: str, onward: Onward, visit: Visit) -> Response:
        """A gateway's answer: by itself, by itself and the next tier, or the next tier's as it is."""
        try:
            model = self._shelf.model(name)
            if model.through_gateway:
                return self._infer(request, model, visit)
        except NOT_HERE as error:
            log.info("%s is relayed: %s", name[:200], error)
        visit.model, visit.row = RELAYED, ""
        body = decoded(request.body, request.headers.get("content-encoding", ""))
        with visit.timeline.phase(HOP):
            return onward.relay(request, deadline_left_s(request, body))

    def _of_model(self, model: RemoteModel, verb: str | None) -> Response:
        if verb == "/ready":
            model.programs()
            return Response()
        if verb == "/config":
            return json_response(200, oip.model_config(model.name, model.wire_inputs, model.outputs))
        return json_response(200, oip.model_metadata(model.name, [VERSION], model.wire_inputs, model.outputs))

    def _infer(self, request: Request, model: RemoteModel, visit: Visit) -> Response:
        arrived = monotonic()
        visit.model, visit.row = model.served, model.row.name
        with visit.timeline.phase(DECODE):
            body = decoded(request.body, request.headers.get("content-encoding", ""))
            asked = oip.decode_request(body, oip.header_length(request.headers))
            inputs = codecs.decode_all(asked.inputs, model.inputs, model.row.codecs)
            oip.check_tensors(inputs, model.inputs)
            oip.pick_outputs({spec.name: spec for spec in model.outputs}, asked.outputs)
        patience_s = oip.timeout_s(asked.parameters)
        deadline = None if patience_s is None else arrived + patience_s
        finished = self._finish(model, Asked(asked.id, inputs, deadline, request.closed, visit.timeline))
        with visit.timeline.phase(ENCODE):
            outputs = oip.pick_outputs(finished.outputs, asked.outputs)
            answer = oip.InferResponse(model.name, outputs, VERSION, asked.id)
            buffers, length = oip.encode_response(answer, asked.binary_outputs)
        visit.sent = sum(len(part) for part in buffers)
        kind = {"content-type": "application/json" if length is None else "application/octet-stream"}
        sized = {} if length is None else {oip.HEADER_LENGTH: str(length)}
        return Response(200, {**kind, **sized, **finished.headers, **visit.headers()}, buffers)

    def _finish(self, model: RemoteModel, asked: Asked) -> Finished:
        """The row's answers: by the slices here, or of a gateway, by those here and the next tier's."""

        def run(part: RemoteModel, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
            queued = perf_counter()
            with self._turns.take(asked.deadline, asked.is_gone):
                asked.timeline.add(QUEUE, queued, perf_counter())
                with asked.timeline.phase(RUN):
                    return _run(part, inputs)

        if self._onward is not None and model.row.hops:
            return self._onward.finish(model, asked, run)
        return Finished(run(model, asked.inputs), {})

    def _index(self, _: Request) -> Response:
        """Triton's model repository index: the models that can be run now."""
        entries = [{"name": name, "version": VERSION, "state": "READY"} for name in self._shelf.model_names()]
        return json_response(200, entries)


def _run(model: RemoteModel, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The row's answers, by its far slices."""
    live = execute(model.programs(), model.row.remote, inputs)
    return {name: live[name] for name in model.row.receives}


def _not_allowed(method: str) -> Response:
    return error_response(405, f"use {method} here", {"allow": method})
