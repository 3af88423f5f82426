"""The FAT file system of a boot partition, read and written by mtools: nothing is mounted, and image files need no root
rights.

Names are those of FAT: CMDLINE.TXT is the same file as cmdline.txt.
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
from edgesplit_provisioning.image.block_io import BLOCK_BYTES, write_sparse
from edgesplit_provisioning.image.subprocesses import error_text, run

FREE_BYTES = re.compile(rb"([0-9][0-9 ]*) bytes free")
MAX_CLUSTER_BYTES = 64 << 10
"""Upper bound of what these file systems round a file's size up by."""


class FatError(Exception):
    """An mtools or fsck program failed; the message is its output."""


@dataclass(frozen=True, slots=True)
class Fat:
    """A FAT file system at an offset in a larger file or disk."""

    path: str
    offset: int
    size: int

    def names(self, folder: str = "") -> list[str]:
        """Names of files and folders in `folder`, spelt as in the file system; folders end with /."""
        lines = self._run("mdir", "-b", f"::{folder}").decode("utf-8", "replace").splitlines()
        return [os.path.basename(line.rstrip("/")) + ("/" if line.endswith("/") else "") for line in lines if line]

    def has(self, name: str) -> bool:
        """True where there is a file or folder of that name, in any case."""
        return name.lower() in (present.rstrip("/").lower() for present in self.names())

    def read(self, name: str) -> bytes:
        """Content of a file."""
        return self._run("mcopy", "-n", f"::{name}", "-")

    def write(self, name: str, content: bytes | Path) -> None:
        """Create or replace a file."""
        source, stdin = (str(content), None) if isinstance(content, Path) else ("-", content)
        self._run("mcopy", "-o", source, f"::{name}", stdin=stdin)

    def make_folder(self, name: str) -> None:
        """Create a folder unless it exists."""
        if not self.has(name):
            self._run("mmd", f"::{name}")

    def remove(self, name: str) -> None:
        """Remove a file if it exists."""
        if self.has(name):
            self._run("mdel", f"::{name}")

    def free_bytes(self) -> int:
        """Free space in bytes."""
        match = FREE_BYTES.search(self._run("mdir", "::"))
        if match is None:
            raise FatError("mdir does not report the free space")
        return int(match[1].replace(b" ", b""))

    def check_fits(self, files: Mapping[str, bytes | Path]) -> None:
        """UsageError where these files need more space than is free."""
        needed = sum(_size(content) + MAX_CLUSTER_BYTES for content in files.values())
        if needed > (free := self.free_bytes()):
            raise UsageError(
                f"the image's boot partition has {free} bytes free, and edgesplit's files need {needed}: take an image"
                " with a larger one, or a kit without extras"
            )

    def _run(self, program: str, *arguments: str, stdin: bytes | None = None) -> bytes:
        result = run([program, "-i", f"{self.path}@@{self.offset}", *arguments], stdin)
        if result.returncode:
            raise FatError(f"{program}: {error_text(result)}")
        return result.stdout


@contextmanager
def copied_out(fat: Fat, source: IO[bytes], scratch: Path) -> Iterator[Fat]:
    """A copy of the file system, read block by block from `source`, in an unnamed temporary file, since it may hold
    secrets."""
    scratch.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryFile(dir=scratch) as copy:
        source.seek(fat.offset)
        remaining = fat.size
        while remaining and (block := source.read(min(BLOCK_BYTES, remaining))):
            try:
                write_sparse(copy, block)
            except OSError as error:  # the card is not at fault
                raise UsageError(f"no room in {scratch} to check the boot partition ({error.strerror})") from error
            remaining -= len(block)
        copy.truncate(fat.size)
        copy.flush()
        yield Fat(f"/proc/{os.getpid()}/fd/{copy.fileno()}", 0, fat.size)


def check(fat: Fat) -> None:
    """Run fsck.vfat; FatError where it finds anything. The file system must start at the beginning of its file."""
    result = run(["fsck.vfat", "-n", fat.path])
    if result.returncode:
        raise FatError(f"fsck.vfat: {error_text(result)}")


def _size(content: bytes | Path) -> int:
    return len(content) if isinstance(content, bytes) else content.stat().st_size
