"""Links as text, and the shaped link: bytes unchanged, in order, half-closed and reset as TCP would."""

from __future__ import annotations

import random
import socket
import threading
from collections.abc import Iterator
from time import perf_counter

import pytest

from edgesplit.errors import UsageError
from edgesplit.link_emulation import ShapedLink
from edgesplit.links import (
    parse_host_and_port,
    parse_link,
    parse_metrics_address,
)
from edgesplit.plan import Link

FAST = Link(up_bytes_per_s=50e6, down_bytes_per_s=50e6, rtt_s=0.002)
STILL = Link(up_bytes_per_s=0, down_bytes_per_s=0, rtt_s=0.0)
PATIENCE_S = 20.0


class Echo:
    """Sends back what it gets, byte for byte, until the other side has finished; then finishes too."""

    def __init__(self) -> None:
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.port = self.listener.getsockname()[1]
        self.resets = threading.Semaphore(0)
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                sock, _ = self.listener.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(sock,), daemon=True).start()

    def _serve(self, sock: socket.socket) -> None:
        with sock:
            try:
                while data := sock.recv(65_536):
                    sock.sendall(data)
            except OSError:
                self.resets.release()


@pytest.fixture
def echo() -> Iterator[Echo]:
    server = Echo()
    yield server
    server.listener.close()


def connect(link: ShapedLink) -> socket.socket:
    return socket.create_connection(("127.0.0.1", link.port), timeout=PATIENCE_S)


def through(link: ShapedLink, data: bytes) -> bytes:
    """Send `data`, close that half, and read until the other side has finished."""
    with connect(link) as sock:
        sender = threading.Thread(target=lambda: (sock.sendall(data), sock.shutdown(socket.SHUT_WR)))
        sender.start()
        parts = []
        while part := sock.recv(65_536):
            parts.append(part)
        sender.join()
        return b"".join(parts)


@pytest.mark.parametrize(
    ("text", "up", "down", "rtt_s"),
    [
        ("8mbit/40ms", 1e6, 1e6, 0.04),
        ("8mbit/20mbit/40ms", 1e6, 2.5e6, 0.04),
        (" 64kbit/1.5s ", 8e3, 8e3, 1.5),
        ("1gbit/2Gbit/500us", 125e6, 250e6, 0.0005),
        ("0.5Mbit/s", None, None, None),
        ("lte", 5.85e6 / 8, 13.76e6 / 8, 0.06),
        ("LTE/10", 0.585e6 / 8, 1.376e6 / 8, 0.06),
    ],
)
def test_link_spellings(text: str, up: float | None, down: float | None, rtt_s: float | None) -> None:
    """By figures, by name, and by a part of a name's rates. `/s` alone is no round trip."""
    if up is None:
        with pytest.raises(UsageError):
            parse_link(text)
        return
    link = parse_link(text)
    assert (link.up_bytes_per_s, link.down_bytes_per_s, link.rtt_s) == pytest.approx((up, down, rtt_s))


@pytest.mark.parametrize(
    "text", ["", "fast", "8mbit", "8mbit/40", "0mbit/4ms", "-1mbit/4ms", "8mbit/4ms/x", "a/b/c/d", "lte/0", "lte/x",
             "lte/1/2", "8mb/4ms", "8mbit/2h", "9e9mbit/1ms"]
)  # fmt: skip
def test_malformed_link_is_refused_with_an_example(text: str) -> None:
    """The error contains a valid spelling."""
    with pytest.raises(UsageError, match="8mbit/40ms"):
        parse_link(text)


def test_bytes_arrive_unchanged_and_in_order(echo: Echo) -> None:
    """Several connections at once through one link, both ways, each to its end of file."""
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    sent = [random.Random(seed + n).randbytes(300_000) for n in range(4)]
    got: dict[int, bytes] = {}
    with ShapedLink("127.0.0.1", echo.port, FAST) as link:
        threads = [
            threading.Thread(target=lambda n=n: got.setdefault(n, through(link, sent[n]))) for n in range(len(sent))
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(PATIENCE_S)
        assert [got.get(n) == data for n, data in enumerate(sent)] == [True] * len(sent)
        assert link.up.bytes == link.down.bytes == 4 * 300_000


def test_changing_rates_and_delays_keep_the_order(echo: Echo) -> None:
    """A shorter delay never lets later bytes overtake earlier ones."""
    data = random.Random(5).randbytes(400_000)
    with ShapedLink("127.0.0.1", echo.port, FAST) as link:
        done = threading.Event()

        def change() -> None:
            shapes = [parse_link(text) for text in ("20mbit/30ms", "100mbit/0ms", "50mbit/10ms", "400mbit/1ms")]
            while not done.wait(0.005):
                shapes.append(shapes.pop(0))
                link.set_link(shapes[0])

        changer = threading.Thread(target=change)
        changer.start()
        try:
            assert through(link, data) == data
        finally:
            done.set()
            changer.join()


def test_transfer_is_never_faster_than_the_link(echo: Echo) -> None:
    """However slow the machine: rate both ways, handshake and round trip."""
    shape = parse_link("8mbit/16mbit/20ms")
    with ShapedLink("127.0.0.1", echo.port, shape) as link:
        began = perf_counter()
        assert len(through(link, bytes(100_000))) == 100_000
        assert perf_counter() - began >= 0.99 * (100_000 / shape.up_bytes_per_s) + 2 * shape.rtt_s


def test_link_at_rate_zero_holds_its_bytes(echo: Echo) -> None:
    """`set_link` applies to bytes already in flight."""
    with ShapedLink("127.0.0.1", echo.port, STILL) as link, connect(link) as sock:
        sock.sendall(b"held")
        sock.settimeout(0.15)
        with pytest.raises(TimeoutError):
            sock.recv(1)
        link.set_link(FAST)
        sock.settimeout(PATIENCE_S)
        assert sock.recv(4) == b"held"


def test_cut_resets_both_sides_and_restore_accepts_new_connections(echo: Echo) -> None:
    """A reset, not an orderly close: bytes were lost and both sides must know. New connections are reset too until
    restored."""
    with ShapedLink("127.0.0.1", echo.port, FAST) as link:
        sock = connect(link)
        sock.sendall(b"x")
        assert sock.recv(1) == b"x"
        link.cut()
        with pytest.raises(ConnectionResetError):
            sock.recv(1)
        assert echo.resets.acquire(timeout=PATIENCE_S)
        with pytest.raises(OSError), connect(link) as refused:
            refused.sendall(b"x")
            if refused.recv(1) == b"":
                raise ConnectionResetError
        link.restore()
        assert through(link, b"again") == b"again"


def test_cut_unblocks_a_sender() -> None:
    """Neither a receiver that does not read nor a link at rate zero keeps a connection alive after a cut."""
    deaf = socket.create_server(("127.0.0.1", 0))
    with deaf, ShapedLink("127.0.0.1", deaf.getsockname()[1], FAST) as link, connect(link) as sock:
        failed = threading.Event()

        def push() -> None:
            try:
                while True:
                    sock.sendall(bytes(65_536))
            except OSError:
                failed.set()

        threading.Thread(target=push, daemon=True).start()
        far, _ = deaf.accept()
        link.cut()
        assert failed.wait(PATIENCE_S)
        far.close()


def test_unreachable_target_is_a_reset() -> None:
    """What a connection attempt beyond the link meets is passed on."""
    with socket.create_server(("127.0.0.1", 0)) as gone:
        port = gone.getsockname()[1]
    with ShapedLink("127.0.0.1", port, FAST) as link, connect(link) as sock, pytest.raises(ConnectionResetError):
        sock.recv(1)


def test_taken_port_is_a_usage_error(echo: Echo) -> None:
    """And no traceback."""
    with pytest.raises(UsageError, match=str(echo.port)):
        ShapedLink("127.0.0.1", 1, FAST, port=echo.port).start()


BAD_PORTS = ["", "9400", ":9400", "host:", "host:x", "host:65536", "host:-1", "h:1:é", "h:²", "h:" + "9" * 5_000]


@pytest.mark.parametrize("text", [*BAD_PORTS, "nowhere", "h:0", "h:70000"])
def test_malformed_address_is_refused(text: str) -> None:
    """Before anything connects; a superscript is a digit to `str.isdigit` and no port."""
    with pytest.raises(UsageError, match="not the address of a broker"):
        parse_host_and_port(text, "broker")


@pytest.mark.parametrize("text", BAD_PORTS)
def test_malformed_metrics_address_is_refused(text: str) -> None:
    """Before anything listens."""
    with pytest.raises(UsageError, match="not the address of a metrics server"):
        parse_metrics_address(text)


def test_addresses_are_parsed() -> None:
    """Brackets around IPv6; port 0 where the system chooses one to listen at."""
    assert parse_host_and_port("[::1]:80", "broker") == ("::1", 80)
    assert parse_metrics_address("0.0.0.0:9400") == ("0.0.0.0", 9400)
    assert parse_metrics_address("[::1]:0") == ("::1", 0)
