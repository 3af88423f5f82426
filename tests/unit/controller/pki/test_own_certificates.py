"""A controller's own certificates while it runs for years: renewed in place, and presented without a restart."""

from __future__ import annotations

import shutil
import ssl
from datetime import timedelta
from pathlib import Path

import pytest
from cryptography import x509

from edgesplit.errors import EdgeError
from edgesplit.trust.identity import Credentials
from edgesplit.trust.renewed_context import RenewedContext
from edgesplit_controller.pki.authority import Authority
from edgesplit_controller.pki.own_certificates import OwnCertificates

HOSTS = ["localhost"]
ENDING = timedelta(hours=6)
"""Validity that has less than a third left from its first moment: certificates begin a day in the past."""


def serial(credentials: Credentials) -> int:
    """Serial number of the certificate in the file."""
    return x509.load_pem_x509_certificate(credentials.certificate_file.read_bytes()).serial_number


def presented(server: ssl.SSLContext, client: ssl.SSLContext) -> tuple[int, int]:
    """Serial numbers of the certificates that server and client present in a new connection."""
    up, down = ssl.MemoryBIO(), ssl.MemoryBIO()
    ends = [client.wrap_bio(down, up, server_hostname="localhost"), server.wrap_bio(up, down, server_side=True)]
    for end in ends * 3:
        try:
            end.do_handshake()
        except ssl.SSLWantReadError:
            continue
    found = [end.getpeercert(binary_form=True) for end in ends]
    of_server, of_client = (x509.load_der_x509_certificate(raw or b"").serial_number for raw in found)
    return of_server, of_client


def test_a_process_that_ran_for_a_year_presented_expired_certificates(tmp_path: Path) -> None:
    """Servers and clients present the renewed certificate from the next connection on; who reads it in another way is
    called once; what is not due stays."""
    calls: list[str] = []
    own = OwnCertificates(Authority(tmp_path))
    broker = own.server("broker", HOSTS, on_renewed=lambda: calls.append("broker"))
    server, client = RenewedContext(broker, broker.server_context), own.client_context("controller")
    first = presented(server, client)
    own.renew()
    assert presented(server, client) == first and not calls

    ending = Authority(tmp_path, leaf_life=ENDING)
    for name in ("broker", "controller"):
        (tmp_path / f"{name}.pem").unlink()
    ending.issue_server("broker", HOSTS)
    ending.issue_client("controller")
    own.renew()
    renewed = presented(server, client)
    assert not set(first) & set(renewed) and renewed[0] == serial(broker) and calls == ["broker"]
    certificate = x509.load_pem_x509_certificate(broker.certificate_file.read_bytes())
    assert certificate.not_valid_after_utc - certificate.not_valid_before_utc > timedelta(days=365)
    own.renew()
    assert presented(server, client) == renewed and calls == ["broker"]


def test_a_renewal_that_was_not_taken_up_is_told_again(tmp_path: Path) -> None:
    """Who could not be told of a new certificate, as while the database is away, is told at the next check."""
    failures = [EdgeError("the database is away")]
    calls: list[str] = []

    def on_renewed() -> None:
        if failures:
            raise failures.pop()
        calls.append("renewed")

    own = OwnCertificates(Authority(tmp_path))
    owner = own.client("operator", on_renewed)
    owner.certificate_file.unlink()
    with pytest.raises(EdgeError):
        own.renew()
    own.renew()
    own.renew()
    assert calls == ["renewed"]


def test_a_half_copied_certificate_stopped_a_server(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """An operator copies a new certificate and its key one after the other: between them, and while a file is missing,
    the server goes on with what it had."""
    authority = Authority(tmp_path / "keys")
    client = authority.issue_client("controller").client_context()
    used = Credentials(tmp_path / "offload.key", tmp_path / "offload.pem", authority.certificate_file)

    def copy(name: str) -> Credentials:
        issued = authority.issue_server(name, HOSTS)
        shutil.copy(issued.certificate_file, used.certificate_file)
        return issued

    shutil.copy(copy("first").key_file, used.key_file)
    server = RenewedContext(used, used.server_context)
    before = presented(server, client)
    issued = copy("second")
    assert presented(server, client) == before and "the previous certificate stays in use" in caplog.text
    used.key_file.unlink()
    assert presented(server, client) == before
    shutil.copy(issued.key_file, used.key_file)
    assert presented(server, client)[0] == serial(issued)
