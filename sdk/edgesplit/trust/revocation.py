"""Certificate revocation lists (CRLs), verified by the signature of the installation's certificate authority."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePublicKey
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

from edgesplit.errors import TrustError, UsageError

AuthorityKey = Ed25519PublicKey | EllipticCurvePublicKey
"""Public key of a certificate authority."""
RENEWED_AFTER_PART = 1 / 3
"""Part of its validity after which a revocation list is renewed."""


def authority_key(ca_file: Path) -> AuthorityKey:
    """Public key of the authority's certificate in `ca_file` (PEM); UsageError where the file does not contain one."""
    try:
        key = x509.load_pem_x509_certificate(ca_file.read_bytes()).public_key()
    except (OSError, ValueError) as error:
        raise UsageError(f"{ca_file} cannot be read as a certificate: {error}") from error
    if not isinstance(key, Ed25519PublicKey | EllipticCurvePublicKey):
        raise UsageError(f"{ca_file}: the authority's key is neither Ed25519 nor ECDSA")
    return key


@dataclass(frozen=True, slots=True)
class RevocationList:
    """An authentic revocation list. One that has expired still revokes what it lists; newer revocations may be missing
    in it."""

    serials: frozenset[int]
    issued: float
    """Unix time from which it is valid."""
    expires: float
    """Unix time until which a newer list must have come."""

    def is_due(self, now: float) -> bool:
        """Whether it must be renewed, at the Unix time `now`: a third of its validity has passed."""
        return now >= self.issued + (self.expires - self.issued) * RENEWED_AFTER_PART


def parse_revocation_list(raw: bytes, authority: AuthorityKey, name: object = "this") -> RevocationList:
    """The revocation list in `raw` (PEM), which is called `name` in errors, expired or not; TrustError unless the
    authority signed it."""
    try:
        crl = x509.load_pem_x509_crl(raw)
        is_authentic = crl.is_signature_valid(authority)
        serials = frozenset(entry.serial_number for entry in crl)
        issued = crl.last_update_utc.timestamp()
        expires = crl.next_update_utc.timestamp() if crl.next_update_utc is not None else math.inf
    except Exception as error:  # the OpenSSL binding raises many types for malformed bytes, not only ValueError
        raise TrustError(f"{name} is no revocation list: {error}") from error
    if not is_authentic:
        raise TrustError(f"{name} is not a revocation list of our authority")
    return RevocationList(serials, issued, expires)
