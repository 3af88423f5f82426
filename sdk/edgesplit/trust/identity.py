"""Who is who: a key pair made where it is used, a certificate of the controller's authority, and what enrolment says.

Promises: Ed25519 only, TLS 1.3 only, private keys readable by their owner only, both sides of a connection verified
with OpenSSL's strict rules. Who may be enrolled is the controller's business; what a name may do is the broker's.
"""

from __future__ import annotations

import os
import ssl
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import msgspec
from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from cryptography.x509.oid import NameOID

from edgesplit import identifiers
from edgesplit.atomic_files import write_durably
from edgesplit.errors import MalformedMessage, TrustError, UsageError
from edgesplit.msgspec_warmup import settle

_DOCUMENT_BYTES = 65_536
_T = TypeVar("_T")


class Claim(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What an operator hands to a new device: a one-time right to the name, and whom to believe from then on."""

    device: str
    device_class: str
    token: str
    controller_url: str
    ca_pem: str
    tuf_root: str
    """The trusted TUF root, as JSON text: the device's bootstrap for ever after."""
    expires: int
    """Unix seconds."""

    def __repr__(self) -> str:
        """Without the token: logs are read by others."""
        return f"Claim(device={self.device!r}, controller_url={self.controller_url!r}, expires={self.expires})"


class EnrolmentRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a device posts to the controller to become the name it was promised."""

    token: str
    csr_pem: str
    encryption_key: bytes = b""
    """X25519: what content keys are wrapped to (`edgesplit.crypto.key_wrapping`). A device without gets nothing
    encrypted."""
    encryption_signature: bytes = b""
    """By the request's own key: both keys are one device's."""

    def __repr__(self) -> str:
        """Without the token."""
        return "EnrolmentRequest(...)"


class Renewal(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a device posts to get a new certificate, for a new key, by the right of the one it has.

    The right is the old key, not the connection: a certificate that has expired makes no connection any more, and yet
    a device that was away for long shall come back by itself.
    """

    certificate_pem: str
    """The certificate it has, expired or not."""
    csr_pem: str
    """For the key that it will use next."""
    signature: bytes
    """By the key of `certificate_pem` over `renewal_text(csr_pem)`."""


class Enrolled(msgspec.Struct, frozen=True, kw_only=True):
    """The controller's answer: the certificate, and where everything is."""

    device: str
    certificate_pem: str
    ca_pem: str
    broker_host: str
    broker_port: int
    offload_url: str


def encode_claim(claim: Claim) -> bytes:
    """The claim as a file an operator can copy to a device. It holds a secret: keep it as one (mode 0600)."""
    return msgspec.json.format(msgspec.json.encode(claim), indent=1) + b"\n"


def decode_claim(raw: bytes) -> Claim:
    """The claim in `raw`; MalformedMessage if it is none. Whether it has expired is the controller's word."""
    claim = decode_document(raw, Claim)
    try:
        identifiers.device_name(claim.device)
    except UsageError as error:
        raise MalformedMessage(f"claim: {error}") from error
    return claim


def encode_document(document: msgspec.Struct) -> bytes:
    """An enrolment request or answer as JSON."""
    return msgspec.json.encode(document)


def decode_document(raw: bytes, kind: type[_T]) -> _T:
    """The JSON document of type `kind` in `raw`, bounded; MalformedMessage for anything else."""
    if len(raw) > _DOCUMENT_BYTES:
        raise MalformedMessage(f"{kind.__name__}: {len(raw)} bytes, at most {_DOCUMENT_BYTES}")
    try:
        return msgspec.json.decode(raw, type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise MalformedMessage(f"{kind.__name__}: {error}") from error


def renewal_text(csr_pem: str) -> bytes:
    """What the old key signs: nothing else that it ever signs begins like this."""
    return b"edgesplit renewal 1\n" + csr_pem.encode()


def check_renewal(renewal: Renewal, old: x509.Certificate) -> None:
    """The holder of `old` asks for exactly this; TrustError otherwise. Whose `old` is, the caller knows."""
    key = old.public_key()
    try:
        if not isinstance(key, Ed25519PublicKey):
            raise MalformedMessage("the old certificate's key is not Ed25519")
        key.verify(renewal.signature, renewal_text(renewal.csr_pem))
    except InvalidSignature as error:
        raise TrustError("the renewal is not signed by the key of its old certificate") from error


def load_or_make_key(path: Path) -> Ed25519PrivateKey:
    """The private key kept in `path`, made there (0600, durably) if there is none."""
    try:
        raw = path.read_bytes()
    except FileNotFoundError:
        return _make_key(path)
    except OSError as error:
        raise UsageError(f"cannot read the private key {path}: {error.strerror}") from error
    try:
        key = serialization.load_pem_private_key(raw, None)
    except (ValueError, TypeError) as error:
        raise UsageError(f"{path} holds no private key in PEM; move it away to have one made") from error
    if not isinstance(key, Ed25519PrivateKey):
        raise UsageError(f"{path} holds no Ed25519 key; move it away to have one made")
    if path.stat().st_mode & 0o077:
        os.chmod(path, 0o600)
    return key


def _make_key(path: Path) -> Ed25519PrivateKey:
    key = Ed25519PrivateKey.generate()
    try:
        write_durably(path, private_pem(key), mode=0o600)
    except OSError as error:
        raise UsageError(f"cannot write the private key {path}: {error.strerror}") from error
    return key


def private_pem(key: Ed25519PrivateKey | X25519PrivateKey) -> bytes:
    """The key as PKCS#8 PEM, not encrypted: its file's mode is what guards it."""
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )


def certificate_request(key: Ed25519PrivateKey, name: str) -> bytes:
    """A certificate signing request (PEM). The name in it is a courtesy: the authority takes it from the claim."""
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, identifiers.device_name(name))])
    request = x509.CertificateSigningRequestBuilder().subject_name(subject).sign(key, None)
    return request.public_bytes(serialization.Encoding.PEM)


@dataclass(frozen=True, slots=True)
class Credentials:
    """Files that prove who we are, and the authority by which we judge others."""

    key_file: Path
    certificate_file: Path
    ca_file: Path

    def client_context(self) -> ssl.SSLContext:
        """For connecting: shows our certificate, verifies the server's chain and name."""
        context = _strict(ssl.PROTOCOL_TLS_CLIENT)
        self._load(context)
        return context

    def server_context(self, *, client_required: bool = True) -> ssl.SSLContext:
        """For listening: clients must show a certificate of our authority, or may come without if not required."""
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
    """For connecting before there is a certificate: verifies the server by the claim's authority, shows nothing."""
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


def peer_name(connection: ssl.SSLSocket | ssl.SSLObject) -> str | None:
    """The common name on the other side's verified certificate, or None if it showed none or one with several."""
    subject = (connection.getpeercert() or {}).get("subject", ())
    found = [value for part in subject for key, value in part if key == "commonName"]  # type: ignore[str-unpack]
    return str(found[0]) if len(found) == 1 else None


settle(__name__)
