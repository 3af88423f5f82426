"""Reads an image's root file system with debugfs to find out which operating system it has; nothing is mounted or
written."""

from __future__ import annotations

import re
import struct
from dataclasses import dataclass

from edgesplit_provisioning.image.partition_table import Partition
from edgesplit_provisioning.image.subprocesses import run
from edgesplit_provisioning.os_release import parse_os_release

MACHINES = {183: "aarch64", 62: "x86_64", 40: "armhf (32-bit)", 3: "i386 (32-bit)"}
PYTHON = re.compile(r"python(3\.[0-9]{1,2})")
LINK_TARGET = re.compile(rb'Fast link dest: "([^"\n]+)"')


@dataclass(frozen=True, slots=True)
class OperatingSystem:
    """What was found out about an operating system; empty fields are unknown."""

    identity: str = ""
    """ID of os-release, such as debian or ubuntu."""
    name: str = ""
    """PRETTY_NAME of os-release."""
    python: str = ""
    machine: str = ""
    boot_mount: str = ""
    """Where the system mounts its boot partition."""
    has_cloud_init: bool = False
    has_first_run: bool = False
    """True where Raspberry Pi OS' first-boot scripts are present, on which `firstrun.sh` depends."""


def read_operating_system(path: str, root: Partition | None) -> OperatingSystem:
    """The operating system in that partition of the image; all fields empty without a root partition."""
    if root is None:
        return OperatingSystem()
    files = _Files(f"{path}?offset={root.offset}")
    release = parse_os_release(files.read("/usr/lib/os-release") or files.read("/etc/os-release"))
    program = _resolve_link(files, "/usr/bin/python3")
    match = PYTHON.search(program)
    return OperatingSystem(
        identity=release.get("ID", ""), name=release.get("PRETTY_NAME", ""), python=match[1] if match else "",
        machine=elf_machine(files.read(program)[:20]) if match else "", boot_mount=boot_mount(files.read("/etc/fstab")),
        has_cloud_init=files.exists("/usr/bin/cloud-init"),
        has_first_run=files.exists("/usr/lib/raspberrypi-sys-mods/firstboot"),
    )  # fmt: skip


class _Files:
    """Reads files of one file system."""

    def __init__(self, device: str) -> None:
        self._device = device

    def read(self, name: str) -> bytes:
        """Content of a file; empty where it does not exist."""
        return self._debugfs(f'cat "{name}"')

    def exists(self, name: str) -> bool:
        """True where a file, folder or link exists."""
        return b"Inode:" in self.stat(name)

    def stat(self, name: str) -> bytes:
        """Output of debugfs' `stat`."""
        return self._debugfs(f'stat "{name}"')

    def _debugfs(self, request: str) -> bytes:
        return run(["debugfs", "-R", request, self._device]).stdout


def _resolve_link(files: _Files, link: str) -> str:
    """Target of a link in /usr/bin; the path itself where it is not a link."""
    match = LINK_TARGET.search(files.stat(link))
    target = match[1].decode("utf-8", "replace") if match else link
    return target if target.startswith("/") else f"/usr/bin/{target}"


def elf_machine(elf: bytes) -> str:
    """The machine that an ELF program is built for; empty where it is not an ELF file."""
    if len(elf) < 20 or not elf.startswith(b"\x7fELF"):
        return ""
    (number,) = struct.unpack("<H", elf[18:20])
    return MACHINES.get(number, f"ELF machine {number}")


def boot_mount(fstab: bytes) -> str:
    """Mount point of the boot partition: the first vfat below /boot in fstab(5); empty where there is none."""
    for line in fstab.decode("utf-8", "replace").splitlines():
        fields = line.split()
        if len(fields) >= 3 and not fields[0].startswith("#") and fields[2] == "vfat" and fields[1].startswith("/boot"):
            return fields[1]
    return ""
