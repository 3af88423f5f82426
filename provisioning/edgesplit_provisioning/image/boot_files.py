"""The files that are written to a boot partition, in the order in which they are written. No I/O.

The kernel command line comes last and separately, since it refers to the others.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import edgesplit
from edgesplit_provisioning import agent_options
from edgesplit_provisioning.image import cloud_init, cmdline, raspberry_firstrun, systemd_unit
from edgesplit_provisioning.image.detect import DetectedImage, Format
from edgesplit_provisioning.image.options import CardSettings

FOLDER = systemd_unit.FOLDER
CLAIM_FILE = f"{FOLDER}/claim.json"
CARD_FILE = f"{FOLDER}/card.json"
ORIGINAL_CMDLINE = f"{FOLDER}/cmdline.orig"
CARD_FORMAT = "edgesplit.card/1"


@dataclass(frozen=True, slots=True)
class BootFiles:
    """The files of one card and the instance id in them."""

    files: Mapping[str, bytes | Path]
    """Content, or a local file to copy, by name on the partition."""
    cmdline: bytes
    """The new kernel command line."""
    instance: str
    """Id of this card's configuration, new for each card written."""

    @property
    def cmdline_text(self) -> str:
        """The new kernel command line as text."""
        return self.cmdline.decode("ascii").strip()


def build_boot_files(
    detected: DetectedImage, settings: CardSettings, kit: Mapping[str, Path], claim: bytes, line: bytes,
    device_class: str,
) -> BootFiles:  # fmt: skip
    """The files for an image of this kind; `line` is the image's current kernel command line."""
    instance = f"edgesplit-{settings.hostname}-{uuid.uuid4().hex[:12]}"
    files: dict[str, bytes | Path] = {f"{FOLDER}/{name}": file for name, file in kit.items()}
    files[f"{FOLDER}/{systemd_unit.SCRIPT}"] = systemd_unit.script()
    files[ORIGINAL_CMDLINE] = line
    files[CARD_FILE] = _card_record(settings, device_class, instance)
    files[CLAIM_FILE] = claim
    if settings.agent_options is not None:
        files[f"{FOLDER}/{agent_options.FILE}"] = f"{agent_options.environment_line(settings.agent_options)}\n".encode()
    if detected.format is Format.CLOUD_INIT:
        files |= _for_cloud_init(settings, detected.mount, instance)
        parameters = cloud_init.kernel_parameters(instance, settings.wifi)
    else:
        files[raspberry_firstrun.NAME] = raspberry_firstrun.script(settings, detected.mount)
        parameters = raspberry_firstrun.kernel_parameters(detected.mount, settings.wifi)
    return BootFiles(files, cmdline.with_parameters(line, parameters), instance)


def _for_cloud_init(settings: CardSettings, mount: str, instance: str) -> dict[str, bytes | Path]:
    files: dict[str, bytes | Path] = {}
    if settings.wifi is not None:
        files[f"{FOLDER}/network-config.clean"] = cloud_init.network_config(None)
    files[cloud_init.META_DATA] = cloud_init.meta_data(instance, settings)
    files[cloud_init.NETWORK] = cloud_init.network_config(settings.wifi)
    files[cloud_init.USER_DATA] = cloud_init.user_data(settings, mount)
    return files


def _card_record(settings: CardSettings, device_class: str, instance: str) -> bytes:
    """A record of the device that the card was made for, found by a later flash. Contains no secret."""
    record: dict[str, Any] = {
        "format": CARD_FORMAT,
        "device": settings.hostname,
        "device_class": device_class,
        "instance": instance,
        "edgesplit": edgesplit.__version__,
    }
    return json.dumps(record, indent=1).encode() + b"\n"
