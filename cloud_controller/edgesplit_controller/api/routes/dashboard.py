"""The dashboard's files, for everybody: what they show, the API tells only to who is signed in."""

from __future__ import annotations

from fastapi import Request
from fastapi.responses import Response

from edgesplit.errors import NotFound
from edgesplit_controller.api.authorisation import page_routes
from edgesplit_controller.dashboard.assets import PAGE, Asset

everybody = page_routes()
A_YEAR = "public, max-age=31536000, immutable"
ASK_FIRST = "no-cache"


@everybody.get("/", include_in_schema=False)
def dashboard_page(request: Request) -> Response:
    """The dashboard."""
    return _sent(request, PAGE)


@everybody.get("/favicon.svg", include_in_schema=False)
def dashboard_icon(request: Request) -> Response:
    """Its mark in a browser's tab."""
    return _sent(request, "favicon.svg")


@everybody.get("/assets/{name}", include_in_schema=False)
def dashboard_asset(request: Request, name: str) -> Response:
    """A script or style sheet."""
    return _sent(request, f"assets/{name}")


def _sent(request: Request, path: str) -> Response:
    assets: dict[str, Asset] = request.app.state.assets
    found = assets.get(path)
    if found is None:
        raise NotFound("there is no such file")
    lasting = A_YEAR if found.lasting else ASK_FIRST
    headers = {"etag": found.etag, "cache-control": lasting, "vary": "accept-encoding"}
    if request.headers.get("if-none-match") == found.etag:
        return Response(status_code=304, headers=headers)
    if "gzip" in request.headers.get("accept-encoding", ""):
        return Response(found.packed, media_type=found.media_type, headers={**headers, "content-encoding": "gzip"})
    return Response(found.body, media_type=found.media_type, headers=headers)
