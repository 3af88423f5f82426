"""Routes for agent versions: push, list, deploy."""

from __future__ import annotations

from functools import partial
from typing import Annotated, Any

from fastapi import Query, Request

from edgesplit.release.agent_release import Target
from edgesplit_controller.api.authorisation import operator_routes, set_audit_subject, viewer_routes
from edgesplit_controller.api.dispatch import controller_of, run_heavy
from edgesplit_controller.api.request_models import DeployAgentBody
from edgesplit_controller.api.request_parsing import uploaded_file
from edgesplit_controller.api.response_models import AgentShape, Deployed, PushedAgent, json_response

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


@certified.post("/agents", responses=json_response(PushedAgent), openapi_extra=UPLOAD)
async def push_agent(
    request: Request, version: Annotated[str, Query(max_length=40)], python: Annotated[str, Query(max_length=8)],
    machine: Annotated[str, Query(max_length=16)], extra: Annotated[list[str] | None, Query(max_length=16)] = None,
) -> dict[str, Any]:  # fmt: skip
    """Upload the wheels of an agent version for one Python version and machine type."""
    set_audit_subject(request, version)
    push = controller_of(request).agents.push
    async with uploaded_file(request, "files") as part:
        return await run_heavy(request, push, part, version, Target(python, machine), extra or [])


@viewers.get("/agents", responses=json_response(list[AgentShape]))
def agents(request: Request) -> list[dict[str, Any]]:
    """Every agent version that was pushed."""
    return controller_of(request).agents.all()


@operators.post("/agents/deployments", responses=json_response(Deployed))
async def deploy_agent(request: Request, body: DeployAgentBody) -> dict[str, Any]:
    """Sign an agent version as a release and roll it out to devices."""
    set_audit_subject(request, body.version, *body.to[:8])
    call, asked = controller_of(request).deploy_agent, body.rollout.to_request()
    deploy = partial(call, elsewhere=body.elsewhere, now=body.now, asked=asked)
    return await run_heavy(request, deploy, body.version, body.to)


@operators.post("/agents/deployments/signed", responses=json_response(Deployed))
async def deploy_signed_agent(request: Request, body: DeployAgentBody) -> dict[str, Any]:
    """Publish the release of an agent version that was signed on another machine, and roll it out to devices."""
    set_audit_subject(request, body.version, *body.to[:8])
    signed = body.release, body.next_targets.encode()
    deploy = partial(controller_of(request).deploy_agent, signed=signed, now=body.now, asked=body.rollout.to_request())
    return await run_heavy(request, deploy, body.version, body.to)
