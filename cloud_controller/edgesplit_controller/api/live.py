"""The stream of what changed, for pages that are open."""

from __future__ import annotations

from fastapi import Request
from fastapi.responses import StreamingResponse

from edgesplit_controller.api.access import viewer_routes
from edgesplit_controller.live import Hub

viewers = viewer_routes()


@viewers.get("/live", response_class=StreamingResponse)
async def live(request: Request) -> StreamingResponse:
    """Server-sent events: `device`, `rollout`, `model` and `alert` name what changed (`{"subject": name}`),
    `everything` says that too much did, `heartbeat` that the stream lives."""
    hub: Hub = request.app.state.hub
    return StreamingResponse(
        hub.follow(), media_type="text/event-stream", headers={"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
    )
