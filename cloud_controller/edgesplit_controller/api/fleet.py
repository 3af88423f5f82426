"""The fleet at a glance, a device's days and months, and its logs."""

from __future__ import annotations

import time
from typing import Annotated, Any, Literal

from fastapi import Query, Request

from edgesplit.errors import UsageError
from edgesplit_controller.api.access import operator_routes, viewer_routes
from edgesplit_controller.api.shapes import BundleShape, FleetShape, HistoryShape, answers
from edgesplit_controller.api.work import controller_of

viewers = viewer_routes()
operators = operator_routes()

LONGEST_S = {"minute": 2 * 86_400.0, "hour": 100 * 86_400.0}
"""Of a history in one answer, by its span."""
DEFAULT_S = {"minute": 3_600.0, "hour": 86_400.0}
Time = Annotated[float | None, Query(ge=0, le=1e11)]


@viewers.get("/fleet", responses=answers(FleetShape))
def fleet(request: Request) -> dict[str, Any]:
    """How many devices are how: states, versions, models and cuts in use, failures by cause, what is wrong."""
    return controller_of(request).overview()


@viewers.get("/devices/{name}/history", responses=answers(HistoryShape))
def history(
    request: Request, name: str, span: Literal["minute", "hour"] = "minute", since: Time = None, until: Time = None
) -> dict[str, Any]:
    """What a device told, added up by minutes or hours: by model, and under the empty name the device itself."""
    ends = until if until is not None else time.time()
    begins = since if since is not None else max(0.0, ends - DEFAULT_S[span])
    if not 0 <= ends - begins <= LONGEST_S[span]:
        raise UsageError(f"a history by {span} has at most {LONGEST_S[span] / 86_400:g} days, and ends after it begins")
    return controller_of(request).history(name, span, begins, ends)


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
