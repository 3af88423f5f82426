"""Who is admitted to a server, and who gives way: decided without sockets."""

from __future__ import annotations

import dataclasses
import logging
import os
import socket

import pytest

from edgesplit.http1 import admission
from edgesplit.http1.admission import AdmissionControl, AdmittedConnection, RefusalLog, client_of
from edgesplit.http1.head import Refused
from edgesplit.http1.peer import Peer
from edgesplit.limits import LIMITS

MIB = 2**20


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bounds that are easy to count with: 8 MiB, 4 of them for a client, in steps of 1."""
    quick = dataclasses.replace(
        LIMITS, http_bodies_bytes=8 * MIB, http_body_share_bytes=4 * MIB, http_body_step_bytes=MIB
    )
    monkeypatch.setattr(admission, "LIMITS", quick)


def connected(
    control: AdmissionControl, client: str, now: float = 0.0, certificate: str = ""
) -> tuple[AdmittedConnection, AdmittedConnection | None]:
    connection = AdmittedConnection(client, now)
    displaced = control.admit(connection)
    if certificate:
        displaced = control.identify(connection, certificate) or displaced
    return connection, displaced


def test_a_client_beyond_its_share_displaces_its_own_longest_silent_connection() -> None:
    """Before the handshake by address, afterwards by certificate; nobody else is touched."""
    control = AdmissionControl(8)
    other, _ = connected(control, "address 10.0.0.9", 0.0)
    first = [connected(control, "address 10.0.0.1", 1.0 + number)[0] for number in range(4)]
    _, displaced = connected(control, "address 10.0.0.1", 6.0)
    assert displaced is first[0]
    assert other.is_open and not first[0].is_open

    control = AdmissionControl(8)
    thief = [connected(control, f"address 10.0.0.{number}", 1.0 + number, "t1")[0] for number in range(4)]
    _, displaced = connected(control, "address 10.0.0.7", 9.0, "t1")
    assert displaced is thief[0]


def test_busy_connections_do_not_give_way() -> None:
    """A client whose whole share is busy is refused; another one is not."""
    control = AdmissionControl(4)
    for number in range(2):
        connection, _ = connected(control, "user 7", float(number))
        control.begin(connection, 0)
    with pytest.raises(Refused, match="user 7 has 2 connections, all busy") as refused:
        connected(control, "user 7", 3.0)
    assert refused.value.status == 429
    assert connected(control, "user 8", 3.0)[1] is None


def test_when_all_connections_are_taken_the_client_with_the_most_gives_way() -> None:
    """Its longest silent one; between equals those without a certificate; nobody if all are busy."""
    control = AdmissionControl(4)
    held = [connected(control, "address 10.0.0.1", float(number), name)[0]
            for number, name in enumerate(("honest", "greedy", "greedy", ""))]  # fmt: skip
    _, displaced = connected(control, "address 10.0.0.2", 5.0)
    assert displaced is held[1]
    _, displaced = connected(control, "address 10.0.0.3", 6.0)
    assert displaced is held[3], "equals: the one that never showed a certificate, longest"
    control = AdmissionControl(2)
    for client in ("a", "b"):
        control.begin(connected(control, client)[0], 0)
    with pytest.raises(Refused, match="too many connections, at most 2") as refused:
        connected(control, "c")
    assert refused.value.status == 503


def test_a_body_counts_as_it_arrives() -> None:
    """At most one step ahead, never more than its length, and not any more once it is answered."""
    control = AdmissionControl(8)
    connection, _ = connected(control, "a")
    control.begin(connection, 100 * MIB)
    assert connection.body_bytes == MIB
    control.receive(connection, MIB - 1, 100 * MIB)
    assert connection.body_bytes == MIB
    control.receive(connection, 2 * MIB + 1, 100 * MIB)
    assert connection.body_bytes == 3 * MIB
    control.finish(connection, 1.0)
    assert (connection.body_bytes, control._body_bytes, dict(control._bytes_of)) == (0, 0, {})
    control.begin(connection, 5)
    assert connection.body_bytes == 5


def test_a_client_has_a_share_of_the_bytes() -> None:
    """One body of any length; the second gets 429 where both exceed the share, and other clients have room."""
    control = AdmissionControl(8)
    (first, _), (second, _), (other, _) = (connected(control, client) for client in "aab")
    control.begin(first, 4 * MIB)
    control.receive(first, 4 * MIB, 4 * MIB)
    with pytest.raises(Refused, match=f"requests of a already have {4 * MIB} bytes") as refused:
        control.begin(second, 10)
    assert refused.value.status == 429
    control.begin(other, 4 * MIB)
    control.receive(other, 3 * MIB, 4 * MIB)


def test_when_the_bytes_are_used_up_the_largest_unfinished_body_gives_way() -> None:
    """Of the client with the most, for one that has less; never one that is being answered."""
    control = AdmissionControl(8)
    (large, _), (larger, _), (small, _) = (connected(control, client) for client in "abc")
    control.begin(large, 4 * MIB)
    control.receive(large, 4 * MIB, 4 * MIB)
    large.is_receiving = False
    control.begin(larger, 4 * MIB)
    control.receive(larger, 4 * MIB - 1, 4 * MIB)
    assert control.begin(small, 100) is larger
    assert not larger.is_open and control.receive(larger, 4 * MIB, 4 * MIB) is None
    (refill, _), (last, _) = (connected(control, client) for client in "de")
    control.begin(refill, 4 * MIB - 100)
    control.receive(refill, 4 * MIB - 100, 4 * MIB - 100)
    refill.is_receiving = False
    with pytest.raises(Refused) as refused:
        control.begin(last, 100)
    assert refused.value.status == 503


def test_nothing_is_left_of_a_closed_connection() -> None:
    """Neither its connection nor its bytes nor its name, whatever it was doing."""
    control = AdmissionControl(8)
    for certificate in ("", "t1"):
        connection, _ = connected(control, "address 10.0.0.1", 0.0, certificate)
        control.begin(connection, 10 * MIB)
        control.remove(connection)
        control.remove(connection)
        control.finish(connection, 1.0)
    assert (control._body_bytes, dict(control._bytes_of), dict(control._connections_of)) == (0, {}, {})


def test_refusals_are_logged_once_a_minute_by_client_and_reason(caplog: pytest.LogCaptureFixture) -> None:
    """With the number that was left out: who floods a server does not flood its log."""
    refusals = RefusalLog()
    with caplog.at_level(logging.WARNING, logger=admission.__name__):
        for second in range(130):
            refusals.record("certificate t1", "slow", "the body came too slowly", float(second))
        refusals.record("certificate t2", "slow", "the body came too slowly", 130.0)
    assert caplog.messages == [
        "refused certificate t1: slow: the body came too slowly",
        "refused certificate t1: slow: the body came too slowly (59 more since the last such line)",
        "refused certificate t1: slow: the body came too slowly (59 more since the last such line)",
        "refused certificate t2: slow: the body came too slowly",
    ]
    for number in range(2 * admission.MAX_LOGGED_CLIENTS):
        refusals.record(f"address {number}", "slow", "", 0.0)
    assert len(refusals._logged) == admission.MAX_LOGGED_CLIENTS


class Remote:
    """A socket whose peer is at this address."""

    family = socket.AF_INET

    def __init__(self, address: str) -> None:
        self.address = address

    def getpeername(self) -> tuple[str, int]:
        return self.address, 1

    def getsockname(self) -> tuple[str, int]:
        return self.address, 2


@pytest.mark.parametrize(
    ("address", "client"),
    [
        ("10.0.0.7", "address 10.0.0.7"),
        ("::ffff:10.0.0.7", "address 10.0.0.7"),
        ("2001:db8:1:2:3:4:5:6", "network 2001:db8:1:2::/64"),
        ("fe80::1%eth0", "network fe80::/64"),
        ("::1", "address ::1"),
    ],
)
def test_a_peer_is_counted_by_its_address(address: str, client: str) -> None:
    """An IPv6 client has a whole network of addresses, and one share."""
    sock = Remote(address)
    assert client_of(sock, Peer(sock)) == client  # type: ignore[arg-type]


def test_a_program_on_this_machine_is_counted_by_its_user() -> None:
    """All of them have the same address; over TLS their certificates tell them apart."""
    with socket.create_server(("127.0.0.1", 0)) as listener, socket.create_connection(listener.getsockname()):
        accepted, _ = listener.accept()
        with accepted:
            assert client_of(accepted, Peer(accepted)) == f"user {os.getuid()}"
            assert client_of(accepted, Peer(accepted), tls=True) == "address 127.0.0.1"
    ours, theirs = socket.socketpair()
    with ours, theirs:
        assert client_of(ours, Peer(ours)) == f"user {os.getuid()}"
