"""Routes for rollouts: progress and operators' commands."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import Path, Query, Request

from edgesplit_controller.api.authorisation import operator_routes, viewer_routes
from edgesplit_controller.api.dispatch import controller_of
from edgesplit_controller.api.response_models import RolloutDeviceShape, RolloutShape, json_response
from edgesplit_controller.rollout.commands import Verb

viewers = viewer_routes()
operators = operator_routes()
Number = Annotated[int, Path(ge=1, le=2**31 - 1)]


@viewers.get("/rollouts", responses=json_response(list[RolloutShape]))
def rollouts(request: Request, newest: Annotated[int, Query(ge=1, le=1_000)] = 50) -> list[dict[str, Any]]:
    """The newest rollouts, oldest first."""
    return controller_of(request).rollouts.list_views(newest)


@viewers.get("/rollouts/{number}", responses=json_response(RolloutShape))
def rollout(request: Request, number: Number) -> dict[str, Any]:
    """One rollout: its stages, what it waits for, failures by cause."""
    return controller_of(request).rollouts.view(number)


@viewers.get("/rollouts/{number}/devices", responses=json_response(list[RolloutDeviceShape]))
def rollout_devices(
    request: Request, number: Number, state: Annotated[list[str] | None, Query(max_length=10)] = None,
    after: Annotated[int, Query(ge=-1, le=2**31 - 1)] = -1, most: Annotated[int, Query(ge=1, le=1_000)] = 200,
) -> list[dict[str, Any]]:  # fmt: skip
    """The devices of a rollout in the order of delivery, a page at a time: those after the position `after`."""
    return controller_of(request).rollouts.device_views(number, states=state or (), after=after, most=most)


@operators.post("/rollouts/{number}/{verb}", responses=json_response(RolloutShape))
def ask_rollout(request: Request, number: Number, verb: Verb) -> dict[str, Any]:
    """Command a rollout: pause, resume, approve the next stage, abort or roll back."""
    return controller_of(request).command_rollout(number, verb)
