"""The offload server: serves the remote halves of releases over the Open Inference Protocol on HTTP.

A request names its release, so halves of different releases are never combined; tensors are checked against the
manifest before anything runs. A bounded number of runs is active and a bounded number of requests waits; the rest is
answered 503 (429 if one client has more than its share) with Retry-After. Work for a client that has disconnected, or
that cannot be finished in time, is not begun. Requests for one model are batched if that was measured to pay
(`edgesplit_offload.models.batch_benefit`). Each response reports the seconds spent in this server
(`edgesplit-seconds`), the part of them in the queue (`edgesplit-queue-seconds`), and the load factor (`edgesplit-load`,
at least 1).

Operators' requests are handled by `inference.management_api`, several processes by `processes.supervisor`, the next
tier by `inference.gateway_relay`. tests/conformance runs Triton's own client against it.
"""

from __future__ import annotations

import dataclasses
import logging
import math
import os
import re
import socket
import ssl
import threading
import uuid
from collections.abc import Callable, Container
from functools import partial
from pathlib import Path
from time import perf_counter

import edgesplit
from edgesplit.errors import EdgeError, NotFound
from edgesplit.http1.head import ParsedHead, Refused
from edgesplit.http1.server import Request, Response, call_handler, error_response, json_response
from edgesplit.limits import LIMITS
from edgesplit.observability import metrics
from edgesplit.observability.registry import Series, gauge_series
from edgesplit.observability.tracing import TRACING_OFF, Tracer
from edgesplit.oip import protocol as oip
from edgesplit.runtime import Runtime
from edgesplit.runtime.dispatch import DispatchingRuntime
from edgesplit_offload.batching.batcher import Batcher
from edgesplit_offload.batching.remote_batcher import RemoteBatcher
from edgesplit_offload.frontend.event_loop import EventLoop
from edgesplit_offload.frontend.server import HttpServer
from edgesplit_offload.inference.gateway_relay import NextTier
from edgesplit_offload.inference.management_api import Management
from edgesplit_offload.inference.pipeline import Answer, InferencePipeline, Route, error_to_response, route_of
from edgesplit_offload.models.batch_benefit import CLOCKS, BackgroundMeasurements
from edgesplit_offload.models.permissions import ReleasePermissions
from edgesplit_offload.models.remote_half import OpenRelease, RemoteHalf
from edgesplit_offload.models.repository import VERSION, ModelRepository, Opener, RemoteModel
from edgesplit_offload.models.slice_cache import SliceCache
from edgesplit_offload.models.warm_up import WarmUp
from edgesplit_offload.observability.request_metrics import MetricsRecorder
from edgesplit_offload.observability.statistics import StatisticsRecorder
from edgesplit_offload.processes.confined import confine_serving_process
from edgesplit_offload.processes.metric_totals import metrics_answer
from edgesplit_offload.processes.peers import PeerProcesses
from edgesplit_offload.scheduling.arrivals import ArrivalStats
from edgesplit_offload.scheduling.scheduler import Scheduler, is_short

log = logging.getLogger(__name__)

MAX_WAITING_PER_RUN = 16
SHORT_RUN_S = 0.005
"""Longest expected run that the leader executes by itself: all slots are taken, so nothing else could start, and it
does not batch, so no further request read meanwhile could join it."""
STACK_THREADS = 4
"""Threads of a batched run in the batcher: on four cores one such run is active at a time, and all requests that arrive
meanwhile share the next (docs/decisions/0044)."""
STOP_S = 5.0
MAX_CONTROL_BODY_BYTES = 2**20
"""Longest body of a request that is no inference."""
EXTENSIONS = ("binary_tensor_data", "model_configuration", "model_repository", "statistics", "trace", "logging")
SERIES = "series"
_MODEL = re.compile(r"/v2/models/(?P<model>[^/]+)(?:/versions/(?P<version>[^/]+))?(?P<verb>/ready|/config|/infer)?")


def release_opener(folder: Path, bootstrap_root: bytes) -> Opener:
    """Opens the releases under `folder`, verified from the TUF root `bootstrap_root`."""

    def open_(digest: str) -> OpenRelease:
        from edgesplit.crypto.key_file import read_keys
        from edgesplit.crypto.key_wrapping import select_keys
        from edgesplit.crypto.slice_encryption import needed_keys
        from edgesplit.release.manifest import remote_slices
        from edgesplit.release_store import open_release

        if not (folder / digest).is_dir():
            raise NotFound(f"release {digest[:12]} is not here")
        release = open_release(folder, digest, bootstrap_root)
        needed = needed_keys(release.manifest, remote_slices(release.manifest), golden=False)
        return dataclasses.replace(release, keys=select_keys(read_keys(release.folder), needed)) if needed else release

    return open_


class OffloadServer:
    """Serves the remote halves of the releases in a folder."""

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
        wide: Runtime | None = None,
        threads: int = 1,
        at_once: int | None = None,
        waiting: int | None = None,
        memory: int | None = None,
        batching: bool = False,
        connections: int = 256,
        revoked: Container[object] = frozenset(),
        siblings: PeerProcesses | None = None,
        elsewhere: RemoteBatcher | None = None,
        on_closed: Callable[[], None] = lambda: None,
        tracer: Tracer = TRACING_OFF,
        next_tier: NextTier | None = None,
        own_client: str = "",
    ) -> None:
        """`runtime`: replaces each slice's default engine with `threads`. `wide`: the engine for batches with
        STACK_THREADS, of one process among several. `elsewhere`: the route to batchers in other processes, of one
        process among several. `next_tier`: the next tier, of a gateway; `own_client`: the name in the certificate by
        which it asks there."""
        self._next_tier = next_tier
        self._revoked = revoked
        self._metrics = MetricsRecorder(tracer)
        self._keeps_network = "it was not confined"
        """Why this process can open connections; empty if it cannot."""
        self._process_id = uuid.uuid4().hex
        self.statistics = StatisticsRecorder()
        self._cache = SliceCache(memory)
        self._permissions = ReleasePermissions(folder)
        self.models = ModelRepository(
            open_release or release_opener(folder, bootstrap_root), runtime or DispatchingRuntime(threads), self._cache,
            wide=wide,
        )  # fmt: skip
        cores = max(1, (os.cpu_count() or 1) // threads)
        runs = at_once or cores
        self._loop = EventLoop(
            self._on_turn_end, self._on_timer, lambda left: self.scheduler.should_run_now(left, SHORT_RUN_S)
        )
        self.scheduler = Scheduler(
            runs, MAX_WAITING_PER_RUN * runs if waiting is None else waiting,
            cores // (1 if wide is None else STACK_THREADS) if elsewhere else runs,
            self._loop.run_in_thread, self._loop.run_watched,
        )  # fmt: skip
        self._batcher = Batcher(self.models, self.scheduler, self._loop, self._on_requested)
        self._remote_batcher = elsewhere
        if elsewhere is not None:
            elsewhere.bind(self._loop, self.scheduler.on_remote_load)
        self._pipeline = InferencePipeline(
            self.models, self.scheduler, self._loop, elsewhere, (self._metrics, self.statistics), self._on_requested,
            next_tier, permissions=self._permissions,
        )  # fmt: skip
        self._measuring = BackgroundMeasurements() if batching else None
        self._clock = CLOCKS[threads == 1]
        self._warm_up = WarmUp(folder, self.models)
        self._peers = siblings or PeerProcesses()
        self._management = Management(
            self.models, self.statistics, self._peers, mutual=tls is not None, permissions=self._permissions,
            refusals=lambda: self.http.recent_refusals(), keeps_network=lambda: self._keeps_network,
            own_client=own_client,
            list_expires=lambda: getattr(revoked, "expires", None),  # of a list that is read from a file
        )  # fmt: skip
        self._peers.listen(
            {**self._management.answerers, SERIES: lambda _: metrics_answer(self._process_id, self.series())}
        )
        self._ending = threading.Event()
        self.http = HttpServer(
            self, self._loop, host=host, port=port, tls=tls, max_connections=connections, on_closed=on_closed,
            on_refused=self._metrics.on_client_refused,
        )  # fmt: skip
        self._fixed: dict[str, tuple[str, Callable[[Request], Response]]] = {
            "/v2": ("GET", lambda _: json_response(200, {**oip.server_metadata(), "extensions": EXTENSIONS})),
            "/v2/health/live": ("GET", lambda _: Response()),
            "/v2/health/ready": ("GET", lambda _: Response(503 if self._ending.is_set() else 200)),
            "/v2/edgesplit/probe": ("POST", lambda _: Response()),
        }

    @property
    def port(self) -> int:
        """The port that it listens on."""
        return self.http.port

    @property
    def url(self) -> str:
        """The URL under which clients reach the server."""
        return self.http.url

    def start(self) -> None:
        """Listen and serve; UsageError if the address is unavailable."""
        self.http.start()
        self.start_serving()

    def start_serving(self) -> None:
        """Serve handed-over connections, and warm up releases as they arrive, without listening."""
        self._loop.start()
        self._warm_up.start()

    def confine(self, network_needed_for: str = "") -> None:
        """Confine this process for good, once its sockets listen. `network_needed_for`: see
        `confine_serving_process`."""
        self._keeps_network = confine_serving_process(network_needed_for)
        if self._keeps_network:
            log.warning("this process keeps its network: %s", self._keeps_network)

    def stop(self, drain_s: float = 5.0) -> None:
        """Report not ready, stop accepting, finish running requests for `drain_s` seconds, close."""
        self.set_not_ready()
        self._warm_up.stop()
        if self._measuring is not None:
            self._measuring.stop()
        self.http.stop(drain_s)
        self._loop.stop(STOP_S)
        if self._next_tier is not None:
            self._next_tier.close()

    def set_not_ready(self) -> None:
        """Report not ready from now on, while still serving, because the server will stop soon."""
        self._ending.set()

    def serve_peer(self, sock: socket.socket) -> None:
        """Batch the requests that a peer process sends by `sock` with this process's own."""
        self._batcher.serve(sock)

    def longest_run_s(self) -> float:
        """Seconds since the oldest active run started: detects a model that never returns."""
        return self.scheduler.longest_run_s()

    def _on_turn_end(self) -> None:
        """Loop callback at the end of a turn: execute what may run now, in this thread or another. Leader only."""
        while (run := self.scheduler.next_run()) is not None:
            # docs/decisions/0041. The leader executes a run itself only if nothing else could start beside it (all
            # slots are taken) and the run is expected to be short. Otherwise another thread becomes the leader first,
            # and this one executes the run: transferring leadership is cheaper than transferring the run.
            keeps_leading = self.scheduler.is_full() and is_short(run.jobs[0].run_times, SHORT_RUN_S)
            if self.scheduler.waiting:
                self._loop.call_soon(lambda: None)  # makes the leader come here again before it polls
            if self._loop.is_leader and not keeps_leading:
                self._loop.transfer_leadership()
            self.scheduler.execute(run)
            if self._loop.is_leader:
                return  # still the leader: read what arrived meanwhile before the next run
        # A run that is held back for returning clients must start when they are given up.
        if self.scheduler.recheck_at < math.inf and self._loop.is_leader:
            self._loop.wake_by(self.scheduler.recheck_at)

    def _on_timer(self, now: float) -> float:
        """Timer callback: enforce deadlines; returns when to check again. Leader only."""
        remote_at = math.inf if self._remote_batcher is None else self._remote_batcher.on_timer(now)
        return min(self.scheduler.on_timer(now), self._batcher.on_timer(now), remote_at, self.http.on_timer(now))

    def route(self, parsed: ParsedHead) -> Route | None:
        """The route of inference requests; None for all others."""
        match = _MODEL.fullmatch(parsed.path.rstrip("/"))
        if match is None or match["verb"] != "/infer" or parsed.head.method != "POST":
            return None
        return route_of(match["model"], parsed) if match["version"] in (None, VERSION) else None

    def check_head(self, parsed: ParsedHead, route: object, peer: str | None) -> None:
        """Judge a request by route, method, role and length, before its body is let in: raises Refused or EdgeError."""
        if isinstance(route, Route):
            if parsed.length > LIMITS.http_body_step_bytes and self._next_tier is None:
                self._check_length(route.name, parsed.length, peer)
            return
        path, method = parsed.path.rstrip("/"), parsed.head.method
        match = _MODEL.fullmatch(path)
        if path in self._fixed:
            allowed = self._fixed[path][0]
        elif match is None or match["model"] == "stats":
            if not self._management.check_head(method, path, peer):
                raise NotFound(f"no such path: {parsed.path[:200]}")
            allowed = method
        elif match["verb"] == "/infer" and method == "POST":
            raise NotFound(f"model {match['model'][:200]!r} has no version {(match['version'] or '')[:80]!r}")
        else:
            allowed = "POST" if match["verb"] == "/infer" else "GET"
        if method != allowed:
            raise Refused(405, f"use {allowed} here")
        if parsed.length > MAX_CONTROL_BODY_BYTES:
            raise Refused(413, f"a body of {parsed.length} bytes, at most {MAX_CONTROL_BODY_BYTES} here")

    def _check_length(self, name: str, length: int, peer: str | None) -> None:
        """Refuse a large body that is no input of the model, where that is known without waiting. Raises Refused or
        EdgeError."""
        self._permissions.check_model(name, peer)
        model = self.models.open_model(name)
        most = None if model is None else model.max_body_bytes
        if most is not None and length > most:
            raise Refused(413, f"a body of {length} bytes, at most {most} for this model")

    def is_revoked(self, serial: int) -> bool:
        """Whether the certificate with this serial number was revoked."""
        return serial in self._revoked

    def handle(self, request: Request, route: object, arrival_stats: ArrivalStats, answer: Answer) -> None:
        """Have the request answered. Called by the leader, so slow work is passed to other threads."""
        if isinstance(route, Route) and request.peer_serial not in self._revoked:
            self._pipeline.begin(request, route, arrival_stats, answer)
        elif request.path.rstrip("/") in self._fixed:
            answer(call_handler(self._answer, request))
        else:
            self._loop.run_in_thread(lambda: answer(call_handler(self._answer, request)))

    def _answer(self, request: Request) -> Response:
        """The response, with headers for the time spent here and the load."""
        began = perf_counter()
        try:
            if request.peer_serial in self._revoked:
                self._metrics.on_refused()
                return error_response(403, "this certificate was revoked")
            response = self._route(request)
        except EdgeError as error:
            response = error_to_response(error)
        server_headers = self._pipeline.server_headers(began)
        return Response(
            response.status, {**response.headers, **server_headers}, response.body,
            after=self._pipeline.flush_statistics,
        )  # fmt: skip

    def _route(self, request: Request) -> Response:
        path = request.path.rstrip("/")
        if path in self._fixed:
            method, handle = self._fixed[path]
            return handle(request) if request.method == method else _not_allowed(method)
        match = _MODEL.fullmatch(path)
        if match is None or match["model"] == "stats":
            managed = self._management.answer(request, path)
            if managed is None:
                raise NotFound(f"no such path: {request.path[:200]}")
            return managed
        verb, method = match["verb"], "POST" if match["verb"] == "/infer" else "GET"
        if request.method != method:
            return _not_allowed(method)
        if match["version"] not in (None, VERSION):
            raise NotFound(f"model {match['model'][:200]!r} has no version {match['version'][:80]!r}")
        self._permissions.check_model(match["model"], request.peer)
        return self._describe_model(self.models.model(match["model"]), verb)

    def _describe_model(self, model: RemoteModel, verb: str | None) -> Response:
        if verb == "/ready":
            model.half.load()
            return Response()
        if verb == "/config":
            return json_response(200, oip.model_config(model.name, model.wire_inputs, model.outputs))
        return json_response(200, oip.model_metadata(model.name, [VERSION], model.wire_inputs, model.outputs))

    def _on_requested(self, half: RemoteHalf) -> None:
        """Have the half's batching benefit measured after its first request."""
        if self._measuring is not None and half.claim_measurement():
            self._measuring.submit(partial(half.measure, self._clock))

    def series(self) -> list[Series]:
        """The metrics of this process for /metrics."""
        models = self.models.models()
        return [
            *self._metrics.registry.series(),
            gauge_series(metrics.OFFLOAD_INFO, 1.0, edgesplit.__version__),
            gauge_series(metrics.OFFLOAD_RUNNING, self.scheduler.running),
            gauge_series(metrics.OFFLOAD_WAITING, self.scheduler.waiting),
            gauge_series(metrics.OFFLOAD_LOAD, self.scheduler.load),
            gauge_series(metrics.OFFLOAD_LOADED_BYTES, self._cache.bytes),
            gauge_series(metrics.OFFLOAD_LOADED_MODELS, sum(models.values())),
            gauge_series(metrics.OFFLOAD_PROCESSES, 1),
        ]


def _not_allowed(method: str) -> Response:
    return error_response(405, f"use {method} here", {"allow": method})
