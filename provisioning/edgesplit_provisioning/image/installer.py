"""The offline installer for an image: a kit for the Python version and machine that the image has."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from edgesplit.errors import UsageError
from edgesplit_provisioning.image.detect import DetectedImage
from edgesplit_provisioning.kit import Kit, Target, build_kit, read_kit
from edgesplit_provisioning.kit.edgetpu_packages import CoralPackages
from edgesplit_provisioning.kit.manifest import CORAL, INTERPRETER
from edgesplit_provisioning.kit.wheelhouse import OnProgress


@dataclass(frozen=True, slots=True, kw_only=True)
class KitSource:
    """Where the kit comes from."""

    cache: Path
    folder: Path | None = None
    """A kit that was built before; None builds one."""
    extras: tuple[str, ...] = ()
    wheelhouse: Path | None = None
    interpreter: Path | None = None
    coral: CoralPackages | None = None


def coral_packages(wanted: bool, debs: Sequence[Path]) -> CoralPackages | None:
    """The packages that an Edge TPU needs, None without one; UsageError for unsuitable packages."""
    return CoralPackages(debs) if wanted or debs else None


def kit_for(detected: DetectedImage, source: KitSource, on_progress: OnProgress) -> Kit:
    """The kit for that image. UsageError where its Python cannot be determined or a given kit does not fit."""
    if source.folder is not None:
        return _checked_fit(read_kit(source.folder), detected, source)
    system = detected.system
    if not system.python or not system.machine:
        raise UsageError(
            "cannot see in the image which Python it has (no ext4 file system with /usr/bin/python3): make a kit for it"
            " with `edgectl kit build` and give it as --kit FOLDER"
        )
    target = Target(python=system.python, machine=system.machine)
    extras = {*source.extras, *(["tflite"] if source.coral is not None else [])}
    with tempfile.TemporaryDirectory() as folder:
        coral = source.coral.archive(system.machine, Path(folder)) if source.coral is not None else None
        return build_kit(
            target, extras=sorted(extras), cache=source.cache, interpreter=source.interpreter,
            wheelhouse=source.wheelhouse, more={CORAL: coral} if coral is not None else None, progress=on_progress,
        )  # fmt: skip


def _checked_fit(kit: Kit, detected: DetectedImage, source: KitSource) -> Kit:
    """`kit` if it fits the image's machine and Python; UsageError otherwise."""
    described, system = kit.manifest, detected.system
    pairs = [(described.machine, system.machine)]
    if INTERPRETER not in kit.files:
        pairs.append((described.python, system.python))
    for kit_value, image_value in pairs:
        if image_value and kit_value != image_value:
            raise UsageError(
                f"the kit in {source.folder} is for {kit_value}, and the image has {image_value}: make one for it"
            )
    if source.coral is not None:
        raise UsageError("--coral cannot change a kit that exists: build the kit with --coral, or omit --kit")
    return kit
