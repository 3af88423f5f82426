"""Writing images to failing media: only what was read back counts as written."""

from __future__ import annotations

import errno
import functools
import gzip
import hashlib
import io
import lzma
import os
import random
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import zstandard

from edgesplit.errors import MediumFailed, TrustError, UsageError
from edgesplit_provisioning.image import subprocesses, writer
from edgesplit_provisioning.image.archive import ExpectedDigest, check_digest, expected_digest, uncompressed
from edgesplit_provisioning.image.writer import finish, verify

TABLE = 512
CONTENT = random.Random(7).randbytes(TABLE + 3_000) + bytes(9_000) + random.Random(8).randbytes(2_848)
SIZE = len(CONTENT)
PACK: dict[str, Callable[[bytes], bytes]] = {
    "xz": lzma.compress, "gz": gzip.compress, "zst": zstandard.compress,
    "zst, streamed": lambda raw: zstandard.ZstdCompressor(write_content_size=False).compress(raw),
    "zst, two frames": lambda raw: zstandard.compress(raw[:4_000]) + zstandard.compress(raw[4_000:]),
    "xz, two streams": lambda raw: lzma.compress(raw[:4_000]) + lzma.compress(raw[4_000:]),
}  # fmt: skip


def on_progress(done: int, of: int) -> None:
    assert done <= of


class Card:
    """A card in memory, and how it fails."""

    name = "/dev/sdx"
    path = "/nowhere"
    is_blank = False

    def __init__(self, size: int = SIZE, *, bite: int = 1 << 20) -> None:
        self.size: int | None = size
        self.held = bytearray(random.Random(9).randbytes(size))
        self.bite = bite
        self.fails: Callable[[str, int], None] = lambda doing, offset: None

    def write(self, data: memoryview, offset: int) -> int:
        self.fails("write", offset)
        count = min(len(data), self.bite, len(self.held) - offset)
        self.held[offset : offset + count] = data[:count]
        return count

    def read(self, count: int, offset: int) -> bytes:
        self.fails("read", offset)
        return bytes(self.held[offset : offset + min(count, self.bite)])

    def sync(self) -> None:
        self.fails("sync", 0)

    def drop_cache(self) -> None:
        self.fails("forget", 0)


write_image = functools.partial(writer.write_image, block_bytes=1_024)
"""With small blocks, so that an image has several."""


def flashed(card: Card) -> Card:
    written = write_image(io.BytesIO(CONTENT), SIZE, TABLE, card, on_progress)
    verify(written, card, on_progress)
    finish(written, card)
    return card


@pytest.mark.parametrize("bite", [1 << 20, 333, 1])
def test_short_reads_and_writes_lose_no_byte(bite: int) -> None:
    """They are no errors."""
    assert bytes(flashed(Card(bite=bite)).held) == CONTENT


def test_a_larger_card_keeps_its_data_behind_the_image() -> None:
    """Nothing is written beyond the image's end."""
    card = Card(SIZE + 4_096)
    behind = bytes(card.held[SIZE:])
    assert bytes(flashed(card).held) == CONTENT + behind


def test_a_card_that_is_too_small_is_refused_before_writing() -> None:
    """Its content stays."""
    card = Card(SIZE - 512)
    before = bytes(card.held)
    with pytest.raises(UsageError, match="larger card"):
        flashed(card)
    assert bytes(card.held) == before


@pytest.mark.parametrize(
    ("doing", "number", "said"),
    [
        ("write", errno.EIO, "writing at byte 2048"),
        ("write", errno.ENODEV, "No such device"),
        ("write", errno.ENOSPC, "No space left"),
        ("read", errno.EIO, "reading at byte 2048"),
        ("sync", errno.EIO, "waiting for its writes"),
        ("forget", errno.ENODEV, "beginning to read it back"),
    ],
)
def test_a_card_that_fails_while_writing_has_no_partition_table(doing: str, number: int, said: str) -> None:
    """Pulled out, worn out, full: the error states that it does not boot."""
    card = Card()

    def fails(what: str, offset: int) -> None:
        if what == doing and offset in (0, 2_048) and (offset or doing not in ("write", "read")):
            raise OSError(number, os.strerror(number))

    card.fails = fails
    with pytest.raises(MediumFailed, match=f"(?s){said}.*NOT usable"):
        flashed(card)
    assert card.held[:TABLE] == bytes(TABLE)


def test_a_write_of_zero_bytes_is_a_failure() -> None:
    """It must not be retried forever."""
    card = Card()
    card.bite = 0
    with pytest.raises(MediumFailed, match="takes no more"):
        flashed(card)


@pytest.mark.parametrize("offset", [TABLE, 2_000, SIZE - 1])
def test_verification_detects_a_changed_byte(offset: int) -> None:
    """The card accepted every byte and returns one of them differently: a counterfeit, or a bad block."""
    card = Card()
    written = write_image(io.BytesIO(CONTENT), SIZE, TABLE, card, on_progress)
    card.held[offset] ^= 1
    with pytest.raises(MediumFailed, match="not what was written"):
        verify(written, card, on_progress)


def test_verification_detects_a_lost_partition_table() -> None:
    """The last write is read back too."""
    card = Card()
    written = write_image(io.BytesIO(CONTENT), SIZE, TABLE, card, on_progress)
    card.fails = lambda what, offset: card.held.__setitem__(5, card.held[5] ^ 1) if what == "forget" else None
    with pytest.raises(MediumFailed, match="partition table"):
        finish(written, card)


def test_an_image_truncated_while_writing_is_an_error() -> None:
    """Another program writes to it."""
    with pytest.raises(MediumFailed, match="ends after"):
        write_image(io.BytesIO(CONTENT[:5_000]), SIZE, TABLE, Card(), on_progress)


def test_a_killed_writer_leaves_no_partition_table(tmp_path: Path) -> None:
    """After SIGKILL in the middle of writing the target does not boot."""
    file = tmp_path / "card.img"
    program = f"""
import io, os, signal
from pathlib import Path
from edgesplit_provisioning.image import subprocesses, writer
from edgesplit_provisioning.image.target_device import open_file
content = bytes(range(256)) * 64
medium = open_file(Path({str(file)!r}))
medium.set_size(len(content))
def on_progress(done, of):
    if done > of // 2:
        os.kill(os.getpid(), signal.SIGKILL)
writer.write_image(io.BytesIO(content), len(content), 512, medium, on_progress, block_bytes=1024)
"""
    killed = subprocess.run([sys.executable, "-c", program], check=False, timeout=120)

    assert killed.returncode == -signal.SIGKILL
    held = file.read_bytes()
    assert held[:512] == bytes(512) and held[512:2_048] == (bytes(range(256)) * 64)[512:2_048]


@pytest.mark.parametrize("kind", ["", *PACK])
def test_images_are_unpacked_by_detected_compression(tmp_path: Path, kind: str) -> None:
    """By content, not by name; the unpacked image is compared byte by byte."""
    file = tmp_path / "system.img"
    file.write_bytes(PACK[kind](CONTENT) if kind else CONTENT)
    with uncompressed(file, tmp_path / "scratch", on_progress) as clear:
        assert clear.read_bytes() == CONTENT
    assert not (tmp_path / "scratch").exists() or not list((tmp_path / "scratch").iterdir())


@pytest.mark.parametrize("kind", PACK)
@pytest.mark.parametrize("cut", [1, 12, 2_000])
def test_a_truncated_archive_is_refused(tmp_path: Path, kind: str, cut: int) -> None:
    """Before a byte of a card is written."""
    file = tmp_path / "system.img.xz"
    file.write_bytes(PACK[kind](CONTENT)[:-cut])
    with pytest.raises(UsageError, match=r"truncated|no whole number"), uncompressed(file, tmp_path, on_progress):
        pass


@pytest.mark.parametrize("kind", ["xz", "gz"])
def test_a_corrupt_archive_is_refused(tmp_path: Path, kind: str) -> None:
    """By its own checksums."""
    file, packed = tmp_path / "system.img", bytearray(PACK[kind](CONTENT))
    packed[len(packed) // 2] ^= 0xFF
    file.write_bytes(packed)
    with pytest.raises(UsageError, match="corrupt"), uncompressed(file, tmp_path, on_progress):
        pass


@pytest.mark.parametrize("content", [b"", CONTENT[:-1], b"PK\x03\x04" + bytes(508), b"BZh9" + bytes(508)])
def test_a_file_that_is_no_image_is_refused(tmp_path: Path, content: bytes) -> None:
    """Empty, half a sector, an unsupported archive."""
    file = tmp_path / "system.img"
    file.write_bytes(content)
    with pytest.raises(UsageError), uncompressed(file, tmp_path, on_progress):
        pass


def test_a_full_disk_while_unpacking_is_reported_with_its_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error names the folder of the unpacked image."""
    file = tmp_path / "system.img.xz"
    file.write_bytes(lzma.compress(CONTENT))

    def full(opened: object, block: bytes) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("edgesplit_provisioning.image.archive.write_sparse", full)
    with (
        pytest.raises(UsageError, match=r"no room to unpack .*XDG_CACHE_HOME"),
        uncompressed(file, tmp_path, on_progress),
    ):
        pass


def test_the_digest_comes_from_the_option_or_a_digest_file(tmp_path: Path) -> None:
    """From the option, else from IMAGE.sha256, else from SHA256SUMS, and from no other source."""
    image = tmp_path / "system.img.xz"
    image.write_bytes(CONTENT)
    digest = hashlib.sha256(CONTENT).hexdigest()
    assert expected_digest(image, None) is None

    (tmp_path / "SHA256SUMS").write_text(f"{'0' * 64} *other.img\n{digest} *system.img.xz\n")
    assert expected_digest(image, None) == ExpectedDigest(digest, "SHA256SUMS")
    (tmp_path / "system.img.xz.sha256").write_text(f"{digest.upper()}  system.img.xz\n")
    assert expected_digest(image, None) == ExpectedDigest(digest, "system.img.xz.sha256")
    (tmp_path / "system.img.xz.sha256").write_text(f"{digest}\n")
    assert expected_digest(image, None) == ExpectedDigest(digest, "system.img.xz.sha256")
    assert expected_digest(image, "AB" * 32) == ExpectedDigest("ab" * 32, "--sha256")
    check_digest(image, ExpectedDigest(digest, "--sha256"), on_progress)


def test_an_image_with_another_digest_is_refused(tmp_path: Path) -> None:
    """A TrustError that names both digests."""
    image = tmp_path / "system.img"
    image.write_bytes(CONTENT)
    with pytest.raises(TrustError, match=r"0{64}"):
        check_digest(image, ExpectedDigest("0" * 64, "--sha256"), on_progress)


def test_an_invalid_digest_is_refused(tmp_path: Path) -> None:
    """As is a digest file beside the image that does not list it."""
    image = tmp_path / "system.img"
    image.write_bytes(CONTENT)
    with pytest.raises(UsageError, match="64 hex digits"):
        expected_digest(image, "abc")
    (tmp_path / "system.img.sha256").write_text("<html>not found</html>")
    with pytest.raises(UsageError, match="lists no digest"):
        expected_digest(image, None)


def test_a_disk_that_hangs_a_subprocess_is_a_medium_error() -> None:
    """mtools waits for a card that never answers: reported like any other failure of the card."""
    with pytest.raises(OSError, match="got no answer"):
        subprocesses.run(["cat"], stdin=bytes(1 << 22), timeout_s=0.0)
