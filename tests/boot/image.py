"""An image as Raspberry Pi OS (Trixie) is laid out, of Debian's arm64 programs: what `edgectl flash` is given.

A DOS partition table, a FAT boot partition with the files by which the first-boot format is known (cloud-init's three,
`cmdline.txt`, `config.txt`), and an ext4 root with systemd and cloud-init, which looks for its seed in /boot/firmware as
there. What differs: Debian's kernel for virtual machines stands in for the Raspberry Pi's, which boots on no machine
that qemu has; it has ext4 and NVMe built in, so that no initial RAM disk is needed. It lies beside the image.

Nothing is mounted: the root file system is written by `mke2fs -d`, the boot partition by mtools.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from arm64.debian import NotHere, fetch_package, install_tools, unpack_package
from arm64.emulator import Emulator
from arm64.root import Recipe, make_root, unpack_root

RELEASE = "trixie"
PACKAGES = (
    "systemd-sysv", "systemd-resolved", "udev", "dbus", "kmod", "cloud-init", "netplan.io", "iproute2", "sudo",
    "python3", "python3-venv", "ca-certificates", "passwd", "e2fsprogs", "dosfstools", "util-linux-extra",
)  # fmt: skip
SECTOR, MIB = 512, 1 << 20
DISK_ID = "e5e5e5e5"
BOOT_AT, BOOT_MIB, ROOT_MIB = 4 * MIB, 320, 2048
ROOT_AT = BOOT_AT + BOOT_MIB * MIB
TOOLS = {"mcopy": "mtools", "mkfs.vfat": "dosfstools", "sfdisk": "fdisk", "mke2fs": "e2fsprogs", "depmod": "kmod"}
BOOT_FILES = {
    "cmdline.txt": f"console=serial0,115200 console=tty1 root=PARTUUID={DISK_ID}-02 rootfstype=ext4 rootwait\n",
    "config.txt": "arm_64bit=1\n",
    "issue.txt": "Raspberry Pi reference 2026-10-01\nGenerated using pi-gen, stage2 (a stand-in of Debian's programs)\n",
    "user-data": "#cloud-config\n",
    "network-config": "# network-config\n",
    "meta-data": "dsmode: local\ninstance_id: rpios-image\n",
}
ROOT_FILES = {
    "etc/fstab": (
        f"PARTUUID={DISK_ID}-01 /boot/firmware vfat defaults 0 2\nPARTUUID={DISK_ID}-02 / ext4 defaults,noatime 0 1\n"
    ),
    "etc/hostname": "raspberrypi\n",
    "etc/machine-id": "uninitialized\n",
    "etc/rpi-issue": "Raspberry Pi reference 2026-10-01\n",
    "etc/cloud/cloud.cfg.d/99_raspberry-pi.cfg": (
        "datasource_list: [ NoCloud, None ]\ndatasource:\n  NoCloud:\n    seedfrom: file:///boot/firmware\n"
        "ssh_deletekeys: false\nssh_genkeytypes: []\n"
    ),
    "etc/systemd/system/cloud-init-main.service.d/boot.conf": "[Unit]\nRequiresMountsFor=/boot/firmware\n",
    "etc/systemd/system/cloud-init-local.service.d/boot.conf": "[Unit]\nRequiresMountsFor=/boot/firmware\n",
}
"""The last two: the seed must be there when cloud-init looks for it."""


@dataclass(frozen=True)
class Image:
    """A disk image to flash, and the kernel that starts what was flashed."""

    disk: Path
    kernel: Path


def make_image(emulator: Emulator, cache: Path) -> Image:
    """The image, from the cache or made now."""
    missing = sorted({package for tool, package in TOOLS.items() if not _found(tool)})
    if missing:
        install_tools(*missing)
    recipe = Recipe(RELEASE, PACKAGES)
    folder = cache / f"image-{_key(recipe)}"
    image = Image(folder / "disk.img", folder / "vmlinuz")
    if image.disk.exists():
        return image
    root = make_root(recipe, emulator, cache)
    print(f"making the image {image.disk}", flush=True)
    coming = folder.with_suffix(".coming")
    _remove(coming, emulator)
    coming.mkdir(parents=True)
    unpack_root(root, emulator, coming / "root")
    _lay_out(_kernel(coming, cache), emulator, coming)
    _remove(coming / "root", emulator)
    _remove(folder, emulator)
    coming.rename(folder)
    return image


def _key(recipe: Recipe) -> str:
    layout = repr([BOOT_FILES, ROOT_FILES, BOOT_MIB, ROOT_MIB])
    return f"{recipe.key}-{hashlib.sha256(layout.encode()).hexdigest()[:12]}"


def _kernel(coming: Path, cache: Path) -> Path:
    """The kernel package's files."""
    folder = cache / "kernel"
    meta = fetch_package("linux-image-cloud-arm64", RELEASE, folder, machine="arm64")
    fields = subprocess.run(["dpkg-deb", "-f", meta, "Depends"], capture_output=True, text=True, check=True).stdout
    package = fetch_package(fields.split()[0], RELEASE, folder, machine="arm64")
    unpack_package(package, coming / "kernel")
    return coming / "kernel"


def _lay_out(kernel: Path, emulator: Emulator, coming: Path) -> None:
    """root/ and kernel/ become disk.img and vmlinuz."""
    _write_tree(coming / "ours", ROOT_FILES)
    disk = coming / "disk.img"
    with disk.open("wb") as file:
        file.truncate(ROOT_AT + ROOT_MIB * MIB + MIB)
    table = (
        f"label: dos\nlabel-id: 0x{DISK_ID}\n"
        f"start={BOOT_AT // SECTOR}, size={BOOT_MIB * MIB // SECTOR}, type=c\n"
        f"start={ROOT_AT // SECTOR}, size={ROOT_MIB * MIB // SECTOR}, type=83\n"
    )
    _run(["sfdisk", "-q", str(disk)], table)
    _boot_partition(disk, coming)
    version = next((kernel / "usr/lib/modules").iterdir()).name
    next((kernel / "boot").glob("vmlinuz-*")).rename(coming / "vmlinuz")
    root = coming / "root"
    script = (
        f"set -e; cd {coming}; mkdir -p root/boot/firmware; cp -a kernel/usr/lib/modules root/usr/lib/; "
        f"depmod -b {root} {version}; cp -r --no-preserve=ownership ours/. root/; "
        f"mke2fs -q -t ext4 -L rootfs -d root -E offset={ROOT_AT},root_owner=0:0 disk.img {ROOT_MIB}m"
    )
    _run(emulator.argv(["sh", "-c", script]))
    for part in ("kernel", "ours"):
        shutil.rmtree(coming / part)


def _boot_partition(disk: Path, coming: Path) -> None:
    """FAT32 with the boot files."""
    _write_tree(coming / "boot", BOOT_FILES)
    _run(["mkfs.vfat", "-F", "32", "-n", "bootfs", "--offset", str(BOOT_AT // SECTOR), str(disk), str(BOOT_MIB << 10)])
    for name in BOOT_FILES:
        _run(["mcopy", "-i", f"{disk}@@{BOOT_AT}", str(coming / "boot" / name), f"::{name}"])
    shutil.rmtree(coming / "boot")


def _write_tree(folder: Path, files: Mapping[str, str]) -> None:
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)


def _remove(folder: Path, emulator: Emulator) -> None:
    """Its files may belong to users that only the namespace knows."""
    if folder.exists():
        _run(emulator.argv(["rm", "-rf", str(folder)]))


def _found(tool: str) -> bool:
    return shutil.which(tool, path=f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin") is not None


def _run(argv: list[str], told: str | None = None) -> None:
    path = {"PATH": f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"}
    done = subprocess.run(argv, input=told, capture_output=True, text=True, env=os.environ | path, check=False)
    if done.returncode != 0:
        raise NotHere(f"{argv[0]}: {(done.stderr or done.stdout).strip()[-800:]}")
