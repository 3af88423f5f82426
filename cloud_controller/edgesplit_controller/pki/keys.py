"""Private keys of the CA and of the servers that browsers connect to: ECDSA over P-256, because browsers do not support
Ed25519.

An installation whose CA was created with Ed25519 keeps that key: devices trust it as before, and browsers warn.
Devices' own keys are Ed25519 either way (`edgesplit.trust.identity`).
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Protocol, TypeVar

from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ec import SECP256R1, EllipticCurvePrivateKey, generate_private_key
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.hashes import SHA256

from edgesplit.atomic_files import write_durably
from edgesplit.errors import UsageError

AuthorityKey = Ed25519PrivateKey | EllipticCurvePrivateKey
AUTHORITY_KEY = "ca.key"
"""File with a certificate authority's key, in its folder."""
Signed = TypeVar("Signed", covariant=True)


class Builder(Protocol[Signed]):
    """A builder of a certificate or a revocation list (of `cryptography.x509`)."""

    def sign(self, private_key: AuthorityKey, algorithm: SHA256 | None) -> Signed:
        """Return the signed object."""
        ...


def load_or_make_authority_key(path: Path) -> AuthorityKey:
    """The key stored in `path`, of either type; a P-256 key is created there if there is none. UsageError if the file
    holds no such key."""
    key = _load(path)
    if key is None:
        return _make(path)
    if not isinstance(key, Ed25519PrivateKey | EllipticCurvePrivateKey):
        raise UsageError(f"{path} holds no key of an authority; restore it from a backup")
    if path.stat().st_mode & 0o077:
        os.chmod(path, 0o600)
    return key


def load_or_make_web_key(path: Path) -> EllipticCurvePrivateKey:
    """The key of a server that browsers connect to. A key of another type is replaced."""
    key = _load(path)
    return key if isinstance(key, EllipticCurvePrivateKey) else _make(path)


def sign_with(builder: Builder[Signed], key: AuthorityKey) -> Signed:
    """Sign what was built, with the hash that this type of key takes (Ed25519 takes none)."""
    return builder.sign(key, None if isinstance(key, Ed25519PrivateKey) else SHA256())


def private_bytes(key: AuthorityKey) -> bytes:
    """The private scalar or seed alone (32 bytes)."""
    if isinstance(key, Ed25519PrivateKey):
        return key.private_bytes_raw()
    return key.private_numbers().private_value.to_bytes(32, "big")


def _load(path: Path) -> object | None:
    try:
        return serialization.load_pem_private_key(path.read_bytes(), None)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise UsageError(f"cannot read the private key {path}: {error.strerror}") from error
    except (ValueError, TypeError) as error:
        raise UsageError(f"{path} holds no private key in PEM; restore it from a backup") from error


def _make(path: Path) -> EllipticCurvePrivateKey:
    key = generate_private_key(SECP256R1())
    raw = key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    try:
        write_durably(path, raw, mode=0o600)
    except OSError as error:
        raise UsageError(f"cannot write the private key {path}: {error.strerror}") from error
    return key
