"""SHA-256 of files."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from edgesplit.file_hash import file_sha256


@pytest.mark.parametrize("size", [0, 1, (1 << 20) + 1])
def test_file_hash_covers_every_block(tmp_path: Path, size: int) -> None:
    """Also the last one, which is shorter."""
    content = bytes(size)
    (tmp_path / "file").write_bytes(content)
    assert file_sha256(tmp_path / "file") == hashlib.sha256(content).hexdigest()
