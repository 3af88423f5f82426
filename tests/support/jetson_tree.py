"""The inspected part of NVIDIA's tree, and a flash script that records its arguments."""

from __future__ import annotations

from pathlib import Path

from edgesplit_provisioning.jetson.bsp import CREATE_USER, FLASHER
from edgesplit_provisioning.jetson.flasher import _LAYOUT

RECORDER = '#!/bin/sh\nprintf "%s\\n" "$0" "$@" >>asked\n[ ! -e fails ] || exit 7\n'


def make_tree(folder: Path, major: int = 36, python: str = "3.10") -> Path:
    """`Linux_for_Tegra`, after apply_binaries.sh."""
    tree = folder / "Linux_for_Tegra"
    for path in ("flash.sh", FLASHER, CREATE_USER):
        (tree / path).parent.mkdir(parents=True, exist_ok=True)
        (tree / path).write_text(RECORDER)
        (tree / path).chmod(0o755)
    for path in (*_LAYOUT[major], "jetson-orin-nano-devkit.conf"):
        (tree / path).parent.mkdir(parents=True, exist_ok=True)
        (tree / path).touch()
    rootfs = tree / "rootfs"
    for folder_name in ("etc/systemd/system/multi-user.target.wants", "etc/ssh", "usr/bin", "opt"):
        (rootfs / folder_name).mkdir(parents=True)
    (rootfs / "etc/nv_tegra_release").write_text(f"# R{major} (release), REVISION: 4.3, GCID: 1, BOARD: generic\n")
    (rootfs / "etc/hostname").write_text("tegra-ubuntu\n")
    (rootfs / f"usr/bin/python{python}").touch()
    return tree


def listing(folder: Path) -> dict[str, str]:
    """Everything in it: content, link or folder."""
    found = {}
    for path in sorted(folder.rglob("*")):
        name = str(path.relative_to(folder))
        if path.is_symlink():
            found[name] = f"-> {path.readlink()}"
        else:
            found[name] = "folder" if path.is_dir() else path.read_bytes().hex()
    return found
