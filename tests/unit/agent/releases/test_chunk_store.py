"""Assembling a release from chunks: each chunk at its place, nothing trusted without its hash, room made or refused."""

from __future__ import annotations

import errno
import hashlib
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgesplit.errors import MalformedMessage, TrustError
from edgesplit.release.manifest import Chunk, SliceFile, decode_manifest, release_digest
from edgesplit.release_store import StoredRelease, adopt_release, open_release
from edgesplit_agent.releases import chunk_store as chunks_module
from edgesplit_agent.releases.chunk_store import ChunkStore, ReleaseAssembly, ReleaseLayout, bytes_on_disk
from edgesplit_agent.releases.disk_quota import RESERVE_BYTES, DiskUsage, NoRoom, StoredReleaseAge, eviction_candidate
from support.signed_repository import TrustHarness, sample_release

SLICES = {"head", "tail"}


def digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def taken_over(assembly: ReleaseAssembly) -> dict[str, int]:
    """What is missing after all was taken that other releases have."""
    assembly.link_shared_files()
    return assembly.copy_shared_chunks(assembly.missing())


class Card:
    """A device's disk, and signed releases to put on it."""

    def __init__(self, folder: Path, quota_bytes: int | None = None, like: Card | None = None) -> None:
        self.folder = folder
        self.world = like.world if like else TrustHarness(folder / "world")
        self.store = ChunkStore(folder / "chunks", folder / "releases", quota_bytes)
        self._signed: set[int] = like._signed if like else set()

    def assembly(self, version: int) -> tuple[ReleaseAssembly, dict[str, bytes]]:
        raw, chunks = sample_release(version)
        return self.store.assembly(
            ReleaseLayout.from_manifest(release_digest(raw), decode_manifest(raw), SLICES)
        ), chunks

    def complete(self, version: int) -> StoredRelease:
        """All chunks put, and the release adopted."""
        assembly, chunks = self.assembly(version)
        assembly.put_all([(sha256, chunks[sha256]) for sha256 in taken_over(assembly)])
        return self.adopt(version)

    def sign(self, version: int) -> None:
        """Once."""
        if version not in self._signed:
            self.world.add(version)
            self._signed.add(version)

    def opened(self, version: int) -> StoredRelease:
        """The release that is there, opened."""
        return open_release(self.folder / "releases", release_digest(sample_release(version)[0]), self.world.bootstrap)

    def adopt(self, version: int) -> StoredRelease:
        self.sign(version)
        raw = sample_release(version)[0]
        name = release_digest(raw)
        return adopt_release(
            self.folder / "releases", name, raw, self.world.repository.proof(name), self.store.assembly_folder(name),
            SLICES,
            bootstrap_root=self.world.bootstrap,
        )  # fmt: skip


@pytest.fixture
def card(tmp_path: Path) -> Card:
    return Card(tmp_path)


def test_chunks_in_any_order_complete_the_release(card: Card) -> None:
    """Each is written at its place and the missing set shrinks; when complete, one rename makes it a release that
    opens."""
    assembly, chunks = card.assembly(1)
    assert set(assembly.missing()) == set(chunks) and list(assembly.missing()) == list(assembly.layout.sizes)
    for sha256 in sorted(chunks, reverse=True):
        assembly.put_all([(sha256, chunks[sha256])])
        assert sha256 not in card.assembly(1)[0].missing()
    made = card.adopt(1)
    assert (made.slice_folder("head") / "weights.bin").read_bytes() == b"w" * 1000 + b"v" * 500
    assert not card.store.assembly_folder(made.digest).exists()


def test_chunk_with_a_wrong_digest_is_not_stored(card: Card) -> None:
    """Nor one of another release; the good ones that came with them are."""
    assembly, chunks = card.assembly(1)
    good, other = list(chunks)[:2]
    with pytest.raises(MalformedMessage):
        assembly.put_all([(other, b"wrong"), (good, chunks[good]), (digest(b"strange"), b"strange")])
    assert set(assembly.missing()) == set(chunks) - {good}


def test_flipped_bit_on_disk_makes_its_chunk_missing(card: Card) -> None:
    """A9: found when the chunk is verified, and requested again; the others are not."""
    assembly, chunks = card.assembly(1)
    assembly.put_all(list(chunks.items()))
    weights = assembly.folder / "slices" / "head" / "weights.bin"
    weights.write_bytes(weights.read_bytes()[:-1] + b"X")
    assert assembly.missing() == {digest(b"v" * 500): 500}
    with pytest.raises(TrustError):
        card.adopt(1)
    assembly.put_all([(digest(b"v" * 500), b"v" * 500)])
    assert card.adopt(1)


@pytest.mark.parametrize("size", [0, 1, 999, 1000, 1001, 1499])
def test_truncated_file_keeps_its_complete_chunks(card: Card, size: int) -> None:
    """A1: after a power cut the file may end anywhere or have holes: what hashes right is present, the rest is
    missing."""
    assembly, chunks = card.assembly(1)
    assembly.put_all(list(chunks.items()))
    os.truncate(assembly.folder / "slices" / "head" / "weights.bin", size)
    expected = {digest(b"v" * 500)} | ({digest(b"w" * 1000)} if size < 1000 else set())
    assert set(assembly.missing()) == expected


def test_files_shared_with_another_release_are_hard_linked(card: Card) -> None:
    """A new version that shares `head` with the running one requests only its tail, and `head` is on disk once."""
    old = card.complete(1)
    before = bytes_on_disk([card.folder / "chunks", card.folder / "releases"])
    assembly, _ = card.assembly(2)

    assert set(taken_over(assembly)) == {digest(b"tail graph 2")}

    shared = assembly.folder / "slices" / "head" / "weights.bin"
    assert shared.samefile(old.slice_folder("head") / "weights.bin")
    assert bytes_on_disk([card.folder / "chunks", card.folder / "releases"]) == before


def test_hard_linked_file_is_never_written(card: Card) -> None:
    """The bit that flipped in the running release is repaired in the new one, and the old file stays unchanged."""
    old = card.complete(1).slice_folder("head") / "weights.bin"
    assembly, chunks = card.assembly(2)
    taken_over(assembly)
    old.write_bytes(b"X" + old.read_bytes()[1:])

    assert set(taken_over(assembly)) == {digest(b"w" * 1000), digest(b"tail graph 2")}
    assembly.put_all([(sha256, chunks[sha256]) for sha256 in taken_over(assembly)])

    assert old.read_bytes().startswith(b"Xw")
    assert (card.adopt(2).slice_folder("head") / "weights.bin").read_bytes().startswith(b"ww")


def test_chunks_are_copied_where_hard_links_fail(card: Card, monkeypatch: pytest.MonkeyPatch) -> None:
    """On FAT: nothing that is on disk is fetched, link or not; a corrupt source is not copied."""
    old = card.complete(1).slice_folder("head") / "weights.bin"

    def refuse(source: Path, target: Path) -> None:
        raise OSError(errno.EPERM, "no links here")

    monkeypatch.setattr(os, "link", refuse)
    old.write_bytes(b"X" + old.read_bytes()[1:])
    assembly, chunks = card.assembly(2)
    assert set(taken_over(assembly)) == {digest(b"w" * 1000), digest(b"tail graph 2")}
    assembly.put_all([(sha256, chunks[sha256]) for sha256 in taken_over(assembly)])
    assert not (card.adopt(2).slice_folder("head") / "weights.bin").samefile(old)


def test_missing_slices_are_added_to_a_stored_release(card: Card) -> None:
    """A corrupt slice of a stored release is fetched and put in its place; the others stay where they are."""
    home = card.complete(1)
    tail = home.slice_folder("tail") / "graph.onnx"
    tail.write_bytes(b"spoilt")
    assembly, chunks = card.assembly(1)
    assert set(taken_over(assembly)) == {digest(b"tail graph 1")}
    assembly.put_all([(digest(b"tail graph 1"), chunks[digest(b"tail graph 1")])])
    assert card.adopt(1).slice_folder("tail") and not assembly.folder.exists()


@pytest.mark.parametrize("failing", range(4))
def test_full_disk_keeps_written_chunks(card: Card, monkeypatch: pytest.MonkeyPatch, failing: int) -> None:
    """A8: ENOSPC at any write is NoRoom with its reason, and the fetch continues from there once there is room."""
    assembly, chunks = card.assembly(1)
    real, calls = chunks_module._write_into, [0]

    def write(path: Path, pieces: list[tuple[int, bytes]]) -> None:
        calls[0] += 1
        if calls[0] > failing:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        real(path, pieces)

    monkeypatch.setattr(chunks_module, "_write_into", write)
    if failing < 3:
        with pytest.raises(NoRoom, match="disk is full"):
            assembly.put_all(list(chunks.items()))
    else:
        assembly.put_all(list(chunks.items()))
    monkeypatch.setattr(chunks_module, "_write_into", real)
    left = assembly.missing()
    assert bool(left) == (failing < 3)
    assembly.put_all([(sha256, chunks[sha256]) for sha256 in left])
    assert card.adopt(1)


def test_full_disk_while_staging_loses_nothing(card: Card, monkeypatch: pytest.MonkeyPatch) -> None:
    """A8: manifest and proof find no space: the error is raised, no chunk is lost, and the next attempt succeeds."""
    assembly, chunks = card.assembly(1)
    assembly.put_all(list(chunks.items()))
    card.sign(1)

    def full(path: Path, data: bytes) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr("edgesplit.release_store.write_durably", full)
        with pytest.raises(OSError, match="No space"):
            card.adopt(1)
    assert assembly.missing() == {}
    assert card.adopt(1).slice_folder("head")


def test_release_over_quota_is_refused_before_the_first_byte(tmp_path: Path) -> None:
    """A8: refused with the numbers and what to do, and nothing was written."""
    card = Card(tmp_path, quota_bytes=5_000)
    assembly, _ = card.assembly(1)
    with pytest.raises(NoRoom, match="--store-quota"):
        card.store.make_room(assembly.layout, assembly.missing(), ())
    assert bytes_on_disk([tmp_path / "chunks", tmp_path / "releases"]) == 0


def test_chunk_that_occurs_twice_is_present_only_at_both_places(tmp_path: Path) -> None:
    """Zeros, for example: one place was written before a power cut, the other is a hole; the chunk counts as missing,
    and a put writes both. Otherwise one place stood for both and the release was refused for good."""
    zeros, other = bytes(4096), b"x" * 100
    chunks = tuple(Chunk(digest(data), len(data)) for data in (zeros, other, zeros))
    file = SliceFile("weights.bin", 8292, digest(zeros + other + zeros), chunks)
    assembly = ChunkStore(tmp_path / "chunks", tmp_path / "releases").assembly(
        ReleaseLayout("a" * 64, (("s", file),), {})
    )
    assembly.put_all([(digest(zeros), zeros), (digest(other), other)])
    path = assembly.folder / "slices" / "s" / "weights.bin"
    assert path.read_bytes() == zeros + other + zeros and assembly.missing() == {}
    os.truncate(path, 5000)
    assert assembly.missing() == {digest(zeros): 4096}
    assert assembly.layout.bytes_of(assembly.missing()) == 8192


def test_query_of_missing_chunks_writes_nothing(card: Card) -> None:
    """Chunks of other releases are copied only on request, after room was made."""
    card.complete(1)
    held = bytes_on_disk([card.folder / "chunks", card.folder / "releases"])
    assembly, chunks = card.assembly(2)
    assert set(assembly.missing()) == set(chunks) and not assembly.folder.exists()
    assert bytes_on_disk([card.folder / "chunks", card.folder / "releases"]) == held


def test_oldest_unprotected_release_is_evicted_first(tmp_path: Path) -> None:
    """With a quota for a few: the oldest unprotected release is removed, running ones stay, and no more are removed
    than necessary."""
    card = Card(tmp_path, quota_bytes=2**20 + 45_000)
    names = [card.complete(version).digest for version in (1, 2, 3)]
    for age, name in enumerate(names):
        os.utime(tmp_path / "releases" / name, (age, age))
    assembly, _ = card.assembly(4)
    held = bytes_on_disk([tmp_path / "chunks", tmp_path / "releases"])
    quota_bytes = held + 2**20 + assembly.layout.bytes_of(assembly.layout.sizes) - 1
    store = ChunkStore(tmp_path / "chunks", tmp_path / "releases", quota_bytes)

    store.make_room(assembly.layout, assembly.layout.sizes, {names[0]})

    left = {path.name for path in (tmp_path / "releases").iterdir()}
    assert left == {names[0], names[2]}


def test_collecting_garbage_leaves_protected_releases(card: Card) -> None:
    """Unwanted releases and partial downloads are removed; a protected one stays complete."""
    kept, dropped = card.complete(1), card.complete(2)
    beginning, chunks = card.assembly(3)
    beginning.put_all([(digest(b"tail graph 3"), chunks[digest(b"tail graph 3")])])
    card.store.remove_others({kept.digest})
    assert [path.name for path in (card.folder / "releases").iterdir()] == [kept.digest]
    assert kept.slice_folder("head") and not beginning.folder.exists() and not dropped.folder.exists()


sizes = st.integers(0, 10**10)


@given(
    need=sizes, free=sizes, held=sizes, quota=sizes, ages=st.lists(st.floats(0, 10), max_size=6), kept=st.integers(0, 6)
)
def test_protected_release_is_never_evicted(
    need: int, free: int, held: int, quota: int, ages: list[float], kept: int
) -> None:
    """Whatever the sizes: it fits, or the oldest unprotected release is named, or NoRoom; never a protected one."""
    stored = [StoredReleaseAge(f"{number:064x}", age) for number, age in enumerate(ages)]
    protected = {release.release for release in stored[:kept]}
    spare = [release for release in stored if release.release not in protected]
    fits = need + RESERVE_BYTES <= free and held + need <= quota
    try:
        drop = eviction_candidate("f" * 64, need, DiskUsage(free, held, quota), stored, protected)
    except NoRoom:
        assert not fits and not spare
    else:
        assert (drop is None) == fits
        if drop is not None:
            assert drop in {
                release.release for release in spare if release.kept_since == min(s.kept_since for s in spare)
            }


class PowerCut(BaseException):
    """Nothing runs after it, and nothing tidies up."""


def test_crash_at_any_step_keeps_acknowledged_chunks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A1: with a crash before each fsync, rename and link from the first chunk to the release: what was reported as
    stored is present, what is called a release opens, and the download resumes to the end."""
    steps = 0
    signed = Card(tmp_path)
    for version in (1, 2):
        signed.sign(version)
    while True:
        card = Card(tmp_path / str(steps), like=signed)
        card.complete(1)  # `head` is shared with it
        assembly, chunks = card.assembly(2)
        kept: set[str] = set()
        with monkeypatch.context() as patch:
            left = [steps]
            for name in ("fsync", "rename", "replace", "link"):
                patch.setattr(os, name, _until_the_cut(getattr(os, name), left))
            try:
                for sha256 in taken_over(assembly):
                    assembly.put_all([(sha256, chunks[sha256])])
                    kept.add(sha256)
                card.adopt(2)
                whole = True
            except PowerCut:
                whole = False
        again, _ = card.assembly(2)
        if (card.folder / "releases" / again.layout.release).exists():
            assert card.opened(2).slice_folder("head")
        elif not whole:
            missing = taken_over(again)
            assert kept.isdisjoint(missing)
            again.put_all([(sha256, chunks[sha256]) for sha256 in missing])
            assert card.adopt(2).slice_folder("tail")
        if whole:
            break
        steps += 1
    assert steps > 20


def _until_the_cut(real: Callable[..., None], left: list[int]) -> Callable[..., None]:
    def step(*arguments: object, **more: object) -> None:
        if not left[0]:
            raise PowerCut
        left[0] -= 1
        real(*arguments, **more)

    return step
