"""An image file and what it holds: which compression, which digest, and its bytes in the clear.

An archive is unpacked once, into a file that has no name and is gone with this process, before anything is written:
so one that is cut short or spoilt costs no card, and what it holds can be looked at.
"""

from __future__ import annotations

import gzip
import hashlib
import lzma
import os
import re
import tempfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import zstandard

from edgesplit.errors import TrustError, UsageError

BLOCK = 4 << 20
ZSTD_BITE = 1 << 10
SECTOR = 512
SHA256 = re.compile(r"[0-9a-fA-F]{64}")
LISTED = re.compile(r"([0-9a-fA-F]{64})(?: [ *](.+))?")
MAGIC = {"xz": b"\xfd7zXZ\x00", "zst": b"\x28\xb5\x2f\xfd", "gz": b"\x1f\x8b", "zip": b"PK\x03\x04", "bz2": b"BZh"}
LISTS_BYTES = 1 << 20
Told = Callable[[int, int], None]
"""How far it is: bytes done, bytes in all."""


@dataclass(frozen=True, slots=True)
class Expected:
    """The digest that an image should have, and who says so."""

    sha256: str
    source: str


def expected_digest(image: Path, given: str | None) -> Expected | None:
    """What was given, else what lies beside the image as IMAGE.sha256 or in SHA256SUMS; None: nobody says anything."""
    if given is not None:
        if not SHA256.fullmatch(given.strip()):
            raise UsageError(f"--sha256 {given[:80]!r}: 64 hex digits")
        return Expected(given.strip().lower(), "--sha256")
    for beside in (image.with_name(image.name + ".sha256"), image.with_name("SHA256SUMS")):
        if beside.is_file() and (found := _listed(beside, image.name)) is not None:
            return Expected(found, beside.name)
    return None


def _listed(beside: Path, name: str) -> str | None:
    """The digest of `name` in a list as sha256sum writes it, or of a file that holds nothing else."""
    with beside.open("rb") as opened:
        lines = opened.read(LISTS_BYTES).decode("utf-8", "replace").split("\n")
    entries = [found for line in lines if (found := LISTED.fullmatch(line.strip()))]
    for one in entries:
        if one[2] is None or os.path.basename(one[2]) == name:
            return one[1].lower()
    if beside.name != "SHA256SUMS":
        raise UsageError(f"{beside} lists no digest of {name}: give --sha256, or remove that file")
    return None


def check_digest(image: Path, expected: Expected, told: Told) -> None:
    """The file is the one that is meant; TrustError otherwise."""
    found = sha256(image, told)
    if found != expected.sha256:
        raise TrustError(
            f"{image.name} is not the image that {expected.source} means: its SHA-256 is {found}, not"
            f" {expected.sha256}. Download it again"
        )


def sha256(image: Path, told: Told) -> str:
    """Of the file as it is."""
    digest, done, size = hashlib.sha256(), 0, image.stat().st_size
    with image.open("rb") as opened:
        while block := opened.read(BLOCK):
            digest.update(block)
            done += len(block)
            told(done, size)
    return digest.hexdigest()


def compression(image: Path) -> str:
    """By its content: xz, zst, gz, or nothing for an image that is none of them."""
    try:
        with image.open("rb") as opened:
            head = opened.read(8)
    except OSError as error:
        raise UsageError(f"cannot read the image {image}: {error.strerror}") from error
    kind = next((kind for kind, magic in MAGIC.items() if head.startswith(magic)), "")
    if kind in ("zip", "bz2"):
        raise UsageError(f"{image} is a {kind} archive: unpack it first (xz, zst and gz are read as they are)")
    return kind


@contextmanager
def in_the_clear(image: Path, scratch: Path, told: Told) -> Iterator[Path]:
    """A path under which the image's own bytes are read, for as long as this lasts."""
    kind = compression(image)
    if not kind:
        with image.open("rb") as opened:  # held: a file of that name may be another by and by
            _whole_sectors(image.name, os.fstat(opened.fileno()).st_size)
            yield _path(opened)
        return
    scratch.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryFile(dir=scratch) as clear:
        _unpack(image, kind, clear, scratch, told)
        yield _path(clear)


def _path(opened: IO[bytes]) -> Path:
    """Where other programs find an open file: a path in which nothing of its name means anything to them."""
    return Path(f"/proc/{os.getpid()}/fd/{opened.fileno()}")


def _unpack(image: Path, kind: str, clear: IO[bytes], scratch: Path, told: Told) -> None:
    size = image.stat().st_size
    written = 0
    with image.open("rb") as packed:
        try:
            for block in READERS[kind](packed):
                _put(clear, block, scratch)
                written += len(block)
                told(min(packed.tell(), size), size)
        except (EOFError, lzma.LZMAError, gzip.BadGzipFile, zlib.error, zstandard.ZstdError) as error:
            raise UsageError(
                f"{image.name} is cut short or spoilt after {written} unpacked bytes ({error}): download it again"
            ) from error
    clear.truncate(written)
    clear.flush()
    _whole_sectors(image.name, written)


def _put(clear: IO[bytes], block: bytes, scratch: Path) -> None:
    """Zeros take no room."""
    try:
        if block.count(0) == len(block):
            clear.seek(len(block), os.SEEK_CUR)
        else:
            clear.write(block)
    except OSError as error:
        raise UsageError(
            f"no room to unpack the image in {scratch} ({error.strerror}): set XDG_CACHE_HOME to a larger disk"
        ) from error


def _xz(packed: IO[bytes]) -> Iterator[bytes]:
    with lzma.LZMAFile(packed) as reader:
        while block := reader.read(BLOCK):
            yield block


def _gz(packed: IO[bytes]) -> Iterator[bytes]:
    with gzip.GzipFile(fileobj=packed) as reader:
        while block := reader.read(BLOCK):
            yield block


def _zst(packed: IO[bytes]) -> Iterator[bytes]:
    """Frame by frame, and in small bites: each may give thirty thousand times its size."""
    frame, begun = zstandard.ZstdDecompressor(max_window_size=1 << 31).decompressobj(), False
    while bite := packed.read(ZSTD_BITE):
        while bite:
            begun = True
            yield frame.decompress(bite)
            bite = b""
            if frame.eof:
                bite, begun = frame.unused_data, False
                frame = zstandard.ZstdDecompressor(max_window_size=1 << 31).decompressobj()
    if begun:
        raise EOFError("it ends in the middle of a frame")


READERS: dict[str, Callable[[IO[bytes]], Iterator[bytes]]] = {"xz": _xz, "gz": _gz, "zst": _zst}


def _whole_sectors(name: str, size: int) -> None:
    if not size or size % SECTOR:
        raise UsageError(f"{name} holds {size} bytes, no whole number of sectors: it is no image, or cut short")
