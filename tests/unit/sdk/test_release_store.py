"""Releases on disk: complete or not at all, and every byte checked again when it is used."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from edgesplit import release_store
from edgesplit.errors import MalformedMessage, TrustError
from edgesplit.release.manifest import release_digest
from edgesplit.release_store import StoredRelease, open_release, remove_release, stored_releases, write_release
from support.signed_repository import TrustHarness, sample_release

RAW, CHUNKS = sample_release()
DIGEST = release_digest(RAW)


class Shelf:
    """A folder of releases, and the proof that the sample is signed."""

    def __init__(self, folder: Path) -> None:
        world = TrustHarness(folder / "world")
        self.folder = folder / "releases"
        self.root = world.bootstrap
        self.proof = world.repository.proof(world.add())
        self.home = self.folder / DIGEST

    def write(self, only: set[str] | None = None, chunk: Callable[[str], bytes] = CHUNKS.__getitem__) -> StoredRelease:
        return write_release(self.folder, DIGEST, RAW, self.proof, chunk, only, bootstrap_root=self.root)

    def open(self) -> StoredRelease:
        return open_release(self.folder, DIGEST, self.root)


@pytest.fixture(scope="module")
def signed(tmp_path_factory: pytest.TempPathFactory) -> Shelf:
    return Shelf(tmp_path_factory.mktemp("shelf"))


@pytest.fixture()
def shelf(signed: Shelf, tmp_path: Path) -> Shelf:
    """The signed sample with an empty folder of its own."""
    shelf = Shelf.__new__(Shelf)
    shelf.__dict__.update(signed.__dict__)
    shelf.folder, shelf.home = tmp_path, tmp_path / DIGEST
    return shelf


def test_written_release_opens_byte_for_byte(shelf: Shelf) -> None:
    """With its slices, written from chunks."""
    release = shelf.write()

    assert shelf.open() == release
    assert release.manifest.model == "tiny@1"
    assert (release.slice_folder("head") / "weights.bin").read_bytes() == b"w" * 1000 + b"v" * 500
    assert stored_releases(shelf.folder) == [DIGEST]


def test_slices_can_be_written_later(shelf: Shelf) -> None:
    """Slices that were not requested are absent, their chunks are never read, and they can follow."""
    asked: list[str] = []

    def chunk(digest: str) -> bytes:
        asked.append(digest)
        return CHUNKS[digest]

    release = shelf.write({"tail"}, chunk)
    assert len(asked) == 1
    assert release.has_slices({"tail"}) and not release.has_slices({"head"})
    with pytest.raises(TrustError):
        release.slice_folder("head")

    asked.clear()
    assert shelf.write({"head", "tail"}, chunk).has_slices({"head", "tail"})
    assert len(asked) == 3  # the three of `head`: what is there and right is not written again


def test_unknown_slice_name_is_refused(shelf: Shelf) -> None:
    """Names come from the manifest; others, and paths, lead nowhere."""
    release = shelf.write()
    for name in ("other", "../slices/head", "", "."):
        with pytest.raises((TrustError, MalformedMessage)):
            release.slice_folder(name)


def test_every_flipped_byte_of_a_slice_is_refused_at_load(shelf: Shelf) -> None:
    """A9: a bit that flips on the disk after installation is found when the slice is loaded."""
    release = shelf.write()
    file = release.folder / "slices" / "tail" / "graph.onnx"
    good = file.read_bytes()
    for at in range(len(good)):
        file.write_bytes(good[:at] + bytes([good[at] ^ 1]) + good[at + 1 :])
        with pytest.raises(TrustError, match="SHA-256"):
            release.slice_folder("tail")
    file.write_bytes(good + b"\0")
    with pytest.raises(TrustError, match="bytes instead of"):
        release.slice_folder("tail")


def test_corrupt_slice_is_rewritten(shelf: Shelf) -> None:
    """Writing the release again repairs what the disk corrupted, and only that."""
    release = shelf.write()
    untouched = (release.folder / "slices" / "head" / "weights.bin").stat().st_ino
    (release.folder / "slices" / "tail" / "graph.onnx").write_bytes(b"spoiled")

    shelf.write().slice_folder("tail")

    assert (release.folder / "slices" / "head" / "weights.bin").stat().st_ino == untouched


@pytest.mark.parametrize("file", ["manifest.json", "proof/1.root.json", "proof/targets.json"])
def test_corrupt_manifest_or_proof_is_refused_and_rewritten(shelf: Shelf, file: str) -> None:
    """Flip, cut, empty or remove what proves the release: it does not open until it was written anew."""
    shelf.write()
    path = shelf.home / file
    good = path.read_bytes()
    for bad in (good[: len(good) // 2], b"", good.replace(b"tiny", b"tony"), None):
        if bad == good or (bad is not None and file == "proof/1.root.json"):
            continue  # the bootstrap root is not read from the release
        path.unlink() if bad is None else path.write_bytes(bad)
        if file != "proof/1.root.json":
            with pytest.raises(TrustError):
                shelf.open()
        shelf.write().slice_folder("head")


def test_release_signed_under_another_root_does_not_open(shelf: Shelf, tmp_path: Path) -> None:
    """A complete, correctly signed release of another installation."""
    shelf.write()
    stranger = TrustHarness(tmp_path / "stranger")
    with pytest.raises(TrustError):
        open_release(shelf.folder, DIGEST, stranger.bootstrap)
    with pytest.raises(TrustError):
        write_release(tmp_path / "x", DIGEST, RAW, shelf.proof, CHUNKS.__getitem__, bootstrap_root=stranger.bootstrap)


def test_unsigned_release_is_not_written(shelf: Shelf) -> None:
    """A manifest that the proof does not list leaves nothing on the disk."""
    raw, chunks = sample_release(2)
    with pytest.raises(TrustError):
        write_release(
            shelf.folder, release_digest(raw), raw, shelf.proof, chunks.__getitem__, bootstrap_root=shelf.root
        )
    with pytest.raises(TrustError, match="another manifest"):
        write_release(shelf.folder, "0" * 64, RAW, shelf.proof, CHUNKS.__getitem__, bootstrap_root=shelf.root)
    assert list(shelf.folder.iterdir()) == []


@pytest.mark.parametrize("bad", [b"", b"wrong", b"w" * 1000 + b"!"])
def test_wrong_chunk_leaves_nothing_behind(shelf: Shelf, bad: bytes) -> None:
    """B4: short, foreign and long chunks are refused on arrival."""
    with pytest.raises(TrustError, match="wrong bytes"):
        shelf.write(chunk=lambda digest: bad if len(CHUNKS[digest]) == 1000 else CHUNKS[digest])
    assert list(shelf.folder.iterdir()) == []


def test_missing_chunk_leaves_nothing_behind(shelf: Shelf) -> None:
    """The chunk store's error is raised, and the disk is as before."""
    with pytest.raises(KeyError):
        shelf.write(chunk={}.__getitem__)
    assert list(shelf.folder.iterdir()) == []


def links() -> list[tuple[str, Callable[[Path], None]]]:
    def elsewhere(path: Path) -> None:
        target = path.rename(path.parent.parent / f"moved-{path.name}")
        path.symlink_to(target)

    def pipe(path: Path) -> None:
        path.unlink()
        os.mkfifo(path)

    def folder(path: Path) -> None:
        path.unlink()
        path.mkdir()

    return [("a link", elsewhere), ("a pipe", pipe), ("a folder", folder)]


@pytest.mark.parametrize(("what", "put"), links())
@pytest.mark.parametrize("file", ["manifest.json", "proof/targets.json", "slices/tail/graph.onnx"])
def test_only_regular_files_count(shelf: Shelf, file: str, what: str, put: Callable[[Path], None]) -> None:
    """C11: links, pipes and folders in place of a file are refused, without waiting on them."""
    shelf.write()
    put(shelf.home / file)
    with pytest.raises(TrustError):
        shelf.open().slice_folder("tail")


@pytest.mark.parametrize("folder", ["slices/tail", "slices", "proof"])
def test_symlinked_folders_are_refused(shelf: Shelf, folder: str) -> None:
    """C11: although the files behind the link would match."""
    shelf.write()
    links()[0][1](shelf.home / folder)
    with pytest.raises(TrustError):
        shelf.open().slice_folder("tail")


def operations(call: Callable[[], object], monkeypatch: pytest.MonkeyPatch, stop_at: int | None) -> int:
    """Run `call`, dying at its `stop_at`-th fsync, rename or replace, before it happens; how many there were."""
    count = 0
    names = ("fsync", "rename", "replace")
    real = {name: getattr(os, name) for name in names}

    def counted(name: str) -> Callable[..., object]:
        def step(*arguments: object) -> object:
            nonlocal count
            if count == stop_at:
                raise KeyboardInterrupt
            count += 1
            return real[name](*arguments)

        return step

    with monkeypatch.context() as patch:
        for name in names:
            patch.setattr(os, name, counted(name))
        # a process that dies does not clean up after itself
        patch.setattr(
            release_store, "remove", lambda path: None if stop_at is not None and count == stop_at else REMOVE(path)
        )
        try:
            call()
        except KeyboardInterrupt:
            assert stop_at is not None
    return count


REMOVE = release_store.remove


def test_crash_at_any_step_leaves_all_or_nothing(shelf: Shelf, monkeypatch: pytest.MonkeyPatch) -> None:
    """A1: a crash before each fsync and rename of writing a release: it is there complete, or not at all; writing again
    succeeds."""
    total = operations(shelf.write, monkeypatch, None)
    assert total > 15
    remove_release(shelf.folder, DIGEST)
    for stop_at in range(total):
        operations(shelf.write, monkeypatch, stop_at)
        if shelf.home.exists():
            assert shelf.open().has_slices({"head", "tail"})
        assert shelf.write().has_slices({"head", "tail"})
        assert stored_releases(shelf.folder) == [DIGEST]
        remove_release(shelf.folder, DIGEST)


def test_crash_while_adding_a_slice_keeps_the_others(shelf: Shelf, monkeypatch: pytest.MonkeyPatch) -> None:
    """At each step, the slices that were there stay usable."""
    total = operations(lambda: shelf.write({"head"}) and shelf.write(), monkeypatch, None)
    remove_release(shelf.folder, DIGEST)
    first = operations(lambda: shelf.write({"head"}), monkeypatch, None)
    for stop_at in range(total - first):
        operations(shelf.write, monkeypatch, stop_at)
        assert shelf.open().has_slices({"head"})
        assert shelf.write().has_slices({"head", "tail"})
        remove_release(shelf.folder, DIGEST)
        shelf.write({"head"})


def test_removed_release_is_gone(shelf: Shelf) -> None:
    """Removing takes it out of the list at once; removing again does nothing."""
    shelf.write()
    remove_release(shelf.folder, DIGEST)
    remove_release(shelf.folder, DIGEST)
    assert stored_releases(shelf.folder) == [] and list(shelf.folder.iterdir()) == []
    with pytest.raises(TrustError):
        shelf.open()


def test_digest_cannot_be_a_path(shelf: Shelf) -> None:
    """A digest is 64 hex digits or it is refused before it becomes a path."""
    for digest in ("..", "../x", "", "A" * 64, "0" * 63, "0" * 64 + "\n"):
        with pytest.raises(MalformedMessage):
            open_release(shelf.folder, digest, shelf.root)
        with pytest.raises(MalformedMessage):
            remove_release(shelf.folder, digest)
