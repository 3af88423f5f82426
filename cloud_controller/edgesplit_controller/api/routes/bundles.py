"""For bundles: what devices without a network would fetch."""

from __future__ import annotations

from base64 import b64encode
from typing import Annotated, Any

from fastapi import Query, Request, Response

from edgesplit.errors import UsageError
from edgesplit.limits import LIMITS
from edgesplit.mqtt.messages import FetchChunks
from edgesplit_controller.api.authorisation import about, operator_routes
from edgesplit_controller.api.dispatch import controller_of
from edgesplit_controller.api.request_models import PapersBody
from edgesplit_controller.api.response_models import Papers, answers, answers_with

certified = operator_routes(certificate=True)
CHUNKS = answers_with("application/octet-stream", "The chunks, one after the other.")


@certified.post("/offline/papers", responses=answers(Papers))
def papers(request: Request, body: PapersBody) -> dict[str, Any]:
    """All but the chunks; files and statements in base64. Signs the timestamp anew."""
    about(request, *body.devices[:8])
    made = controller_of(request).papers(body.devices, body.models, body.valid_s)
    for kind in ("files", "statements"):
        made[kind] = {name: b64encode(raw).decode() for name, raw in made[kind].items()}
    return made


@certified.get("/offline/{release}/chunks", responses=CHUNKS)
def chunks(
    request: Request,
    release: str,
    first: Annotated[int, Query(ge=0, lt=8 * LIMITS.bitmap_bytes)],
    bitmap: Annotated[str, Query(max_length=2 * LIMITS.bitmap_bytes, pattern="^([0-9a-f]{2})+$")],
) -> Response:
    """Chunks of a release by their places in its list, as devices name them (`edgesplit.mqtt.messages.FetchChunks`)."""
    try:
        wish = FetchChunks(release, first, bytes.fromhex(bitmap))
    except ValueError as error:
        raise UsageError(f"bitmap: {error}") from error
    return Response(controller_of(request).offline.chunks(wish), media_type="application/octet-stream")
