"""Devices: claimed, led, shown, revoked."""

from __future__ import annotations

from typing import Any

from fastapi import Request

from edgesplit_controller.api.access import about, caller_of, operator_routes, viewer_routes
from edgesplit_controller.api.bodies import ClaimBody, DescribeBody, LeadBody
from edgesplit_controller.api.shapes import ClaimShape, Described, DeviceShape, DeviceState, Led, answers
from edgesplit_controller.api.work import controller_of
from edgesplit_controller.devices import ClaimWish

viewers = viewer_routes()
operators = operator_routes()
certified = operator_routes(certificate=True)


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
def all_devices(request: Request) -> list[dict[str, Any]]:
    """Every device and every open claim."""
    return controller_of(request).all_devices()


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
