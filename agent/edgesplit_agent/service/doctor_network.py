"""Doctor's checks of the connections to controller, broker and offload server.

Each step is checked by itself, to show which one fails: name resolution, connection, TLS, and whether the server
accepts this device.
"""

from __future__ import annotations

import socket
import ssl
import time
from collections.abc import Iterator
from email.utils import parsedate_to_datetime
from urllib.parse import urlsplit

from edgesplit.observability.doctor_findings import Finding, bad, good, warning
from edgesplit.trust.identity import enrolment_context
from edgesplit_agent.control.enrolment import credentials
from edgesplit_agent.state.data_folder import DataFolder, Identity

TIMEOUT_S = 5.0
LISTEN_S = 0.5
"""Seconds to wait for a server's refusal: with TLS 1.3 a server refuses a client certificate only after the handshake.
"""
CLOCK_S = 60.0
"""Tolerated difference of the clocks."""
PORTS = {"https": 443, "mqtts": 8883}


def check_servers(folder: DataFolder, identity: Identity, now: float) -> Iterator[Finding]:
    """Checks of the three servers, with this device's certificate."""
    tls = credentials(folder).client_context()
    for name, url in (
        ("controller", identity.controller),
        ("broker", f"mqtts://{identity.broker}"),
        ("offload", identity.offload),
    ):
        if url:
            yield from check_server(name, url, tls, now)


def check_server(
    name: str, url: str, tls: ssl.SSLContext | None, now: float, *, ca_pem: str = "", must_accept: bool = True
) -> Iterator[Finding]:
    """Checks of one server, by `ca_pem` alone where this device has no certificate for it. `must_accept`: the server
    must accept this device too."""
    parts = urlsplit(url)
    host = parts.hostname or ""
    port = parts.port or PORTS.get(parts.scheme, 443)
    address = f"{host}:{port}"
    try:
        socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except OSError as error:
        todo = "check the network and its DNS: ip addr, getent hosts"
        yield bad(name, f"the name {host} cannot be resolved: {error.strerror}", todo)
        return
    started = time.monotonic()
    try:
        raw = socket.create_connection((host, port), timeout=TIMEOUT_S)
    except OSError as error:
        todo = f"is it running, and does a firewall let {address} through?"
        yield bad(name, f"no connection to {address}: {error.strerror or error}", todo)
        return
    taken_ms = 1000 * (time.monotonic() - started)
    try:
        context = tls if tls is not None else enrolment_context(ca_pem)
        with context.wrap_socket(raw, server_hostname=host) as secured:
            if must_accept:
                yield from _check_accepted(name, address, secured, now, taken_ms)
            else:
                yield _connected_finding(name, address, secured, now, taken_ms)
    except ssl.SSLCertVerificationError as error:
        yield bad(
            name,
            f"the certificate of {address} is not trusted: {error.verify_message}",
            "check the clock, the claim's authority, and the server's name",
        )
    except OSError as error:
        yield bad(
            name,
            f"TLS with {address} fails: {error}",
            "is that the right port? was this device revoked? (edgectl device list)",
        )
    finally:
        raw.close()


def _check_accepted(name: str, address: str, secured: ssl.SSLSocket, now: float, taken_ms: float) -> Iterator[Finding]:
    """Whether the server accepts this device after the handshake, and for the controller whether the clocks agree."""
    date = ""
    if name == "broker":
        secured.settimeout(LISTEN_S)
        try:
            if secured.recv(1) == b"":
                yield bad(name, f"{address} closed the connection", "was this device revoked? (edgectl device list)")
                return
        except TimeoutError:
            pass  # the broker waits for the first MQTT packet: the certificate was accepted
    else:
        path = "/v1/health" if name == "controller" else "/v2/health/live"
        secured.sendall(f"GET {path} HTTP/1.1\r\nHost: {address}\r\nConnection: close\r\n\r\n".encode())
        head = secured.recv(4_096).decode("latin-1")
        if not head.startswith("HTTP/1."):
            yield bad(name, f"{address} does not speak HTTP", "is that the right port?")
            return
        date = next((line[5:].strip() for line in head.split("\r\n") if line.lower().startswith("date:")), "")
    yield _connected_finding(name, address, secured, now, taken_ms)
    if date and name == "controller":
        yield from _check_clock(date, now)


def _connected_finding(name: str, address: str, secured: ssl.SSLSocket, now: float, taken_ms: float) -> Finding:
    """The finding of a successful connection; a warning where the server's certificate, which verified, expires
    soon."""
    ends = ssl.cert_time_to_seconds(str((secured.getpeercert() or {}).get("notAfter")))
    until = time.strftime("%Y-%m-%d", time.gmtime(ends))
    summary = f"{address} in {taken_ms:.0f} ms, certificate until {until}"
    if ends < now + 7 * 86_400:
        return warning(name, summary, "its certificate expires soon: restart the controller, which makes a new one")
    return good(name, summary)


def _check_clock(date: str, now: float) -> Iterator[Finding]:
    try:
        server_time = parsedate_to_datetime(date).timestamp()
    except (TypeError, ValueError):
        return
    difference_s = now - server_time
    if abs(difference_s) > CLOCK_S:
        how = "ahead of" if difference_s > 0 else "behind"
        yield warning("clock", f"{abs(difference_s):,.0f} s {how} the controller's", "set it: timedatectl set-ntp true")
    else:
        yield good("clock", "as the controller's, within a minute")
