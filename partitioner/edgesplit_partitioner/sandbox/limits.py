"""Resource limits of a child process that loads an untrusted model; the child sets them itself before it loads
anything."""

from __future__ import annotations

import resource
from contextlib import suppress
from pathlib import Path


def confine(memory_bytes: int) -> None:
    """Limit this process's address space to `memory_bytes`, or to its present limit where that is lower; disable core
    files; and make this process the first that the kernel kills when the machine's memory runs out."""
    _, hard_limit = resource.getrlimit(resource.RLIMIT_AS)
    allowed = memory_bytes if hard_limit == resource.RLIM_INFINITY else min(memory_bytes, hard_limit)
    resource.setrlimit(resource.RLIMIT_AS, (allowed, allowed))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with suppress(OSError):  # only Linux has it
        Path("/proc/self/oom_score_adj").write_text("1000")
