"""Decides where an image may be written: to a card in a reader or to a file. Disks in use, system disks, built-in disks
and files that are not images are refused."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from edgesplit.errors import UsageError
from edgesplit.quantities import format_size
from edgesplit_provisioning.image.block_devices import Disk, is_whole_disk, list_disks, parent_of, read_disk
from edgesplit_provisioning.image.partition_table import HEAD_BYTES, read_table
from edgesplit_provisioning.image.target_device import OpenedMedium, open_disk, open_file


@dataclass(frozen=True, slots=True)
class FlashTarget:
    """A destination that may be written to after confirmation."""

    name: str
    """The path as the user gave it."""
    description: str
    """Description that lets the user recognise the disk."""
    size: int | None
    warning: str
    """What will be lost; empty where nothing will be."""
    is_disk: bool
    node: Path
    open: Callable[[], OpenedMedium]


def resolve_target(to: Path, *, fixed_disk: bool = False, root: Path = Path("/")) -> FlashTarget:
    """The destination `to`; UsageError where it must not be written to. `root` is / except in tests."""
    path_in_root = root / str(to).lstrip("/")
    real = Path(os.path.realpath(path_in_root))
    if str(to).startswith("/dev/"):
        return _disk_target(to, real, fixed_disk, root)
    if to.exists() and stat.S_ISBLK(to.stat().st_mode):
        return _disk_target(to, Path(os.path.realpath(to)), fixed_disk, root)
    return _file_target(to)


def refusal(disk: Disk, fixed_disk: bool) -> str:
    """Why this disk must not be written to; empty where it may be."""
    label = f"{disk.path} ({disk.model}, {format_size(disk.size)})"
    if disk.is_system_disk:
        return f"{label} holds the system that this machine runs from"
    if disk.used_for:
        return f"{label} is in use at {', '.join(disk.used_for)}: unmount it (umount {disk.used_for[0]})"
    if not disk.size:
        return f"{disk.path} has no card in it"
    if disk.read_only:
        return f"{label} is write-protected: a full-size card has a small slide for it"
    if not disk.removable and not fixed_disk:
        return f"{label} is a built-in disk, neither a card nor a USB disk: to write to it, add --fixed-disk"
    return ""


def candidates(root: Path = Path("/")) -> list[tuple[Disk, str]]:
    """Every disk, with the reason why it must not be written to (empty where it may be)."""
    return [(disk_, refusal(disk_, False)) for disk_ in list_disks(root)]


def _disk_target(to: Path, node: Path, fixed_disk: bool, root: Path) -> FlashTarget:
    name = node.name
    if not is_whole_disk(name, root):
        whole = parent_of(name, root)
        if whole is not None:
            raise UsageError(f"{to} is a partition: an image is written to the whole disk, /dev/{whole}")
        raise UsageError(f"{to} is not a disk of this machine; `edgectl flash --list` shows the disks")
    candidate = read_disk(name, root)
    if reason := refusal(candidate, fixed_disk):
        raise UsageError(f"will not write to {to}: {reason}")
    serial = f", serial {candidate.serial}" if candidate.serial else ""
    described = f"{to}: {candidate.model}, {format_size(candidate.size)}{serial}"
    warning = f"everything on {to} will be lost"
    return FlashTarget(str(to), described, candidate.size, warning, True, node, lambda: open_disk(node, candidate.size))


def _file_target(to: Path) -> FlashTarget:
    warning = ""
    if to.exists():
        if not to.is_file():
            raise UsageError(f"will not write to {to}: it is neither a file nor a disk")
        _check_is_image(to)
        warning = f"the image in {to} will be replaced"
    elif not to.parent.is_dir():
        raise UsageError(f"cannot write {to}: there is no folder {to.parent}")
    return FlashTarget(str(to), f"{to}: an image file", None, warning, False, to, lambda: open_file(to))


def _check_is_image(file: Path) -> None:
    """UsageError for an existing file that is neither a disk image nor blank, so that no other file is overwritten by
    mistake."""
    try:
        with file.open("rb") as opened:
            head = opened.read(HEAD_BYTES)
    except OSError as error:
        raise UsageError(f"cannot read {file}: {error.strerror}") from error
    if not any(head):
        return  # empty, or left by an interrupted flash
    try:
        read_table(head)
    except UsageError as error:
        raise UsageError(f"will not overwrite {file}: {error}. Remove it first, or name another") from error
