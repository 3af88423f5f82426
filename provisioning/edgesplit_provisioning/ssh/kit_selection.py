"""Which kit a machine gets: made by `edgesplit_provisioning.kit`, once for all machines of one kind."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from edgesplit_provisioning import kit as kit_package
from edgesplit_provisioning.kit import Kit, Target, build_kit
from edgesplit_provisioning.kit.manifest import CORAL, INSTALLER, NAME, digest
from edgesplit_provisioning.ssh.decide import Means
from edgesplit_provisioning.ssh.facts import Survey

MakeKit = Callable[[Means, Survey, "Path | None"], "Fitting"]


@dataclass(frozen=True, slots=True)
class Fitting:
    """A kit as `adoption.Kit` wants it."""

    made: Kit

    @property
    def files(self) -> Mapping[str, Path]:
        """By name, in the order in which they are sent: what describes the others first."""
        return self.made.files

    @property
    def bytes(self) -> int:
        """Of all files."""
        return self.made.bytes

    @property
    def version(self) -> str:
        """Of edgesplit in it."""
        return self.made.described.version

    @property
    def mark(self) -> str:
        """As install.sh calls what it installs."""
        return f"{self.version}-{digest(self.made.files[NAME])[:8]}"

    @property
    def needs_bytes(self) -> int:
        """Free space that installing takes."""
        return self.made.described.needs_bytes


def installer() -> Path:
    """The installer alone: it also removes."""
    return Path(kit_package.__file__).with_name(INSTALLER)


def kits(
    cache: Path, extras: Sequence[str], interpreter: Path | None, wheelhouse: Path | None, told: Callable[[str], None]
) -> MakeKit:
    """Makes kits, one at a time and each once; of Coral's packages where they are given."""
    making, made = threading.Lock(), dict[tuple[Target, bool, Path | None], Fitting]()

    def make(means: Means, seen: Survey, coral: Path | None) -> Fitting:
        glibc = f"{seen.libc[0]}.{seen.libc[1]}" if seen.libc else "2.28"
        target = Target(python=means.python, machine=means.machine, glibc=glibc)
        key = (target, means.own_interpreter, coral)
        with making:
            if key not in made:
                wanted = [*extras, *(["tflite"] if coral is not None else [])]
                more = {CORAL: coral} if coral is not None else None
                brought = interpreter if means.own_interpreter else None
                made[key] = Fitting(build_kit(
                    target, extras=sorted(set(wanted)), cache=cache, interpreter=brought, wheelhouse=wheelhouse,
                    more=more, progress=told,
                ))  # fmt: skip
            return made[key]

    return make
