"""An offload server with mutual TLS and a revocation list, to attack: devices of its authority, its log and metrics."""

from __future__ import annotations

import json
import re
import socket
import ssl
from contextlib import ExitStack, closing
from datetime import timedelta
from pathlib import Path
from time import monotonic
from typing import Any
from urllib.request import urlopen

from cryptography import x509

from edgesplit.client.connection import Connection
from edgesplit.trust.identity import Credentials
from edgesplit_controller.pki.authority import LIST_LIFE, Authority
from support.offload_processes import PATIENCE_S, Serving, Signed, outputs

DECLARED = b"POST /v2/models/%s/infer HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n"
"""The head of a request, to fill with a model and a length."""


class AttackedServer:
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
        self.model, self.releases = signed.model.encode(), signed.releases
        self.bystander = self.device("honest")

    def device(self, name: str) -> Credentials:
        return self.authority.issue_client(name)

    def revoke(self, *devices: Credentials, life: timedelta = LIST_LIFE) -> None:
        serials = [x509.load_pem_x509_certificate(one.certificate_file.read_bytes()).serial_number for one in devices]
        self.revoked.write_bytes(self.authority.revocation_list(serials, life))

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

    def get(self, device: Credentials, path: str) -> tuple[int, Any]:
        """Status and JSON answer of a request by this device."""
        with closing(Connection("127.0.0.1", self.serving.port, device.client_context())) as connection:
            reply = connection.exchange("GET", path, deadline=monotonic() + PATIENCE_S)
            return reply.status, json.loads(bytes(reply.body)) if len(reply.body) else None

    def post(self, device: Credentials, path: str) -> Any:
        """The JSON answer to an empty body of this device."""
        with closing(Connection("127.0.0.1", self.serving.port, device.client_context())) as connection:
            reply = connection.exchange("POST", path, deadline=monotonic() + PATIENCE_S, body=[b"{}"])
            return json.loads(bytes(reply.body))

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
