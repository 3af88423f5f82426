"""Routes for pages of the dashboard: one response each, assembled from what other routes return in parts."""

from __future__ import annotations

import gzip
from typing import Annotated, Any

import msgspec
from fastapi import Query, Request
from fastapi.responses import Response

from edgesplit_controller.api.authorisation import viewer_routes
from edgesplit_controller.api.dispatch import controller_of
from edgesplit_controller.dashboard import views
from edgesplit_controller.fleet.table import MAX_NAMES

viewers = viewer_routes()
GZIP_FROM_BYTES = 16_384
"""Bytes from which a response is compressed."""
Names = Annotated[list[str] | None, Query(max_length=MAX_NAMES)]
Newest = Annotated[int, Query(ge=1, le=1_000)]


@viewers.get("/views/fleet")
def fleet_view(request: Request, name: Names = None) -> Response:
    """A row per device: those named, or all."""
    return _gzipped_json(request, views.fleet(controller_of(request), names=name or ()))


@viewers.get("/views/fleet/trend")
def fleet_trend(request: Request) -> dict[str, Any]:
    """The fleet's last 24 hours: devices that report, requests, fallbacks and p95 of all models."""
    return views.trend(controller_of(request))


@viewers.get("/views/devices/{name}/curves")
def device_curves(request: Request, name: str) -> list[dict[str, Any]]:
    """Latency over bandwidth of the plans that a device selects from, and its present operating point."""
    return views.device_curves(controller_of(request), name)


@viewers.get("/views/devices/{name}/events")
def device_events(request: Request, name: str, newest: Newest = 100) -> list[dict[str, Any]]:
    """The newest events about one device, oldest first."""
    return views.device_events(controller_of(request), name, newest)


@viewers.get("/views/models/{reference}")
def model_view(request: Request, reference: str) -> dict[str, Any]:
    """A model with its newest releases and their plans."""
    return views.model(controller_of(request), reference)


def _gzipped_json(request: Request, content: dict[str, Any]) -> Response:
    """JSON of a whole fleet, which has megabytes: encoded directly, and compressed if the client accepts gzip."""
    raw = msgspec.json.encode(content)
    headers = {"vary": "accept-encoding"}
    if len(raw) > GZIP_FROM_BYTES and "gzip" in request.headers.get("accept-encoding", ""):
        raw, headers["content-encoding"] = gzip.compress(raw, 1, mtime=0), "gzip"
    return Response(raw, media_type="application/json", headers=headers)
