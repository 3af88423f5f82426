"""Releases on disk: `<folder>/<digest>/{manifest.json, proof/*.json, slices/<name>/{graph.onnx, weights.bin}}`.

Promises: a release appears whole or not at all, by one rename after everything was fsynced; what is opened has its
signatures verified anew, and a slice handed out has its SHA-256 verified at that moment, a recut's also what is in it
(`edgesplit.release.recut`); only regular files inside the folder count, and no name leads out of it. Leaves to others:
which release to run, and fetching the chunks.
"""

from __future__ import annotations

import hashlib
import mmap
import os
import stat
from collections.abc import Callable, Collection
from dataclasses import dataclass, field, replace
from pathlib import Path

from edgesplit import identifiers
from edgesplit.atomic_files import make_folders, remove, sync_file, sync_folder, write_durably
from edgesplit.crypto.slice_encryption import Keys, SliceSource, open_slice
from edgesplit.errors import MalformedMessage, TrustError
from edgesplit.limits import LIMITS
from edgesplit.release.fingerprint import Anatomy
from edgesplit.release.manifest import Manifest, Slice, SliceFile, release_digest
from edgesplit.release.recut import check_slice
from edgesplit.trust.store import Proof, Verified, verify_release

PROOF_FILES = 1_024
_READ_BYTES = 1 << 20

ChunkSource = Callable[[str], bytes]
"""The bytes of a chunk by its SHA-256; whatever it raises rises."""


@dataclass(frozen=True, slots=True)
class Release:
    """A release on disk whose manifest is trusted."""

    manifest: Manifest
    digest: str
    folder: Path
    keys: Keys = field(default_factory=dict, repr=False)
    """Content keys of its encrypted slices, as far as they were given to this machine."""
    base: Manifest | None = None
    """Of a recut: the release that it is another cut of..."""
    anatomy: Anatomy | None = None
    """...and what its model consists of, where that release says it."""

    def slice_folder(self, name: str) -> SliceSource:
        """Where that slice's files are, verified just now: call it at each load. TrustError if one is wrong.

        Their folder, or for an encrypted slice memory: on disk its files stay encrypted.
        """
        slice_ = _slice_of(self.manifest, name)
        folder = self._checked(slice_)
        if slice_.sealed is None:
            return folder
        return open_slice(
            slice_, lambda file: os.fdopen(_open_regular(self.folder, folder / file.name), "rb"), self.keys
        )

    def _checked(self, slice_: Slice) -> Path:
        folder = self.folder / "slices" / identifiers.slice_name(slice_.name)
        self.check(slice_, folder)
        return folder

    def check(self, slice_: Slice, folder: Path) -> None:
        """TrustError unless that slice's files in `folder` are what was signed, and of a recut what was released."""
        for file in slice_.files:
            _check_file(folder, file, self.folder)
        if self.base is not None:
            check_slice(slice_, self.base, self.anatomy, lambda _, file: _mapped(folder / file.name, self.folder))

    def has_slices(self, only: Collection[str]) -> bool:
        """Are all of these slices there, whole?"""
        try:
            for name in only:
                self._checked(_slice_of(self.manifest, name))
        except TrustError:
            return False
        return True


def open_release(folder: Path, digest: str, bootstrap_root: bytes) -> Release:
    """The release of that digest under `folder`, believed because its own proof leads from `bootstrap_root` to it.

    TrustError if it is not there, not whole or not signed.
    """
    home = folder / identifiers.sha256_hex(digest)
    raw = _read_regular(home, home / "manifest.json", LIMITS.manifest_bytes)
    if release_digest(raw) != digest:
        raise TrustError(f"release {digest[:12]}: its manifest is of another release")
    try:
        verified = verify_release(raw, _read_proof(home), bootstrap_root)
    except MalformedMessage as error:
        raise TrustError(f"release {digest[:12]}: {error}") from error
    return _release(verified, digest, home)


def _release(verified: Verified, digest: str, home: Path) -> Release:
    return Release(verified.manifest, digest, home, base=verified.base, anatomy=verified.anatomy)


def write_release(
    folder: Path,
    digest: str,
    raw_manifest: bytes,
    proof: Proof,
    chunk: ChunkSource,
    only: Collection[str] | None = None,
    *,
    bootstrap_root: bytes,
) -> Release:
    """Put a release (`only` these slices of it, all by default) under `folder`, from its chunks; returns it opened.

    What is already there and right is kept; what is missing or spoiled is written anew. Every byte is verified on its
    way, so a wrong chunk (TrustError) leaves nothing behind.
    """
    verified = verify_release(raw_manifest, proof, bootstrap_root)
    manifest = verified.manifest
    if release_digest(raw_manifest) != identifiers.sha256_hex(digest):
        raise TrustError(f"release {digest[:12]}: these are the bytes of another manifest")
    wanted = [_slice_of(manifest, name) for name in only] if only is not None else list(manifest.every_slice)
    try:
        release = open_release(folder, digest, bootstrap_root)
    except TrustError:
        _write_anew(folder, _release(verified, digest, folder / digest), raw_manifest, proof, wanted, chunk)
    else:
        _complete(release, wanted, chunk)
    return open_release(folder, digest, bootstrap_root)


def adopt_release(
    folder: Path,
    digest: str,
    raw_manifest: bytes,
    proof: Proof,
    made: Path,
    only: Collection[str],
    *,
    bootstrap_root: bytes,
) -> Release:
    """Make `made`, on the same file system, with the files of these slices in `slices/<name>/`, the release of that
    digest under `folder`; returns it opened.

    Nothing is copied: one rename where the release is new, else one for each slice that it lacks. TrustError where a
    file is not, byte for byte, what was signed; then all stays as it is.
    """
    ready = _release(verify_release(raw_manifest, proof, bootstrap_root), digest, made)
    if release_digest(raw_manifest) != identifiers.sha256_hex(digest):
        raise TrustError(f"release {digest[:12]}: these are the bytes of another manifest")
    wanted = [_slice_of(ready.manifest, name) for name in only]
    for remains in list(made.rglob(".*.part")):
        remains.unlink()
    make_folders(folder)
    try:
        there = open_release(folder, digest, bootstrap_root)
    except TrustError:
        for one in wanted:
            ready.check(one, made / "slices" / identifiers.slice_name(one.name))
        _adopt_whole(folder, digest, raw_manifest, proof, made)
    else:
        # What is there already may have come by a rename whose folder was not synced any more.
        lacking = [one for one in wanted if one.files and not there.has_slices([one.name])]
        for one in lacking:
            ready.check(one, made / "slices" / identifiers.slice_name(one.name))
        for one in lacking:
            _adopt_slice(there.folder / "slices", made / "slices", one.name)
        sync_folder(there.folder / "slices")
        sync_folder(folder)
        remove(made)
    return open_release(folder, digest, bootstrap_root)


def _adopt_whole(folder: Path, digest: str, raw_manifest: bytes, proof: Proof, made: Path) -> None:
    write_durably(made / "manifest.json", raw_manifest)
    for name, raw in proof.items():
        write_durably(made / "proof" / identifiers.slice_name(name), raw)
    (made / "slices").mkdir(exist_ok=True)
    _sync_folders(made)
    if os.path.lexists(folder / digest):
        _discard(folder / digest, folder / f".{digest}.removed")
    os.rename(made, folder / digest)
    sync_folder(folder)
    sync_folder(made.parent)


def _adopt_slice(slices: Path, made: Path, name: str) -> None:
    if os.path.lexists(slices / name):
        _discard(slices / name, slices / f".{name}.removed")
    os.rename(made / name, slices / name)
    sync_folder(slices)


def stored_releases(folder: Path) -> list[str]:
    """Digests of the releases under `folder`, none of them verified yet."""
    if not folder.is_dir():
        return []
    return sorted(one.name for one in folder.iterdir() if identifiers.SHA256.fullmatch(one.name) and one.is_dir())


def remove_release(folder: Path, digest: str) -> None:
    """Forget a release. It vanishes at once; its bytes follow."""
    home = folder / identifiers.sha256_hex(digest)
    if home.exists():
        _discard(home, folder / f".{digest}.removed")


def remove_remains(folder: Path) -> None:
    """Delete what was cut off on its way into a release or out of one. Nobody else may be writing there."""
    for pattern in (".*.part", ".*.removed", "*/slices/.*.part", "*/slices/.*.removed"):
        for remains in list(folder.glob(pattern)):
            remove(remains)


def _write_anew(
    folder: Path, release: Release, raw_manifest: bytes, proof: Proof, wanted: Collection[Slice], chunk: ChunkSource
) -> None:
    make_folders(folder)
    digest = release.digest
    home, part = folder / digest, folder / f".{digest}.part"
    remove(part)
    try:
        write_durably(part / "manifest.json", raw_manifest)
        for name, raw in proof.items():
            write_durably(part / "proof" / identifiers.slice_name(name), raw)
        (part / "slices").mkdir()
        for one in wanted:
            _write_slice(part / "slices" / one.name, one, chunk)
            replace(release, folder=part).check(one, part / "slices" / one.name)
        _sync_folders(part)
        if os.path.lexists(home):
            _discard(home, folder / f".{digest}.removed")
        os.rename(part, home)
    except BaseException:
        remove(part)
        raise
    sync_folder(folder)


def _complete(release: Release, wanted: Collection[Slice], chunk: ChunkSource) -> None:
    """Add the slices that a release lacks, each by a rename of its own."""
    slices = release.folder / "slices"
    for one in wanted:
        if not one.files or release.has_slices([one.name]):
            continue
        part = slices / f".{one.name}.part"
        remove(part)
        try:
            _write_slice(part, one, chunk)
            release.check(one, part)
            if os.path.lexists(slices / one.name):
                _discard(slices / one.name, slices / f".{one.name}.removed")
            os.rename(part, slices / one.name)
        except BaseException:
            remove(part)
            raise
        sync_folder(slices)


def _write_slice(folder: Path, slice_: Slice, chunk: ChunkSource) -> None:
    if not slice_.files:
        return
    folder.mkdir()
    for file in slice_.files:
        _write_file(folder / file.name, file, chunk)
    sync_folder(folder)


def _write_file(path: Path, file: SliceFile, chunk: ChunkSource) -> None:
    """Chunk by chunk, so that memory stays small; each verified, and the whole."""
    whole = hashlib.sha256()
    with open(path, "xb") as out:
        for piece in file.chunks:
            data = chunk(piece.sha256)
            if len(data) != piece.bytes or hashlib.sha256(data).hexdigest() != piece.sha256:
                raise TrustError(f"chunk {piece.sha256[:12]} of {path.name}: wrong bytes")
            whole.update(data)
            out.write(data)
        if whole.hexdigest() != file.sha256:
            raise TrustError(f"{path.name}: its chunks do not make the file that was signed")
        out.flush()
        sync_file(out.fileno(), path)


def _check_file(folder: Path, file: SliceFile, release_folder: Path) -> None:
    """The file on disk is, byte for byte, the one that was signed."""
    descriptor = _open_regular(release_folder, folder / file.name)
    with os.fdopen(descriptor, "rb") as opened:
        size = os.fstat(opened.fileno()).st_size
        if size != file.bytes:
            raise TrustError(f"{folder.name}/{file.name}: {size} bytes instead of {file.bytes}")
        whole = hashlib.sha256()
        while piece := opened.read(_READ_BYTES):
            whole.update(piece)
    if whole.hexdigest() != file.sha256:
        raise TrustError(f"{folder.name}/{file.name}: its SHA-256 is not the one that was signed")


def _mapped(path: Path, release_folder: Path) -> bytes | mmap.mmap:
    """The file's bytes, in memory only where they are looked at."""
    descriptor = _open_regular(release_folder, path)
    with os.fdopen(descriptor, "rb") as opened:
        empty = os.fstat(opened.fileno()).st_size == 0
        return b"" if empty else mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ)


def _slice_of(manifest: Manifest, name: str) -> Slice:
    try:
        return manifest.slice(name)
    except KeyError as error:
        raise TrustError(f"the release has no slice {name[:64]!r}") from error


def _read_proof(home: Path) -> dict[str, bytes]:
    folder = home / "proof"
    if folder.is_symlink() or not folder.is_dir():
        raise TrustError(f"{home.name[:12]}: no proof beside the manifest")
    found = sorted(entry.name for entry in os.scandir(folder) if entry.name.endswith(".json"))
    if len(found) > PROOF_FILES:
        raise TrustError(f"{home.name[:12]}: {len(found)} proof files, at most {PROOF_FILES}")
    return {name: _read_regular(home, folder / name, LIMITS.metadata_bytes) for name in found}


def _read_regular(release_folder: Path, path: Path, most: int) -> bytes:
    with os.fdopen(_open_regular(release_folder, path), "rb") as file:
        raw = file.read(most + 1)
    if len(raw) > most:
        raise TrustError(f"{path.name}: more than {most} bytes")
    return raw


def _open_regular(release_folder: Path, path: Path) -> int:
    """A descriptor of a regular file; no folder from the release down to it, nor itself, may be a link."""
    for parent in path.parents:
        if parent.is_symlink():
            raise TrustError(f"{parent} is a link")
        if parent == release_folder:
            break
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        raise TrustError(f"{path}: {error.strerror}") from error
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise TrustError(f"{path} is not a regular file")
    return descriptor


def _sync_folders(top: Path) -> None:
    for folder, _, _ in os.walk(top):
        sync_folder(Path(folder))


def _discard(path: Path, grave: Path) -> None:
    """Take `path` out of the way by one rename, then delete it."""
    remove(grave)
    os.rename(path, grave)
    sync_folder(path.parent)
    remove(grave)
