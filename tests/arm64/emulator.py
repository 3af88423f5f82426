"""qemu-user that can run what the agent runs, and commands under it in a namespace of their own (`enter.py`)."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from arm64.debian import NotHere, fetch_package, unpack_package

OLDEST = 10
"""Of qemu-user: 7.2 crashes in onnxruntime."""
RELEASE = "trixie"
"""The first of Debian that has it; its package is one static program."""
ENTER = Path(__file__).with_name("enter.py")


@dataclass(frozen=True)
class Emulator:
    """A qemu-aarch64, and the way into a namespace where the kernel uses it."""

    qemu: Path

    def argv(self, command: Sequence[str], root: Path | None = None, binds: Sequence[str] = ()) -> list[str]:
        """The command line that runs this one there; with a root, in it."""
        way = [sys.executable, str(ENTER), "--qemu", str(self.qemu)]
        way += ["--root", str(root)] if root else []
        way += [word for bind in binds for word in ("--bind", bind)]
        return [*way, *command]

    def check(self) -> None:
        """NotHere where this kernel lets us make no such namespace."""
        done = subprocess.run(self.argv(["true"]), capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise NotHere(f"this kernel gives no binfmt_misc of our own (Linux 6.7 does): {done.stderr.strip()}")


def find_emulator(cache: Path) -> Emulator:
    """The machine's own qemu-user where it is new enough, else one from Debian's archive, kept in `cache`."""
    kept = cache / "qemu" / "qemu-aarch64"
    for found in (shutil.which("qemu-aarch64-static"), shutil.which("qemu-aarch64"), kept):
        if found and Path(found).exists() and _is_static_and_new(Path(found)):
            return Emulator(Path(found))
    _fetch(kept)
    return Emulator(kept)


def _fetch(kept: Path) -> None:
    print(f"qemu-user: fetching that of Debian {RELEASE} (71 MB), used from {kept.parent}, not installed", flush=True)
    folder = kept.parent / "coming"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    unpack_package(fetch_package("qemu-user", RELEASE, folder), folder / "files")
    (folder / "files" / "usr" / "bin" / "qemu-aarch64").replace(kept)
    shutil.rmtree(folder)


def _is_static_and_new(qemu: Path) -> bool:
    said = subprocess.run([qemu, "--version"], capture_output=True, text=True, check=False).stdout
    version = re.search(r"version (\d+)\.", said)
    return version is not None and int(version[1]) >= OLDEST and _is_static(qemu)


def _is_static(program: Path) -> bool:
    """In another root there is no loader for it: its ELF headers must ask for none."""
    raw = program.read_bytes()[: 64 + 56 * 40]
    first, size, count = (int.from_bytes(raw[at : at + many], "little") for at, many in ((32, 8), (54, 2), (56, 2)))
    kinds = [int.from_bytes(raw[at : at + 4], "little") for at in range(first, first + size * count, size)]
    return raw[:4] == b"\x7fELF" and 3 not in kinds  # PT_INTERP
