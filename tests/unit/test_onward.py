"""A gateway's server and the next tier: two real servers of one release, and a wire between that a test may spoil."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from time import monotonic

import msgspec
import numpy as np
import pytest
import zstandard

from agent_world import eventually
from edgesplit import oip
from edgesplit.client import Connection, Reply
from edgesplit.errors import NotFound, TrustError
from edgesplit.http1 import Request, Response, Server, error_response
from edgesplit.plan import Hop, Row
from edgesplit.release import TensorSpec
from edgesplit.remote import HOP_CAUSE_HEADER, HOP_HEADER, HOP_SERVER_HEADER, Call, Remote, RemoteFailure
from edgesplit.runtime import Tensor
from edgesplit_offload.onward import ALONE_FACTOR, MARGIN_S, Onward, patience_s
from edgesplit_offload.server import OffloadServer
from handmade_release import DEVICE_CLASS, DIGEST, MID, HandmadeRelease

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


class Wire:
    """Stands where the gateway asks the cloud: hands on what comes, and lets a script spoil the answer."""

    def __init__(self, cloud: OffloadServer) -> None:
        self._cloud = Remote(cloud.url)
        self.script: Script = lambda request, good: good
        self.asked: list[Request] = []
        self.held = threading.Event()
        self.let_go = threading.Event()
        self._server = Server(self._handle)
        self._server.start()
        self.port = self._server.port

    def _handle(self, request: Request) -> Response:
        if request.method == "GET":
            return self.script(request, Response())
        self.asked.append(request)
        kept = ("content-type", "content-encoding", oip.HEADER_LENGTH)
        headers = {name: request.headers[name] for name in kept if name in request.headers}
        got = self._cloud.relay(request.path, headers, request.body, Call(), PATIENCE_S)
        assert not isinstance(got, RemoteFailure), got
        back = {name: value for name, value in got.headers.items() if name != "content-length"}
        return self.script(request, Response(got.status, back, [got.body]))

    def hold(self, request: Request, good: Response) -> Response:
        """A script: no answer until let go."""
        self.held.set()
        self.let_go.wait(PATIENCE_S)
        return good

    def go(self) -> None:
        """Listen no more."""
        self._server.stop(0.5)

    def stop(self) -> None:
        self.let_go.set()
        self.go()
        self._cloud.close()

    def come_back(self) -> None:
        self._server = Server(self._handle, port=self.port)
        self._server.start()


class World:
    """A gateway's server, a wire, the cloud's server."""

    def __init__(self, folder: Path) -> None:
        self.here, self.there = Tier(folder / "gateway"), Tier(folder / "cloud")
        self.cloud = OffloadServer(Path("unused"), b"", open_release=self.there.open)
        self.cloud.start()
        self.wire = Wire(self.cloud)
        self.gateway = self._gateway()

    def _gateway(self) -> OffloadServer:
        onward = Onward(Remote(f"http://127.0.0.1:{self.wire.port}"))
        server = OffloadServer(Path("unused"), b"", open_release=self.here.open, onward=onward)
        server.start()
        return server

    def ask(self, row: str, *, timeout_s: float = PATIENCE_S, zstd: bool = False, **more: str) -> Reply:
        body, headers = request_for(timeout_s, zstd=zstd)
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
        self.wire.let_go.set()
        self.gateway.stop(1.0)
        self.wire.stop()
        self.cloud.stop(1.0)


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    made = World(tmp_path)
    yield made
    made.stop()


def request_for(timeout_s: float, *, zstd: bool = False) -> tuple[bytes, dict[str, str]]:
    asked = oip.InferRequest({"a": A, "b": B}, id="one", parameters={"timeout": int(timeout_s * 1e6)})
    buffers, length = oip.encode_request(asked)
    body, headers = b"".join(buffers), {oip.HEADER_LENGTH: str(length)}
    if zstd:
        return zstandard.ZstdCompressor().compress(body), {**headers, "content-encoding": "zstd"}
    return body, headers


def outputs(reply: Reply) -> dict[str, list[float]]:
    assert reply.status == 200, bytes(reply.body)
    response = oip.decode_response(reply.body, oip.header_length(reply.headers))
    assert response.id == "one"
    return {name: tensor.ravel().tolist() for name, tensor in response.outputs.items()}


def sent(request: Request) -> dict[str, Tensor]:
    body = bytes(request.body)
    if request.headers.get("content-encoding") == "zstd":
        body = zstandard.ZstdDecompressor().decompressobj().decompress(body)
    return dict(oip.decode_request(body, oip.header_length(request.headers)).inputs)


def test_each_tier_runs_its_own_slices(world: World) -> None:
    """The gateway asks for what is left, by a name of its own, and joins the answers; it says how long that took."""
    reply = world.ask("split")
    assert outputs(reply) == {"out": OUT, "same": (A + B).ravel().tolist()}
    assert (dict(world.here.asked), dict(world.there.asked)) == ({HEAD: 1}, {TAIL: 1})
    assert [one.path for one in world.wire.asked] == [f"/v2/models/{model('split~1')}/infer"]
    hop_s, server_s = float(reply.headers[HOP_HEADER]), float(reply.headers[HOP_SERVER_HEADER])
    assert 0 < server_s <= hop_s <= float(reply.headers["edgesplit-seconds"])


def test_a_row_may_end_at_the_gateway_or_pass_through_it(world: World) -> None:
    """Nothing is asked of the cloud for the one; for the other the gateway loads nothing."""
    assert outputs(world.ask("edge"))["out"] == OUT
    assert not world.wire.asked
    world.here.asked.clear()
    assert outputs(world.ask("cloud"))["out"] == OUT
    assert not world.here.asked and world.there.asked == {HEAD: 1, TAIL: 1}


def test_a_tensor_is_encoded_anew_at_each_link(world: World) -> None:
    """Raw floats from the device; eight bits, compressed, from the gateway to the cloud."""
    got = outputs(world.ask("lossy"))["out"]
    assert sent(world.wire.asked[0])["mid"].dtype == np.uint8
    assert np.allclose(got, OUT, rtol=0.02)


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


@pytest.mark.parametrize("what", SPOILT)
def test_what_the_cloud_must_not_answer_is_not_believed(world: World, what: str) -> None:
    """Wrong release, cut, id, tensor or shape, an error, garbage: the gateway finishes itself, and says why."""
    script, cause = SPOILT[what]
    world.wire.script = script
    assert world.cause() == cause
    assert world.here.asked == {HEAD: 1, TAIL: 1}


def test_a_cloud_that_is_gone_is_left_alone_and_asked_again_when_it_is_back(world: World) -> None:
    """Refused once, the breaker is open: requests do not even try. A ping beside them finds it back."""
    assert world.cause() == ""
    world.wire.go()
    eventually("it is noticed", lambda: world.cause() in ("refused", "link"))
    eventually("it is left alone", lambda: world.cause() == "open")
    world.wire.come_back()
    eventually("its help again", lambda: world.cause() == "", PATIENCE_S)


def test_a_cloud_that_is_late_leaves_time_to_finish_here(world: World) -> None:
    """Half of the time that is left is waited while nothing is known; then the gateway is done before the deadline, and
    the request to the cloud is given up: its connection is closed."""
    world.wire.script = world.wire.hold
    reply = world.ask("split", timeout_s=6.0)
    assert outputs(reply)["out"] == OUT and reply.headers[HOP_CAUSE_HEADER] == "timeout"
    eventually("the cloud's side sees that nobody waits", world.wire.asked[0].closed)


def test_a_device_that_has_gone_ends_what_was_asked_for_it(world: World) -> None:
    """Its connection closes: the gateway closes the one to the cloud."""
    world.wire.script = world.wire.hold
    body, headers = request_for(PATIENCE_S)
    lines = [f"POST /v2/models/{model('split')}/infer HTTP/1.1", "host: gw", f"content-length: {len(body)}"]
    head = "\r\n".join([*lines, *(f"{name}: {value}" for name, value in headers.items()), "", ""])
    with socket.create_connection(("127.0.0.1", world.gateway.port)) as device:
        device.sendall(head.encode() + body)
        assert world.wire.held.wait(PATIENCE_S)
    eventually("the cloud's side sees that nobody waits", world.wire.asked[0].closed)


def test_what_is_not_here_is_relayed_as_it_came(world: World) -> None:
    """A release that this gateway has not yet: the cloud answers the device's own request, byte for byte; so it does
    for a release whose plan knows no gateway, and for slices that are spoilt here."""
    world.here.is_here = False
    of_trace = f"00-{'ab' * 16}-{'cd' * 8}-01"
    reply = world.ask("split", zstd=True, traceparent=of_trace)
    assert outputs(reply)["out"] == OUT
    assert bytes(world.wire.asked[0].body) == request_for(PATIENCE_S, zstd=True)[0]
    assert world.wire.asked[0].path == f"/v2/models/{model('split')}/infer"
    assert world.wire.asked[0].headers["traceparent"] == of_trace
    assert 0 < float(reply.headers[HOP_SERVER_HEADER]) <= float(reply.headers[HOP_HEADER])

    world.here.is_here, world.here.spoilt = True, {HEAD}
    assert outputs(world.ask("split"))["out"] == OUT
    assert world.wire.asked[1].path == f"/v2/models/{model('split')}/infer" and not world.here.asked


def test_a_plan_without_a_gateway_is_the_clouds_alone(tmp_path: Path) -> None:
    """Its remote slices are the cloud's by the plan, though they may lie here too."""
    world = World(tmp_path)
    world.here = Tier(tmp_path / "two", tiers=())
    world.gateway.stop(1.0)
    world.gateway = world._gateway()
    try:
        assert outputs(world.ask("edge"))["out"] == OUT
        assert not world.here.asked and [one.path for one in world.wire.asked] == [f"/v2/models/{model('edge')}/infer"]
    finally:
        world.stop()


def test_an_error_of_the_relayed_is_the_devices_to_hear(world: World) -> None:
    """Unknown rows are 404 from the cloud; with the cloud gone it is 502, and never silence."""
    world.here.is_here = False
    assert world.ask("nothing").status == 404
    world.wire.go()
    eventually("502, or 503 once it is left alone", lambda: world.ask("split").status in (502, 503))


def test_with_neither_the_cloud_nor_the_slices_the_error_says_both(world: World) -> None:
    """Its own part runs; for the rest there is nobody."""
    world.here.spoilt = {TAIL}
    world.wire.script = lambda request, good: error_response(500, "broken")
    reply = world.ask("split")
    assert reply.status == 502
    assert all(word in bytes(reply.body).decode() for word in ("broken", TAIL))


@pytest.mark.parametrize(
    ("left_s", "alone_s", "expected"),
    [(2.0, None, 1.0), (2.0, 0.5, 2.0 - 0.5 * ALONE_FACTOR - MARGIN_S), (0.1, 0.5, 0.0), (-1.0, 0.1, 0.0)],
)
def test_the_cloud_gets_what_finishing_here_leaves(left_s: float, alone_s: float | None, expected: float) -> None:
    """By what the far half took here lately; half of it while that is not known."""
    assert patience_s(left_s, alone_s) == pytest.approx(expected)


def test_specs_of_halves_are_the_manifests(world: World) -> None:
    """What passes a link is checked against the manifest there: a tensor of another shape is refused by the cloud."""
    spec = TensorSpec("mid", "FP32", (1, 4))
    request = oip.InferRequest({"mid": np.zeros((2, 4), np.float32)})
    body, length = oip.encode_request(request)
    with closing(Connection("127.0.0.1", world.cloud.port)) as connection:
        reply = connection.exchange(
            "POST", f"/v2/models/{model('split~1')}/infer", deadline=monotonic() + PATIENCE_S,
            headers={oip.HEADER_LENGTH: str(length)}, body=[b"".join(body)],
        )  # fmt: skip
    assert reply.status == 400 and str(list(spec.shape)) in bytes(reply.body).decode()
