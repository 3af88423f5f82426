"""What a doctor sees of the way to controller, broker and offload server.

Each step by itself, so that it is known which one fails: name, connection, TLS, and whether we are let in.
"""

from __future__ import annotations

import socket
import ssl
import time
from collections.abc import Iterator
from email.utils import parsedate_to_datetime
from urllib.parse import urlsplit

from edgesplit.trust.identity import enrolment_context
from edgesplit_agent.control.enrolment import credentials
from edgesplit_agent.service.doctor_findings import Finding, bad, good, warning
from edgesplit_agent.state.data_folder import DataFolder, Identity

PATIENCE_S = 5.0
LISTEN_S = 0.5
"""A server that refuses a certificate says so when the handshake is over (TLS 1.3): we listen for so long."""
CLOCK_S = 60.0
PORTS = {"https": 443, "mqtts": 8883}


def way(folder: DataFolder, identity: Identity, now: float) -> Iterator[Finding]:
    """To each of the three, with our certificate."""
    tls = credentials(folder).client_context()
    for name, url in (
        ("controller", identity.controller),
        ("broker", f"mqtts://{identity.broker}"),
        ("offload", identity.offload),
    ):
        if url:
            yield from reach(name, url, tls, now)


def reach(
    name: str, url: str, tls: ssl.SSLContext | None, now: float, *, ca_pem: str = "", enters: bool = True
) -> Iterator[Finding]:
    """One server; by `ca_pem` alone where we have no certificate for it. `enters`: we should be let in too."""
    parts = urlsplit(url)
    host = parts.hostname or ""
    port = parts.port or PORTS.get(parts.scheme, 443)
    at = f"{host}:{port}"
    try:
        socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except OSError as error:
        todo = "look at the network and its DNS: ip addr, getent hosts"
        yield bad(name, f"the name {host} is not known here: {error.strerror}", todo)
        return
    started = time.monotonic()
    try:
        raw = socket.create_connection((host, port), timeout=PATIENCE_S)
    except OSError as error:
        todo = f"is it running, and does a firewall let {at} through?"
        yield bad(name, f"no connection to {at}: {error.strerror or error}", todo)
        return
    taken_ms = 1000 * (time.monotonic() - started)
    try:
        context = tls if tls is not None else enrolment_context(ca_pem)
        with context.wrap_socket(raw, server_hostname=host) as secured:
            if enters:
                yield from _let_in(name, at, secured, now, taken_ms)
            else:
                yield _shown(name, at, secured, now, taken_ms)
    except ssl.SSLCertVerificationError as error:
        yield bad(
            name,
            f"{at} is not believed: {error.verify_message}",
            "is the clock right, is it our controller's authority, is that its name?",
        )
    except OSError as error:
        yield bad(
            name,
            f"TLS with {at} fails: {error}",
            "is that the right port? was this device revoked? (edgectl device list)",
        )
    finally:
        raw.close()


def _let_in(name: str, at: str, secured: ssl.SSLSocket, now: float, taken_ms: float) -> Iterator[Finding]:
    date = ""
    if name == "broker":
        secured.settimeout(LISTEN_S)
        try:
            if secured.recv(1) == b"":
                yield bad(name, f"{at} hung up on us", "was this device revoked? (edgectl device list)")
                return
        except TimeoutError:
            pass  # it waits for us to speak: we are let in
    else:
        path = "/v1/health" if name == "controller" else "/v2/health/live"
        secured.sendall(f"GET {path} HTTP/1.1\r\nHost: {at}\r\nConnection: close\r\n\r\n".encode())
        head = secured.recv(4_096).decode("latin-1")
        if not head.startswith("HTTP/1."):
            yield bad(name, f"{at} does not speak HTTP", "is that the right port?")
            return
        date = next((line[5:].strip() for line in head.split("\r\n") if line.lower().startswith("date:")), "")
    yield _shown(name, at, secured, now, taken_ms)
    if date and name == "controller":
        yield from _clock(date, now)


def _shown(name: str, at: str, secured: ssl.SSLSocket, now: float, taken_ms: float) -> Finding:
    """What its certificate says, which is believed."""
    ends = ssl.cert_time_to_seconds(str((secured.getpeercert() or {}).get("notAfter")))
    until = time.strftime("%Y-%m-%d", time.gmtime(ends))
    said = f"{at} in {taken_ms:.0f} ms, certificate until {until}"
    if ends < now + 7 * 86_400:
        return warning(name, said, "its certificate ends soon: start the controller anew, it makes a new one")
    return good(name, said)


def _clock(date: str, now: float) -> Iterator[Finding]:
    try:
        theirs = parsedate_to_datetime(date).timestamp()
    except (TypeError, ValueError):
        return
    apart_s = now - theirs
    if abs(apart_s) > CLOCK_S:
        how = "ahead of" if apart_s > 0 else "behind"
        yield warning("clock", f"{abs(apart_s):,.0f} s {how} the controller's", "set it: timedatectl set-ntp true")
    else:
        yield good("clock", "as the controller's, within a minute")
