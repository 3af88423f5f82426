"""Routes for device profiles, the performance data that plans are made with."""

from __future__ import annotations

from typing import Any

import msgspec

from edgesplit.device_profile import list_profiles, load_profile
from edgesplit_controller.api.authorisation import viewer_routes
from edgesplit_controller.api.response_models import ProfileShape, json_response
from edgesplit_controller.planning.planner_service import device_profile

viewers = viewer_routes()


@viewers.get("/profiles", responses=json_response(list[ProfileShape]))
def device_profiles() -> list[dict[str, Any]]:
    """Every device profile, with the source of each figure."""
    return [msgspec.to_builtins(load_profile(name)) for name in list_profiles()]


@viewers.get("/profiles/{profile}", responses=json_response(ProfileShape))
def device_profile_by_name(profile: str) -> dict[str, Any]:
    """One device profile."""
    content: dict[str, Any] = msgspec.to_builtins(device_profile(profile))
    return content
