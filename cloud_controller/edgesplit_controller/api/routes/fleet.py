"""The fleet and the parts of the controller at a glance; hours, days and months of devices and models; their logs."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Annotated, Any

from fastapi import Query, Request

from edgesplit.errors import UsageError
from edgesplit_controller.api.authorisation import operator_routes, viewer_routes
from edgesplit_controller.api.dispatch import controller_of
from edgesplit_controller.api.response_models import (
    BundleShape,
    FleetShape,
    HistoryShape,
    ModelHistoryShape,
    PartShape,
    answers,
)
from edgesplit_controller.history.buckets import DAY_S, SPANS, Span

viewers = viewer_routes()
operators = operator_routes()

DEFAULT_S: Mapping[Span, float] = {
    "minute": 3_600.0, "hour": DAY_S, "day": 30 * DAY_S, "month": 365 * DAY_S,
}  # fmt: skip
"""Of a history in one answer, where nobody says since when."""
Time = Annotated[float | None, Query(ge=0, le=1e11)]


@viewers.get("/fleet", responses=answers(FleetShape))
def fleet(request: Request) -> dict[str, Any]:
    """How many devices are how: states, versions, models and cuts in use, failures by cause, what is wrong."""
    return controller_of(request).overview()


@viewers.get("/parts", responses=answers(list[PartShape]))
def parts(request: Request) -> list[dict[str, Any]]:
    """How broker, offload server, database, disk, controller processes and gateways are, and what to do; bad first."""
    return controller_of(request).how_parts_are()


@viewers.get("/devices/{name}/history", responses=answers(HistoryShape))
def history(
    request: Request, name: str, span: Span = "minute", since: Time = None, until: Time = None
) -> dict[str, Any]:
    """What a device told, added up by minutes, hours, days or months: by model, and under the empty name the device
    itself."""
    return controller_of(request).history(name, span, *_between(span, since, until))


@viewers.get("/models/{reference}/history", responses=answers(ModelHistoryShape))
def model_history(
    request: Request, reference: str, span: Span = "minute", since: Time = None, until: Time = None
) -> dict[str, Any]:
    """The same of a model on all devices that run it, whatever its version."""
    return controller_of(request).model_history(reference, span, *_between(span, since, until))


def _between(span: Span, since: float | None, until: float | None) -> tuple[float, float]:
    """The time that is asked for; UsageError for more than one answer may have."""
    most_s = SPANS[span].answer_s
    ends = until if until is not None else time.time()
    begins = since if since is not None else max(0.0, ends - DEFAULT_S[span])
    if not 0 <= ends - begins <= most_s:
        raise UsageError(f"a history by {span} has at most {most_s / DAY_S:g} days, and ends after it begins")
    return begins, ends


@operators.post("/devices/{name}/logs", responses=answers(BundleShape))
def ask_for_logs(request: Request, name: str) -> dict[str, Any]:
    """Ask a device for its recent log, versions and state; GET tells when they are here."""
    return controller_of(request).ask_for_logs(name)


@operators.get("/devices/{name}/logs", responses=answers(list[BundleShape]))
def bundles(request: Request, name: str) -> list[dict[str, Any]]:
    """The log bundles of a device, newest first."""
    return controller_of(request).log_bundles(name)


@operators.get("/devices/{name}/logs/{number}", responses=answers(BundleShape))
def bundle(request: Request, name: str, number: str) -> dict[str, Any]:
    """One log bundle, with its content once it is here."""
    return controller_of(request).log_bundle(name, number)
