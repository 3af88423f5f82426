"""Which files configure an image at its first boot: found out from what lies in it, never assumed. Pure."""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass
from enum import Enum

from edgesplit.errors import UsageError
from edgesplit_provisioning.image import cloud_init, cmdline
from edgesplit_provisioning.image.root_filesystem import System

GENERATED = re.compile(r"(?:Raspberry Pi|pi-gen).*?(20[0-9]{2}-[0-9]{2}-[0-9]{2})", re.DOTALL)
FIRST_FIRMWARE_MOUNT = "2023-10-10"
"""Raspberry Pi OS Bookworm, the first with the boot partition at /boot/firmware, and with Python 3.11."""
MACHINES = ("aarch64", "x86_64")
OLDEST_PYTHON = (3, 10)
BOARDS = {
    "raspberrypi3b+": ("bcm2710-rpi-3-b-plus.dtb", "bcm2837-rpi-3-b-plus.dtb"),
    "raspberrypi4": ("bcm2711-rpi-4-b.dtb",),
    "raspberrypi5": ("bcm2712-rpi-5-b.dtb",),
}


class Format(Enum):
    """How an image is configured."""

    FIRSTRUN = "firstrun.sh"
    CLOUD_INIT = "cloud-init"


@dataclass(frozen=True, slots=True)
class Found:
    """What an image is, as far as it was found out."""

    format: Format
    mount: str
    system: System

    @property
    def default_user(self) -> str:
        """Whom the image expects to log in."""
        return "ubuntu" if self.system.identity == "ubuntu" else "pi"


def detect(names: Collection[str], issue: str, system: System) -> Found:
    """By the boot partition's files, its issue.txt and the system behind; UsageError says what was found instead."""
    there = {name.lower().rstrip("/") for name in names}
    if cmdline.NAME not in there:
        raise _unknown("its boot partition has no cmdline.txt, so no Raspberry Pi boots it", there, system)
    _supported(system)
    seeds = {cloud_init.USER_DATA, cloud_init.META_DATA} <= there
    if seeds and (system.has_cloud_init or not system.identity):
        return Found(Format.CLOUD_INIT, system.boot_mount or "/boot/firmware", system)
    if seeds:
        raise _unknown("it has cloud-init's files and no cloud-init", there, system)
    if "rpi-preseed.toml" in there:
        raise _unknown("it is configured by rpi-preseed, which edgesplit does not write", there, system)
    generated = GENERATED.search(issue)
    if generated is None:
        raise _unknown("it is neither Raspberry Pi OS nor an image with cloud-init", there, system)
    if generated[1] < FIRST_FIRMWARE_MOUNT:
        raise _unknown(f"it is Raspberry Pi OS of {generated[1]}, older than Bookworm", there, system)
    if system.identity and not system.has_first_run:
        raise _unknown("it calls itself Raspberry Pi OS and has none of its first-boot scripts", there, system)
    return Found(Format.FIRSTRUN, system.boot_mount or "/boot/firmware", system)


def _supported(system: System) -> None:
    """The agent has wheels for it."""
    if system.machine and system.machine not in MACHINES:
        raise UsageError(
            f"the image is for {system.machine}, and inference runtimes exist for {' and '.join(MACHINES)} alone: take"
            " the 64-bit image"
        )
    if system.python and tuple(map(int, system.python.split("."))) < OLDEST_PYTHON:
        raise UsageError(f"{system.name or 'the image'} has Python {system.python}, and the agent needs 3.10 or newer")


def missing_board(device: str, names: Collection[str]) -> str:
    """Why that board may not boot from an image with these files; empty where it does."""
    wanted = BOARDS.get(device, ())
    there = {name.lower() for name in names}
    if not wanted or there & set(wanted):
        return ""
    return f"the image has no device tree for a {device} ({wanted[0]}): it may not boot there"


def _unknown(why: str, there: set[str], system: System) -> UsageError:
    listed = ", ".join(sorted(there)[:12]) or "nothing"
    return UsageError(
        f"edgesplit cannot configure this image: {why}. System: {system.name or 'unknown'}; on the boot partition:"
        f" {listed}. Take Raspberry Pi OS (Bookworm or newer, 64-bit) or Ubuntu for Raspberry Pi; a device that runs"
        " already is taken over by `edgectl adopt`"
    )
