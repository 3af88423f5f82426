"""A gateway's agent supervises its offload server: certificate, revocation list and process; with the controller
reachable, gone, or lying."""

from __future__ import annotations

import json
from pathlib import Path
from time import time

import pytest
from cryptography import x509

from edgesplit.atomic_files import write_durably
from edgesplit.errors import LinkError, TrustError, UsageError
from edgesplit.mqtt.messages import GATEWAY_FLOODED, LIST_EXPIRED
from edgesplit.trust.identity import certificate_request, load_or_make_key
from edgesplit.trust.revocation import authority_key, parse_revocation_list
from edgesplit_agent.control.gateway_server import GatewayServer, NextTier
from edgesplit_agent.state.data_folder import DataFolder, Identity
from edgesplit_agent.telemetry.conditions import reported_conditions
from edgesplit_controller.pki import authority
from edgesplit_controller.pki.authority import Authority


class Process:
    """Stands for the server's process."""

    def __init__(self, bench: Bench) -> None:
        self._bench = bench

    def start(self, timeout_s: float, /) -> None:
        if self._bench.taken:
            raise UsageError("the offload server does not start: its port is taken")
        self._bench.lived.append("started")

    def stop(self) -> None:
        self._bench.lived.append("stopped")


class Bench:
    """One gateway's folder, and a controller that answers as it is told."""

    def __init__(self, folder: Path) -> None:
        self.authority = Authority(folder / "keys")
        self.folder = DataFolder(folder / "gw")
        self.folder.acquire()
        key = load_or_make_key(self.folder.key_file)
        own = self.authority.sign_request(certificate_request(key, "gw"), "gw")
        write_durably(self.folder.certificate_file, own)
        write_durably(self.folder.ca_file, self.authority.ca_pem.encode())
        self.identity = Identity(
            device="gw", device_class="jetson-nano", broker="b:1", offload="https://cloud:8500",
            controller="https://controller:8443", tuf_root="{}",
        )  # fmt: skip
        self.lived: list[str] = []
        self.revoked: list[int] = [7]
        self.trouble: Exception | None = None
        self.forged: bytes = b""
        self.status = b'{"refused_clients": []}'
        self.taken = False
        self.later_s = 0.0
        """Seconds by which the gateway's clock is ahead."""
        self.home = self.folder.path / "gateway"
        self.server = self.start_agent()

    def start_agent(self) -> GatewayServer:
        """The gateway's server as a newly started agent tends it."""
        return GatewayServer(
            self.folder, self.identity, ":8500", NextTier("https://cloud:8500"),
            post=self._ask, make_process=lambda: Process(self), ask_status=lambda: self.status,
            now=lambda: time() + self.later_s,
        )  # fmt: skip

    def _ask(self, what: str, body: bytes) -> bytes:
        if self.trouble is not None:
            raise self.trouble
        if what == "crl":
            return self.forged or self.authority.revocation_list(self.revoked)
        csr = json.loads(body)["csr_pem"].encode()
        return json.dumps({"certificate_pem": self.authority.sign_gateway(csr, "gw").decode()}).encode()

    def tend(self) -> list[str]:
        """One look; what became of the process."""
        self.lived.clear()
        self.server.reconcile()
        return list(self.lived)

    def listed(self) -> frozenset[int]:
        key = authority_key(self.folder.ca_file)
        return parse_revocation_list((self.home / "revoked.pem").read_bytes(), key).serials

    def serial(self) -> int:
        return x509.load_pem_x509_certificate((self.home / "certificate.pem").read_bytes()).serial_number


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path)


def test_server_starts_with_certificate_and_revocation_list(bench: Bench) -> None:
    """Both come from the controller. The next check changes nothing, not even a file, although lists are signed anew
    each time."""
    assert bench.tend() == ["started"] and bench.listed() == {7}
    before = (bench.home / "revoked.pem").read_bytes()
    assert bench.tend() == []
    assert (bench.home / "revoked.pem").read_bytes() == before
    bench.revoked.append(9)
    assert bench.tend() == [] and bench.listed() == {7, 9}
    bench.revoked.remove(7)
    assert bench.tend() == [] and bench.listed() == {9}


def test_server_does_not_start_before_certificate_and_list(bench: Bench) -> None:
    """Without a certificate, or without a revocation list, there is no server, and the reason is raised."""
    bench.trouble = LinkError("cannot reach the controller")
    with pytest.raises(LinkError):
        bench.tend()
    bench.trouble, bench.forged = None, b"no list"
    with pytest.raises(TrustError):
        bench.tend()
    assert bench.lived == []


def test_unreachable_or_lying_controller_changes_nothing(bench: Bench, tmp_path: Path) -> None:
    """The last verified certificate and list stay in force, also after a restart of the agent."""
    bench.tend()
    serial = bench.serial()
    bench.trouble = LinkError("cannot reach the controller")
    assert bench.tend() == []
    bench.trouble, bench.forged = None, Authority(tmp_path / "others").revocation_list([])
    assert bench.tend() == []
    bench.forged, bench.trouble = b"", TrustError("the controller refused")
    assert bench.tend() == []
    assert bench.listed() == {7} and bench.serial() == serial

    bench.server = bench.start_agent()
    assert bench.tend() == ["started"]


def test_new_certificate_restarts_the_server(bench: Bench) -> None:
    """The agent's certificate is shown to the cloud, the server's to devices: a running process has loaded the old
    ones."""
    bench.tend()
    bench.server.on_renewed()
    assert bench.tend() == ["stopped", "started"] and bench.tend() == []

    serial = bench.serial()
    bench.later_s = 0.7 * authority.LEAF_LIFE.total_seconds()
    assert bench.tend() == ["stopped", "started"] and bench.serial() != serial

    bench.later_s = 1.5 * authority.LEAF_LIFE.total_seconds()
    bench.trouble = LinkError("cannot reach the controller")
    with pytest.raises(LinkError):  # it has run out: better said than served
        bench.tend()


def test_unreadable_certificate_is_replaced_and_unreadable_key_is_reported(bench: Bench) -> None:
    """A certificate that does not fit its key is requested anew; a file that holds no key is left for the operator."""
    bench.tend()
    (bench.home / "certificate.pem").write_text("spoilt")
    assert bench.tend() == ["stopped", "started"]
    (bench.home / "key.pem").write_text("spoilt")
    with pytest.raises(UsageError, match="move it away"):
        bench.tend()


def test_taken_port_is_retried(bench: Bench) -> None:
    """The reason is raised and shown; the next check tries again."""
    bench.taken = True
    with pytest.raises(UsageError, match="taken"):
        bench.tend()
    bench.taken = False
    assert bench.tend() == ["started"]
    bench.server.stop()
    assert bench.lived == ["started", "stopped"]


def test_a_gateways_list_of_ten_years_was_never_renewed(bench: Bench) -> None:
    """Fetched anew when a third of its validity has passed, although nothing else was revoked."""
    bench.tend()
    before = (bench.home / "revoked.pem").read_bytes()
    bench.later_s = authority.LIST_LIFE.total_seconds() / 2
    assert bench.tend() == [] and (bench.home / "revoked.pem").read_bytes() != before
    assert bench.server.list_problem == ""


def test_an_expired_list_of_a_gateway_strands_no_device(bench: Bench) -> None:
    """While the controller cannot be reached for longer than the list is valid, the server goes on, and the agent
    reports since when; a list that comes ends that."""
    bench.tend()
    bench.trouble, bench.later_s = LinkError("no route"), authority.LIST_LIFE.total_seconds() + 1
    assert bench.tend() == [] and "expired on" in bench.server.list_problem
    (condition,) = reported_conditions([], bench.server.flood, bench.server.list_problem)
    assert condition.kind == LIST_EXPIRED and "API cannot be reached" in condition.text
    bench.trouble, bench.later_s = None, 0.0
    bench.revoked.append(9)
    assert bench.tend() == [] and bench.server.list_problem == ""


@pytest.mark.parametrize("status", [b"", b"no JSON", b"[]", b'{"error": "only for the controller"}'])
def test_a_gateways_agent_names_the_device_that_floods_it(bench: Bench, status: bytes) -> None:
    """The one that is refused most, and none once the server does not say so any more."""
    clients = [
        {"device": "cam-1", "refused": 24, "reasons": "slow"},
        {"device": "t1", "refused": 99, "reasons": "bytes"},
    ]
    bench.status = json.dumps({"refused_clients": clients, "revocation_list_expires": None}).encode()
    bench.tend()
    (condition,) = reported_conditions([], bench.server.flood)
    assert (condition.kind, condition.text) == (GATEWAY_FLOODED, "t1 was refused 99 times in two minutes: bytes")
    bench.status = status
    bench.tend()
    assert reported_conditions([], bench.server.flood) == ()
