"""Encrypted slices: what lies on disks and travels is ciphertext, and is opened in memory only.

Each slice has one content key. Its files are encrypted chunk by chunk with ChaCha20-Poly1305, each chunk bound to its
slice, file and place, so that none can be swapped, moved or left out; a chunk's name is the SHA-256 of its ciphertext,
so that storing, streaming and resuming are the same as in clear. A content key follows from what it encrypts and a
secret of the controller's, so that the same slice gives the same bytes again and no key ever meets a nonce twice.
Who gets a content key is `edgesplit.crypto.key_wrapping`'s.

What is opened lies in sealed memory files (memfd): no disk holds it, nothing can change it any more, and it goes with
the process. It can be swapped out like any memory, and whoever is root on the machine can read it.
"""

from __future__ import annotations

import fcntl
import hashlib
import hmac
import mmap
import os
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Final, overload

import msgspec
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDFExpand

from edgesplit.errors import EdgeError, TrustError
from edgesplit.release.manifest import TAG_BYTES, Chunk, Golden, Manifest, Plain, Sealed, Slice, SliceFile

CIPHER: Final = "chacha20-poly1305"
KEY_BYTES = 32
GOLDEN = "golden inputs"
"""Owner of the golden chunks: no slice can have that name."""
_SEALS = fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE

Keys = Mapping[str, bytes]
"""Content keys by `Sealed.key_id`."""


@dataclass(frozen=True, slots=True)
class ContentKey:
    """The key of one slice, or of a release's golden inputs."""

    key_id: str
    secret: bytes

    def __repr__(self) -> str:
        """Without the secret."""
        return f"ContentKey({self.key_id!r})"

    @classmethod
    def of(cls, controller_secret: bytes, what: bytes) -> ContentKey:
        """The key for exactly `what` (all of the plaintext by its digests) at this controller, and for nothing else."""
        key_id = hmac.new(controller_secret, b"edgesplit key id 1\n" + what, hashlib.sha256).hexdigest()
        return cls.named(controller_secret, key_id)

    @classmethod
    def named(cls, controller_secret: bytes, key_id: str) -> ContentKey:
        """The key of that name, made anew."""
        return cls(key_id, _derived(controller_secret, b"edgesplit content key 1\n" + key_id.encode()))

    @property
    def sealed(self) -> Sealed:
        """What a manifest says of it."""
        return Sealed(CIPHER, self.key_id, commitment(self.secret))


def commitment(key: bytes) -> str:
    """What a manifest tells of a content key: enough to know it again, not to find it."""
    return _derived(key, b"edgesplit key commitment 1").hex()


def is_key_of(sealed: Sealed, key: bytes) -> bool:
    """Whether this is the content key that `sealed` needs."""
    return len(key) == KEY_BYTES and hmac.compare_digest(commitment(key), sealed.commitment)


class _Box:
    """Seals and opens the chunks of one owner under its content key."""

    def __init__(self, owner: str, key: bytes) -> None:
        self._owner = owner
        self._cipher = ChaCha20Poly1305(_derived(key, b"edgesplit chunk key 1"))
        self._digest_key = _derived(key, b"edgesplit plain digest 1")

    def seal(self, data: bytes | memoryview, file: str, place: tuple[int, int, int]) -> bytes:
        """The chunk, encrypted. `place`: number of the file, of the chunk in it, and how many chunks it has."""
        return self._cipher.encrypt(_nonce(place), data, self._about(file, place))

    def open(self, data: bytes, file: str, place: tuple[int, int, int]) -> bytes:
        """The chunk, decrypted; TrustError where it is not what was sealed for that place."""
        try:
            return self._cipher.decrypt(_nonce(place), data, self._about(file, place))
        except InvalidTag as error:
            raise TrustError(
                f"chunk {place[1]} of {self._owner}/{file} cannot be decrypted: it is not what was encrypted there"
            ) from error

    def digest(self) -> hmac.HMAC:
        """A running digest of plaintext, for who has the key."""
        return hmac.new(self._digest_key, digestmod=hashlib.sha256)

    def _about(self, file: str, place: tuple[int, int, int]) -> bytes:
        return f"edgesplit chunk 1\n{self._owner}\n{file}\n".encode() + struct.pack(">IQQ", *place)


def _nonce(place: tuple[int, int, int]) -> bytes:
    """Of its own for each chunk under a key: file and chunk, by number."""
    return struct.pack(">IQ", place[0], place[1])


def _derived(key: bytes, purpose: bytes) -> bytes:
    return HKDFExpand(SHA256(), KEY_BYTES, purpose).derive(key)


# Encrypting, at the controller


def slice_key(plain: Slice, controller_secret: bytes) -> ContentKey:
    """The content key of a slice in clear: its name, and every byte of its files by their digests, make it."""
    return ContentKey.of(
        controller_secret, b"slice\n" + msgspec.json.encode((plain.name, plain.files), order="deterministic")
    )


class _SealedRuns(Sequence[bytes]):
    """A file's chunks, each encrypted when it is asked for: the same every time, so that none needs to be kept."""

    def __init__(self, box: _Box, number: int, name: str, plain: Sequence[bytes | memoryview]) -> None:
        self._box, self._number, self._name, self._plain = box, number, name, plain

    def __len__(self) -> int:
        return len(self._plain)

    @overload
    def __getitem__(self, place: int) -> bytes: ...

    @overload
    def __getitem__(self, place: slice) -> list[bytes]: ...

    def __getitem__(self, place: int | slice) -> bytes | list[bytes]:
        if isinstance(place, slice):
            return [self[at] for at in range(*place.indices(len(self)))]
        run = self._plain[place]  # IndexError ends an iteration
        at = place % len(self)
        return self._box.seal(run, self._name, (self._number, at, len(self)))


def seal_slice(
    plain: Slice, runs: Mapping[str, Sequence[bytes | memoryview]], controller_secret: bytes
) -> tuple[Slice, Mapping[str, Sequence[bytes]]]:
    """The slice encrypted, and its files as chunks in order; one without files has nothing to hide and stays as it is.

    `runs`: the files in clear, as their chunks. They are read once here, and again whenever a chunk is asked for.
    """
    if not plain.files:
        return plain, {}
    key = slice_key(plain, controller_secret)
    box = _Box(plain.name, key.secret)
    listed, contents = [], dict[str, Sequence[bytes]]()
    for number, file in enumerate(plain.files):
        digest, whole, size, chunks = box.digest(), hashlib.sha256(), 0, list[Chunk]()
        for run in runs[file.name]:
            digest.update(run)
        contents[file.name] = sealed = _SealedRuns(box, number, file.name, runs[file.name])
        for run in sealed:
            whole.update(run)
            size += len(run)
            chunks.append(Chunk(hashlib.sha256(run).hexdigest(), len(run)))
        plain_file = Plain(file.bytes, digest.hexdigest())
        listed.append(SliceFile(file.name, size, whole.hexdigest(), tuple(chunks), plain_file))
    return msgspec.structs.replace(plain, files=tuple(listed), sealed=key.sealed), contents


def seal_golden(bodies: Sequence[bytes], controller_secret: bytes) -> tuple[Sealed, list[bytes]]:
    """Golden bodies (request and response by turns, as the manifest lists them), encrypted under one key."""
    known = b"".join(hashlib.sha256(body).digest() for body in bodies)
    key = ContentKey.of(controller_secret, b"golden\n" + known)
    box = _Box(GOLDEN, key.secret)
    return key.sealed, [box.seal(body, "", (0, number, len(bodies))) for number, body in enumerate(bodies)]


# Opening, at a device or an offload server


class SliceInMemory:
    """The files of one slice, decrypted, in memory alone. Close it once the engine has what it needs."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._files: dict[str, int] = {}

    @classmethod
    def of(cls, name: str, files: dict[str, int]) -> SliceInMemory:
        """A slice that another process has opened, by the descriptors of its files, which are this object's now."""
        memory = cls(name)
        memory._files = files
        return memory

    @property
    def descriptors(self) -> Mapping[str, int]:
        """Of each file, to be handed to another process; this object's own."""
        return self._files

    def __enter__(self) -> SliceInMemory:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        self.close()

    def close(self) -> None:
        """Let go of the memory; what is mapped lives on until it is unmapped."""
        while self._files:
            os.close(self._files.popitem()[1])

    def has(self, file: str) -> bool:
        """Is there such a file?"""
        return file in self._files

    def take(self, file: str, descriptor: int) -> None:
        """Have a file that is open already beside those in memory; it is closed with them."""
        self._files[file] = descriptor

    def path(self, file: str) -> Path:
        """A path by which an engine in this process can open that file, while this is not closed."""
        return Path(f"/proc/self/fd/{self._files[file]}")

    def read(self, file: str) -> bytes:
        """That file's bytes."""
        descriptor = self._files[file]
        return os.pread(descriptor, os.fstat(descriptor).st_size, 0)

    def mapped(self, file: str) -> mmap.mmap | None:
        """That file, not copied and left out of core dumps; None where there is none, or nothing in it."""
        descriptor = self._files.get(file)
        if descriptor is None or not os.fstat(descriptor).st_size:
            return None
        view = mmap.mmap(descriptor, 0, prot=mmap.PROT_READ)
        view.madvise(mmap.MADV_DONTDUMP)
        return view

    def add(self, file: str, pieces: Iterable[bytes]) -> None:
        """Take in a file piece by piece, and let nobody change it any more."""
        with self._room_for(file):
            descriptor = os.memfd_create(f"edgesplit:{self.name}"[:200], os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        self._files[file] = descriptor
        for piece in pieces:
            with self._room_for(file):
                _write_all(descriptor, piece)
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, _SEALS)

    @contextmanager
    def _room_for(self, file: str) -> Iterator[None]:
        """EdgeError where memory cannot be had: it may be there another time."""
        try:
            yield
        except OSError as error:
            raise EdgeError(f"no memory to decrypt {self.name}/{file} into: {error.strerror}") from error


def _write_all(descriptor: int, data: bytes) -> None:
    left = memoryview(data)
    while left:
        left = left[os.write(descriptor, left) :]


SliceSource = Path | SliceInMemory
"""Where an engine finds a slice's files: their folder, or memory for an encrypted slice."""


def open_slice(slice_: Slice, opened: Callable[[SliceFile], BinaryIO], keys: Keys) -> SliceInMemory:
    """The slice's files, decrypted into memory. `opened` gives a file's ciphertext; TrustError where it is not whole,
    not this slice's, or its key is not among `keys`."""
    sealed = slice_.sealed
    if sealed is None:
        raise TrustError(f"slice {slice_.name} is not encrypted")
    box = _Box(slice_.name, key_of(sealed, keys, f"slice {slice_.name}"))
    memory = SliceInMemory(slice_.name)
    try:
        for number, file in enumerate(slice_.files):
            with opened(file) as source:
                memory.add(file.name, _opened_pieces(box, number, file, source))
    except BaseException:
        memory.close()
        raise
    return memory


def _opened_pieces(box: _Box, number: int, file: SliceFile, source: BinaryIO) -> Iterable[bytes]:
    """The file's chunks in clear; at its end TrustError unless it is the plaintext that was signed for."""
    digest, total = box.digest(), 0
    for place, chunk in enumerate(file.chunks):
        piece = box.open(source.read(chunk.bytes), file.name, (number, place, len(file.chunks)))
        digest.update(piece)
        total += len(piece)
        yield piece
    if (
        file.plain is None
        or total != file.plain.bytes
        or not hmac.compare_digest(digest.hexdigest(), file.plain.digest)
    ):
        raise TrustError(f"{file.name} decrypts to other bytes than were signed for")


def key_of(sealed: Sealed, keys: Keys, what: str) -> bytes:
    """The content key that `sealed` needs; TrustError where it was not given, or another one under its name."""
    key = keys.get(sealed.key_id)
    if key is None:
        raise TrustError(f"{what} is encrypted, and this machine was not given its content key")
    if not is_key_of(sealed, key):
        raise TrustError(f"{what} is encrypted, and the content key that was given for it is another one")
    return key


def golden_chunks(manifest: Manifest, keys: Keys, chunk: Callable[[str], bytes]) -> Callable[[str], bytes]:
    """Like `chunk`, but golden chunks that are encrypted come decrypted (in memory)."""
    places = dict(_golden_places(manifest.golden))

    def opened(sha256: str) -> bytes:
        data = chunk(sha256)
        if sha256 not in places:
            return data
        sealed, place = places[sha256]
        return _Box(GOLDEN, key_of(sealed, keys, "a golden input")).open(data, "", place)

    return opened


def _golden_places(golden: Sequence[Golden]) -> Iterable[tuple[str, tuple[Sealed, tuple[int, int, int]]]]:
    for number, one in enumerate(golden):
        if one.sealed is not None:
            yield one.request.sha256, (one.sealed, (0, 2 * number, 2 * len(golden)))
            yield one.response.sha256, (one.sealed, (0, 2 * number + 1, 2 * len(golden)))


def needed_keys(manifest: Manifest, slices: Iterable[str], *, golden: bool = True) -> dict[str, Sealed]:
    """What opens these slices, and the golden inputs, by key id; empty for what is in clear."""
    wanted = [manifest.slice(name).sealed for name in slices]
    wanted += [one.sealed for one in manifest.golden] if golden else []
    return {one.key_id: one for one in wanted if one is not None}


assert TAG_BYTES == 16  # Poly1305's
