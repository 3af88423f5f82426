"""The first boot's files onto a boot partition, and the check that they are there. Knows of no card: only of a FAT."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from edgesplit_provisioning.image import cmdline
from edgesplit_provisioning.image.boot_files import FOLDER, BootFiles
from edgesplit_provisioning.image.fat import Fat, FatFailed, check

Told = Callable[[int, int], None]


def put_files(fat: Fat, wanted: BootFiles, sync: Callable[[], None], told: Told) -> None:
    """All files, then, when they are on the card, the kernel's line that refers to them."""
    fat.make_folder(FOLDER)
    for nth, (name, content) in enumerate(wanted.files.items()):
        told(nth, len(wanted.files) + 1)
        fat.write(name, content)
    sync()
    fat.write(cmdline.NAME, wanted.cmdline)
    sync()
    told(len(wanted.files) + 1, len(wanted.files) + 1)


def check_files(fat: Fat, wanted: BootFiles) -> None:
    """The file system is sound and every file is what was written, byte by byte. FatFailed names the first that is not.

    `fat` is a copy that was read from the medium itself.
    """
    check(fat)
    for name, content in (*wanted.files.items(), (cmdline.NAME, wanted.cmdline)):
        expected = content.read_bytes() if isinstance(content, Path) else content
        if fat.read(name) != expected:
            raise FatFailed(f"{name} is not what was written")
    names = [name.lower() for name in fat.names()]
    if len(names) != len(set(names)):
        raise FatFailed("two files differ in case alone")
