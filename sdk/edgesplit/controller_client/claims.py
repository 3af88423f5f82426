"""One-time claims: how a command asks the controller for one."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field

from edgesplit.controller_client.client import ControllerClient


@dataclass(frozen=True, slots=True, kw_only=True)
class ClaimWish:
    """What is said of a device to come."""

    device: str
    device_class: str
    link: str = "wifi"
    group: str | None = None
    labels: Mapping[str, str] = field(default_factory=dict)
    expires_s: int = 3_600
    replace: bool = False
    """The name is a device's already, and is taken from it."""
    gateway: str = ""


def make_claim(api: ControllerClient, wish: ClaimWish) -> str:
    """The claim's document, as the device gets it. It holds a secret."""
    body = {
        "device": wish.device,
        "device_class": wish.device_class,
        "link": wish.link,
        "group": wish.group,
        "labels": dict(wish.labels),
        "expires_s": wish.expires_s,
        "replace": wish.replace,
        "gateway": wish.gateway,
    }
    return json.dumps(api.post("/v1/devices/claims", body))
