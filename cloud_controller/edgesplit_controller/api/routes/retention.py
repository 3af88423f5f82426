"""Routes for what ends: undeploying models, removing models and releases, garbage collection."""

from __future__ import annotations

from typing import Any

from fastapi import Request

from edgesplit_controller.api.authorisation import operator_routes, set_audit_subject
from edgesplit_controller.api.dispatch import controller_of
from edgesplit_controller.api.request_models import CollectBody, UndeployBody
from edgesplit_controller.api.response_models import Collected, Removed, Undeployed, json_response

operators = operator_routes()
certified = operator_routes(certificate=True, everywhere=True)


@operators.post("/undeployments", responses=json_response(Undeployed))
def undeploy(request: Request, body: UndeployBody) -> dict[str, Any]:
    """Begin a rollout that removes a model from devices; with `dry_run` only tell which devices that concerns."""
    set_audit_subject(request, body.model, *body.targets[:8])
    call = controller_of(request).undeploy
    return call(body.model, body.targets, body.rollout.to_request(), dry_run=body.dry_run)


@certified.delete("/models/{reference}", responses=json_response(Removed))
def remove_model(request: Request, reference: str) -> dict[str, Any]:
    """Remove a model, or one version of it, with its samples, measurements and releases; refused while it is in use."""
    return controller_of(request).remove_model(reference)


@certified.delete("/releases/{reference}", responses=json_response(Removed))
def remove_release(request: Request, reference: str) -> dict[str, Any]:
    """Remove a release, by its digest or the begin of it; refused while it is in use."""
    return controller_of(request).remove_release(reference)


@certified.post("/collections", responses=json_response(Collected))
def collect(request: Request, body: CollectBody | None = None) -> dict[str, Any]:
    """Delete what the retention rules let go and nothing uses; with `dry_run` only tell what that would be."""
    options = body or CollectBody()
    return controller_of(request).collect_garbage(dry_run=options.dry_run, unused_s=options.keep_unused_s)
