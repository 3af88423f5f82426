"""The certificate authority (CA) of one installation: created on first use, it issues certificates to servers, clients
and enrolled devices.

Promises: a CA certificate of ten years (its key: `pki.keys`), leaf certificates of one year with one purpose each (a
device's certificate cannot authenticate a server), chains that pass OpenSSL's strict verification. Whether an enrolment
claim is valid is decided by the caller.
"""

from __future__ import annotations

import ipaddress
import os
import ssl
import time
from collections.abc import Iterable, Sequence
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Final

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePublicKey
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.serialization import Encoding
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from edgesplit import identifiers
from edgesplit.atomic_files import write_durably
from edgesplit.crypto.private_key import private_pem
from edgesplit.errors import MalformedMessage, UsageError
from edgesplit.trust.identity import Credentials, load_or_make_key
from edgesplit_controller.pki.keys import AUTHORITY_KEY, load_or_make_authority_key, load_or_make_web_key, sign_with

LeafKey = Ed25519PublicKey | EllipticCurvePublicKey
AUTHORITY: Final = "edgesplit authority"
AUTHORITY_LIFE: Final = timedelta(days=3650)
"""Validity of the CA certificate."""
LEAF_LIFE: Final = timedelta(days=365)
"""Validity of a leaf certificate."""
RENEW_LEFT_RATIO: Final = 1 / 3
"""A stored leaf certificate is renewed when less than this part of its validity is left."""
LIST_LIFE: Final = timedelta(days=30)
"""Validity of a revocation list; `Revocations` renews it after a third."""
BROKER_LIST_LIFE: Final = LEAF_LIFE
"""Validity of a broker's revocation list: as long as the broker's own certificate. OpenSSL, and so mosquitto, refuses
every client by an expired list, the controller too (docs/decisions/0056)."""
TAKEOVER_LIFE: Final = timedelta(minutes=10)
"""Validity of a certificate with which the controller takes over, and thereby ends, a device's broker session."""
BACKDATE: Final = timedelta(days=1)
"""Start of validity lies this far in the past, because the clocks of devices without a battery are a little behind."""
CSR_BYTES: Final = 8_192
"""Size limit of a certificate request and of a presented certificate."""
_NO_OTHER_USAGE: Final = {
    "content_commitment": False, "key_encipherment": False, "data_encipherment": False, "key_agreement": False,
    "encipher_only": False, "decipher_only": False,
}  # fmt: skip
"""Key usages that no certificate of ours has."""


class Authority:
    """The CA stored in `folder`, created there if there is none. Its private key never leaves the folder."""

    def __init__(self, folder: Path, name: str = AUTHORITY, *, leaf_life: timedelta = LEAF_LIFE) -> None:
        """`leaf_life` is the validity of certificates that it issues."""
        self._folder = folder
        self._name = name
        self._leaf_life = leaf_life
        self.certificate_file = folder / "ca.pem"
        self._key = load_or_make_authority_key(folder / AUTHORITY_KEY)
        self._certificate = _load_certificate(self.certificate_file) or self._make()
        if self._certificate.public_key() != self._key.public_key():
            raise UsageError(
                f"{self.certificate_file} does not belong to {folder / AUTHORITY_KEY}: restore both from one backup"
            )

    @property
    def ca_pem(self) -> str:
        """The CA certificate (PEM), by which peers verify certificates of this installation."""
        return self._certificate.public_bytes(Encoding.PEM).decode()

    def issue_server(self, name: str, hosts: Sequence[str], *, for_browsers: bool = False) -> Credentials:
        """Credentials of one of our servers, reachable as `hosts` (DNS names and addresses). Stored, and renewed when
        due. `for_browsers`: with a key type that browsers support."""
        if not hosts:
            raise UsageError(f"server {name!r} needs at least one host name or address")
        return self._issue(name, ExtendedKeyUsageOID.SERVER_AUTH, _alternative_names(hosts), web=for_browsers)

    def issue_client(self, name: str) -> Credentials:
        """Credentials of one of our clients, such as `controller`. Stored, and renewed when due."""
        return self._issue(name, ExtendedKeyUsageOID.CLIENT_AUTH, None)

    def sign_request(self, csr_pem: bytes, name: str) -> bytes:
        """A device's certificate (PEM) for the public key in `csr_pem`. The subject is `name`, from the claim; the
        request's subject is ignored."""
        subject = identifiers.device_name(name)
        certificate = self._leaf(subject, _requested_key(csr_pem), ExtendedKeyUsageOID.CLIENT_AUTH, None)
        return certificate.public_bytes(Encoding.PEM)

    def sign_operator(self, csr_pem: bytes, name: str, expires: float | None) -> bytes:
        """An operator's certificate (PEM) for the public key in `csr_pem`, valid until `expires`, but a year at
        most."""
        remaining = timedelta(seconds=expires - time.time()) if expires is not None else self._leaf_life
        key, purpose = _requested_key(csr_pem), ExtendedKeyUsageOID.CLIENT_AUTH
        return self._leaf(name, key, purpose, None, min(self._leaf_life, remaining)).public_bytes(Encoding.PEM)

    def sign_gateway(self, csr_pem: bytes, name: str) -> bytes:
        """Certificate (PEM) of that gateway's server, for the public key in `csr_pem`: valid for the gateway's own host
        name and no other, at whatever address it is reached."""
        host = identifiers.gateway_host(name)
        key, purpose = _requested_key(csr_pem), ExtendedKeyUsageOID.SERVER_AUTH
        return self._leaf(host, key, purpose, _alternative_names([host])).public_bytes(Encoding.PEM)

    def parse_device_certificate(self, certificate_pem: bytes) -> x509.Certificate:
        """Parse a device's certificate that this CA issued, expired or not; MalformedMessage for anything else.
        Revocation is not checked."""
        if len(certificate_pem) > CSR_BYTES:
            raise MalformedMessage(f"certificate of {len(certificate_pem)} bytes, at most {CSR_BYTES}")
        try:
            certificate = x509.load_pem_x509_certificate(certificate_pem)
            certificate.verify_directly_issued_by(self._certificate)
            purposes = certificate.extensions.get_extension_for_class(x509.ExtendedKeyUsage).value
        except Exception as error:  # as for requests: OpenSSL has many ways to dislike bytes
            raise MalformedMessage(f"not a certificate of this authority: {error}") from error
        if list(purposes) != [ExtendedKeyUsageOID.CLIENT_AUTH]:
            raise MalformedMessage("not a device's certificate")
        return certificate

    def revocation_list(self, serials: Iterable[int], life: timedelta = LIST_LIFE) -> bytes:
        """A signed certificate revocation list (PEM) of these serial numbers, valid for `life`."""
        now = datetime.now(timezone.utc)
        builder = x509.CertificateRevocationListBuilder(
            issuer_name=self._certificate.subject, last_update=now - BACKDATE, next_update=now + life
        )
        for serial in sorted(set(serials)):
            entry = x509.RevokedCertificateBuilder(serial_number=serial, revocation_date=now)
            builder = builder.add_revoked_certificate(entry.build())
        issuer = x509.AuthorityKeyIdentifier.from_issuer_public_key(self._key.public_key())
        unsigned_list = builder.add_extension(issuer, critical=False).add_extension(
            x509.CRLNumber(int(now.timestamp() * 1000)), critical=False
        )
        return sign_with(unsigned_list, self._key).public_bytes(Encoding.PEM)

    def takeover_context(self, name: str) -> ssl.SSLContext:
        """TLS context for one connection under a device's own name, so that the broker ends the existing session of
        that name.

        The certificate is valid for minutes, and its private key exists only in memory.
        """
        key = Ed25519PrivateKey.generate()
        subject = identifiers.device_name(name)
        certificate = self._leaf(subject, key.public_key(), ExtendedKeyUsageOID.CLIENT_AUTH, None, TAKEOVER_LIFE)
        descriptor = os.memfd_create("takeover", os.MFD_CLOEXEC)
        try:
            os.write(descriptor, private_pem(key) + certificate.public_bytes(Encoding.PEM))
            file = Path(f"/proc/self/fd/{descriptor}")
            return Credentials(file, file, self.certificate_file).client_context()
        finally:
            os.close(descriptor)

    def _make(self) -> x509.Certificate:
        public = self._key.public_key()
        subject = _name(self._name)
        builder = (
            _builder(subject, subject, public, AUTHORITY_LIFE)
            .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            .add_extension(_key_usage(signs_certificates=True), critical=True)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(public), critical=False)
            .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(public), critical=False)
        )
        certificate = sign_with(builder, self._key)
        write_durably(self.certificate_file, certificate.public_bytes(Encoding.PEM))
        return certificate

    def _issue(
        self, name: str, purpose: x509.ObjectIdentifier, alternatives: x509.SubjectAlternativeName | None, *,
        web: bool = False,
    ) -> Credentials:  # fmt: skip
        """The stored credentials if they are still valid for this use, else new ones."""
        identifiers.slice_name(name)  # safe as a file name
        credentials = Credentials(self._folder / f"{name}.key", self._folder / f"{name}.pem", self.certificate_file)
        load = load_or_make_web_key if web else load_or_make_key
        public = load(credentials.key_file).public_key()
        if not self._is_valid_for(_load_certificate(credentials.certificate_file), public, purpose, alternatives):
            certificate = self._leaf(name, public, purpose, alternatives)
            write_durably(credentials.certificate_file, certificate.public_bytes(Encoding.PEM))
        return credentials

    def _is_valid_for(
        self, certificate: x509.Certificate | None, public: LeafKey, purpose: x509.ObjectIdentifier,
        alternatives: x509.SubjectAlternativeName | None,
    ) -> bool:  # fmt: skip
        if certificate is None or certificate.public_key() != public:
            return False
        life = certificate.not_valid_after_utc - certificate.not_valid_before_utc
        if certificate.not_valid_after_utc - datetime.now(timezone.utc) < life * RENEW_LEFT_RATIO:
            return False
        try:
            certificate.verify_directly_issued_by(self._certificate)
            purposes = certificate.extensions.get_extension_for_class(x509.ExtendedKeyUsage).value
        except (ValueError, TypeError, InvalidSignature, x509.ExtensionNotFound):
            return False
        return list(purposes) == [purpose] and _alternatives_of(certificate) == alternatives

    def _leaf(
        self, name: str, public: LeafKey, purpose: x509.ObjectIdentifier,
        alternatives: x509.SubjectAlternativeName | None, life: timedelta | None = None,
    ) -> x509.Certificate:  # fmt: skip
        issuer = self._key.public_key()
        builder = (
            _builder(_name(name), self._certificate.subject, public, life or self._leaf_life)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(_key_usage(signs_certificates=False), critical=True)
            .add_extension(x509.ExtendedKeyUsage([purpose]), critical=False)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(public), critical=False)
            .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(issuer), critical=False)
        )
        if alternatives is not None:
            builder = builder.add_extension(alternatives, critical=False)
        return sign_with(builder, self._key)


def _name(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])


def _builder(subject: x509.Name, issuer: x509.Name, public: LeafKey, life: timedelta) -> x509.CertificateBuilder:
    now = datetime.now(timezone.utc)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(public)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - BACKDATE)
        .not_valid_after(now + life)
    )


def _key_usage(*, signs_certificates: bool) -> x509.KeyUsage:
    """A CA signs certificates and revocation lists; a leaf signs handshakes."""
    return x509.KeyUsage(
        digital_signature=not signs_certificates,
        key_cert_sign=signs_certificates,
        crl_sign=signs_certificates,
        **_NO_OTHER_USAGE,
    )


def _alternative_names(hosts: Sequence[str]) -> x509.SubjectAlternativeName:
    return x509.SubjectAlternativeName([_alternative_name(host) for host in sorted(set(hosts))])


def _alternative_name(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        pass
    try:
        return x509.DNSName(host.encode("idna").decode("ascii"))
    except (UnicodeError, ValueError) as error:
        raise UsageError(f"neither a host name nor an address: {host[:80]!r}") from error


def _alternatives_of(certificate: x509.Certificate) -> x509.SubjectAlternativeName | None:
    try:
        return certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except x509.ExtensionNotFound:
        return None


def _load_certificate(path: Path) -> x509.Certificate | None:
    try:
        return x509.load_pem_x509_certificate(path.read_bytes())
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise UsageError(f"{path} cannot be read as a certificate: {error}") from error


def _requested_key(csr_pem: bytes) -> Ed25519PublicKey:
    """The public key of a certificate request with a valid self-signature; MalformedMessage for anything else."""
    if len(csr_pem) > CSR_BYTES:
        raise MalformedMessage(f"certificate request of {len(csr_pem)} bytes, at most {CSR_BYTES}")
    try:
        request = x509.load_pem_x509_csr(csr_pem)
        public, is_self_signed = request.public_key(), request.is_signature_valid
    except Exception as error:  # OpenSSL has many ways to dislike bytes, and none of them is ours to handle
        raise MalformedMessage(f"not a certificate request: {error}") from error
    if not isinstance(public, Ed25519PublicKey):
        raise MalformedMessage("certificate request for a key that is not Ed25519")
    if not is_self_signed:
        raise MalformedMessage("certificate request not signed by its own key")
    return public
