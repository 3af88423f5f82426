"""Images laid out as Raspberry Pi OS is, of Debian's arm64 programs: what `edgectl flash` is given.

A DOS partition table, a FAT boot partition with the files by which the first-boot format is known, and an ext4 root.
Nothing is mounted: the root file system is written by `mke2fs -d`, the boot partition by mtools. An image is made once
and kept under a name that says what it was made of.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from arm64.debian import NotHere, fetch_package, install_tools, unpack_package
from arm64.emulator import Emulator
from arm64.root import Recipe, make_root, remove_root, unpack_root

SECTOR, MIB = 512, 1 << 20
DISK_ID = "e5e5e5e5"
BOOT_AT, BOOT_MIB = 4 * MIB, 320
ROOT_AT = BOOT_AT + BOOT_MIB * MIB
KERNEL = "linux-image-cloud-arm64"
TOOLS = {"mcopy": "mtools", "mkfs.vfat": "dosfstools", "sfdisk": "fdisk", "mke2fs": "e2fsprogs", "depmod": "kmod"}


@dataclass(frozen=True)
class Layout:
    """What a system has that Debian's packages do not bring."""

    recipe: Recipe
    boot_files: Mapping[str, str]
    root_files: Mapping[str, str]
    root_mib: int
    bootable: bool = False
    """A kernel of Debian's for virtual machines lies beside it, its modules in it."""
    key: str = field(init=False)

    def __post_init__(self) -> None:
        said = repr([self.boot_files, self.root_files, BOOT_MIB, self.root_mib, self.bootable])
        object.__setattr__(self, "key", f"{self.recipe.key}-{hashlib.sha256(said.encode()).hexdigest()[:12]}")


@dataclass(frozen=True)
class Image:
    """A disk image to flash, and the kernel that starts what was flashed (where its layout is bootable)."""

    disk: Path
    kernel: Path


def make_image(layout: Layout, emulator: Emulator, cache: Path) -> Image:
    """The image, from the cache or made now."""
    missing = sorted({package for tool, package in TOOLS.items() if not _found(tool)})
    if missing:
        install_tools(*missing)
    folder = cache / f"image-{layout.key}"
    image = Image(folder / "disk.img", folder / "vmlinuz")
    if image.disk.exists():
        return image
    root = make_root(layout.recipe, emulator, cache)
    print(f"making the image {image.disk}", flush=True)
    coming = folder.with_suffix(".coming")
    remove_root(coming, emulator)
    coming.mkdir(parents=True)
    unpack_root(root, emulator, coming / "root")
    if layout.bootable:
        _add_kernel(layout.recipe.release, coming, cache / "kernel")
    _write_tree(coming / "ours", layout.root_files)
    _write_partitions(coming / "disk.img", layout)
    _write_boot_files(coming, layout.boot_files)
    _write_root(coming, layout.root_mib, emulator)
    coming.rename(folder)
    return image


def boot_partition(disk: Path) -> str:
    """The boot partition as mtools name it."""
    return f"{disk}@@{BOOT_AT}"


def _add_kernel(release: str, coming: Path, cache: Path) -> None:
    """vmlinuz beside the root, its modules in `ours`."""
    meta = fetch_package(KERNEL, release, cache, machine="arm64")
    depends = _run(["dpkg-deb", "-f", str(meta), "Depends"])
    unpack_package(fetch_package(depends.split()[0], release, cache, machine="arm64"), coming / "kernel")
    next((coming / "kernel" / "boot").glob("vmlinuz-*")).rename(coming / "vmlinuz")
    (coming / "ours" / "usr" / "lib").mkdir(parents=True)
    modules = coming / "ours" / "usr" / "lib" / "modules"
    (coming / "kernel" / "usr" / "lib" / "modules").rename(modules)
    shutil.rmtree(coming / "kernel")
    _run(["depmod", "-b", str(coming / "ours" / "usr"), next(modules.iterdir()).name])


def _write_partitions(disk: Path, layout: Layout) -> None:
    with disk.open("wb") as file:
        file.truncate(ROOT_AT + (layout.root_mib + 1) * MIB)
    table = (
        f"label: dos\nlabel-id: 0x{DISK_ID}\n"
        f"start={BOOT_AT // SECTOR}, size={BOOT_MIB * MIB // SECTOR}, type=c\n"
        f"start={ROOT_AT // SECTOR}, size={layout.root_mib * MIB // SECTOR}, type=83\n"
    )
    _run(["sfdisk", "-q", str(disk)], table)


def _write_boot_files(coming: Path, files: Mapping[str, str]) -> None:
    """A FAT32 file system with these files."""
    disk = coming / "disk.img"
    _write_tree(coming / "boot", files)
    _run(["mkfs.vfat", "-F", "32", "-n", "bootfs", "--offset", str(BOOT_AT // SECTOR), str(disk), str(BOOT_MIB << 10)])
    for name in files:
        _run(["mcopy", "-i", boot_partition(disk), str(coming / "boot" / name), f"::{name}"])
    shutil.rmtree(coming / "boot")


def _write_root(coming: Path, mib: int, emulator: Emulator) -> None:
    """An ext4 file system of root/ with ours/ over it; both are gone then."""
    (coming / "ours" / "boot" / "firmware").mkdir(parents=True)
    script = (
        f"set -e; cd {coming}; mkdir -p root/dev; "  # mmdebstrap was told to leave devices out
        "chmod -R u=rwX,go=rX ours; cp -R --no-preserve=ownership ours/. root/; "
        f"PATH=$PATH:/sbin:/usr/sbin mke2fs -q -t ext4 -L rootfs -d root -E offset={ROOT_AT},root_owner=0:0 "
        f"disk.img {mib}m; rm -rf root ours"
    )
    _run(emulator.argv(["sh", "-c", script]))


def _write_tree(folder: Path, files: Mapping[str, str]) -> None:
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)


def _found(tool: str) -> bool:
    return shutil.which(tool, path=_path()) is not None


def _path() -> str:
    return f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"


def _run(argv: list[str], told: str | None = None) -> str:
    settings = os.environ | {"PATH": _path(), "MTOOLS_SKIP_CHECK": "1"}
    done = subprocess.run(argv, input=told, capture_output=True, text=True, env=settings, check=False)
    if done.returncode != 0:
        raise NotHere(f"{argv[0]}: {(done.stderr or done.stdout).strip()[-800:]}")
    return done.stdout
