"""Adds the request id, the trace context and the operator to every log line of a request, and logs each request.

The request id is that of the response header `X-Request-Id` (`security_headers`); a W3C trace context in the request is
logged too. Reading calls are logged at debug level, changes at info level.
"""

from __future__ import annotations

import logging
from time import perf_counter

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from edgesplit.observability import log_format, trace_context
from edgesplit_controller.api.security_headers import REQUEST_ID

log = logging.getLogger(__name__)

_READS = frozenset({"GET", "HEAD", "OPTIONS"})
"""Methods that are logged at debug level."""
MAX_PATH_CHARS = 200
"""Characters of the path that are logged."""


class RequestLoggingMiddleware:
    """ASGI middleware, inside of the one in `security_headers`."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on with its log context, then log method, path, status and duration."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        started_s, status = perf_counter(), 0

        async def send_with_status(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = int(message["status"])
            await send(message)

        incoming_trace = trace_context.from_headers(
            {key.decode("latin-1"): value.decode("latin-1") for key, value in scope["headers"]}
        )
        with trace_context.request_context(incoming_trace, str(scope.get(REQUEST_ID, ""))), log_format.log_context():
            try:
                await self._app(scope, receive, send_with_status)
            finally:
                level = logging.DEBUG if scope["method"] in _READS else logging.INFO
                path = scope["path"][:MAX_PATH_CHARS]
                log.log(level, "%s %r: %d in %.3f s", scope["method"], path, status, perf_counter() - started_s)
