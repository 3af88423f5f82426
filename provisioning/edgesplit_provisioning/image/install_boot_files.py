"""Writes the first-boot files to a boot partition and checks that they are there."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from edgesplit_provisioning.image import cmdline
from edgesplit_provisioning.image.block_io import OnProgress
from edgesplit_provisioning.image.boot_files import FOLDER, BootFiles
from edgesplit_provisioning.image.fat import Fat, FatError, check


def write_boot_files(fat: Fat, boot_files: BootFiles, sync: Callable[[], None], on_progress: OnProgress) -> None:
    """Write all files, sync, and only then write the kernel command line, which refers to them."""
    fat.make_folder(FOLDER)
    for index, (name, content) in enumerate(boot_files.files.items()):
        on_progress(index, len(boot_files.files) + 1)
        fat.write(name, content)
    sync()
    fat.write(cmdline.NAME, boot_files.cmdline)
    sync()
    on_progress(len(boot_files.files) + 1, len(boot_files.files) + 1)


def verify_boot_files(fat: Fat, boot_files: BootFiles) -> None:
    """Check the file system and compare every file byte by byte; FatError names the first difference.

    `fat` must be a copy that was read from the medium itself.
    """
    check(fat)
    for name, content in (*boot_files.files.items(), (cmdline.NAME, boot_files.cmdline)):
        expected = content.read_bytes() if isinstance(content, Path) else content
        if fat.read(name) != expected:
            raise FatError(f"{name} is not what was written")
    names = [name.lower() for name in fat.names()]
    if len(names) != len(set(names)):
        raise FatError("two files differ in case alone")
