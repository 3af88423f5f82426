"""The configuration of the cards that a flash makes, checked before anything is written: what all cards share, and what
differs by device."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from ipaddress import ip_address
from pathlib import Path
from urllib.parse import urlsplit

from edgesplit import identifiers
from edgesplit.controller_client.claims import ClaimRequest, create_claim
from edgesplit.controller_client.client import ControllerClient
from edgesplit.errors import NotFound, UsageError
from edgesplit.trust.identity import Claim, decode_claim
from edgesplit_provisioning.image.detect import BOARD_DEVICE_TREES, DetectedImage
from edgesplit_provisioning.image.options import CardSettings
from edgesplit_provisioning.profiles import CORAL_PROFILES
from edgesplit_provisioning.wifi import Wifi


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchSettings:
    """The settings that all cards of a batch share."""

    board: str
    device_class: str
    """The device profile of the board with its accelerator."""
    user: str | None
    ssh_keys: tuple[str, ...] = ()
    sudo: bool = False
    wifi: Wifi | None = None
    link: str = "wifi"
    expires_s: int = 7 * 86_400
    replace: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceSettings:
    """The settings of one card's device."""

    hostname: str
    group: str | None = None
    labels: Mapping[str, str] = field(default_factory=dict)


def checked_board(device_class: str) -> str:
    """`device_class` if cards can be made for it; UsageError otherwise."""
    if device_class not in BOARD_DEVICE_TREES:
        raise UsageError(
            f"--device {device_class[:60]}: cards are made for {', '.join(BOARD_DEVICE_TREES)}. A device that runs"
            " already is taken"
            " over by `edgectl adopt`"
        )
    return device_class


def profile_of(device: str, *, coral: bool) -> str:
    """The device profile of that board: with an Edge TPU where a profile for both exists, else that of the board, so
    that plans count on the CPU."""
    return CORAL_PROFILES.get(device, device) if coral else device


def card_settings(batch: BatchSettings, device: DeviceSettings, detected: DetectedImage) -> CardSettings:
    """The settings of one card; the user is the image's default where none was named."""
    return CardSettings(
        hostname=device.hostname,
        user=batch.user or detected.default_user,
        ssh_keys=batch.ssh_keys,
        sudo=batch.sudo,
        wifi=batch.wifi,
    )


def check_name_is_free(api: ControllerClient, device: str, replace: bool) -> None:
    """UsageError where a device of that name has enrolled: the claim on the card would be refused."""
    identifiers.device_name(device)
    try:
        known = api.get(f"/v1/devices/{device}")
    except NotFound:
        return
    if known["state"] not in ("claimed", "revoked") and not replace:
        raise UsageError(
            f"{device} is a device already ({known['state']}): choose another --hostname, or give its name to this card"
            " with --replace"
        )


def request_claim(api: ControllerClient, batch: BatchSettings, device: DeviceSettings) -> bytes:
    """A new one-time claim for the device, encoded."""
    request = ClaimRequest(
        device=device.hostname,
        device_class=batch.device_class,
        link=batch.link,
        group=device.group,
        labels=device.labels,
        expires_s=batch.expires_s,
        replace=batch.replace,
    )
    return create_claim(api, request).encode()


def read_claim(file: Path, hostname: str | None) -> tuple[Claim, bytes]:
    """A claim made before, read from a file; UsageError where it is for another name."""
    try:
        raw = file.read_bytes()
    except OSError as error:
        raise UsageError(f"cannot read the claim {file}: {error.strerror}") from error
    claim = decode_claim(raw)
    if hostname is not None and claim.device != hostname:
        raise UsageError(f"the claim in {file} is for {claim.device}, not for {hostname}")
    return claim, raw


def why_unreachable(claim: bytes) -> str:
    """Why no device can reach the controller by this claim's address; empty where it may."""
    url = decode_claim(claim).controller_url
    host = urlsplit(url).hostname or ""
    try:
        is_loopback = ip_address(host).is_loopback
    except ValueError:
        is_loopback = host == "localhost"
    if not is_loopback:
        return ""
    return f"the controller calls itself {url}, where no device finds it: give `edgectl up` a --host"
