"""An image file: its compression, its digest, and its uncompressed bytes.

A compressed image is unpacked once, before anything is written, into an unnamed temporary file that disappears with
this process: a truncated or corrupt archive is found before it costs a card, and its content can be examined.
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
from edgesplit_provisioning.image.block_io import BLOCK_BYTES, OnProgress, write_sparse

"""Bytes per read."""
ZSTD_READ_BYTES = 1 << 10
"""Compressed bytes that are fed to zstd at once; the output of each may be thirty thousand times as large."""
SECTOR_BYTES = 512
SHA256 = re.compile(r"[0-9a-fA-F]{64}")
DIGEST_LINE = re.compile(r"([0-9a-fA-F]{64})(?: [ *](.+))?")
MAGIC = {"xz": b"\xfd7zXZ\x00", "zst": b"\x28\xb5\x2f\xfd", "gz": b"\x1f\x8b", "zip": b"PK\x03\x04", "bz2": b"BZh"}
MAX_DIGEST_FILE_BYTES = 1 << 20
"""At most this much of a digest file is read."""
"""Progress callback: bytes done, bytes in all."""


@dataclass(frozen=True, slots=True)
class ExpectedDigest:
    """The digest that an image should have, and where it was found."""

    sha256: str
    source: str


def expected_digest(image: Path, option: str | None) -> ExpectedDigest | None:
    """The digest given on the command line, else that in IMAGE.sha256 or SHA256SUMS beside the image; None where there
    is neither."""
    if option is not None:
        if not SHA256.fullmatch(option.strip()):
            raise UsageError(f"--sha256 {option[:80]!r}: 64 hex digits")
        return ExpectedDigest(option.strip().lower(), "--sha256")
    for digest_file in (image.with_name(image.name + ".sha256"), image.with_name("SHA256SUMS")):
        if digest_file.is_file() and (digest := _digest_in_file(digest_file, image.name)) is not None:
            return ExpectedDigest(digest, digest_file.name)
    return None


def _digest_in_file(digest_file: Path, name: str) -> str | None:
    """The digest of `name` in a list as written by sha256sum, or in a file that contains only a digest."""
    with digest_file.open("rb") as opened:
        lines = opened.read(MAX_DIGEST_FILE_BYTES).decode("utf-8", "replace").split("\n")
    entries = [match for line in lines if (match := DIGEST_LINE.fullmatch(line.strip()))]
    for entry in entries:
        if entry[2] is None or os.path.basename(entry[2]) == name:
            return entry[1].lower()
    if digest_file.name != "SHA256SUMS":
        raise UsageError(f"{digest_file} lists no digest of {name}: give --sha256, or remove that file")
    return None


def check_digest(image: Path, expected: ExpectedDigest, on_progress: OnProgress) -> None:
    """TrustError where the file's SHA-256 is not the expected one."""
    actual = sha256(image, on_progress)
    if actual != expected.sha256:
        raise TrustError(
            f"{image.name} is not the image that {expected.source} means: its SHA-256 is {actual}, not"
            f" {expected.sha256}. Download it again"
        )


def sha256(image: Path, on_progress: OnProgress) -> str:
    """SHA-256 of the file as it lies on disk, in hex."""
    digest, done, size = hashlib.sha256(), 0, image.stat().st_size
    with image.open("rb") as opened:
        while block := opened.read(BLOCK_BYTES):
            digest.update(block)
            done += len(block)
            on_progress(done, size)
    return digest.hexdigest()


def compression(image: Path) -> str:
    """Compression of the image by its first bytes: `xz`, `zst`, `gz`, or empty for an uncompressed file. UsageError for
    zip and bz2."""
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
def uncompressed(image: Path, scratch: Path, on_progress: OnProgress) -> Iterator[Path]:
    """A path under which the uncompressed image can be read while the context is entered."""
    kind = compression(image)
    if not kind:
        with image.open("rb") as opened:  # keep it open: the file under this name may be replaced meanwhile
            _check_whole_sectors(image.name, os.fstat(opened.fileno()).st_size)
            yield _descriptor_path(opened)
        return
    scratch.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryFile(dir=scratch) as clear:
        _unpack(image, kind, clear, scratch, on_progress)
        yield _descriptor_path(clear)


def _descriptor_path(opened: IO[bytes]) -> Path:
    """A path by which other programs can open this open file; no part of it is taken from user input, so none needs
    quoting."""
    return Path(f"/proc/{os.getpid()}/fd/{opened.fileno()}")


def _unpack(image: Path, kind: str, clear: IO[bytes], scratch: Path, on_progress: OnProgress) -> None:
    size = image.stat().st_size
    written = 0
    with image.open("rb") as packed:
        try:
            for block in READERS[kind](packed):
                try:
                    write_sparse(clear, block)
                except OSError as error:
                    raise UsageError(
                        f"no room to unpack the image in {scratch} ({error.strerror}): set XDG_CACHE_HOME to a larger"
                        " disk"
                    ) from error
                written += len(block)
                on_progress(min(packed.tell(), size), size)
        except (EOFError, lzma.LZMAError, gzip.BadGzipFile, zlib.error, zstandard.ZstdError) as error:
            raise UsageError(
                f"{image.name} is truncated or corrupt after {written} unpacked bytes ({error}): download it again"
            ) from error
    clear.truncate(written)
    clear.flush()
    _check_whole_sectors(image.name, written)


def _xz(packed: IO[bytes]) -> Iterator[bytes]:
    with lzma.LZMAFile(packed) as reader:
        while block := reader.read(BLOCK_BYTES):
            yield block


def _gz(packed: IO[bytes]) -> Iterator[bytes]:
    with gzip.GzipFile(fileobj=packed) as reader:
        while block := reader.read(BLOCK_BYTES):
            yield block


def _zst(packed: IO[bytes]) -> Iterator[bytes]:
    """Decompress frame by frame, in small reads: each may expand thirty thousand times."""
    frame, in_frame = zstandard.ZstdDecompressor(max_window_size=1 << 31).decompressobj(), False
    # A file may hold several frames; a decompressor ends with its frame, and the bytes behind it start the next.
    while chunk := packed.read(ZSTD_READ_BYTES):
        while chunk:
            in_frame = True
            yield frame.decompress(chunk)
            chunk = b""
            if frame.eof:
                chunk, in_frame = frame.unused_data, False
                frame = zstandard.ZstdDecompressor(max_window_size=1 << 31).decompressobj()
    if in_frame:
        raise EOFError("it ends in the middle of a frame")


READERS: dict[str, Callable[[IO[bytes]], Iterator[bytes]]] = {"xz": _xz, "gz": _gz, "zst": _zst}


def _check_whole_sectors(name: str, size: int) -> None:
    if not size or size % SECTOR_BYTES:
        raise UsageError(
            f"{name} holds {size} bytes, not a whole number of sectors: it is not a disk image, or is truncated"
        )
