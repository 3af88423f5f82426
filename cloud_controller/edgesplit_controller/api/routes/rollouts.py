"""Rollouts: how far each is, and what operators ask of it."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import Path, Query, Request

from edgesplit_controller.api.authorisation import operator_routes, viewer_routes
from edgesplit_controller.api.dispatch import controller_of
from edgesplit_controller.api.request_models import DeployBody
from edgesplit_controller.api.response_models import Deployed, RolloutDeviceShape, RolloutShape, answers
from edgesplit_controller.api.routes.deployments import deploy
from edgesplit_controller.rollout.commands import Verb

viewers = viewer_routes()
operators = operator_routes()
Number = Annotated[int, Path(ge=1, le=2**31 - 1)]


@viewers.get("/rollouts", responses=answers(list[RolloutShape]))
def rollouts(request: Request, newest: Annotated[int, Query(ge=1, le=1_000)] = 50) -> list[dict[str, Any]]:
    """The newest rollouts, oldest first."""
    return controller_of(request).rollouts.shown_all(newest)


@viewers.get("/rollouts/{number}", responses=answers(RolloutShape))
def rollout(request: Request, number: Number) -> dict[str, Any]:
    """One rollout: its stages, what it waits for, failures by cause."""
    return controller_of(request).rollouts.shown(number)


@viewers.get("/rollouts/{number}/devices", responses=answers(list[RolloutDeviceShape]))
def rollout_devices(
    request: Request,
    number: Number,
    state: Annotated[list[str] | None, Query(max_length=10)] = None,
    after: Annotated[int, Query(ge=-1, le=2**31 - 1)] = -1,
    most: Annotated[int, Query(ge=1, le=1_000)] = 200,
) -> list[dict[str, Any]]:
    """Its devices in the order in which they are told, some at a time: those after the position `after`."""
    return controller_of(request).rollouts.shown_devices(number, states=state or (), after=after, most=most)


@operators.post("/rollouts", responses=answers(Deployed))
async def make_rollout(request: Request, body: DeployBody) -> dict[str, Any]:
    """The same as a deployment: plan, cut, sign, and tell the devices on the terms in `rollout`."""
    return await deploy(request, body)


@operators.post("/rollouts/{number}/{verb}", responses=answers(RolloutShape))
def ask_rollout(request: Request, number: Number, verb: Verb) -> dict[str, Any]:
    """Pause it, let it go on, approve its next stage, abort it, or take its devices back."""
    return controller_of(request).ask_rollout(number, verb)
