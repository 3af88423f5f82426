"""What the kernel says of a process (Linux's /proc), and how much memory this machine has."""

from __future__ import annotations

import os
import re
from pathlib import Path

from edgesplit_agent.worker.watchdog_policy import Vitals

_TICKS = os.sysconf("SC_CLK_TCK")
_MEMORY = re.compile(r"^(?:RssAnon|RssShmem|VmSwap):\s*(\d+) kB$", re.MULTILINE)
SMALLEST_MEMORY = 256 * 2**20


def vitals(pid: int, proc: Path = Path("/proc")) -> Vitals | None:
    """Of that process; None where it has ended."""
    try:
        # The name, in brackets, may hold anything: what follows its last bracket is fixed.
        fields = (proc / str(pid) / "stat").read_text("utf-8", "replace").rpartition(")")[2].split()
        status = (proc / str(pid) / "status").read_text("utf-8", "replace")
    except OSError:
        return None
    if not fields or fields[0] in "ZX":
        return None
    cpu_s = (int(fields[11]) + int(fields[12])) / _TICKS
    return Vitals(fields[0] in "Tt", cpu_s, 1024 * sum(map(int, _MEMORY.findall(status))))


def machine_memory(root: Path = Path("/")) -> int:
    """Bytes that this machine, or the group of processes that we are in, may use."""
    limits = [os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")]
    for file in ("sys/fs/cgroup/memory.max", "sys/fs/cgroup/memory/memory.limit_in_bytes"):
        try:
            said = (root / file).read_text().strip()
        except OSError:
            continue
        if said.isdigit() and int(said) > 0:
            limits.append(int(said))
    return min(limits)


def default_memory(machine: int) -> int:
    """What a worker may take unless the operator says: half of the machine."""
    return max(SMALLEST_MEMORY, machine // 2)
