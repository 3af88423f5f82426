"""The device that a flash is for: its name, its device profile and its claim, checked before anything is written."""

from __future__ import annotations

from ipaddress import ip_address
from pathlib import Path
from urllib.parse import urlsplit

from edgesplit import identifiers
from edgesplit.controller_client.claims import ClaimRequest, create_claim
from edgesplit.controller_client.client import ControllerClient
from edgesplit.errors import NotFound, UsageError
from edgesplit.trust.identity import decode_claim
from edgesplit_provisioning.flash_options import FlashOptions
from edgesplit_provisioning.image.detect import BOARD_DEVICE_TREES
from edgesplit_provisioning.image.options import DeviceSettings, checked_hostname, random_hostname
from edgesplit_provisioning.profiles import CORAL_PROFILES


def check_board(device_class: str) -> None:
    """UsageError where no cards can be made for that device profile."""
    if device_class not in BOARD_DEVICE_TREES:
        raise UsageError(
            f"--device {device_class[:60]}: cards are made for {', '.join(BOARD_DEVICE_TREES)}. A device that runs"
            " already is taken over by `edgectl adopt`"
        )


def profile_of(device: str, *, coral: bool) -> str:
    """The device profile of that board: with an Edge TPU where a profile for both exists, else that of the board, so
    that plans count on the CPU."""
    return CORAL_PROFILES.get(device, device) if coral else device


def requested_device(flash: FlashOptions) -> tuple[DeviceSettings, bytes | None]:
    """The device of a flash, and the claim that was made for it before, if any. Its name is random where none is
    given."""
    name, claim = flash.hostname, None
    if flash.claim_file is not None:
        name, claim = read_claim(flash.claim_file, name)
    hostname = checked_hostname(name) if name is not None else random_hostname(flash.device)
    return DeviceSettings(hostname=hostname, group=flash.group, labels=flash.labels), claim


def check_name_is_free(api: ControllerClient, device: str, replace: bool) -> None:
    """UsageError where a device of that name has enrolled: the claim on the card would be refused."""
    identifiers.new_device_name(device)
    try:
        known = api.get(f"/v1/devices/{device}")
    except NotFound:
        return
    if known["state"] not in ("claimed", "revoked") and not replace:
        raise UsageError(
            f"{device} is a device already ({known['state']}): choose another --hostname, or give its name to this card"
            " with --replace"
        )


def request_claim(api: ControllerClient, flash: FlashOptions, device: DeviceSettings, device_class: str) -> bytes:
    """A new one-time claim for the device, encoded."""
    request = ClaimRequest(
        device=device.hostname, device_class=device_class, link=flash.link, group=device.group, labels=device.labels,
        expires_s=flash.expires_s, replace=flash.replace,
    )  # fmt: skip
    return create_claim(api, request).encode()


def read_claim(file: Path, hostname: str | None) -> tuple[str, bytes]:
    """A claim made before, read from a file, and its device; UsageError where it is for another name."""
    try:
        raw = file.read_bytes()
    except OSError as error:
        raise UsageError(f"cannot read the claim {file}: {error.strerror}") from error
    claim = decode_claim(raw)
    if hostname is not None and claim.device != hostname:
        raise UsageError(f"the claim in {file} is for {claim.device}, not for {hostname}")
    return claim.device, raw


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
    return f"the controller's address for devices is {url}, which none of them can reach: give `edgectl up` a --host"
