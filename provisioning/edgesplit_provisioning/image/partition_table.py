"""Parses partition tables: MBR without logical partitions, and GPT. No I/O.

A first boot needs two partitions: the FAT that the firmware reads, and the root file system behind it.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from uuid import UUID

from edgesplit.errors import UsageError

SECTOR_BYTES = 512
HEAD_BYTES = 1 << 20
"""How much of a disk's beginning is read; enough for both kinds of table."""
MBR_ENTRIES = 446
PROTECTIVE_MBR_TYPE = 0xEE
FAT_TYPES = frozenset({0x01, 0x04, 0x06, 0x0B, 0x0C, 0x0E, 0xEF})
LINUX_TYPE = 0x83
BASIC_DATA = UUID("ebd0a0a2-b9e5-4433-87c0-68b6b72699c7")
EFI_SYSTEM = UUID("c12a7328-f81f-11d2-ba4b-00a0c93ec93b")
LINUX_GUIDS = frozenset(
    UUID(guid)
    for guid in (
        "0fc63daf-8483-4772-8e79-3d69d8477de4",  # Linux file system
        "b921b045-1df0-41c3-af44-4c6f280d3fae",  # root, arm64
        "4f68bce3-e8cd-4db1-96e7-fbcaf984b709",  # root, x86-64
    )
)
GPT_MAGIC = b"EFI PART"
GPT_HEADER = struct.Struct("<8sIIIIQQQQ16sQIII")
MAX_ENTRIES = 128
ENTRY_BYTES = 128


@dataclass(frozen=True, slots=True)
class Partition:
    """A partition: its number, and its position and size in bytes."""

    number: int
    offset: int
    size: int
    is_fat: bool
    is_linux: bool

    @property
    def end(self) -> int:
        """Offset of the first byte behind it."""
        return self.offset + self.size


@dataclass(frozen=True, slots=True)
class PartitionTable:
    """The partitions of a disk, ordered by offset."""

    kind: str
    partitions: tuple[Partition, ...]

    @property
    def end(self) -> int:
        """Offset of the first byte behind the last partition."""
        return max(partition.end for partition in self.partitions)

    @property
    def start(self) -> int:
        """Offset of the first partition; the bytes before it hold the table."""
        return min(partition.offset for partition in self.partitions)

    @property
    def boot(self) -> Partition:
        """The partition that the firmware reads: the first FAT. UsageError where there is none."""
        for partition in self.partitions:
            if partition.is_fat:
                return partition
        raise UsageError(f"no FAT partition in its {self.kind} table: a Raspberry Pi could not boot from it")

    @property
    def root(self) -> Partition | None:
        """The first Linux partition behind the boot partition; None where there is none."""
        return next(
            (partition for partition in self.partitions if partition.is_linux and partition.offset > self.boot.offset),
            None,
        )


def read_table(head: bytes) -> PartitionTable:
    """Parse the partition table at the beginning of a disk; UsageError describes what is wrong with it."""
    if len(head) < SECTOR_BYTES or head[510:512] != b"\x55\xaa":
        raise UsageError("no partition table in its first sector: it is not an image of a whole disk")
    entries = [head[MBR_ENTRIES + 16 * index : MBR_ENTRIES + 16 * (index + 1)] for index in range(4)]
    # An MBR entry of type 0xEE covers the whole disk and protects a GPT from programs that only know MBR.
    if any(entry[4] == PROTECTIVE_MBR_TYPE for entry in entries):
        return _checked_table("GPT", _parse_gpt(head))
    partitions = [
        partition
        for index, entry in enumerate(entries)
        if (partition := _parse_mbr_entry(index + 1, entry)) is not None
    ]
    return _checked_table("MBR", partitions)


def _parse_mbr_entry(number: int, entry: bytes) -> Partition | None:
    kind = entry[4]
    first, count = struct.unpack("<II", entry[8:16])
    if not kind or not count:
        return None
    return Partition(number, first * SECTOR_BYTES, count * SECTOR_BYTES, kind in FAT_TYPES, kind == LINUX_TYPE)


def _parse_gpt(head: bytes) -> list[Partition]:
    # UEFI specification, section 5.3.2: the header is in the second sector. Its checksum covers the header with the
    # checksum field (bytes 16 to 19) set to zero; a second checksum covers the array of entries.
    raw = head[SECTOR_BYTES : SECTOR_BYTES + 92]
    if len(raw) < 92 or not raw.startswith(GPT_MAGIC):
        raise UsageError("its table is protective for a GPT that is not there")
    _, _, size, crc, _, _, _, _, _, _, first, count, width, entries_crc = GPT_HEADER.unpack(raw)
    whole = head[SECTOR_BYTES : SECTOR_BYTES + size]
    if not 92 <= size <= SECTOR_BYTES or zlib.crc32(whole[:16] + bytes(4) + whole[20:]) != crc:
        raise UsageError("the header of its GPT is damaged (its checksum is another)")
    if width < ENTRY_BYTES or width % 8 or not 0 < count <= MAX_ENTRIES * 2:
        raise UsageError(f"its GPT has {count} entries of {width} bytes, which no image for these devices has")
    table = head[first * SECTOR_BYTES : first * SECTOR_BYTES + count * width]
    if len(table) != count * width or zlib.crc32(table) != entries_crc:
        raise UsageError("the entries of its GPT are damaged (their checksum is another)")
    entries = (table[index * width : (index + 1) * width] for index in range(count))
    return [
        partition
        for index, entry in enumerate(entries)
        if (partition := _parse_gpt_entry(index + 1, entry)) is not None
    ]


def _parse_gpt_entry(number: int, entry: bytes) -> Partition | None:
    kind = UUID(bytes_le=entry[:16])
    if not kind.int:
        return None
    first, last = struct.unpack("<QQ", entry[32:48])
    size = (last - first + 1) * SECTOR_BYTES
    return Partition(number, first * SECTOR_BYTES, size, kind in (BASIC_DATA, EFI_SYSTEM), kind in LINUX_GUIDS)


def _checked_table(kind: str, partitions: Sequence[Partition]) -> PartitionTable:
    """A table of these partitions; UsageError where there are none, or they overlap each other or the table."""
    ordered = tuple(sorted(partitions, key=lambda partition: partition.offset))
    if not ordered:
        raise UsageError(f"its {kind} table lists no partition")
    for partition, following in pairwise(ordered):
        if partition.end > following.offset:
            raise UsageError(f"its partitions {partition.number} and {following.number} overlap")
    if any(partition.size <= 0 or partition.offset < SECTOR_BYTES for partition in ordered):
        raise UsageError("one of its partitions lies on the table itself")
    return PartitionTable(kind, ordered)
