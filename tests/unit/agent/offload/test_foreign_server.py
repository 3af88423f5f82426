"""The agent and third-party inference servers: which server is asked, in what encoding, and what of the answer is
trusted."""

from __future__ import annotations

import dataclasses
import ssl
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from edgesplit.errors import UsageError
from edgesplit.http1.server import Response, Server, json_response
from edgesplit.offload_client.pool import (
    CancellableCall,
    OffloadAnswer,
    OffloadClient,
    OffloadFailure,
    encode_offload_request,
)
from edgesplit.oip import protocol as oip
from edgesplit.plan import Row
from edgesplit_agent.offload.foreign_server import ForeignOffloadClient, ForeignServers, ForeignTls
from edgesplit_agent.releases.loaded_release import LoadedRelease, plan_for
from edgesplit_agent.serving.engine import Engine, Settings
from edgesplit_controller.pki.authority import Authority
from support import onnx_models as tiny
from support.agent_engine import (
    CLASS,
    CUT,
    DIGEST,
    EXPECTED,
    INPUT,
    LINK,
    LOCAL,
    ScriptedCloud,
    active,
    manifest,
)
from support.foreign_servers import KSERVE, MLSERVER, TRITON, ForeignServerHere, Manners

NAME = oip.remote_name(DIGEST, CLASS, CUT.name)
PATIENCE_S = 20.0


def doubling() -> bytes:
    """What is beyond the cut: y = 2 h."""
    node = tiny.helper.make_node("Add", ["h", "h"], ["y"])
    return tiny.build([node], [tiny.value("h", [1, 4])], [tiny.value("y", [1, 4])])


Start = Callable[..., tuple[Engine, ForeignServerHere]]


@pytest.fixture
def clouds() -> Iterator[Start]:
    """Starts a foreign server and an engine whose release names it; the device's own server must not be asked."""
    with ExitStack() as stack:

        def start(manners: Manners, row: Row = CUT, scheme: str = "http", known: bool = True) -> Any:
            server = ForeignServerHere(manners)
            stack.callback(server.stop)
            if known:
                server.add(NAME, doubling())
            own = ScriptedCloud()
            own.start()
            stack.callback(own.stop)
            servers = ForeignServers(ForeignTls())
            stack.callback(servers.stop)
            settings = Settings(idle_probe_s=3600.0)
            engine = Engine(CLASS, OffloadClient(own.server.url), settings=settings, client_for=servers.for_release)
            stack.callback(engine.stop)
            engine.serve("tiny", naming(server.url.replace("http", scheme, 1), row))
            engine.start()
            stack.callback(lambda: _unasked(own))
            return engine, server

        yield start


def _unasked(own: ScriptedCloud) -> None:
    assert own.asked == []


def naming(address: str, *rows: Row) -> LoadedRelease:
    """The tiny release with that server in its plan."""
    described = manifest(*rows)
    plan = msgspec.structs.replace(described.plans[CLASS], offload=address)
    described = msgspec.structs.replace(described, plans={CLASS: plan})
    return dataclasses.replace(active(*rows), manifest=described, plan=plan_for(described, CLASS))


@pytest.mark.parametrize("manners", [TRITON, KSERVE, MLSERVER], ids=["triton", "kserve", "mlserver"])
def test_server_named_by_the_release_finishes_the_request(clouds: Start, manners: Manners) -> None:
    """Whatever the server supports: with none of our headers, and never compressed where the row does not say so."""
    engine, server = clouds(manners)
    for _ in range(3):
        answer = engine.infer("tiny", {"x": INPUT}, deadline_s=PATIENCE_S)
        assert np.array_equal(answer.outputs["y"], EXPECTED)
        assert answer.report.row == "cut-1" and not answer.report.fallback and answer.report.up_bytes > 0
    conditions, breaker = engine.target_state("tiny")
    assert conditions.remote_usable and breaker.state == "closed" and conditions != engine.conditions
    assert set(server.seen.models) == {NAME}
    assert set(server.seen.codings) == {""}
    assert not [name for seen in server.seen.headers for name in seen if name.startswith("edgesplit")]


@pytest.mark.parametrize("status", [400, 415, 422, 500])
def test_server_without_binary_tensors_is_detected_once(clouds: Start, status: int) -> None:
    """The first request is repeated in JSON; all later ones start with JSON."""
    engine, server = clouds(dataclasses.replace(MLSERVER, not_json=status))
    for _ in range(3):
        engine.infer("tiny", {"x": INPUT}, deadline_s=PATIENCE_S)
    assert server.seen.binary == [True, False, False, False]


def test_compressed_row_sends_gzip_to_triton(clouds: Start) -> None:
    """As the plan assumed; never zstd."""
    engine, server = clouds(TRITON, msgspec.structs.replace(CUT, compress=True), "triton")
    answer = engine.infer("tiny", {"x": INPUT}, deadline_s=PATIENCE_S)
    assert np.array_equal(answer.outputs["y"], EXPECTED)
    assert server.seen.codings == ["gzip"]


def test_compressed_row_is_dropped_for_a_server_without_decompression() -> None:
    """The agent leaves the row out. No plan of ours contains it, and one from elsewhere is not tried out on a foreign
    server."""
    packed = msgspec.structs.replace(CUT, compress=True)
    assert [row.name for row in naming("http://h", packed, LOCAL).plan.rows] == ["local"]
    assert [row.name for row in naming("triton://h", packed, LOCAL).plan.rows] == ["cut-1", "local"]


def test_lossy_row_sends_the_codecs_tensors(clouds: Start) -> None:
    """The exported model takes them by these names."""
    engine, server = clouds(TRITON, msgspec.structs.replace(CUT, codecs={"h": "fp16"}))
    node = tiny.helper.make_node
    server.add(
        NAME,
        tiny.build(
            [node("Cast", ["h"], ["d"], to=tiny.TensorProto.FLOAT), node("Add", ["d", "d"], ["y"])],
            [tiny.value("h", [1, 4], tiny.TensorProto.FLOAT16)],
            [tiny.value("y", [1, 4])],
        ),
    )
    answer = engine.infer("tiny", {"x": INPUT}, deadline_s=PATIENCE_S)
    assert not answer.report.fallback and np.array_equal(answer.outputs["y"], EXPECTED)


@pytest.mark.parametrize("manners", [TRITON, KSERVE], ids=["400", "404"])
def test_missing_exported_model_counts_as_server_failure(manners: Manners) -> None:
    """Some servers answer 400 as for a bad input: our tensors were checked before, so the breaker counts it as a
    failure."""
    server = ForeignServerHere(manners)
    try:
        outcome = asked(ForeignServers(ForeignTls()).client_for(server.url))
    finally:
        server.stop()
    assert isinstance(outcome, OffloadFailure) and outcome.cause == "server"
    assert outcome.status == manners.unknown_model and "unknown model" in outcome.text
    assert server.seen.refused == 1


def asked(remote: OffloadClient, planned_s: float = 0.0) -> OffloadAnswer | OffloadFailure:
    """One request."""
    (receives,) = [spec for part in manifest(CUT).slices for spec in part.outputs if spec.name == "y"]
    wanted = encode_offload_request(NAME, "id-1", {"h": INPUT}, (receives,), left_s=PATIENCE_S, planned_s=planned_s)
    return remote.infer(wanted, CancellableCall(), PATIENCE_S)


@pytest.fixture
def answering() -> Iterator[Callable[[dict[str, Any]], OffloadClient]]:
    """A server that answers every request with this JSON."""
    with ExitStack() as stack:

        def start(said: dict[str, Any]) -> OffloadClient:
            server = Server(lambda request: json_response(200, said))
            server.start()
            stack.callback(server.stop, 0.5)
            return ForeignServers(ForeignTls()).client_for(server.url)

        yield start


def test_answer_with_another_id_is_refused_and_one_without_id_is_not(
    answering: Callable[[dict[str, Any]], OffloadClient],
) -> None:
    """A connection carries one request at a time, so an answer without an id is this request's; an answer that names
    another id is refused."""
    y = {"name": "y", "datatype": "FP32", "shape": [1, 4], "data": [0.0, 2.0, 4.0, 6.0]}
    said = {"model_name": NAME, "outputs": [y]}
    assert isinstance(asked(answering(said)), OffloadAnswer)
    for spoilt in ({**said, "id": "id-2"}, {**said, "model_name": "other"}, {**said, "outputs": []}):
        outcome = asked(answering(spoilt))
        assert isinstance(outcome, OffloadFailure) and outcome.cause == "server"


def test_missing_server_time_is_taken_from_the_plan(answering: Callable[[dict[str, Any]], OffloadClient]) -> None:
    """So that it does not make the link look slow; never more than the whole exchange took."""
    y = {"name": "y", "datatype": "FP32", "shape": [1, 4], "data": [0.0] * 4}
    remote = answering({"model_name": NAME, "id": "id-1", "outputs": [y]})
    first, second = asked(remote, planned_s=1e-6), asked(remote, planned_s=1e6)
    assert isinstance(first, OffloadAnswer) and first.server_s == 1e-6
    assert isinstance(second, OffloadAnswer) and second.server_s == second.elapsed_s and second.link_s == 0


def test_foreign_server_probe_counts_any_answer_as_alive() -> None:
    """A probe is a rare request for a model that does not exist; a ping that is answered with anything but a failure
    counts as alive."""
    server = ForeignServerHere(TRITON)
    try:
        remote = ForeignServers(ForeignTls()).client_for(server.url)
        assert isinstance(remote.ping(PATIENCE_S), float)
        first, second = remote.probe(PATIENCE_S), remote.probe(PATIENCE_S)
        assert isinstance(first, OffloadAnswer) and first.up_bytes > 10_000 and first.server_s == 0
        assert isinstance(second, OffloadFailure) and second.cause == "rejected"
        assert server.seen.refused == 1
    finally:
        server.stop()
    gone = ForeignServers(ForeignTls()).client_for(server.url).ping(PATIENCE_S)
    assert isinstance(gone, OffloadFailure) and gone.cause == "refused"


@pytest.mark.parametrize(("status", "lives"), [(200, True), (404, True), (403, True), (500, False), (503, False)])
def test_ingress_without_health_path_counts_as_alive(status: int, lives: bool) -> None:
    """KServe's ingress may not forward it."""
    server = Server(lambda request: Response(status))
    server.start()
    try:
        heard = ForeignServers(ForeignTls()).client_for(server.url).ping(PATIENCE_S)
    finally:
        server.stop(0.5)
    assert isinstance(heard, float) == lives


def test_connections_are_shared_per_server_and_reopened_after_close() -> None:
    """Two releases with one server share them; the engine closes them when no release names the server any more."""
    servers = ForeignServers(ForeignTls())
    first = servers.client_for("triton://gpu")
    assert servers.client_for("triton://gpu") is first and servers.client_for("triton://other") is not first
    first.close()
    assert servers.client_for("triton://gpu") is not first
    assert servers.for_release(active(LOCAL)) is None
    servers.stop()


def test_tls_is_verified_and_the_device_certificate_is_not_sent(tmp_path: Path) -> None:
    """A server that the system's authorities do not know is refused; with a given authority it is accepted, and the
    device's certificate is not presented."""
    authority = Authority(tmp_path)
    credentials = authority.issue_server("gpu", ["localhost", "127.0.0.1"])
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(credentials.certificate_file, credentials.key_file)
    context.verify_mode = ssl.CERT_OPTIONAL
    context.load_verify_locations(authority.certificate_file)
    serials: list[object] = []
    y = {"name": "y", "datatype": "FP32", "shape": [1, 4], "data": [0.0] * 4}

    def handle(request: Any) -> Response:
        serials.append(request.peer_serial)
        return json_response(200, {"model_name": NAME, "id": "id-1", "outputs": [y]})

    server = Server(handle, tls=context)
    server.start()
    try:
        address = f"https://localhost:{server.port}"
        stranger = asked(ForeignServers(ForeignTls()).client_for(address))
        met = asked(ForeignServers(ForeignTls(ca_file=authority.certificate_file)).client_for(address))
    finally:
        server.stop(0.5)
    assert isinstance(stranger, OffloadFailure) and stranger.cause == "server"
    assert isinstance(met, OffloadAnswer) and serials == [None]


@pytest.mark.parametrize(
    "given", [{"certificate_file": "cert.pem"}, {"ca_file": "gone.pem"}, {"ca_file": "spoilt.pem"}]
)
def test_unusable_tls_files_are_named_at_start(given: dict[str, str], tmp_path: Path) -> None:
    """A missing key, a missing file, a file that is no certificate."""
    (tmp_path / "spoilt.pem").write_text("nonsense")
    with pytest.raises(UsageError, match=r"--foreign-key|gone\.pem|spoilt\.pem"):
        ForeignTls(**{name: tmp_path / file for name, file in given.items()}).context()


def test_url_path_prefix_before_v2_is_kept() -> None:
    """An ingress may serve several clusters on one host."""
    server = ForeignServerHere(KSERVE)
    server.add(NAME, doubling())
    try:
        outcome = asked(ForeignServers(ForeignTls()).client_for(server.url))
    finally:
        server.stop()
    assert isinstance(outcome, OffloadAnswer)
    assert LINK.rtt_s and isinstance(ForeignServers(ForeignTls()).client_for("http://h/x"), ForeignOffloadClient)
