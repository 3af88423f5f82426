"""Copying large files block by block: progress callbacks, and holes for blocks of zeros."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import IO

OnProgress = Callable[[int, int], None]
"""Receives the bytes or steps that are done, and their total."""
BLOCK_BYTES = 4 << 20


def write_sparse(file: IO[bytes], block: bytes) -> None:
    """Write a block, or leave a hole where it is all zeros; OSError on a full disk."""
    if block.count(0) == len(block):
        file.seek(len(block), os.SEEK_CUR)
    else:
        file.write(block)
