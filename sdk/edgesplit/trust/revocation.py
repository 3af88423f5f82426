"""Revocation lists as they are believed: signed by the authority of the installation, and by nobody else."""

from __future__ import annotations

from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePublicKey
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

from edgesplit.errors import TrustError, UsageError

AuthorityKey = Ed25519PublicKey | EllipticCurvePublicKey


def authority_key(ca_file: Path) -> AuthorityKey:
    """The key by which the authority in `ca_file` (PEM) signs; UsageError where the file does not hold one."""
    try:
        key = x509.load_pem_x509_certificate(ca_file.read_bytes()).public_key()
    except (OSError, ValueError) as error:
        raise UsageError(f"{ca_file} cannot be read as a certificate: {error}") from error
    if not isinstance(key, Ed25519PublicKey | EllipticCurvePublicKey):
        raise UsageError(f"{ca_file}: the authority's key is neither Ed25519 nor ECDSA")
    return key


def revoked_in(raw: bytes, authority: AuthorityKey, name: object = "this") -> frozenset[int]:
    """The serial numbers in a revocation list (PEM), called `name` in errors; TrustError if another signed it."""
    try:
        listed = x509.load_pem_x509_crl(raw)
        ours = listed.is_signature_valid(authority)
        serials = frozenset(entry.serial_number for entry in listed)
    except Exception as error:  # OpenSSL's binding has many ways to dislike bytes, and not all are a ValueError
        raise TrustError(f"{name} is no revocation list: {error}") from error
    if not ours:
        raise TrustError(f"{name} is not a revocation list of our authority")
    return serials
