"""The installation's signing keys: shown, changed, signed for."""

from __future__ import annotations

from typing import Any

from fastapi import Request

from edgesplit_controller.api.authorisation import admin_routes, viewer_routes
from edgesplit_controller.api.dispatch import controller_of, heavily
from edgesplit_controller.api.request_models import KeyChangeBody, RenewedBody, SignaturesBody
from edgesplit_controller.api.response_models import Change, Dropped, KeysShape, Waiting, answers
from edgesplit_controller.tuf.rotation import GivenSignature

viewers = viewer_routes()
admins = admin_routes()


@viewers.get("/keys", responses=answers(KeysShape))
def keys(request: Request) -> dict[str, Any]:
    """Every role's keys, what waits for signatures, what is due."""
    return controller_of(request).signing.shown()


@admins.post("/keys/change", responses=answers(Change))
async def change_keys(request: Request, body: KeyChangeBody) -> dict[str, Any]:
    """Begin a change of the keys, or go on with it: done, or what is to be signed."""
    return await heavily(request, controller_of(request).signing.change, body.change())


@viewers.get("/keys/change", responses=answers(Waiting))
def waiting_change(request: Request) -> dict[str, Any]:
    """The change that waits, as it must be signed now."""
    return controller_of(request).signing.waiting()


@admins.delete("/keys/change", responses=answers(Dropped))
def drop_change(request: Request) -> dict[str, Any]:
    """Give the change that waits up."""
    return controller_of(request).signing.drop()


@admins.post("/keys/signatures", responses=answers(Change))
async def sign_change(request: Request, body: SignaturesBody) -> dict[str, Any]:
    """Add signatures to the change that waits: done, or what is still to be signed."""
    root = [GivenSignature(one.keyid, one.sig) for one in body.root]
    targets = [GivenSignature(one.keyid, one.sig) for one in body.targets]
    return await heavily(request, controller_of(request).signing.add_signatures, root, targets)


@admins.post("/keys/renew", responses=answers(Change))
async def renew_list(request: Request) -> dict[str, Any]:
    """A later end for the list of releases: done, or what the release key must sign."""
    return await heavily(request, controller_of(request).signing.renew)


@admins.post("/keys/renewed", responses=answers(Change))
async def renewed_list(request: Request, body: RenewedBody) -> dict[str, Any]:
    """The same, signed elsewhere."""
    return await heavily(request, controller_of(request).signing.renewed, body.next_targets.encode())
