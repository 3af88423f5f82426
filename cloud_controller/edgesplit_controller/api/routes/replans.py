"""Routes for replanning: drift of plans from measurements, proposed plans, and policies."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import Path, Query, Request
from pydantic import Field

from edgesplit_controller.api.authorisation import operator_routes, viewer_routes
from edgesplit_controller.api.dispatch import controller_of, run_heavy
from edgesplit_controller.api.request_models import Body
from edgesplit_controller.api.response_models import Deployed, Drifted, Policy, Proposal, json_response
from edgesplit_controller.replan.policy import Mode

viewers = viewer_routes()
operators = operator_routes()
operators_of_all = operator_routes(everywhere=True)
Number = Annotated[int, Path(ge=1, le=2**31 - 1)]


class PolicyBody(Body):
    """Changes to a replanning policy; fields that are left out do not change."""

    model: str = Field(default="", max_length=200)
    """Name of the model; empty: every model."""
    groups: list[Annotated[str, Field(min_length=1, max_length=63)]] = Field(default=[], max_length=1_000)
    """Groups of devices; empty: all groups."""
    mode: Mode | None = None
    least_devices: int | None = None
    least_gain: float | None = None
    observe_s: float | None = None
    cool_down_s: float | None = None


@viewers.get("/drift", responses=json_response(list[Drifted]))
async def drift(request: Request, model: Annotated[str, Query(max_length=200)] = "") -> list[dict[str, Any]]:
    """What plans assumed, what devices measured since, and the predicted gain of a new plan."""
    return await run_heavy(request, controller_of(request).replanner.drift_report, model)


@operators_of_all.post("/drift/inspect", responses=json_response(list[Proposal]))
async def look(request: Request) -> list[dict[str, Any]]:
    """Run the periodic inspection for drift now; returns the proposals that are open afterwards."""
    replanner = controller_of(request).replanner
    await run_heavy(request, replanner.replan_all)
    return replanner.list_proposals(open_only=True)


@viewers.get("/proposals", responses=json_response(list[Proposal]))
def proposals(request: Request, open: Annotated[bool, Query()] = False) -> list[dict[str, Any]]:
    """Proposed plans, oldest first, and what became of each."""
    return controller_of(request).replanner.list_proposals(open_only=open)


@operators.post("/proposals/{number}/accept", responses=json_response(Deployed))
async def accept(request: Request, number: Number) -> dict[str, Any]:
    """Slice, sign and roll out a proposed plan."""
    return await run_heavy(request, controller_of(request).replanner.accept, number)


@operators.post("/proposals/{number}/dismiss", responses=json_response(Proposal))
def dismiss(request: Request, number: Number) -> dict[str, Any]:
    """Reject a proposed plan."""
    return controller_of(request).replanner.dismiss(number)


@viewers.get("/replan-policies", responses=json_response(list[Policy]))
def policies(request: Request) -> list[dict[str, Any]]:
    """Every policy that was set, and the default policy."""
    return controller_of(request).replanner.list_policies()


@operators.post("/replan-policies", responses=json_response(list[Policy]))
def set_policy(request: Request, body: PolicyBody) -> list[dict[str, Any]]:
    """Change a policy; returns the model's policies."""
    changes = body.model_dump(exclude={"model", "groups"})
    return controller_of(request).replanner.set_policy(body.model, body.groups, changes)
