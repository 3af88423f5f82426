"""Block devices as the kernel lists them in sysfs, and what each is used for. Reads only; `root` is / except in tests.

A disk is in use if a file system on it is mounted or used as swap, also through partitions, LVM, RAID and encryption on
it.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

SYSFS_SECTOR_BYTES = 512
"""Unit of sizes in sysfs, whatever the disk's own sector size."""
SYSTEM_MOUNTS = ("/", "/boot", "/boot/efi", "/boot/firmware", "/usr", "/home", "/var", "[SWAP]")
"""Mount points of the running system."""
NEVER_CARDS = re.compile(r"(loop|ram|zram|dm-|md|sr|fd|nbd|zd)\d*.*")
"""Kernel names of block devices that are never cards."""


@dataclass(frozen=True, slots=True)
class Disk:
    """A block device that may be written to, or must not be."""

    name: str
    size: int
    model: str
    serial: str
    removable: bool
    read_only: bool
    used_for: tuple[str, ...]
    """Mount points of the disk and of everything on it; `[SWAP]` for swap."""

    @property
    def path(self) -> str:
        """Path of its device node."""
        return f"/dev/{self.name}"

    @property
    def is_system_disk(self) -> bool:
        """True where this machine runs from it."""
        return any(mount_point in SYSTEM_MOUNTS for mount_point in self.used_for)


def list_disks(root: Path = Path("/")) -> list[Disk]:
    """Every disk, by name."""
    folder = root / "sys/block"
    names = sorted(entry.name for entry in folder.iterdir()) if folder.is_dir() else []
    return [read_disk(name, root) for name in names if not NEVER_CARDS.fullmatch(name)]


def read_disk(name: str, root: Path = Path("/")) -> Disk:
    """The disk with this kernel name."""
    folder = root / "sys/block" / name
    described = (_line(folder / "device/vendor"), _line(folder / "device/model") or _line(folder / "device/name"))
    return Disk(
        name=name, size=_number(folder / "size") * SYSFS_SECTOR_BYTES,
        model=" ".join(part for part in described if part) or "unknown",
        serial=_line(folder / "device/serial") or _line(folder / "device/cid") or _line(folder / "serial"),
        removable=_number(folder / "removable") == 1 or _is_usb(folder) or _line(folder / "device/type") == "SD",
        read_only=_number(folder / "ro") == 1, used_for=tuple(_used_for(name, root)),
    )  # fmt: skip


def is_whole_disk(name: str, root: Path = Path("/")) -> bool:
    """True where a disk, not a partition, has this name."""
    return (root / "sys/block" / name).exists()


def parent_of(name: str, root: Path = Path("/")) -> str | None:
    """Name of the disk that `name` is a partition of; None for anything else."""
    partitions = sorted((root / "sys/block").glob(f"*/{name}/partition"))
    return partitions[0].parent.parent.name if partitions else None


def _used_for(name: str, root: Path) -> Iterator[str]:
    nodes = set(_nodes(name, root))
    numbers = {number: node for node in nodes if (number := _line(root / "sys/class/block" / node / "dev"))}
    for number, source, mount_point in _mounts(root):
        if number in numbers or _node(source, root) in nodes:
            yield mount_point
    for line in _lines(root / "proc/swaps")[1:]:
        if _node(line.split()[0], root) in nodes:
            yield "[SWAP]"


def _nodes(name: str, root: Path) -> Iterator[str]:
    """The disk, its partitions, and the devices on top of them."""
    yield name
    folder = root / "sys/class/block" / name
    if not folder.exists():
        folder = root / "sys/block" / name
    for part in sorted(folder.glob(f"{name}*/partition")):
        yield from _nodes(part.parent.name, root)
    for holder in sorted(folder.glob("holders/*")):
        yield from _nodes(holder.name, root)


def _mounts(root: Path) -> Iterator[tuple[str, str, str]]:
    """Device number, source and mount point of each mount (proc(5), mountinfo)."""
    for line in _lines(root / "proc/self/mountinfo"):
        front, _, back = line.partition(" - ")
        fields, back_fields = front.split(), back.split()
        if len(fields) >= 5 and len(back_fields) >= 2:
            yield fields[2], _unescaped(back_fields[1]), _unescaped(fields[4])


def _node(source: str, root: Path) -> str:
    """Kernel name of the device at a path such as /dev/mapper/root or /dev/disk/by-uuid/…; empty for other paths."""
    if not source.startswith("/dev/"):
        return ""
    return os.path.basename(os.path.realpath(root / source[1:]))


def _unescaped(text: str) -> str:
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), text)


def _is_usb(here: Path) -> bool:
    return "/usb" in os.path.realpath(here)


def _line(file: Path) -> str:
    lines = _lines(file)
    return "".join(letter for letter in lines[0] if letter.isprintable()).strip() if lines else ""


def _lines(file: Path) -> list[str]:
    try:
        return file.read_text("utf-8", "replace").splitlines()
    except OSError:
        return []


def _number(file: Path) -> int:
    line = _line(file)
    return int(line) if line.isdigit() else 0
