"""Plans that grow old: what they assumed and what was measured, what is proposed, and what may happen by itself."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import Path, Query, Request
from pydantic import Field

from edgesplit_controller.api.authorisation import operator_routes, viewer_routes
from edgesplit_controller.api.dispatch import controller_of, heavily
from edgesplit_controller.api.request_models import Body
from edgesplit_controller.api.response_models import Deployed, Drifted, Policy, Proposal, answers
from edgesplit_controller.replan.policy import Mode

viewers = viewer_routes()
operators = operator_routes()
operators_of_all = operator_routes(everywhere=True)
Number = Annotated[int, Path(ge=1, le=2**31 - 1)]


class PolicyBody(Body):
    """What may become of a model's plans; what is left out stays as it is."""

    model: str = Field(default="", max_length=200)
    """Its name; empty: every model."""
    groups: list[Annotated[str, Field(min_length=1, max_length=63)]] = Field(default=[], max_length=1_000)
    """Of devices; empty: all."""
    mode: Mode | None = None
    least_devices: int | None = None
    least_gain: float | None = None
    observe_s: float | None = None
    cool_down_s: float | None = None


@viewers.get("/drift", responses=answers(list[Drifted]))
async def drift(request: Request, model: Annotated[str, Query(max_length=200)] = "") -> list[dict[str, Any]]:
    """What plans assumed, what devices measured since, and what another table is predicted to bring."""
    return await heavily(request, controller_of(request).replanner.drift, model)


@operators_of_all.post("/drift/look", responses=answers(list[Proposal]))
async def look(request: Request) -> list[dict[str, Any]]:
    """Do now what the controller does by itself every minute; the proposals that are open then."""
    replanner = controller_of(request).replanner
    await heavily(request, replanner.look)
    return replanner.shown_proposals(open_only=True)


@viewers.get("/proposals", responses=answers(list[Proposal]))
def proposals(request: Request, open: Annotated[bool, Query()] = False) -> list[dict[str, Any]]:
    """Other tables that were proposed, oldest first, and what became of them."""
    return controller_of(request).replanner.shown_proposals(open_only=open)


@operators.post("/proposals/{number}/accept", responses=answers(Deployed))
async def accept(request: Request, number: Number) -> dict[str, Any]:
    """Cut, sign and roll out a proposed table."""
    return await heavily(request, controller_of(request).replanner.accept, number)


@operators.post("/proposals/{number}/dismiss", responses=answers(Proposal))
def dismiss(request: Request, number: Number) -> dict[str, Any]:
    """Leave the table as it is."""
    return controller_of(request).replanner.dismiss(number)


@viewers.get("/replan-policies", responses=answers(list[Policy]))
def policies(request: Request) -> list[dict[str, Any]]:
    """Every policy that was set, and the one that counts elsewhere."""
    return controller_of(request).replanner.shown_policies()


@operators.post("/replan-policies", responses=answers(list[Policy]))
def set_policy(request: Request, body: PolicyBody) -> list[dict[str, Any]]:
    """Change a policy; the model's policies as they are then."""
    changes = body.model_dump(exclude={"model", "groups"})
    return controller_of(request).replanner.set_policy(body.model, body.groups, changes)
