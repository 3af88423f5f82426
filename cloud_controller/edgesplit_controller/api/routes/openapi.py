"""Route for the OpenAPI document."""

from __future__ import annotations

from typing import Any

from fastapi import Request

from edgesplit_controller.api.authorisation import viewer_routes
from edgesplit_controller.api.openapi import openapi_document

viewers = viewer_routes()


@viewers.get("/openapi.json")
def openapi(request: Request) -> dict[str, Any]:
    """This OpenAPI document."""
    return openapi_document(request.app)
