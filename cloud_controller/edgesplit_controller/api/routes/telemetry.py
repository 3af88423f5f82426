"""What devices told of themselves, and what happened."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import Query, Request

from edgesplit_controller.api.authorisation import viewer_routes
from edgesplit_controller.api.dispatch import controller_of
from edgesplit_controller.api.response_models import EventShape, TelemetryShape, answers

viewers = viewer_routes()
Newest = Annotated[int, Query(ge=1, le=10_000)]


@viewers.get("/telemetry/{name}", responses=answers(list[TelemetryShape]))
def telemetry(request: Request, name: str, newest: Newest = 1_000) -> list[dict[str, Any]]:
    """What a device told of itself, oldest first."""
    return controller_of(request).telemetry(name, newest)


@viewers.get("/events", responses=answers(list[EventShape]))
def events(request: Request, newest: Newest = 200) -> list[dict[str, Any]]:
    """The newest events, oldest first."""
    return controller_of(request).events(newest)
