"""Admission control of a server: which connections and request bodies it has room for, and who gives way.

A client is the name in a verified certificate; before the handshake, and without TLS, it is the address, or on one
machine the user. Each has a share of the connections and of the bytes of bodies, which count as they arrive. When all
connections are taken, the longest silent one of the client with the most gives way to a new one, and when the bytes are
used up, an unfinished body of the client with the most. Decides only: no sockets, no clock, no lock. The caller
serialises the calls, and closes the connections that give way.
"""

from __future__ import annotations

import ipaddress
import logging
import math
import socket
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from edgesplit.http1.head import Refused
from edgesplit.http1.peer import Peer
from edgesplit.limits import LIMITS

log = logging.getLogger(__name__)

CONNECTION_SHARE = 0.5
"""Part of the connections that one client may have: a gateway's pool (128) fits into that of one serving process."""
LOG_INTERVAL_S = 60.0
"""Interval in seconds at which refusals of one client, for one reason, are logged again."""
MAX_LOGGED_CLIENTS = 1_024
FLOOD_REFUSALS = 20
"""Refusals of one client within `REFUSALS_WINDOW_S` that make it a flood. An honest client on a slow link, or with a
stale route, makes fewer: it waits between its attempts."""
REFUSALS_WINDOW_S = 120.0
"""Refusals of at least half of this time, and at most of the whole, are counted together."""
CERTIFICATE = "certificate "
"""Prefix of a client that has shown a certificate; its name follows."""
IPV6_NETWORK_BITS = 64
"""One holder of an IPv6 network has all addresses in it."""
CONNECTIONS, DISPLACED, BYTES, FULL, SLOW, REVOKED, FORBIDDEN, MALFORMED = REASONS = (
    "connections", "displaced", "bytes", "full", "slow", "revoked", "forbidden", "malformed"
)  # fmt: skip
"""Why clients are refused: their share of connections is used up; the connection gave way; their share of bytes is used
up; the server is full; too slow; the certificate was revoked; the route is not theirs, or does not exist; not a request
that the server takes."""
_REASON_BY_STATUS = {403: FORBIDDEN, 404: FORBIDDEN, 405: FORBIDDEN, 408: SLOW, 429: BYTES, 503: FULL}
Refusals = dict[str, Counter[str]]
"""Refusals by client and reason."""
OnRefused = Callable[[str, str], None]
"""Called with the name in the client's certificate (empty without one) and the reason."""


@dataclass(eq=False, slots=True)
class AdmittedConnection:
    """One open connection, as admission control sees it."""

    client: str
    """Who it is counted for, as named in the log."""
    silent_since: float
    """When it was opened, or its last request ended."""
    certificate: str = ""
    """The name in the verified certificate; empty without one."""
    on_displaced: Callable[[], None] = field(default=lambda: None)
    """Closes the connection because it gives way."""
    is_open: bool = True
    is_silent: bool = True
    """Whether it is between requests, or before its first; part of a header block is no request."""
    is_receiving: bool = False
    """Whether the body of its request is incomplete."""
    body_bytes: int = 0
    """Counted bytes of its request's body."""


class AdmissionControl:
    """The connections of one server, and the bytes of their bodies."""

    def __init__(self, max_connections: int) -> None:
        self.max_connections = max_connections
        self.connection_share = max(1, math.ceil(max_connections * CONNECTION_SHARE))
        self._open: dict[AdmittedConnection, None] = {}
        self._connections_of: Counter[str] = Counter()
        self._bytes_of: Counter[str] = Counter()
        self._body_bytes = 0

    def admit(self, connection: AdmittedConnection) -> AdmittedConnection | None:
        """Admit a new connection; returns the one that gives way to it, if any. Raises Refused if there is no room."""
        displaced = self._displaced_by_share(connection.client)
        if displaced is None and len(self._open) >= self.max_connections:
            displaced = self._longest_silent(self._open)
            if displaced is None:
                raise Refused(503, f"too many connections, at most {self.max_connections}: retry later")
        if displaced is not None:
            self.remove(displaced)
        self._open[connection] = None
        self._connections_of[connection.client] += 1
        return displaced

    def identify(self, connection: AdmittedConnection, certificate: str) -> AdmittedConnection | None:
        """The connection has shown a certificate with this name, for which it is counted from now on; returns the
        connection that gives way, if any. Raises Refused if this client has too many."""
        client = f"{CERTIFICATE}{certificate}"
        displaced = self._displaced_by_share(client)
        if displaced is not None:
            self.remove(displaced)
        if connection.is_open:
            self._uncount_connection(connection.client)
            self._connections_of[client] += 1
        connection.client, connection.certificate = client, certificate
        return displaced

    def begin(self, connection: AdmittedConnection, length: int) -> AdmittedConnection | None:
        """A request with a body of `length` bytes begins; returns the connection that gives way, if any. Raises Refused
        if there is no room for the first bytes of its body."""
        connection.is_silent, connection.is_receiving = False, True
        return self._count(connection, min(length, LIMITS.http_body_step_bytes)) if length else None

    def receive(self, connection: AdmittedConnection, received: int, length: int) -> AdmittedConnection | None:
        """`received` of the `length` bytes of the body are here; returns the connection that gives way, if any. Raises
        Refused if there is no room for more."""
        step = LIMITS.http_body_step_bytes
        counted = min(length, (received // step + 1) * step)
        return self._count(connection, counted - connection.body_bytes) if counted > connection.body_bytes else None

    def finish(self, connection: AdmittedConnection, now: float) -> None:
        """The request has been answered, or has ended otherwise."""
        self._uncount(connection)
        connection.is_silent, connection.is_receiving, connection.silent_since = True, False, now

    def remove(self, connection: AdmittedConnection) -> None:
        """The connection is closed, or will be at once."""
        if not connection.is_open:
            return
        connection.is_open = False
        self._uncount(connection)
        del self._open[connection]
        self._uncount_connection(connection.client)

    def _uncount_connection(self, client: str) -> None:
        self._connections_of[client] -= 1
        if not self._connections_of[client]:
            del self._connections_of[client]

    def _displaced_by_share(self, client: str) -> AdmittedConnection | None:
        """The connection of the client that gives way to its next one; None while its share is not used up. Raises
        Refused if all are busy."""
        if self._connections_of[client] < self.connection_share:
            return None
        displaced = self._longest_silent([other for other in self._open if other.client == client])
        if displaced is None:
            raise Refused(429, f"{client} has {self.connection_share} connections, all busy: wait for their answers")
        return displaced

    def _longest_silent(self, connections: Iterable[AdmittedConnection]) -> AdmittedConnection | None:
        """Of the silent ones among `connections`, one of the client with the most, and of these the longest silent.
        Between equals, those without a certificate go first."""
        return min(
            (connection for connection in connections if connection.is_silent),
            key=lambda other: (-self._connections_of[other.client], bool(other.certificate), other.silent_since),
            default=None,
        )

    def _count(self, connection: AdmittedConnection, more: int) -> AdmittedConnection | None:
        """Count `more` bytes of the connection's body."""
        if not connection.is_open:  # it has given way, and is about to be closed
            return None
        own = self._bytes_of[connection.client]
        if own > connection.body_bytes and own + more > LIMITS.http_body_share_bytes:
            others = own - connection.body_bytes
            raise Refused(429, f"requests of {connection.client} already have {others} bytes here: await their answers")
        displaced = None
        if self._body_bytes > connection.body_bytes and self._body_bytes + more > LIMITS.http_bodies_bytes:
            displaced = self._largest_unfinished(own + more)
            if displaced is None or self._body_bytes - displaced.body_bytes + more > LIMITS.http_bodies_bytes:
                text = f"requests of {self._body_bytes} bytes are being received or answered: retry later"
                raise Refused(503, text)
            self.remove(displaced)
        connection.body_bytes += more
        self._body_bytes += more
        self._bytes_of[connection.client] = own + more
        return displaced

    def _largest_unfinished(self, own_bytes: int) -> AdmittedConnection | None:
        """The largest unfinished body of the client that has the most bytes of all, if more than `own_bytes`."""
        unfinished = [
            other for other in self._open if other.is_receiving and self._bytes_of[other.client] > own_bytes
        ]  # fmt: skip
        return max(unfinished, key=lambda other: (self._bytes_of[other.client], other.body_bytes), default=None)

    def _uncount(self, connection: AdmittedConnection) -> None:
        """The body of the connection's request takes no memory any more."""
        if connection.body_bytes:
            self._body_bytes -= connection.body_bytes
            self._bytes_of[connection.client] -= connection.body_bytes
            if not self._bytes_of[connection.client]:
                del self._bytes_of[connection.client]
            connection.body_bytes = 0


class RefusalLog:
    """Logs who was refused and why, once a minute for each client and reason, however often it happens, and counts the
    recent refusals of each."""

    def __init__(self) -> None:
        self._logged: OrderedDict[tuple[str, str], tuple[float, int]] = OrderedDict()
        self._counts: tuple[Refusals, Refusals] = {}, {}
        """Refusals of the half window that has ended, and of the present one."""
        self._counted_since = -math.inf

    def recent(self, now: float) -> Refusals:
        """The recent refusals by client and reason."""
        self._end_half_window(now)
        return sum_refusals(self._counts)

    def _end_half_window(self, now: float) -> None:
        age_s = now - self._counted_since
        if age_s >= REFUSALS_WINDOW_S / 2:
            self._counts = (self._counts[1] if age_s < REFUSALS_WINDOW_S else {}), {}
            self._counted_since = now

    def record(self, client: str, reason: str, text: str, now: float) -> None:
        """Log and count that `client` was refused for `reason`, with the details `text`."""
        self._end_half_window(now)
        counts = self._counts[1]
        if client in counts or len(counts) < MAX_LOGGED_CLIENTS:
            counts.setdefault(client, Counter())[reason] += 1
        key = client, reason
        logged_at, unlogged = self._logged.get(key, (-math.inf, 0))
        if now - logged_at < LOG_INTERVAL_S:
            self._logged[key] = logged_at, unlogged + 1
            return
        self._logged[key] = now, 0
        self._logged.move_to_end(key)
        while len(self._logged) > MAX_LOGGED_CLIENTS:
            self._logged.popitem(last=False)
        since = f" ({unlogged} more since the last such line)" if unlogged else ""
        log.warning("refused %s: %s: %s%s", client, reason, text, since)


def sum_refusals(parts: Iterable[Mapping[str, Mapping[str, int]]]) -> Refusals:
    """Refusals of several periods or processes, summed."""
    total: Refusals = {}
    for part in parts:
        for client, reasons in list(part.items()):  # copied, as another thread may be counting
            total.setdefault(client, Counter()).update(dict(reasons))
    return total


def flooding_clients(refusals: Refusals) -> dict[str, tuple[int, str]]:
    """The clients whose recent refusals are a flood: their number, and the reasons, most frequent first. Who is refused
    because the server is full may be the victim, so that does not count."""
    floods = {}
    for client, reasons in refusals.items():
        counted = Counter({reason: count for reason, count in reasons.items() if reason != FULL})
        if counted.total() >= FLOOD_REFUSALS:
            floods[client] = counted.total(), ", ".join(reason for reason, _ in counted.most_common())
    return floods


def reason_of(status: int) -> str:
    """The reason for a refusal with this HTTP status."""
    return _REASON_BY_STATUS.get(status, MALFORMED)


def client_of(sock: socket.socket, peer: Peer, *, tls: bool = False) -> str:
    """The client that a new connection is counted for, until it shows a certificate: the address, or, without TLS, the
    user at the other end where that is a program of this machine. OSError if it has gone."""
    if peer.is_local_socket:
        return f"user {peer.user}"
    address = ipaddress.ip_address(sock.getpeername()[0].partition("%")[0])
    mapped = getattr(address, "ipv4_mapped", None)
    address = mapped or address
    if not tls and address.is_loopback and peer.user is not None:
        return f"user {peer.user}"
    if address.version == 6 and not address.is_loopback:
        return f"network {ipaddress.ip_network(f'{address}/{IPV6_NETWORK_BITS}', strict=False)}"
    return f"address {address}"
