"""Where an image may be written: a card in a reader, or a file. Refuses everything that somebody would miss."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from edgesplit.errors import UsageError
from edgesplit_cli.output import size as shown_size
from edgesplit_provisioning.image.block_devices import Disk, disk, disks, is_whole_disk, parent_of
from edgesplit_provisioning.image.partition_table import HEAD_BYTES, read_table
from edgesplit_provisioning.image.target_device import OpenedMedium, open_disk, open_file


@dataclass(frozen=True, slots=True)
class Target:
    """One that may be written to, if its owner says yes."""

    name: str
    """As it was called."""
    described: str
    """For people, who shall know it by this."""
    size: int | None
    warning: str
    """What is lost; empty where nothing is."""
    is_disk: bool
    node: Path
    open: Callable[[], OpenedMedium]


def target(to: Path, *, fixed_disk: bool = False, root: Path = Path("/")) -> Target:
    """What `to` is; UsageError where it must not be written to. `root` is / but in tests."""
    inside = root / str(to).lstrip("/")
    real = Path(os.path.realpath(inside))
    if str(to).startswith("/dev/"):
        return _disk_target(to, real, fixed_disk, root)
    if to.exists() and stat.S_ISBLK(to.stat().st_mode):
        return _disk_target(to, Path(os.path.realpath(to)), fixed_disk, root)
    return _file_target(to)


def refusal(found: Disk, fixed_disk: bool) -> str:
    """Why this disk is not written to; empty where it may be."""
    shown = f"{found.path} ({found.model}, {shown_size(found.size)})"
    if found.holds_the_system:
        return f"{shown} holds the system that this machine runs from"
    if found.used_for:
        return f"{shown} is in use at {', '.join(found.used_for)}: unmount it (umount {found.used_for[0]})"
    if not found.size:
        return f"{found.path} has no card in it"
    if found.read_only:
        return f"{shown} is write-protected: a full-size card has a small slide for it"
    if not found.removable and not fixed_disk:
        return f"{shown} is built in, no card and no USB disk: if it is meant all the same, say --fixed-disk"
    return ""


def candidates(root: Path = Path("/")) -> list[tuple[Disk, str]]:
    """Every disk, with why it is not written to."""
    return [(one, refusal(one, False)) for one in disks(root)]


def _disk_target(to: Path, node: Path, fixed_disk: bool, root: Path) -> Target:
    name = node.name
    if not is_whole_disk(name, root):
        whole = parent_of(name, root)
        if whole is not None:
            raise UsageError(f"{to} is a partition: an image is written to the whole disk, /dev/{whole}")
        raise UsageError(f"{to} is no disk of this machine; `edgectl flash --list` shows those that are")
    found = disk(name, root)
    if why := refusal(found, fixed_disk):
        raise UsageError(f"will not write to {to}: {why}")
    serial = f", serial {found.serial}" if found.serial else ""
    described = f"{to}: {found.model}, {shown_size(found.size)}{serial}"
    lost = f"everything on {to} will be lost"
    return Target(str(to), described, found.size, lost, True, node, lambda: open_disk(node, found.size))


def _file_target(to: Path) -> Target:
    lost = ""
    if to.exists():
        if not to.is_file():
            raise UsageError(f"will not write to {to}: it is neither a file nor a disk")
        _looks_like_an_image(to)
        lost = f"the image in {to} will be replaced"
    elif not to.parent.is_dir():
        raise UsageError(f"cannot write {to}: there is no folder {to.parent}")
    return Target(str(to), f"{to}: an image file", None, lost, False, to, lambda: open_file(to))


def _looks_like_an_image(file: Path) -> None:
    """UsageError for a file that is something else: it is not overwritten by a slip of the hand."""
    try:
        with file.open("rb") as opened:
            head = opened.read(HEAD_BYTES)
    except OSError as error:
        raise UsageError(f"cannot read {file}: {error.strerror}") from error
    if not any(head):
        return  # empty, or what a flash that was cut off leaves
    try:
        read_table(head)
    except UsageError as error:
        raise UsageError(f"will not overwrite {file}: {error}. Remove it first, or name another") from error
