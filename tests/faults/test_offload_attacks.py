"""Attacks on a real offload server by the holder of a device's certificate, and by somebody without one.

The processes are `python -m edgesplit_offload.main` with mutual TLS and a revocation list; throughout each attack
another device asks as ever, and every one of its requests is answered.
"""

from __future__ import annotations

import json
import socket
import ssl
from collections.abc import Iterator
from contextlib import ExitStack, closing, suppress
from datetime import timedelta
from pathlib import Path
from time import monotonic, time

import pytest

from edgesplit.atomic_files import write_durably
from edgesplit.client.connection import Connection
from edgesplit.crypto.permitted_devices import PERMITTED_FILE, write_permitted
from edgesplit.errors import LinkError
from edgesplit.http1.admission import FLOOD_REFUSALS
from edgesplit.identifiers import gateway_host
from edgesplit.limits import LIMITS
from edgesplit.trust.identity import Credentials
from edgesplit_agent.control.gateway_server import GatewayServer, NextTier
from edgesplit_agent.state.data_folder import DataFolder, Identity
from edgesplit_controller.pki.authority import Authority
from support.attacked_server import DECLARED, AttackedServer
from support.edgesplit_processes import eventually
from support.offload_processes import PATIENCE_S, Serving, Signed, signed_release

CONNECTIONS = 256
"""Of one serving process, by default."""


@pytest.fixture(scope="module")
def signed(tmp_path_factory: pytest.TempPathFactory) -> Signed:
    return signed_release(tmp_path_factory.mktemp("release"))


@pytest.fixture
def attacked(signed: Signed, tmp_path: Path) -> Iterator[AttackedServer]:
    with ExitStack() as stack:
        yield AttackedServer(signed, tmp_path, stack)


def is_closed(sock: socket.socket) -> bool:
    """Whether the server has closed the connection."""
    sock.settimeout(PATIENCE_S)
    with suppress(ConnectionError, ssl.SSLError):
        while sock.recv(65_536):
            pass
    return True


def test_four_declared_lengths_stopped_an_offload_server_for_the_whole_fleet(attacked: AttackedServer) -> None:
    """Sixteen sockets of one certificate declare 256 MiB each, and send a byte now and then: bytes count as they come,
    so the server's memory and everybody else's answers stay as they were."""
    thief = attacked.device("thief")
    assert attacked.answers()
    before = attacked.memory_kib()
    with ExitStack() as stack:
        held = [stack.enter_context(attacked.open(thief)) for _ in range(16)]
        for sock in held:
            sock.sendall(DECLARED % (b"0" * 64 + b".pi.cut-1", LIMITS.http_body_bytes))
        for _ in range(20):
            for sock in held:
                sock.sendall(b"x")
            assert attacked.answers()
        assert attacked.memory_kib() - before < 200_000


def test_large_bodies_for_a_model_that_takes_four_numbers_were_let_in(attacked: AttackedServer) -> None:
    """Route, method, role and length are judged by the head: the refusal comes before a byte of the body is sent."""
    thief = attacked.device("thief")
    assert attacked.answers()
    heads = [
        (DECLARED % (attacked.model, LIMITS.http_body_bytes), 413),
        (b"POST /x HTTP/1.1\r\nContent-Length: 268435456\r\n\r\n", 404),
        (b"GET /v2/models/stats HTTP/1.1\r\nContent-Length: 268435456\r\n\r\n", 413),
        (b"PUT /v2/health/live HTTP/1.1\r\nContent-Length: 268435456\r\n\r\n", 405),
        (b"POST /v2/repository/models/m/load HTTP/1.1\r\nContent-Length: 20\r\n\r\n", 403),
        (b"POST /v2/logging HTTP/1.1\r\nContent-Length: 268435456\r\n\r\n", 403),
    ]
    for head, status in heads:
        with attacked.open(thief) as sock:
            sock.sendall(head)
            assert sock.recv(65_536).startswith(b"HTTP/1.1 %d " % status), head
            assert is_closed(sock)
    assert attacked.refused("thief", "forbidden") == 4
    assert "refused certificate thief: forbidden: " in attacked.log
    with attacked.open(attacked.device("operator")) as sock:
        sock.sendall(b"POST /v2/logging HTTP/1.1\r\nContent-Length: 2\r\nConnection: close\r\n\r\n{}")
        assert sock.recv(65_536).startswith(b"HTTP/1.1 200 ")


def test_a_revoked_certificate_kept_its_open_connections(attacked: AttackedServer) -> None:
    """In the middle of a body, idle, and with half a header block: all are closed when the list changes, and a new one
    gets the reason. Another device's stay."""
    thief = attacked.device("thief")
    with ExitStack() as stack:
        held = [stack.enter_context(attacked.open(thief)) for _ in range(4)]
        other = stack.enter_context(attacked.open(attacked.bystander))
        for sock, begin in zip(
            held, (DECLARED % (b"0" * 64 + b".pi.cut-1", 99_999_999), b"", b"GET / HT"), strict=False
        ):
            sock.sendall(begin)
        held[3].sendall(b"GET /v2/health/live HTTP/1.1\r\n\r\n")
        assert held[3].recv(65_536).startswith(b"HTTP/1.1 200")
        assert attacked.status(thief) == 200
        attacked.revoke(thief)
        assert all(map(is_closed, held))
        other.sendall(b"GET /v2/health/live HTTP/1.1\r\n\r\n")
        assert other.recv(65_536).startswith(b"HTTP/1.1 200")
    assert attacked.status(thief) == 403
    with attacked.open(thief) as again:
        again.sendall(DECLARED % (attacked.model, 1_000))
        assert again.recv(65_536).startswith(b"HTTP/1.1 403")
        assert is_closed(again)
    with attacked.open(thief) as silent:
        assert is_closed(silent)
    assert attacked.answers()
    assert "refused certificate thief: revoked" in attacked.log
    assert attacked.refused("thief", "revoked") >= 6


def test_connections_without_a_certificate_locked_every_device_out(attacked: AttackedServer) -> None:
    """300 TCP connections that never begin their handshake, opened again as they are closed: each device gets in, and
    the log has the address."""
    with ExitStack() as stack:
        silent = [stack.enter_context(socket.socket()) for _ in range(300)]
        for sock in silent:
            sock.connect(("127.0.0.1", attacked.serving.port))
        for number in range(20):
            again = stack.enter_context(socket.socket())
            again.connect(("127.0.0.1", attacked.serving.port))
            assert attacked.answers(), number
    assert "refused address 127.0.0.1: displaced" in attacked.log


def test_idle_connections_of_one_certificate_locked_every_device_out(attacked: AttackedServer) -> None:
    """A thief opens as many as the server has, and more: it displaces its own, and nobody else's."""
    thief = attacked.device("thief")
    context = thief.client_context()
    with ExitStack() as stack:
        other = stack.enter_context(attacked.open(attacked.bystander))
        for _ in range(CONNECTIONS + 10):
            sock = stack.enter_context(socket.create_connection(("127.0.0.1", attacked.serving.port), PATIENCE_S))
            with suppress(OSError, LinkError):
                stack.enter_context(context.wrap_socket(sock, server_hostname="127.0.0.1"))
        assert all(attacked.answers() for _ in range(20))
        other.sendall(b"GET /v2/health/live HTTP/1.1\r\n\r\n")
        assert other.recv(65_536).startswith(b"HTTP/1.1 200")
    eventually("the metrics name it", lambda: attacked.refused("thief", "displaced") > 0)
    assert "refused certificate thief: displaced" in attacked.log


STATUS = "/v2/edgesplit/status"


def test_nothing_named_the_device_that_attacked_an_offload_server(attacked: AttackedServer) -> None:
    """The server's status, for the operator alone, names the certificate that it keeps refusing, and no other."""
    thief, operator = attacked.device("thief"), attacked.device("operator")
    assert attacked.get(operator, STATUS)[1]["refused_clients"] == []
    for _ in range(FLOOD_REFUSALS):
        with attacked.open(thief) as sock:
            sock.sendall(DECLARED % (attacked.model, LIMITS.http_body_bytes))
            assert is_closed(sock)
        assert attacked.answers()
    status, answer = attacked.get(operator, STATUS)
    (named,) = answer["refused_clients"]
    assert status == 200 and named["device"] == "thief" and named["reasons"].startswith("malformed")
    assert named["refused"] >= FLOOD_REFUSALS and answer["revocation_list_expires"] > time()
    assert attacked.get(thief, STATUS)[0] == attacked.get(attacked.bystander, STATUS)[0] == 403


def test_nothing_named_the_device_that_attacked_a_gateway(signed: Signed, tmp_path: Path) -> None:
    """The gateway's agent asks its own server by its own certificate, which no other process has; a gateway keeps its
    network, because it asks the next tier."""
    authority, folder = Authority(tmp_path / "keys"), DataFolder(tmp_path / "gw")
    folder.acquire()
    own, thief = authority.issue_client("gw"), authority.issue_client("thief")
    for source, path in ((own.key_file, folder.key_file), (own.certificate_file, folder.certificate_file)):
        write_durably(path, source.read_bytes(), mode=0o600)
    write_durably(folder.ca_file, authority.ca_pem.encode())
    server = authority.issue_server("server", [gateway_host("gw")])
    options = ("--cert", server.certificate_file, "--key", server.key_file, "--ca", server.ca_file)
    next_tier = ("--next-tier", "https://cloud:1", "--next-tier-cert", own.certificate_file)
    with Serving(signed, "--processes", 1, *options, *next_tier, "--next-tier-key", own.key_file) as serving:
        identity = Identity(
            device="gw", device_class="pi4", broker="b:1", offload="", controller="https://c:1", tuf_root="{}"
        )
        agent = GatewayServer(folder, identity, f"127.0.0.1:{serving.port}", NextTier("https://cloud:1"))
        assert agent._read_flood() == ""
        for _ in range(FLOOD_REFUSALS):
            sock = socket.create_connection(("127.0.0.1", serving.port), timeout=PATIENCE_S)
            with thief.client_context().wrap_socket(sock, server_hostname=gateway_host("gw")) as connection:
                connection.sendall(b"POST /x HTTP/1.1\r\nContent-Length: 268435456\r\n\r\n")
                assert is_closed(connection)
        assert agent._read_flood().startswith("thief was refused ")
        with closing(Connection("127.0.0.1", serving.port, thief.client_context(), gateway_host("gw"))) as connection:
            assert connection.exchange("GET", STATUS, deadline=monotonic() + PATIENCE_S).status == 403
        with closing(Connection("127.0.0.1", serving.port, own.client_context(), gateway_host("gw"))) as connection:
            answer = connection.exchange("GET", STATUS, deadline=monotonic() + PATIENCE_S)
            assert json.loads(bytes(answer.body))["keeps_network"] == "it asks the next tier"


def test_a_revocation_list_that_expired_stopped_every_device(attacked: AttackedServer) -> None:
    """It stays in force: the thief is refused, every other device is answered, and the status says since when."""
    thief = attacked.device("thief")
    attacked.revoke(thief, life=timedelta(hours=-1))
    assert is_refused_soon(attacked, thief)
    assert attacked.answers()
    assert attacked.get(attacked.device("operator"), STATUS)[1]["revocation_list_expires"] < time()
    assert "has expired: it stays in force" in attacked.log


def test_any_device_ran_the_far_half_of_an_encrypted_release(attacked: AttackedServer) -> None:
    """With a list of devices beside the release, only these use it, list it and see its statistics. To others it is
    not here, like a release that is not; the operator sees everything."""
    digest = attacked.serving.model.partition(".")[0]
    thief, operator = attacked.device("thief"), attacked.device("operator")
    model = f"/v2/models/{attacked.serving.model}"
    paths = ("", "/ready", "/config", "/stats", "/versions/1")
    assert attacked.answers() and {attacked.get(thief, model + path)[0] for path in paths} == {200}
    write_permitted(attacked.releases / digest, {"honest"})
    try:
        eventually("the list", lambda: attacked.get(thief, model)[0] == 404)
        assert {attacked.get(thief, model + path)[0] for path in paths} == {404}
        with pytest.raises(AssertionError, match="is not here"):
            attacked.answers(thief)
        for unseen in (digest, "0" * 64):
            answer = attacked.get(thief, model.replace(digest, unseen))[1]
            assert answer == {"error": f"release {unseen[:12]} is not here"}
        assert attacked.answers()
        for device, seen in ((thief, 0), (attacked.bystander, 1), (operator, 1)):
            assert len(attacked.get(device, "/v2/models/stats")[1]["model_stats"]) == seen
            assert len(attacked.post(device, "/v2/repository/index")) == 6 * seen  # rows of its plans
    finally:
        (attacked.releases / digest / PERMITTED_FILE).unlink()


def test_a_serving_process_could_open_connections_and_gain_privileges(attacked: AttackedServer) -> None:
    """Once it listens it has given both up, with all of its threads, and goes first when memory is short."""
    pid = attacked.serving.process.pid
    for task in Path(f"/proc/{pid}/task").iterdir():
        fields = dict(line.split(":\t", 1) for line in (task / "status").read_text().splitlines() if ":\t" in line)
        assert (fields["NoNewPrivs"], fields["Seccomp"]) == ("1", "2"), task
    assert int(Path(f"/proc/{pid}/oom_score_adj").read_text()) >= 500
    assert "Max core file size        0                    0" in Path(f"/proc/{pid}/limits").read_text()
    assert attacked.get(attacked.device("operator"), STATUS)[1]["keeps_network"] == ""
    assert attacked.answers()


def is_refused_soon(attacked: AttackedServer, device: Credentials) -> bool:
    return eventually("the refusal", lambda: attacked.status(device) == 403)
