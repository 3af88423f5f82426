"""Routes for operators: list, add, rotate credentials, revoke."""

from __future__ import annotations

from typing import Any

from fastapi import Request
from pydantic import Field

from edgesplit_controller.access.operators import DEFAULT_VALIDITY_S, NewOperator, OperatorCredentials
from edgesplit_controller.api.authorisation import (
    admin_routes,
    authenticator_of,
    caller_of,
    set_audit_subject,
    viewer_routes,
)
from edgesplit_controller.api.dispatch import controller_of
from edgesplit_controller.api.request_models import Body
from edgesplit_controller.api.response_models import EquippedShape, OperatorShape, OperatorState, json_response
from edgesplit_controller.caller import Role

admins = admin_routes(everywhere=False)
certified = viewer_routes(certificate=True)
REQUEST_LETTERS = 8_192


class OperatorBody(Body):
    """An operator to be created."""

    name: str = Field(max_length=63)
    role: str = Field(max_length=16)
    groups: list[str] = Field(default=[], max_length=64)
    """Groups of devices; empty: all groups."""
    expires_s: int = DEFAULT_VALIDITY_S
    csr_pem: str = Field(default="", max_length=REQUEST_LETTERS)
    """A certificate request, whose private key stays with the operator; empty: no certificate."""


class RotateBody(Body):
    """A request for new credentials."""

    csr_pem: str = Field(default="", max_length=REQUEST_LETTERS)
    expires_s: int = 0
    """New validity in seconds from now; 0: unchanged."""


@admins.get("/operators", responses=json_response(list[OperatorShape]))
def operators(request: Request) -> list[dict[str, Any]]:
    """Every operator that the caller may change."""
    return authenticator_of(request).operators.all(caller_of(request))


@admins.post("/operators", responses=json_response(EquippedShape))
def add_operator(request: Request, body: OperatorBody) -> dict[str, Any]:
    """Create an operator; the response contains its token, which is not returned again."""
    set_audit_subject(request, body.name, body.role, *body.groups)
    operator = NewOperator(body.name, Role.parse(body.role), tuple(body.groups), body.expires_s)
    credentials = authenticator_of(request).operators.add(operator, body.csr_pem, caller_of(request))
    return _credentials_response(request, credentials)


@admins.post("/operators/{name}/rotate", responses=json_response(EquippedShape))
def rotate_operator(request: Request, name: str, body: RotateBody) -> dict[str, Any]:
    """Issue a new token and, for a certificate request, a new certificate; the old ones end."""
    credentials = authenticator_of(request).operators.rotate(name, body.csr_pem, caller_of(request), body.expires_s)
    return _credentials_response(request, credentials)


@admins.delete("/operators/{name}", responses=json_response(OperatorState))
def revoke_operator(request: Request, name: str) -> dict[str, Any]:
    """Revoke an operator."""
    authenticator_of(request).operators.revoke(name, caller_of(request))
    return {"operator": name, "state": "revoked"}


@certified.post("/operator/token", responses=json_response(EquippedShape))
def rotate_own(request: Request, body: RotateBody) -> dict[str, Any]:
    """Issue a new token for the caller; the old one ends. The caller's validity does not change."""
    caller = caller_of(request)
    set_audit_subject(request, caller.operator)
    return _credentials_response(request, authenticator_of(request).operators.rotate_own(caller, body.csr_pem))


def _credentials_response(request: Request, credentials: OperatorCredentials) -> dict[str, Any]:
    """Content of an operator's credentials file, without the private key."""
    controller = controller_of(request)
    return {
        "operator": credentials.operator, "token": credentials.token, "certificate_pem": credentials.certificate_pem,
        "expires": credentials.expires, "url": controller.addresses.api_url, "ca_pem": controller.authority.ca_pem,
    }  # fmt: skip
