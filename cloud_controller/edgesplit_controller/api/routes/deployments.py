"""Routes for plans, deployments and releases."""

from __future__ import annotations

from functools import partial
from typing import Any

from fastapi import Request
from fastapi.responses import Response

from edgesplit_controller.api.authorisation import operator_routes, set_audit_subject, viewer_routes
from edgesplit_controller.api.dispatch import controller_of, run_heavy
from edgesplit_controller.api.request_models import DeployBody, PlanBody, SignedBody
from edgesplit_controller.api.response_models import (
    Deployed,
    DeploymentShape,
    HalvesShape,
    PlanShape,
    ReleaseShape,
    binary_response,
    json_response,
)

viewers = viewer_routes()
operators = operator_routes()
certified = operator_routes(certificate=True)


@operators.post("/plans", responses=json_response(PlanShape))
async def plan(request: Request, body: PlanBody) -> dict[str, Any]:
    """Plan a model for a device profile and a link."""
    set_audit_subject(request, body.model)
    plan = controller_of(request).plan
    return await run_heavy(request, plan, body.model, body.device, body.link or "", body.to_options())


@operators.post("/deployments", responses=json_response(Deployed))
async def deploy(request: Request, body: DeployBody) -> dict[str, Any]:
    """Plan, slice and sign a release, and begin its rollout."""
    set_audit_subject(request, body.model, *body.to[:8])
    rollout_request = body.rollout.to_request()
    call = controller_of(request).deploy
    deploy = partial(call, recut=body.recut, elsewhere=body.elsewhere, now=body.now, asked=rollout_request)
    return await run_heavy(request, deploy, body.model, body.to, body.link or "", body.to_options())


@operators.post("/deployments/signed", responses=json_response(Deployed))
async def deploy_signed(request: Request, body: SignedBody) -> dict[str, Any]:
    """Publish a release that was prepared here and signed on another machine, and begin its rollout."""
    set_audit_subject(request, body.model, *body.to[:8])
    deploy = partial(controller_of(request).deploy_signed, now=body.now, asked=body.rollout.to_request())
    return await run_heavy(
        request, deploy, body.model, body.to, body.to_options(), body.release, body.next_targets.encode()
    )


@viewers.get("/deployments", responses=json_response(list[DeploymentShape]))
def deployments(request: Request) -> list[dict[str, Any]]:
    """Every deployment, oldest first."""
    return controller_of(request).deployments()


@viewers.get("/releases", responses=json_response(list[ReleaseShape]))
def releases(request: Request) -> list[dict[str, Any]]:
    """Every release, oldest first."""
    return controller_of(request).releases()


@viewers.get("/releases/{reference}/remote-halves", responses=json_response(HalvesShape))
def halves(request: Request, reference: str) -> dict[str, Any]:
    """The remote halves of a release, or of a model's newest release, for third-party inference servers."""
    return controller_of(request).exporter.remote_halves(reference)


@certified.get(
    "/releases/{reference}/remote-half", responses=binary_response("application/octet-stream", "An ONNX file.")
)
async def half(request: Request, reference: str, device_class: str, row: str, decrypt: bool = False) -> Response:
    """One remote half of a release as an ONNX file."""
    export = partial(controller_of(request).exporter.export_half, decrypt=decrypt)
    raw = await run_heavy(request, export, reference, device_class, row)
    return Response(raw, media_type="application/octet-stream")
