"""Routes for devices: claim, list, change, revoke, remove, assign a gateway."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import Query, Request, Response
from pydantic import Field

from edgesplit.errors import UsageError
from edgesplit_controller.api.authorisation import caller_of, operator_routes, set_audit_subject, viewer_routes
from edgesplit_controller.api.dispatch import controller_of
from edgesplit_controller.api.request_models import ClaimBody, DescribeBody, LeadBody
from edgesplit_controller.api.response_models import ClaimShape, Described, DeviceShape, DeviceState, Led, json_response
from edgesplit_controller.errors import PermissionDenied
from edgesplit_controller.fleet.devices import ClaimRequest
from edgesplit_controller.fleet.listing import MAX_PAGE, ListingQuery

viewers = viewer_routes()
operators = operator_routes()
certified = operator_routes(certificate=True)

SESSION_CLAIM_S = 3_600
"""Longest validity in seconds of a claim made by a browser session: a stolen session leaves no lasting claims."""
WORD = r"^[\w .@/=-]*$"
"""Pattern of names, groups, labels and kinds."""
Word = Annotated[str, Field(max_length=160, pattern=WORD)]


@operators.post("/devices/claims", responses=json_response(ClaimShape))
def claim(request: Request, body: ClaimBody) -> dict[str, Any]:
    """A one-time claim with which a device can enrol; it contains a secret. A browser session gets one for a new name,
    of at most an hour."""
    set_audit_subject(request, body.device)
    caller = caller_of(request)
    if not caller.serial and (body.replace or body.gateway or body.expires_s > SESSION_CLAIM_S):
        raise PermissionDenied(
            "a browser session claims new devices that are no gateways, for at most an hour: use edgectl, with the"
            " operator's certificate"
        )
    groups = caller.groups or frozenset()
    claim_request = ClaimRequest(
        device=body.device, device_class=body.device_class,
        group=body.group or (next(iter(groups)) if len(groups) == 1 else ""), labels=body.labels, link=body.link or "",
        expires_s=body.expires_s, replace=body.replace,
    )  # fmt: skip
    return controller_of(request).claim(claim_request, body.gateway)


@operators.post("/devices/gateway", responses=json_response(Led))
def lead(request: Request, body: LeadBody) -> dict[str, Any]:
    """Set the gateway that devices offload through, or `none` for the cloud."""
    set_audit_subject(request, body.gateway, *body.devices[:8])
    return controller_of(request).assign_gateway(body.devices, body.gateway, body.link)


@viewers.get("/devices", responses=json_response(list[DeviceShape]))
def all_devices(
    request: Request,
    response: Response,
    limit: Annotated[int, Query(ge=1, le=MAX_PAGE)] = MAX_PAGE,
    after: Annotated[str, Query(max_length=64, pattern=WORD)] = "",
    group: Annotated[str | None, Query(max_length=63, pattern=WORD)] = None,
    label: Annotated[list[Word] | None, Query(max_length=16)] = None,
    state: Annotated[str | None, Query(max_length=16, pattern=WORD)] = None,
    like: Annotated[str, Query(max_length=64, pattern=WORD)] = "",
    condition: Annotated[str | None, Query(max_length=40, pattern=WORD)] = None,
    model: Annotated[str | None, Query(max_length=80, pattern=WORD)] = None,
) -> list[dict[str, Any]]:
    """Devices and open claims by name, a page at a time; if there are more, the header `Link: <…>; rel="next"` has the
    next page's URL."""
    query = ListingQuery(limit, after, group, parse_labels(label or []), state, like, None, condition, model)
    page, last = controller_of(request).list_devices(query)
    if last:
        next_url = request.url.include_query_params(after=last)
        response.headers["Link"] = f'<{next_url.path}?{next_url.query}>; rel="next"'
    return page


def parse_labels(words: list[str]) -> dict[str, str]:
    """Parse `KEY=VALUE` words; UsageError for anything else."""
    labels = {}
    for word in words:
        key, equals, value = word.partition("=")
        if not equals or not key:
            raise UsageError(f"label {word[:80]!r}: write it as KEY=VALUE")
        labels[key] = value
    return labels


@viewers.get("/devices/{name}", responses=json_response(DeviceShape))
def device(request: Request, name: str) -> dict[str, Any]:
    """One device, or the open claim of that name."""
    return controller_of(request).device(name)


@operators.patch("/devices/{name}", responses=json_response(Described))
def describe(request: Request, name: str, body: DescribeBody) -> dict[str, Any]:
    """Change a device's group and labels."""
    set_audit_subject(request, name, body.group or "")
    return controller_of(request).update_device(name, body.group, body.labels)


@operators.delete("/devices/{name}", responses=json_response(DeviceState))
def revoke(request: Request, name: str) -> dict[str, Any]:
    """Revoke a device: its certificates, its desired state and its session."""
    return controller_of(request).revoke(name)


@certified.delete("/devices/{name}/record", responses=json_response(DeviceState))
def remove(request: Request, name: str, force: bool = False) -> dict[str, Any]:
    """Remove a device that is revoked or never enrolled, with its history, logs and claims; with `force` one that is
    not revoked is revoked first."""
    return controller_of(request).remove_device(name, force=force)
