"""Content codings: request bodies are decoded within a size bound (no decompression bombs), answers encoded on request.

zstd is what edgesplit's clients use; gzip and deflate are what Triton's clients send. The bound of a decoded body is
that of an uncoded one.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import zstandard

from edgesplit.errors import EdgeError, MalformedMessage
from edgesplit.limits import LIMITS

Body = bytes | bytearray | memoryview
_PIECE = 1 << 20
_ZLIB_OR_GZIP = 32 + zlib.MAX_WBITS


class UnknownCoding(EdgeError):
    """The content coding is not supported here (HTTP 415)."""


def decode_body(body: Body, coding: str, max_bytes: int | None = None) -> Body:
    """`body` decoded from `coding` (a Content-Encoding; empty for none). MalformedMessage if it is incomplete, or
    decodes to more than `max_bytes` (default: the bound of an uncoded body). UnknownCoding for an unsupported coding.
    """
    decode = DECODERS.get(coding.strip().lower() or "identity")
    if decode is None:
        raise UnknownCoding(f"content coding {coding[:80]!r} is not supported here; these are: {', '.join(DECODERS)}")
    return decode(body, LIMITS.http_body_bytes if max_bytes is None else min(max_bytes, LIMITS.http_body_bytes))


def _inflate(body: Body, max_bytes: int) -> Body:
    """Decode zlib or gzip data of one member."""
    inflater = zlib.decompressobj(_ZLIB_OR_GZIP)
    try:
        plain = inflater.decompress(body, max_bytes + 1)
    except zlib.error as error:
        raise MalformedMessage(f"compressed body: {error}") from error
    if len(plain) > max_bytes:
        raise _too_large(max_bytes)
    if not inflater.eof or inflater.unused_data:
        raise MalformedMessage("compressed body: truncated, or followed by other data")
    return plain


def _unzstd(body: Body, max_bytes: int) -> Body:
    """Decode one zstd frame. A frame that declares its size is decoded into one allocation of exactly that size."""
    decompressor = zstandard.ZstdDecompressor()
    try:
        size = zstandard.frame_content_size(body)
        if size > max_bytes:
            raise _too_large(max_bytes)
        if size >= 0:
            plain = decompressor.decompress(body, max_output_size=size, allow_extra_data=False)
            if len(plain) != size:
                raise MalformedMessage("compressed body: not of the size that it declares")
            return plain
        return _unzstd_in_pieces(decompressor, body, max_bytes)
    except zstandard.ZstdError as error:
        raise MalformedMessage(f"compressed body: {error}") from error


def _unzstd_in_pieces(decompressor: zstandard.ZstdDecompressor, body: Body, max_bytes: int) -> Body:
    """Decode a frame of undeclared size piece by piece."""
    plain = bytearray()
    with decompressor.stream_reader(body) as reader:
        while piece := reader.read(_PIECE):
            plain += piece
            if len(plain) > max_bytes:
                raise _too_large(max_bytes)
    return plain


def _too_large(max_bytes: int) -> MalformedMessage:
    return MalformedMessage(f"compressed body: more than {max_bytes} bytes when decoded")


DECODERS: Mapping[str, Callable[[Body, int], Body]] = {
    "identity": lambda body, _: body, "zstd": _unzstd, "gzip": _inflate, "deflate": _inflate
}  # fmt: skip
"""The decoder of each coding."""


MIN_COMPRESSED_BYTES = 1_024
"""Bodies of fewer bytes are sent uncoded: compression would not pay."""


def choose_coding(accept_encoding: str) -> str:
    """The best supported coding for an Accept-Encoding header; empty for none."""
    if accept_encoding == "identity":
        return ""
    offers = [offer.partition(";") for offer in accept_encoding.lower().replace(" ", "").split(",")]
    allowed = {name for name, _, quality in offers if quality not in ("q=0", "q=0.0", "q=0.00", "q=0.000")}
    return next((name for name in ENCODERS if name in allowed), "")


def encode_body(buffers: Sequence[bytes | memoryview], coding: str) -> bytes:
    """The parts joined and encoded in a coding returned by `choose_coding`."""
    return ENCODERS[coding](b"".join(buffers))


def _deflate(window: int, body: bytes) -> bytes:
    packer = zlib.compressobj(1, zlib.DEFLATED, window)
    return packer.compress(body) + packer.flush()


ENCODERS: Mapping[str, Callable[[bytes], bytes]] = {
    "zstd": lambda body: zstandard.ZstdCompressor(level=1).compress(body),
    "gzip": partial(_deflate, 16 + zlib.MAX_WBITS), "deflate": partial(_deflate, zlib.MAX_WBITS),
}  # fmt: skip
"""The encoder of each coding, preferred first. HTTP's `deflate` is the zlib format (RFC 9110 8.4.1.2)."""
