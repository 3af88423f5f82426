"""Bearer secrets: operators' tokens, login codes, session ids.

Each is 256 random bits with a prefix that secret scanners recognise (`edgesplit_op_`, `edgesplit_code_`) and a
checksum, so that a scanner can reject false matches without asking this server:

    edgesplit_(op|code|session)_[0-9A-Za-z]{43}[0-9A-Za-z]{6}    43 digits of base 62, then the CRC-32 of them, in 6

Only the plain SHA-256 is stored. A slow hash protects secrets that can be guessed, such as passwords; a random 256-bit
secret cannot, and a slow hash on each call would only help a denial-of-service attack. Secrets are looked up by hash,
so that the duration of a comparison reveals nothing about them.
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
"""Alphabet of base 62, in the order of the digits' values."""
SECRET_DIGITS = 43
CHECK_DIGITS = 6


def make(kind: Kind) -> str:
    """A new random secret of this kind."""
    body = _base62(secrets.randbits(256), SECRET_DIGITS)
    return f"edgesplit_{kind}_{body}{checksum(body)}"


def checksum(body: str) -> str:
    """The six check digits for the 43 digits in `body`."""
    return _base62(zlib.crc32(body.encode()), CHECK_DIGITS)


def is_well_formed(secret: str, kind: Kind) -> bool:
    """Whether a secret has the form and the check digits of this kind, as one that was copied whole has."""
    prefix, body = f"edgesplit_{kind}_", secret[-SECRET_DIGITS - CHECK_DIGITS : -CHECK_DIGITS]
    return secret == f"{prefix}{body}{checksum(body)}" and len(body) == SECRET_DIGITS and set(body) <= set(DIGITS)


def fingerprint(secret: str) -> str:
    """The SHA-256 of the secret in hex, which is what the database stores."""
    return hashlib.sha256(secret.encode("utf-8", "surrogateescape")).hexdigest()


def derive(secret: str, purpose: str) -> str:
    """HMAC-SHA256 (hex) of `purpose` under the secret: a second secret from which the first cannot be computed."""
    return hmac.new(secret.encode(), purpose.encode(), hashlib.sha256).hexdigest()


def is_equal(left: str, right: str) -> bool:
    """Whether two strings are equal, compared in constant time."""
    return hmac.compare_digest(left.encode("utf-8", "surrogateescape"), right.encode("utf-8", "surrogateescape"))


def _base62(number: int, digits: int) -> str:
    letters = []
    for _ in range(digits):
        number, digit = divmod(number, 62)
        letters.append(DIGITS[digit])
    return "".join(reversed(letters))
