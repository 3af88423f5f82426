"""NVIDIA's tree as it lies on the operator's machine: which release it is, for which boards, and whether it is
whole."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from edgesplit.errors import UsageError

FLASHER = "tools/kernel_flash/l4t_initrd_flash.sh"
CREATE_USER = "tools/l4t_create_default_user.sh"
RELEASE = "etc/nv_tegra_release"
BOARDS = {"jetson-orin-nano": ("jetson-orin-nano-devkit-super", "jetson-orin-nano-devkit")}
"""Board configurations by device profile, the newest first."""
KNOWN = (35, 36)
"""JetPack 5 and 6."""
PYTHONS = ("3.14", "3.13", "3.12", "3.11", "3.10")


@dataclass(frozen=True, slots=True)
class Tree:
    """A tree that can be flashed."""

    path: Path
    major: int
    revision: str
    board: str
    python: str
    """That the agent can run on in its root file system; empty where there is none."""

    @property
    def rootfs(self) -> Path:
        """What becomes the board's disk."""
        return self.path / "rootfs"

    @property
    def name(self) -> str:
        """For people."""
        return f"Jetson Linux {self.major}.{self.revision} (JetPack {self.major - 30})"

    @property
    def glibc(self) -> str:
        """Of its Ubuntu: 20.04 or 22.04."""
        return "2.31" if self.major == 35 else "2.35"


def read_tree(path: Path, profile: str, board: str = "") -> Tree:
    """The tree at `path` for boards of that profile; UsageError says what is missing and how it comes there."""
    if profile not in BOARDS:
        raise UsageError(f"no board configuration is known for {profile!r}; there is {', '.join(BOARDS)}")
    if not (path / "flash.sh").is_file() or not (path / FLASHER).is_file():
        raise UsageError(
            f"{path} is not NVIDIA's Linux_for_Tegra: unpack Jetson_Linux_R36…_aarch64.tbz2 and name the folder in it"
        )
    try:
        with (path / "rootfs" / RELEASE).open("rb") as file:
            said = file.readline(400).decode("ascii", "replace")
    except OSError as error:
        raise UsageError(
            f"{path / 'rootfs'} is not ready: unpack Tegra_Linux_Sample-Root-Filesystem…tbz2 there as root, then run"
            " `sudo ./apply_binaries.sh`"
        ) from error
    found = re.match(r"# R(\d{1,3}) \(release\), REVISION: ([0-9.]{1,12})", said)
    if found is None or int(found[1]) not in KNOWN:
        what = f"R{found[1]}" if found else "a release that does not say which"
        raise UsageError(f"{path} is {what}, and this knows R35 (JetPack 5) and R36 (JetPack 6)")
    return Tree(path.resolve(), int(found[1]), found[2], _board(path, profile, board), _python(path / "rootfs"))


def _board(path: Path, profile: str, wanted: str) -> str:
    names = (wanted,) if wanted else BOARDS[profile]
    for name in names:
        if re.fullmatch(r"[a-z0-9][a-z0-9+-]{0,60}", name) and (path / f"{name}.conf").is_file():
            return name
    raise UsageError(
        f"{path} has no configuration {' or '.join(f'{name}.conf' for name in names)[:200]}: which board is it?"
    )


def _python(rootfs: Path) -> str:
    there = [version for version in PYTHONS if (rootfs / "usr" / "bin" / f"python{version}").is_file()]
    return there[0] if there else ""
