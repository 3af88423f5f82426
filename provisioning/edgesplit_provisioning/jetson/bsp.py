"""NVIDIA's board support package (`Linux_for_Tegra`) as unpacked on the operator's machine: its release, its boards,
and whether it is complete."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from edgesplit.errors import UsageError

FLASHER = "tools/kernel_flash/l4t_initrd_flash.sh"
CREATE_USER = "tools/l4t_create_default_user.sh"
RELEASE_FILE = "etc/nv_tegra_release"
BOARDS = {"jetson-orin-nano": ("jetson-orin-nano-devkit-super", "jetson-orin-nano-devkit")}
"""Board configurations by device profile, newest first."""
SUPPORTED_RELEASES = (35, 36)
"""Supported major releases: JetPack 5 and 6."""
PYTHONS = ("3.14", "3.13", "3.12", "3.11", "3.10")
"""Python versions that the agent runs on, newest first."""


@dataclass(frozen=True, slots=True)
class BoardSupportPackage:
    """A board support package that can be flashed."""

    path: Path
    major: int
    revision: str
    board: str
    python: str
    """Version of a Python in its root file system that the agent can run on; empty where there is none."""

    @property
    def rootfs(self) -> Path:
        """The folder that becomes the board's root file system."""
        return self.path / "rootfs"

    @property
    def name(self) -> str:
        """Name for display."""
        return f"Jetson Linux {self.major}.{self.revision} (JetPack {self.major - 30})"

    @property
    def glibc(self) -> str:
        """glibc version of its Ubuntu (20.04 or 22.04)."""
        return "2.31" if self.major == 35 else "2.35"


def read_bsp(path: Path, profile: str, board: str = "") -> BoardSupportPackage:
    """Read the board support package at `path` for boards of that profile; UsageError names what is missing and how to
    get it."""
    if profile not in BOARDS:
        raise UsageError(f"no board configuration is known for {profile!r}; there is {', '.join(BOARDS)}")
    if not (path / "flash.sh").is_file() or not (path / FLASHER).is_file():
        raise UsageError(
            f"{path} is not NVIDIA's Linux_for_Tegra: unpack Jetson_Linux_R36…_aarch64.tbz2 and name the folder in it"
        )
    try:
        with (path / "rootfs" / RELEASE_FILE).open("rb") as file:
            line = file.readline(400).decode("ascii", "replace")
    except OSError as error:
        raise UsageError(
            f"{path / 'rootfs'} is not ready: unpack Tegra_Linux_Sample-Root-Filesystem…tbz2 there as root, then run"
            " `sudo ./apply_binaries.sh`"
        ) from error
    match = re.match(r"# R(\d{1,3}) \(release\), REVISION: ([0-9.]{1,12})", line)
    if match is None or int(match[1]) not in SUPPORTED_RELEASES:
        release = f"R{match[1]}" if match else "an unknown release"
        raise UsageError(f"{path} is {release}, supported are R35 (JetPack 5) and R36 (JetPack 6)")
    return BoardSupportPackage(
        path.resolve(), int(match[1]), match[2], _board(path, profile, board), _python(path / "rootfs")
    )


def _board(path: Path, profile: str, requested: str) -> str:
    names = (requested,) if requested else BOARDS[profile]
    for name in names:
        if re.fullmatch(r"[a-z0-9][a-z0-9+-]{0,60}", name) and (path / f"{name}.conf").is_file():
            return name
    raise UsageError(
        f"{path} has no configuration {' or '.join(f'{name}.conf' for name in names)[:200]}: which board is it?"
    )


def _python(rootfs: Path) -> str:
    installed = [version for version in PYTHONS if (rootfs / "usr" / "bin" / f"python{version}").is_file()]
    return installed[0] if installed else ""
