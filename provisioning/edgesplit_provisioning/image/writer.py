"""An image's bytes onto a medium, and back for comparison. The partition table comes last.

Until `finish`, what lies before the first partition is zeros: a card that was pulled out, or whose writer was killed,
has no partition table and boots nowhere, instead of half.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import IO

from edgesplit.errors import UsageError
from edgesplit_provisioning.image.target_device import Medium, failed

BLOCK = 4 << 20
MOST_TABLE = 1 << 20
Told = Callable[[int, int], None]


@dataclass(frozen=True, slots=True)
class Written:
    """What lies on a medium now, and what is still held back."""

    digests: tuple[bytes, ...]
    """Of each block."""
    table: bytes
    size: int


def write_image(source: IO[bytes], size: int, table_bytes: int, medium: Medium, told: Told) -> Written:
    """All of the image but its first `table_bytes`, which stay zeros until `finish`."""
    if medium.size is not None and size > medium.size:
        raise UsageError(f"the image needs {size} bytes, and {medium.name} has {medium.size}: take a larger card")
    held = min(table_bytes, MOST_TABLE)
    table, digests, done = b"", [], 0
    while done < size:
        block = source.read(min(BLOCK, size - done))
        if not block:
            raise failed(medium, "writing", f"the image ends after {done} bytes, and should have {size}")
        if not done:
            table, block = block[:held], bytes(held) + block[held:]
        if not medium.is_blank or block.count(0) < len(block):
            put(medium, block, done)
        digests.append(_digest(block))
        done += len(block)
        told(done, size)
    _synced(medium)
    return Written(tuple(digests), table, size)


def verify(written: Written, medium: Medium, told: Told) -> None:
    """Read everything back from the medium itself; MediumFailed says where it is not what was written."""
    done = 0
    _forgotten(medium)
    for expected in written.digests:
        wanted = min(BLOCK, written.size - done)
        if _digest(get(medium, wanted, done)) != expected:
            raise failed(medium, "reading back", f"bytes {done} to {done + wanted} are not what was written")
        done += wanted
        told(done, written.size)


def finish(written: Written, medium: Medium) -> None:
    """The partition table, read back too: from now on it boots."""
    put(medium, written.table, 0)
    _synced(medium)
    _forgotten(medium)
    if get(medium, len(written.table), 0) != written.table:
        raise failed(medium, "writing the partition table", "it is not what was written")


def put(medium: Medium, data: bytes, offset: int) -> None:
    """All of it, however little the medium takes at once."""
    view = memoryview(data)
    while view:
        try:
            count = medium.write(view, offset)
        except OSError as error:
            raise failed(medium, f"writing at byte {offset}", error) from error
        if count <= 0:
            raise failed(medium, f"writing at byte {offset}", "it takes no more")
        view, offset = view[count:], offset + count


def get(medium: Medium, count: int, offset: int) -> bytes:
    """Exactly so many bytes."""
    parts: list[bytes] = []
    while count:
        try:
            part = medium.read(count, offset)
        except OSError as error:
            raise failed(medium, f"reading at byte {offset}", error) from error
        if not part:
            raise failed(medium, f"reading at byte {offset}", "it ends there")
        parts.append(part)
        count, offset = count - len(part), offset + len(part)
    return b"".join(parts)


def _synced(medium: Medium) -> None:
    try:
        medium.sync()
    except OSError as error:
        raise failed(medium, "waiting for its writes", error) from error


def _forgotten(medium: Medium) -> None:
    try:
        medium.forget()
    except OSError as error:
        raise failed(medium, "beginning to read it back", error) from error


def _digest(block: bytes) -> bytes:
    return hashlib.blake2b(block, digest_size=20).digest()
