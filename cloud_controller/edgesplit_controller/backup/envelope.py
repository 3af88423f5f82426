"""The file format of a backup: a header that states how it is decrypted, a stream of pieces, and a signature.

    edgesplit backup 2\\n | u32 length, header (JSON) | pieces: u32 length, u8 last, bytes | signature (64 bytes)

In an encrypted backup each piece is ChaCha20-Poly1305 under a key of this file alone. Piece number and last flag are
the nonce, and the header's hash is authenticated with each piece, so that pieces cannot be dropped, moved, added or cut
off. The key is derived from a passphrase (scrypt), or wrapped for a recipient's X25519 key (HPKE, RFC 9180). A backup
without private keys may be unencrypted: its pieces then carry a hash.

The signature (Ed25519) is over everything before it, by the key that the header names; `origin` decides whether that
key is believed. Format 1, of 0.2, has no signature. How a file may be opened is decided by what the operator gave,
never by its header alone.
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
from cryptography.exceptions import InvalidSignature, InvalidTag
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305
from cryptography.hazmat.primitives.hpke import AEAD, KDF, KEM, Suite
from cryptography.hazmat.primitives.kdf.scrypt import Scrypt
from cryptography.hazmat.primitives.serialization import load_pem_private_key

from edgesplit.atomic_files import write_durably
from edgesplit.crypto.private_key import private_pem
from edgesplit.errors import MalformedMessage, TrustError, UsageError

MAGIC: Final = b"edgesplit backup 2\n"
UNSIGNED_MAGIC: Final = b"edgesplit backup 1\n"
"""First line of a backup of 0.2, which is not signed."""
SIGNATURE_BYTES: Final = 64
PIECE_BYTES: Final = 1 << 20
"""Bytes of plain text in a piece."""
HEADER_BYTES: Final = 16_384
"""Size limit of the header."""
SCRYPT_N: Final = 1 << 17
"""Cost parameter of scrypt for new backups."""
MAX_SCRYPT_N: Final = 1 << 20
"""Largest cost parameter that is accepted: a file with more would need over a gigabyte of memory to try a passphrase.
"""
_SUITE: Final = Suite(KEM.X25519, KDF.HKDF_SHA256, AEAD.CHACHA20_POLY1305)
_INFO: Final = b"edgesplit backup 1"
_SIGNED: Final = b"edgesplit backup signature 1\n"
_FRAME: Final = struct.Struct(">IB")


class Header(msgspec.Struct, frozen=True, kw_only=True):
    """The part of a backup that is readable without the key."""

    created: float
    version: str
    """Version of the program that wrote it."""
    opened_with: Literal["nothing", "passphrase", "key"]
    keys: bool
    """Whether the controller's private keys are in the backup."""
    salt: bytes = b""
    scrypt_n: int = 0
    wrapped: bytes = b""
    signer: bytes = b""
    """Raw Ed25519 public key that verifies the signature; empty in a backup of 0.2."""


class BackupKey(msgspec.Struct, frozen=True):
    """How a backup is encrypted or decrypted: at most one of these is set."""

    passphrase: str = ""
    recipient: bytes = b""
    """Recipient's raw X25519 public key, to encrypt."""
    key_file: Path | None = None
    """File of the recipient's private key, to decrypt."""


def make_recipient(path: Path) -> str:
    """Create a key pair for backups: writes the private key to `path` (mode 0600), returns the public key as text."""
    if path.exists():
        raise UsageError(f"{path} is there already: a key is never overwritten")
    key = X25519PrivateKey.generate()
    write_durably(path, private_pem(key), mode=0o600)
    return base64.urlsafe_b64encode(key.public_key().public_bytes_raw()).decode()


def parse_recipient(text: str) -> bytes:
    """A recipient's public key from its text; UsageError for anything else."""
    try:
        raw = base64.urlsafe_b64decode(text.strip().encode())
        X25519PublicKey.from_public_bytes(raw)
    except ValueError as error:
        raise UsageError("--to takes the public key that `edgectl backup --new-recipient FILE` printed") from error
    return raw


class SealedWriter(io.RawIOBase):
    """Writes an encrypted backup to `file`. `close` writes the last piece and leaves `file` open."""

    def __init__(
        self, file: BinaryIO, opener: BackupKey, signing_key: Ed25519PrivateKey, *, created: float, version: str,
        keys: bool, scrypt_n: int = SCRYPT_N,
    ) -> None:  # fmt: skip
        self._file = file
        self._signing_key = signing_key
        self._digest = hashlib.sha256()
        self._pending = bytearray()
        self._number = 0
        key = os.urandom(32)
        salt, wrapped = b"", b""
        opened_with: Literal["nothing", "passphrase", "key"] = "nothing"
        if opener.recipient:
            wrapped, opened_with = (
                _SUITE.encrypt(key, X25519PublicKey.from_public_bytes(opener.recipient), _INFO),
                "key",
            )
        elif opener.passphrase:
            salt, opened_with = os.urandom(16), "passphrase"
            key = _from_passphrase(opener.passphrase, salt, scrypt_n)
        header = Header(
            created=created, version=version, opened_with=opened_with, keys=keys, salt=salt, wrapped=wrapped,
            scrypt_n=scrypt_n if salt else 0, signer=signing_key.public_key().public_bytes_raw(),
        )  # fmt: skip
        raw = msgspec.json.encode(header)
        self._cipher: _Cipher = _ChecksumOnly() if opened_with == "nothing" else ChaCha20Poly1305(key)
        self._header_hash = hashlib.sha256(raw).digest()
        self._put(MAGIC + struct.pack(">I", len(raw)) + raw)

    def writable(self) -> bool:
        """True: this is a writable stream."""
        return True

    def write(self, data: object) -> int:
        """Buffer bytes and write the pieces that are complete."""
        view = memoryview(data)  # type: ignore[arg-type]
        self._pending += view
        while len(self._pending) > PIECE_BYTES:
            self._write_piece(bytes(self._pending[:PIECE_BYTES]), last=False)
            del self._pending[:PIECE_BYTES]
        return view.nbytes

    def close(self) -> None:
        """Write the remaining bytes as the last piece, and the signature."""
        if not self.closed:
            self._write_piece(bytes(self._pending), last=True)
            self._pending.clear()
            self._file.write(self._signing_key.sign(_SIGNED + self._digest.digest()))
        super().close()

    def _write_piece(self, data: bytes, *, last: bool) -> None:
        sealed = self._cipher.encrypt(_nonce(self._number, last), data, self._header_hash)
        self._number += 1
        self._put(_FRAME.pack(len(sealed), last) + sealed)

    def _put(self, data: bytes) -> None:
        self._digest.update(data)
        self._file.write(data)


class SealedReader(io.RawIOBase):
    """Reads the decrypted content of a backup. TrustError if it was changed, if the key does not fit, or if it is not
    encrypted where it should be; MalformedMessage if it is cut off or not a backup.

    The signature is verified at the end: whatever was read before counts for nothing until then.
    """

    def __init__(self, file: BinaryIO, opener: BackupKey) -> None:
        self._file = file
        self.header, raw = _read_header(file)
        check_opening(self.header, opener)
        magic = MAGIC if self.header.signer else UNSIGNED_MAGIC
        self._digest = hashlib.sha256(magic + struct.pack(">I", len(raw)) + raw)
        self._header_hash = hashlib.sha256(raw).digest()
        self._cipher = _cipher_of(self.header, opener)
        self._number = 0
        self._ended = False
        self._plain = b""

    @property
    def position(self) -> int:
        """Bytes of the backup file that were read."""
        return self._file.tell()

    def readable(self) -> bool:
        """True: this is a readable stream."""
        return True

    def readinto(self, buffer: object) -> int:
        """Fill a buffer; returns the number of bytes, 0 at the end."""
        view = memoryview(buffer)  # type: ignore[arg-type]
        while not self._plain and not self._ended:
            self._plain = self._read_piece()
        taken = min(len(view), len(self._plain))
        view[:taken], self._plain = self._plain[:taken], self._plain[taken:]
        return taken

    def _read_piece(self) -> bytes:
        frame = _read_exactly(self._file, _FRAME.size)
        size, last = _FRAME.unpack(frame)
        if size > PIECE_BYTES + 32 or last > 1:
            raise MalformedMessage("this is no backup, or a damaged one")
        data = _read_exactly(self._file, size)
        self._digest.update(frame + data)
        try:
            data = self._cipher.decrypt(_nonce(self._number, bool(last)), data, self._header_hash)
        except InvalidTag as error:
            reason = "wrong passphrase or key, or the file was changed"
            raise TrustError(f"the backup cannot be opened: {reason}") from error
        self._number += 1
        self._ended = bool(last)
        if self._ended:
            self._verify_end()
        return data

    def _verify_end(self) -> None:
        """Verify the signature, if the format has one, and that nothing follows it."""
        if self.header.signer:
            try:
                signature = _read_exactly(self._file, SIGNATURE_BYTES)
                key = Ed25519PublicKey.from_public_bytes(self.header.signer)
                key.verify(signature, _SIGNED + self._digest.digest())
            except (InvalidSignature, ValueError) as error:
                raise TrustError("the backup's signature is wrong: the file was changed") from error
        if self._file.read(1):
            raise MalformedMessage("data follows the end of the backup: it was changed")


def read_header(file: BinaryIO) -> Header:
    """The header of a backup, without decrypting it."""
    return _read_header(file)[0]


def _read_header(file: BinaryIO) -> tuple[Header, bytes]:
    magic = file.read(len(MAGIC))
    if magic not in (MAGIC, UNSIGNED_MAGIC):
        raise MalformedMessage("this is no backup of edgesplit")
    (size,) = struct.unpack(">I", _read_exactly(file, 4))
    if size > HEADER_BYTES:
        raise MalformedMessage("this is no backup, or a damaged one")
    raw = _read_exactly(file, size)
    try:
        header = msgspec.json.decode(raw, type=Header)
    except msgspec.MsgspecError as error:
        raise MalformedMessage(f"this is no backup, or one of a newer edgesplit: {error}") from error
    if len(header.signer) != (32 if magic == MAGIC else 0):
        raise MalformedMessage("this is no backup, or a changed one: its format and its signer do not belong together")
    return header, raw


def check_opening(header: Header, given: BackupKey) -> None:
    """TrustError where the header asks for less protection than the operator expects or than its content needs."""
    if header.opened_with == "nothing" and header.keys:
        raise TrustError(
            "this file says that it has private keys and is not encrypted: `edgectl backup` makes no such file. Do not"
            " use it, and find out where it came from"
        )
    if header.opened_with == "nothing" and (given.passphrase or given.key_file is not None):
        raise TrustError(
            "a passphrase or --key was given, and this file is not encrypted: it is another file than you think, or it"
            " was replaced. To restore a backup that was made --without-keys, give neither (unset EDGESPLIT_PASSPHRASE)"
        )
    if header.opened_with == "passphrase" and given.key_file is not None:
        raise TrustError(
            "--key was given, and this file is opened with a passphrase: it is another file than you think, or it was"
            " replaced. To restore a backup that was made with a passphrase, leave --key out"
        )


class _Cipher(Protocol):
    def encrypt(self, nonce: bytes, data: bytes, header_hash: bytes, /) -> bytes: ...

    def decrypt(self, nonce: bytes, data: bytes, header_hash: bytes, /) -> bytes: ...


class _ChecksumOnly:
    """For unencrypted backups: each piece carries its hash, which detects damage but not an attacker's change."""

    def encrypt(self, nonce: bytes, data: bytes, header_hash: bytes) -> bytes:
        return data + hashlib.sha256(header_hash + nonce + data).digest()

    def decrypt(self, nonce: bytes, data: bytes, header_hash: bytes) -> bytes:
        plain, digest = data[:-32], data[-32:]
        if hashlib.sha256(header_hash + nonce + plain).digest() != digest:
            raise MalformedMessage("the backup is damaged")
        return plain


def _cipher_of(header: Header, opener: BackupKey) -> _Cipher:
    if header.opened_with == "nothing":
        return _ChecksumOnly()
    if header.opened_with == "passphrase":
        if not opener.passphrase:
            raise UsageError("this backup is opened with a passphrase")
        if not 1 < header.scrypt_n <= MAX_SCRYPT_N or header.scrypt_n & (header.scrypt_n - 1):
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
    # 12 bytes, unique under a key that encrypts this file alone. The last flag is part of it (as in STREAM, Hoang et
    # al. 2015): a file that is cut off at a piece does not authenticate as complete.
    return number.to_bytes(11, "big") + bytes([last])


def _read_exactly(file: BinaryIO, size: int) -> bytes:
    data = file.read(size)
    if len(data) != size:
        raise MalformedMessage("the backup is cut off")
    return data
