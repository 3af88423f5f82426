"""Figures of a process from Linux's /proc."""

from __future__ import annotations

import os
import re
from pathlib import Path

from edgesplit_agent.worker.watchdog_policy import ProcessStats

_TICKS = os.sysconf("SC_CLK_TCK")
_MEMORY = re.compile(r"^(?:RssAnon|RssShmem|VmSwap):\s*(\d+) kB$", re.MULTILINE)


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
