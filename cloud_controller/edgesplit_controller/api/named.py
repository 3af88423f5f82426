"""Every request has a name, by which its log lines and its answer are found again.

The name is the client's (`X-Request-Id`) where that is harmless, else one of ours; the answer carries it. Changes are
logged, each on one line, with who asked and what was answered; what only reads is logged at debug level.
"""

from __future__ import annotations

import logging
import re
import uuid
from time import perf_counter

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from edgesplit.seen import logs, trace

log = logging.getLogger(__name__)

HEADER = b"x-request-id"
_HARMLESS = re.compile(rb"[A-Za-z0-9._-]{1,80}")
_READS = frozenset({"GET", "HEAD", "OPTIONS"})


class NamedRequests:
    """ASGI middleware: what is logged for a request says which one."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on, named."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = dict(scope["headers"])
        name = request_name(headers.get(HEADER))
        began, status = perf_counter(), 0

        async def told(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = int(message["status"])
                message = {**message, "headers": [*message.get("headers", ()), (HEADER, name.encode())]}
            await send(message)

        given = trace.given({key.decode("latin-1"): value.decode("latin-1") for key, value in headers.items()})
        with trace.working_for(given, name), logs.about():
            try:
                await self._app(scope, receive, told)
            finally:
                level = logging.DEBUG if scope["method"] in _READS else logging.INFO
                path = scope["path"][:200]
                log.log(level, "%s %r: %d in %.3f s", scope["method"], path, status, perf_counter() - began)


def request_name(given: bytes | None) -> str:
    """The client's name for it, or one of ours."""
    return given.decode() if given is not None and _HARMLESS.fullmatch(given) else uuid.uuid4().hex
