"""Detects how an image is configured at its first boot, from the files that it has. No I/O."""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass
from enum import Enum

from edgesplit.errors import UsageError
from edgesplit_provisioning.image import cloud_init, cmdline
from edgesplit_provisioning.image.root_filesystem import OperatingSystem

BUILD_DATE = re.compile(r"(?:Raspberry Pi|pi-gen).*?(20[0-9]{2}-[0-9]{2}-[0-9]{2})", re.DOTALL)
"""The build date in issue.txt of Raspberry Pi OS."""
OLDEST_RASPBERRY_OS = "2023-10-10"
"""Build date of Raspberry Pi OS Bookworm, the first with the boot partition at /boot/firmware and with Python 3.11."""
MACHINES = ("aarch64", "x86_64")
OLDEST_PYTHON = (3, 10)
BOARD_DEVICE_TREES = {
    "raspberrypi3b+": ("bcm2710-rpi-3-b-plus.dtb", "bcm2837-rpi-3-b-plus.dtb"),
    "raspberrypi4": ("bcm2711-rpi-4-b.dtb",),
    "raspberrypi5": ("bcm2712-rpi-5-b.dtb",),
}


class Format(Enum):
    """How an image is configured at its first boot."""

    FIRSTRUN = "firstrun.sh"
    CLOUD_INIT = "cloud-init"


@dataclass(frozen=True, slots=True)
class DetectedImage:
    """What was detected of an image."""

    format: Format
    mount: str
    """Where the system mounts the boot partition."""
    system: OperatingSystem

    @property
    def default_user(self) -> str:
        """The user that the image expects to log in."""
        return "ubuntu" if self.system.identity == "ubuntu" else "pi"


def detect(names: Collection[str], issue: str, system: OperatingSystem) -> DetectedImage:
    """Detect the format from the boot partition's file names, its issue.txt and the root file system; UsageError names
    what was found where none fits."""
    present = {name.lower().rstrip("/") for name in names}
    if cmdline.NAME not in present:
        raise _unconfigurable("its boot partition has no cmdline.txt, so no Raspberry Pi boots it", present, system)
    _check_supported(system)
    seeds = {cloud_init.USER_DATA, cloud_init.META_DATA} <= present
    if seeds and (system.has_cloud_init or not system.identity):
        return DetectedImage(Format.CLOUD_INIT, system.boot_mount or "/boot/firmware", system)
    if seeds:
        raise _unconfigurable("it has cloud-init's files and no cloud-init", present, system)
    if "rpi-preseed.toml" in present:
        raise _unconfigurable("it is configured by rpi-preseed, which edgesplit does not write", present, system)
    generated = BUILD_DATE.search(issue)
    if generated is None:
        raise _unconfigurable("it is neither Raspberry Pi OS nor an image with cloud-init", present, system)
    if generated[1] < OLDEST_RASPBERRY_OS:
        raise _unconfigurable(f"it is Raspberry Pi OS of {generated[1]}, older than Bookworm", present, system)
    if system.identity and not system.has_first_run:
        raise _unconfigurable("it calls itself Raspberry Pi OS and has none of its first-boot scripts", present, system)
    return DetectedImage(Format.FIRSTRUN, system.boot_mount or "/boot/firmware", system)


def _check_supported(system: OperatingSystem) -> None:
    """UsageError where the agent has no wheels for the image's machine or Python."""
    if system.machine and system.machine not in MACHINES:
        raise UsageError(
            f"the image is for {system.machine}, and inference runtimes exist for {' and '.join(MACHINES)} alone: take"
            " the 64-bit image"
        )
    if system.python and tuple(map(int, system.python.split("."))) < OLDEST_PYTHON:
        raise UsageError(f"{system.name or 'the image'} has Python {system.python}, and the agent needs 3.10 or newer")


def why_board_may_not_boot(device: str, names: Collection[str]) -> str:
    """Why that board may not boot from an image with these files; empty where it does."""
    device_trees = BOARD_DEVICE_TREES.get(device, ())
    present = {name.lower() for name in names}
    if not device_trees or present & set(device_trees):
        return ""
    return f"the image has no device tree for a {device} ({device_trees[0]}): it may not boot there"


def _unconfigurable(reason: str, present: set[str], system: OperatingSystem) -> UsageError:
    listed = ", ".join(sorted(present)[:12]) or "nothing"
    return UsageError(
        f"edgesplit cannot configure this image: {reason}. System: {system.name or 'unknown'}; on the boot partition:"
        f" {listed}. Take Raspberry Pi OS (Bookworm or newer, 64-bit) or Ubuntu for Raspberry Pi; a device that runs"
        " already is taken over by `edgectl adopt`"
    )
