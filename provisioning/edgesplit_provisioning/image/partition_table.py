"""Partition tables as bytes: MBR with its logical partitions left out, and GPT. Pure; reads no disk.

A first boot needs two of them: the FAT that the firmware reads, and the root file system behind it.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from uuid import UUID

from edgesplit.errors import UsageError

SECTOR = 512
HEAD_BYTES = 1 << 20
"""Enough of a disk's beginning for both kinds of table."""
MBR_ENTRIES = 446
PROTECTIVE = 0xEE
FAT_TYPES = frozenset({0x01, 0x04, 0x06, 0x0B, 0x0C, 0x0E, 0xEF})
LINUX_TYPE = 0x83
BASIC_DATA = UUID("ebd0a0a2-b9e5-4433-87c0-68b6b72699c7")
EFI_SYSTEM = UUID("c12a7328-f81f-11d2-ba4b-00a0c93ec93b")
LINUX_GUIDS = frozenset(
    UUID(one)
    for one in (
        "0fc63daf-8483-4772-8e79-3d69d8477de4",  # Linux file system
        "b921b045-1df0-41c3-af44-4c6f280d3fae",  # root, arm64
        "4f68bce3-e8cd-4db1-96e7-fbcaf984b709",  # root, x86-64
    )
)
GPT_MAGIC = b"EFI PART"
GPT_HEADER = struct.Struct("<8sIIIIQQQQ16sQIII")
MOST_ENTRIES = 128
ENTRY_BYTES = 128


@dataclass(frozen=True, slots=True)
class Partition:
    """A stretch of the disk, in bytes."""

    number: int
    offset: int
    size: int
    is_fat: bool
    is_linux: bool

    @property
    def end(self) -> int:
        """The first byte behind it."""
        return self.offset + self.size


@dataclass(frozen=True, slots=True)
class Table:
    """A disk's partitions, by their place on it."""

    kind: str
    partitions: tuple[Partition, ...]

    @property
    def end(self) -> int:
        """The first byte that no partition needs."""
        return max(one.end for one in self.partitions)

    @property
    def start(self) -> int:
        """The first byte of any partition: what lies before is the table."""
        return min(one.offset for one in self.partitions)

    @property
    def boot(self) -> Partition:
        """What the firmware reads: the first FAT. UsageError where there is none."""
        for one in self.partitions:
            if one.is_fat:
                return one
        raise UsageError(f"no FAT partition in its {self.kind} table: a Raspberry Pi could not boot from it")

    @property
    def root(self) -> Partition | None:
        """The first Linux partition behind the boot partition."""
        return next((one for one in self.partitions if one.is_linux and one.offset > self.boot.offset), None)


def read_table(head: bytes) -> Table:
    """The table at a disk's beginning; UsageError says what is wrong with it."""
    if len(head) < SECTOR or head[510:512] != b"\x55\xaa":
        raise UsageError("no partition table in its first sector: it is no image of a whole disk")
    entries = [head[MBR_ENTRIES + 16 * nth : MBR_ENTRIES + 16 * (nth + 1)] for nth in range(4)]
    if any(entry[4] == PROTECTIVE for entry in entries):
        return _checked("GPT", _gpt(head))
    found = [one for nth, entry in enumerate(entries) if (one := _mbr_partition(nth + 1, entry)) is not None]
    return _checked("MBR", found)


def _mbr_partition(number: int, entry: bytes) -> Partition | None:
    kind = entry[4]
    first, count = struct.unpack("<II", entry[8:16])
    if not kind or not count:
        return None
    return Partition(number, first * SECTOR, count * SECTOR, kind in FAT_TYPES, kind == LINUX_TYPE)


def _gpt(head: bytes) -> list[Partition]:
    raw = head[SECTOR : SECTOR + 92]
    if len(raw) < 92 or not raw.startswith(GPT_MAGIC):
        raise UsageError("its table is protective for a GPT that is not there")
    _, _, size, crc, _, _, _, _, _, _, first, count, width, entries_crc = GPT_HEADER.unpack(raw)
    whole = head[SECTOR : SECTOR + size]
    if not 92 <= size <= SECTOR or zlib.crc32(whole[:16] + bytes(4) + whole[20:]) != crc:
        raise UsageError("the header of its GPT is damaged (its checksum is another)")
    if width < ENTRY_BYTES or width % 8 or not 0 < count <= MOST_ENTRIES * 2:
        raise UsageError(f"its GPT has {count} entries of {width} bytes, which no image for these devices has")
    table = head[first * SECTOR : first * SECTOR + count * width]
    if len(table) != count * width or zlib.crc32(table) != entries_crc:
        raise UsageError("the entries of its GPT are damaged (their checksum is another)")
    entries = (table[nth * width : (nth + 1) * width] for nth in range(count))
    return [one for nth, entry in enumerate(entries) if (one := _gpt_partition(nth + 1, entry)) is not None]


def _gpt_partition(number: int, entry: bytes) -> Partition | None:
    kind = UUID(bytes_le=entry[:16])
    if not kind.int:
        return None
    first, last = struct.unpack("<QQ", entry[32:48])
    size = (last - first + 1) * SECTOR
    return Partition(number, first * SECTOR, size, kind in (BASIC_DATA, EFI_SYSTEM), kind in LINUX_GUIDS)


def _checked(kind: str, found: Sequence[Partition]) -> Table:
    ordered = tuple(sorted(found, key=lambda one: one.offset))
    if not ordered:
        raise UsageError(f"its {kind} table lists no partition")
    for one, following in pairwise(ordered):
        if one.end > following.offset:
            raise UsageError(f"its partitions {one.number} and {following.number} overlap")
    if any(one.size <= 0 or one.offset < SECTOR for one in ordered):
        raise UsageError("one of its partitions lies on the table itself")
    return Table(kind, ordered)
