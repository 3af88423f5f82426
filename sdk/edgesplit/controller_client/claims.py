"""Creates one-time claims, with which new devices enrol at the controller."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field

from edgesplit.controller_client.client import ControllerClient


@dataclass(frozen=True, slots=True, kw_only=True)
class ClaimRequest:
    """The properties of a device that is to enrol with the claim. `expires_s` is the claim's lifetime in seconds."""

    device: str
    device_class: str
    link: str = "wifi"
    group: str | None = None
    labels: Mapping[str, str] = field(default_factory=dict)
    expires_s: int = 3_600
    replace: bool = False
    """A device of that name exists already, and the new device takes its name over."""
    gateway: str = ""
    """Makes the device a gateway: HOST:PORT under which other devices reach it; empty: not a gateway."""


def create_claim(controller: ControllerClient, request: ClaimRequest) -> str:
    """Create a claim for the device that `request` describes; returns the claim as JSON text, in the form that the
    device reads.

    The text contains a secret token: keep it like a password. UsageError if the controller refuses the claim, LinkError
    if the controller does not answer.
    """
    body = {
        "device": request.device, "device_class": request.device_class, "link": request.link, "group": request.group,
        "labels": dict(request.labels), "expires_s": request.expires_s, "replace": request.replace,
        "gateway": request.gateway,
    }  # fmt: skip
    return json.dumps(controller.post("/v1/devices/claims", body))
