"""Routes for the installation's signing keys: show, change, add signatures."""

from __future__ import annotations

from typing import Any

from fastapi import Request

from edgesplit_controller.api.authorisation import admin_routes, viewer_routes
from edgesplit_controller.api.dispatch import controller_of, run_heavy
from edgesplit_controller.api.request_models import KeyChangeBody, RenewedBody, SignaturesBody
from edgesplit_controller.api.response_models import Change, Dropped, KeysShape, Waiting, json_response
from edgesplit_controller.tuf.rotation import ExternalSignature

viewers = viewer_routes()
admins = admin_routes()


@viewers.get("/keys", responses=json_response(KeysShape))
def keys(request: Request) -> dict[str, Any]:
    """The keys of every role, the pending key change, and reminders of what is due."""
    return controller_of(request).signing.view()


@admins.post("/keys/change", responses=json_response(Change))
async def change_keys(request: Request, body: KeyChangeBody) -> dict[str, Any]:
    """Begin or continue a key change: done, or what must be signed."""
    return await run_heavy(request, controller_of(request).signing.change, body.to_change())


@viewers.get("/keys/change", responses=json_response(Waiting))
def waiting_change(request: Request) -> dict[str, Any]:
    """The pending key change, and what must be signed for it now."""
    return controller_of(request).signing.pending_change()


@admins.delete("/keys/change", responses=json_response(Dropped))
def drop_change(request: Request) -> dict[str, Any]:
    """Cancel the pending key change."""
    return controller_of(request).signing.drop_change()


@admins.post("/keys/signatures", responses=json_response(Change))
async def sign_change(request: Request, body: SignaturesBody) -> dict[str, Any]:
    """Add signatures to the pending key change: done, or what must still be signed."""
    root = [ExternalSignature(signature.keyid, signature.sig) for signature in body.root]
    targets = [ExternalSignature(signature.keyid, signature.sig) for signature in body.targets]
    return await run_heavy(request, controller_of(request).signing.add_signatures, root, targets)


@admins.post("/keys/renew", responses=json_response(Change))
async def renew_list(request: Request) -> dict[str, Any]:
    """Extend the validity of the targets metadata (the list of releases): done, or what the release key must sign."""
    return await run_heavy(request, controller_of(request).signing.renew)


@admins.post("/keys/renew/signed", responses=json_response(Change))
async def renewed_list(request: Request, body: RenewedBody) -> dict[str, Any]:
    """Publish targets metadata with a later expiry that was signed on another machine."""
    return await run_heavy(request, controller_of(request).signing.publish_renewed, body.next_targets.encode())
