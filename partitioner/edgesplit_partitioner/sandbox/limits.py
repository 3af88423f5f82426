"""A child process that meets a stranger's model, limited before it does."""

from __future__ import annotations

import resource
from contextlib import suppress
from pathlib import Path


def confine(memory_bytes: int) -> None:
    """At most so much address space for this process, or less where it has less already; no core files; and where the
    machine's memory runs out, this process is what has to go."""
    _, most = resource.getrlimit(resource.RLIMIT_AS)
    allowed = memory_bytes if most == resource.RLIM_INFINITY else min(memory_bytes, most)
    resource.setrlimit(resource.RLIMIT_AS, (allowed, allowed))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with suppress(OSError):  # only Linux has it
        Path("/proc/self/oom_score_adj").write_text("1000")
