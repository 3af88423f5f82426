"""Versions of the agent: pushed, listed, deployed."""

from __future__ import annotations

from functools import partial
from typing import Annotated, Any

from fastapi import Query, Request

from edgesplit.release.agent_release import Target
from edgesplit_controller.api.authorisation import about, operator_routes, viewer_routes
from edgesplit_controller.api.dispatch import controller_of, heavily
from edgesplit_controller.api.request_models import DeployAgentBody
from edgesplit_controller.api.request_parsing import uploaded
from edgesplit_controller.api.response_models import AgentShape, Deployed, PushedAgent, answers

viewers = viewer_routes()
operators = operator_routes()
certified = operator_routes(certificate=True)
UPLOAD = {
    "requestBody": {
        "required": True,
        "description": "A kit's `wheels.tar`.",
        "content": {"application/octet-stream": {"schema": {"type": "string", "format": "binary"}}},
    }
}


@certified.post("/agents", responses=answers(PushedAgent), openapi_extra=UPLOAD)
async def push_agent(
    request: Request,
    version: Annotated[str, Query(max_length=40)],
    python: Annotated[str, Query(max_length=8)],
    machine: Annotated[str, Query(max_length=16)],
    extra: Annotated[list[str] | None, Query(max_length=16)] = None,
) -> dict[str, Any]:
    """The body is the wheels of that version of the agent, for one Python and machine."""
    about(request, version)
    push = controller_of(request).agents.push
    async with uploaded(request, "files") as part:
        return await heavily(request, push, part, version, Target(python, machine), extra or [])


@viewers.get("/agents", responses=answers(list[AgentShape]))
def agents(request: Request) -> list[dict[str, Any]]:
    """Every version of the agent that was pushed."""
    return controller_of(request).agents.all()


@operators.post("/agents/deployments", responses=answers(Deployed))
async def deploy_agent(request: Request, body: DeployAgentBody) -> dict[str, Any]:
    """Sign a version as a release, and bring it to devices."""
    about(request, body.version, *body.to[:8])
    deploy = partial(
        controller_of(request).deploy_agent, elsewhere=body.elsewhere, now=body.now, asked=body.rollout.asked()
    )
    return await heavily(request, deploy, body.version, body.to)


@operators.post("/agents/deployments/signed", responses=answers(Deployed))
async def deploy_signed_agent(request: Request, body: DeployAgentBody) -> dict[str, Any]:
    """Publish a version's release that was signed elsewhere, and bring it to devices."""
    about(request, body.version, *body.to[:8])
    signed = body.release, body.next_targets.encode()
    deploy = partial(controller_of(request).deploy_agent, signed=signed, now=body.now, asked=body.rollout.asked())
    return await heavily(request, deploy, body.version, body.to)
