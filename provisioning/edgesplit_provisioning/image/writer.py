"""Writes an image to a medium and reads it back for comparison. The partition table is written last.

Until `finish`, the bytes before the first partition are zeros: a card that was pulled out, or whose writer was killed,
has no partition table and does not boot at all.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import IO

from edgesplit.errors import UsageError
from edgesplit_provisioning.image.block_io import BLOCK_BYTES, OnProgress
from edgesplit_provisioning.image.target_device import Medium, medium_failed

MAX_TABLE_BYTES = 1 << 20
"""At most so many bytes at the beginning are held back."""


@dataclass(frozen=True, slots=True)
class WrittenImage:
    """What was written to a medium, and the head that is held back until `finish`."""

    digests: tuple[bytes, ...]
    """Digest of each block."""
    block_bytes: int
    held_back: bytes
    size: int


def write_image(
    source: IO[bytes], size: int, table_bytes: int, medium: Medium, on_progress: OnProgress, *,
    block_bytes: int = BLOCK_BYTES,
) -> WrittenImage:  # fmt: skip
    """Write all of the image except its first `table_bytes`, which stay zeros until `finish`."""
    if medium.size is not None and size > medium.size:
        raise UsageError(f"the image needs {size} bytes, and {medium.name} has {medium.size}: take a larger card")
    held_back = min(table_bytes, MAX_TABLE_BYTES)
    table, digests, done = b"", [], 0
    while done < size:
        block = source.read(min(block_bytes, size - done))
        if not block:
            raise medium_failed(medium, "writing", f"the image ends after {done} bytes, and should have {size}")
        if not done:  # the head with the partition table is held back: zeros are written in its place
            table, block = block[:held_back], bytes(held_back) + block[held_back:]
        # Blocks of zeros need no write on a medium that reads as zeros already.
        if not medium.is_blank or block.count(0) < len(block):
            write_all(medium, block, done)
        digests.append(_digest(block))
        done += len(block)
        on_progress(done, size)
    _sync(medium)
    return WrittenImage(tuple(digests), block_bytes, table, size)


def verify(written: WrittenImage, medium: Medium, on_progress: OnProgress) -> None:
    """Read everything back from the medium itself; MediumFailed names the first difference."""
    done = 0
    _drop_cache(medium)
    for expected in written.digests:
        count = min(written.block_bytes, written.size - done)
        if _digest(read_exactly(medium, count, done)) != expected:
            raise medium_failed(medium, "reading back", f"bytes {done} to {done + count} are not what was written")
        done += count
        on_progress(done, written.size)


def finish(written: WrittenImage, medium: Medium) -> None:
    """Write the partition table and read it back; from now on the medium boots."""
    write_all(medium, written.held_back, 0)
    _sync(medium)
    _drop_cache(medium)
    if read_exactly(medium, len(written.held_back), 0) != written.held_back:
        raise medium_failed(medium, "writing the partition table", "it is not what was written")


def write_all(medium: Medium, data: bytes, offset: int) -> None:
    """Write all of `data`, in as many writes as the medium needs."""
    view = memoryview(data)
    while view:
        try:
            count = medium.write(view, offset)
        except OSError as error:
            raise medium_failed(medium, f"writing at byte {offset}", error) from error
        if count <= 0:
            raise medium_failed(medium, f"writing at byte {offset}", "it takes no more")
        view, offset = view[count:], offset + count


def read_exactly(medium: Medium, count: int, offset: int) -> bytes:
    """Read exactly `count` bytes."""
    parts: list[bytes] = []
    while count:
        try:
            part = medium.read(count, offset)
        except OSError as error:
            raise medium_failed(medium, f"reading at byte {offset}", error) from error
        if not part:
            raise medium_failed(medium, f"reading at byte {offset}", "it ends there")
        parts.append(part)
        count, offset = count - len(part), offset + len(part)
    return b"".join(parts)


def _sync(medium: Medium) -> None:
    try:
        medium.sync()
    except OSError as error:
        raise medium_failed(medium, "waiting for its writes", error) from error


def _drop_cache(medium: Medium) -> None:
    try:
        medium.drop_cache()
    except OSError as error:
        raise medium_failed(medium, "beginning to read it back", error) from error


def _digest(block: bytes) -> bytes:
    return hashlib.blake2b(block, digest_size=20).digest()
