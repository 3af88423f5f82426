"""Routes for the status of the controller process that answers, and for the caller's long calls in it."""

from __future__ import annotations

from typing import Any

from fastapi import Request

from edgesplit_controller.api.authorisation import viewer_routes
from edgesplit_controller.api.response_models import ConditionShape, JobShape, json_response
from edgesplit_controller.caller import current_operator

viewers = viewer_routes()


@viewers.get("/status", responses=json_response(ConditionShape))
def condition(request: Request) -> dict[str, Any]:
    """Version, clock, the addresses that are given to devices, and the queue lengths of the process that answers."""
    status: dict[str, Any] = request.app.state.condition.to_dict()
    return status


@viewers.get("/jobs", responses=json_response(list[JobShape]))
def jobs(request: Request) -> list[dict[str, Any]]:
    """The caller's own long calls (push, profile, plan, deploy) that this process has queued or works on, with what it
    does now."""
    return [job.to_dict() for job in request.app.state.heavy.jobs_of(current_operator())]
