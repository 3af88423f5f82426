"""Disk and memory of the machine, as the kernel reports them."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path

from edgesplit.mqtt.telemetry import MachineState

_MEMINFO = re.compile(r"^(MemTotal|MemAvailable):\s+(\d{1,15}) kB$", re.MULTILINE)


def machine_figures(folder: Path, meminfo: Path = Path("/proc/meminfo")) -> MachineState:
    """Space on the disk that contains `folder`, and memory, in bytes; None for what cannot be read."""
    disk_free, disk_total = _disk(folder)
    memory = _memory(meminfo)
    return MachineState(
        disk_free_bytes=disk_free,
        disk_bytes=disk_total,
        memory_free_bytes=memory.get("MemAvailable"),
        memory_bytes=memory.get("MemTotal"),
    )


def installed_versions(packages: Iterable[str]) -> dict[str, str]:
    """Version by name of those packages that are installed."""
    versions = {}
    for name in packages:
        with contextlib.suppress(metadata.PackageNotFoundError):
            versions[name] = metadata.version(name)
    return versions


def _disk(folder: Path) -> tuple[int | None, int | None]:
    try:
        disk = os.statvfs(folder)
    except OSError:
        return None, None
    return disk.f_bavail * disk.f_frsize, disk.f_blocks * disk.f_frsize


def _memory(meminfo: Path) -> dict[str, int]:
    try:
        text = meminfo.read_text("ascii", "replace")[:4_096]
    except OSError:
        return {}
    return {name: 1024 * int(kilobytes) for name, kilobytes in _MEMINFO.findall(text)}
