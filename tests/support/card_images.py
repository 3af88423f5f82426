"""Cards without hardware: images of each kind made here, a kit of a few bytes, and a machine's disks as files.

The images boot nothing. What they share with real ones is what flashing reads: a partition table, a FAT with the files
that such an image has, and an ext4 with the few files by which its system is known.
"""

from __future__ import annotations

import base64
import json
import struct
import subprocess
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from uuid import UUID

import pytest

from edgesplit_provisioning.image import subprocesses
from edgesplit_provisioning.image.fat import Fat
from edgesplit_provisioning.image.partition_table import BASIC_DATA, HEAD_BYTES, read_table
from edgesplit_provisioning.kit.manifest import KitManifest, encode, list_files

MIB = 1 << 20
BOOT_OFFSET, BOOT_SIZE, ROOT_SIZE = 4 * MIB, 34 * MIB, 3 * MIB
LINUX = UUID("0fc63daf-8483-4772-8e79-3d69d8477de4")
CMDLINE = "console=serial0,115200 console=tty1 root=PARTUUID=4e639091-02 rootfstype=ext4 fsck.repair=yes rootwait quiet"
ED25519 = b"\0\0\0\x0bssh-ed25519\0\0\0 " + bytes(range(32))
PUBLIC_KEY = f"ssh-ed25519 {base64.b64encode(ED25519).decode()}"
CLAIM = {
    "device": "cam-1", "device_class": "raspberrypi4", "token": "one-time-token", "expires": 2_000_000_000,
    "controller_url": "https://10.0.0.2:8443", "ca_pem": "-----BEGIN CERTIFICATE-----\n", "tuf_root": "{}",
}  # fmt: skip


def needs_card_tools() -> None:
    """Skips where this machine has not what flashing and these images need."""
    for name in ("mcopy", "fsck.vfat", "mkfs.vfat", "mke2fs", "debugfs"):
        try:
            subprocesses.find_program(name)
        except Exception:
            pytest.skip(f"no {name} here: `tools/setup dev` installs mtools and dosfstools")


@dataclass(frozen=True)
class Kind:
    """An image to make."""

    boot: Mapping[str, str]
    """Files of the boot partition."""
    os_release: str = ""
    python: str = "3.11"
    elf: int = 183
    fstab: str = "PARTUUID=4e639091-01  /boot/firmware  vfat  defaults  0  2\n"
    programs: tuple[str, ...] = ()
    gpt: bool = False
    boot_size: int = 10 * MIB
    """FAT32 from 33 MiB on, FAT16 below: both are met in the field, and the smaller ones are quicker."""
    more: Mapping[str, str] = field(default_factory=dict)


PI_FILES = {
    "cmdline.txt": CMDLINE + "\n",
    "config.txt": "arm_64bit=1\n",
    "issue.txt": "Raspberry Pi reference 2025-05-13\nGenerated using pi-gen, stage2\n",
    "kernel8.img": "kernel",
    "bcm2710-rpi-3-b-plus.dtb": "tree",
    "bcm2711-rpi-4-b.dtb": "tree",
    "bcm2712-rpi-5-b.dtb": "tree",
}
SEEDS = {"user-data": "#cloud-config\n", "meta-data": "instance-id: rpios-image\n", "network-config": "{}\n"}
FIRST_RUN = ("/usr/lib/raspberrypi-sys-mods/firstboot",)
BOOKWORM = Kind(
    PI_FILES, 'PRETTY_NAME="Debian GNU/Linux 12 (bookworm)"\nID=debian\nVERSION_CODENAME=bookworm\n', "3.11",
    programs=FIRST_RUN, boot_size=BOOT_SIZE,
)  # fmt: skip
TRIXIE = Kind(
    {**PI_FILES, "issue.txt": "Raspberry Pi reference 2025-11-24\nGenerated using pi-gen, stage2\n", **SEEDS},
    'PRETTY_NAME="Debian GNU/Linux 13 (trixie)"\nID=debian\nVERSION_CODENAME=trixie\n', "3.13",
    programs=(*FIRST_RUN, "/usr/bin/cloud-init"),
)  # fmt: skip
UBUNTU = Kind(
    {"cmdline.txt": "console=tty1 root=LABEL=writable rootfstype=ext4 rootwait fixrtc", "bcm2711-rpi-4-b.dtb": "x",
     "README": "boot", **SEEDS},
    'PRETTY_NAME="Ubuntu 24.04.3 LTS"\nNAME="Ubuntu"\nID=ubuntu\nVERSION_CODENAME=noble\n', "3.12",
    fstab="LABEL=system-boot\t/boot/firmware\tvfat\tdefaults\t0 1\n", programs=("/usr/bin/cloud-init",), gpt=True,
)  # fmt: skip


def make_image(file: Path, kind: Kind) -> Path:
    """An image of that kind, sparse."""
    work = file.with_suffix(".parts")
    work.mkdir()
    boot, root = _boot(work / "boot", kind), _root(work / "root", kind)
    behind = BOOT_OFFSET + kind.boot_size
    parts = [(BOOT_OFFSET, kind.boot_size, True), (behind, ROOT_SIZE, False)]
    with file.open("wb") as image:
        image.truncate(behind + ROOT_SIZE)
        image.write(gpt(parts) if kind.gpt else mbr(parts))
        for place, content in ((BOOT_OFFSET, boot), (behind, root)):
            image.seek(place)
            image.write(content.read_bytes())
    return file


def mbr(parts: list[tuple[int, int, bool]]) -> bytes:
    """A partition table of FAT and Linux partitions."""
    entries = b"".join(
        bytes(4) + bytes([0x0C if fat else 0x83]) + bytes(3) + struct.pack("<II", place // 512, size // 512)
        for place, size, fat in parts
    )
    return bytes(446) + entries.ljust(64, b"\0") + b"\x55\xaa"


def gpt(parts: list[tuple[int, int, bool]]) -> bytes:
    """The same as GPT, behind its protective MBR."""
    entries = b"".join(
        (BASIC_DATA if fat else LINUX).bytes_le + bytes([nth]) * 16
        + struct.pack("<QQ", place // 512, (place + size) // 512 - 1) + bytes(80)
        for nth, (place, size, fat) in enumerate(parts, 1)
    ).ljust(128 * 128, b"\0")  # fmt: skip
    fields = [1, 99, 34, 90, bytes(16), 2, 128, 128, zlib.crc32(entries)]
    head = struct.pack("<8sIIIIQQQQ16sQIII", b"EFI PART", 0x10000, 92, 0, 0, *fields)
    head = head[:16] + struct.pack("<I", zlib.crc32(head)) + head[20:]
    protective = (
        bytes(446) + bytes(4) + b"\xee" + bytes(3) + struct.pack("<II", 1, 0xFFFFFFFF) + bytes(48) + b"\x55\xaa"
    )
    return protective + head.ljust(512, b"\0") + entries


def _boot(file: Path, kind: Kind) -> Path:
    with file.open("wb") as made:
        made.truncate(kind.boot_size)
    _run("mkfs.vfat", "-F", "32" if kind.boot_size >= 33 * MIB else "16", "-s", "1", "-n", "BOOTFS", str(file))
    fat = Fat(str(file), 0, kind.boot_size)
    for name, content in kind.boot.items():
        fat.write(name, content.encode())
    return file


def _root(file: Path, kind: Kind) -> Path:
    tree = file.with_suffix(".tree")
    files = {"/etc/fstab": kind.fstab, **kind.more, **dict.fromkeys(kind.programs, "#!/bin/sh\n")}
    if kind.os_release:
        files["/usr/lib/os-release"] = kind.os_release
    for name, content in files.items():
        (tree / name[1:]).parent.mkdir(parents=True, exist_ok=True)
        (tree / name[1:]).write_text(content)
    if kind.python:
        program = tree / f"usr/bin/python{kind.python}"
        program.parent.mkdir(parents=True, exist_ok=True)
        program.write_bytes(b"\x7fELF\x02\x01\x01".ljust(16, b"\0") + struct.pack("<HH", 3, kind.elf) + bytes(200))
        (tree / "usr/bin/python3").symlink_to(program.name)
    with file.open("wb") as made:
        made.truncate(ROOT_SIZE)
    _run("mke2fs", "-q", "-t", "ext4", "-O", "^has_journal", "-d", str(tree), str(file))
    return file


def _run(*command: str) -> None:
    answer = subprocesses.run(command)
    assert answer.returncode == 0, subprocesses.error_text(answer)


def boot_of(file: Path) -> Fat:
    """The boot partition of an image or a card."""
    with file.open("rb") as raw:
        boot = read_table(raw.read(HEAD_BYTES)).boot
    return Fat(str(file), boot.offset, boot.size)


def fsck(file: Path, folder: Path) -> subprocess.CompletedProcess[bytes]:
    """What fsck.vfat says of a card's boot partition."""
    fat, part = boot_of(file), folder / "slice.fat"
    with file.open("rb") as raw:
        raw.seek(fat.offset)
        part.write_bytes(raw.read(fat.size))
    return subprocesses.run(["fsck.vfat", "-n", str(part)])


INSTALLER = """#!/bin/sh
echo "install.sh $*" >>"$EDGESPLIT_ROOT/installs"
[ ! -e "$EDGESPLIT_ROOT/install-fails" ] || exit 1
while [ $# -gt 0 ]; do [ "$1" = --claim ] && mv "$2" "$EDGESPLIT_ROOT/claimed"; shift; done
exit 0
"""


def make_kit(folder: Path, python: str = "3.11", machine: str = "aarch64") -> Path:
    """A kit as `edgectl kit build` makes it, with nothing in it; its installer notes that it was called."""
    folder.mkdir(parents=True)
    (folder / "install.sh").write_text(INSTALLER)
    (folder / "wheels.tar").write_bytes(bytes(range(256)) * 4_000)
    described = KitManifest(
        format="edgesplit.kit/1", version="0.1.0", python=python, machine=machine, glibc="2.28", extras=("agent",),
        needs_bytes=1, wheels=(), files=list_files({one.name: one for one in folder.iterdir()}),
    )  # fmt: skip
    (folder / "kit.json").write_bytes(encode(described))
    return folder


def make_claim(file: Path, **other: object) -> Path:
    """A claim as the controller makes it."""
    file.write_text(json.dumps({**CLAIM, **other}))
    return file


class Machine:
    """A machine's disks, as sysfs and /proc show them, below a folder."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.mounts: list[str] = []
        for folder in ("sys/block", "sys/class/block", "proc/self", "dev"):
            (root / folder).mkdir(parents=True)

    def disk(
        self, name: str, size: int, *, removable: bool = True, read_only: bool = False, model: str = "Card"
    ) -> Path:
        """A disk; its node is a file of that size."""
        here = self.root / "sys/block" / name
        (here / "device").mkdir(parents=True)
        (here / "holders").mkdir()
        texts = {
            "size": size // 512,
            "removable": int(removable),
            "ro": int(read_only),
            "device/model": model,
            "dev": "8:0",
        }
        for file, text in {**texts, "device/serial": f"S-{name}"}.items():
            (here / file).write_text(f"{text}\n")
        (self.root / "sys/class/block" / name).symlink_to(here)
        node = self.root / "dev" / name
        with node.open("wb") as made:
            made.truncate(size)
        return node

    def partition(self, disk: str, name: str, number: str) -> None:
        """One of a disk's."""
        here = self.root / "sys/block" / disk / name
        (here / "holders").mkdir(parents=True)
        (here / "partition").write_text("1\n")
        (here / "dev").write_text(f"{number}\n")
        (self.root / "sys/class/block" / name).symlink_to(here)
        (self.root / "dev" / name).touch()

    def held_by(self, name: str, holder: str, number: str) -> None:
        """Something of the device mapper lies on it."""
        (self.root / "sys/class/block" / name / "holders" / holder).mkdir()
        here = self.root / "sys/block" / holder
        here.mkdir()
        (here / "dev").write_text(f"{number}\n")
        (self.root / "sys/class/block" / holder).symlink_to(here)

    def mount(self, source: str, place: str, number: str = "0:99") -> None:
        """A line of mountinfo."""
        self.mounts.append(f"36 35 {number} / {place} rw,noatime shared:1 - ext4 {source} rw")
        (self.root / "proc/self/mountinfo").write_text("\n".join(self.mounts) + "\n")

    def swap(self, source: str) -> None:
        """A line of swaps."""
        (self.root / "proc/swaps").write_text(f"Filename Type Size\n{source} partition 1000 0 -2\n")
