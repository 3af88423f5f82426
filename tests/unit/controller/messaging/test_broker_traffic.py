"""Traffic of the broker's connections: what explains it, what is a flood, and what the kernel says."""

from __future__ import annotations

import itertools
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from edgesplit.limits import LIMITS
from edgesplit_controller.messaging.broker_traffic import (
    ACKED_PER_EXPLAINED,
    CONNECTION_BYTES,
    EVERY_S,
    MAX_CREDIT_BYTES,
    MAX_SHARE,
    MAX_UNSEEN_BYTES,
    UNAVAILABLE_S,
    Peer,
    TcpConnection,
    TrafficInspection,
    TrafficMeter,
    parse_peer,
    tcp_connections,
)
from edgesplit_controller.messaging.child_socket import shut_down_socket

HOUR_S = 3_600
HERE = bytes([127, 0, 0, 1])


class MeteredBroker:
    """A meter, and connections of devices whose counters the test moves. Each device has one, from its own port."""

    def __init__(self, *devices: str) -> None:
        self.meter = TrafficMeter()
        self.now = 0.0
        self.connections: dict[str, TcpConnection] = {}
        for device in devices:
            self.connect(device)

    def connect(self, device: str) -> None:
        number = len(self.connections) + 1
        self.connections[device] = TcpConnection(number, (HERE, number), 0, 0, inode=number)
        self.meter.on_client(device, (HERE, number))

    def send(self, device: str, sent: int, *, acked: int = 0, seen: int = 0) -> None:
        """The device sends bytes and acknowledges others; the controller receives one message of `seen` bytes."""
        last = self.connections[device]
        self.connections[device] = last._replace(
            read_bytes=last.read_bytes + sent, acked_bytes=last.acked_bytes + acked
        )
        if seen:
            self.meter.on_message(device, seen)

    def sample(
        self, after_s: float = 0.5, *, busy_s: float = 0.0, processes: int = 1, interrupted: bool = False
    ) -> dict[str, int]:
        """Unexplained bytes of the devices that flood."""
        self.now += after_s
        connections = list(self.connections.values())
        floods = self.meter.sample(
            connections, self.now, busy_s=busy_s, processes=processes, interrupted=interrupted
        )  # fmt: skip
        assert all(flood.connections == (self.connections[flood.device],) for flood in floods)
        return {flood.device: flood.unseen_bytes for flood in floods}


@pytest.mark.parametrize("acked", [0, 30_000_000], ids=["its answers not read", "its answers read"])
def test_bytes_without_a_message_are_a_flood(acked: int) -> None:
    """Subscriptions, pings, refused publications: reported with their number, and counted anew afterwards."""
    broker = MeteredBroker("bad", "good")
    broker.send("bad", 10_000_000, acked=acked)
    broker.send("good", 5_000, acked=20_000)
    assert broker.sample() == {}  # messages that explain them may be late
    (found,) = broker.sample().items()
    expected = 10_000_000 - CONNECTION_BYTES - acked // ACKED_PER_EXPLAINED
    assert found == ("bad", pytest.approx(expected, abs=1_000))
    assert broker.sample() == {}
    broker.send("bad", 3_000_000)
    assert broker.sample() == {} and set(broker.sample()) == {"bad"}


def test_a_flood_in_small_steps_is_found() -> None:
    """60 kB a second, in pings or in new subscriptions, is found within ten seconds: the sum counts."""
    broker, floods = MeteredBroker("bad"), dict[str, int]()
    while not floods and broker.now < 12:
        broker.send("bad", 30_000)
        floods = broker.sample()
    assert set(floods) == {"bad"}


def test_few_bytes_that_keep_the_broker_busy_are_a_flood() -> None:
    """150 kB a second in pings take all of its thread: found within a second, and before they are many bytes."""
    broker, floods = MeteredBroker("bad", "good"), dict[str, int]()
    while not floods and broker.now < 1.2:
        broker.send("bad", 15_000, acked=180_000)
        broker.send("good", 24)
        floods = broker.sample(0.1, busy_s=0.1)
    assert set(floods) == {"bad"} and floods["bad"] < MAX_UNSEEN_BYTES


def test_a_broker_that_others_keep_busy_is_not_the_devices_fault() -> None:
    """With a broker that delivers chunks all day, pings and a lost link now and then cost a device nothing."""
    broker = MeteredBroker("cam")
    for step in range(HOUR_S):
        broker.send("cam", 45_000 if step % 300 == 0 else 30)
        assert broker.sample(1.0, busy_s=0.1 if step % 300 == 0 else 1.0) == {}


def test_a_day_of_pings_and_acknowledgements_is_no_flood() -> None:
    """30 bytes every 10 s, without a message at the controller: forgotten faster than they come."""
    broker = MeteredBroker("cam")
    for _ in range(24 * 360):
        broker.send("cam", 30)
        assert broker.sample(10.0) == {}


def test_the_fastest_fetch_is_no_flood() -> None:
    """140 MB/s: a subscription and its end for each chunk, and 800 requests a second, which the controller receives."""
    broker = MeteredBroker("cam")
    for _ in range(240):
        chunks = 140_000_000 // LIMITS.chunk_bytes // 2
        broker.send("cam", chunks * 2 * 90, acked=chunks * LIMITS.chunk_bytes)
        for _ in range(400):
            broker.send("cam", 330, seen=250)
        assert broker.sample() == {}


def test_a_log_bundle_that_the_controller_receives_late_is_no_flood() -> None:
    """1 MiB is counted before its messages come; they explain it afterwards, and the next one."""
    broker = MeteredBroker("cam")
    for _ in range(20):
        broker.send("cam", 2**20 + 5_000)
        assert broker.sample(EVERY_S) == broker.sample(EVERY_S) == {}
        for _ in range(22):
            broker.meter.on_message("cam", 49_152)
        assert broker.sample(1.0) == {}


def test_messages_of_other_processes_explain_their_bytes() -> None:
    """Of three controller processes this one receives a third of the messages."""
    broker = MeteredBroker("cam")
    for step in range(HOUR_S):
        broker.send("cam", 16_500, seen=16_384 if step % 3 == 0 else 0)
        assert broker.sample(1.0, processes=3) == {}


def test_regular_traffic_is_no_flood_while_the_controller_has_no_session() -> None:
    """Telemetry and backlog of a whole outage; a flood is found all the same."""
    broker = MeteredBroker("cam", "bad")
    found = set[str]()
    for _ in range(HOUR_S):
        broker.send("cam", 20_000)
        broker.send("bad", 500_000)
        found |= set(broker.sample(1.0, interrupted=True))
    assert found == {"bad"}


def test_a_controller_that_was_paused_blames_no_device() -> None:
    """Its machine slept for ten minutes: the broker dropped the telemetry that it did not read."""
    broker = MeteredBroker("cam")
    broker.sample()
    broker.send("cam", 5_000_000)
    assert broker.sample(600.0) == broker.sample() == broker.sample() == {}


def test_explained_bytes_are_no_licence_to_flood() -> None:
    """A device whose messages explain more than it sent may send little more on that account."""
    broker = MeteredBroker("bad")
    for _ in range(100):
        broker.send("bad", 300, seen=100_000)
        broker.sample()
    broker.send("bad", MAX_UNSEEN_BYTES + MAX_CREDIT_BYTES + 10_000)
    assert broker.sample() == {} and set(broker.sample()) == {"bad"}


def test_a_connection_counts_from_its_first_byte_once_it_has_a_name() -> None:
    """The log may come after the count; another connection from the same port is another one."""
    broker = MeteredBroker()
    peer: Peer = (HERE, 7)
    broker.connections["bad"] = TcpConnection(1, peer, 2_000_000, 0, inode=1)
    assert broker.sample() == {}
    broker.meter.on_client("bad", peer)
    broker.connections["bad"] = TcpConnection(1, peer, 3_000_000, 0, inode=1)
    assert broker.sample() == {} and set(broker.sample()) == {"bad"}
    broker.meter.on_client("good", peer)
    broker.connections["bad"] = TcpConnection(2, peer, 100_000, 0, inode=2)
    assert broker.sample() == {}


def test_devices_that_left_are_forgotten() -> None:
    """Neither names nor counts of ended connections are kept."""
    broker = MeteredBroker("cam", "pi")
    broker.send("cam", 10_000)
    broker.sample()
    broker.connections.clear()
    for _ in range(3):
        broker.sample(60.0)
    meter = broker.meter
    assert not (meter._arrived or meter._device_of or meter._counted or meter._unseen)


def test_a_childs_connection_is_ended_from_outside() -> None:
    """Its other end sees the end at once, though the child never looks at it; its other sockets stay open."""
    with ExitStack() as stack:
        listener = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        ends = [stack.enter_context(socket.create_connection(listener.getsockname())) for _ in range(2)]
        accepted = [stack.enter_context(listener.accept()[0]) for _ in ends]
        command = [sys.executable, "-c", "import sys; sys.stdin.read()"]
        child = stack.enter_context(
            subprocess.Popen(command, stdin=subprocess.PIPE, pass_fds=[each.fileno() for each in accepted])
        )
        first, inode = accepted[0], os.fstat(accepted[0].fileno()).st_ino
        assert shut_down_socket(child.pid, inode) and ends[0].recv(1) == b""
        ends[1].sendall(b"x")
        assert accepted[1].recv(1) == b"x"
        first.close()
        assert not shut_down_socket(child.pid, 2**32)
        child.communicate()


@pytest.fixture(params=[socket.AF_INET, socket.AF_INET6], ids=["IPv4", "IPv6"])
def pair(request: pytest.FixtureRequest) -> Iterator[tuple[socket.socket, socket.socket, int]]:
    """Both ends of a TCP connection over the loopback, and the port of the first; IPv4 in an IPv6 socket, too."""
    with ExitStack() as stack:
        dual = request.param == socket.AF_INET6
        if dual and not socket.has_dualstack_ipv6():
            pytest.skip("no IPv6 here")
        listener = stack.enter_context(
            socket.create_server(("::" if dual else "127.0.0.1", 0), family=request.param, dualstack_ipv6=dual)
        )
        port = int(listener.getsockname()[1])
        device = stack.enter_context(socket.create_connection(("127.0.0.1", port)))
        yield stack.enter_context(listener.accept()[0]), device, port


def test_the_kernel_counts_a_connections_bytes(pair: tuple[socket.socket, socket.socket, int]) -> None:
    """Bytes that were read, and those that the other side acknowledged; the peer is named as in mosquitto's log."""
    broker, device, port = pair
    device.sendall(bytes(10_000))
    assert len(broker.recv(9_000, socket.MSG_WAITALL)) == 9_000
    broker.recv(1_000, socket.MSG_WAITALL | socket.MSG_PEEK)
    (waiting,) = tcp_connections(port)
    assert waiting.read_bytes == 9_000
    assert len(broker.recv(1_000)) == 1_000
    (first,) = tcp_connections(port)
    assert first.peer == parse_peer("127.0.0.1", str(device.getsockname()[1])) and first.read_bytes == 10_000
    broker.sendall(bytes(5_000))
    assert len(device.recv(5_000, socket.MSG_WAITALL)) == 5_000
    device.sendall(b"x")  # brings the acknowledgement along
    assert broker.recv(1)
    (second,) = tcp_connections(port)
    assert (second.cookie, second.read_bytes) == (first.cookie, 10_001) and second.acked_bytes >= 5_000


def test_a_kernel_that_does_not_count_is_asked_again_later(caplog: pytest.LogCaptureFixture) -> None:
    """Where sock_diag is forbidden the controller runs as before, and says once what it does not see."""

    def forbidden(port: int) -> list[TcpConnection]:
        raise PermissionError(1, "Operation not permitted")

    inspect = TrafficInspection(
        TrafficMeter(), 1, lambda *_: None, busy_s=lambda: 0.0, end_connection=lambda inode: True, processes=lambda: 1,
        connected=lambda: True, count=forbidden,
    )  # fmt: skip
    assert [inspect(), inspect()] == [UNAVAILABLE_S, UNAVAILABLE_S]
    assert caplog.text.count("Operation not permitted") == 1


@pytest.mark.parametrize("forbidden", [False, True], ids=["cut", "forbidden"])
def test_floods_are_cut_and_reported_and_counting_takes_its_share_of_time_at_most(forbidden: bool) -> None:
    """The connection ends before the report; where the kernel forbids that the report goes out all the same. The pause
    grows with the time that counting took."""
    meter, done = TrafficMeter(), list[object]()
    meter.on_client("bad", (HERE, 7))

    def end_connection(inode: int) -> bool:
        done.append(inode)
        if forbidden:
            raise PermissionError(1, "Operation not permitted")
        return True

    inspect = TrafficInspection(
        meter, 1, lambda device, unseen_bytes: done.append(device), end_connection=end_connection,
        busy_s=itertools.count(0.0).__next__, processes=lambda: 1, connected=lambda: True,
        clock=itertools.count(0, 10).__next__,
        count=lambda port: [TcpConnection(1, (HERE, 7), 5_000_000, 0, inode=4711)],
    )  # fmt: skip
    assert inspect() == 10 / MAX_SHARE and done == []
    assert inspect() == 10 / MAX_SHARE and done == [4711, "bad"]


@pytest.mark.parametrize(("address", "port"), [("localhost", "1"), ("", "1"), ("1.2.3.4", "x"), ("::ffff:", "1")])
def test_a_peer_that_is_no_address_is_none(address: str, port: str) -> None:
    """mosquitto may run where it does not know its peers."""
    assert parse_peer(address, port) is None


def test_an_ipv4_peer_of_an_ipv6_socket_is_the_same_peer() -> None:
    """As the log and the kernel may write it."""
    assert parse_peer("::ffff:10.0.0.1", "5") == parse_peer("10.0.0.1", "5") == (bytes([10, 0, 0, 1]), 5)
