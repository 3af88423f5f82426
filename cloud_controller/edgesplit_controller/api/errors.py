"""Errors as the API answers them: `{"error": text, "kind": name}` with the status of their kind."""

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
from edgesplit_controller.errors import Conflict, Forbidden, NotAllowed, TooOften

log = logging.getLogger(__name__)

BUSY_S = 2.0
"""When to come back where nothing else is known."""
STATUS: tuple[tuple[type[EdgeError], int], ...] = (
    (errors.NotFound, 404),
    (Conflict, 409),
    (Forbidden, 401),
    (NotAllowed, 403),
    (InfeasibleLimits, 409),
    (ModelRefused, 422),
    (Busy, 429),
    (LinkError, 503),
    (errors.Interrupted, 503),
    (TrustError, 403),
    (UsageError, 400),
    (errors.MalformedMessage, 400),
)


def status_of(error: EdgeError) -> int:
    """The HTTP status of this kind of error."""
    return next((status for kind, status in STATUS if isinstance(error, kind)), 500)


def kind_of(error: EdgeError) -> str:
    """The class in `edgesplit.errors` that a client can raise again."""
    return next(kind.__name__ for kind in type(error).__mro__ if kind.__module__ == errors.__name__)


Handler = Callable[[Request, Exception], Awaitable[JSONResponse]]


async def on_edge_error(_request: Request, error: Exception) -> JSONResponse:
    """Ours: the status of its kind."""
    assert isinstance(error, EdgeError)
    status = status_of(error)
    if status == 500:
        log.error("%s: %s", type(error).__name__, error)
    wait_s = error.wait_s if isinstance(error, TooOften) else BUSY_S
    headers = {401: {"WWW-Authenticate": "Bearer"}, 429: {"Retry-After": str(ceil(wait_s))}}.get(status)
    return JSONResponse({"error": str(error), "kind": kind_of(error)}, status, headers)


async def on_invalid(_request: Request, error: Exception) -> JSONResponse:
    """A body, path or query that is not what the route takes."""
    assert isinstance(error, RequestValidationError)
    first = error.errors()[0]
    where = ".".join(str(part) for part in first["loc"] if part not in ("body", "query", "path"))
    return JSONResponse({"error": f"{where or 'body'}: {first['msg']}", "kind": "UsageError"}, 400)


async def on_http(_request: Request, error: Exception) -> JSONResponse:
    """The framework's: no such path, no such method."""
    assert isinstance(error, HTTPException)
    return JSONResponse({"error": str(error.detail), "kind": "UsageError"}, error.status_code, error.headers)


async def on_anything(request: Request, error: Exception) -> JSONResponse:
    """A fault of ours: the log has it, the answer only its name."""
    log.error("%s %s failed", request.method, request.scope["path"], exc_info=error)
    text = f"the controller failed ({type(error).__name__}); its log says more"
    # Our middleware is inside what calls this: the headers that every answer has are added here.
    added = {name.decode(): value.decode() for name, value in headers_for(request.scope, host_of(request.scope))}
    return JSONResponse({"error": text, "kind": "EdgeError"}, 500, added)
