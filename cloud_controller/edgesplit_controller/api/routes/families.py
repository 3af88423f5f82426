"""Routes for families: create, list, show. They are removed as models are."""

from __future__ import annotations

from functools import partial
from typing import Any

from fastapi import Request

from edgesplit.errors import UsageError
from edgesplit_controller.api.authorisation import operator_routes, set_audit_subject, viewer_routes
from edgesplit_controller.api.dispatch import controller_of, run_heavy
from edgesplit_controller.api.request_models import FamilyBody, FamilySampleBody
from edgesplit_controller.api.request_parsing import parse_base64
from edgesplit_controller.api.response_models import FamilyAnswersShape, FamilyShape, json_response
from edgesplit_controller.model_registry.families import VariantRequest
from edgesplit_controller.model_registry.family_answers import TrueBox, Truth

viewers = viewer_routes()
certified = operator_routes(certificate=True)


@certified.post("/families", responses=json_response(FamilyShape))
async def create_family(request: Request, body: FamilyBody) -> dict[str, Any]:
    """Run several models of one task on samples and store them as a family."""
    set_audit_subject(request, body.name)
    if any((sample.frame is None) == (sample.tensors is None) for sample in body.samples):
        raise UsageError("each sample has either `frame` or `tensors`")
    samples = [
        (sample.frame is not None, parse_base64(sample.frame or sample.tensors or ""), _truth(sample))
        for sample in body.samples
    ]
    variants = [
        VariantRequest(model=variant.model, labels=tuple(variant.labels), answer=variant.answer)
        for variant in body.variants
    ]
    create = partial(controller_of(request).create_family, answer=body.answer, reference=body.reference)
    return await run_heavy(request, create, body.name, variants, samples)


def _truth(sample: FamilySampleBody) -> Truth:
    """What a sample shows, as far as is known; UsageError where it is both a class and boxes."""
    if sample.boxes is None:
        return sample.label
    if sample.label is not None:
        raise UsageError("a sample has a `label` or `boxes`, and not both")
    return tuple(TrueBox(one.box, one.label) for one in sample.boxes)


@viewers.get("/families", responses=json_response(list[FamilyShape]))
def families(request: Request) -> list[dict[str, Any]]:
    """Every family and version."""
    return controller_of(request).families()


@viewers.get("/families/{reference}", responses=json_response(FamilyShape))
def family(request: Request, reference: str) -> dict[str, Any]:
    """One family: its variants with their accuracies."""
    return controller_of(request).family(reference)


@viewers.get("/families/{reference}/answers", responses=json_response(FamilyAnswersShape))
def family_answers(request: Request, reference: str) -> dict[str, Any]:
    """What the variants of a family answer to its samples, by which cascades are calibrated."""
    return controller_of(request).family_answers(reference)
