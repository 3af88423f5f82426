"""What a kit is built for: a Python version, a machine, and the oldest glibc that it must run on."""

from __future__ import annotations

import re
from dataclasses import dataclass

from edgesplit.errors import UsageError

PYTHONS = ("3.10", "3.11", "3.12", "3.13", "3.14")
MACHINES = ("aarch64", "x86_64")
OLDEST_GLIBC = 17
"""Minor version of the oldest glibc that wheels are tagged for (2.17, manylinux2014)."""


@dataclass(frozen=True, slots=True)
class Target:
    """The properties of a device that select wheels; only supported values are accepted."""

    python: str = "3.11"
    machine: str = "aarch64"
    glibc: str = "2.28"
    """Oldest glibc that the wheels must run on: 2.28 is Debian 10, older than anything that edgesplit supports."""

    def __post_init__(self) -> None:
        if self.python not in PYTHONS:
            raise UsageError(f"no kit for Python {self.python!r}; there are kits for {', '.join(PYTHONS)}")
        if self.machine not in MACHINES:
            raise UsageError(f"no kit for the machine {self.machine!r}; there are kits for {', '.join(MACHINES)}")
        match = re.fullmatch(r"2\.([0-9]{2})", self.glibc)
        if match is None or int(match[1]) < OLDEST_GLIBC:
            raise UsageError(f"{self.glibc!r} is not a version of the GNU C library in wheel tags, as in 2.28")

    def __str__(self) -> str:
        return f"Python {self.python} on {self.machine}"

    @property
    def platforms(self) -> tuple[str, ...]:
        """Platform tags of wheels that run on the target, newest first."""
        newest = int(self.glibc.split(".")[1])
        tags = [f"manylinux_2_{minor}_{self.machine}" for minor in range(newest, OLDEST_GLIBC - 1, -1)]
        return (*tags, f"manylinux2014_{self.machine}")

    @property
    def markers(self) -> dict[str, str]:
        """Values of environment markers on the target (PEP 508)."""
        return {
            "implementation_name": "cpython",
            "implementation_version": f"{self.python}.0",
            "os_name": "posix",
            "platform_machine": self.machine,
            "platform_python_implementation": "CPython",
            "platform_release": "",
            "platform_system": "Linux",
            "platform_version": "",
            "python_full_version": f"{self.python}.0",
            "python_version": self.python,
            "sys_platform": "linux",
            "extra": "",
        }


def needed_glibc(wheels: list[str]) -> str:
    """The oldest glibc that all these wheels run on, by their file names."""
    minors = [OLDEST_GLIBC]
    for name in wheels:
        tags = re.findall(r"manylinux_2_([0-9]{1,2})_", name)
        if tags and "manylinux2014" not in name:
            minors.append(min(int(tag) for tag in tags))
    return f"2.{max(minors)}"
