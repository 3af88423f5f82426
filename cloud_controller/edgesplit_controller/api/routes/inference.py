"""Route for inferences on devices that are elsewhere, through the broker."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Annotated, Any

from fastapi import Query, Request
from fastapi.responses import StreamingResponse
from starlette.concurrency import run_in_threadpool

from edgesplit.errors import EdgeError, kind_of
from edgesplit.mqtt.remote_inference import MAX_DEADLINE_S
from edgesplit.oip import protocol as oip
from edgesplit_controller.api.audit_middleware import defer_outcome, write_outcome
from edgesplit_controller.api.authorisation import caller_of, operator_routes, set_audit_subject
from edgesplit_controller.api.dispatch import controller_of
from edgesplit_controller.api.routes.live import UNBUFFERED
from edgesplit_controller.fleet.live_events import encode_event
from edgesplit_controller.fleet.remote_inference import Inference, InferenceAnswer, PendingInference, RemoteInferences

operators = operator_routes()
BODY = {
    "requestBody": {
        "required": True,
        "description": "An Open Inference Protocol request; header `inference-header-content-length`.",
        "content": {"application/octet-stream": {"schema": {"type": "string", "format": "binary"}}},
    }
}


@operators.post("/devices/{name}/infer", response_class=StreamingResponse, openapi_extra=BODY)
async def infer(
    request: Request, name: str, model: str = "", deadline_s: Annotated[float, Query(gt=0, le=MAX_DEADLINE_S)] = 5.0
) -> StreamingResponse:
    """Run an inference (the request body) on a device, through the broker. Server-sent events: `progress` with a
    `state` (sent, waiting, running), then `answer` with an Open Inference Protocol response as base64 (`body`) and the
    length of its JSON part (`json_bytes`), or `error`. Leaving cancels the inference."""
    set_audit_subject(request, name, model)
    controller = controller_of(request)
    device = await run_in_threadpool(controller.devices.get, name)
    body, json_bytes = await request.body(), oip.header_length(request.headers)
    asked = Inference(caller_of(request).operator, model, body, json_bytes, deadline_s)
    pending = await controller.remote_inferences.begin(device, asked)
    defer_outcome(request.scope)
    events = _events(request, controller.remote_inferences, pending)
    return StreamingResponse(events, media_type="text/event-stream", headers=UNBUFFERED)


async def _events(request: Request, inferences: RemoteInferences, pending: PendingInference) -> AsyncIterator[bytes]:
    """The events of one inference. Its outcome is in the audit log before the last one is sent."""
    detail: dict[str, str | int] = {"request_bytes": len(pending.request.body)}
    try:
        async with aclosing(inferences.follow(pending)) as states:
            async for state in states:
                if isinstance(state, str):
                    yield encode_event("progress", {"state": state})
                    continue
                detail["answer_bytes"] = len(state.body)
                await run_in_threadpool(write_outcome, request.scope, "done", detail)
                yield encode_event("answer", _answer_to_dict(state))
    except EdgeError as error:
        detail["error"] = kind_of(error)
        await run_in_threadpool(write_outcome, request.scope, "failed", detail)
        yield encode_event("error", {"error": str(error), "kind": kind_of(error)})
    except BaseException as error:
        if "answer_bytes" not in detail:  # else it is written already
            is_cancelled = isinstance(error, asyncio.CancelledError | GeneratorExit)
            detail["error"] = "cancelled" if is_cancelled else type(error).__name__
            # Not awaited: a generator that is being closed may not wait any more.
            asyncio.get_running_loop().run_in_executor(None, write_outcome, request.scope, "failed", detail)
        raise


def _answer_to_dict(answer: InferenceAnswer) -> dict[str, Any]:
    return {"json_bytes": answer.json_bytes, "body": base64.b64encode(answer.body).decode()}
