"""Bounds on what the API takes in: bytes per body, before they are read; queries in ASCII; calls per address."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping

from starlette.types import ASGIApp, Message, Receive, Scope, Send

ADDRESSES = 10_000
"""Remembered by a rate limit; the longest unseen is forgotten first."""
PATIENCE_S = 60.0
DRAIN_S = 20.0
"""How long what is too long may go on arriving, unread, before the connection is closed."""


class BodyBounds:
    """ASGI middleware: a body longer than its path allows is answered 413, by its declared length or while it comes;
    one that does not come, 408."""

    def __init__(
        self, app: ASGIApp, *, default: int, by_suffix: Mapping[str, int], patience_s: float = PATIENCE_S
    ) -> None:
        """`patience_s`: how long a body of the default bound may take to come; longer ones may take longer."""
        self._app = app
        self._patience_s = patience_s
        self._default = default
        self._by_suffix = dict(by_suffix)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on, its body counted."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        if not scope.get("query_string", b"").isascii():  # RFC 3986 2.1; starlette fails on it in many places
            await _answer(send, 400, "the query has bytes that are not percent-encoded")
            return
        most = next((most for suffix, most in self._by_suffix.items() if scope["path"].endswith(suffix)), self._default)
        declared = dict(scope["headers"]).get(b"content-length", b"0")
        if not declared.isdigit() or int(declared[:19]) > most:
            await _drain(receive)
            await _refuse(send, most)
            return
        taken = 0
        started = whole = False
        deadline = asyncio.get_running_loop().time() + self._patience_s if most == self._default else None

        async def counted() -> Message:
            nonlocal taken, whole
            async with asyncio.timeout_at(None if whole else deadline):
                message = await receive()
            whole = not message.get("more_body")
            taken += len(message.get("body", b""))
            if taken > most:
                raise _TooLong
            return message

        async def watched(message: Message) -> None:
            nonlocal started
            started = True
            await send(message)

        try:
            await self._app(scope, counted, watched)
        except _TooLong:
            if not started:
                await _drain(receive)
                await _refuse(send, most)
        except TimeoutError:
            if whole or started:
                raise
            await _answer(send, 408, f"the body did not come within {self._patience_s:.0f} s")


class _TooLong(Exception):
    """More came than was allowed."""


async def _drain(receive: Receive) -> None:
    """Let the rest of the body pass for a while: a client reads an answer only once it has sent what it wanted to."""
    try:
        async with asyncio.timeout(DRAIN_S):
            while (message := await receive())["type"] == "http.request" and message.get("more_body"):
                pass
    except TimeoutError:
        return


async def _refuse(send: Send, most: int) -> None:
    await _answer(send, 413, f"the body is longer than {most} bytes")


async def _answer(send: Send, status: int, text: str) -> None:
    """An error as the API words it; the connection ends with it."""
    body = json.dumps({"error": text, "kind": "UsageError"}).encode()
    headers = [
        (b"content-type", b"application/json"),
        (b"content-length", str(len(body)).encode()),
        (b"connection", b"close"),
    ]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


class RateLimit:
    """So many calls a second per address, and a burst above that. Thread-safe, bounded in memory."""

    def __init__(self, *, per_s: float, burst: int, now: Callable[[], float] = time.monotonic) -> None:
        self._per_s = per_s
        self._burst = burst
        self._now = now
        self._left: OrderedDict[str, tuple[float, float]] = OrderedDict()
        self._lock = threading.Lock()

    def allow(self, address: str) -> bool:
        """Is there room for one more call from there?"""
        with self._lock:
            now = self._now()
            left, at = self._left.pop(address, (float(self._burst), now))
            left = min(float(self._burst), left + (now - at) * self._per_s)
            allowed = left >= 1.0
            self._left[address] = (left - 1.0 if allowed else left, now)
            while len(self._left) > ADDRESSES:
                self._left.popitem(last=False)
            return allowed

    def give_back(self, address: str) -> None:
        """A call from there turned out to be one that need not be limited."""
        with self._lock:
            if address in self._left:
                left, at = self._left[address]
                self._left[address] = (left + 1.0, at)
