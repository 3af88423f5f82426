"""Route for the status of the controller process that answers."""

from __future__ import annotations

from typing import Any

from fastapi import Request

from edgesplit_controller.api.authorisation import viewer_routes
from edgesplit_controller.api.response_models import ConditionShape, json_response

viewers = viewer_routes()


@viewers.get("/status", responses=json_response(ConditionShape))
def condition(request: Request) -> dict[str, Any]:
    """Version, clock, the addresses that are given to devices, and the queue lengths of the process that answers."""
    status: dict[str, Any] = request.app.state.condition.to_dict()
    return status
