"""Parsing of HTTP responses: whole, in any chunking, or refused."""

from __future__ import annotations

import pytest

from edgesplit.errors import LinkError, MalformedMessage
from edgesplit.http1.response import IncomingResponse, KnownHead, Reply
from edgesplit.limits import LIMITS

FIXED = b"HTTP/1.1 200 OK\r\nA: 1\r\nContent-Length: 5\r\na: 2\r\n\r\nhello"
CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nhel\r\n2\r\nlo\r\n0\r\n\r\n"
UNTIL_CLOSE = b"HTTP/1.1 200 OK\r\n\r\nhello"
INTERIM = b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Early Hints\r\nLink: x\r\n\r\n" + FIXED
EMPTY = b"HTTP/1.1 204 No Content\r\n\r\n"


def read(
    raw: bytes, size: int = 1 << 20, *, end: bool = False, known: KnownHead | None = None
) -> tuple[Reply | None, IncomingResponse]:
    """What comes of these bytes, `size` at a time."""
    incoming, response = IncomingResponse(known_head=known), None
    while raw and response is None:
        buffer = incoming.buffer()
        count = min(size, len(buffer), len(raw))
        buffer[:count] = raw[:count]
        raw = raw[count:]
        response = incoming.on_received(count)
    if response is None and end:
        response = incoming.on_received(0)
    return response, incoming


@pytest.mark.parametrize("size", [1, 2, 7, 1 << 20])
@pytest.mark.parametrize("raw", [FIXED, CHUNKED, UNTIL_CLOSE, INTERIM], ids=["fixed", "chunked", "until close", "1xx"])
def test_any_chunking_gives_the_same_response(raw: bytes, size: int) -> None:
    """Byte by byte or at once."""
    response, incoming = read(raw, size, end=raw is UNTIL_CLOSE)
    assert response is not None and bytes(response.body) == b"hello" and response.status == 200
    assert incoming.keep_alive is (raw is not UNTIL_CLOSE)


@pytest.mark.parametrize("size", [1, 7, 1 << 20])
def test_repeated_header_block_is_not_parsed_again(size: int) -> None:
    """The response is the same as the first time, also behind an interim response, and another block is parsed as
    usual."""
    first, incoming = read(FIXED)
    assert first is not None and incoming.known_head is not None
    for raw in (FIXED, INTERIM):
        again, after = read(raw, size, known=incoming.known_head)
        assert again is not None and (again.status, again.headers) == (first.status, first.headers)
        assert bytes(again.body) == b"hello" and after.keep_alive and after.known_head == incoming.known_head
    other, _ = read(FIXED.replace(b"200 OK", b"404 No"), size, known=incoming.known_head)
    assert other is not None and other.status == 404


@pytest.mark.parametrize("raw", [CHUNKED, UNTIL_CLOSE, EMPTY, FIXED.replace(b"A: 1", b"Connection: close")])
def test_only_header_blocks_with_a_length_are_cached(raw: bytes) -> None:
    """The others do not say where their response ends, or are the last of their connection."""
    _, incoming = read(raw, end=raw is UNTIL_CLOSE)
    assert incoming.known_head is None


def test_cached_header_block_gets_all_checks_of_a_new_one() -> None:
    """A response that is too short or too long is refused as at the first time."""
    _, incoming = read(FIXED)
    with pytest.raises(LinkError):
        read(FIXED[:-1], end=True, known=incoming.known_head)
    response, after = read(FIXED + b"x", known=incoming.known_head)
    assert response is not None and bytes(response.body) == b"hello" and not after.keep_alive


def test_header_names_are_lower_case_and_repeats_joined() -> None:
    """A repeated header has both values."""
    response, _ = read(FIXED)
    assert response is not None and response.headers["a"] == "1, 2"


def test_response_without_a_body_ends_with_its_head() -> None:
    """204, and a length of zero."""
    for raw in (EMPTY, b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n"):
        response, incoming = read(raw)
        assert response is not None and not len(response.body) and incoming.keep_alive


@pytest.mark.parametrize("raw", [FIXED, CHUNKED, EMPTY])
def test_bytes_after_a_response_make_the_connection_unusable(raw: bytes) -> None:
    """The response counts; nothing else may be read from that connection."""
    response, incoming = read(raw + FIXED)
    assert response is not None and bytes(response.body) in (b"hello", b"")
    assert not incoming.keep_alive
    assert response.headers.get("a") == ("1, 2" if raw is FIXED else None)


@pytest.mark.parametrize("raw", [FIXED, CHUNKED, INTERIM])
def test_every_prefix_of_a_response_is_incomplete(raw: bytes) -> None:
    """Cut at any byte: the connection was lost, and there is no answer."""
    for cut in range(len(raw)):
        response, incoming = read(raw[:cut])
        assert response is None
        with pytest.raises(LinkError):
            incoming.on_received(0)


@pytest.mark.parametrize("raw", [
    b"SSH-2.0-OpenSSH\r\n", b"\x00\xff" * 50, b"HTTP/3 200 OK\r\n\r\n",
    b"HTTP/1.1 200 OK\r\ncontent-length: -5\r\n\r\n", b"HTTP/1.1 200 OK\r\ncontent-length: 99999999999999\r\n\r\n",
    b"HTTP/1.1 200 OK\r\ncontent-length: 3\r\ncontent-length: 4\r\n\r\n",
    b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\ncontent-length: 3\r\n\r\n",
    b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n",
    b"HTTP/1.1 200 OK\r\nx: " + b"y" * 100_000,
    b"HTTP/1.1 101 Switching\r\nupgrade: h2c\r\nconnection: upgrade\r\n\r\n",
    f"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n{LIMITS.http_body_bytes + 1:x}\r\n".encode() + b"z" * 10,
])  # fmt: skip
def test_malformed_response_is_refused(raw: bytes) -> None:
    """As soon as it is seen, or at the connection's end; never an answer."""
    with pytest.raises((MalformedMessage, LinkError)):
        read(raw, end=True)


def test_endless_body_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a server that sends no length."""
    from dataclasses import replace

    from edgesplit.http1 import response

    monkeypatch.setattr(response, "LIMITS", replace(LIMITS, http_body_bytes=100))
    with pytest.raises(MalformedMessage):
        read(UNTIL_CLOSE + b"x" * 200)
