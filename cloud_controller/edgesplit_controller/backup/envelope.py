"""The outside of a backup file: who can open it, and a stream of sealed pieces.

    edgesplit backup 1\\n | u32 length, header (JSON) | pieces: u32 length, u8 last, bytes

Sealed, each piece is ChaCha20-Poly1305 under a key of this file alone; its number and whether it is the last are the
nonce, the header is authenticated with each, so that pieces cannot be dropped, moved, added or cut off. The key comes
from a passphrase (scrypt), or is wrapped to a recipient's X25519 key (HPKE, RFC 9180). Without keys in it a backup need
not be sealed: its pieces carry their hash.
"""

from __future__ import annotations

import base64
import hashlib
import io
import os
import struct
from pathlib import Path
from typing import BinaryIO, Final, Literal, Protocol

import msgspec
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305
from cryptography.hazmat.primitives.hpke import AEAD, KDF, KEM, Suite
from cryptography.hazmat.primitives.kdf.scrypt import Scrypt
from cryptography.hazmat.primitives.serialization import load_pem_private_key

from edgesplit.atomic_files import write_durably
from edgesplit.errors import MalformedMessage, TrustError, UsageError
from edgesplit.trust.identity import private_pem

MAGIC: Final = b"edgesplit backup 1\n"
PIECE_BYTES: Final = 1 << 20
HEADER_BYTES: Final = 16_384
SCRYPT_N: Final = 1 << 17
MOST_SCRYPT_N: Final = 1 << 20
"""A file that asks for more is no backup of ours: it would take more than a gigabyte to try a passphrase."""
_SUITE: Final = Suite(KEM.X25519, KDF.HKDF_SHA256, AEAD.CHACHA20_POLY1305)
_INFO: Final = b"edgesplit backup 1"
_FRAME: Final = struct.Struct(">IB")


class Header(msgspec.Struct, frozen=True, kw_only=True):
    """What can be read without opening a backup."""

    created: float
    version: str
    """Of the program that wrote it."""
    opened_with: Literal["nothing", "passphrase", "key"]
    keys: bool
    """Are the controller's keys in it?"""
    salt: bytes = b""
    scrypt_n: int = 0
    wrapped: bytes = b""


class Opener(msgspec.Struct, frozen=True):
    """What a backup is sealed with, or opened with: at most one of these."""

    passphrase: str = ""
    recipient: bytes = b""
    """A public key, raw: to seal."""
    key_file: Path | None = None
    """The private key: to open."""


def make_recipient(path: Path) -> str:
    """A new key pair for backups: the private key in `path` (0600), the public one as text."""
    if path.exists():
        raise UsageError(f"{path} is there already: a key is never overwritten")
    key = X25519PrivateKey.generate()
    write_durably(path, private_pem(key), mode=0o600)
    return base64.urlsafe_b64encode(key.public_key().public_bytes_raw()).decode()


def parse_recipient(text: str) -> bytes:
    """A recipient's public key; UsageError for anything else."""
    try:
        raw = base64.urlsafe_b64decode(text.strip().encode())
        X25519PublicKey.from_public_bytes(raw)
    except ValueError as error:
        raise UsageError("--to takes the public key that `edgectl backup --new-recipient FILE` told") from error
    return raw


class Sealing(io.RawIOBase):
    """Write a backup into `file`. `close` writes the last piece, and leaves `file` open."""

    def __init__(
        self, file: BinaryIO, opener: Opener, *, created: float, version: str, keys: bool, scrypt_n: int = SCRYPT_N
    ) -> None:
        self._file = file
        self._pending = bytearray()
        self._number = 0
        key = os.urandom(32)
        salt, wrapped = b"", b""
        how: Literal["nothing", "passphrase", "key"] = "nothing"
        if opener.recipient:
            wrapped, how = _SUITE.encrypt(key, X25519PublicKey.from_public_bytes(opener.recipient), _INFO), "key"
        elif opener.passphrase:
            salt, how = os.urandom(16), "passphrase"
            key = _from_passphrase(opener.passphrase, salt, scrypt_n)
        header = Header(
            created=created, version=version, opened_with=how, keys=keys, salt=salt, wrapped=wrapped,
            scrypt_n=scrypt_n if salt else 0,
        )  # fmt: skip
        raw = msgspec.json.encode(header)
        self._box: _Box = _Unsealed() if how == "nothing" else ChaCha20Poly1305(key)
        self._about = hashlib.sha256(raw).digest()
        file.write(MAGIC + struct.pack(">I", len(raw)) + raw)

    def writable(self) -> bool:
        """Yes."""
        return True

    def write(self, data: object) -> int:
        """Take bytes; whole pieces are written."""
        view = memoryview(data)  # type: ignore[arg-type]
        self._pending += view
        while len(self._pending) > PIECE_BYTES:
            self._piece(bytes(self._pending[:PIECE_BYTES]), last=False)
            del self._pending[:PIECE_BYTES]
        return view.nbytes

    def close(self) -> None:
        """Write what is left, as the last piece."""
        if not self.closed:
            self._piece(bytes(self._pending), last=True)
            self._pending.clear()
        super().close()

    def _piece(self, data: bytes, *, last: bool) -> None:
        sealed = self._box.encrypt(_nonce(self._number, last), data, self._about)
        self._number += 1
        self._file.write(_FRAME.pack(len(sealed), last) + sealed)


class Opened(io.RawIOBase):
    """Read what is in a backup. TrustError for one that was changed or is sealed for somebody else, MalformedMessage
    for one that is cut off or is none."""

    def __init__(self, file: BinaryIO, opener: Opener) -> None:
        self._file = file
        self.header, raw = _header(file)
        self._about = hashlib.sha256(raw).digest()
        self._box = _box(self.header, opener)
        self._number = 0
        self._ended = False
        self._have = b""

    @property
    def position(self) -> int:
        """Bytes of the file that were read."""
        return self._file.tell()

    def readable(self) -> bool:
        """Yes."""
        return True

    def readinto(self, buffer: object) -> int:
        """Fill a buffer, with 0 at the end."""
        view = memoryview(buffer)  # type: ignore[arg-type]
        while not self._have and not self._ended:
            self._have = self._piece()
        taken = min(len(view), len(self._have))
        view[:taken], self._have = self._have[:taken], self._have[taken:]
        return taken

    def _piece(self) -> bytes:
        size, last = _FRAME.unpack(_exactly(self._file, _FRAME.size))
        if size > PIECE_BYTES + 32 or last > 1:
            raise MalformedMessage("this is no backup, or a damaged one")
        data = _exactly(self._file, size)
        try:
            data = self._box.decrypt(_nonce(self._number, bool(last)), data, self._about)
        except InvalidTag as error:
            why = "the passphrase or key is another, or the file was changed"
            raise TrustError(f"the backup cannot be opened: {why}") from error
        self._number += 1
        self._ended = bool(last)
        if self._ended and self._file.read(1):
            raise MalformedMessage("something follows the end of the backup: it was changed")
        return data


def read_header(file: BinaryIO) -> Header:
    """What can be known of a backup without opening it."""
    return _header(file)[0]


def _header(file: BinaryIO) -> tuple[Header, bytes]:
    if file.read(len(MAGIC)) != MAGIC:
        raise MalformedMessage("this is no backup of edgesplit")
    (size,) = struct.unpack(">I", _exactly(file, 4))
    if size > HEADER_BYTES:
        raise MalformedMessage("this is no backup, or a damaged one")
    raw = _exactly(file, size)
    try:
        return msgspec.json.decode(raw, type=Header), raw
    except msgspec.MsgspecError as error:
        raise MalformedMessage(f"this is no backup, or one of a newer edgesplit: {error}") from error


class _Box(Protocol):
    def encrypt(self, nonce: bytes, data: bytes, about: bytes, /) -> bytes: ...

    def decrypt(self, nonce: bytes, data: bytes, about: bytes, /) -> bytes: ...


class _Unsealed:
    """For backups that anybody may open: each piece carries its hash, so that damage is seen. It proves nothing."""

    def encrypt(self, nonce: bytes, data: bytes, about: bytes) -> bytes:
        return data + hashlib.sha256(about + nonce + data).digest()

    def decrypt(self, nonce: bytes, data: bytes, about: bytes) -> bytes:
        plain, digest = data[:-32], data[-32:]
        if hashlib.sha256(about + nonce + plain).digest() != digest:
            raise MalformedMessage("the backup is damaged")
        return plain


def _box(header: Header, opener: Opener) -> _Box:
    if header.opened_with == "nothing":
        return _Unsealed()
    if header.opened_with == "passphrase":
        if not opener.passphrase:
            raise UsageError("this backup is opened with a passphrase")
        if not 1 < header.scrypt_n <= MOST_SCRYPT_N or header.scrypt_n & (header.scrypt_n - 1):
            raise MalformedMessage("this is no backup, or a damaged one")
        return ChaCha20Poly1305(_from_passphrase(opener.passphrase, header.salt, header.scrypt_n))
    if opener.key_file is None:
        raise UsageError("this backup is opened with a private key: give its file with --key")
    try:
        return ChaCha20Poly1305(_SUITE.decrypt(header.wrapped, _private_key(opener.key_file), _INFO))
    except (InvalidTag, ValueError) as error:
        raise TrustError("the backup was made for another key") from error


def _private_key(path: Path) -> X25519PrivateKey:
    try:
        key = load_pem_private_key(path.read_bytes(), None)
    except (OSError, ValueError, TypeError) as error:
        raise UsageError(f"{path} cannot be read as a private key: {error}") from error
    if not isinstance(key, X25519PrivateKey):
        raise UsageError(f"{path} is no key for backups (`edgectl backup --new-recipient FILE` makes one)")
    return key


def _from_passphrase(passphrase: str, salt: bytes, n: int) -> bytes:
    return Scrypt(salt=salt, length=32, n=n, r=8, p=1).derive(passphrase.encode())


def _nonce(number: int, last: bool) -> bytes:
    return number.to_bytes(11, "big") + bytes([last])


def _exactly(file: BinaryIO, size: int) -> bytes:
    data = file.read(size)
    if len(data) != size:
        raise MalformedMessage("the backup is cut off")
    return data
