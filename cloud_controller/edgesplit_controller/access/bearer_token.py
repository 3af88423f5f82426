"""Secrets that open something to whoever bears them: operators' tokens, login codes, sessions.

Each is 256 random bits behind a prefix that secret scanners find (`edgesplit_op_`, `edgesplit_code_`), with a checksum,
so that a scanner need not ask us whether it is one:

    edgesplit_(op|code|session)_[0-9A-Za-z]{43}[0-9A-Za-z]{6}    43 digits of base 62, then the CRC-32 of them, in 6

What is kept is the plain SHA-256. A slow hash guards what people think of, which can be guessed; of 2^256 secrets none
is ever guessed, however fast each try is, and a slow hash at each call would only be a load to attack with. They are
looked up by the hash, so that no comparison's duration tells anything of the secret.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import string
import zlib
from typing import Literal

Kind = Literal["op", "code", "session"]
DIGITS = string.digits + string.ascii_uppercase + string.ascii_lowercase
SECRET_DIGITS = 43
CHECK_DIGITS = 6


def make(kind: Kind) -> str:
    """A new secret."""
    body = _base62(secrets.randbits(256), SECRET_DIGITS)
    return f"edgesplit_{kind}_{body}{checksum(body)}"


def checksum(body: str) -> str:
    """The last six letters that go with the 43 before them."""
    return _base62(zlib.crc32(body.encode()), CHECK_DIGITS)


def fingerprint(secret: str) -> str:
    """What is kept of it: the SHA-256, in hex."""
    return hashlib.sha256(secret.encode("utf-8", "surrogateescape")).hexdigest()


def derived(secret: str, purpose: str) -> str:
    """Another secret, which whoever knows this one can make and from which nobody gets back."""
    return hmac.new(secret.encode(), purpose.encode(), hashlib.sha256).hexdigest()


def same(one: str, other: str) -> bool:
    """Are they equal? In a time that says nothing of where they differ."""
    return hmac.compare_digest(one.encode("utf-8", "surrogateescape"), other.encode("utf-8", "surrogateescape"))


def _base62(number: int, digits: int) -> str:
    letters = []
    for _ in range(digits):
        number, digit = divmod(number, 62)
        letters.append(DIGITS[digit])
    return "".join(reversed(letters))
