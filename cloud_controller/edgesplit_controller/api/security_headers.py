"""What every answer carries, and what no request gets past: ASGI middleware around the whole API.

Every answer has an id of its own (`X-Request-Id`, also in the audit log and in log lines), and headers that keep a
browser from doing more with it than was meant. A request for a host that is not ours (DNS rebinding) is answered 421,
but for the health check, which load balancers ask for by address. No other origin is let in: there are no CORS headers.
"""

from __future__ import annotations

import ipaddress
import json
import secrets
from collections.abc import Collection

from starlette.types import ASGIApp, Message, Receive, Scope, Send

REQUEST_ID = "edgesplit.request_id"
HEALTH = "/v1/health"
HSTS_S = 31_536_000
API_POLICY = "default-src 'none'; frame-ancestors 'none'; base-uri 'none'; form-action 'none'"
PAGE_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; font-src 'self';"
    " connect-src 'self'; manifest-src 'self'; frame-ancestors 'none'; base-uri 'none'; form-action 'none'"
)
ALWAYS: tuple[tuple[bytes, bytes], ...] = (
    (b"x-content-type-options", b"nosniff"),
    (b"x-frame-options", b"DENY"),
    (b"referrer-policy", b"no-referrer"),
    (b"cross-origin-opener-policy", b"same-origin"),
    (b"cross-origin-resource-policy", b"same-origin"),
    (b"permissions-policy", b"camera=(), geolocation=(), microphone=(), payment=(), usb=()"),
)


class Hygiene:
    """ASGI middleware around everything."""

    def __init__(self, app: ASGIApp, hosts: Collection[str]) -> None:
        """`hosts`: names and addresses by which we are reached; any port of theirs is good."""
        self._app = app
        self._hosts = frozenset(host.lower().rstrip(".") for host in hosts)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        scope[REQUEST_ID] = secrets.token_hex(12)
        host = host_of(scope)
        added = headers_for(scope, host)

        async def told(message: Message) -> None:
            if message["type"] == "http.response.start":
                there = {name.lower() for name, _ in message.get("headers", ())}
                more = [(name, value) for name, value in added if name not in there]
                message = {**message, "headers": [*message.get("headers", ()), *more]}
            await send(message)

        if host not in self._hosts and scope["path"] != HEALTH:
            await _misdirected(told, host)
            return
        await self._app(scope, receive, told)


def headers_for(scope: Scope, host: str) -> list[tuple[bytes, bytes]]:
    """What is added to an answer, where it does not say otherwise itself."""
    api = scope["path"].startswith("/v1/")
    policy = API_POLICY if api else PAGE_POLICY
    found = [
        (b"x-request-id", str(scope.get(REQUEST_ID, "")).encode()),
        (b"content-security-policy", policy.encode()),
        (b"cache-control", b"no-store" if api else b"no-cache"),
        *ALWAYS,
    ]
    if _is_name(host):
        found.append((b"strict-transport-security", f"max-age={HSTS_S}".encode()))
    return found


def host_of(scope: Scope) -> str:
    """The host that was asked for, without its port; empty where that is not exactly one."""
    given = [value for name, value in scope["headers"] if name == b"host"]
    if len(given) != 1:
        return ""
    text = bytes(given[0]).decode("latin-1").lower()
    if text.startswith("["):
        return text[1:].partition("]")[0]
    return text.partition(":")[0].rstrip(".")


def _is_name(host: str) -> bool:
    """Is it a name that stands for this host alone? A promise of TLS for `localhost` would bind other programs too."""
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return bool(host) and host != "localhost" and not host.endswith(".localhost")
    return False


async def _misdirected(send: Send, host: str) -> None:
    shown = "".join(letter if letter.isprintable() else "?" for letter in host[:80])
    text = (
        f"this controller is not called {shown!r}: name it with `edgectl up --host`"
        if host
        else "one Host header is needed"
    )
    body = json.dumps({"error": text, "kind": "UsageError"}).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": 421 if host else 400, "headers": headers})
    await send({"type": "http.response.body", "body": body})
