"""protobuf's wire format, as ONNX files use it: devices and servers have no `onnx` package.

The reader is stricter than protobuf: a number that is not in its shortest form, a field of a fixed size, a group, or a
trailing byte is a TrustError. Otherwise two parsers could interpret the same bytes differently, and what was checked
would not be what runs.
"""

from __future__ import annotations

from collections.abc import Iterator

from edgesplit.errors import TrustError
from edgesplit.limits import LIMITS

_VARINT, _BYTES = 0, 2


def iter_fields(raw: memoryview) -> Iterator[tuple[int, int | memoryview]]:
    """Iterate over the fields of a message as (number, value); the value is a varint, or the bytes of a
    length-delimited field."""
    at, count = 0, 0
    while at < len(raw):
        tag, at = _varint(raw, at)  # tag = field number << 3 | wire type
        number, wire = tag >> 3, tag & 7
        value, at = _varint(raw, at)
        count += 1
        if not 0 < number < 1 << 29 or wire not in (_VARINT, _BYTES) or count > LIMITS.graph_parts:
            raise TrustError("a slice's graph has an unexpected encoding, or too many fields")
        if wire == _VARINT:
            yield number, value
            continue
        if value > len(raw) - at:
            raise TrustError("a slice's graph is truncated")
        yield number, raw[at : at + value]
        at += value


def _varint(raw: memoryview, at: int) -> tuple[int, int]:
    """Parse the varint at `at`, below 2^63; returns (value, position after it)."""
    value = 0
    for index in range(9):
        if at + index >= len(raw):
            raise TrustError("a slice's graph is truncated")
        byte = raw[at + index]
        value |= (byte & 0x7F) << (7 * index)
        if byte < 0x80:
            if index and not byte:  # a last byte of 0 adds nothing: the number has a shorter form
                raise TrustError("a slice's graph holds a number that is not in its shortest form")
            return value, at + index + 1
    raise TrustError("a slice's graph holds a number that is too large")


def encode_field(number: int, value: int | bytes | memoryview) -> bytes:
    """Encode a field: a varint, or the bytes of a length-delimited field."""
    if isinstance(value, int):
        return _encode_varint(number << 3 | _VARINT) + _encode_varint(value)
    return _encode_varint(number << 3 | _BYTES) + _encode_varint(len(value)) + value


def _encode_varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)
