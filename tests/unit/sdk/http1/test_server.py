"""The HTTP/1.1 server: complete requests only, bounded in every way, and available whatever arrives."""

from __future__ import annotations

import contextlib
import dataclasses
import http.client
import logging
import random
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from pathlib import Path

import msgspec
import pytest

from edgesplit.errors import Busy, DeadlineExceeded, InferenceFailed, MalformedMessage, NotFound, UsageError
from edgesplit.http1 import head as http_head
from edgesplit.http1 import server as http1
from edgesplit.http1 import server_connection as protocol
from edgesplit.http1.server import Request, Response, Server, json_response
from edgesplit.limits import LIMITS
from edgesplit_controller.pki.authority import Authority
from edgesplit_offload.frontend import server as front
from support.agent_engine import eventually
from support.http_frontends import LoopServer

PATIENCE_S = 20.0
AnyServer = Server | LoopServer
Kind = Callable[..., AnyServer]


def mirror(request: Request) -> Response:
    """Tells what arrived; some paths fail."""
    if request.path == "/boom":
        raise RuntimeError("a secret")
    if request.path == "/blob":
        return Response(200, {}, [request.body, memoryview(b"tail")])
    return json_response(200, {"method": request.method, "path": request.path, "query": request.query,
                               "size": len(request.body), "headers": dict(request.headers)})  # fmt: skip


@pytest.fixture(params=[Server, LoopServer], ids=["threads", "loop"])
def kind(request: pytest.FixtureRequest) -> Kind:
    """Both servers keep the same promises."""
    found: Kind = request.param
    return found


@pytest.fixture
def server(kind: Kind) -> Iterator[AnyServer]:
    running = kind(mirror)
    running.start()
    yield running
    running.stop(0.5)


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """The server's patience, short enough for a test."""
    quick = dataclasses.replace(LIMITS, handshake_s=0.15, idle_connection_s=0.3, http_body_bytes=100_000)
    for module in (http1, http_head, protocol, front):
        monkeypatch.setattr(module, "LIMITS", quick)
    monkeypatch.setattr(protocol, "LINGER_S", 0.2)


def raw(server: AnyServer, *pieces: bytes, finish: bool = False) -> bytes:
    """All that comes back for these bytes until the server closes the connection."""
    with socket.create_connection(("127.0.0.1", server.port), timeout=PATIENCE_S) as sock:
        for piece in pieces:
            sock.sendall(piece)
        if finish:
            sock.shutdown(socket.SHUT_WR)
        parts = []
        while part := sock.recv(65_536):
            parts.append(part)
        return b"".join(parts)


def statuses(answer: bytes) -> list[int]:
    """Of every response in `answer`, one after the other."""
    found = []
    while answer:
        head, _, rest = answer.partition(b"\r\n\r\n")
        found.append(int(head.split()[1]))
        lengths = [line.split(b":")[1] for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:")]
        answer = rest[int(lengths[0]) :] if lengths else rest
    return found


def test_request_is_decoded(server: AnyServer) -> None:
    """Path decoded, query apart, header names in lower case, repeated headers joined."""
    text = b"GET http://host/v2/m%C3%B6del?x=%20 HTTP/1.1\r\nHost: h\r\nX-A: 1\r\nx-a:  2 \r\nConnection: close\r\n\r\n"
    body = raw(server, text).partition(b"\r\n\r\n")[2]
    seen = msgspec.json.decode(body)
    assert (seen["method"], seen["path"], seen["query"]) == ("GET", "/v2/mödel", "x=%20")
    assert seen["headers"]["x-a"] == "1, 2"


def test_keep_alive_connection_serves_large_bodies(server: AnyServer) -> None:
    """Bodies that do not fit a buffer, sent back from the receiving buffer itself."""
    with closing(http.client.HTTPConnection("127.0.0.1", server.port, timeout=PATIENCE_S)) as connection:
        for size in (0, 1, 70_000, 3_000_000):
            data = random.randbytes(size)
            connection.request("POST", "/blob", data)
            response = connection.getresponse()
            assert (response.status, response.read() == data + b"tail") == (200, True)


def test_cached_head_matches_only_an_equal_head(server: AnyServer) -> None:
    """The same head with other bytes behind it, another head of equal length, a shorter and a longer one, wherever the
    bytes are cut, and with the next request behind."""

    def request(path: str, body: bytes) -> bytes:
        return b"POST %s HTTP/1.1\r\nContent-Length: %d\r\n\r\n" % (path.encode(), len(body)) + body

    same = request("/blob", b"abcd" * 30)
    others = [same[:-1] + b"!", request("/path", b"abcd" * 30), request("/blob", b"ab"), request("/blob/of/more", b"")]
    with socket.create_connection(("127.0.0.1", server.port), timeout=PATIENCE_S) as sock:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        answers = sock.makefile("rb")

        def body() -> bytes:
            head = iter(answers.readline, b"\r\n")
            (length,) = (int(line.split(b":")[1]) for line in head if line.lower().startswith(b"content-length"))
            return answers.read(length)

        sock.sendall(same)
        assert body() == b"abcd" * 30 + b"tail"
        for other in others:
            for cut in (0, 1, 10, same.index(b"\r\n\r\n") + 4, len(other) - 1):
                for stream in (other, same + other + same, other + other):
                    sock.sendall(stream[:cut])
                    sock.sendall(stream[cut:])
                wanted = [other, same, other, same, other, other]
                for piece in wanted:
                    given = body()
                    sent = piece.partition(b"\r\n\r\n")[2]
                    if b"/blob " in piece:
                        assert given == sent + b"tail"
                    else:
                        assert msgspec.json.decode(given)["size"] == len(sent)


def test_pipelined_requests_are_answered_in_order(server: AnyServer) -> None:
    """What follows a body is the next request, however the bytes were cut into packets."""
    one = b"POST /%d HTTP/1.1\r\nContent-Length: 5\r\n\r\nhello"
    last = b"GET /last HTTP/1.1\r\nConnection: close\r\n\r\n"
    stream = b"".join(one % n for n in range(5)) + b"\r\n\r\n" + last
    for pieces in ([stream], [stream[:30], stream[30:]], [stream[n : n + 7] for n in range(0, len(stream), 7)]):
        answer = raw(server, *pieces)
        assert statuses(answer) == [200] * 6
        order = [msgspec.json.decode(part[part.index(b"{") : part.rindex(b"}") + 1])["path"]
                 for part in answer.split(b"HTTP/1.1 ")[1:]]  # fmt: skip
        assert order == ["/0", "/1", "/2", "/3", "/4", "/last"]


@pytest.mark.parametrize(
    ("head", "status"),
    [
        (b"POST / HTTP/1.1\r\nContent-Length: 5\r\nContent-Length: 6", 400),
        (b"POST / HTTP/1.1\r\nContent-Length: 5\r\nContent-Length: 5", 400),
        (b"POST / HTTP/1.1\r\nContent-Length: 5\r\nTransfer-Encoding: chunked", 400),
        (b"POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\nContent-Length: 5", 400),
        (b"POST / HTTP/1.1\r\nTransfer-Encoding: identity\r\nContent-Length: 5", 400),
        (b"POST / HTTP/1.1\r\nTransfer-Encoding: chunked", 411),
        (b"POST / HTTP/1.1\r\nContent-Length: 5, 5", 400),
        (b"POST / HTTP/1.1\r\nContent-Length: -5", 400),
        (b"POST / HTTP/1.1\r\nContent-Length: +5", 400),
        (b"POST / HTTP/1.1\r\nContent-Length: 0x5", 400),
        (b"POST / HTTP/1.1\r\nContent-Length: 99999999999999999999999", 400),
        (b"POST / HTTP/1.1\r\nContent-Length : 5", 400),
        (b"POST / HTTP/1.1\r\nX: a\r\n b", 400),
        (b"POST / HTTP/1.1\r\nX\0: a", 400),
        (b"POST / HTTP/1.1\r\nContent-Length: %d" % (LIMITS.http_body_bytes + 1), 413),
        (b"POST / HTTP/1.1\r\nContent-Length: 5\r\nExpect: miracles", 417),
        (b"GET /%ff HTTP/1.1", 400),
        (b"GET * HTTP/1.1", 400),
        (b"GET / HTTP/2.0", 400),
        (b"PRI * HTTP/2.0", 400),
        (b"GET / SMTP/1.1", 400),
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", 400),
        (b"GET / HTTP/1.1\r\nX: " + b"a" * 40_000, 431),
    ],
)
def test_ambiguous_request_is_refused_and_the_connection_closed(server: AnyServer, head: bytes, status: int) -> None:
    """Two readings of a request's length are request smuggling: refused, and nothing behind it is read."""
    answer = raw(server, head + b"\r\n\r\n" + b"GET /smuggled HTTP/1.1\r\n\r\n", finish=True)
    assert statuses(answer) in ([status], [505] if b"2.0" in head else [status])
    assert b"smuggled" not in answer
    assert b'{"error":' in answer
    assert statuses(raw(server, b"GET / HTTP/1.1\r\nConnection: close\r\n\r\n")) == [200]


def test_header_block_is_bounded(server: AnyServer) -> None:
    """A block that never ends is refused once it is too long, not kept."""
    answer = raw(server, b"GET / HTTP/1.1\r\n" + b"X: a\r\n" * 10_000, finish=True)
    assert statuses(answer) == [431]


def test_body_over_the_limit_is_refused_before_it_is_sent(server: AnyServer) -> None:
    """A client that sent `Expect: 100-continue` gets the refusal instead."""
    head = b"POST / HTTP/1.1\r\nContent-Length: %d\r\nExpect: 100-continue\r\n\r\n" % 10**12
    assert statuses(raw(server, head)) == [413]


def test_expect_100_continue_is_answered(server: AnyServer) -> None:
    """Before the body is awaited, and the request goes on."""
    with socket.create_connection(("127.0.0.1", server.port), timeout=PATIENCE_S) as sock:
        sock.sendall(b"POST / HTTP/1.1\r\nContent-Length: 3\r\nExpect: 100-continue\r\nConnection: close\r\n\r\n")
        assert sock.recv(1_000) == b"HTTP/1.1 100 Continue\r\n\r\n"
        sock.sendall(b"abc")
        assert b'"size":3' in b"".join(iter(lambda: sock.recv(1_000), b""))


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize(
    ("start", "answer"),
    [(b"", []), (b"GET / HT", [408]), (b"POST / HTTP/1.1\r\nContent-Length: 9\r\n\r\nabc", [408])],
)
def test_idle_and_slow_peers_time_out(server: AnyServer, start: bytes, answer: list[int]) -> None:
    """An idle connection is closed silently; half a header block or half a body is refused after a while."""
    assert statuses(raw(server, start)) == answer


@pytest.mark.usefixtures("impatient")
def test_slow_header_block_is_refused(server: AnyServer) -> None:
    """The time limit covers the whole block: a byte now and then does not extend it."""
    with socket.create_connection(("127.0.0.1", server.port), timeout=PATIENCE_S) as sock:
        sock.sendall(b"GET / HTTP/1.1\r\n")
        sock.settimeout(0.02)
        answer = b""
        for _ in range(500):
            try:
                sock.sendall(b"X: a\r\n")
                answer = sock.recv(1_000)
                break
            except TimeoutError:
                continue
        assert answer.startswith(b"HTTP/1.1 408")


def test_handler_exception_is_500_without_its_text(server: AnyServer, caplog: pytest.LogCaptureFixture) -> None:
    """The reason is in the log, not in the response; the connection goes on."""
    with closing(http.client.HTTPConnection("127.0.0.1", server.port, timeout=PATIENCE_S)) as connection:
        with caplog.at_level(logging.ERROR, logger="edgesplit.http1.server"):
            connection.request("POST", "/boom", b"x")
            response = connection.getresponse()
            body = msgspec.json.decode(response.read())
        assert response.status == 500
        assert body == {"error": "internal error: RuntimeError"}
        assert "a secret" in caplog.text
        connection.request("GET", "/after")
        assert connection.getresponse().status == 200


@pytest.mark.parametrize(
    ("error", "status"),
    [(NotFound("n"), 404), (UsageError("u"), 400), (MalformedMessage("m"), 400), (Busy("b"), 503),
     (DeadlineExceeded("d"), 504), (InferenceFailed("i"), 500)],
)  # fmt: skip
def test_edge_errors_map_to_status_codes(kind: Kind, error: Exception, status: int) -> None:
    """The status says who must act, the text why; Busy says when to retry."""

    def fail(_: Request) -> Response:
        raise error

    running = kind(fail)
    running.start()
    answer = raw(running, b"GET / HTTP/1.1\r\nConnection: close\r\n\r\n")
    running.stop()
    assert statuses(answer) == [status]
    assert b'{"error":"%s"}' % str(error).encode() in answer
    assert (b"retry-after" in answer) == (status == 503)


def test_head_and_http10_are_supported(server: AnyServer) -> None:
    """HEAD has no body; HTTP/1.0 closes unless asked to keep."""
    answer = raw(server, b"HEAD / HTTP/1.1\r\nConnection: close\r\n\r\n")
    assert answer.endswith(b"\r\n\r\n")
    assert b"content-length: 0" not in answer
    assert statuses(raw(server, b"GET / HTTP/1.0\r\n\r\n")) == [200]


def test_handler_sees_that_its_client_disconnected(kind: Kind) -> None:
    """So that useless work can be skipped."""
    arrived, seen = threading.Event(), threading.Event()
    gone: list[Callable[[], bool]] = []

    def wait(request: Request) -> Response:
        assert not request.is_closed()
        gone.append(request.is_closed)
        arrived.set()
        while not request.is_closed():
            threading.Event().wait(0.005)
        seen.set()
        return Response()

    running = kind(wait)
    running.start()
    with socket.create_connection(("127.0.0.1", running.port)) as sock:
        sock.sendall(b"GET / HTTP/1.1\r\n\r\n")
        assert arrived.wait(PATIENCE_S)
    assert seen.wait(PATIENCE_S)
    running.stop()


def test_stop_lets_running_requests_finish(kind: Kind) -> None:
    """The running request is answered, as its connection's last; idle connections end; new ones are refused."""
    running_now, finish = threading.Event(), threading.Event()

    def slow(request: Request) -> Response:
        if request.path == "/slow":
            running_now.set()
            assert finish.wait(PATIENCE_S)
        return Response(200, {}, [b"done"])

    server = kind(slow)
    server.start()
    idle = http.client.HTTPConnection("127.0.0.1", server.port, timeout=PATIENCE_S)
    idle.request("GET", "/")
    assert idle.getresponse().read() == b"done"
    busy = http.client.HTTPConnection("127.0.0.1", server.port, timeout=PATIENCE_S)
    busy.request("GET", "/slow")
    assert running_now.wait(PATIENCE_S)
    stopper = threading.Thread(target=server.stop, args=(PATIENCE_S,))
    stopper.start()
    while not server.is_stopping:
        threading.Event().wait(0.001)
    finish.set()
    response = busy.getresponse()
    assert (response.read(), response.getheader("connection")) == (b"done", "close")
    stopper.join(PATIENCE_S)
    assert idle.sock.recv(1) == b""
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", server.port))
    idle.close()
    busy.close()


def opened(server: AnyServer) -> socket.socket:
    return socket.create_connection(("127.0.0.1", server.port), timeout=PATIENCE_S)


def test_idle_connections_no_longer_lock_others_out(kind: Kind) -> None:
    """When the connections are used up, the one that has been silent longest is closed for a new one; the others
    stay."""
    server = kind(lambda _: Response(200, {}, [b"in"]), max_connections=4)
    server.start()
    text = b"GET / HTTP/1.1\r\n\r\n"
    inside = []
    for _ in range(5):
        inside.append(opened(server))
        inside[-1].sendall(text)
        assert inside[-1].recv(1_000).startswith(b"HTTP/1.1 200")
    share = 2
    for gone in inside[:-share]:
        assert gone.recv(1_000) == b""
    for sock in inside[-share:]:
        sock.sendall(text)
        assert sock.recv(1_000).startswith(b"HTTP/1.1 200")
    for sock in inside:
        sock.close()
    server.stop()


def test_busy_connections_are_bounded(kind: Kind) -> None:
    """One whose request is being answered does not give way: a client with its share of those gets 503 at once, and
    there is room again when one was answered."""
    arrived, leave = threading.Semaphore(0), threading.Event()

    def wait(_: Request) -> Response:
        arrived.release()
        assert leave.wait(PATIENCE_S)
        return Response(200, {}, [b"in"])

    server = kind(wait, max_connections=4)
    server.start()
    inside = [opened(server) for _ in range(2)]
    for sock in inside:
        sock.sendall(b"GET / HTTP/1.1\r\n\r\n")
        assert arrived.acquire(timeout=PATIENCE_S)
    assert statuses(raw(server)) == [503]
    leave.set()
    for sock in inside:
        assert sock.recv(1_000).startswith(b"HTTP/1.1 200")
    assert statuses(raw(server, b"GET / HTTP/1.1\r\nConnection: close\r\n\r\n")) == [200]
    for sock in inside:
        sock.close()
    server.stop()


def test_declared_lengths_stopped_the_server_for_everybody(server: AnyServer) -> None:
    """Bodies count as they arrive: sixteen sockets that declare 256 MiB each, and send a byte now and then, leave room
    for everybody else, and are as much work to keep open as they are."""
    with contextlib.ExitStack() as stack:
        held = [stack.enter_context(opened(server)) for _ in range(16)]
        for sock in held:
            sock.sendall(b"POST /x HTTP/1.1\r\nContent-Length: %d\r\n\r\n." % LIMITS.http_body_bytes)
        for _ in range(3):
            for sock in held:
                sock.sendall(b"x")
            answer = raw(server, b"POST /blob HTTP/1.1\r\nContent-Length: 3000000\r\nConnection: close\r\n\r\n",
                         bytes(3_000_000))  # fmt: skip
            assert statuses(answer) == [200]


def test_bytes_that_arrived_are_bounded_by_client(kind: Kind, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beyond its share a client gets 429, in the middle of a body too; when its answers are out, there is room."""
    tight = dataclasses.replace(LIMITS, http_body_share_bytes=5_000_000, http_body_step_bytes=1_000_000)
    for name in ("edgesplit.http1.admission", "edgesplit.http1.server", "edgesplit_offload.frontend.connection"):
        monkeypatch.setattr(f"{name}.LIMITS", tight)
    server = kind(mirror)
    server.start()
    head = b"POST /blob HTTP/1.1\r\nContent-Length: 4000000\r\nConnection: close\r\n\r\n"
    with opened(server) as first:
        first.sendall(head + bytes(3_500_000))
        eventually("it has arrived", lambda: server._admission._body_bytes == 4_000_000)
        refused = raw(server, head + bytes(2_500_000))
        assert statuses(refused) == [429]
        assert b"retry-after" in refused and b"4000000 bytes here" in refused
        first.sendall(bytes(500_000))
        assert first.recv(100).startswith(b"HTTP/1.1 200")
    eventually("there is room", lambda: server._admission._body_bytes == 0)
    assert statuses(raw(server, head, bytes(4_000_000))) == [200]
    server.stop()


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("drip", [b"\r\n", b"x"], ids=["blank lines", "a body"])
def test_a_byte_now_and_then_kept_a_connection_open(server: AnyServer, drip: bytes) -> None:
    """Blank lines before a request are no activity, and a body comes at the minimum rate."""
    with opened(server) as sock:
        if drip == b"x":
            sock.sendall(b"POST / HTTP/1.1\r\nContent-Length: 99999\r\n\r\n")
        sock.settimeout(0.02)
        answer = None
        for _ in range(1_000):
            try:
                sock.sendall(drip)
                answer = sock.recv(1_000)
                break
            except TimeoutError:
                continue
            except ConnectionError:
                answer = b""
                break
        assert answer is not None
        assert statuses(answer) == ([408] if drip == b"x" else [])


def test_taken_port_is_a_usage_error(kind: Kind, server: AnyServer) -> None:
    """UsageError with host, port and the system's reason; likewise for a host that is not this machine's."""
    with pytest.raises(UsageError, match=rf"127\.0\.0\.1 port {server.port}: .*in use"):
        kind(mirror, port=server.port).start()
    with pytest.raises(UsageError, match="cannot listen"):
        kind(mirror, host="192.0.2.1").start()


def test_half_closed_connection_is_answered_and_closed(server: AnyServer) -> None:
    """The end of stream arrives with the last request, in one packet: it is seen, and the connection closes at once."""
    assert statuses(raw(server, b"POST / HTTP/1.1\r\nContent-Length: 2\r\n\r\nok", finish=True)) == [200]


def test_random_bytes_do_not_stop_the_server(server: AnyServer) -> None:
    """Whatever arrives, the next client is served. Prints its seed."""
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    rng = random.Random(seed)
    good = b"POST /x HTTP/1.1\r\nHost: a\r\nContent-Length: 4\r\n\r\nbody"
    for _ in range(60):
        damaged = bytearray(good)
        for _ in range(rng.randint(1, 5)):
            at = rng.randrange(len(damaged))
            damaged[at : at + rng.randint(0, 3)] = rng.randbytes(rng.randint(0, 3))
        with suppress(ConnectionError):
            raw(server, bytes(damaged), finish=True)
    assert statuses(raw(server, b"GET / HTTP/1.1\r\nConnection: close\r\n\r\n")) == [200]


def test_line_breaks_in_response_headers_are_not_sent(kind: Kind) -> None:
    """A header made from foreign text cannot become two."""
    server = kind(lambda _: Response(200, {"x": "a\r\nset-cookie: b"}))
    server.start()
    answer = raw(server, b"GET / HTTP/1.1\r\nConnection: close\r\n\r\n")
    assert b"set-cookie" not in answer
    eventually("it does not count as running, or a stop would wait for it", lambda: server._running == 0)
    server.stop()


def test_handler_gets_the_verified_clients_name(kind: Kind, tmp_path: Path) -> None:
    """The certificate's common name, in each request of the connection; a peer without TLS is refused."""
    authority = Authority(tmp_path)
    context = authority.issue_server("offload", ["127.0.0.1"]).server_context()
    server = kind(lambda request: json_response(200, request.peer), tls=context)
    server.start()
    with suppress(OSError):  # it may be left before it has said all
        assert raw(server, b"GET / HTTP/1.1\r\n\r\n", finish=True)[:4] != b"HTTP"
    device = authority.issue_client("camera-1").client_context()
    connection = http.client.HTTPSConnection("127.0.0.1", server.port, timeout=PATIENCE_S, context=device)
    with closing(connection):
        for _ in range(2):
            connection.request("POST", "/", bytes(300_000))
            assert connection.getresponse().read() == b'"camera-1"'
    server.stop(1.0)
