"""The agent's offline installer for an image: a kit for the Python and the machine that the image really has."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from edgesplit.errors import UsageError
from edgesplit_provisioning.image.detect import Found
from edgesplit_provisioning.kit import Kit, Target, build_kit, read_kit
from edgesplit_provisioning.kit.edgetpu_packages import CoralPackages
from edgesplit_provisioning.kit.manifest import CORAL, INTERPRETER
from edgesplit_provisioning.kit.wheelhouse import Told


@dataclass(frozen=True, slots=True, kw_only=True)
class KitSource:
    """Where the installer comes from."""

    cache: Path
    folder: Path | None = None
    """A kit that was made before."""
    extras: tuple[str, ...] = ()
    wheelhouse: Path | None = None
    interpreter: Path | None = None
    coral: CoralPackages | None = None


def coral_packages(wanted: bool, debs: Sequence[Path]) -> CoralPackages | None:
    """What an Edge TPU needs, where there is one; UsageError for packages that would not do."""
    return CoralPackages(debs) if wanted or debs else None


def kit_for(found: Found, source: KitSource, told: Told) -> Kit:
    """The kit for that image. UsageError where its Python is not known, or a given kit is for another."""
    if source.folder is not None:
        return _fitting(read_kit(source.folder), found, source)
    system = found.system
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
            wheelhouse=source.wheelhouse, more={CORAL: coral} if coral is not None else None, progress=told,
        )  # fmt: skip


def _fitting(kit: Kit, found: Found, source: KitSource) -> Kit:
    described, system = kit.described, found.system
    pairs = [(described.machine, system.machine)]
    if INTERPRETER not in kit.files:
        pairs.append((described.python, system.python))
    for said, has in pairs:
        if has and said != has:
            raise UsageError(f"the kit in {source.folder} is for {said}, and the image has {has}: make one for it")
    if source.coral is not None:
        raise UsageError("--kit is taken as it is: give --coral when that kit is made, or leave --kit away")
    return kit
