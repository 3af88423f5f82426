"""The memory of this machine, and the share of it that a child process may use by default."""

from __future__ import annotations

import os
from pathlib import Path

MIN_MEMORY = 256 * 2**20
"""Minimum of a child's default memory limit, in bytes."""


def machine_memory(root: Path = Path("/")) -> int:
    """Bytes that this machine, or this process's control group, may use."""
    limits = [os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")]
    for file in ("sys/fs/cgroup/memory.max", "sys/fs/cgroup/memory/memory.limit_in_bytes"):
        try:
            text = (root / file).read_text().strip()
        except OSError:
            continue
        if text.isdigit() and int(text) > 0:
            limits.append(int(text))
    return min(limits)


def default_memory(machine: int) -> int:
    """Default memory limit of a child process: half of the machine's."""
    return max(MIN_MEMORY, machine // 2)
