"""Routes for the whole fleet: counts, health of components, aggregated telemetry, log bundles."""

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
    json_response,
)
from edgesplit_controller.history.buckets import DAY_S, SPANS, Span

viewers = viewer_routes()
operators = operator_routes()

DEFAULT_S: Mapping[Span, float] = {
    "minute": 3_600.0, "hour": DAY_S, "day": 30 * DAY_S, "month": 365 * DAY_S,
}  # fmt: skip
"""Period in seconds that a history covers if the request does not set `since`."""
Time = Annotated[float | None, Query(ge=0, le=1e11)]


@viewers.get("/fleet", responses=json_response(FleetShape))
def fleet(request: Request) -> dict[str, Any]:
    """Counts of devices by state, agent version, class, model, split point, failure cause and condition."""
    return controller_of(request).overview()


@viewers.get("/components", responses=json_response(list[PartShape]))
def parts(request: Request) -> list[dict[str, Any]]:
    """Health of broker, offload server, database, disk, controller processes and gateways, and what to do; bad ones
    first."""
    return controller_of(request).component_status()


@viewers.get("/devices/{name}/history", responses=json_response(HistoryShape))
def history(
    request: Request, name: str, span: Span = "minute", since: Time = None, until: Time = None
) -> dict[str, Any]:
    """A device's telemetry aggregated by minutes, hours, days or months: by model, and under the empty name for the
    device itself."""
    return controller_of(request).history(name, span, *_period(span, since, until))


@viewers.get("/models/{reference}/history", responses=json_response(ModelHistoryShape))
def model_history(
    request: Request, reference: str, span: Span = "minute", since: Time = None, until: Time = None
) -> dict[str, Any]:
    """A model's telemetry, of all versions on all devices, aggregated by minutes, hours, days or months."""
    return controller_of(request).model_history(reference, span, *_period(span, since, until))


def _period(span: Span, since: float | None, until: float | None) -> tuple[float, float]:
    """Beginning and end of the requested period; UsageError if it is longer than one response may be."""
    most_s = SPANS[span].max_query_s
    end = until if until is not None else time.time()
    begin = since if since is not None else max(0.0, end - DEFAULT_S[span])
    if not 0 <= end - begin <= most_s:
        raise UsageError(f"a history by {span} has at most {most_s / DAY_S:g} days, and ends after it begins")
    return begin, end


@operators.post("/devices/{name}/logs", responses=json_response(BundleShape))
def ask_for_logs(request: Request, name: str) -> dict[str, Any]:
    """Request a log bundle from a device: recent log lines, versions and state. Poll it with GET."""
    return controller_of(request).request_log_bundle(name)


@operators.get("/devices/{name}/logs", responses=json_response(list[BundleShape]))
def bundles(request: Request, name: str) -> list[dict[str, Any]]:
    """The log bundles of a device, newest first."""
    return controller_of(request).log_bundles(name)


@operators.get("/devices/{name}/logs/{number}", responses=json_response(BundleShape))
def bundle(request: Request, name: str, number: str) -> dict[str, Any]:
    """One log bundle, with its content once all pieces have arrived."""
    return controller_of(request).log_bundle(name, number)
