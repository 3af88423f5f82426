"""An engine and a real offload server of one handmade release, for tests of what is seen of a request on both sides."""

from __future__ import annotations

import http.client
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from prometheus_client.parser import text_string_to_metric_families

from edgesplit.http1.server import Request, Response, Server
from edgesplit.observability.tracing import TRACING_OFF, Tracer
from edgesplit.offload_client.pool import OffloadClient
from edgesplit.oip.options import InferOptions
from edgesplit.plan import Hop
from edgesplit.runtime.dispatch import DispatchingRuntime
from edgesplit.runtime.loader import load_slices
from edgesplit_agent.releases.loaded_release import LoadedRelease
from edgesplit_agent.serving.engine import Engine, Settings
from edgesplit_agent.telemetry.request_record import RequestObserver
from edgesplit_agent.worker.host import InProcess
from edgesplit_offload.inference.gateway_relay import NextTier
from edgesplit_offload.server import OffloadServer
from support.handmade_release import DEVICE_CLASS, DIGEST, HandmadeRelease

INPUTS = {"a": np.ones((1, 4), np.float32), "b": np.ones((1, 4), np.float32)}
MODEL = "handmade"
NO_HEDGE = InferOptions(hedge="never")
"""So that a busy machine does not let the local tail win."""
TIERS = ("device", "edge", "cloud")


@contextmanager
def both_sides(
    folder: Path,
    *,
    row: str = "cut-1",
    device: Tracer = TRACING_OFF,
    server: Tracer = TRACING_OFF,
    observer: RequestObserver | None = None,
) -> Iterator[tuple[Engine, OffloadServer]]:
    """The device knows that row only, so each request is cut there and finished by the server."""
    release = HandmadeRelease(folder)
    offload = OffloadServer(folder, b"", open_release=release.open, tracer=server)
    offload.start()
    engine = Engine(
        DEVICE_CLASS,
        OffloadClient(offload.url),
        settings=Settings(idle_probe_s=3600.0, hedge="never"),
        tracer=device,
    )
    if observer is not None:
        engine.observe(observer)
    plan = release.manifest.plans[DEVICE_CLASS]
    only = msgspec.structs.replace(plan, rows=tuple(one for one in plan.rows if one.name == row))
    programs = load_slices(release.manifest, release.slice_folder, DispatchingRuntime(threads=1))
    engine.serve(MODEL, LoadedRelease(DIGEST, release.manifest, only, InProcess(programs)))
    engine.start()
    try:
        yield engine, offload
    finally:
        engine.stop()
        offload.stop(1.0)


class Collector:
    """What an OpenTelemetry collector receives over OTLP/HTTP, decoded: (service, span)."""

    def __init__(self) -> None:
        self.received: list[tuple[str, Any]] = []
        self._lock = threading.Lock()
        self.server = Server(self._take)
        self.server.start()

    def _take(self, request: Request) -> Response:
        sent = ExportTraceServiceRequest.FromString(bytes(request.body))
        with self._lock:
            for resource in sent.resource_spans:
                named = {one.key: one.value.string_value for one in resource.resource.attributes}
                for scope in resource.scope_spans:
                    self.received += [(named["service.name"], span) for span in scope.spans]
        return Response(200, {"content-type": "application/x-protobuf"}, [b""])


def asked(port: int, path: str, method: str = "GET", **headers: str) -> tuple[int, bytes]:
    """Status and body of a request to this machine."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    try:
        connection.request(method, path, headers=headers)
        response = connection.getresponse()
        return response.status, response.read()
    finally:
        connection.close()


@contextmanager
def three_tiers(folder: Path, *, device: Tracer, edge: Tracer, cloud: Tracer) -> Iterator[Engine]:
    """The device sends everything to a gateway's server, which runs one slice and asks the cloud for the other."""
    release = HandmadeRelease(folder)
    plan = release.manifest.plans[DEVICE_CLASS]
    beyond = Hop(tier="cloud", remote=("s02-tail",), sends=("mid",), receives=("out", "same"))
    remote = next(row for row in plan.rows if row.name == "remote")
    only = msgspec.structs.replace(plan, rows=(msgspec.structs.replace(remote, hops=(beyond,)),), tiers=TIERS)
    release.manifest = msgspec.structs.replace(release.manifest, plans={DEVICE_CLASS: only})
    far = OffloadServer(folder, b"", open_release=release.open, tracer=cloud)
    far.start()
    near = OffloadServer(
        folder, b"", open_release=release.open, tracer=edge, next_tier=NextTier(OffloadClient(far.url))
    )
    near.start()
    engine = Engine(DEVICE_CLASS, OffloadClient(near.url), settings=Settings(idle_probe_s=3600.0), tracer=device)
    engine.serve(MODEL, LoadedRelease(DIGEST, release.manifest, only, InProcess({})))
    engine.start()
    try:
        yield engine
    finally:
        engine.stop()
        near.stop(1.0)
        far.stop(1.0)


Samples = dict[tuple[str, tuple[tuple[str, str], ...]], float]


def samples(page: bytes | str) -> Samples:
    """What a page says, by name and labels, as Prometheus' own parser reads it."""
    text = page.decode() if isinstance(page, bytes) else page
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def value(found: Samples, name: str, **labels: str) -> float:
    """One sample's value; 0 where there is none."""
    return found.get((name, tuple(sorted(labels.items()))), 0.0)
