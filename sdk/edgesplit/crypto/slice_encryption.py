"""Encryption of slices: on disk and in transit they are ciphertext; they are decrypted in memory only.

Each slice has one content key. Its files are encrypted chunk by chunk with ChaCha20-Poly1305, each chunk bound to its
slice, file and position, so that none can be swapped, moved or omitted. A chunk is named by the SHA-256 of its
ciphertext, so that storing, streaming and resuming work as for plain slices. A content key is derived from the
plaintext and a secret of the controller, so that encrypting the same slice again gives the same bytes and no nonce is
ever reused under a key. Distribution of content keys is in `edgesplit.crypto.key_wrapping`.

Decrypted files are in sealed memory files (memfd): they are on no disk, immutable, and freed with the process. The
memory can be swapped out like any other, and root on the machine can read it.
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
from edgesplit.release.manifest import (
    TAG_BYTES,
    Chunk,
    EncryptionInfo,
    GoldenExample,
    Manifest,
    PlaintextInfo,
    Slice,
    SliceFile,
    chunk_of,
)

CIPHER: Final = "chacha20-poly1305"
KEY_BYTES = 32
GOLDEN_OWNER = "golden inputs"
"""Owner name of the golden chunks in the encryption; not a valid slice name."""
_SEALS = fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE

Keys = Mapping[str, bytes]
"""Content keys by `EncryptionInfo.key_id`."""


@dataclass(frozen=True, slots=True)
class ContentKey:
    """Content key of one slice, or of a release's golden inputs."""

    key_id: str
    secret: bytes

    def __repr__(self) -> str:
        """Without the secret."""
        return f"ContentKey({self.key_id!r})"

    @classmethod
    def derive(cls, controller_secret: bytes, plaintext_digests: bytes) -> ContentKey:
        """Derive the key for exactly the plaintext identified by `plaintext_digests`, at this controller."""
        key_id = hmac.new(controller_secret, b"edgesplit key id 1\n" + plaintext_digests, hashlib.sha256).hexdigest()
        return cls.from_key_id(controller_secret, key_id)

    @classmethod
    def from_key_id(cls, controller_secret: bytes, key_id: str) -> ContentKey:
        """Derive the key with this key id again."""
        return cls(key_id, _derive(controller_secret, b"edgesplit content key 1\n" + key_id.encode()))

    @property
    def sealed(self) -> EncryptionInfo:
        """The key's entry in a manifest: cipher, key id and commitment."""
        return EncryptionInfo(CIPHER, self.key_id, commitment(self.secret))


def commitment(key: bytes) -> str:
    """Commitment to a content key, as published in manifests: it identifies the key without revealing it."""
    return _derive(key, b"edgesplit key commitment 1").hex()


def is_key_of(sealed: EncryptionInfo, key: bytes) -> bool:
    """True if `key` is the content key that `sealed` refers to."""
    return len(key) == KEY_BYTES and hmac.compare_digest(commitment(key), sealed.commitment)


class _ChunkCipher:
    """Encrypts and decrypts the chunks of one owner (a slice, or the golden inputs) under its content key."""

    def __init__(self, owner: str, key: bytes) -> None:
        self._owner = owner
        self._cipher = ChaCha20Poly1305(_derive(key, b"edgesplit chunk key 1"))
        self._digest_key = _derive(key, b"edgesplit plain digest 1")

    def encrypt(self, data: bytes | memoryview, file: str, position: tuple[int, int, int]) -> bytes:
        """Encrypt a chunk. `position`: index of the file, index of the chunk in it, and its number of chunks."""
        return self._cipher.encrypt(_nonce(position), data, self._associated_data(file, position))

    def decrypt(self, data: bytes, file: str, position: tuple[int, int, int]) -> bytes:
        """Decrypt a chunk. TrustError where it is not what was encrypted for this position."""
        try:
            return self._cipher.decrypt(_nonce(position), data, self._associated_data(file, position))
        except InvalidTag as error:
            raise TrustError(
                f"chunk {position[1]} of {self._owner}/{file} cannot be decrypted: not encrypted for this position"
            ) from error

    def new_digest(self) -> hmac.HMAC:
        """A new keyed digest (HMAC) of plaintext: only holders of the key can compute it."""
        return hmac.new(self._digest_key, digestmod=hashlib.sha256)

    def _associated_data(self, file: str, position: tuple[int, int, int]) -> bytes:
        return f"edgesplit chunk 1\n{self._owner}\n{file}\n".encode() + struct.pack(">IQQ", *position)


def _nonce(position: tuple[int, int, int]) -> bytes:
    """Nonce of a chunk, unique under its key: index of the file and index of the chunk."""
    return struct.pack(">IQ", position[0], position[1])


def _derive(key: bytes, purpose: bytes) -> bytes:
    return HKDFExpand(SHA256(), KEY_BYTES, purpose).derive(key)


# Encryption, on the controller


def derive_slice_key(plain: Slice, controller_secret: bytes) -> ContentKey:
    """Content key of a plain slice, derived from its name and the digests of every byte of its files."""
    return ContentKey.derive(
        controller_secret, b"slice\n" + msgspec.json.encode((plain.name, plain.files), order="deterministic")
    )


class _EncryptedChunks(Sequence[bytes]):
    """A file's encrypted chunks as a sequence. Each chunk is encrypted on access; the result is always the same, so
    none is stored."""

    def __init__(self, box: _ChunkCipher, number: int, name: str, plain: Sequence[bytes | memoryview]) -> None:
        self._box, self._number, self._name, self._plain = box, number, name, plain

    def __len__(self) -> int:
        return len(self._plain)

    @overload
    def __getitem__(self, place: int) -> bytes: ...

    @overload
    def __getitem__(self, place: slice) -> list[bytes]: ...

    def __getitem__(self, place: int | slice) -> bytes | list[bytes]:
        if isinstance(place, slice):
            return [self[index] for index in range(*place.indices(len(self)))]
        run = self._plain[place]  # the IndexError of the last index + 1 ends iteration
        index = place % len(self)
        return self._box.encrypt(run, self._name, (self._number, index, len(self)))


def encrypt_slice(
    plain: Slice, plain_chunks: Mapping[str, Sequence[bytes | memoryview]], controller_secret: bytes
) -> tuple[Slice, Mapping[str, Sequence[bytes]]]:
    """Encrypt a slice: its manifest entry and its files as chunks in order. A slice without files is returned
    unchanged.

    `plain_chunks`: the plaintext files, as their chunks. They are read once here, and again whenever an encrypted chunk
    is accessed.
    """
    if not plain.files:
        return plain, {}
    key = derive_slice_key(plain, controller_secret)
    box = _ChunkCipher(plain.name, key.secret)
    listed, contents = [], dict[str, Sequence[bytes]]()
    for number, file in enumerate(plain.files):
        # Two digests: of the plaintext, keyed (an unkeyed one would let an attacker confirm a guess of the file), and
        # of the ciphertext, which names what is stored and transferred.
        digest, whole, size, chunks = box.new_digest(), hashlib.sha256(), 0, list[Chunk]()
        for run in plain_chunks[file.name]:
            digest.update(run)
        contents[file.name] = sealed = _EncryptedChunks(box, number, file.name, plain_chunks[file.name])
        for run in sealed:
            whole.update(run)
            size += len(run)
            chunks.append(chunk_of(run))
        plain_file = PlaintextInfo(file.bytes, digest.hexdigest())
        listed.append(SliceFile(file.name, size, whole.hexdigest(), tuple(chunks), plain_file))
    return msgspec.structs.replace(plain, files=tuple(listed), encryption=key.sealed), contents


def encrypt_golden(bodies: Sequence[bytes], controller_secret: bytes) -> tuple[EncryptionInfo, list[bytes]]:
    """Encrypt the golden bodies (request and response alternating, in the manifest's order) under one key."""
    # Key derived from all bodies: other bodies get another key, so a nonce (the index) is never reused under one key.
    known = b"".join(hashlib.sha256(body).digest() for body in bodies)
    key = ContentKey.derive(controller_secret, b"golden\n" + known)
    box = _ChunkCipher(GOLDEN_OWNER, key.secret)
    return key.sealed, [box.encrypt(body, "", (0, number, len(bodies))) for number, body in enumerate(bodies)]


# Decryption, on a device or an offload server


class SliceInMemory:
    """The decrypted files of one slice in memory. Close it once the engine has loaded them."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._files: dict[str, int] = {}

    @classmethod
    def from_descriptors(cls, name: str, files: dict[str, int]) -> SliceInMemory:
        """A slice that another process has opened. Takes ownership of the file descriptors."""
        memory = cls(name)
        memory._files = files
        return memory

    @property
    def descriptors(self) -> Mapping[str, int]:
        """Descriptor of each file, for passing to another process. This object keeps ownership."""
        return self._files

    def __enter__(self) -> SliceInMemory:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        self.close()

    def close(self) -> None:
        """Close the files. Memory that is mapped stays until it is unmapped."""
        while self._files:
            os.close(self._files.popitem()[1])

    def has(self, file: str) -> bool:
        """True if the slice contains this file."""
        return file in self._files

    def adopt(self, file: str, descriptor: int) -> None:
        """Add a file that is already open. Takes ownership of the descriptor."""
        self._files[file] = descriptor

    def path(self, file: str) -> Path:
        """Path by which an engine in this process can open the file while this object is not closed."""
        return Path(f"/proc/self/fd/{self._files[file]}")

    def read(self, file: str) -> bytes:
        """Contents of the file."""
        descriptor = self._files[file]
        return os.pread(descriptor, os.fstat(descriptor).st_size, 0)

    def map_file(self, file: str) -> mmap.mmap | None:
        """The file memory-mapped (not copied, excluded from core dumps); None where it does not exist or is empty."""
        descriptor = self._files.get(file)
        if descriptor is None or not os.fstat(descriptor).st_size:
            return None
        view = mmap.mmap(descriptor, 0, prot=mmap.PROT_READ)
        view.madvise(mmap.MADV_DONTDUMP)
        return view

    def add(self, file: str, pieces: Iterable[bytes]) -> None:
        """Write a file from its pieces and seal it against changes. EdgeError where there is not enough memory."""
        with self._memory_errors(file):
            descriptor = os.memfd_create(f"edgesplit:{self.name}"[:200], os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        self._files[file] = descriptor
        for piece in pieces:
            with self._memory_errors(file):
                _write_all(descriptor, piece)
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, _SEALS)

    @contextmanager
    def _memory_errors(self, file: str) -> Iterator[None]:
        """Translate OSError to EdgeError: memory may be available another time."""
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


def decrypt_slice(slice_: Slice, open_file: Callable[[SliceFile], BinaryIO], keys: Keys) -> SliceInMemory:
    """Decrypt the slice's files into memory. `open_file` opens a file's ciphertext. TrustError where it is incomplete,
    not this slice's, or its key is not in `keys`."""
    sealed = slice_.encryption
    if sealed is None:
        raise TrustError(f"slice {slice_.name} is not encrypted")
    box = _ChunkCipher(slice_.name, require_key(sealed, keys, f"slice {slice_.name}"))
    memory = SliceInMemory(slice_.name)
    try:
        for number, file in enumerate(slice_.files):
            with open_file(file) as source:
                memory.add(file.name, _decrypted_chunks(box, number, file, source))
    except BaseException:
        memory.close()
        raise
    return memory


def _decrypted_chunks(box: _ChunkCipher, number: int, file: SliceFile, source: BinaryIO) -> Iterable[bytes]:
    """Decrypt a file's chunks. TrustError after the last one unless the plaintext is the one that was signed."""
    digest, total = box.new_digest(), 0
    for index, chunk in enumerate(file.chunks):
        piece = box.decrypt(source.read(chunk.bytes), file.name, (number, index, len(file.chunks)))
        digest.update(piece)
        total += len(piece)
        yield piece
    # The AEAD tags prove each chunk; this proves that together they are the file that was signed, and all of it.
    if (
        file.plaintext is None
        or total != file.plaintext.bytes
        or not hmac.compare_digest(digest.hexdigest(), file.plaintext.digest)
    ):
        raise TrustError(f"{file.name} does not decrypt to the bytes that were signed")


def require_key(sealed: EncryptionInfo, keys: Keys, subject: str) -> bytes:
    """The content key that `sealed` refers to. TrustError where this machine does not have it, or has another one under
    its id."""
    key = keys.get(sealed.key_id)
    if key is None:
        raise TrustError(f"{subject} is encrypted, and this machine was not given its content key")
    if not is_key_of(sealed, key):
        raise TrustError(f"{subject} is encrypted, and the content key that was given for it does not match")
    return key


def decrypting_chunk_source(manifest: Manifest, keys: Keys, chunk: Callable[[str], bytes]) -> Callable[[str], bytes]:
    """Wrap the chunk source `chunk`: encrypted golden chunks are decrypted in memory."""
    positions = dict(_golden_positions(manifest.golden))

    def opened(sha256: str) -> bytes:
        data = chunk(sha256)
        if sha256 not in positions:
            return data
        sealed, position = positions[sha256]
        return _ChunkCipher(GOLDEN_OWNER, require_key(sealed, keys, "a golden input")).decrypt(data, "", position)

    return opened


def _golden_positions(
    golden: Sequence[GoldenExample],
) -> Iterable[tuple[str, tuple[EncryptionInfo, tuple[int, int, int]]]]:
    for number, example in enumerate(golden):
        if example.encryption is not None:
            yield example.request.sha256, (example.encryption, (0, 2 * number, 2 * len(golden)))
            yield example.response.sha256, (example.encryption, (0, 2 * number + 1, 2 * len(golden)))


def needed_keys(manifest: Manifest, slices: Iterable[str], *, golden: bool = True) -> dict[str, EncryptionInfo]:
    """Content keys needed for these slices, and by default for the golden inputs, by key id; empty where nothing is
    encrypted."""
    wanted = [manifest.slice(name).encryption for name in slices]
    wanted += [sealed.encryption for sealed in manifest.golden] if golden else []
    return {sealed.key_id: sealed for sealed in wanted if sealed is not None}


assert TAG_BYTES == 16  # Poly1305's
