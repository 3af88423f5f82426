"""Floods at the own broker that the controller never receives: subscriptions, pings, publications that are refused.

The kernel counts the bytes of each TCP connection of the broker (`tcp_info`, tcp(7), read by sock_diag(7) without
privileges), and the broker's log says whose connection it is. Bytes that no message at the controller explains are
added up by device, and with them the processor time that they cost the broker; a device with more than
`MAX_UNSEEN_BYTES` or `MAX_BUSY_S` floods. The sums bound what one device makes the broker remember (subscriptions,
answers that it does not read) and how long it keeps others waiting. Counting costs nothing per packet.
"""

from __future__ import annotations

import ipaddress
import logging
import os
import socket
import struct
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from time import monotonic
from typing import Final, NamedTuple

log = logging.getLogger(__name__)

Peer = tuple[bytes, int]
"""Address (packed; IPv4 also where the socket is IPv6) and port of a connection's other end."""
MAX_UNSEEN_BYTES: Final = 512 * 2**10
"""Bytes of one device, unexplained, that make a flood: twelve times what an agent sends to listen for 512 chunks."""
MAX_BUSY_S: Final = 0.5
"""Seconds of the broker's processor, for unexplained bytes of one device, that make a flood. mosquitto answers 16 KiB
of pings in 0.1 s, and no other client meanwhile."""
FORGIVEN_BUSY_SHARE: Final = 0.02
"""Seconds of it that are forgotten each second."""
MAX_BUSY_S_PER_BYTE: Final = 5e-6
"""What a byte may cost the broker at most: a ping has two, and costs a system call. The rest of its time is not this
device's."""
LATE_S: Final = 0.2
"""Time within which the controller may receive the messages that explain counted bytes."""
FORGIVEN_BYTES_PER_S: Final = 512.0
"""Unexplained bytes that are forgotten each second: pings, acknowledgements, the overhead of TLS."""
MAX_CREDIT_BYTES: Final = 256 * 2**10
"""Most bytes that may be explained before they are counted."""
MESSAGE_OVERHEAD_BYTES: Final = 64
"""Of a message that the controller received, beside topic and payload: MQTT's header and properties, TLS."""
CONNECTION_BYTES: Final = 4 * 2**10
"""What explains itself of each connection: handshake, CONNECT, the first subscriptions."""
ACKED_PER_EXPLAINED: Final = 256
"""A device that received this many bytes may have sent one more: it subscribes to each chunk, and unsubscribes."""
AGENT_BYTES_PER_S: Final = 32 * 2**10
"""What an agent sends at most, telemetry and backlog, while the controller's own session is interrupted."""
PAUSED_S: Final = 10.0
"""Time between two counts after which this process was paused, and the broker has dropped what it did not read."""
EVERY_S: Final = 0.1
"""Interval of the counts of a small fleet."""
MAX_SHARE: Final = 0.05
"""Share of a processor that counting may take: with ten thousand connections the interval is seconds."""
UNAVAILABLE_S: Final = 60.0
"""Pause after the kernel refused to count."""
_MAPPED: Final = bytes(10) + b"\xff\xff"
"""Prefix of an IPv4 address in an IPv6 socket (RFC 4291, 2.5.5.2)."""


class TcpConnection(NamedTuple):
    """An established TCP connection of the broker, and its bytes so far."""

    cookie: int
    """The kernel's identifier of the socket."""
    peer: Peer
    read_bytes: int
    """Received from the device, and read by the broker: what still waits in the kernel has cost nothing yet."""
    acked_bytes: int
    """Sent to the device and acknowledged by it."""
    inode: int
    """Of the socket, by which its process is found."""


class Unseen(NamedTuple):
    """What a device sent that no message at the controller explains."""

    sent_bytes: float = 0.0
    """Negative where more was explained than counted."""
    busy_s: float = 0.0
    """Seconds of the broker's processor that they cost, by their share of all unexplained bytes."""
    over_since: float | None = None
    """Since when one of the two is too much."""


class Flood(NamedTuple):
    """A device that floods the broker."""

    device: str
    unseen_bytes: int
    """What it sent, and no message at the controller explains."""
    connections: tuple[TcpConnection, ...]


def parse_peer(address: str, port: str) -> Peer | None:
    """A peer as mosquitto's log writes it; None if that is no IP address."""
    try:
        return _without_mapping(ipaddress.ip_address(address).packed), int(port)
    except ValueError:
        return None


def _without_mapping(packed: bytes) -> bytes:
    return packed[12:] if packed.startswith(_MAPPED) else packed


class TrafficMeter:
    """Unexplained bytes by device. Thread-safe; no clock of its own."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._arrived: dict[Peer, str] = {}
        """Devices by peer, from the log, since the last sample."""
        self._explained: Counter[str] = Counter()
        """Bytes since the last sample, by device."""
        self._device_of: dict[Peer, str] = {}
        self._counted: dict[int, TcpConnection] = {}
        """The last sample, by cookie."""
        self._unseen: dict[str, Unseen] = {}
        self._sampled_at = 0.0

    def on_client(self, device: str, peer: Peer) -> None:
        """The broker accepted a connection of this device. Any thread; returns at once."""
        with self._lock:
            self._arrived[peer] = device
            self._explained[device] += CONNECTION_BYTES

    def on_message(self, device: str, size: int) -> None:
        """The controller received a message of this device, topic and payload of that size. Any thread; returns at
        once."""
        with self._lock:
            self._explained[device] += size + MESSAGE_OVERHEAD_BYTES

    def sample(
        self, connections: Iterable[TcpConnection], now: float, *, busy_s: float = 0.0, processes: int = 1,
        interrupted: bool = False,
    ) -> list[Flood]:  # fmt: skip
        """Count the broker's connections; return the floods. What a device sent is counted anew after each.

        `busy_s` are the seconds of the broker's processor since the last sample. This process receives one of
        `processes` parts of the devices' messages. While its session is `interrupted`, or the process was paused, an
        agent's regular traffic is explained without a message.
        """
        with self._lock:
            arrived, self._arrived = self._arrived, {}
            explained, self._explained = self._explained, Counter()
        elapsed_s, self._sampled_at = now - self._sampled_at, now
        # A connection that was logged after the kernel was asked is not among those counted: it is kept for the next.
        names = self._device_of | arrived
        read = self._read(connections, names)
        self._device_of = {last.peer: names[last.peer] for last in self._counted.values()} | arrived
        known, self._unseen = self._unseen, {}
        regular_bytes = AGENT_BYTES_PER_S * elapsed_s if interrupted or elapsed_s > PAUSED_S else 0.0
        new_bytes = {
            device: read[device] - explained[device] * processes - regular_bytes
            for device in {*read, *explained, *known}
        }
        busy_s_per_byte = min(MAX_BUSY_S_PER_BYTE, busy_s / max(1.0, sum(max(0.0, new) for new in new_bytes.values())))
        floods = list[Flood]()
        for device, new in new_bytes.items():
            unseen = _added(known.get(device, Unseen()), new, busy_s_per_byte, elapsed_s, now)
            if unseen.over_since is not None and now - unseen.over_since >= LATE_S:
                floods.append(Flood(device, int(unseen.sent_bytes), self._connections_of(device)))
            elif device in read or unseen.sent_bytes > 0 or unseen.busy_s > 0:
                self._unseen[device] = unseen
        return floods

    def _connections_of(self, device: str) -> tuple[TcpConnection, ...]:
        return tuple(last for last in self._counted.values() if self._device_of.get(last.peer) == device)

    def _read(self, connections: Iterable[TcpConnection], names: dict[Peer, str]) -> Counter[str]:
        """Bytes since the last sample, by device, of the connections with a name; those become the last sample."""
        counted: dict[int, TcpConnection] = {}
        read: Counter[str] = Counter()
        for connection in connections:
            device = names.get(connection.peer)
            if device is None:  # before its CONNECT, or the controller's: what it sent counts once it has a name
                continue
            last = self._counted.get(connection.cookie)
            new = connection.read_bytes - (last.read_bytes if last else 0)
            taken = connection.acked_bytes - (last.acked_bytes if last else 0)
            read[device] += new - taken // ACKED_PER_EXPLAINED
            counted[connection.cookie] = connection
        self._counted = counted
        return read


def _added(before: Unseen, new_bytes: float, busy_s_per_byte: float, elapsed_s: float, now: float) -> Unseen:
    """The sums of a device after another sample."""
    forgiven = min(FORGIVEN_BYTES_PER_S * elapsed_s, max(0.0, before.sent_bytes))
    sent_bytes = max(-MAX_CREDIT_BYTES, before.sent_bytes - forgiven + new_bytes)
    busy_s = max(0.0, before.busy_s - FORGIVEN_BUSY_SHARE * elapsed_s) + busy_s_per_byte * max(0.0, new_bytes)
    is_over = sent_bytes > MAX_UNSEEN_BYTES or (sent_bytes > 0 and busy_s > MAX_BUSY_S)
    since = now if before.over_since is None else before.over_since
    return Unseen(sent_bytes, busy_s, since if is_over else None)


class TrafficInspection:
    """A periodic job: count the connections of the broker on `port`, cut those of devices that flood, and report these
    devices."""

    def __init__(
        self, meter: TrafficMeter, port: int, on_flood: Callable[[str, int], None], *,
        busy_s: Callable[[], float], end_connection: Callable[[int], bool], processes: Callable[[], int],
        connected: Callable[[], bool], count: Callable[[int], Iterable[TcpConnection]] | None = None,
        clock: Callable[[], float] = monotonic,
    ) -> None:  # fmt: skip
        """`on_flood` receives a device and its unexplained bytes. `busy_s` are the seconds of processor that the broker
        has used so far; `end_connection` ends the connection whose socket has this inode, at once (OSError if it
        cannot). `processes` is the number of controller processes, and `connected` says whether this one has its
        session. `count` counts the connections (the kernel by default).
        """
        self._busy_s = busy_s
        self._busy_before_s = 0.0
        self._end_connection = end_connection
        self._clock = clock
        self._meter = meter
        self._port = port
        self._on_flood = on_flood
        self._processes = processes
        self._connected = connected
        self._count = count or tcp_connections
        self._is_available = True

    def __call__(self) -> float:
        """Count once; returns the pause before the next time, in seconds."""
        began = self._clock()
        try:
            connections = list(self._count(self._port))
        except OSError as error:
            if self._is_available:
                log.warning("the kernel does not count the broker's connections (%s): silent floods stay unseen", error)
            self._is_available = False
            return UNAVAILABLE_S
        self._is_available = True
        before_s, self._busy_before_s = self._busy_before_s, self._busy_s()
        floods = self._meter.sample(
            connections, began, busy_s=max(0.0, self._busy_before_s - before_s), processes=self._processes(),
            interrupted=not self._connected(),
        )  # fmt: skip
        for flood in floods:
            self._cut(flood)
            self._on_flood(flood.device, flood.unseen_bytes)
        return max(EVERY_S, (self._clock() - began) / MAX_SHARE)

    def _cut(self, flood: Flood) -> None:
        """End the device's connections. Where that is forbidden they end when the device's session is ended."""
        for connection in flood.connections:
            try:
                self._end_connection(connection.inode)
            except OSError as error:
                log.warning("cannot cut connections of the broker, such as %s's (%s)", flood.device, error)


# sock_diag(7): one request a family, answered by a message for each socket.
_NETLINK_HEADER: Final = struct.Struct("=IHHII")
_REQUEST: Final = struct.Struct("=BBBxI2s46s")
"""inet_diag_req_v2: family, protocol, extensions, states, local port; the rest of the socket's identity is any."""
_SOCK_DIAG_BY_FAMILY: Final = 20
_REQUEST_AND_DUMP: Final = 0x301
_NETLINK_SOCK_DIAG: Final = 4
_ERROR, _DONE = 2, 3
_ESTABLISHED: Final = 1
_TCP_INFO: Final = 2
"""INET_DIAG_INFO, the attribute with `tcp_info`."""
_INET_DIAG_MSG_BYTES: Final = 72
_BYTES_ACKED: Final = 120
"""Place in `tcp_info` of the bytes acknowledged and, after them, received."""
_TIMEOUT_S: Final = 2.0
_BUFFER_BYTES: Final = 2**18


def tcp_connections(port: int) -> Iterator[TcpConnection]:
    """The established TCP connections of this network namespace whose own port is `port`. OSError where the kernel does
    not answer."""
    if not hasattr(socket, "AF_NETLINK"):
        raise OSError("no Linux")
    for family in (socket.AF_INET, socket.AF_INET6):
        with socket.socket(socket.AF_NETLINK, socket.SOCK_DGRAM, _NETLINK_SOCK_DIAG) as kernel:
            kernel.settimeout(_TIMEOUT_S)
            request = _REQUEST.pack(
                family, socket.IPPROTO_TCP, 1 << (_TCP_INFO - 1), 1 << _ESTABLISHED, port.to_bytes(2, "big"), b""
            )
            length = _NETLINK_HEADER.size + len(request)
            kernel.send(_NETLINK_HEADER.pack(length, _SOCK_DIAG_BY_FAMILY, _REQUEST_AND_DUMP, 1, 0) + request)
            follows = True
            while follows:
                follows, found = _parse_messages(kernel.recv(_BUFFER_BYTES))
                yield from found


def _parse_messages(raw: bytes) -> tuple[bool, list[TcpConnection]]:
    """The connections in one datagram of the kernel, and before them whether more follow."""
    at, found = 0, list[TcpConnection]()
    while at + _NETLINK_HEADER.size <= len(raw):
        length, kind = struct.unpack_from("=IH", raw, at)
        if kind == _DONE:
            return False, found
        if kind == _ERROR:
            number = -struct.unpack_from("=i", raw, at + _NETLINK_HEADER.size)[0]
            raise OSError(number, os.strerror(number))
        if (connection := _parse_connection(raw, at + _NETLINK_HEADER.size, at + length)) is not None:
            found.append(connection)
        at += (length + 3) & ~3
    return True, found


def _parse_connection(raw: bytes, at: int, end: int) -> TcpConnection | None:
    """One inet_diag_msg with its attributes; None without counters (before Linux 4.1)."""
    attribute = at + _INET_DIAG_MSG_BYTES
    while attribute + 4 <= end:
        length, kind = struct.unpack_from("=HH", raw, attribute)
        if kind == _TCP_INFO and length >= 4 + _BYTES_ACKED + 16:
            acked, received = struct.unpack_from("=QQ", raw, attribute + 4 + _BYTES_ACKED)
            (cookie, _, waiting, _, _, inode) = struct.unpack_from("=QIIIII", raw, at + 44)
            address_bytes = 4 if raw[at] == socket.AF_INET else 16
            address = _without_mapping(raw[at + 24 : at + 24 + address_bytes])
            peer = address, int.from_bytes(raw[at + 6 : at + 8], "big")
            return TcpConnection(cookie, peer, received - waiting, acked, inode)
        attribute += max(4, (length + 3) & ~3)
    return None
