"""Attacks on a real offload server by the holder of a device's certificate, and by somebody without one.

The processes are `python -m edgesplit_offload.main` with mutual TLS and a revocation list; throughout each attack
another device asks as ever, and every one of its requests is answered.
"""

from __future__ import annotations

import re
import socket
import ssl
from collections.abc import Iterator
from contextlib import ExitStack, closing, suppress
from pathlib import Path
from time import monotonic
from urllib.request import urlopen

import pytest
from cryptography import x509

from edgesplit.client.connection import Connection
from edgesplit.errors import LinkError
from edgesplit.limits import LIMITS
from edgesplit.trust.identity import Credentials
from edgesplit_controller.pki.authority import Authority
from support.edgesplit_processes import eventually
from support.offload_processes import PATIENCE_S, Serving, Signed, outputs, signed_release

CONNECTIONS = 256
"""Of one serving process, by default."""
DECLARED = b"POST /v2/models/%s/infer HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n"


@pytest.fixture(scope="module")
def signed(tmp_path_factory: pytest.TempPathFactory) -> Signed:
    return signed_release(tmp_path_factory.mktemp("release"))


class Fortress:
    """An offload server with mutual TLS, its log, its metrics, and devices of its authority."""

    def __init__(self, signed: Signed, folder: Path, stack: ExitStack) -> None:
        self.authority = Authority(folder / "keys")
        self.revoked = folder / "revoked.pem"
        self.revoked.write_bytes(self.authority.revocation_list([]))
        server = self.authority.issue_server("offload", ["127.0.0.1"])
        self._log = folder / "log"
        with socket.create_server(("127.0.0.1", 0)) as free:
            metrics = f"127.0.0.1:{free.getsockname()[1]}"
        self._metrics_url = f"http://{metrics}/metrics"
        stderr = stack.enter_context(self._log.open("w"))
        self.serving = stack.enter_context(
            Serving(
                signed, "--processes", 1, "--cert", server.certificate_file, "--key", server.key_file,
                "--ca", server.ca_file, "--revoked", self.revoked, "--metrics", metrics, stderr=stderr,
            )
        )  # fmt: skip
        self.model = signed.model.encode()
        self.bystander = self.device("honest")

    def device(self, name: str) -> Credentials:
        return self.authority.issue_client(name)

    def revoke(self, *devices: Credentials) -> None:
        serials = [x509.load_pem_x509_certificate(one.certificate_file.read_bytes()).serial_number for one in devices]
        self.revoked.write_bytes(self.authority.revocation_list(serials))

    def open(self, device: Credentials) -> ssl.SSLSocket:
        """A TLS connection with the device's certificate."""
        sock = socket.create_connection(("127.0.0.1", self.serving.port), timeout=PATIENCE_S)
        return device.client_context().wrap_socket(sock, server_hostname="127.0.0.1")

    def answers(self, device: Credentials | None = None) -> bool:
        """Whether the device, on a new connection, is answered; the bystander by default."""
        context = (device or self.bystander).client_context()
        with closing(Connection("127.0.0.1", self.serving.port, context)) as connection:
            return outputs(self.serving.ask(connection)) == [2.0] * 4

    def status(self, device: Credentials) -> int:
        context = device.client_context()
        with closing(Connection("127.0.0.1", self.serving.port, context)) as connection:
            return connection.exchange("GET", "/v2/health/ready", deadline=monotonic() + PATIENCE_S).status

    @property
    def log(self) -> str:
        return self._log.read_text()

    def refused(self, client: str, reason: str) -> float:
        """How often this client was refused for this reason, by the metrics page."""
        page = urlopen(self._metrics_url, timeout=PATIENCE_S).read().decode()
        found = re.search(rf'edgesplit_offload_refused_total{{client="{client}",reason="{reason}"}} (\S+)', page)
        return float(found[1]) if found else 0.0

    def memory_kib(self) -> int:
        """Resident memory of the server."""
        status = Path(f"/proc/{self.serving.process.pid}/status").read_text()
        return int(re.search(r"VmRSS:\s+(\d+)", status)[1])  # type: ignore[index]


@pytest.fixture
def fortress(signed: Signed, tmp_path: Path) -> Iterator[Fortress]:
    with ExitStack() as stack:
        yield Fortress(signed, tmp_path, stack)


def is_closed(sock: socket.socket) -> bool:
    """Whether the server has closed the connection."""
    sock.settimeout(PATIENCE_S)
    with suppress(ConnectionError, ssl.SSLError):
        while sock.recv(65_536):
            pass
    return True


def test_four_declared_lengths_stopped_an_offload_server_for_the_whole_fleet(fortress: Fortress) -> None:
    """Sixteen sockets of one certificate declare 256 MiB each, and send a byte now and then: bytes count as they come,
    so the server's memory and everybody else's answers stay as they were."""
    thief = fortress.device("thief")
    assert fortress.answers()
    before = fortress.memory_kib()
    with ExitStack() as stack:
        held = [stack.enter_context(fortress.open(thief)) for _ in range(16)]
        for sock in held:
            sock.sendall(DECLARED % (b"0" * 64 + b".pi.cut-1", LIMITS.http_body_bytes))
        for _ in range(20):
            for sock in held:
                sock.sendall(b"x")
            assert fortress.answers()
        assert fortress.memory_kib() - before < 200_000


def test_large_bodies_for_a_model_that_takes_four_numbers_were_let_in(fortress: Fortress) -> None:
    """Route, method, role and length are judged by the head: the refusal comes before a byte of the body is sent."""
    thief = fortress.device("thief")
    assert fortress.answers()
    heads = [
        (DECLARED % (fortress.model, LIMITS.http_body_bytes), 413),
        (b"POST /x HTTP/1.1\r\nContent-Length: 268435456\r\n\r\n", 404),
        (b"GET /v2/models/stats HTTP/1.1\r\nContent-Length: 268435456\r\n\r\n", 413),
        (b"PUT /v2/health/live HTTP/1.1\r\nContent-Length: 268435456\r\n\r\n", 405),
        (b"POST /v2/repository/models/m/load HTTP/1.1\r\nContent-Length: 20\r\n\r\n", 403),
        (b"POST /v2/logging HTTP/1.1\r\nContent-Length: 268435456\r\n\r\n", 403),
    ]
    for head, status in heads:
        with fortress.open(thief) as sock:
            sock.sendall(head)
            assert sock.recv(65_536).startswith(b"HTTP/1.1 %d " % status), head
            assert is_closed(sock)
    assert fortress.refused("thief", "forbidden") == 4
    assert "refused certificate thief: forbidden: " in fortress.log
    with fortress.open(fortress.device("operator")) as sock:
        sock.sendall(b"POST /v2/logging HTTP/1.1\r\nContent-Length: 2\r\nConnection: close\r\n\r\n{}")
        assert sock.recv(65_536).startswith(b"HTTP/1.1 200 ")


def test_a_revoked_certificate_kept_its_open_connections(fortress: Fortress) -> None:
    """In the middle of a body, idle, and with half a header block: all are closed when the list changes, and a new one
    gets the reason. Another device's stay."""
    thief = fortress.device("thief")
    with ExitStack() as stack:
        held = [stack.enter_context(fortress.open(thief)) for _ in range(4)]
        other = stack.enter_context(fortress.open(fortress.bystander))
        for sock, begin in zip(
            held, (DECLARED % (b"0" * 64 + b".pi.cut-1", 99_999_999), b"", b"GET / HT"), strict=False
        ):
            sock.sendall(begin)
        held[3].sendall(b"GET /v2/health/live HTTP/1.1\r\n\r\n")
        assert held[3].recv(65_536).startswith(b"HTTP/1.1 200")
        assert fortress.status(thief) == 200
        fortress.revoke(thief)
        assert all(map(is_closed, held))
        other.sendall(b"GET /v2/health/live HTTP/1.1\r\n\r\n")
        assert other.recv(65_536).startswith(b"HTTP/1.1 200")
    assert fortress.status(thief) == 403
    with fortress.open(thief) as again:
        again.sendall(DECLARED % (fortress.model, 1_000))
        assert again.recv(65_536).startswith(b"HTTP/1.1 403")
        assert is_closed(again)
    with fortress.open(thief) as silent:
        assert is_closed(silent)
    assert fortress.answers()
    assert "refused certificate thief: revoked" in fortress.log
    assert fortress.refused("thief", "revoked") >= 6


def test_connections_without_a_certificate_locked_every_device_out(fortress: Fortress) -> None:
    """300 TCP connections that never begin their handshake, opened again as they are closed: each device gets in, and
    the log has the address."""
    with ExitStack() as stack:
        silent = [stack.enter_context(socket.socket()) for _ in range(300)]
        for sock in silent:
            sock.connect(("127.0.0.1", fortress.serving.port))
        for number in range(20):
            again = stack.enter_context(socket.socket())
            again.connect(("127.0.0.1", fortress.serving.port))
            assert fortress.answers(), number
    assert "refused address 127.0.0.1: displaced" in fortress.log


def test_idle_connections_of_one_certificate_locked_every_device_out(fortress: Fortress) -> None:
    """A thief opens as many as the server has, and more: it displaces its own, and nobody else's."""
    thief = fortress.device("thief")
    context = thief.client_context()
    with ExitStack() as stack:
        other = stack.enter_context(fortress.open(fortress.bystander))
        for _ in range(CONNECTIONS + 10):
            sock = stack.enter_context(socket.create_connection(("127.0.0.1", fortress.serving.port), PATIENCE_S))
            with suppress(OSError, LinkError):
                stack.enter_context(context.wrap_socket(sock, server_hostname="127.0.0.1"))
        assert all(fortress.answers() for _ in range(20))
        other.sendall(b"GET /v2/health/live HTTP/1.1\r\n\r\n")
        assert other.recv(65_536).startswith(b"HTTP/1.1 200")
    eventually("the metrics name it", lambda: fortress.refused("thief", "displaced") > 0)
    assert "refused certificate thief: displaced" in fortress.log
