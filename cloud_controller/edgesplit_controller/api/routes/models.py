"""Routes for models: push, list, download, samples, measure."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import Query, Request
from fastapi.responses import StreamingResponse

from edgesplit.errors import UsageError
from edgesplit_controller.api.authorisation import operator_routes, set_audit_subject, viewer_routes
from edgesplit_controller.api.dispatch import controller_of, run_heavy
from edgesplit_controller.api.request_models import (
    ClassNamesBody,
    CompressBody,
    ProfileBody,
    PushQuery,
    SamplesBody,
    SampleSetBody,
    VariantQuery,
)
from edgesplit_controller.api.request_parsing import BLOCK_BYTES, parse_base64, parse_bindings, uploaded_file
from edgesplit_controller.api.response_models import (
    ClassNamesShape,
    CostsShape,
    FamilyAnswersShape,
    ModelLine,
    ModelShape,
    PushedShape,
    SampleSetShape,
    SamplesShape,
    VariantShape,
    binary_response,
    json_response,
)
from edgesplit_controller.model_registry.interface import InterfaceRequest
from edgesplit_controller.planning.planner_service import PlanOptions
from edgesplit_partitioner.planner.changed_answers import MOST_TENSORS

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
MODEL_FILE = binary_response("application/octet-stream", "A model's file.")


@certified.post("/models", responses=json_response(PushedShape), openapi_extra=UPLOAD)
async def push_model(request: Request, query: Annotated[PushQuery, Query()]) -> dict[str, Any]:
    """Upload a model file (the request body). Without an input spec the answer has a `proposal` of one."""
    set_audit_subject(request, query.name)
    bindings, controller = parse_bindings(query.bind), controller_of(request)
    names = controller.class_names(query.names)
    interface = InterfaceRequest(query.input, query.preset, query.output, names)
    async with uploaded_file(request, "model files") as part:
        return await run_heavy(request, controller.push_model, part, query.name, bindings, interface)


@certified.post("/class-names", responses=json_response(ClassNamesShape))
def store_class_names(request: Request, body: ClassNamesBody) -> dict[str, Any]:
    """Store the names of a model's classes, by index, for the push that refers to their digest."""
    return controller_of(request).store_class_names(body.names)


@certified.post("/models/{reference}/variants", responses=json_response(VariantShape), openapi_extra=UPLOAD)
async def push_variant(request: Request, reference: str, query: Annotated[VariantQuery, Query()]) -> dict[str, Any]:
    """Upload a model file (the request body) that stands in for this model, and store it if it passes the gate (409
    otherwise)."""
    bindings, gate = parse_bindings(query.bind), query.to_request()
    async with uploaded_file(request, "model files") as part:
        pushing = controller_of(request).push_variant
        return await run_heavy(request, pushing, part, query.name, query.input, bindings, reference, gate)


@operators.post("/models/{reference}/compress", responses=json_response(VariantShape))
async def compress_model(request: Request, reference: str, body: CompressBody) -> dict[str, Any]:
    """Make a compressed version of the model, and store it if it passes the gate (409 otherwise)."""
    return await run_heavy(request, controller_of(request).compress_model, reference, body.method, body.to_request())


@viewers.get("/models", responses=json_response(list[ModelLine]))
def models(request: Request) -> list[dict[str, Any]]:
    """Every model and version."""
    return controller_of(request).models()


@viewers.get("/models/{reference}", responses=json_response(ModelShape))
def model(request: Request, reference: str) -> dict[str, Any]:
    """One model: inputs, outputs, layers."""
    return controller_of(request).model(reference)


@certified.get("/models/{reference}/file", responses=MODEL_FILE)
def model_file(request: Request, reference: str) -> StreamingResponse:
    """The model file as it was pushed."""
    return _model_file(request, reference, optimised=False)


@certified.get("/models/{reference}/optimised", responses=MODEL_FILE)
def optimised_file(request: Request, reference: str) -> StreamingResponse:
    """The model file after graph optimisation, which is what is measured and sliced."""
    return _model_file(request, reference, optimised=True)


def _model_file(request: Request, reference: str, *, optimised: bool) -> StreamingResponse:
    data = memoryview(controller_of(request).model_file(reference, optimised=optimised))
    blocks = (bytes(data[start : start + BLOCK_BYTES]) for start in range(0, len(data), BLOCK_BYTES))
    headers = {"Content-Length": str(len(data))}
    return StreamingResponse(blocks, media_type="application/octet-stream", headers=headers)


@operators.post("/models/{reference}/samples", responses=json_response(SamplesShape))
async def add_samples(request: Request, reference: str, body: SamplesBody) -> dict[str, Any]:
    """Store sample inputs of the model."""
    if any((sample.frame is None) == (sample.tensors is None) for sample in body.samples):
        raise UsageError("each sample has either `frame` or `tensors`")
    frames = [parse_base64(sample.frame) for sample in body.samples if sample.frame is not None]
    tensors = [parse_base64(sample.tensors) for sample in body.samples if sample.tensors is not None]
    labels = {
        parse_base64(sample.frame or sample.tensors or ""): sample.label
        for sample in body.samples
        if sample.label is not None
    }
    return await run_heavy(request, controller_of(request).add_samples, reference, frames, tensors, labels)


@operators.post("/models/{reference}/sample-sets", responses=json_response(SampleSetShape))
def make_sample_set(request: Request, reference: str, body: SampleSetBody) -> dict[str, Any]:
    """Name a set of stored samples with their labels, by which versions are compared."""
    return controller_of(request).make_sample_set(reference, body.samples)


@operators.post("/models/{reference}/profile", responses=json_response(CostsShape))
async def profile(request: Request, reference: str, body: ProfileBody | None = None) -> dict[str, Any]:
    """Measure each layer, and if requested each codec, on this machine; or return a device's own measurements."""
    options = body or ProfileBody()
    if options.on != "local":
        return await run_heavy(request, controller_of(request).profile_from_device, reference, options.on)
    return await run_heavy(request, controller_of(request).profile, reference, options.codecs, options.device)


@operators.get("/models/{reference}/exit-answers", responses=json_response(FamilyAnswersShape))
async def exit_answers(
    request: Request, reference: str, output: Annotated[str, Query(max_length=500)]
) -> dict[str, Any]:  # fmt: skip
    """What a model answers to its samples by an early exit (`exit`) and by its final output (`whole`)."""
    return await run_heavy(request, controller_of(request).exit_answers, reference, output)


@operators.get("/models/{reference}/costs", responses=json_response(CostsShape))
async def costs(
    request: Request, reference: str, device: str, lossy: bool = False,
    tier: Annotated[list[str] | None, Query(max_length=8)] = None,
    confirm: Annotated[list[str] | None, Query(max_length=MOST_TENSORS)] = None,
    max_changed: Annotated[float | None, Query(gt=0, lt=1)] = None,
    answer: Annotated[str, Query(max_length=500)] = "",
) -> dict[str, Any]:  # fmt: skip
    """The costs file for one device profile (docs/costs.md), with further tiers as in `tier=edge=jetson-nano`.

    With `max_changed`, the share of answers that may change: with the answers that lossy codecs change on the tensors
    `confirm`, on the samples that do not choose codecs."""
    tiers = {name: profile for name, _, profile in (word.partition("=") for word in tier or [])}
    limits = {} if max_changed is None else {"max_changed": max_changed}
    options = PlanOptions(limits=limits, answer=answer)
    call = controller_of(request).costs
    return await run_heavy(request, call, reference, device, lossy, tiers, tuple(confirm or ()), options)
