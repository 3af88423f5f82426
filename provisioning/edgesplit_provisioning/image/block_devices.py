"""Disks as the kernel shows them in sysfs, and what each is used for. Reads only; `root` is / but in tests.

A disk is in use by what is mounted from it or swapped to, also through partitions, LVM, RAID and encryption on it.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

SECTOR = 512
"""Of sysfs, whatever the disk's own is."""
SYSTEM = ("/", "/boot", "/boot/efi", "/boot/firmware", "/usr", "/home", "/var", "[SWAP]")
NO_CARDS = re.compile(r"(loop|ram|zram|dm-|md|sr|fd|nbd|zd)\d*.*")


@dataclass(frozen=True, slots=True)
class Disk:
    """One that could be written to, or must not be."""

    name: str
    size: int
    model: str
    serial: str
    removable: bool
    read_only: bool
    used_for: tuple[str, ...]
    """Where it is mounted, itself or anything on it."""

    @property
    def path(self) -> str:
        """Its node."""
        return f"/dev/{self.name}"

    @property
    def holds_the_system(self) -> bool:
        """This machine runs from it."""
        return any(one in SYSTEM for one in self.used_for)

    @property
    def is_candidate(self) -> bool:
        """It could be a card in a reader."""
        return self.size > 0 and not self.read_only and not self.used_for


def disks(root: Path = Path("/")) -> list[Disk]:
    """Every disk that is one, by name."""
    folder = root / "sys/block"
    names = sorted(one.name for one in folder.iterdir()) if folder.is_dir() else []
    return [disk(name, root) for name in names if not NO_CARDS.fullmatch(name)]


def disk(name: str, root: Path = Path("/")) -> Disk:
    """The disk of that name."""
    here = root / "sys/block" / name
    described = (_line(here / "device/vendor"), _line(here / "device/model") or _line(here / "device/name"))
    return Disk(
        name=name,
        size=_number(here / "size") * SECTOR,
        model=" ".join(part for part in described if part) or "unknown",
        serial=_line(here / "device/serial") or _line(here / "device/cid") or _line(here / "serial"),
        removable=_number(here / "removable") == 1 or _is_usb(here) or _line(here / "device/type") == "SD",
        read_only=_number(here / "ro") == 1,
        used_for=tuple(_used_for(name, root)),
    )


def is_whole_disk(name: str, root: Path = Path("/")) -> bool:
    """Not a partition, and there at all."""
    return (root / "sys/block" / name).exists()


def parent_of(name: str, root: Path = Path("/")) -> str | None:
    """The disk that `name` is a partition of."""
    found = sorted((root / "sys/block").glob(f"*/{name}/partition"))
    return found[0].parent.parent.name if found else None


def _used_for(name: str, root: Path) -> Iterator[str]:
    held = set(_nodes(name, root))
    numbers = {number: node for node in held if (number := _line(root / "sys/class/block" / node / "dev"))}
    for number, source, place in _mounts(root):
        if number in numbers or _node(source, root) in held:
            yield place
    for line in _lines(root / "proc/swaps")[1:]:
        if _node(line.split()[0], root) in held:
            yield "[SWAP]"


def _nodes(name: str, root: Path) -> Iterator[str]:
    """The disk, its partitions, and whatever lies on them."""
    yield name
    here = root / "sys/class/block" / name
    if not here.exists():
        here = root / "sys/block" / name
    for part in sorted(here.glob(f"{name}*/partition")):
        yield from _nodes(part.parent.name, root)
    for holder in sorted(here.glob("holders/*")):
        yield from _nodes(holder.name, root)


def _mounts(root: Path) -> Iterator[tuple[str, str, str]]:
    """Device number, source and place of each mount (proc(5), mountinfo)."""
    for line in _lines(root / "proc/self/mountinfo"):
        front, _, back = line.partition(" - ")
        fields, behind = front.split(), back.split()
        if len(fields) >= 5 and len(behind) >= 2:
            yield fields[2], _unescaped(behind[1]), _unescaped(fields[4])


def _node(source: str, root: Path) -> str:
    """The kernel's name behind a path as /dev/mapper/root or /dev/disk/by-uuid/…"""
    if not source.startswith("/dev/"):
        return ""
    return os.path.basename(os.path.realpath(root / source[1:]))


def _unescaped(text: str) -> str:
    return re.sub(r"\\([0-7]{3})", lambda found: chr(int(found[1], 8)), text)


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
