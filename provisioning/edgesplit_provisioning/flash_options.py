"""The options of a flash, as an operator gives them: what cards and Jetsons share, and what each has of its own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True, kw_only=True)
class FlashOptions:
    """The options of both kinds of flash."""

    device: str
    """Device profile of the board."""
    hostname: str | None
    group: str | None
    labels: Mapping[str, str]
    ssid: str | None
    wifi_password_file: Path | None
    wifi_country: str
    ssh_key: Path | None
    """File of public keys that may log in."""
    user: str | None
    sudo: bool
    link: str
    expires_s: int
    """Seconds for which a new claim is valid."""
    replace: bool
    """Take over the name of an existing device."""
    agent_options: str | None
    """Checked options of the agent's `run`; None leaves the service without any."""
    claim_file: Path | None
    """A claim that was made before; None requests one."""
    kit_folder: Path | None
    extras: tuple[str, ...]
    wheelhouse: Path | None
    interpreter: Path | None
    dry_run: bool
    wait: bool
    """Wait until the devices are online."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CardOptions(FlashOptions):
    """The options of a flash of cards."""

    image: Path
    to: str
    """A disk or a file; in a batch with `{hostname}`."""
    sha256: str | None
    batch: Path | None
    """Table with a line for each card."""
    coral: bool
    coral_debs: tuple[Path, ...]
    fixed_disk: bool
    """Allow a target disk that is built into this machine."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JetsonOptions(FlashOptions):
    """The options of a flash of a Jetson by NVIDIA's tools."""

    bsp: Path
    """NVIDIA's Linux_for_Tegra."""
    to: str | None
    """The board's medium."""
    board: str | None
    accept_nvidia_license: bool
