"""One image, any number of cards: what the image is, is found out once; each card is written, read back, configured."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from edgesplit.errors import UsageError
from edgesplit_provisioning.image import cmdline, root_filesystem
from edgesplit_provisioning.image.archive import in_the_clear
from edgesplit_provisioning.image.boot_files import CARD, BootFiles
from edgesplit_provisioning.image.detect import Found, detect
from edgesplit_provisioning.image.fat import Fat, FatFailed, taken_out
from edgesplit_provisioning.image.install_boot_files import check_files, put_files
from edgesplit_provisioning.image.partition_table import HEAD_BYTES, Table, read_table
from edgesplit_provisioning.image.target_device import Medium, failed
from edgesplit_provisioning.image.writer import finish, verify, write_image

Told = Callable[[int, int], None]
Stages = Callable[[str], Told]
"""Begin a piece of work of that name; what comes back is told how far it is."""
ISSUE = "issue.txt"


@dataclass(frozen=True, slots=True)
class Image:
    """One that was looked at, and can be configured."""

    path: str
    """Its bytes in the clear."""
    name: str
    size: int
    table: Table
    found: Found
    boot_names: tuple[str, ...]
    cmdline: bytes

    def boot(self, path: str) -> Fat:
        """The boot partition of the disk under `path`."""
        return Fat(path, self.table.boot.offset, self.table.boot.size)


@contextmanager
def opened(image: Path, scratch: Path, stages: Stages) -> Iterator[Image]:
    """The image, unpacked where it is packed; UsageError for one that cannot be configured."""
    with in_the_clear(image, scratch, stages("unpacking")) as clear:
        yield look(clear, image.name)


def look(clear: Path, name: str) -> Image:
    """What the image in that file is."""
    size = clear.stat().st_size
    with clear.open("rb") as raw:
        try:
            table = read_table(raw.read(HEAD_BYTES))
            boot = table.boot
        except UsageError as error:
            raise UsageError(f"{name}: {error}") from error
    if table.end > size:
        raise UsageError(
            f"{name} is cut short: its partitions reach to byte {table.end}, and it has {size}. Download it again"
        )
    fat = Fat(str(clear), boot.offset, boot.size)
    try:
        names = tuple(fat.names())
        issue = fat.read(ISSUE).decode("utf-8", "replace") if fat.has(ISSUE) else ""
        found = detect(names, issue, root_filesystem.look(str(clear), table.root))
        line = fat.read(cmdline.NAME)
    except (FatFailed, OSError) as error:
        raise UsageError(f"{name}: its boot partition cannot be read ({_why(error)})") from error
    cmdline.parameters(line)
    return Image(str(clear), name, size, table, found, names, line)


def room_for(image: Image, files: BootFiles) -> None:
    """UsageError where the boot partition is too small for them: before anything is written."""
    try:
        image.boot(image.path).fits(files.files)
    except FatFailed as error:
        raise UsageError(f"{image.name}: its boot partition cannot be read ({error})") from error


def write(image: Image, medium: Medium, files: BootFiles, scratch: Path, stages: Stages) -> None:
    """The image and these files onto the medium; all of it read back. MediumFailed, or whatever stopped it: then the
    medium has no partition table."""
    with open(image.path, "rb") as source:
        written = write_image(source, image.size, _before_partitions(image), medium, stages("writing"))
    verify(written, medium, stages("reading back"))
    try:
        put_files(image.boot(medium.path), files, medium.sync, stages("first boot"))
    except (FatFailed, OSError) as error:
        raise failed(medium, "writing the boot partition", _why(error)) from error
    _check_boot(image, medium, files, scratch, stages("checking"))
    finish(written, medium)


def whose(path: Path) -> str:
    """The device that the card under `path` was made for by an earlier flash; empty where nobody knows."""
    try:
        with path.open("rb") as raw:
            boot = read_table(raw.read(HEAD_BYTES)).boot
        fat = Fat(str(path), boot.offset, boot.size)
        said = json.loads(fat.read(CARD))
        return str(said["device"])
    except (UsageError, FatFailed, OSError, ValueError, KeyError, TypeError):
        return ""


def _before_partitions(image: Image) -> int:
    """The bytes that are held back: the table, and what else lies before the first partition."""
    return image.table.start


def _check_boot(image: Image, medium: Medium, files: BootFiles, scratch: Path, told: Told) -> None:
    try:
        medium.forget()
        with open(medium.path, "rb") as source, taken_out(image.boot(medium.path), source, scratch) as copy:
            told(1, 2)
            check_files(copy, files)
            told(2, 2)
    except (FatFailed, OSError) as error:
        raise failed(medium, "checking the boot partition", _why(error)) from error


def _why(error: Exception) -> str:
    return (error.strerror or str(error)) if isinstance(error, OSError) else str(error)
