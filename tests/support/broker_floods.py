"""Floods at the broker that no controller receives, each by one certificate: for tests and for `bench/attacks.py`."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from ssl import SSLSocket, SSLWantReadError

from edgesplit.mqtt.messages import chunk_topic, topic
from support.hostile_device import (
    PING_PACKET,
    HostileDevice,
    bridge_connect_packet,
    connect_packet,
    publish_packet,
    subscribe_packet,
)

UNREAD_BYTES = 4_096
"""The kernel's receive buffer of a connection that is not read."""
WRITE_TIMEOUT_S = 5.0
BURST = 2_000
"""Packets in one write."""
Flood = Callable[[HostileDevice], Iterator[bool]]
"""Sends what it sends piece by piece and connects again when it is cut off. It yields in between: True while the broker
accepts the device, False after a connection that it refused."""


def subscriptions_unread(device: HostileDevice) -> Iterator[bool]:
    """Subscriptions whose acknowledgements are not read."""
    return _flood(device, itertools.repeat(subscribe_packet(b"a") * BURST), reads=False)


def pings(device: HostileDevice) -> Iterator[bool]:
    """Pings as fast as the broker answers them, on a connection that calls itself a bridge."""
    return _flood(device, itertools.repeat(PING_PACKET * BURST), reads=True, connect=bridge_connect_packet)


def refused_messages(device: HostileDevice) -> Iterator[bool]:
    """Messages on another device's topic, at QoS 0, which the access rules deny."""
    packet = publish_packet(topic("pi-victim", "telemetry").encode(), bytes(1_000))
    return _flood(device, itertools.repeat(packet * (BURST // 20)), reads=True)


def new_subscriptions(device: HostileDevice) -> Iterator[bool]:
    """Subscriptions to ever new topics, which the access rules allow: the broker remembers each."""
    topics = (chunk_topic(f"{number:x}").encode() for number in itertools.count())
    batches = (subscribe_packet(*itertools.islice(topics, BURST)) for _ in itertools.count())
    return _flood(device, batches, reads=True)


FLOODS: Mapping[str, Flood] = {
    "subscriptions, acknowledgements not read": subscriptions_unread,
    "pings": pings,
    "refused messages": refused_messages,
    "new subscriptions": new_subscriptions,
}


def _flood(
    device: HostileDevice, bursts: Iterator[bytes], *, reads: bool, connect: Callable[[str], bytes] = connect_packet
) -> Iterator[bool]:
    while True:
        accepted = False
        with suppress(OSError), device.socket(0 if reads else UNREAD_BYTES) as link:
            link.settimeout(WRITE_TIMEOUT_S)
            link.sendall(connect(device.name))
            accepted = link.recv(1) == b"\x20"
            while accepted:
                yield True
                link.sendall(next(bursts))
                if reads:
                    _drain(link)
        if not accepted:
            yield False


def _drain(link: SSLSocket) -> None:
    """Read what has arrived, and wait for nothing. OSError if the broker has closed the connection."""
    link.settimeout(0.0)
    try:
        while link.recv(65_536):
            pass
        raise ConnectionResetError("closed by the broker")
    except SSLWantReadError:
        pass
    finally:
        link.settimeout(WRITE_TIMEOUT_S)
