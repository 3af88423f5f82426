"""Routes for release bundles: what a device without a network would fetch."""

from __future__ import annotations

from base64 import b64encode
from typing import Annotated, Any

from fastapi import Query, Request, Response

from edgesplit.errors import UsageError
from edgesplit.limits import LIMITS
from edgesplit.mqtt.messages import FetchChunks
from edgesplit_controller.api.authorisation import operator_routes, set_audit_subject
from edgesplit_controller.api.dispatch import controller_of
from edgesplit_controller.api.request_models import PapersBody
from edgesplit_controller.api.response_models import Papers, binary_response, json_response

certified = operator_routes(certificate=True)
CHUNKS = binary_response("application/octet-stream", "The chunks, one after the other.")


@certified.post("/release-bundles", responses=json_response(Papers))
def papers(request: Request, body: PapersBody) -> dict[str, Any]:
    """Content of a release bundle without its chunks; files and statements are base64. Signs a new TUF timestamp."""
    set_audit_subject(request, *body.devices[:8])
    index = controller_of(request).release_bundle_index(body.devices, body.models, body.valid_s)
    for kind in ("files", "statements"):
        index[kind] = {name: b64encode(raw).decode() for name, raw in index[kind].items()}
    return index


@certified.get("/release-bundles/{release}/chunks", responses=CHUNKS)
def chunks(
    request: Request,
    release: str,
    first: Annotated[int, Query(ge=0, lt=8 * LIMITS.bitmap_bytes)],
    bitmap: Annotated[str, Query(max_length=2 * LIMITS.bitmap_bytes, pattern="^([0-9a-f]{2})+$")],
) -> Response:
    """Chunks of a release by their indices in its chunk list, encoded as in the MQTT message `FetchChunks`: a bitmap
    that begins at index `first`."""
    try:
        fetch = FetchChunks(release, first, bytes.fromhex(bitmap))
    except ValueError as error:
        raise UsageError(f"bitmap: {error}") from error
    return Response(controller_of(request).release_bundles.chunks(fetch), media_type="application/octet-stream")
