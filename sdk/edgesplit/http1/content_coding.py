"""Content codings of bodies: a request's undone within bounds, so that a small body never becomes a large surprise,
and an answer's made where the client asks for it.

zstd is ours; gzip and deflate are what Triton's clients send. The bound is that of an uncoded body.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping, Sequence

import zstandard

from edgesplit.errors import EdgeError, MalformedMessage
from edgesplit.limits import LIMITS

Body = bytes | bytearray | memoryview
_PIECE = 1 << 20
_ZLIB_OR_GZIP = 32 + zlib.MAX_WBITS


class UnknownCoding(EdgeError):
    """This content coding is not spoken here (HTTP 415)."""


def decoded(body: Body, coding: str, most: int | None = None) -> Body:
    """The body as it was before `coding` (a Content-Encoding; empty for none). MalformedMessage if it is not whole, or
    has more than `most` bytes inside (by default as many as one that was not coded)."""
    decode = CODINGS.get(coding.strip().lower() or "identity")
    if decode is None:
        raise UnknownCoding(f"content coding {coding[:80]!r} is not spoken here; these are: {', '.join(CODINGS)}")
    return decode(body, LIMITS.http_body_bytes if most is None else min(most, LIMITS.http_body_bytes))


def _inflate(body: Body, most: int) -> Body:
    """zlib or gzip, one member."""
    inflater = zlib.decompressobj(_ZLIB_OR_GZIP)
    try:
        plain = inflater.decompress(body, most + 1)
    except zlib.error as error:
        raise MalformedMessage(f"compressed body: {error}") from error
    if len(plain) > most:
        raise _too_large(most)
    if not inflater.eof or inflater.unused_data:
        raise MalformedMessage("compressed body: cut short, or followed by something")
    return plain


def _unzstd(body: Body, most: int) -> Body:
    """One zstd frame; where it tells its size, that much memory is taken once, never more."""
    decompressor = zstandard.ZstdDecompressor()
    try:
        size = zstandard.frame_content_size(body)
        if size > most:
            raise _too_large(most)
        if size >= 0:
            plain = decompressor.decompress(body, max_output_size=size, allow_extra_data=False)
            if len(plain) != size:
                raise MalformedMessage("compressed body: not of the size it tells")
            return plain
        return _unzstd_in_pieces(decompressor, body, most)
    except zstandard.ZstdError as error:
        raise MalformedMessage(f"compressed body: {error}") from error


def _unzstd_in_pieces(decompressor: zstandard.ZstdDecompressor, body: Body, most: int) -> Body:
    """A frame of unknown size."""
    plain = bytearray()
    with decompressor.stream_reader(body) as reader:
        while piece := reader.read(_PIECE):
            plain += piece
            if len(plain) > most:
                raise _too_large(most)
    return plain


def _too_large(most: int) -> MalformedMessage:
    return MalformedMessage(f"compressed body: more than {most} bytes inside")


CODINGS: Mapping[str, Callable[[Body, int], Body]] = {
    "identity": lambda body, _: body,
    "zstd": _unzstd,
    "gzip": _inflate,
    "deflate": _inflate,
}
"""What undoes each coding."""


COMPRESSED_FROM = 1_024
"""Bodies below this size are not worth a coding."""


def accepted(wanted: str) -> str:
    """The coding for an answer to a client that accepts `wanted` (an Accept-Encoding); empty for none."""
    if wanted == "identity":
        return ""
    named = [one.partition(";") for one in wanted.lower().replace(" ", "").split(",")]
    allowed = {name for name, _, quality in named if quality not in ("q=0", "q=0.0", "q=0.00", "q=0.000")}
    return next((name for name in ENCODERS if name in allowed), "")


def encoded(buffers: Sequence[bytes | memoryview], coding: str) -> bytes:
    """One body of these parts, in a coding that `accepted` gave."""
    return ENCODERS[coding](b"".join(buffers))


def _gzip(body: bytes) -> bytes:
    return _deflated(body, 16 + zlib.MAX_WBITS)


def _zlib(body: bytes) -> bytes:
    return _deflated(body, zlib.MAX_WBITS)


def _deflated(body: bytes, window: int) -> bytes:
    packer = zlib.compressobj(1, zlib.DEFLATED, window)
    return packer.compress(body) + packer.flush()


def _zstd(body: bytes) -> bytes:
    return zstandard.ZstdCompressor(level=1).compress(body)


ENCODERS: Mapping[str, Callable[[bytes], bytes]] = {"zstd": _zstd, "gzip": _gzip, "deflate": _zlib}
"""What makes each coding, the one that is liked best first. HTTP's `deflate` is zlib (RFC 9110 8.4.1.2)."""
