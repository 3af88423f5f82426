"""Which controller answers, for operators."""

from __future__ import annotations

from typing import Any

from fastapi import Request

from edgesplit_controller.api.authorisation import viewer_routes
from edgesplit_controller.api.response_models import ConditionShape, answers

viewers = viewer_routes()


@viewers.get("/condition", responses=answers(ConditionShape))
def condition(request: Request) -> dict[str, Any]:
    """Version, clock, what devices are told to reach, and what waits in the process that answers."""
    told: dict[str, Any] = request.app.state.condition.told()
    return told
