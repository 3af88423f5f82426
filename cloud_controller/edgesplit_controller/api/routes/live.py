"""Route for the stream of changes that open pages of the dashboard follow."""

from __future__ import annotations

from fastapi import Request
from fastapi.responses import StreamingResponse

from edgesplit.errors import EdgeError
from edgesplit_controller.api.authorisation import authenticator_of, caller_of, parse_credentials, viewer_routes
from edgesplit_controller.caller import Caller
from edgesplit_controller.fleet.live_events import LiveEventHub

viewers = viewer_routes()
UNBUFFERED = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}


@viewers.get("/events/stream", response_class=StreamingResponse)
async def follow_live(request: Request) -> StreamingResponse:
    """Server-sent events. `device`, `rollout`, `model` and `alert` name what changed (`{"subject": name}`),
    `everything` means too many changes to list, `heartbeat` that the stream is alive. The stream ends with the caller's
    session."""
    hub: LiveEventHub = request.app.state.hub
    caller = caller_of(request)
    events = hub.follow(caller.groups, lambda: _is_still_allowed(request, caller))
    return StreamingResponse(events, media_type="text/event-stream", headers=UNBUFFERED)


def _is_still_allowed(request: Request, caller: Caller) -> bool:
    """Whether the caller is still authenticated and has the same groups."""
    try:
        now = authenticator_of(request).authenticate(parse_credentials(request))
    except EdgeError:
        return False
    return (now.operator, now.groups) == (caller.operator, caller.groups)
