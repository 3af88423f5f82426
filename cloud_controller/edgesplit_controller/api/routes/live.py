"""Route for the stream of changes that open pages of the dashboard follow."""

from __future__ import annotations

from fastapi import Request
from fastapi.responses import StreamingResponse

from edgesplit.errors import EdgeError, LinkError
from edgesplit_controller.api.authorisation import authenticator_of, caller_of, parse_credentials, viewer_routes
from edgesplit_controller.caller import Caller
from edgesplit_controller.fleet.live_events import LiveEventHub

viewers = viewer_routes()
UNBUFFERED = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}


@viewers.get("/events/stream", response_class=StreamingResponse)
async def follow_live(request: Request) -> StreamingResponse:
    """Server-sent events. `device`, `rollout`, `model` and `alert` name what changed (`{"subject": name}`),
    `everything` means too many changes to list, `heartbeat` that the stream is alive. The stream ends when the caller's
    session or credentials end, or when its role or groups change."""
    hub: LiveEventHub = request.app.state.hub
    caller = caller_of(request)
    events = hub.follow(caller.operator, caller.groups, lambda: _is_still_allowed(request, caller))
    return StreamingResponse(events, media_type="text/event-stream", headers=UNBUFFERED)


def _is_still_allowed(request: Request, caller: Caller) -> bool:
    """Whether the caller is still authenticated, with the same role and groups; LinkError if that cannot be found out
    now."""
    try:
        now = authenticator_of(request).confirm(parse_credentials(request))
    except LinkError:
        raise
    except EdgeError:
        return False
    return (now.operator, now.role, now.groups) == (caller.operator, caller.role, caller.groups)
