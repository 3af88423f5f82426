"""Keys, certificates and claims: which names are possible, and that both ends of a connection check them strictly."""

from __future__ import annotations

import base64
import ssl
import stat
import subprocess
import sys
import time
from datetime import datetime, timedelta, timezone
from pathlib import Path

import msgspec
import pytest
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import Encoding
from cryptography.x509.oid import NameOID

from edgesplit.crypto.private_key import private_pem
from edgesplit.errors import MalformedMessage, UsageError
from edgesplit.trust import identity
from edgesplit.trust.identity import Claim, Credentials
from edgesplit_controller.pki import authority as ca
from edgesplit_controller.pki.authority import Authority


@pytest.fixture()
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path / "ca")


def device(authority: Authority, folder: Path, name: str) -> Credentials:
    """An enrolled device's credentials."""
    key = identity.load_or_make_key(folder / f"{name}.key")
    certificate = folder / f"{name}.pem"
    certificate.write_bytes(authority.sign_request(identity.certificate_request(key, name), name))
    return Credentials(folder / f"{name}.key", certificate, authority.certificate_file)


def handshake(server: ssl.SSLContext, client: ssl.SSLContext, host: str) -> tuple[ssl.SSLObject, ssl.SSLObject]:
    """Both ends of a TLS connection over memory, after the handshake and one byte each way."""
    up, down = ssl.MemoryBIO(), ssl.MemoryBIO()
    ends = (client.wrap_bio(down, up, server_hostname=host), server.wrap_bio(up, down, server_side=True))
    todo = list(ends)
    for _ in range(10):
        for end in tuple(todo):
            try:
                end.do_handshake()
                todo.remove(end)
            except ssl.SSLWantReadError:
                pass
    assert not todo
    ends[1].write(b"x")
    ends[0].read(1)  # in TLS 1.3 a client learns here that its certificate was refused
    return ends


def claim(**changes: object) -> Claim:
    good = Claim(
        device="cam-1",
        device_class="pi4",
        token="secret-token",
        controller_url="https://c:8443",
        ca_pem="pem",
        tuf_root="{}",
        expires=1,
    )
    return msgspec.structs.replace(good, **changes)


def test_private_key_is_created_once_with_mode_0600(tmp_path: Path) -> None:
    """On first use; it is the same ever after."""
    made = identity.load_or_make_key(tmp_path / "new" / "key.pem")
    again = identity.load_or_make_key(tmp_path / "new" / "key.pem")

    assert private_pem(made) == private_pem(again)
    assert stat.S_IMODE((tmp_path / "new" / "key.pem").stat().st_mode) == 0o600


def test_loose_key_file_mode_is_tightened(tmp_path: Path) -> None:
    """When the key is used."""
    path = tmp_path / "key.pem"
    identity.load_or_make_key(path)
    path.chmod(0o644)

    identity.load_or_make_key(path)

    assert stat.S_IMODE(path.stat().st_mode) == 0o600


@pytest.mark.parametrize(
    "content", [b"", b"not a key", b"-----BEGIN PRIVATE KEY-----\nAAAA\n-----END PRIVATE KEY-----\n"]
)
def test_corrupt_key_file_is_never_replaced(tmp_path: Path, content: bytes) -> None:
    """The error names it: it may be the only copy of an identity."""
    path = tmp_path / "key.pem"
    path.write_bytes(content)

    with pytest.raises(UsageError, match=r"key\.pem"):
        identity.load_or_make_key(path)
    assert path.read_bytes() == content


def test_claim_round_trips_and_hides_its_secret() -> None:
    """What the operator copies is what the device reads; its secret is in the file and not in a log."""
    assert identity.decode_claim(identity.encode_document(claim())) == claim()
    assert "secret-token" not in repr(claim())


def test_truncated_claim_is_refused() -> None:
    """At every length, with our own error."""
    whole = identity.encode_document(claim()).rstrip()
    for length in range(len(whole)):
        with pytest.raises(MalformedMessage):
            identity.decode_claim(whole[:length])


@pytest.mark.parametrize("name", ["controller", "Cam", "a/b", "+", "#", "", "cam 1"])
def test_claim_for_a_reserved_or_unsafe_name_is_refused(name: str) -> None:
    """No claim makes a device the controller, or a wildcard."""
    with pytest.raises(MalformedMessage):
        identity.decode_claim(identity.encode_document(claim(device=name)))


def test_device_name_comes_from_the_claim(authority: Authority, tmp_path: Path) -> None:
    """A device that requests another's name still gets its own."""
    key = identity.load_or_make_key(tmp_path / "key")
    request = identity.certificate_request(key, "cam-2")

    certificate = x509.load_pem_x509_certificate(authority.sign_request(request, "cam-1"))

    assert [attribute.value for attribute in certificate.subject] == ["cam-1"]
    assert certificate.public_key() == key.public_key()


@pytest.mark.parametrize("name", ["controller", "broker", "offload", "a/b", "+"])
def test_authority_refuses_reserved_and_unsafe_names(authority: Authority, tmp_path: Path, name: str) -> None:
    """Whatever the request."""
    request = identity.certificate_request(identity.load_or_make_key(tmp_path / "key"), "cam-1")
    with pytest.raises(UsageError):
        authority.sign_request(request, name)


def test_certificate_request_must_be_signed_by_its_own_key(authority: Authority, tmp_path: Path) -> None:
    """A flipped bit anywhere in what was signed, in the key or in the signature is refused with our own error."""
    key = identity.load_or_make_key(tmp_path / "key")
    request = x509.load_pem_x509_csr(identity.certificate_request(key, "cam-1")).public_bytes(Encoding.DER)
    unused_bits = len(request) - 65  # of the bit string that holds the signature: says nothing, and is not looked at
    for at in set(range(len(request))) - {unused_bits}:
        bad = bytearray(request)
        bad[at] ^= 0x01
        with pytest.raises(MalformedMessage):
            authority.sign_request(armoured(bytes(bad)), "cam-1")


def armoured(der: bytes) -> bytes:
    marker = b"CERTIFICATE REQUEST-----\n"
    return b"-----BEGIN " + marker + base64.encodebytes(der) + b"-----END " + marker


def test_only_ed25519_requests_of_bounded_size_are_signed(authority: Authority) -> None:
    """Another kind of key, too many bytes, and bytes that are no request at all are refused."""
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "cam-1")])
    other = x509.CertificateSigningRequestBuilder().subject_name(name)
    request = other.sign(ec.generate_private_key(ec.SECP256R1()), SHA256()).public_bytes(Encoding.PEM)
    for raw in (request, b"\0" * (ca.CSR_BYTES + 1), b"", b"junk", request[:100]):
        with pytest.raises(MalformedMessage):
            authority.sign_request(raw, "cam-1")


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1", "::1", "edge.example"])
def test_both_ends_verify_by_openssl_strict_rules(authority: Authority, tmp_path: Path, host: str) -> None:
    """A device and a server of one authority connect, by name or address."""
    server = authority.issue_server("offload", ["localhost", "127.0.0.1", "::1", "edge.example"]).server_context()
    client = device(authority, tmp_path, "cam-1").client_context()

    at_client, at_server = handshake(server, client, host)

    assert identity.peer_name(at_server) == "cam-1"
    assert identity.peer_name(at_client) == "offload"
    assert at_client.version() == "TLSv1.3"
    assert client.verify_flags & ssl.VERIFY_X509_STRICT and server.verify_flags & ssl.VERIFY_X509_STRICT


def test_server_at_another_address_is_refused(authority: Authority, tmp_path: Path) -> None:
    """A certificate is not valid for a name it was not issued for."""
    server = authority.issue_server("offload", ["localhost"]).server_context()
    client = device(authority, tmp_path, "cam-1").client_context()
    with pytest.raises(ssl.SSLCertVerificationError):
        handshake(server, client, "127.0.0.1")


def test_device_certificate_is_refused_as_a_servers(authority: Authority, tmp_path: Path) -> None:
    """It is for clients only, even where names are not checked."""
    server = device(authority, tmp_path, "cam-2").server_context()
    client = device(authority, tmp_path, "cam-1").client_context()
    client.check_hostname = False
    with pytest.raises(ssl.SSLCertVerificationError, match="purpose"):
        handshake(server, client, "localhost")


def test_certificate_of_another_authority_is_refused(authority: Authority, tmp_path: Path) -> None:
    """By either end."""
    foreign = Authority(tmp_path / "foreign")
    server = authority.issue_server("offload", ["localhost"])
    stranger = device(foreign, tmp_path, "cam-1")
    with pytest.raises(ssl.SSLCertVerificationError):
        handshake(server.server_context(), stranger.client_context(), "localhost")
    lured = Credentials(stranger.key_file, stranger.certificate_file, authority.certificate_file)
    with pytest.raises(ssl.SSLError):
        handshake(server.server_context(), lured.client_context(), "localhost")


def test_unenrolled_device_verifies_and_presents_no_certificate(authority: Authority) -> None:
    """The claim's authority is enough to verify the controller; the controller sees no name yet."""
    server = authority.issue_server("controller-api", ["localhost"]).server_context(client_required=False)
    _, at_server = handshake(server, identity.enrolment_context(authority.ca_pem), "localhost")
    assert identity.peer_name(at_server) is None


def test_connection_without_a_required_certificate_is_refused(authority: Authority) -> None:
    """Where client certificates are required, a client without one cannot connect."""
    server = authority.issue_server("offload", ["localhost"]).server_context()
    with pytest.raises(ssl.SSLError):
        handshake(server, identity.enrolment_context(authority.ca_pem), "localhost")


def test_authority_is_created_once(tmp_path: Path) -> None:
    """A restart finds the same authority and keeps its certificates; a new address makes a new one."""
    first = Authority(tmp_path)
    before = first.issue_server("broker", ["localhost"]).certificate_file.read_bytes()

    again = Authority(tmp_path)
    assert again.ca_pem == first.ca_pem
    assert again.issue_server("broker", ["localhost"]).certificate_file.read_bytes() == before
    assert again.issue_server("broker", ["localhost", "10.0.0.1"]).certificate_file.read_bytes() != before


def test_server_certificate_is_renewed_before_expiry(tmp_path: Path) -> None:
    """One with less than a third of its validity left is replaced."""
    Authority(tmp_path, leaf_life=timedelta(hours=6)).issue_client("controller")

    renewed = Authority(tmp_path).issue_client("controller")

    certificate = x509.load_pem_x509_certificate(renewed.certificate_file.read_bytes())
    assert certificate.not_valid_after_utc > datetime.now(timezone.utc) + timedelta(days=300)


def test_certificate_of_an_older_authority_is_replaced(tmp_path: Path) -> None:
    """After a new authority was made, the old one's certificates are not used."""
    Authority(tmp_path).issue_client("controller")
    (tmp_path / "ca.key").unlink()
    (tmp_path / "ca.pem").unlink()

    made = Authority(tmp_path)
    certificate = x509.load_pem_x509_certificate(made.issue_client("controller").certificate_file.read_bytes())

    certificate.verify_directly_issued_by(x509.load_pem_x509_certificate(made.ca_pem.encode()))


def test_authority_with_another_key_is_refused(tmp_path: Path) -> None:
    """Key and certificate of a half restored backup do not match: the error tells the operator so."""
    Authority(tmp_path / "a")
    Authority(tmp_path / "b")
    (tmp_path / "a" / "ca.key").write_bytes((tmp_path / "b" / "ca.key").read_bytes())
    with pytest.raises(UsageError, match="backup"):
        Authority(tmp_path / "a")


def test_device_side_imports_little() -> None:
    """Trust and identity load on a small device: no web framework, no YAML, no model library."""
    script = (
        "import sys, edgesplit.trust.identity, edgesplit.trust.store, edgesplit.mqtt.session, edgesplit.release_store\n"
        "print(sorted({'yaml', 'fastapi', 'onnx', 'onnxruntime', 'sqlalchemy', 'scipy'} & set(sys.modules)))"
    )
    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=60)
    assert ran.stdout.strip() == "[]"


def test_missing_credentials_are_named(tmp_path: Path) -> None:
    """In the error of a connection before enrolment."""
    with pytest.raises(UsageError, match="enrol first"):
        Credentials(tmp_path / "k", tmp_path / "c", tmp_path / "a").client_context()


def test_certificates_are_valid_from_some_hours_ago(authority: Authority, tmp_path: Path) -> None:
    """A device whose clock is some hours behind can connect at once."""
    credentials = device(authority, tmp_path, "cam-1")
    certificate = x509.load_pem_x509_certificate(credentials.certificate_file.read_bytes())
    assert certificate.not_valid_before_utc.timestamp() < time.time() - 12 * 3600
