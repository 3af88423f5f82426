"""Selects the kit for a machine; each kind of kit is built once and shared by all machines of that kind."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from pathlib import Path

from edgesplit_provisioning import kit as kit_package
from edgesplit_provisioning.kit import Kit, Target, build_kit
from edgesplit_provisioning.kit.manifest import CORAL, INSTALLER
from edgesplit_provisioning.ssh.decide import InstallMeans
from edgesplit_provisioning.ssh.facts import MachineFacts

MakeKit = Callable[[InstallMeans, MachineFacts, "Path | None"], Kit]
"""Returns the kit for a machine, with the given archive of Coral packages or none."""


def installer_path() -> Path:
    """Path of install.sh, which can also uninstall."""
    return Path(kit_package.__file__).with_name(INSTALLER)


def kit_maker(cache: Path, extras: Sequence[str], interpreter: Path | None, wheelhouse: Path | None) -> MakeKit:
    """A function that builds kits, one at a time and each kind once. `interpreter` and `wheelhouse` are passed to
    `build_kit`."""
    lock, cached = threading.Lock(), dict[tuple[Target, bool, Path | None], Kit]()

    def make(means: InstallMeans, facts: MachineFacts, coral: Path | None) -> Kit:
        glibc = f"{facts.libc[0]}.{facts.libc[1]}" if facts.libc else "2.28"
        target = Target(python=means.python, machine=means.machine, glibc=glibc)
        key = (target, means.own_interpreter, coral)
        with lock:
            if key not in cached:
                cached[key] = build_kit(
                    target, extras=[*extras, *(["tflite"] if coral is not None else [])], cache=cache,
                    interpreter=interpreter if means.own_interpreter else None, wheelhouse=wheelhouse,
                    more={CORAL: coral} if coral is not None else None,
                )  # fmt: skip
            return cached[key]

    return make
