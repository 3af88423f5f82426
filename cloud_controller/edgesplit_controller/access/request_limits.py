"""Limits on requests: body size and duration, enforced while reading, ASCII queries, and calls per client (token
bucket)."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping

from starlette.types import ASGIApp, Message, Receive, Scope, Send

MAX_CLIENTS = 10_000
"""Clients that a rate limit remembers; the least recently used is evicted first."""
BODY_TIMEOUT_S = 60.0
"""Seconds in which a body of the default size limit must arrive."""
DRAIN_S = 20.0
"""Seconds for which the rest of a body that is too long is read and discarded before the connection is closed."""


class BodyLimits:
    """ASGI middleware: 413 for a body longer than its path allows, by its declared or its received length; 408 for one
    that does not arrive in time."""

    def __init__(
        self, app: ASGIApp, *, default: int, by_suffix: Mapping[str, int], timeout_s: float = BODY_TIMEOUT_S
    ) -> None:
        """`default` and `by_suffix` (of the path) are limits in bytes. `timeout_s` is the timeout for bodies with the
        default limit; larger ones have no timeout."""
        self._app = app
        self._timeout_s = timeout_s
        self._default = default
        self._by_suffix = dict(by_suffix)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on, counting its body."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        # RFC 3986, 2.1: starlette raises on other bytes in many places
        if not scope.get("query_string", b"").isascii():
            await send_error(send, 400, "the query has bytes that are not percent-encoded")
            return
        limits = (limit for suffix, limit in self._by_suffix.items() if scope["path"].endswith(suffix))
        limit = next(limits, self._default)
        declared = dict(scope["headers"]).get(b"content-length", b"0")
        if not declared.isdigit() or int(declared[:19]) > limit:
            await _drain(receive)
            await send_error(send, 413, f"the body is longer than {limit} bytes")
            return
        # A declared length was checked above; without one, or with a false one, the bytes are counted as they arrive.
        # Only bodies with the default limit have a deadline: an upload of gigabytes may take its time.
        received_bytes = 0
        has_responded = is_complete = False
        deadline = asyncio.get_running_loop().time() + self._timeout_s if limit == self._default else None

        async def counted() -> Message:
            nonlocal received_bytes, is_complete
            async with asyncio.timeout_at(None if is_complete else deadline):
                message = await receive()
            is_complete = not message.get("more_body")
            received_bytes += len(message.get("body", b""))
            if received_bytes > limit:
                raise _TooLong
            return message

        async def watched(message: Message) -> None:
            nonlocal has_responded
            has_responded = True
            await send(message)

        try:
            await self._app(scope, counted, watched)
        except _TooLong:
            if not has_responded:
                await _drain(receive)
                await send_error(send, 413, f"the body is longer than {limit} bytes")
        except TimeoutError:
            if is_complete or has_responded:
                raise
            await send_error(send, 408, f"the body did not arrive within {self._timeout_s:.0f} s")


class _TooLong(Exception):
    """The body exceeds its limit."""


async def _drain(receive: Receive) -> None:
    """Discard the rest of the body for a while: many clients read the response only after they have sent the whole
    body."""
    try:
        async with asyncio.timeout(DRAIN_S):
            while (message := await receive())["type"] == "http.request" and message.get("more_body"):
                pass
    except TimeoutError:
        return


async def send_error(send: Send, status: int, text: str, *, close: bool = True) -> None:
    """Send an error in the API's JSON format, and with `close` close the connection."""
    body = json.dumps({"error": text, "kind": "UsageError"}).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    headers += [(b"connection", b"close")] if close else []
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


class RateLimit:
    """Token bucket per client: `per_s` calls a second on average, `burst` at once. Thread-safe, bounded in memory."""

    def __init__(self, *, per_s: float, burst: int, now: Callable[[], float] = time.monotonic) -> None:
        self._per_s = per_s
        self._burst = burst
        self._now = now
        self._buckets: OrderedDict[str, tuple[float, float]] = OrderedDict()
        self._lock = threading.Lock()

    def allow(self, client: str) -> bool:
        """Take a token of this client's bucket; False if it is empty."""
        with self._lock:
            now = self._now()
            tokens, updated = self._buckets.pop(client, (float(self._burst), now))
            tokens = min(float(self._burst), tokens + (now - updated) * self._per_s)
            allowed = tokens >= 1.0  # a refused call costs no token, so that steady excess does not lock a client out
            self._buckets[client] = (tokens - 1.0 if allowed else tokens, now)
            while len(self._buckets) > MAX_CLIENTS:
                self._buckets.popitem(last=False)
            return allowed

    def refund(self, client: str) -> None:
        """Return a token: the call turned out not to count."""
        with self._lock:
            if client in self._buckets:
                tokens, updated = self._buckets[client]
                self._buckets[client] = (tokens + 1.0, updated)
