"""Identities: key pairs generated where they are used, certificates of the controller's certificate authority, and the
documents of enrolment.

Ed25519 only, TLS 1.3 only, private keys readable by their owner only, both sides of a connection verified with
OpenSSL's strict rules. The controller decides which devices may enrol, the broker what a device may access.
"""

from __future__ import annotations

import ssl
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import msgspec
from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.x509.oid import NameOID

from edgesplit import identifiers
from edgesplit.crypto.private_key import load_or_make_private_key
from edgesplit.decoding import decode_json
from edgesplit.errors import MalformedMessage, TrustError, UsageError
from edgesplit.msgspec_warmup import warm_up_structs

_DOCUMENT_BYTES = 65_536
_T = TypeVar("_T")


class Claim(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Enrolment claim that an operator hands to a new device: a one-time token for the device name, and the trust
    anchors."""

    device: str
    device_class: str
    token: str
    controller_url: str
    ca_pem: str
    tuf_root: str
    """The trusted TUF root, as JSON text: the device's permanent trust anchor."""
    expires: int
    """Unix seconds."""

    def __repr__(self) -> str:
        """Omits the token, because logs are read by others."""
        return f"Claim(device={self.device!r}, controller_url={self.controller_url!r}, expires={self.expires})"


class EnrolmentRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Request of a device to the controller to be enrolled under the name in its claim."""

    token: str
    csr_pem: str
    encryption_key: bytes = b""
    """X25519 public key for content keys (`edgesplit.crypto.key_wrapping`). A device without one cannot be sent
    encrypted models."""
    encryption_signature: bytes = b""
    """Signature by the certificate request's key, which proves that both keys are of one device."""

    def __repr__(self) -> str:
        """Omits the token."""
        return "EnrolmentRequest(...)"


class Renewal(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Request of a device for a new certificate, for a new key, authorised by its old key.

    It is authorised by the old key and not by the connection: with an expired certificate there is no connection, and
    yet a device that was offline for long must be able to renew without an operator.
    """

    certificate_pem: str
    """The current certificate, expired or not."""
    csr_pem: str
    """Certificate request for the new key."""
    signature: bytes
    """Signature by the key of `certificate_pem` over `renewal_text(csr_pem)`."""


class Enrolled(msgspec.Struct, frozen=True, kw_only=True):
    """The controller's response: the certificate, and the addresses of broker and offload server."""

    device: str
    certificate_pem: str
    ca_pem: str
    broker_host: str
    broker_port: int
    offload_url: str


def decode_claim(raw: bytes) -> Claim:
    """Decode a claim; MalformedMessage where it is invalid. Its expiry is checked by the controller."""
    claim = decode_document(raw, Claim)
    try:
        identifiers.device_name(claim.device)
    except UsageError as error:
        raise MalformedMessage(f"claim: {error}") from error
    return claim


def encode_document(document: msgspec.Struct) -> bytes:
    """Encode an enrolment request or response as JSON."""
    return msgspec.json.encode(document)


def decode_document(raw: bytes, kind: type[_T]) -> _T:
    """Decode a JSON document of type `kind` of bounded size; MalformedMessage for anything else."""
    return decode_json(raw, kind, kind.__name__, _DOCUMENT_BYTES)


def renewal_text(csr_pem: str) -> bytes:
    """The message that the old key signs. Its prefix is unique among everything this key signs (domain separation)."""
    return b"edgesplit renewal 1\n" + csr_pem.encode()


def check_renewal(renewal: Renewal, old_certificate: x509.Certificate) -> None:
    """Verify that the holder of the key of `old_certificate` signed this request; TrustError otherwise. The caller must
    verify that certificate itself."""
    key = old_certificate.public_key()
    try:
        if not isinstance(key, Ed25519PublicKey):
            raise MalformedMessage("the old certificate's key is not Ed25519")
        key.verify(renewal.signature, renewal_text(renewal.csr_pem))
    except InvalidSignature as error:
        raise TrustError("the renewal is not signed by the key of its old certificate") from error


def load_or_make_key(path: Path) -> Ed25519PrivateKey:
    """Load the private key from `path`, or generate it there (mode 0600, durably) if the file does not exist."""
    return load_or_make_private_key(path, Ed25519PrivateKey, "move it away to have one made")  # type: ignore[type-abstract]


def certificate_request(key: Ed25519PrivateKey, name: str) -> bytes:
    """Certificate signing request (PEM). Its name is informative: the authority takes the name from the claim."""
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, identifiers.device_name(name))])
    request = x509.CertificateSigningRequestBuilder().subject_name(subject).sign(key, None)
    return request.public_bytes(serialization.Encoding.PEM)


@dataclass(frozen=True, slots=True)
class Credentials:
    """Files with our private key and certificate, and the authority that verifies the peer's."""

    key_file: Path
    certificate_file: Path
    ca_file: Path

    def client_context(self) -> ssl.SSLContext:
        """TLS context of a client: presents our certificate, verifies the server's chain and name."""
        context = _strict(ssl.PROTOCOL_TLS_CLIENT)
        self._load(context)
        return context

    def server_context(self, *, client_required: bool = True) -> ssl.SSLContext:
        """TLS context of a server: clients must present a certificate of our authority; with `client_required` false
        they may present none."""
        context = _strict(ssl.PROTOCOL_TLS_SERVER)
        context.verify_mode = ssl.CERT_REQUIRED if client_required else ssl.CERT_OPTIONAL
        self._load(context)
        return context

    def _load(self, context: ssl.SSLContext) -> None:
        for file in (self.key_file, self.certificate_file, self.ca_file):
            if not file.is_file():
                raise UsageError(f"no such file: {file}; enrol first")
        try:
            context.load_verify_locations(self.ca_file)
            context.load_cert_chain(self.certificate_file, self.key_file)
        except (ssl.SSLError, OSError) as error:
            raise UsageError(f"{self.certificate_file}, {self.key_file}, {self.ca_file}: {error}") from error


def enrolment_context(ca_pem: str) -> ssl.SSLContext:
    """TLS context of a client without a certificate: verifies the server by the claim's authority."""
    context = _strict(ssl.PROTOCOL_TLS_CLIENT)
    try:
        context.load_verify_locations(cadata=ca_pem)
    except (ssl.SSLError, ValueError, TypeError) as error:  # TypeError: a letter that is not ASCII
        raise MalformedMessage(f"the claim's authority is no certificate: {error}") from error
    return context


def _strict(protocol: int) -> ssl.SSLContext:
    context = ssl.SSLContext(protocol)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.verify_flags |= ssl.VERIFY_X509_STRICT
    return context


def certificate_name(file: Path) -> str:
    """Common name in the certificate in `file` (PEM); UsageError if there is none."""
    try:
        subject = x509.load_pem_x509_certificate(file.read_bytes()).subject
        return str(subject.get_attributes_for_oid(NameOID.COMMON_NAME)[0].value)
    except (OSError, ValueError, IndexError) as error:
        raise UsageError(f"{file} cannot be read as a certificate with a name: {error}") from error


def peer_name(connection: ssl.SSLSocket | ssl.SSLObject) -> str | None:
    """Common name of the peer's verified certificate; None if it presented none, or one with several common names."""
    subject = (connection.getpeercert() or {}).get("subject", ())
    common_names = [value for part in subject for key, value in part if key == "commonName"]  # type: ignore[str-unpack]
    return str(common_names[0]) if len(common_names) == 1 else None


warm_up_structs(__name__)
