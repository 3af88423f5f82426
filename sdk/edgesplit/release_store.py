"""Store of releases on disk: `<folder>/<digest>/{manifest.json, proof/*.json, slices/<name>/{graph.onnx,
weights.bin}}`.

A release appears atomically, by one rename after everything was fsynced. Signatures are verified each time a release is
opened, and the SHA-256 of a slice each time it is loaded; for a recut also its content (`edgesplit.release.recut`).
Only regular files inside the folder are read, and no name can escape it. Choosing the release to run and fetching the
chunks are done elsewhere.
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
from edgesplit.crypto.slice_encryption import Keys, SliceSource, decrypt_slice
from edgesplit.errors import MalformedMessage, TrustError
from edgesplit.limits import LIMITS
from edgesplit.release.fingerprint import Fingerprint
from edgesplit.release.manifest import Manifest, Slice, SliceFile, release_digest
from edgesplit.release.recut import check_recut_slice
from edgesplit.trust.verification import Proof, verify_release

MAX_PROOF_FILES = 1_024
"""Maximum number of metadata files in one release's proof."""
_READ_BYTES = 1 << 20

ChunkSource = Callable[[str], bytes]
"""Returns the bytes of a chunk by its SHA-256; its exceptions are not caught."""


@dataclass(frozen=True, slots=True)
class StoredRelease:
    """A release on disk whose manifest has been verified."""

    manifest: Manifest
    digest: str
    folder: Path
    keys: Keys = field(default_factory=dict, repr=False)
    """Content keys of its encrypted slices, as far as this machine has them."""
    base: Manifest | None = None
    """For a recut: the manifest of the release that it is another cut of."""
    fingerprint: Fingerprint | None = None
    """For a recut: the fingerprint of its model, where the base release has one."""

    def slice_folder(self, name: str) -> SliceSource:
        """The slice's files, verified by this call, so call it at each load. TrustError if a file is wrong.

        Returns their folder, or for an encrypted slice its decrypted files in memory: on disk they stay encrypted.
        """
        slice_ = _slice_of(self.manifest, name)
        folder = self._verified_slice_folder(slice_)
        if slice_.encryption is None:
            return folder
        return decrypt_slice(
            slice_, lambda file: os.fdopen(_open_regular(self.folder, folder / file.name), "rb"), self.keys
        )

    def _verified_slice_folder(self, slice_: Slice) -> Path:
        folder = self.slice_path(slice_)
        self.check(slice_, folder)
        return folder

    def slice_path(self, slice_: Slice) -> Path:
        """The folder of the slice's files, not verified."""
        return self.folder / "slices" / identifiers.slice_name(slice_.name)

    def check(self, slice_: Slice, folder: Path) -> None:
        """TrustError unless the slice's files in `folder` are those that were signed, and for a recut also match the
        base release."""
        for file in slice_.files:
            _check_file(folder, file, self.folder)
        if self.base is not None:
            check_recut_slice(
                slice_, self.base, self.fingerprint, lambda _, file: _map_file(folder / file.name, self.folder)
            )

    def has_slices(self, names: Collection[str]) -> bool:
        """True if all these slices are present and intact."""
        try:
            for name in names:
                self._verified_slice_folder(_slice_of(self.manifest, name))
        except TrustError:
            return False
        return True


def open_release(folder: Path, digest: str, bootstrap_root: bytes) -> StoredRelease:
    """Open the release `digest` under `folder`, verifying its own proof from `bootstrap_root` on.

    TrustError if it is missing, incomplete or not signed.
    """
    home = folder / identifiers.sha256_hex(digest)
    raw = _read_regular(home, home / "manifest.json", LIMITS.manifest_bytes)
    if release_digest(raw) != digest:
        raise TrustError(f"release {digest[:12]}: its manifest is of another release")
    try:
        return _verified_release(raw, _read_proof(home), bootstrap_root, digest, home)
    except MalformedMessage as error:
        raise TrustError(f"release {digest[:12]}: {error}") from error


def _verified_release(
    raw_manifest: bytes, proof: Proof, bootstrap_root: bytes, digest: str, home: Path
) -> StoredRelease:
    """The release in the folder `home`, by a verified manifest; TrustError unless that is the manifest of `digest`."""
    verified = verify_release(raw_manifest, proof, bootstrap_root)
    if release_digest(raw_manifest) != identifiers.sha256_hex(digest):
        raise TrustError(f"release {digest[:12]}: these are the bytes of another manifest")
    return StoredRelease(verified.manifest, digest, home, base=verified.base, fingerprint=verified.fingerprint)


def write_release(
    folder: Path, digest: str, raw_manifest: bytes, proof: Proof, chunk: ChunkSource,
    only: Collection[str] | None = None, *, bootstrap_root: bytes,
) -> StoredRelease:  # fmt: skip
    """Write a release (`only` these slices of it, by default all) under `folder` from its chunks; returns it opened.

    Intact slices that are already there are kept; missing or damaged ones are written again. Every byte is verified
    before the release becomes visible, so a wrong chunk (TrustError) leaves nothing behind.
    """
    new = _verified_release(raw_manifest, proof, bootstrap_root, digest, folder / digest)
    wanted = [_slice_of(new.manifest, name) for name in only] if only is not None else list(new.manifest.all_slices)
    try:
        release = open_release(folder, digest, bootstrap_root)
    except TrustError:
        _write_new_release(folder, new, raw_manifest, proof, wanted, chunk)
    else:
        _add_missing_slices(release, wanted, chunk)
    return open_release(folder, digest, bootstrap_root)


def adopt_release(
    folder: Path, digest: str, raw_manifest: bytes, proof: Proof, staged: Path, only: Collection[str],
    *, bootstrap_root: bytes,
) -> StoredRelease:  # fmt: skip
    """Move the folder `staged` (on the same file system, with the slices' files in `slices/<name>/`) to become release
    `digest` under `folder`; returns it opened.

    Nothing is copied: one rename if the release is new, otherwise one for each slice that it lacks. TrustError where a
    file differs from what was signed; then nothing is changed.
    """
    candidate = _verified_release(raw_manifest, proof, bootstrap_root, digest, staged)
    wanted = [_slice_of(candidate.manifest, name) for name in only]
    for part_file in list(staged.rglob(".*.part")):
        part_file.unlink()
    make_folders(folder)
    try:
        existing = open_release(folder, digest, bootstrap_root)
    except TrustError:
        for slice_ in wanted:
            candidate.check(slice_, candidate.slice_path(slice_))
        _adopt_new_release(folder, digest, raw_manifest, proof, staged)
    else:
        # Slices that are already there may have been renamed into place by a run that crashed before the fsync of the
        # folder, so the folders are fsynced even if nothing is missing.
        missing = [slice_ for slice_ in wanted if slice_.files and not existing.has_slices([slice_.name])]
        for slice_ in missing:
            candidate.check(slice_, candidate.slice_path(slice_))
        for slice_ in missing:
            _move(staged / "slices" / slice_.name, existing.folder / "slices" / slice_.name)
        sync_folder(existing.folder / "slices")
        sync_folder(folder)
        remove(staged)
    return open_release(folder, digest, bootstrap_root)


def _adopt_new_release(folder: Path, digest: str, raw_manifest: bytes, proof: Proof, staged: Path) -> None:
    _write_manifest(staged, raw_manifest, proof)
    (staged / "slices").mkdir(exist_ok=True)
    _sync_folders(staged)
    _move(staged, folder / digest)
    sync_folder(staged.parent)


def stored_releases(folder: Path) -> list[str]:
    """Digests of the releases under `folder`, not verified."""
    if not folder.is_dir():
        return []
    names = (entry.name for entry in folder.iterdir() if entry.is_dir())
    return sorted(filter(identifiers.SHA256.fullmatch, names))


def remove_release(folder: Path, digest: str) -> None:
    """Delete a release. It disappears atomically by a rename; its files are deleted afterwards."""
    home = folder / identifiers.sha256_hex(digest)
    if home.exists():
        _discard(home)


def remove_leftovers(folder: Path) -> None:
    """Delete the leftovers of interrupted writes and removals. No other thread or process may write there meanwhile."""
    for pattern in (".*.part", ".*.removed", "*/slices/.*.part", "*/slices/.*.removed"):
        for leftover in list(folder.glob(pattern)):
            remove(leftover)


def _write_new_release(
    folder: Path, release: StoredRelease, raw_manifest: bytes, proof: Proof,
    wanted: Collection[Slice], chunk: ChunkSource,
) -> None:  # fmt: skip
    make_folders(folder)
    digest = release.digest
    part = folder / f".{digest}.part"
    remove(part)
    try:
        _write_manifest(part, raw_manifest, proof)
        (part / "slices").mkdir()
        for slice_ in wanted:
            _write_slice(part / "slices" / slice_.name, slice_, chunk)
            replace(release, folder=part).check(slice_, part / "slices" / slice_.name)
        _sync_folders(part)
        _move(part, folder / digest)
    except BaseException:
        remove(part)
        raise


def _add_missing_slices(release: StoredRelease, wanted: Collection[Slice], chunk: ChunkSource) -> None:
    """Add the slices that a release lacks, each by its own rename."""
    slices = release.folder / "slices"
    for slice_ in wanted:
        if not slice_.files or release.has_slices([slice_.name]):
            continue
        part = slices / f".{slice_.name}.part"
        remove(part)
        try:
            _write_slice(part, slice_, chunk)
            release.check(slice_, part)
            _move(part, slices / slice_.name)
        except BaseException:
            remove(part)
            raise


def _write_manifest(folder: Path, raw_manifest: bytes, proof: Proof) -> None:
    write_durably(folder / "manifest.json", raw_manifest)
    for name, raw in proof.items():
        write_durably(folder / "proof" / identifiers.slice_name(name), raw)


def _write_slice(folder: Path, slice_: Slice, chunk: ChunkSource) -> None:
    if not slice_.files:
        return
    folder.mkdir()
    for file in slice_.files:
        _write_file(folder / file.name, file, chunk)
    sync_folder(folder)


def _write_file(path: Path, file: SliceFile, chunk: ChunkSource) -> None:
    """Write a file chunk by chunk, so that memory use stays small. Each chunk and the whole file are verified;
    TrustError."""
    whole = hashlib.sha256()
    with open(path, "xb") as out:
        for spec in file.chunks:
            data = chunk(spec.sha256)
            if len(data) != spec.bytes or hashlib.sha256(data).hexdigest() != spec.sha256:
                raise TrustError(f"chunk {spec.sha256[:12]} of {path.name}: wrong bytes")
            whole.update(data)
            out.write(data)
        if whole.hexdigest() != file.sha256:
            raise TrustError(f"{path.name}: its chunks do not make the file that was signed")
        out.flush()
        sync_file(out.fileno(), path)


def _check_file(folder: Path, file: SliceFile, release_folder: Path) -> None:
    """TrustError unless the file on disk is, byte for byte, the one that was signed."""
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


def _map_file(path: Path, release_folder: Path) -> bytes | mmap.mmap:
    """The file memory-mapped, so that only the pages that are read use memory."""
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
    names = sorted(entry.name for entry in os.scandir(folder) if entry.name.endswith(".json"))
    if len(names) > MAX_PROOF_FILES:
        raise TrustError(f"{home.name[:12]}: {len(names)} proof files, at most {MAX_PROOF_FILES}")
    return {name: _read_regular(home, folder / name, LIMITS.metadata_bytes) for name in names}


def _read_regular(release_folder: Path, path: Path, most: int) -> bytes:
    with os.fdopen(_open_regular(release_folder, path), "rb") as file:
        raw = file.read(most + 1)
    if len(raw) > most:
        raise TrustError(f"{path.name}: more than {most} bytes")
    return raw


def _open_regular(release_folder: Path, path: Path) -> int:
    """Open a regular file and return its descriptor. TrustError if the file, or a folder from the release down to it,
    is a symbolic link."""
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


def _move(new: Path, path: Path) -> None:
    """Move the folder `new` to `path`, in place of what is there, durably."""
    if os.path.lexists(path):
        _discard(path)
    os.rename(new, path)
    sync_folder(path.parent)


def _discard(path: Path) -> None:
    """Rename `path`, so that it disappears atomically, then delete it."""
    removed = path.with_name(f".{path.name}.removed")
    remove(removed)
    os.rename(path, removed)
    sync_folder(path.parent)
    remove(removed)
