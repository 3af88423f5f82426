"""Every line that is logged for a request says which one, and who asked; a change is logged itself, on one line.

The request's name is the one that its answer carries (`hygiene`); a W3C trace that it came with is named too. What only
reads is logged at debug level.
"""

from __future__ import annotations

import logging
from time import perf_counter

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from edgesplit.observability import log_format, trace_context
from edgesplit_controller.api.security_headers import REQUEST_ID

log = logging.getLogger(__name__)

_READS = frozenset({"GET", "HEAD", "OPTIONS"})
LONGEST_PATH = 200


class NamedRequests:
    """ASGI middleware, inside of `Hygiene`."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on, named."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        began, status = perf_counter(), 0

        async def told(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = int(message["status"])
            await send(message)

        given = trace_context.given({key.decode("latin-1"): value.decode("latin-1") for key, value in scope["headers"]})
        with trace_context.working_for(given, str(scope.get(REQUEST_ID, ""))), log_format.about():
            try:
                await self._app(scope, receive, told)
            finally:
                level = logging.DEBUG if scope["method"] in _READS else logging.INFO
                path = scope["path"][:LONGEST_PATH]
                log.log(level, "%s %r: %d in %.3f s", scope["method"], path, status, perf_counter() - began)
