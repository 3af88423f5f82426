"""The stream of what changed, for pages that are open."""

from __future__ import annotations

from fastapi import Request
from fastapi.responses import StreamingResponse

from edgesplit.errors import EdgeError
from edgesplit_controller.access.authenticator import Gate
from edgesplit_controller.api.authorisation import caller_of, presented_by, viewer_routes
from edgesplit_controller.caller import Caller
from edgesplit_controller.fleet.live_events import Hub

viewers = viewer_routes()
UNBUFFERED = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}


@viewers.get("/live", response_class=StreamingResponse)
async def follow_live(request: Request) -> StreamingResponse:
    """Server-sent events: `device`, `rollout`, `model` and `alert` name what changed (`{"subject": name}`),
    `everything` says that too much did, `heartbeat` that the stream lives. It ends with its caller's session."""
    hub: Hub = request.app.state.hub
    caller = caller_of(request)
    events = hub.follow(caller.groups, lambda: _still(request, caller))
    return StreamingResponse(events, media_type="text/event-stream", headers=UNBUFFERED)


def _still(request: Request, caller: Caller) -> bool:
    """May who began to follow still see the same?"""
    gate: Gate = request.app.state.gate
    try:
        now = gate.let_in(presented_by(request))
    except EdgeError:
        return False
    return (now.operator, now.groups) == (caller.operator, caller.groups)
