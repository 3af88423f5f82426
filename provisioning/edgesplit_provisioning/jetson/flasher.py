"""Which of NVIDIA's commands follow, with which arguments; and calling them, where that is asked for.

The arguments are those of NVIDIA's quick start for each release. Nothing of the flasher is done here.
"""

from __future__ import annotations

import os
import shlex
import subprocess
from collections.abc import Mapping, Sequence
from typing import Literal, cast, get_args

from edgesplit.errors import EdgeError, UsageError
from edgesplit_provisioning.jetson.bsp import CREATE_USER, FLASHER, Tree

Medium = Literal["nvme", "sd", "usb"]
_LAYOUT: Mapping[int, tuple[str, str]] = {
    35: ("tools/kernel_flash/flash_l4t_external.xml", "bootloader/t186ref/cfg/flash_t234_qspi.xml"),
    36: ("tools/kernel_flash/flash_l4t_t234_nvme.xml", "bootloader/generic/cfg/flash_t234_qspi.xml"),
}
"""Partition layouts: of the medium, and of the board's own flash."""
_DEVICE: Mapping[tuple[int, Medium], str] = {
    (35, "nvme"): "nvme0n1p1", (35, "sd"): "mmcblk1p1", (35, "usb"): "sda1",
    (36, "nvme"): "nvme0n1p1", (36, "sd"): "mmcblk0p1", (36, "usb"): "sda1",
}  # fmt: skip
"""As the board calls the medium."""


def medium(text: str) -> Medium:
    """Where the system goes."""
    for known in get_args(Medium):
        if text == known:
            return cast(Medium, known)
    raise UsageError(f"--to {text[:40]!r}: a Jetson's system goes to nvme, sd or usb of the board itself")


def commands(tree: Tree, to: Medium, *, user: str, hostname: str, licensed: bool) -> list[list[str]]:
    """To be run in the tree, as root, one after another.

    Without a user NVIDIA's first-boot questions wait for a keyboard. A user that is made gets a password that nobody
    sees; NVIDIA's script asks for its licence unless that was accepted already (`licensed`).
    """
    outer, inner = _LAYOUT[tree.major]
    for path in (outer, inner):
        if not (tree.path / path).is_file():
            raise UsageError(f"{tree.path} lacks {path}: unpack NVIDIA's archive anew")
    flash = [
        f"./{FLASHER}", "--external-device", _DEVICE[tree.major, to], "-c", outer, "-p", f"-c {inner}", "--showlogs",
        "--network", "usb0", tree.board, "internal",
    ]  # fmt: skip
    if not user:
        return [flash]
    if not (tree.path / CREATE_USER).is_file():
        raise UsageError(f"{tree.path} lacks {CREATE_USER}: unpack NVIDIA's archive anew")
    licence = ["--accept-license"] if licensed else []
    return [[f"./{CREATE_USER}", "-u", user, "-n", hostname, *licence], flash]


def spelled(command: Sequence[str]) -> str:
    """As it is typed."""
    return shlex.join(["sudo", *command])


def run(tree: Tree, command: Sequence[str]) -> None:
    """Call it there, on this terminal. EdgeError where it fails: what it said stands above."""
    if os.geteuid() != 0:
        raise UsageError("NVIDIA's tools run as root: call this with sudo, or run what it prints")
    try:
        done = subprocess.run(command, cwd=tree.path, check=False)
    except OSError as error:
        raise EdgeError(f"cannot run {command[0]}: {error.strerror}") from error
    if done.returncode != 0:
        raise EdgeError(f"NVIDIA's {command[0]} ended with {done.returncode}: what it said stands above")
