"""Files that hold one random secret of the installation, such as `keys/content.key`."""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable
from pathlib import Path

from edgesplit.atomic_files import write_durably
from edgesplit.errors import UsageError

SECRET_BYTES = 32
"""Length of a secret."""


def random_secret() -> bytes:
    """A new secret."""
    return secrets.token_bytes(SECRET_BYTES)


def load_or_make_secret(path: Path, hint: str, make: Callable[[], bytes] = random_secret) -> bytes:
    """The secret in `path` (mode 0600), which `make` creates if there is none. UsageError, which ends with `hint`, if
    the file is corrupt."""
    try:
        secret = path.read_bytes()
    except FileNotFoundError:
        secret = make()
        write_durably(path, secret, mode=0o600)
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}") from error
    if len(secret) != SECRET_BYTES:
        raise UsageError(f"{path} is corrupt ({len(secret)} bytes instead of {SECRET_BYTES}): {hint}")
    if path.stat().st_mode & 0o077:
        os.chmod(path, 0o600)
    return secret
