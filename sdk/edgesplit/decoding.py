"""Decoding of bytes from outside: what msgspec raises becomes one error, which says what was being decoded."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import msgspec

from edgesplit.errors import EdgeError, MalformedMessage

DECODE_ERRORS = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, ValueError)
"""What msgspec raises for bytes that it cannot decode."""
Raw = bytes | bytearray | memoryview | msgspec.Raw
Error = type[EdgeError]
T = TypeVar("T")


def decode_json(raw: Raw, kind: type[T], what: str, most: int | None = None, error: Error = MalformedMessage) -> T:
    """Decode JSON of type `kind`; `error`, naming `what`, where it is anything else or has more than `most` bytes."""
    return _decode(msgspec.json.decode, raw, kind, what, most, error)


def decode_msgpack(raw: Raw, kind: type[T], what: str, most: int | None = None, error: Error = MalformedMessage) -> T:
    """Decode MessagePack of type `kind`; `error`, naming `what`, where it is anything else or has more than `most`
    bytes."""
    return _decode(msgspec.msgpack.decode, raw, kind, what, most, error)


def _decode(decode: Callable[..., T], raw: Any, kind: type[T], what: str, most: int | None, error: Error) -> T:
    if most is not None and len(raw) > most:
        raise error(f"{what}: {len(raw)} bytes, at most {most}")
    try:
        return decode(raw, type=kind)
    except DECODE_ERRORS as reason:
        raise error(f"{what}: {reason}") from reason
