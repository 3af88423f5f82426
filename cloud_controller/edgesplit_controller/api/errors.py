"""Errors as the API returns them: `{"error": text, "kind": name}` with the HTTP status of their kind."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from math import ceil

from fastapi import Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from edgesplit import errors
from edgesplit.errors import Busy, EdgeError, InfeasibleLimits, LinkError, ModelRefused, TrustError, UsageError
from edgesplit_controller.api.security_headers import headers_for, host_of
from edgesplit_controller.errors import Conflict, PermissionDenied, RateLimited, Unauthenticated

log = logging.getLogger(__name__)

DEFAULT_RETRY_AFTER_S = 2.0
"""Seconds in `Retry-After` if the error has no time of its own."""
STATUS_BY_CLASS: tuple[tuple[type[EdgeError], int], ...] = (
    (errors.NotFound, 404), (Conflict, 409), (Unauthenticated, 401), (PermissionDenied, 403),
    (InfeasibleLimits, 409), (ModelRefused, 422), (Busy, 429), (LinkError, 503),
    (errors.Interrupted, 503), (TrustError, 403), (UsageError, 400), (errors.MalformedMessage, 400),
)  # fmt: skip
"""HTTP status by error class; the first class that matches counts."""


def status_of(error: EdgeError) -> int:
    """The HTTP status of an error; 500 for a class that is not in `STATUS_BY_CLASS`."""
    return next((status for kind, status in STATUS_BY_CLASS if isinstance(error, kind)), 500)


Handler = Callable[[Request, Exception], Awaitable[JSONResponse]]


async def on_edge_error(_request: Request, error: Exception) -> JSONResponse:
    """Exception handler for EdgeError: the status of its kind."""
    assert isinstance(error, EdgeError)
    status = status_of(error)
    if status == 500:
        log.error("%s: %s", type(error).__name__, error)
    wait_s = error.wait_s if isinstance(error, RateLimited) else DEFAULT_RETRY_AFTER_S
    headers = {401: {"WWW-Authenticate": "Bearer"}, 429: {"Retry-After": str(ceil(wait_s))}}.get(status)
    return JSONResponse({"error": str(error), "kind": errors.kind_of(error)}, status, headers)


async def on_invalid_request(_request: Request, error: Exception) -> JSONResponse:
    """Exception handler for a body, path or query that does not fit the route's declaration (400)."""
    assert isinstance(error, RequestValidationError)
    first = error.errors()[0]
    where = ".".join(str(part) for part in first["loc"] if part not in ("body", "query", "path"))
    return JSONResponse({"error": f"{where or 'body'}: {first['msg']}", "kind": "UsageError"}, 400)


async def on_http_exception(_request: Request, error: Exception) -> JSONResponse:
    """Exception handler for the framework's errors: unknown path (404), method not allowed (405)."""
    assert isinstance(error, HTTPException)
    return JSONResponse({"error": str(error.detail), "kind": "UsageError"}, error.status_code, error.headers)


async def on_internal_error(request: Request, error: Exception) -> JSONResponse:
    """Exception handler for any other exception (500): the traceback is logged, the response contains only its class
    name."""
    log.error("%s %s failed", request.method, request.scope["path"], exc_info=error)
    text = f"the controller failed ({type(error).__name__}); its log says more"
    # Starlette calls this handler outside of our middleware, so the headers of every response are added here.
    added = {name.decode(): value.decode() for name, value in headers_for(request.scope, host_of(request.scope))}
    return JSONResponse({"error": text, "kind": "EdgeError"}, 500, added)
