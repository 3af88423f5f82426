"""Private keys in files: unencrypted PKCS#8 PEM, readable by their owner only."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TypeVar

from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

from edgesplit.atomic_files import write_durably
from edgesplit.errors import UsageError

Key = TypeVar("Key", Ed25519PrivateKey, X25519PrivateKey)


def private_pem(key: Ed25519PrivateKey | X25519PrivateKey) -> bytes:
    """Encode the key as unencrypted PKCS#8 PEM; it is protected by its file's mode."""
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )


def load_private_key(path: Path, kind: type[Key], hint: str) -> Key:
    """Load a key of type `kind`, and close its file to others. UsageError, which ends with `hint`, where it is lost or
    damaged."""
    try:
        key = serialization.load_pem_private_key(path.read_bytes(), None)
    except OSError as error:
        raise UsageError(f"cannot read the private key {path}: {error.strerror}; {hint}") from error
    except (ValueError, TypeError) as error:
        raise UsageError(f"{path} holds no private key in PEM; {hint}") from error
    if not isinstance(key, kind):
        raise UsageError(f"{path} holds no {kind.__name__.removesuffix('PrivateKey')} key; {hint}")
    if path.stat().st_mode & 0o077:
        os.chmod(path, 0o600)
    return key


def load_or_make_private_key(path: Path, kind: type[Key], hint: str) -> Key:
    """Load the key, or generate it (mode 0600, durably) where the file does not exist."""
    if path.exists():
        return load_private_key(path, kind, hint)
    key = kind.generate()
    try:
        write_durably(path, private_pem(key), mode=0o600)
    except OSError as error:
        raise UsageError(f"cannot write the private key {path}: {error.strerror}") from error
    return key
