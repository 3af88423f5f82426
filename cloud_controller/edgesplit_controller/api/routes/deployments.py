"""Plans, deployments and the releases that they make."""

from __future__ import annotations

from functools import partial
from typing import Any

from fastapi import Request
from fastapi.responses import Response

from edgesplit_controller.api.authorisation import about, operator_routes, viewer_routes
from edgesplit_controller.api.dispatch import controller_of, heavily
from edgesplit_controller.api.request_models import DeployBody, PlanBody, SignedBody
from edgesplit_controller.api.response_models import (
    Deployed,
    DeploymentShape,
    HalvesShape,
    PlanShape,
    ReleaseShape,
    answers,
    answers_with,
)

viewers = viewer_routes()
operators = operator_routes()
certified = operator_routes(certificate=True)


@operators.post("/plans", responses=answers(PlanShape))
async def plan(request: Request, body: PlanBody) -> dict[str, Any]:
    """Plan a model for a device profile and a link."""
    about(request, body.model)
    return await heavily(request, controller_of(request).plan, body.model, body.device, body.link or "", body.wish())


@operators.post("/deployments", responses=answers(Deployed))
async def deploy(request: Request, body: DeployBody) -> dict[str, Any]:
    """Plan, cut, sign, and tell the devices."""
    about(request, body.model, *body.to[:8])
    asked = body.rollout.asked()
    made = controller_of(request).deploy
    deploy = partial(made, recut=body.recut, elsewhere=body.elsewhere, now=body.now, asked=asked)
    return await heavily(request, deploy, body.model, body.to, body.link or "", body.wish())


@operators.post("/deployments/signed", responses=answers(Deployed))
async def deploy_signed(request: Request, body: SignedBody) -> dict[str, Any]:
    """Publish what was prepared and signed elsewhere, and tell the devices."""
    about(request, body.model, *body.to[:8])
    deploy = partial(controller_of(request).deploy_signed, now=body.now, asked=body.rollout.asked())
    return await heavily(request, deploy, body.model, body.to, body.wish(), body.release, body.next_targets.encode())


@viewers.get("/deployments", responses=answers(list[DeploymentShape]))
def deployments(request: Request) -> list[dict[str, Any]]:
    """Every deployment, oldest first."""
    return controller_of(request).deployments()


@viewers.get("/releases", responses=answers(list[ReleaseShape]))
def releases(request: Request) -> list[dict[str, Any]]:
    """Every release, oldest first."""
    return controller_of(request).releases()


@viewers.get("/releases/{reference}/halves", responses=answers(HalvesShape))
def halves(request: Request, reference: str) -> dict[str, Any]:
    """The far halves of a release, or of a model's newest, for servers that are not ours."""
    return controller_of(request).exporting.halves(reference)


@certified.get("/releases/{reference}/half", responses=answers_with("application/octet-stream", "An ONNX file."))
async def half(request: Request, reference: str, device_class: str, row: str, decrypt: bool = False) -> Response:
    """One of them as an ONNX file."""
    export = partial(controller_of(request).exporting.half, decrypt=decrypt)
    raw = await heavily(request, export, reference, device_class, row)
    return Response(raw, media_type="application/octet-stream")
