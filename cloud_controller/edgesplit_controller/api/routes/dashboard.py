"""Routes for the dashboard's files. They need no authentication; the data that the dashboard shows does."""

from __future__ import annotations

from fastapi import Request
from fastapi.responses import Response

from edgesplit.errors import NotFound
from edgesplit_controller.api.authorisation import page_routes
from edgesplit_controller.dashboard.assets import PAGE, Asset

everybody = page_routes()
CACHE_FOREVER = "public, max-age=31536000, immutable"
"""Cache-Control of files whose name contains a hash of their content."""
REVALIDATE = "no-cache"
"""Cache-Control of files that a browser must revalidate."""


@everybody.get("/", include_in_schema=False)
def dashboard_page(request: Request) -> Response:
    """The dashboard's HTML page."""
    return _asset_response(request, PAGE)


@everybody.get("/favicon.svg", include_in_schema=False)
def dashboard_icon(request: Request) -> Response:
    """The dashboard's icon."""
    return _asset_response(request, "favicon.svg")


@everybody.get("/assets/{name}", include_in_schema=False)
def dashboard_asset(request: Request, name: str) -> Response:
    """A script or style sheet of the dashboard."""
    return _asset_response(request, f"assets/{name}")


def _asset_response(request: Request, path: str) -> Response:
    assets: dict[str, Asset] = request.app.state.assets
    asset = assets.get(path)
    if asset is None:
        raise NotFound("there is no such file")
    cache_control = CACHE_FOREVER if asset.is_immutable else REVALIDATE
    headers = {"etag": asset.etag, "cache-control": cache_control, "vary": "accept-encoding"}
    if request.headers.get("if-none-match") == asset.etag:
        return Response(status_code=304, headers=headers)
    if "gzip" in request.headers.get("accept-encoding", ""):
        return Response(asset.gzipped, media_type=asset.media_type, headers={**headers, "content-encoding": "gzip"})
    return Response(asset.body, media_type=asset.media_type, headers=headers)
