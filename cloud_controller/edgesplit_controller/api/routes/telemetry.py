"""Routes for telemetry messages and events."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import Query, Request

from edgesplit_controller.api.authorisation import viewer_routes
from edgesplit_controller.api.dispatch import controller_of
from edgesplit_controller.api.response_models import EventShape, TelemetryShape, json_response

viewers = viewer_routes()
Newest = Annotated[int, Query(ge=1, le=10_000)]


@viewers.get("/telemetry/{name}", responses=json_response(list[TelemetryShape]))
def telemetry(request: Request, name: str, newest: Newest = 1_000) -> list[dict[str, Any]]:
    """The newest telemetry messages of a device, oldest first."""
    return controller_of(request).telemetry(name, newest)


@viewers.get("/events", responses=json_response(list[EventShape]))
def events(request: Request, newest: Newest = 200) -> list[dict[str, Any]]:
    """The newest events, oldest first."""
    return controller_of(request).events(newest)
