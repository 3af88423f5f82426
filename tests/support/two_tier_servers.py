"""Two real offload servers of one release, the gateway's and the cloud's, and a proxy between them for faults."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from time import monotonic

import msgspec
import zstandard

from edgesplit.client.client import Connection, Reply
from edgesplit.errors import NotFound, TrustError
from edgesplit.http1.server import Request, Response, Server, error_response
from edgesplit.offload_client.pool import HOP_CAUSE_HEADER, CancellableCall, OffloadClient, OffloadFailure
from edgesplit.oip import protocol as oip
from edgesplit.plan import Hop, Row
from edgesplit.runtime import Tensor
from edgesplit_offload.inference.gateway_relay import NextTier
from edgesplit_offload.server import OffloadServer
from support.handmade_release import DEVICE_CLASS, DIGEST, MID, HandmadeRelease

A, B = MID, 2 * MID
OUT = (2 * (A + B)).ravel().tolist()
HEAD, TAIL = "s01-head", "s02-tail"
ENDS = ("out", "same")
PATIENCE_S = 30.0
Script = Callable[[Request, Response], Response]


def _row(name: str, **hop: object) -> Row:
    """All beyond the device; beyond the gateway what `hop` says."""
    hops = (msgspec.convert({"tier": "cloud", "receives": ENDS, **hop}, Hop),) if hop else ()
    return Row(name=name, remote=(HEAD, TAIL), sends=("a", "b"), receives=ENDS, hops=hops)


ROWS = (
    _row("edge"),
    _row("split", remote=(TAIL,), sends=("mid",)),
    _row("lossy", remote=(TAIL,), sends=("mid",), codecs={"mid": "int8"}, compress=True),
    _row("cloud", remote=(HEAD, TAIL), sends=("a", "b")),
)


def model(row: str) -> str:
    return oip.remote_name(DIGEST, DEVICE_CLASS, row)


class Tier(HandmadeRelease):
    """The release as one tier has it: `spoilt` slices are not what was signed."""

    def __init__(self, folder: Path, tiers: tuple[str, ...] = ("device", "edge", "cloud")) -> None:
        super().__init__(folder)
        one = self.manifest.plans[DEVICE_CLASS]
        plans = {DEVICE_CLASS: msgspec.structs.replace(one, rows=(*one.rows, *ROWS), tiers=tiers)}
        self.manifest = msgspec.structs.replace(self.manifest, plans=plans)
        self.spoilt: set[str] = set()
        self.is_here = True

    def slice_folder(self, name: str) -> Path:
        if name in self.spoilt:
            raise TrustError(f"{name} is not what was signed")
        return super().slice_folder(name)

    def open(self, digest: str) -> HandmadeRelease:
        if not self.is_here:
            raise NotFound(f"release {digest[:12]} is not here")
        return super().open(digest)


class CloudProxy:
    """A proxy between gateway and cloud that forwards requests and lets a script change the answer."""

    def __init__(self, cloud: OffloadServer) -> None:
        self._cloud = OffloadClient(cloud.url)
        self.script: Script = lambda request, good: good
        self.requests: list[Request] = []
        self.held = threading.Event()
        self.let_go = threading.Event()
        self._server = Server(self._handle)
        self._server.start()
        self.port = self._server.port

    def _handle(self, request: Request) -> Response:
        if request.method == "GET":
            return self.script(request, Response())
        self.requests.append(request)
        kept = ("content-type", "content-encoding", oip.HEADER_LENGTH)
        headers = {name: request.headers[name] for name in kept if name in request.headers}
        got = self._cloud.relay(request.path, headers, request.body, CancellableCall(), PATIENCE_S)
        assert not isinstance(got, OffloadFailure), got
        back = {name: value for name, value in got.headers.items() if name != "content-length"}
        return self.script(request, Response(got.status, back, [got.body]))

    def hold(self, request: Request, good: Response) -> Response:
        """A script: no answer until let go."""
        self.held.set()
        self.let_go.wait(PATIENCE_S)
        return good

    def go(self) -> None:
        """Stop listening."""
        self._server.stop(0.5)

    def stop(self) -> None:
        self.let_go.set()
        self.go()
        self._cloud.close()

    def come_back(self) -> None:
        self._server = Server(self._handle, port=self.port)
        self._server.start()


class GatewayHarness:
    """The gateway's server, a proxy and the cloud's server."""

    def __init__(self, folder: Path) -> None:
        self.here, self.there = Tier(folder / "gateway"), Tier(folder / "cloud")
        self.cloud = OffloadServer(Path("unused"), b"", open_release=self.there.open)
        self.cloud.start()
        self.proxy = CloudProxy(self.cloud)
        self.gateway = self.start_gateway()

    def start_gateway(self) -> OffloadServer:
        next_tier = NextTier(OffloadClient(f"http://127.0.0.1:{self.proxy.port}"))
        server = OffloadServer(Path("unused"), b"", open_release=self.here.open, next_tier=next_tier)
        server.start()
        return server

    def ask(
        self, row: str, *, timeout_s: float = PATIENCE_S, zstd: bool = False, name: str = "one", **more: str
    ) -> Reply:
        body, headers = request_for(timeout_s, zstd=zstd, name=name)
        headers |= more
        with closing(Connection("127.0.0.1", self.gateway.port)) as connection:
            path = f"/v2/models/{model(row)}/infer"
            return connection.exchange("POST", path, deadline=monotonic() + PATIENCE_S, headers=headers, body=[body])

    def cause(self, row: str = "split") -> str:
        """Why the cloud had no part in an answer, which is right all the same; empty where it had."""
        reply = self.ask(row)
        assert outputs(reply)["out"] == OUT
        return reply.headers.get(HOP_CAUSE_HEADER, "")

    def stop(self) -> None:
        self.proxy.let_go.set()
        self.gateway.stop(1.0)
        self.proxy.stop()
        self.cloud.stop(1.0)


def request_for(timeout_s: float, *, zstd: bool = False, name: str = "one") -> tuple[bytes, dict[str, str]]:
    asked = oip.InferRequest({"a": A, "b": B}, id=name, parameters={"timeout": int(timeout_s * 1e6)})
    buffers, length = oip.encode_request(asked)
    body, headers = b"".join(buffers), {oip.HEADER_LENGTH: str(length)}
    if zstd:
        return zstandard.ZstdCompressor().compress(body), {**headers, "content-encoding": "zstd"}
    return body, headers


def outputs(reply: Reply, name: str = "one") -> dict[str, list[float]]:
    assert reply.status == 200, bytes(reply.body)
    response = oip.decode_response(reply.body, oip.header_length(reply.headers))
    assert response.id == name
    return {name: tensor.ravel().tolist() for name, tensor in response.outputs.items()}


def sent(request: Request) -> dict[str, Tensor]:
    body = bytes(request.body)
    if request.headers.get("content-encoding") == "zstd":
        body = zstandard.ZstdDecompressor().decompressobj().decompress(body)
    return dict(oip.decode_request(body, oip.header_length(request.headers)).inputs)


def _edited(good: Response, **changes: object) -> Response:
    """A good answer with something else in it."""
    answer = oip.decode_response(b"".join(good.body), oip.header_length(good.headers))
    fields = {"model": answer.model, "outputs": answer.outputs, "id": answer.id} | changes
    body, length = oip.encode_response(oip.InferResponse(**fields))  # type: ignore[arg-type]
    return Response(200, {oip.HEADER_LENGTH: str(length)}, body)


SPOILT: dict[str, tuple[Script, str]] = {
    "broken": (lambda request, good: error_response(500, "broken"), "server"),
    "busy": (lambda request, good: error_response(503, "busy"), "server"),
    "has not the release": (lambda request, good: error_response(404, "not here"), "server"),
    "does not like the input": (lambda request, good: error_response(400, "no"), "rejected"),
    "another release": (lambda request, good: _edited(good, model=model("split~1").replace("ab", "cd")), "server"),
    "the whole row": (lambda request, good: _edited(good, model=model("split")), "server"),
    "another request": (lambda request, good: _edited(good, id="two"), "server"),
    "an output missing": (lambda request, good: _edited(good, outputs={"out": MID}), "server"),
    "another shape": (lambda request, good: _edited(good, outputs={"out": MID[0], "same": MID}), "server"),
    "cut short": (lambda request, good: Response(200, good.headers, [b"".join(good.body)[:-4]]), "server"),
    "no tensors": (lambda request, good: Response(200, {}, [b"<html>"]), "server"),
}
