"""What somebody asked a flash for, checked before anything is done; and one device of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from ipaddress import ip_address
from pathlib import Path
from urllib.parse import urlsplit

from edgesplit import identifiers
from edgesplit.controller_client.claims import ClaimWish, make_claim
from edgesplit.controller_client.client import ControllerClient
from edgesplit.errors import NotFound, UsageError
from edgesplit.trust.identity import Claim, decode_claim
from edgesplit_provisioning.image.detect import BOARDS, Found
from edgesplit_provisioning.image.options import Wishes
from edgesplit_provisioning.image.wifi import Wifi
from edgesplit_provisioning.ssh.decide import CORAL


@dataclass(frozen=True, slots=True, kw_only=True)
class Orders:
    """The same for each card of a batch."""

    board: str
    device_class: str
    """The device profile: of the board, and what is plugged into it."""
    user: str | None
    ssh_keys: tuple[str, ...] = ()
    sudo: bool = False
    wifi: Wifi | None = None
    link: str = "wifi"
    expires_s: int = 7 * 86_400
    replace: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceToBe:
    """One card."""

    hostname: str
    group: str | None = None
    labels: Mapping[str, str] = field(default_factory=dict)


def board(device_class: str) -> str:
    """The kind of device, if a card can be made for it."""
    if device_class not in BOARDS:
        raise UsageError(
            f"--device {device_class[:60]}: cards are made for {', '.join(BOARDS)}. A device that runs already is taken"
            " over by `edgectl adopt`"
        )
    return device_class


def profile_of(device: str, *, coral: bool) -> str:
    """The device profile of that board, with an Edge TPU where there is one for both; else plans count on the CPU."""
    return CORAL.get(device, device) if coral else device


def wishes_of(orders: Orders, device: DeviceToBe, found: Found) -> Wishes:
    """What the card shall become; the user is the image's own where none was named."""
    return Wishes(
        hostname=device.hostname,
        user=orders.user or found.default_user,
        ssh_keys=orders.ssh_keys,
        sudo=orders.sudo,
        wifi=orders.wifi,
    )


def is_free(api: ControllerClient, device: str, may_replace: bool) -> None:
    """UsageError where the name is that of a device which has enrolled: its card would find its claim refused."""
    identifiers.device_name(device)
    try:
        found = api.get(f"/v1/devices/{device}")
    except NotFound:
        return
    if found["state"] not in ("claimed", "revoked") and not may_replace:
        raise UsageError(
            f"{device} is a device already ({found['state']}): choose another --hostname, or give its name to this card"
            " with --replace"
        )


def claim_for(api: ControllerClient, orders: Orders, device: DeviceToBe) -> bytes:
    """A one-time claim of its own."""
    wish = ClaimWish(
        device=device.hostname,
        device_class=orders.device_class,
        link=orders.link,
        group=device.group,
        labels=device.labels,
        expires_s=orders.expires_s,
        replace=orders.replace,
    )
    return make_claim(api, wish).encode()


def claim_in(file: Path, hostname: str | None) -> tuple[Claim, bytes]:
    """A claim that was made before; it must be for that name."""
    try:
        raw = file.read_bytes()
    except OSError as error:
        raise UsageError(f"cannot read the claim {file}: {error.strerror}") from error
    claim = decode_claim(raw)
    if hostname is not None and claim.device != hostname:
        raise UsageError(f"the claim in {file} is for {claim.device}, not for {hostname}")
    return claim, raw


def unreachable(claim: bytes) -> str:
    """Why no device will find the controller by this claim; empty where it may."""
    url = decode_claim(claim).controller_url
    host = urlsplit(url).hostname or ""
    try:
        is_here = ip_address(host).is_loopback
    except ValueError:
        is_here = host == "localhost"
    if not is_here:
        return ""
    return f"the controller calls itself {url}, where no device finds it: give `edgectl up` a --host"
