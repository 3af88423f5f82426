"""The commands of NVIDIA's flasher with their arguments, and running them.

The arguments are those of NVIDIA's quick start for each release.
"""

from __future__ import annotations

import os
import shlex
import subprocess
from collections.abc import Mapping, Sequence
from typing import Literal, cast, get_args

from edgesplit.errors import EdgeError, UsageError
from edgesplit_provisioning.jetson.bsp import CREATE_USER, FLASHER, BoardSupportPackage

JetsonMedium = Literal["nvme", "sd", "usb"]
"""The board's disk that the system is written to."""
_LAYOUT: Mapping[int, tuple[str, str]] = {
    35: ("tools/kernel_flash/flash_l4t_external.xml", "bootloader/t186ref/cfg/flash_t234_qspi.xml"),
    36: ("tools/kernel_flash/flash_l4t_t234_nvme.xml", "bootloader/generic/cfg/flash_t234_qspi.xml"),
}
"""Partition layouts by major release: of the medium, and of the board's QSPI flash."""
_DEVICE: Mapping[tuple[int, JetsonMedium], str] = {
    (35, "nvme"): "nvme0n1p1", (35, "sd"): "mmcblk1p1", (35, "usb"): "sda1",
    (36, "nvme"): "nvme0n1p1", (36, "sd"): "mmcblk0p1", (36, "usb"): "sda1",
}  # fmt: skip
"""Device name of the medium on the board, by major release."""


def parse_medium(text: str) -> JetsonMedium:
    """Parse the medium; UsageError for an unknown one."""
    for known in get_args(JetsonMedium):
        if text == known:
            return cast(JetsonMedium, known)
    raise UsageError(f"--to {text[:40]!r}: a Jetson's system goes to nvme, sd or usb of the board itself")


def flash_commands(
    tree: BoardSupportPackage, medium: JetsonMedium, *, user: str, hostname: str, accept_license: bool
) -> list[list[str]]:
    """The commands to run in the board support package, as root, in order.

    Without a user, NVIDIA's first-boot dialogue waits for a keyboard. A user that is created gets a random password
    that is never shown; NVIDIA's script asks to accept its licence unless `accept_license`.
    """
    outer, inner = _LAYOUT[tree.major]
    for path in (outer, inner):
        if not (tree.path / path).is_file():
            raise UsageError(f"{tree.path} lacks {path}: unpack NVIDIA's archive anew")
    flash = [
        f"./{FLASHER}", "--external-device", _DEVICE[tree.major, medium], "-c", outer, "-p", f"-c {inner}",
        "--showlogs",
        "--network", "usb0", tree.board, "internal",
    ]  # fmt: skip
    if not user:
        return [flash]
    if not (tree.path / CREATE_USER).is_file():
        raise UsageError(f"{tree.path} lacks {CREATE_USER}: unpack NVIDIA's archive anew")
    licence = ["--accept-license"] if accept_license else []
    return [[f"./{CREATE_USER}", "-u", user, "-n", hostname, *licence], flash]


def command_line(command: Sequence[str]) -> str:
    """The command line to type."""
    return shlex.join(["sudo", *command])


def run(tree: BoardSupportPackage, command: Sequence[str]) -> None:
    """Run the command there, on this terminal. EdgeError where it fails; its output is on the terminal."""
    if os.geteuid() != 0:
        raise UsageError("NVIDIA's tools run as root: call this with sudo, or run what it prints")
    try:
        result = subprocess.run(command, cwd=tree.path, check=False)
    except OSError as error:
        raise EdgeError(f"cannot run {command[0]}: {error.strerror}") from error
    if result.returncode != 0:
        raise EdgeError(f"NVIDIA's {command[0]} ended with {result.returncode}: its output is above")
