"""Figures of a process from Linux's /proc, and the memory of this machine."""

from __future__ import annotations

import os
import re
from pathlib import Path

from edgesplit_agent.worker.watchdog_policy import ProcessStats

_TICKS = os.sysconf("SC_CLK_TCK")
_MEMORY = re.compile(r"^(?:RssAnon|RssShmem|VmSwap):\s*(\d+) kB$", re.MULTILINE)
MIN_MEMORY = 256 * 2**20
"""Minimum of a worker's default memory limit, in bytes."""


def read_process_stats(pid: int, proc: Path = Path("/proc")) -> ProcessStats | None:
    """The figures of process `pid`; None if it has ended."""
    try:
        # The name, in brackets, may hold anything: what follows its last bracket is fixed.
        fields = (proc / str(pid) / "stat").read_text("utf-8", "replace").rpartition(")")[2].split()
        status = (proc / str(pid) / "status").read_text("utf-8", "replace")
    except OSError:
        return None
    if not fields or fields[0] in "ZX":
        return None
    cpu_s = (int(fields[11]) + int(fields[12])) / _TICKS
    return ProcessStats(fields[0] in "Tt", cpu_s, 1024 * sum(map(int, _MEMORY.findall(status))))


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
    """Default memory limit of a worker: half of the machine's."""
    return max(MIN_MEMORY, machine // 2)
