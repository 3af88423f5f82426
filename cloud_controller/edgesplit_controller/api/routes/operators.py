"""Operators: who may ask for what."""

from __future__ import annotations

from typing import Any

from fastapi import Request
from pydantic import Field

from edgesplit_controller.access.authenticator import Gate
from edgesplit_controller.access.operators import LIFE_S, Equipped, OperatorWish
from edgesplit_controller.api.authorisation import about, admin_routes, caller_of, viewer_routes
from edgesplit_controller.api.dispatch import controller_of
from edgesplit_controller.api.request_models import Body
from edgesplit_controller.api.response_models import EquippedShape, OperatorShape, OperatorState, answers
from edgesplit_controller.caller import Role

admins = admin_routes(everywhere=False)
certified = viewer_routes(certificate=True)
REQUEST_LETTERS = 8_192


class OperatorBody(Body):
    """An operator to be."""

    name: str = Field(max_length=63)
    role: str = Field(max_length=16)
    groups: list[str] = Field(default=[], max_length=64)
    """Of devices; empty: all."""
    expires_s: int = LIFE_S
    csr_pem: str = Field(default="", max_length=REQUEST_LETTERS)
    """A certificate request for a key that stays with its operator; empty: no certificate."""


class RotateBody(Body):
    """An operator whose token is to be another."""

    csr_pem: str = Field(default="", max_length=REQUEST_LETTERS)
    expires_s: int = 0
    """From now; 0: as it was."""


@admins.get("/operators", responses=answers(list[OperatorShape]))
def operators(request: Request) -> list[dict[str, Any]]:
    """Every operator that who asks may change."""
    return _gate(request).operators.all(caller_of(request))


@admins.post("/operators", responses=answers(EquippedShape))
def add_operator(request: Request, body: OperatorBody) -> dict[str, Any]:
    """A new operator; the answer holds their token, which is shown this once."""
    about(request, body.name, body.role, *body.groups)
    wish = OperatorWish(body.name, Role.parse(body.role), tuple(body.groups), body.expires_s)
    return _told(request, _gate(request).operators.add(wish, body.csr_pem, caller_of(request)))


@admins.post("/operators/{name}/rotate", responses=answers(EquippedShape))
def rotate_operator(request: Request, name: str, body: RotateBody) -> dict[str, Any]:
    """A new token, and for a certificate request a new certificate; the old ones end."""
    given = _gate(request).operators.rotate(name, body.csr_pem, caller_of(request), body.expires_s)
    return _told(request, given)


@admins.delete("/operators/{name}", responses=answers(OperatorState))
def revoke_operator(request: Request, name: str) -> dict[str, Any]:
    """From now on this operator is nobody."""
    _gate(request).operators.revoke(name, caller_of(request))
    return {"operator": name, "state": "revoked"}


@certified.post("/operator/token", responses=answers(EquippedShape))
def rotate_own(request: Request, body: RotateBody) -> dict[str, Any]:
    """A new token for who asks; the old one ends. They last no longer for it."""
    caller = caller_of(request)
    about(request, caller.operator)
    return _told(request, _gate(request).operators.rotate_own(caller, body.csr_pem))


def _gate(request: Request) -> Gate:
    gate: Gate = request.app.state.gate
    return gate


def _told(request: Request, given: Equipped) -> dict[str, Any]:
    """All that an operator's credentials file needs, but for the private key."""
    controller = controller_of(request)
    return {
        "operator": given.operator,
        "token": given.token,
        "certificate_pem": given.certificate_pem,
        "expires": given.expires,
        "url": controller.addresses.api_url,
        "ca_pem": controller.authority.ca_pem,
    }
