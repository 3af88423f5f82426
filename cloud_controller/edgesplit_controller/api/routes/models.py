"""Models: pushed, shown, given back, measured."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import Query, Request
from fastapi.responses import FileResponse

from edgesplit.errors import UsageError
from edgesplit_controller.api.authorisation import about, operator_routes, viewer_routes
from edgesplit_controller.api.dispatch import controller_of, heavily
from edgesplit_controller.api.request_models import ProfileBody, SamplesBody
from edgesplit_controller.api.request_parsing import from_base64, parse_bindings, uploaded
from edgesplit_controller.api.response_models import (
    CostsShape,
    ModelLine,
    ModelShape,
    SamplesShape,
    answers,
    answers_with,
)

viewers = viewer_routes()
operators = operator_routes()
certified = operator_routes(certificate=True)
UPLOAD = {
    "requestBody": {
        "required": True,
        "description": "The model file, ONNX or TFLite.",
        "content": {"application/octet-stream": {"schema": {"type": "string", "format": "binary"}}},
    }
}
MODEL_FILE = answers_with("application/octet-stream", "A model's file.")


@certified.post("/models", responses=answers(ModelShape), openapi_extra=UPLOAD)
async def push_model(
    request: Request, name: str, input: str = "", bind: Annotated[list[str] | None, Query()] = None
) -> dict[str, Any]:
    """The body is the model file."""
    about(request, name)
    bindings = parse_bindings(bind or [])
    async with uploaded(request, "model files") as part:
        return await heavily(request, controller_of(request).push, part, name, input, bindings)


@viewers.get("/models", responses=answers(list[ModelLine]))
def models(request: Request) -> list[dict[str, Any]]:
    """Every model and version."""
    return controller_of(request).models()


@viewers.get("/models/{reference}", responses=answers(ModelShape))
def model(request: Request, reference: str) -> dict[str, Any]:
    """One model: inputs, outputs, layers."""
    return controller_of(request).model(reference)


@certified.get("/models/{reference}/file", responses=MODEL_FILE)
def model_file(request: Request, reference: str) -> FileResponse:
    """The file as it was pushed."""
    return FileResponse(controller_of(request).file(reference, optimised=False), media_type="application/octet-stream")


@certified.get(
    "/models/{reference}/optimised",
    responses=MODEL_FILE,
)
def optimised_file(request: Request, reference: str) -> FileResponse:
    """The file that is measured and cut."""
    return FileResponse(controller_of(request).file(reference, optimised=True), media_type="application/octet-stream")


@operators.post("/models/{reference}/samples", responses=answers(SamplesShape))
async def add_samples(request: Request, reference: str, body: SamplesBody) -> dict[str, Any]:
    """Keep sample inputs with the model."""
    if any((sample.frame is None) == (sample.tensors is None) for sample in body.samples):
        raise UsageError("each sample has either `frame` or `tensors`")
    frames = [from_base64(sample.frame) for sample in body.samples if sample.frame is not None]
    tensors = [from_base64(sample.tensors) for sample in body.samples if sample.tensors is not None]
    labels = {
        from_base64(sample.frame or sample.tensors or ""): sample.label
        for sample in body.samples
        if sample.label is not None
    }
    return await heavily(request, controller_of(request).add_samples, reference, frames, tensors, labels)


@operators.post("/models/{reference}/profile", responses=answers(CostsShape))
async def profile(request: Request, reference: str, body: ProfileBody | None = None) -> dict[str, Any]:
    """Measure per layer, and if asked for per codec, on this machine; or what a device measured at work."""
    asked = body or ProfileBody()
    if asked.on != "local":
        return await heavily(request, controller_of(request).profile_at_work, reference, asked.on)
    return await heavily(request, controller_of(request).profile, reference, asked.codecs, asked.device)


@operators.get("/models/{reference}/costs", responses=answers(CostsShape))
async def costs(
    request: Request,
    reference: str,
    device: str,
    lossy: bool = False,
    tier: Annotated[list[str] | None, Query(max_length=8)] = None,
) -> dict[str, Any]:
    """The costs file for one device profile (docs/costs.md), with further tiers as in `tier=edge=jetson-nano`."""
    tiers = {name: profile for name, _, profile in (word.partition("=") for word in tier or [])}
    return await heavily(request, controller_of(request).costs, reference, device, lossy, tiers)
