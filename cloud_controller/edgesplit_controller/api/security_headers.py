"""Request ids, security headers and the Host check: ASGI middleware around the whole API.

Every response has an id of its own (`X-Request-Id`, also in the audit log and in log lines) and headers that restrict
what a browser may do with it. A request for a host that is not ours (DNS rebinding) is answered 421, except for the
health check, which load balancers call by address. There are no CORS headers: no other origin has access.
"""

from __future__ import annotations

import ipaddress
import secrets
from collections.abc import Collection

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from edgesplit_controller.access.request_limits import send_error

REQUEST_ID = "edgesplit.request_id"
"""Key of the request id in the ASGI scope."""
HEALTH_PATH = "/v1/health"
"""Path that is served whatever the Host header."""
HSTS_S = 31_536_000
"""Seconds for which a browser must use TLS with this host."""
API_POLICY = "default-src 'none'; frame-ancestors 'none'; base-uri 'none'; form-action 'none'"
"""Content security policy of API responses."""
PAGE_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; font-src 'self';"
    " connect-src 'self'; manifest-src 'self'; frame-ancestors 'none'; base-uri 'none'; form-action 'none'"
)
"""Content security policy of the dashboard's files."""
ALWAYS: tuple[tuple[bytes, bytes], ...] = (
    (b"x-content-type-options", b"nosniff"),
    (b"x-frame-options", b"DENY"),
    (b"referrer-policy", b"no-referrer"),
    (b"cross-origin-opener-policy", b"same-origin"),
    (b"cross-origin-resource-policy", b"same-origin"),
    (b"permissions-policy", b"camera=(), geolocation=(), microphone=(), payment=(), usb=()"),
)
"""Headers of every response."""


class SecurityHeadersMiddleware:
    """ASGI middleware, the outermost one."""

    def __init__(self, app: ASGIApp, hosts: Collection[str]) -> None:
        """`hosts`: names and addresses at which the API is reached; the port is not checked."""
        self._app = app
        self._hosts = frozenset(host.lower().rstrip(".") for host in hosts)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Check the Host header, and add the headers to the response."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        scope[REQUEST_ID] = secrets.token_hex(12)
        host = host_of(scope)
        added = headers_for(scope, host)

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                there = {name.lower() for name, _ in message.get("headers", ())}
                more = [(name, value) for name, value in added if name not in there]
                message = {**message, "headers": [*message.get("headers", ()), *more]}
            await send(message)

        if host not in self._hosts and scope["path"] != HEALTH_PATH:
            await _refuse_host(send_with_headers, host)
            return
        await self._app(scope, receive, send_with_headers)


def headers_for(scope: Scope, host: str) -> list[tuple[bytes, bytes]]:
    """Headers that are added to a response, unless the response has them already."""
    api = scope["path"].startswith("/v1/")
    policy = API_POLICY if api else PAGE_POLICY
    headers = [
        (b"x-request-id", str(scope.get(REQUEST_ID, "")).encode()),
        (b"content-security-policy", policy.encode()),
        (b"cache-control", b"no-store" if api else b"no-cache"),
        *ALWAYS,
    ]
    if _is_name(host):
        headers.append((b"strict-transport-security", f"max-age={HSTS_S}".encode()))
    return headers


def host_of(scope: Scope) -> str:
    """The host in the Host header, without its port; empty unless there is exactly one such header."""
    values = [value for name, value in scope["headers"] if name == b"host"]
    if len(values) != 1:
        return ""
    text = bytes(values[0]).decode("latin-1").lower()
    if text.startswith("["):
        return text[1:].partition("]")[0]
    return text.partition(":")[0].rstrip(".")


def _is_name(host: str) -> bool:
    """Whether the host is a DNS name of this host alone. HSTS for `localhost` would bind other programs too."""
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return bool(host) and host != "localhost" and not host.endswith(".localhost")
    return False


async def _refuse_host(send: Send, host: str) -> None:
    printable = "".join(letter if letter.isprintable() else "?" for letter in host[:80])
    text = (
        f"this controller is not called {printable!r}: name it with `edgectl up --host`"
        if host
        else "one Host header is needed"
    )
    await send_error(send, 421 if host else 400, text, close=False)
