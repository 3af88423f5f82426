"""Encoding of private keys as they are stored in files."""

from __future__ import annotations

from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey


def private_pem(key: Ed25519PrivateKey | X25519PrivateKey) -> bytes:
    """Encode the key as unencrypted PKCS#8 PEM; it is protected by its file's mode."""
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
