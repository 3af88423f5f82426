"""Selects the kit for a machine; each kind of kit is built once and shared by all machines of that kind."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from edgesplit_provisioning import kit as kit_package
from edgesplit_provisioning.kit import Kit, Target, build_kit
from edgesplit_provisioning.kit.manifest import CORAL, INSTALLER, MANIFEST, digest
from edgesplit_provisioning.ssh.decide import InstallMeans
from edgesplit_provisioning.ssh.facts import MachineFacts

MakeKit = Callable[[InstallMeans, MachineFacts, "Path | None"], "KitForAdoption"]
"""Returns the kit for a machine, with the given archive of Coral packages or none."""


@dataclass(frozen=True, slots=True)
class KitForAdoption:
    """Adapts `edgesplit_provisioning.kit.Kit` to the `Kit` protocol of `ssh.adopt`."""

    kit: Kit

    @property
    def files(self) -> Mapping[str, Path]:
        """Files by name, in the order in which they are sent: the manifest first."""
        return self.kit.files

    @property
    def bytes(self) -> int:
        """Total size of all files."""
        return self.kit.bytes

    @property
    def version(self) -> str:
        """Version of edgesplit in the kit."""
        return self.kit.manifest.version

    @property
    def mark(self) -> str:
        """Name of the version folder that install.sh makes."""
        return f"{self.version}-{digest(self.kit.files[MANIFEST])[:8]}"

    @property
    def needs_bytes(self) -> int:
        """Free space that installing takes."""
        return self.kit.manifest.needs_bytes


def installer_path() -> Path:
    """Path of install.sh, which can also uninstall."""
    return Path(kit_package.__file__).with_name(INSTALLER)


def kit_maker(
    cache: Path,
    extras: Sequence[str],
    interpreter: Path | None,
    wheelhouse: Path | None,
    on_progress: Callable[[str], None],
) -> MakeKit:
    """A function that builds kits, one at a time and each kind once. `interpreter` and `wheelhouse` are passed to
    `build_kit`."""
    lock, cached = threading.Lock(), dict[tuple[Target, bool, Path | None], KitForAdoption]()

    def make(means: InstallMeans, facts: MachineFacts, coral: Path | None) -> KitForAdoption:
        glibc = f"{facts.libc[0]}.{facts.libc[1]}" if facts.libc else "2.28"
        target = Target(python=means.python, machine=means.machine, glibc=glibc)
        key = (target, means.own_interpreter, coral)
        with lock:
            if key not in cached:
                all_extras = [*extras, *(["tflite"] if coral is not None else [])]
                more = {CORAL: coral} if coral is not None else None
                bundled = interpreter if means.own_interpreter else None
                cached[key] = KitForAdoption(build_kit(
                    target, extras=sorted(set(all_extras)), cache=cache, interpreter=bundled, wheelhouse=wheelhouse,
                    more=more, progress=on_progress,
                ))  # fmt: skip
            return cached[key]

    return make
