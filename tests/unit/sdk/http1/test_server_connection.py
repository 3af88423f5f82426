"""The server's side of an HTTP/1.1 connection, driven without a socket: bytes in, events out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import strategies as st

from edgesplit.http1.head import Refused
from edgesplit.http1.server_connection import (
    LINGER_S,
    SCRATCH_BYTES,
    Event,
    PeerClosed,
    ServerConnection,
    new_scratch,
    transfer_s,
)
from edgesplit.limits import LIMITS
from support.fuzzing import fuzzed, spoiled

POST = b"POST /a?b=c HTTP/1.1\r\nContent-Length: 5\r\n\r\nhello"
LARGE = b"POST /large HTTP/1.1\r\nContent-Length: 40000\r\n\r\n" + bytes(range(250)) * 160
GET = b"\r\nGET /b HTTP/1.1\r\n\r\n"
WAITING = b"POST /c HTTP/1.1\r\nContent-Length: 3\r\nExpect: 100-continue\r\n\r\nabc"
HEAD = b"HEAD /d HTTP/1.1\r\n\r\n"
LAST = b"POST /e HTTP/1.1\r\nContent-Length: 2\r\nConnection: close\r\n\r\nzz"
TOO_LARGE = b"POST /f HTTP/1.1\r\nContent-Length: 999999999999\r\n\r\n"
ENDLESS = b"GET /g HTTP/1.1\r\nX: " + b"x" * LIMITS.http_header_bytes
BLOCK = b"GET /h HTTP/1.1\r\nX: " + b"x" * LIMITS.http_header_bytes + b"\r\n\r\n"
CHUNKED = b"POST /i HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n"
EXPECTING = b"POST /j HTTP/1.1\r\nContent-Length: 1\r\nExpect: more\r\n\r\n."
MESSAGES = [POST, LARGE, GET, WAITING, HEAD, LAST, TOO_LARGE, ENDLESS, BLOCK, CHUNKED, EXPECTING]


class Driver:
    """Drives a connection as a server does, and writes down what comes out."""

    def __init__(self, *, prepares_bodies: bool = False) -> None:
        self.connection = ServerConnection(new_scratch(), 0.0, prepares_bodies=prepares_bodies)
        self.connection.start(0.0)
        self.out: list[Any] = []
        self.is_open = True

    def receive(self, data: bytes, now: float = 0.0) -> None:
        """`data` has arrived; as much as there is room for is received by each call."""
        self.advance(now)
        while data and self.is_open:
            count = 0
            for buffer in self.connection.buffers():
                piece = data[: len(buffer)]
                buffer[: len(piece)] = piece
                data, count = data[len(piece) :], count + len(piece)
            self.connection.on_received(count, now)
            self.advance(now)

    def advance(self, now: float) -> None:
        """Answer what is complete, until more data is needed."""
        try:
            while self.is_open and (event := self.connection.next_event()) is not Event.NEED_DATA:
                if event is Event.REQUEST:
                    self.answer(now)
        except Refused as refusal:
            self.out.append(refusal.status)
            self.is_open = False

    def answer(self, now: float) -> None:
        parsed = self.connection.parsed
        assert parsed is not None
        assert self.connection.next_event() is Event.NEED_DATA, "one request at a time"
        self.out.append((parsed.head.method, parsed.path, parsed.query, bytes(self.connection.body)))
        parts = self.connection.encode_response(200, {}, [b"ok"], now, keep_alive=True)
        self.out.append(len(parts))
        self.is_open = self.connection.keep_alive
        if self.is_open:
            self.connection.on_sent(now)


def events(pieces: Sequence[bytes], *, prepares_bodies: bool) -> list[Any]:
    driver = Driver(prepares_bodies=prepares_bodies)
    for piece in pieces:
        driver.receive(piece)
    return driver.out


def cut(data: bytes, at: Sequence[int]) -> list[bytes]:
    """`data` in pieces that end at these places."""
    ends = sorted(place % (len(data) + 1) for place in at)
    return [data[begin:end] for begin, end in zip([0, *ends], [*ends, len(data)], strict=True)]


@fuzzed(
    st.lists(st.sampled_from(MESSAGES), min_size=1, max_size=6),
    st.lists(st.integers(0, 1 << 20), max_size=12),
    st.booleans(),
)
def test_any_chunking_of_bytes_gives_the_same_events(
    messages: list[bytes], places: list[int], prepares_bodies: bool
) -> None:
    """Also where a client repeats its head, and bodies are received into prepared memory."""
    data = b"".join(messages)
    whole = events([data], prepares_bodies=False)
    assert events(cut(data, places), prepares_bodies=prepares_bodies) == whole
    if messages[0] is POST:
        assert whole[0] == ("POST", "/a", "b=c", b"hello")


@fuzzed(st.tuples(spoiled([POST * 2, GET + WAITING, LAST]), st.lists(st.integers(0, 1 << 20), max_size=6)))
def test_any_chunking_of_corrupt_bytes_gives_the_same_events(spoilt: tuple[bytes, list[int]]) -> None:
    """Requests or a refusal; nothing else is raised."""
    data, places = spoilt
    assert events(cut(data, places), prepares_bodies=True) == events([data], prepares_bodies=False)


@pytest.mark.parametrize("prepares_bodies", [False, True])
def test_single_bytes_give_the_same_events(prepares_bodies: bool) -> None:
    """Of repeated heads, a large body, empty lines, a body with 100-continue, and no body."""
    data = POST + POST + LARGE + GET + WAITING + HEAD + LAST
    bytewise = [data[at : at + 1] for at in range(len(data))]
    whole = events([data], prepares_bodies=False)
    assert events(bytewise, prepares_bodies=prepares_bodies) == whole
    assert [event[1] for event in whole if isinstance(event, tuple)] == ["/a", "/a", "/large", "/b", "/c", "/d", "/e"]


@pytest.mark.parametrize(
    ("message", "status"), [(TOO_LARGE, 413), (ENDLESS, 431), (BLOCK, 431), (CHUNKED, 411), (EXPECTING, 417)]
)
def test_unacceptable_request_is_refused_with_its_status(message: bytes, status: int) -> None:
    """Before anything of the body is received."""
    assert events([message], prepares_bodies=False) == [status]


def test_bytes_after_connection_close_are_ignored() -> None:
    """The client announced that it closes."""
    driver = Driver()
    driver.receive(LAST + GET)
    assert [event for event in driver.out if isinstance(event, tuple)] == [("POST", "/e", "", b"zz")]
    assert not driver.connection.keep_alive


def test_continue_is_sent_only_if_the_client_still_waits() -> None:
    """Not if its body came along with the head; for each request anew."""
    connection = ServerConnection(new_scratch(), 0.0)
    head, body = WAITING[:-3], WAITING[-3:]
    for pieces, told in (([head, body], True), ([head + body], False), ([head + b"a", b"bc"], True)):
        seen = []
        for piece in pieces:
            connection.buffers()[0][: len(piece)] = piece
            connection.on_received(len(piece), 0.0)
            while (event := connection.next_event()) not in (Event.NEED_DATA, Event.REQUEST):
                seen.append(event)
        assert (event, bytes(connection.body), Event.CONTINUE in seen) == (Event.REQUEST, b"abc", told)
        connection.encode_response(200, {}, (), 0.0, keep_alive=True)
        connection.on_sent(0.0)


def test_request_head_is_reported_before_memory_for_its_body() -> None:
    """So a server that has no room for it can refuse it."""
    connection = ServerConnection(new_scratch(), 0.0)
    connection.buffers()[0][: len(POST)] = POST
    connection.on_received(len(POST), 0.0)
    assert (connection.next_event(), bytes(connection.body)) == (Event.HEAD, b"")
    assert (connection.next_event(), bytes(connection.body)) == (Event.REQUEST, b"hello")


def test_repeated_head_is_not_parsed_again() -> None:
    """The same parsed head again, and its body received by one call into memory of its own."""
    driver = Driver(prepares_bodies=True)
    driver.receive(POST)
    first = driver.connection.parsed
    assert [len(buffer) for buffer in driver.connection.buffers()] == [len(POST) - 5, 5, SCRATCH_BYTES - len(POST) + 5]
    driver.receive(POST)
    assert driver.connection.parsed is first


def test_each_wait_has_a_deadline() -> None:
    """An idle connection is closed; a request that is too slow is refused with the reason; progress of a body at the
    minimum rate extends its deadline, up to that of the whole body."""
    driver = Driver()
    connection = driver.connection
    assert connection.deadline == LIMITS.idle_connection_s
    with pytest.raises(PeerClosed):
        connection.on_timeout()
    driver.receive(LARGE[:10], 1.0)
    driver.receive(LARGE[10:20], 2.0)
    assert connection.deadline == 1.0 + LIMITS.handshake_s
    with pytest.raises(Refused, match="header block") as refused:
        connection.on_timeout()
    assert refused.value.status == 408
    driver.receive(LARGE[20:100], 3.0)
    assert connection.deadline == 3.0 + LIMITS.handshake_s
    driver.receive(LARGE[100:200], 4.0)
    assert connection.deadline == 3.0 + LIMITS.handshake_s, "too few bytes for an extension"
    late = 3.0 + transfer_s(40_000) - 0.1
    driver.receive(LARGE[200:20_000], late)
    assert connection.deadline == 3.0 + transfer_s(40_000)
    with pytest.raises(Refused, match="of 40000 bytes") as refused:
        connection.on_timeout()
    assert refused.value.status == 408
    driver.receive(LARGE[20_000:] + GET[:5], late)
    assert connection.deadline == late + LIMITS.handshake_s, "bytes of the next request are here"


@pytest.mark.parametrize("prepares_bodies", [False, True])
@pytest.mark.parametrize("blank", [b"\r\n", b"\r", b"\r\n\r\n\r"])
def test_blank_lines_kept_an_idle_connection_open_for_ever(blank: bytes, prepares_bodies: bool) -> None:
    """Empty lines before a request are ignored, and extend no deadline, before the first request and after one."""
    driver = Driver(prepares_bodies=prepares_bodies)
    for requests in range(2):
        began = 1_000.0 * requests
        if requests:
            driver.receive(POST, began)
        idle = began + LIMITS.idle_connection_s
        assert driver.connection.deadline == idle
        driver.receive(blank, began + 8.0)
        assert driver.connection.deadline == idle
        with pytest.raises(PeerClosed):
            driver.connection.on_timeout()
        driver.receive(b"\n" if blank.endswith(b"\r") else b"", began + 9.0)
        assert driver.connection.deadline == idle
    driver.receive(b"\r\n" + POST[:4], 1_010.0)
    assert driver.connection.deadline == 1_010.0 + LIMITS.handshake_s
    driver.receive(POST[4:], 1_011.0)
    assert [event[1] for event in driver.out if isinstance(event, tuple)] == ["/a", "/a"]


def test_a_large_body_that_came_fast_and_then_dripped_was_held_for_hours() -> None:
    """However much of it is here: what is missing comes at the minimum rate of large bodies, or the peer is refused."""
    length = LIMITS.http_body_bytes
    driver = Driver()
    driver.receive(b"POST / HTTP/1.1\r\nContent-Length: %d\r\n\r\n" % length)
    connection = driver.connection
    size = length - 1_000_000
    connection.on_received(size, 5.0)
    assert connection.deadline == 5.0 + LIMITS.handshake_s
    step = int(LIMITS.http_large_bytes_per_s * LIMITS.handshake_s)
    connection.on_received(step - 1, 14.0)
    assert connection.deadline == 5.0 + LIMITS.handshake_s, "a byte too few"
    with pytest.raises(Refused, match="too slowly") as refused:
        connection.on_timeout()
    assert refused.value.status == 408
    connection.on_received(1, 14.5)
    assert connection.deadline == 14.5 + LIMITS.handshake_s


def test_time_for_a_body_follows_its_length() -> None:
    """A small body may come at 1 kB/s; the largest has less than eight hours, where it had three days."""
    assert transfer_s(10_000) == LIMITS.handshake_s + 10.0
    assert transfer_s(LIMITS.http_body_bytes) < 8 * 3600


def test_refused_peer_is_read_from_for_a_bounded_time() -> None:
    """So that it reads the refusal; bounded in bytes too."""
    driver = Driver()
    driver.receive(CHUNKED)
    connection = driver.connection
    parts = connection.encode_refusal(411, {}, [b"reason"], 5.0)
    assert b"".join(parts).startswith(b"HTTP/1.1 411 ")
    assert connection.deadline == 5.0 + LINGER_S
    with pytest.raises(PeerClosed):
        while connection.next_event() is Event.NEED_DATA:
            connection.on_received(len(connection.buffers()[0]), 5.0)
    with pytest.raises(PeerClosed):
        connection.on_received(0, 5.0)
