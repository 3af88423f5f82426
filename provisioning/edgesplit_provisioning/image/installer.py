"""The offline installer for an image: a kit for the Python version and machine that the image has."""

from __future__ import annotations

import tempfile
from pathlib import Path

from edgesplit.controller_client.settings import cache_folder
from edgesplit.errors import UsageError
from edgesplit_provisioning.flash_options import FlashOptions
from edgesplit_provisioning.image.detect import DetectedImage
from edgesplit_provisioning.kit import Kit, Target, build_kit, read_kit
from edgesplit_provisioning.kit.edgetpu_packages import CoralPackages
from edgesplit_provisioning.kit.manifest import CORAL, INTERPRETER
from edgesplit_provisioning.kit.wheelhouse import OnProgress


def kit_for(detected: DetectedImage, flash: FlashOptions, coral: CoralPackages | None, on_progress: OnProgress) -> Kit:
    """The kit for that image, with the packages of an Edge TPU if there are any. UsageError where the image's Python
    cannot be determined or a given kit does not fit."""
    if flash.kit_folder is not None:
        if coral is not None:
            raise UsageError("--coral cannot change a kit that exists: build the kit with --coral, or omit --kit")
        return _checked_fit(flash.kit_folder, detected)
    system = detected.system
    if not system.python or not system.machine:
        raise UsageError(
            "cannot see in the image which Python it has (no ext4 file system with /usr/bin/python3): make a kit for it"
            " with `edgectl kit build` and give it as --kit FOLDER"
        )
    target = Target(python=system.python, machine=system.machine)
    with tempfile.TemporaryDirectory() as folder:
        more = {CORAL: coral.archive(system.machine, Path(folder))} if coral is not None else None
        return build_kit(
            target, extras=[*flash.extras, *(["tflite"] if coral is not None else [])], cache=cache_folder(),
            interpreter=flash.interpreter, wheelhouse=flash.wheelhouse, more=more, progress=on_progress,
        )  # fmt: skip


def _checked_fit(folder: Path, detected: DetectedImage) -> Kit:
    """The kit in `folder`; UsageError unless it fits the image's machine and Python."""
    kit = read_kit(folder)
    described, system = kit.manifest, detected.system
    pairs = [(described.machine, system.machine)]
    if INTERPRETER not in kit.files:
        pairs.append((described.python, system.python))
    for kit_value, image_value in pairs:
        if image_value and kit_value != image_value:
            raise UsageError(
                f"the kit in {folder} is for {kit_value}, and the image has {image_value}: make one for it"
            )
    return kit
