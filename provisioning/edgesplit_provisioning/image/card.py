"""Writes cards from an image: the image is examined once; each card is written, read back and configured."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from edgesplit.errors import UsageError
from edgesplit_provisioning.image import cmdline, root_filesystem
from edgesplit_provisioning.image.archive import uncompressed
from edgesplit_provisioning.image.block_io import OnProgress
from edgesplit_provisioning.image.boot_files import CARD_FILE, BootFiles
from edgesplit_provisioning.image.detect import DetectedImage, detect
from edgesplit_provisioning.image.fat import Fat, FatError, copied_out
from edgesplit_provisioning.image.install_boot_files import verify_boot_files, write_boot_files
from edgesplit_provisioning.image.partition_table import HEAD_BYTES, PartitionTable, read_table
from edgesplit_provisioning.image.target_device import Medium, medium_failed
from edgesplit_provisioning.image.writer import finish, verify, write_image

Stages = Callable[[str], OnProgress]
"""Starts a named stage of work; returns its progress callback."""
ISSUE_FILE = "issue.txt"


@dataclass(frozen=True, slots=True)
class Image:
    """An image that was examined and can be configured."""

    path: str
    """Path of its uncompressed bytes."""
    name: str
    size: int
    table: PartitionTable
    detected: DetectedImage
    boot_names: tuple[str, ...]
    cmdline: bytes

    def boot_partition(self, path: str) -> Fat:
        """The boot partition of the disk or image file at `path`."""
        return Fat(path, self.table.boot.offset, self.table.boot.size)


@contextmanager
def open_image(image: Path, scratch: Path, stages: Stages) -> Iterator[Image]:
    """The image, unpacked if it is compressed; UsageError where it cannot be configured."""
    with uncompressed(image, scratch, stages("unpacking")) as clear:
        yield examine(clear, image.name)


def examine(clear: Path, name: str) -> Image:
    """Examine an uncompressed image; UsageError where it is cut short, unreadable or not configurable."""
    size = clear.stat().st_size
    with clear.open("rb") as raw:
        try:
            table = read_table(raw.read(HEAD_BYTES))
            boot = table.boot
        except UsageError as error:
            raise UsageError(f"{name}: {error}") from error
    if table.end > size:
        raise UsageError(
            f"{name} is truncated: its partitions reach to byte {table.end}, and it has {size}. Download it again"
        )
    fat = Fat(str(clear), boot.offset, boot.size)
    try:
        names = tuple(fat.names())
        issue = fat.read(ISSUE_FILE).decode("utf-8", "replace") if fat.has(ISSUE_FILE) else ""
        detected = detect(names, issue, root_filesystem.read_operating_system(str(clear), table.root))
        line = fat.read(cmdline.NAME)
    except (FatError, OSError) as error:
        raise UsageError(f"{name}: its boot partition cannot be read ({_reason(error)})") from error
    cmdline.parameters(line)
    return Image(str(clear), name, size, table, detected, names, line)


def check_boot_space(image: Image, files: BootFiles) -> None:
    """UsageError where the boot partition is too small for these files; nothing is written."""
    try:
        image.boot_partition(image.path).check_fits(files.files)
    except FatError as error:
        raise UsageError(f"{image.name}: its boot partition cannot be read ({error})") from error


def write(image: Image, medium: Medium, files: BootFiles, scratch: Path, stages: Stages) -> None:
    """Write the image and these files to the medium and read all of it back. On any error (MediumFailed or other) the
    medium has no partition table."""
    with open(image.path, "rb") as source:
        written = write_image(source, image.size, _head_bytes(image), medium, stages("writing"))
    verify(written, medium, stages("reading back"))
    try:
        write_boot_files(image.boot_partition(medium.path), files, medium.sync, stages("first boot"))
    except (FatError, OSError) as error:
        raise medium_failed(medium, "writing the boot partition", _reason(error)) from error
    _verify_boot_files(image, medium, files, scratch, stages("checking"))
    finish(written, medium)


def card_owner(path: Path) -> str:
    """The device for which an earlier flash made the card at `path`; empty where there is no such record."""
    try:
        with path.open("rb") as raw:
            boot = read_table(raw.read(HEAD_BYTES)).boot
        fat = Fat(str(path), boot.offset, boot.size)
        record = json.loads(fat.read(CARD_FILE))
        return str(record["device"])
    except (UsageError, FatError, OSError, ValueError, KeyError, TypeError):
        return ""


def _head_bytes(image: Image) -> int:
    """Length of the head that is written last: the partition table and what else lies before the first partition."""
    return image.table.start


def _verify_boot_files(image: Image, medium: Medium, files: BootFiles, scratch: Path, on_progress: OnProgress) -> None:
    """Copy the boot partition from the medium itself and compare its files. MediumFailed on a difference."""
    try:
        medium.drop_cache()
        with open(medium.path, "rb") as source, copied_out(image.boot_partition(medium.path), source, scratch) as copy:
            on_progress(1, 2)
            verify_boot_files(copy, files)
            on_progress(2, 2)
    except (FatError, OSError) as error:
        raise medium_failed(medium, "checking the boot partition", _reason(error)) from error


def _reason(error: Exception) -> str:
    return (error.strerror or str(error)) if isinstance(error, OSError) else str(error)
