"""All that goes onto a boot partition, in the order in which it is put there. Pure.

The kernel's line comes last and by itself: it refers to the others.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import edgesplit
from edgesplit_provisioning.image import cloud_init, cmdline, raspberry_firstrun, systemd_unit
from edgesplit_provisioning.image.detect import Format, Found
from edgesplit_provisioning.image.options import Wishes

FOLDER = systemd_unit.FOLDER
CLAIM = f"{FOLDER}/claim.json"
CARD = f"{FOLDER}/card.json"
ORIGINAL = f"{FOLDER}/cmdline.orig"
CARD_FORMAT = "edgesplit.card/1"


@dataclass(frozen=True, slots=True)
class BootFiles:
    """What is written, and what may be told of it."""

    files: Mapping[str, bytes | Path]
    """Name on the partition -> content, or a file here."""
    cmdline: bytes
    instance: str


def boot_files(
    found: Found, wishes: Wishes, kit: Mapping[str, Path], claim: bytes, line: bytes, device_class: str
) -> BootFiles:
    """For an image of that kind, whose kernel's line is `line` now."""
    instance = f"edgesplit-{wishes.hostname}-{uuid.uuid4().hex[:12]}"
    files: dict[str, bytes | Path] = {f"{FOLDER}/{name}": file for name, file in kit.items()}
    files[f"{FOLDER}/{systemd_unit.SCRIPT}"] = systemd_unit.script()
    files[ORIGINAL] = line
    files[CARD] = _card(wishes, device_class, instance)
    files[CLAIM] = claim
    if found.format is Format.CLOUD_INIT:
        files |= _for_cloud_init(wishes, found.mount, instance)
        wanted = cloud_init.kernel_parameters(instance, wishes.wifi)
    else:
        files[raspberry_firstrun.NAME] = raspberry_firstrun.script(wishes, found.mount)
        wanted = raspberry_firstrun.kernel_parameters(found.mount, wishes.wifi)
    return BootFiles(files, cmdline.with_parameters(line, wanted), instance)


def _for_cloud_init(wishes: Wishes, mount: str, instance: str) -> dict[str, bytes | Path]:
    files: dict[str, bytes | Path] = {}
    if wishes.wifi is not None:
        files[f"{FOLDER}/network-config.clean"] = cloud_init.network_config(None)
    files[cloud_init.META_DATA] = cloud_init.meta_data(instance, wishes)
    files[cloud_init.NETWORK] = cloud_init.network_config(wishes.wifi)
    files[cloud_init.USER_DATA] = cloud_init.user_data(wishes, mount)
    return files


def _card(wishes: Wishes, device_class: str, instance: str) -> bytes:
    """Whose card this is, for whoever finds it in a reader. No secret."""
    said: dict[str, Any] = {
        "format": CARD_FORMAT,
        "device": wishes.hostname,
        "device_class": device_class,
        "instance": instance,
        "edgesplit": edgesplit.__version__,
    }
    return json.dumps(said, indent=1).encode() + b"\n"
