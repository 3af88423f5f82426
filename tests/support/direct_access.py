"""An agent's engine and endpoint on a Unix socket over a real worker, with what they were told of each answer; and
lanes whose other end is the test's."""

from __future__ import annotations

import contextlib
import gc
import os
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from onnx import NodeProto

from edgesplit.client.direct.grant import LANE_PATH, READY, REQUEST, Grant, LaneRequest, layout_tensors
from edgesplit.http1.server import Request, Response, Server, error_response, json_response
from edgesplit.oip import protocol as oip
from edgesplit.oip.report import Report
from edgesplit.release.manifest import TensorSpec
from edgesplit.runtime import Tensor
from edgesplit.shared_memory.segment import Segment
from edgesplit_agent.releases.loaded_release import LoadedRelease
from edgesplit_agent.serving.engine import Engine
from edgesplit_agent.serving.http_endpoint import Endpoint
from edgesplit_agent.serving.metrics import RequestMetrics
from edgesplit_agent.telemetry.request_record import RequestRecord
from edgesplit_agent.worker.direct.broker import LaneResults, LaneSpec
from edgesplit_agent.worker.supervised_host import SupervisedHost
from support.agent_engine import CLASS, DIGEST, X, Y
from support.workers import BOUNDS, PLAIN, Shelf

OTHER_DIGEST = "b" * 64


@dataclass
class DirectAccessHarness:
    """Serves model `one`. `asked`: paths that applications sent to the endpoint."""

    folder: Path
    asked: list[str] = field(default_factory=list)
    records: list[RequestRecord] = field(default_factory=list)
    lost: list[Exception] = field(default_factory=list)
    hosts: list[SupervisedHost] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.engine = Engine(CLASS, None)
        self.metrics = RequestMetrics()
        self.engine.observe(self.metrics)
        self._up_to_date = self.engine.observe(self)
        self.endpoint = Endpoint(self.engine, dict)
        self.server = Server(self._handle, path=self.folder / "a.sock")
        self.server.start()
        self.url = f"unix://{self.folder / 'a.sock'}"

    def serve(self, nodes: list[NodeProto], digest: str = DIGEST) -> SupervisedHost:
        """Answer by that model from now on."""
        shelf: Any = Shelf(self.folder / digest[:4], nodes)
        shelf.digest = digest
        host = SupervisedHost(shelf, shelf.plan, PLAIN, BOUNDS, on_lost=lambda release, error: self.lost.append(error))
        self.hosts.append(host)
        self.engine.serve("one", LoadedRelease(digest, shelf.manifest, shelf.plan, host))
        return host

    @property
    def inferences(self) -> int:
        """Requests that came to the endpoint."""
        return sum(path.endswith("/infer") for path in self.asked)

    @property
    def wishes(self) -> int:
        """Lanes that were asked for."""
        return self.asked.count(LANE_PATH)

    def finished(self, record: RequestRecord) -> None:
        self.records.append(record)

    @property
    def outcomes(self) -> list[tuple[str, Report | Exception]]:
        """Release and outcome of each request that observers were told of, lanes' and others."""
        records = self._up_to_date().records
        return [(record.release.digest, record.outcome) for record in records if record.outcome is not None]

    @property
    def device_runs(self) -> list[Exception | None]:
        """Results of the runs of the releases' own slices."""
        return [error for record in self._up_to_date().records for error in record.device_runs]

    def answered(self) -> int:
        """Number of answers that observers were told of."""
        return sum(isinstance(outcome, Report) for _, outcome in self.outcomes)

    def _handle(self, request: Request) -> Response:
        self.asked.append(request.path)
        return self.endpoint(request)

    def stop(self) -> None:
        self.server.stop(0.5)
        self.engine.stop()
        self.endpoint.close()
        for host in self.hosts:
            host.close()


@contextmanager
def lane_world(folder: Path, nodes: list[NodeProto]) -> Iterator[DirectAccessHarness]:
    """With that model."""
    own = DirectAccessHarness(folder)
    try:
        own.serve(nodes)
        yield own
    finally:
        own.stop()


def grant(*, inputs: tuple[TensorSpec, ...] = (X,), outputs: tuple[TensorSpec, ...] = (Y,)) -> Grant:
    """What a client is granted."""
    placed = layout_tensors(inputs, 0)
    assert placed is not None
    given = layout_tensors(outputs, placed[1])
    assert given is not None
    return Grant(
        release=DIGEST, row="local", inputs=placed[0], outputs=given[0], outputs_offset=placed[1], bytes=given[1]
    )  # fmt: skip


def order(told: Callable[[LaneResults], None] = lambda notes: None, **kind: Any) -> LaneSpec:
    """The same for the worker."""
    one = grant(**kind)
    return LaneSpec(("s",), one.inputs, one.outputs, one.outputs_offset, one.bytes, 0.01, 0.01, told)


def asking(number: int, left_s: float = 10.0) -> bytes:
    """A request."""
    return REQUEST.pack(number, int(left_s * 1e6))


class GrantingAgent:
    """Doubles x itself; grants lanes to what `on_lane` does with their requests: the worker's end of the socket, and
    the request that came."""

    def __init__(self, folder: Path, on_lane: Callable[[socket.socket, bytes], None]) -> None:
        self.asked: list[str] = []
        self.may_answer = threading.Event()
        self.may_answer.set()
        self._on_lane = on_lane
        self._ends: list[socket.socket] = []
        self.server = Server(self._handle, path=folder / "g.sock")
        self.server.start()
        self.url = f"unix://{folder / 'g.sock'}"

    def _handle(self, request: Request) -> Response:
        self.asked.append(request.path)
        if request.path != LANE_PATH:
            self.may_answer.wait(30)
            return _doubled(request)
        assert request.connection_peer is not None
        descriptor = request.connection_peer.received_fd()
        assert descriptor is not None
        wish = msgspec.json.decode(request.body, type=LaneRequest)
        sock = socket.socket(fileno=descriptor)
        self._ends.append(sock)
        granted = grant()
        segment = Segment.create(granted.bytes)
        socket.send_fds(sock, [READY], [segment.descriptor] if wish.shared else [])
        segment.close()
        threading.Thread(target=self._serve, args=(sock,), daemon=True).start()
        return json_response(200, granted)

    def _serve(self, sock: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while raw := sock.recv(65_536):
                self._on_lane(sock, raw)

    def stop(self) -> None:
        self.may_answer.set()
        for one in self._ends:
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
            one.close()
        self.server.stop(0.5)


def _doubled(request: Request) -> Response:
    if not request.path.endswith("/infer"):
        return error_response(404, "no such path")
    asked = oip.decode_request(request.body, oip.header_length(request.headers))
    y: Tensor = np.asarray(asked.inputs["x"]) * np.float32(2)
    body, length = oip.encode_response(oip.InferResponse(model="one", outputs={"y": y}, id=asked.id))
    return Response(200, {oip.HEADER_LENGTH: str(length)}, body)


def descriptors() -> int:
    """That this process has open, without those that nobody holds any more."""
    gc.collect()
    return len(os.listdir("/proc/self/fd"))
