"""Devices: claimed, led, shown, revoked."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import Query, Request, Response
from pydantic import Field

from edgesplit.errors import UsageError
from edgesplit_controller.api.authorisation import about, caller_of, operator_routes, viewer_routes
from edgesplit_controller.api.dispatch import controller_of
from edgesplit_controller.api.request_models import ClaimBody, DescribeBody, LeadBody
from edgesplit_controller.api.response_models import ClaimShape, Described, DeviceShape, DeviceState, Led, answers
from edgesplit_controller.fleet.devices import ClaimWish
from edgesplit_controller.fleet.listing import MOST, Asked

viewers = viewer_routes()
operators = operator_routes()
certified = operator_routes(certificate=True)

WORD = r"^[\w .@/=-]*$"
"""What names, groups, labels and kinds are made of."""
Word = Annotated[str, Field(max_length=160, pattern=WORD)]


@certified.post("/devices/claims", responses=answers(ClaimShape))
def claim(request: Request, body: ClaimBody) -> dict[str, Any]:
    """A one-time claim; it holds a secret."""
    about(request, body.device)
    groups = caller_of(request).groups or frozenset()
    wish = ClaimWish(
        device=body.device,
        device_class=body.device_class,
        group=body.group or (next(iter(groups)) if len(groups) == 1 else ""),
        labels=body.labels,
        link=body.link or "",
        expires_s=body.expires_s,
        replace=body.replace,
    )
    return controller_of(request).claim(wish, body.gateway)


@operators.post("/devices/gateway", responses=answers(Led))
def lead(request: Request, body: LeadBody) -> dict[str, Any]:
    """Let devices offload through a gateway, or to the cloud again."""
    about(request, body.gateway, *body.devices[:8])
    return controller_of(request).lead(body.devices, body.gateway, body.link)


@viewers.get("/devices", responses=answers(list[DeviceShape]))
def all_devices(
    request: Request,
    response: Response,
    limit: Annotated[int, Query(ge=1, le=MOST)] = MOST,
    after: Annotated[str, Query(max_length=64, pattern=WORD)] = "",
    group: Annotated[str | None, Query(max_length=63, pattern=WORD)] = None,
    label: Annotated[list[Word] | None, Query(max_length=16)] = None,
    state: Annotated[str | None, Query(max_length=16, pattern=WORD)] = None,
    like: Annotated[str, Query(max_length=64, pattern=WORD)] = "",
    condition: Annotated[str | None, Query(max_length=40, pattern=WORD)] = None,
    model: Annotated[str | None, Query(max_length=80, pattern=WORD)] = None,
) -> list[dict[str, Any]]:
    """Devices and open claims by name, a page at a time; where there are more, `Link: <…>; rel="next"` leads on."""
    asked = Asked(limit, after, group, labels_of(label or []), state, like, None, condition, model)
    page, last = controller_of(request).all_devices(asked)
    if last:
        onward = request.url.include_query_params(after=last)
        response.headers["Link"] = f'<{onward.path}?{onward.query}>; rel="next"'
    return page


def labels_of(words: list[str]) -> dict[str, str]:
    """`KEY=VALUE` each; UsageError for anything else."""
    labels = {}
    for word in words:
        key, equals, value = word.partition("=")
        if not equals or not key:
            raise UsageError(f"label {word[:80]!r}: write it as KEY=VALUE")
        labels[key] = value
    return labels


@viewers.get("/devices/{name}", responses=answers(DeviceShape))
def device(request: Request, name: str) -> dict[str, Any]:
    """One device."""
    return controller_of(request).device(name)


@operators.patch("/devices/{name}", responses=answers(Described))
def describe(request: Request, name: str, body: DescribeBody) -> dict[str, Any]:
    """Another group, other labels."""
    about(request, name, body.group or "")
    return controller_of(request).describe(name, body.group, body.labels)


@operators.delete("/devices/{name}", responses=answers(DeviceState))
def revoke(request: Request, name: str) -> dict[str, Any]:
    """Take a device's right away."""
    return controller_of(request).revoke(name)
