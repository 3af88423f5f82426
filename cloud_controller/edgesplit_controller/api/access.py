"""Who may call what. Every route is made by one of the four functions here, which say whom it lets in; a role may what
the roles below it may.

The operator's certificate and token open everything: the one operator of today is an admin.
"""

from __future__ import annotations

import enum
import hmac

from fastapi import APIRouter, Depends, Request

from edgesplit_controller.peers import SCOPE, Peer
from edgesplit_controller.refusals import Forbidden

OPERATOR = "operator"
"""Whose certificate the operator's calls must show."""


class Role(enum.IntEnum):
    """What an operator may: each what those before it may, and more."""

    VIEWER = 1
    """Read."""
    OPERATOR = 2
    """Change models, devices and deployments."""
    ADMIN = 3
    """Change keys and operators."""


class Needs:
    """A dependency of routes: Forbidden for whoever has not this role."""

    def __init__(self, role: Role) -> None:
        self.role = role

    def __call__(self, request: Request) -> None:
        """Let the request pass, or not."""
        _by_certificate_and_token(request)


def viewer_routes() -> APIRouter:
    """Routes that read."""
    return _routes(Role.VIEWER)


def operator_routes() -> APIRouter:
    """Routes that change models, devices and deployments."""
    return _routes(Role.OPERATOR)


def admin_routes() -> APIRouter:
    """Routes that change keys and operators."""
    return _routes(Role.ADMIN)


def open_routes() -> APIRouter:
    """Routes for everybody."""
    return APIRouter(prefix="/v1")


def _routes(role: Role) -> APIRouter:
    return APIRouter(prefix="/v1", dependencies=[Depends(Needs(role))])


def _by_certificate_and_token(request: Request) -> None:
    """Forbidden without the operator's certificate and token."""
    peer: Peer | None = request.scope.get(SCOPE)
    if peer is None or peer.name != OPERATOR:
        shown = f"that of {peer.name!r}" if peer else "none"
        raise Forbidden(
            f"the operator's certificate is needed (keys/{OPERATOR}.pem in the data folder), and {shown} was shown"
        )
    scheme, _, given = request.headers.get("authorization", "").partition(" ")
    if scheme.lower() != "bearer" or not hmac.compare_digest(given.strip().encode(), request.app.state.token):
        raise Forbidden(
            "an operator's token is needed: `Authorization: Bearer ...`, from operator.token in the data folder"
        )
