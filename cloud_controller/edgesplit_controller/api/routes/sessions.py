"""Routes for browser sessions: opened by a one-time code, identified by a cookie, ended by logout."""

from __future__ import annotations

from typing import Any

from fastapi import Request, Response
from fastapi.responses import JSONResponse
from pydantic import Field

from edgesplit_controller.access.operators import to_caller as caller_of_row
from edgesplit_controller.access.sessions import csrf_token
from edgesplit_controller.api.authorisation import (
    COOKIE,
    authenticator_of,
    caller_of,
    open_routes,
    parse_credentials,
    set_audit_subject,
    viewer_routes,
)
from edgesplit_controller.api.request_models import Body
from edgesplit_controller.api.response_models import Ended, LoginCode, SessionShape, json_response
from edgesplit_controller.caller import Caller

everybody = open_routes()
viewers = viewer_routes()
certified = viewer_routes(certificate=True)


class LoginBody(Body):
    """A login of a browser."""

    code: str = Field(default="", max_length=200)
    """From `edgectl dashboard`. Empty: log in by the certificate and token of the request."""


@everybody.post("/session", responses=json_response(SessionShape))
def log_in(request: Request, body: LoginBody) -> Response:
    """Open a session; the response sets its cookie. Sessions that were open in this browser end."""
    presented = parse_credentials(request)
    opened = authenticator_of(request).log_in(presented, body.code)
    set_audit_subject(request, opened.operator.name)
    caller = caller_of_row(opened.operator, serial="", address=presented.address)
    response = JSONResponse(_to_dict(caller, opened.secret))
    response.set_cookie(COOKIE, opened.secret, path="/", secure=True, httponly=True, samesite="strict")
    return response


@viewers.get("/session", responses=json_response(SessionShape))
def session(request: Request) -> dict[str, Any]:
    """The caller and, for a browser session, the CSRF token that its changes need."""
    presented = parse_credentials(request)
    return _to_dict(caller_of(request), "" if presented.authorization else presented.session[0])


@viewers.delete("/session", responses=json_response(Ended))
def log_out(request: Request) -> Response:
    """End the session."""
    for secret in parse_credentials(request).session:
        authenticator_of(request).sessions.end(secret)
    response = JSONResponse({"state": "ended"})
    response.delete_cookie(COOKIE, path="/", secure=True, httponly=True, samesite="strict")
    return response


@certified.post("/session/codes", responses=json_response(LoginCode))
def login_code(request: Request) -> dict[str, Any]:
    """A code that opens one browser session as the caller, within two minutes."""
    code, expires = authenticator_of(request).sessions.make_code(caller_of(request).operator)
    return {"code": code, "expires": expires}


def _to_dict(caller: Caller, secret: str) -> dict[str, Any]:
    return {
        "operator": caller.operator,
        "role": caller.role.word,
        "groups": None if caller.groups is None else sorted(caller.groups),
        "csrf": csrf_token(secret) if secret else None,
    }
