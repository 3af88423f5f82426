"""An HTTP response read from bytes: whole, in any pieces, or refused."""

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
def test_a_response_is_the_same_in_whatever_pieces_it_comes(raw: bytes, size: int) -> None:
    """Byte by byte or at once."""
    response, incoming = read(raw, size, end=raw is UNTIL_CLOSE)
    assert response is not None and bytes(response.body) == b"hello" and response.status == 200
    assert incoming.keep_alive is (raw is not UNTIL_CLOSE)


@pytest.mark.parametrize("size", [1, 7, 1 << 20])
def test_a_header_block_that_came_before_is_not_read_again(size: int) -> None:
    """The reply is the same as the first time, also behind an interim response, and another block counts as ever."""
    first, incoming = read(FIXED)
    assert first is not None and incoming.known_head is not None
    for raw in (FIXED, INTERIM):
        again, after = read(raw, size, known=incoming.known_head)
        assert again is not None and (again.status, again.headers) == (first.status, first.headers)
        assert bytes(again.body) == b"hello" and after.keep_alive and after.known_head == incoming.known_head
    other, _ = read(FIXED.replace(b"200 OK", b"404 No"), size, known=incoming.known_head)
    assert other is not None and other.status == 404


@pytest.mark.parametrize("raw", [CHUNKED, UNTIL_CLOSE, EMPTY, FIXED.replace(b"A: 1", b"Connection: close")])
def test_only_a_block_that_tells_a_length_is_remembered(raw: bytes) -> None:
    """The others do not say by themselves where their response ends, or are the last of their connection."""
    _, incoming = read(raw, end=raw is UNTIL_CLOSE)
    assert incoming.known_head is None


def test_a_known_response_that_is_cut_short_or_too_long_is_no_other() -> None:
    """What holds of a response read for the first time holds of the next."""
    _, incoming = read(FIXED)
    with pytest.raises(LinkError):
        read(FIXED[:-1], end=True, known=incoming.known_head)
    response, after = read(FIXED + b"x", known=incoming.known_head)
    assert response is not None and bytes(response.body) == b"hello" and not after.keep_alive


def test_headers_are_lower_case_and_joined() -> None:
    """One that is there twice has both values."""
    response, _ = read(FIXED)
    assert response is not None and response.headers["a"] == "1, 2"


def test_a_response_without_a_body_is_whole_at_its_head() -> None:
    """204, and a length of zero."""
    for raw in (EMPTY, b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n"):
        response, incoming = read(raw)
        assert response is not None and not len(response.body) and incoming.keep_alive


@pytest.mark.parametrize("raw", [FIXED, CHUNKED, EMPTY])
def test_what_follows_a_response_spoils_the_connection(raw: bytes) -> None:
    """The reply counts; the bytes behind it are nobody's, so nothing else may be read from there."""
    response, incoming = read(raw + FIXED)
    assert response is not None and bytes(response.body) in (b"hello", b"")
    assert not incoming.keep_alive
    assert response.headers.get("a") == ("1, 2" if raw is FIXED else None)


@pytest.mark.parametrize("raw", [FIXED, CHUNKED, INTERIM])
def test_every_prefix_of_a_response_is_none(raw: bytes) -> None:
    """Cut at any byte: the connection was lost, nothing was answered."""
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
def test_what_is_no_response_is_refused(raw: bytes) -> None:
    """As soon as it is seen, or at the connection's end; never an answer."""
    with pytest.raises((MalformedMessage, LinkError)):
        read(raw, end=True)


def test_an_endless_body_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a server that tells no length."""
    from dataclasses import replace

    from edgesplit.http1 import response

    monkeypatch.setattr(response, "LIMITS", replace(LIMITS, http_body_bytes=100))
    with pytest.raises(MalformedMessage):
        read(UNTIL_CLOSE + b"x" * 200)
