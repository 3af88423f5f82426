"""Secrets that every controller process of an installation derives alike, such as the name of the shared subscriptions.

They are derived from `keys/derivation.key`, a random secret: the authority's key signs, and does nothing else. Before
0.3 they were derived from the authority's key. An installation that has such a key and no `derivation.key` stores the
intermediate key of that derivation (HKDF-Extract, RFC 5869), from which the authority's key cannot be computed, and
which gives the same secrets; every process, and every start on an old backup, computes the same file.
"""

from __future__ import annotations

import hmac
from pathlib import Path

from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDFExpand

from edgesplit_controller.pki.keys import AUTHORITY_KEY, load_or_make_authority_key, private_bytes
from edgesplit_controller.pki.secret_file import SECRET_BYTES, load_or_make_secret, random_secret

DERIVATION_KEY = "derivation.key"
"""File in the folder of keys."""
DERIVED_BYTES = 16


class DerivedSecrets:
    """The derived secrets of the installation whose keys are in `folder`. Created before its authority, so that a new
    installation's are independent of the authority's key."""

    def __init__(self, folder: Path) -> None:
        def make() -> bytes:
            key_file = folder / AUTHORITY_KEY
            return _extract_from_authority(key_file) if key_file.exists() else random_secret()

        hint = "restore it from a backup; without one move it away, and start all controller processes again"
        self._key = load_or_make_secret(folder / DERIVATION_KEY, hint, make)

    def derive(self, purpose: str) -> str:
        """The secret (hex) for that purpose: the same in every process of this installation, and unknown to others."""
        return HKDFExpand(SHA256(), DERIVED_BYTES, f"edgesplit {purpose}".encode()).derive(self._key).hex()


def _extract_from_authority(key_file: Path) -> bytes:
    """HKDF-Extract without a salt of the authority's private scalar or seed."""
    return hmac.digest(bytes(SECRET_BYTES), private_bytes(load_or_make_authority_key(key_file)), "sha256")
