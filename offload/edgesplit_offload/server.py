"""The offload server: the Open Inference Protocol over HTTP for the far halves of releases.

Promises: a request names its release, so halves of different releases never meet; tensors are checked against the
manifest before anything runs; a bounded number runs at once and waits, the rest hears 503 (429 where one client asks
for more than its share) with Retry-After; work for a client that has gone, or that cannot be done in time, is not
begun. Requests for one model share a run where that was measured to gain (`gain`). Each response tells the seconds
spent in here (`edgesplit-seconds`), those of them in the queue (`edgesplit-queue-seconds`), and how much others
stretch a run (`edgesplit-load`, at least 1). Leaves to others: what operators ask (`management`), several processes
(`supervisor`), the next tier (`onward`). tests/conformance runs Triton's own client against it.
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
from time import monotonic, perf_counter
from typing import cast

import edgesplit
from edgesplit.errors import EdgeError, NotFound
from edgesplit.http1.content_coding import decoded
from edgesplit.http1.head import Asked as AskedHead
from edgesplit.http1.server import Request, Response, answer_of, error_response, json_response
from edgesplit.observability import metrics
from edgesplit.observability.phases import DECODE, ENCODE, HOP, LOAD, QUEUE, RUN
from edgesplit.observability.registry import Series, gauge
from edgesplit.observability.tracing import OFF, Tracer
from edgesplit.oip import protocol as oip
from edgesplit.runtime import Runtime
from edgesplit.runtime.dispatch import EngineByFormat
from edgesplit_offload.batching.batcher import Gathering
from edgesplit_offload.batching.remote_batcher import Elsewhere
from edgesplit_offload.frontend.event_loop import Loop
from edgesplit_offload.frontend.server import Front
from edgesplit_offload.inference.gateway_relay import NOT_HERE, Asked, Finished, Onward, Tensors, deadline_left_s
from edgesplit_offload.inference.management_api import Management
from edgesplit_offload.inference.pipeline import (
    QUEUE_HEADER,
    Answer,
    Inferring,
    Route,
    encoded_answer,
    error_answer,
    given,
    route_of,
)
from edgesplit_offload.models.batch_benefit import CLOCKS, Background
from edgesplit_offload.models.remote_half import FarHalf, OpenRelease
from edgesplit_offload.models.repository import VERSION, Opener, RemoteModel, Shelf
from edgesplit_offload.models.slice_cache import Memory
from edgesplit_offload.models.warm_up import Warming
from edgesplit_offload.observability.request_metrics import RELAYED, Visit, Visits
from edgesplit_offload.observability.statistics import Counts
from edgesplit_offload.processes.metric_totals import told
from edgesplit_offload.processes.peers import Alone, Siblings
from edgesplit_offload.scheduling.arrivals import Habit
from edgesplit_offload.scheduling.queue import Job
from edgesplit_offload.scheduling.scheduler import Turns, is_short

log = logging.getLogger(__name__)

WAITING_PER_RUN = 16
SHORT_RUN_S = 0.005
"""What is not expected to take longer the leader runs by itself, where nothing else could begin meanwhile, and nobody
is to be read who would share the next run."""
STACK_THREADS = 4
"""Of a run of several requests, in the process that gathers them: on four cores one such run is on at a time, and all
that come meanwhile share the next."""
STOP_S = 5.0
EXTENSIONS = ("binary_tensor_data", "model_configuration", "model_repository", "statistics", "trace", "logging")
SERIES = "series"
_MODEL = re.compile(r"/v2/models/(?P<model>[^/]+)(?:/versions/(?P<version>[^/]+))?(?P<verb>/ready|/config|/infer)?")


def releases_in(folder: Path, bootstrap_root: bytes) -> Opener:
    """Opens releases under `folder`, believing what leads from `bootstrap_root` to them."""

    def open_(digest: str) -> OpenRelease:
        from edgesplit.crypto.key_file import read_keys
        from edgesplit.crypto.key_wrapping import fitting
        from edgesplit.crypto.slice_encryption import needed_keys
        from edgesplit.release.manifest import remote_slices
        from edgesplit.release_store import open_release

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
        wide: Runtime | None = None,
        threads: int = 1,
        at_once: int | None = None,
        waiting: int | None = None,
        memory: int | None = None,
        batching: bool = False,
        connections: int = 256,
        revoked: Container[object] = frozenset(),
        siblings: Siblings | None = None,
        elsewhere: Elsewhere | None = None,
        on_closed: Callable[[], None] = lambda: None,
        tracer: Tracer = OFF,
        onward: Onward | None = None,
    ) -> None:
        """`onward`: of a gateway, the next tier. `runtime`: instead of each slice's engine with `threads`. `wide`: the
        same with STACK_THREADS, of one process among several, for requests that run together. `elsewhere`:
        of one process among several, who gathers what had better run together."""
        self._onward = onward
        self._revoked = revoked
        self._visits = Visits(tracer)
        self._mark = uuid.uuid4().hex
        self._counts = Counts()
        self._memory = Memory(memory)
        self._shelf = Shelf(
            open_release or releases_in(folder, bootstrap_root), runtime or EngineByFormat(threads), self._memory,
            wide=wide,
        )  # fmt: skip
        cores = max(1, (os.cpu_count() or 1) // threads)
        runs = at_once or cores
        self._loop = Loop(self._run, self._look, lambda left: self._turns.is_enough(left, SHORT_RUN_S))
        self._turns = Turns(
            runs, WAITING_PER_RUN * runs if waiting is None else waiting,
            cores // (1 if wide is None else STACK_THREADS) if elsewhere else runs,
            self._loop.lend, self._loop.away,
        )  # fmt: skip
        self._gathering = Gathering(self._shelf, self._turns, self._loop, self._asked)
        self._elsewhere = elsewhere
        if elsewhere is not None:
            elsewhere.serve(self._loop, self._turns.told_load)
        self._inferring = Inferring(
            self._shelf, self._turns, self._loop, elsewhere, (self._visits, self._counts), self._asked
        )
        self._measuring = Background() if batching else None
        self._clock = CLOCKS[threads == 1]
        self._warming = Warming(folder, self._shelf)
        self._siblings = siblings or Alone()
        self._management = Management(self._shelf, self._counts, self._siblings, mutual=tls is not None)
        self._siblings.listen({**self._management.answerers, SERIES: lambda _: told(self._mark, self.series())})
        self._ending = threading.Event()
        self.http = Front(
            self, self._loop, host=host, port=port, tls=tls, max_connections=connections, on_closed=on_closed
        )
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
        """Where clients reach it."""
        return self.http.url

    def start(self) -> None:
        """Listen; UsageError where the address cannot be had."""
        self.http.start()
        self.look_out()

    def look_out(self) -> None:
        """Serve what is handed over, and get releases ready as they come."""
        self._loop.start()
        self._warming.start()

    def stop(self, drain_s: float = 5.0) -> None:
        """Not ready any more; accept no more, finish what runs, close."""
        self.not_ready()
        self._warming.stop()
        if self._measuring is not None:
            self._measuring.stop()
        self.http.stop(drain_s)
        self._loop.stop(STOP_S)
        if self._onward is not None:
            self._onward.close()

    def not_ready(self) -> None:
        """Say so from now on, and go on serving: it will end soon."""
        self._ending.set()

    def gather(self, sock: socket.socket) -> None:
        """Run what another process of this server reads, and sends by `sock`, together with our own."""
        self._gathering.serve(sock)

    def longest_run_s(self) -> float:
        """For how long the oldest run has been running: a model that never returns shows here."""
        return self._turns.longest_s()

    def _run(self) -> None:
        """All that was ready has been read: do what may run now, this thread or another. By the leader."""
        while (run := self._turns.next_run()) is not None:
            stays = self._turns.is_full() and is_short(run.members[0].pace, SHORT_RUN_S)
            if self._turns.waiting:
                self._loop.post(_nothing)  # whoever leads then looks here again before it waits
            if self._loop.is_mine and not stays:
                self._loop.hand_over()
            self._turns.do(run)
            if self._loop.is_mine:
                return  # what came meanwhile is read before the next
        if self._turns.begins_by < math.inf and self._loop.is_mine:
            self._loop.look_by(self._turns.begins_by)

    def _look(self, now: float) -> float:
        """Whose time is up? The moment of the next look. By the leader."""
        there = math.inf if self._elsewhere is None else self._elsewhere.look(now)
        return min(self._turns.look(now), self._gathering.look(now), there, self.http.look(now))

    def route(self, asked: AskedHead) -> Route | None:
        """Of requests for inference that this server finishes by itself."""
        found = _MODEL.fullmatch(asked.path.rstrip("/"))
        if found is None or found["verb"] != "/infer" or asked.head.method != "POST" or self._onward is not None:
            return None
        return route_of(found["model"], asked) if found["version"] in (None, VERSION) else None

    def handle(self, request: Request, route: object, habit: Habit, answer: Answer) -> None:
        """Have it answered. By the leader, so what may take long is another thread's."""
        if isinstance(route, Route) and request.peer_serial not in self._revoked:
            self._inferring.begin(request, route, habit, answer)
        elif request.path.rstrip("/") in self._fixed:
            answer(answer_of(self._answer, request))
        else:
            self._loop.lend(lambda: answer(answer_of(self._answer, request)))

    def _answer(self, request: Request) -> Response:
        """The response, with what it took in here and how loaded that is."""
        began = perf_counter()
        try:
            if request.peer_serial in self._revoked:
                self._visits.refused()
                return error_response(403, "this certificate was revoked")
            response = self._route(request)
        except EdgeError as error:
            response = error_answer(error)
        told = self._inferring.told(began)
        return Response(response.status, {**response.headers, **told}, response.body, after=self._inferring.add_up)

    def _route(self, request: Request) -> Response:
        path = request.path.rstrip("/")
        if path in self._fixed:
            method, handle = self._fixed[path]
            return handle(request) if request.method == method else _not_allowed(method)
        found = _MODEL.fullmatch(path)
        if found is None or found["model"] == "stats":
            managed = self._management.answer(request, path)
            if managed is None:
                raise NotFound(f"nothing is at {request.path[:200]}")
            return managed
        verb, method = found["verb"], "POST" if found["verb"] == "/infer" else "GET"
        if request.method != method:
            return _not_allowed(method)
        if found["version"] not in (None, VERSION):
            raise NotFound(f"model {found['model'][:200]!r} has no version {found['version'][:80]!r}")
        if verb == "/infer":
            assert self._onward is not None, "else it is not asked here"
            with self._visits.visit(request) as visit:
                return self._infer_or_relay(request, found["model"], self._onward, visit)
        return self._of_model(self._shelf.model(found["model"]), verb)

    def _of_model(self, model: RemoteModel, verb: str | None) -> Response:
        if verb == "/ready":
            model.half.load()
            return Response()
        if verb == "/config":
            return json_response(200, oip.model_config(model.name, model.wire_inputs, model.outputs))
        return json_response(200, oip.model_metadata(model.name, [VERSION], model.wire_inputs, model.outputs))

    def _infer_or_relay(self, request: Request, name: str, onward: Onward, visit: Visit) -> Response:
        """A gateway's answer: by itself, by itself and the next tier, or the next tier's as it is."""
        try:
            model = self._shelf.model(name)
            if model.through_gateway:
                return self._infer(request, model, visit, onward)
        except NOT_HERE as error:
            log.info("%s is relayed: %s", name[:200], error)
        visit.model, visit.row = RELAYED, ""
        body = decoded(request.body, request.headers.get("content-encoding", ""))
        with visit.timeline.phase(HOP):
            return onward.relay(request, deadline_left_s(request, body))

    def _infer(self, request: Request, model: RemoteModel, visit: Visit, onward: Onward) -> Response:
        """The row's answers, by the slices here and the next tier's."""
        arrived = perf_counter()
        visit.model, visit.row = model.served, model.row.name
        try:
            response = self._inferred(request, model, visit, onward)
        except Exception:
            self._counts.failed(model.name, perf_counter() - arrived)
            raise
        took_s = perf_counter() - arrived
        self._counts.answered(model.name, visit.timeline.seconds(), took_s, visit.batch, visit.leads)
        self._asked(model.half)
        return response

    def _asked(self, half: FarHalf) -> None:
        """It was; the first time it is measured, when there is time."""
        if self._measuring is not None and half.first_asked():
            self._measuring.ask(partial(half.measure, self._clock))

    def _inferred(self, request: Request, model: RemoteModel, visit: Visit, onward: Onward) -> Response:
        arrived, began, timeline = monotonic(), perf_counter(), visit.timeline
        try:
            wanted, inputs = given(request, model)
        finally:
            timeline.since(DECODE, began)
        patience_s = oip.timeout_s(wanted.parameters)
        deadline = None if patience_s is None else arrived + patience_s
        asked = Asked(wanted.id, inputs, deadline, request.closed, timeline)
        run = partial(self._taken, asked, request.peer, visit)
        finished = onward.finish(model, asked, run) if model.row.hops else Finished(run(model, inputs), {})
        began = perf_counter()
        headers, buffers = encoded_answer(model, wanted, finished.outputs, request.headers.get("accept-encoding", ""))
        timeline.since(ENCODE, began)
        visit.sent = sum(map(len, buffers))
        queue = {QUEUE_HEADER: f"{timeline.total(QUEUE):.6f}"}
        return Response(200, {**headers, **queue, **finished.headers, **visit.headers()}, buffers)

    def _taken(self, asked: Asked, client: str | None, visit: Visit, part: RemoteModel, inputs: Tensors) -> Tensors:
        """What a part of a row gives, when its turn has come."""
        half = part.half
        job = Job(inputs, half.run, half.pace, client, asked.deadline, asked.is_gone)
        try:
            if not half.is_loaded:
                with asked.timeline.phase(LOAD):
                    half.load()
            return cast(Tensors, self._turns.take(job))
        finally:
            visit.batch, visit.leads = max(1, job.together), job.leads
            ran = job.arrived + job.queue_s
            asked.timeline.add(QUEUE, job.arrived, ran if job.together else perf_counter())
            if job.together:
                asked.timeline.add(RUN, ran, ran + job.run_s)

    def series(self) -> list[Series]:
        """What this process counted, and how it is now, for /metrics."""
        models = self._shelf.models()
        return [
            *self._visits.ledger.series(),
            gauge(metrics.OFFLOAD_INFO, 1.0, edgesplit.__version__),
            gauge(metrics.OFFLOAD_RUNNING, self._turns.running),
            gauge(metrics.OFFLOAD_WAITING, self._turns.waiting),
            gauge(metrics.OFFLOAD_LOAD, self._turns.load),
            gauge(metrics.OFFLOAD_LOADED_BYTES, self._memory.bytes),
            gauge(metrics.OFFLOAD_LOADED_MODELS, sum(models.values())),
            gauge(metrics.OFFLOAD_PROCESSES, 1),
        ]


def _nothing() -> None:
    """A turn is taken for it all the same."""


def _not_allowed(method: str) -> Response:
    return error_response(405, f"use {method} here", {"allow": method})
