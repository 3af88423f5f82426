"""The FAT file system of a boot partition, by mtools: nothing is mounted, and nobody needs to be root for a file.

Names are those of FAT: CMDLINE.TXT is cmdline.txt, and is replaced by it.
"""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from edgesplit.errors import UsageError
from edgesplit_provisioning.image.subprocesses import run, said

BLOCK = 4 << 20
FREE = re.compile(rb"([0-9][0-9 ]*) bytes free")
CLUSTER = 64 << 10
"""More than any of these file systems rounds a file up by."""


class FatFailed(Exception):
    """What a program said of it."""


@dataclass(frozen=True, slots=True)
class Fat:
    """One that lies in a larger file or disk."""

    path: str
    offset: int
    size: int

    def names(self, folder: str = "") -> list[str]:
        """Files and folders in it, as they are spelt there; folders end with /."""
        lines = self._run("mdir", "-b", f"::{folder}").decode("utf-8", "replace").splitlines()
        return [os.path.basename(line.rstrip("/")) + ("/" if line.endswith("/") else "") for line in lines if line]

    def has(self, name: str) -> bool:
        """There is a file or folder of that name, however it is spelt."""
        return name.lower() in (one.rstrip("/").lower() for one in self.names())

    def read(self, name: str) -> bytes:
        """A file's bytes."""
        return self._run("mcopy", "-n", f"::{name}", "-")

    def write(self, name: str, content: bytes | Path) -> None:
        """Make or replace a file."""
        source, given = (str(content), None) if isinstance(content, Path) else ("-", content)
        self._run("mcopy", "-o", source, f"::{name}", given=given)

    def make_folder(self, name: str) -> None:
        """Where there is none yet."""
        if not self.has(name):
            self._run("mmd", f"::{name}")

    def remove(self, name: str) -> None:
        """A file that may be there."""
        if self.has(name):
            self._run("mdel", f"::{name}")

    def free_bytes(self) -> int:
        """Room for further files."""
        found = FREE.search(self._run("mdir", "::"))
        if found is None:
            raise FatFailed("mdir does not say what is free")
        return int(found[1].replace(b" ", b""))

    def fits(self, files: Mapping[str, bytes | Path]) -> None:
        """UsageError where these files need more room than there is."""
        needed = sum(_size(one) + CLUSTER for one in files.values())
        if needed > (free := self.free_bytes()):
            raise UsageError(
                f"the image's boot partition has {free} bytes free, and edgesplit's files need {needed}: take an image"
                " with a larger one, or a kit without extras"
            )

    def _run(self, program: str, *arguments: str, given: bytes | None = None) -> bytes:
        answer = run([program, "-i", f"{self.path}@@{self.offset}", *arguments], given)
        if answer.returncode:
            raise FatFailed(f"{program}: {said(answer)}")
        return answer.stdout


@contextmanager
def taken_out(fat: Fat, source: IO[bytes], scratch: Path) -> Iterator[Fat]:
    """A copy of the file system, read from `source` piece by piece, as a file without a name: it may hold secrets."""
    scratch.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryFile(dir=scratch) as copy:
        source.seek(fat.offset)
        left = fat.size
        while left and (block := source.read(min(BLOCK, left))):
            _put(copy, block, scratch)
            left -= len(block)
        copy.truncate(fat.size)
        copy.flush()
        yield Fat(f"/proc/{os.getpid()}/fd/{copy.fileno()}", 0, fat.size)


def _put(copy: IO[bytes], block: bytes, scratch: Path) -> None:
    """Zeros take no room. A full disk here is no fault of the card."""
    try:
        if block.count(0) == len(block):
            copy.seek(len(block), os.SEEK_CUR)
        else:
            copy.write(block)
    except OSError as error:
        raise UsageError(f"no room in {scratch} to check the boot partition ({error.strerror})") from error


def check(fat: Fat) -> None:
    """fsck.vfat finds nothing; FatFailed otherwise. For one that begins where its file does."""
    answer = run(["fsck.vfat", "-n", fat.path])
    if answer.returncode:
        raise FatFailed(f"fsck.vfat: {said(answer)}")


def _size(content: bytes | Path) -> int:
    return len(content) if isinstance(content, bytes) else content.stat().st_size
