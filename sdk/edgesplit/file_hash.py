"""SHA-256 of files, read in blocks so that a large file takes no memory."""

from __future__ import annotations

import hashlib
from pathlib import Path

_BLOCK_BYTES = 1 << 20


def file_sha256(path: Path) -> str:
    """SHA-256 of the file's content in hexadecimal; OSError where it cannot be read."""
    digest = hashlib.sha256()  # not hashlib.file_digest: Python 3.10 has none
    with path.open("rb") as file:
        while block := file.read(_BLOCK_BYTES):
            digest.update(block)
    return digest.hexdigest()
