"""Sessions of browsers: opened by a one-time code, carried by a cookie, ended by logging out."""

from __future__ import annotations

from typing import Any

from fastapi import Request, Response
from fastapi.responses import JSONResponse
from pydantic import Field

from edgesplit_controller.access.authenticator import Gate
from edgesplit_controller.access.operators import caller_of as caller_of_row
from edgesplit_controller.access.sessions import csrf_token
from edgesplit_controller.api.authorisation import COOKIE, about, caller_of, open_routes, presented_by, viewer_routes
from edgesplit_controller.api.request_models import Body
from edgesplit_controller.api.response_models import Ended, LoginCode, SessionShape, answers
from edgesplit_controller.caller import Caller

everybody = open_routes()
viewers = viewer_routes()
certified = viewer_routes(certificate=True)


class LoginBody(Body):
    """How a browser is let in."""

    code: str = Field(default="", max_length=200)
    """From `edgectl dashboard`. Empty: by the certificate and the token that the request shows."""


@everybody.post("/session", responses=answers(SessionShape))
def log_in(request: Request, body: LoginBody) -> Response:
    """Open a session: its cookie comes with the answer. One that was open in this browser ends."""
    presented = presented_by(request)
    opened = _gate(request).log_in(presented, body.code)
    about(request, opened.operator.name)
    answer = JSONResponse(_shown(caller_of_row(opened.operator, serial="", address=presented.address), opened.secret))
    answer.set_cookie(COOKIE, opened.secret, path="/", secure=True, httponly=True, samesite="strict")
    return answer


@viewers.get("/session", responses=answers(SessionShape))
def session(request: Request) -> dict[str, Any]:
    """Who calls, and for a session the token that its changes need."""
    presented = presented_by(request)
    return _shown(caller_of(request), "" if presented.authorization else presented.session[0])


@viewers.delete("/session", responses=answers(Ended))
def log_out(request: Request) -> Response:
    """End the session."""
    for secret in presented_by(request).session:
        _gate(request).sessions.end(secret)
    answer = JSONResponse({"state": "ended"})
    answer.delete_cookie(COOKIE, path="/", secure=True, httponly=True, samesite="strict")
    return answer


@certified.post("/session/codes", responses=answers(LoginCode))
def login_code(request: Request) -> dict[str, Any]:
    """A code that lets one browser in as who asks, within two minutes."""
    code, expires = _gate(request).sessions.make_code(caller_of(request).operator)
    return {"code": code, "expires": expires}


def _gate(request: Request) -> Gate:
    gate: Gate = request.app.state.gate
    return gate


def _shown(caller: Caller, secret: str) -> dict[str, Any]:
    return {
        "operator": caller.operator,
        "role": caller.role.word,
        "groups": None if caller.groups is None else sorted(caller.groups),
        "csrf": csrf_token(secret) if secret else None,
    }
