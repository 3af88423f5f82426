"""What system an image holds, read from its root file system by debugfs: nothing is mounted or written."""

from __future__ import annotations

import re
import shlex
import struct
from dataclasses import dataclass

from edgesplit_provisioning.image.partition_table import Partition
from edgesplit_provisioning.image.subprocesses import run

MACHINES = {183: "aarch64", 62: "x86_64", 40: "armhf (32-bit)", 3: "i386 (32-bit)"}
PYTHON = re.compile(r"python(3\.[0-9]{1,2})")
LINK = re.compile(rb'Fast link dest: "([^"\n]+)"')


@dataclass(frozen=True, slots=True)
class System:
    """An operating system as far as the first boot cares. Empty: not found out."""

    identity: str = ""
    """ID of os-release, as in debian or ubuntu."""
    name: str = ""
    """PRETTY_NAME, for people."""
    codename: str = ""
    python: str = ""
    machine: str = ""
    boot_mount: str = ""
    """Where it mounts the boot partition."""
    has_cloud_init: bool = False
    has_first_run: bool = False
    """Raspberry Pi OS' own scripts, which `firstrun.sh` counts on."""


def look(path: str, root: Partition | None) -> System:
    """The system in that partition of the image."""
    if root is None:
        return System()
    files = _Files(f"{path}?offset={root.offset}")
    said = os_release(files.read("/usr/lib/os-release") or files.read("/etc/os-release"))
    program = _end_of(files, "/usr/bin/python3")
    found = PYTHON.search(program)
    return System(
        identity=said.get("ID", ""),
        name=said.get("PRETTY_NAME", ""),
        codename=said.get("VERSION_CODENAME", ""),
        python=found[1] if found else "",
        machine=machine(files.read(program)[:20]) if found else "",
        boot_mount=boot_mount(files.read("/etc/fstab")),
        has_cloud_init=files.there("/usr/bin/cloud-init"),
        has_first_run=files.there("/usr/lib/raspberrypi-sys-mods/firstboot"),
    )


class _Files:
    """Of one file system."""

    def __init__(self, device: str) -> None:
        self._device = device

    def read(self, name: str) -> bytes:
        """Empty where there is none."""
        return self._asked(f'cat "{name}"')

    def there(self, name: str) -> bool:
        """A file, folder or link."""
        return b"Inode:" in self.described(name)

    def described(self, name: str) -> bytes:
        """What `stat` says."""
        return self._asked(f'stat "{name}"')

    def _asked(self, request: str) -> bytes:
        answer = run(["debugfs", "-R", request, self._device])
        return answer.stdout


def _end_of(files: _Files, link: str) -> str:
    """What a link in /usr/bin leads to, itself where it is none."""
    found = LINK.search(files.described(link))
    target = found[1].decode("utf-8", "replace") if found else link
    return target if target.startswith("/") else f"/usr/bin/{target}"


def os_release(raw: bytes) -> dict[str, str]:
    """os-release(5)."""
    said = {}
    for line in raw.decode("utf-8", "replace").splitlines():
        key, equals, value = line.strip().partition("=")
        try:
            words = shlex.split(value)
        except ValueError:
            continue
        if equals and len(words) == 1:
            said[key] = words[0]
    return said


def machine(elf: bytes) -> str:
    """Which processor a program is for; empty where it is no program."""
    if len(elf) < 20 or not elf.startswith(b"\x7fELF"):
        return ""
    (number,) = struct.unpack("<H", elf[18:20])
    return MACHINES.get(number, f"ELF machine {number}")


def boot_mount(fstab: bytes) -> str:
    """Where the FAT goes: the first vfat below /boot that fstab(5) names."""
    for line in fstab.decode("utf-8", "replace").splitlines():
        fields = line.split()
        if len(fields) >= 3 and not fields[0].startswith("#") and fields[2] == "vfat" and fields[1].startswith("/boot"):
            return fields[1]
    return ""
