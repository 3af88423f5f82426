"""Limits of a child process that loads an untrusted model."""

from __future__ import annotations

import math
import os
import resource
from pathlib import Path
from typing import Final

from edgesplit.process.confinement import Confinement

MEMORY_BYTES: Final = 16 * 2**30
"""Address space in bytes, in addition to `MEMORY_FACTOR` times the model's size: folding a constant may allocate any
amount, and a runtime reserves much that it never touches."""
MEMORY_FACTOR: Final = 16
FILE_BYTES: Final = 2**30
"""Size in bytes of a file that the child may write, in addition to eight times the model's size."""
TRIAL_CPU_S: Final = 30.0
"""Processor seconds of a trial, in addition to those for reading and writing the model."""
CPU_BYTES_PER_S: Final = 20e6
"""Bytes of a model for which a trial gets another processor second."""


def trial_limits(size: int, folder: Path) -> Confinement:
    """Limits of a child that loads a model of `size` bytes from the folder and runs it at most a few times."""
    return _limits(size, folder, TRIAL_CPU_S + size / CPU_BYTES_PER_S)


def measurement_limits(size: int, folder: Path | None, limit_s: float) -> Confinement:
    """Limits of a child that runs a model of `size` bytes for up to `limit_s` seconds, on all cores."""
    return _limits(size, folder, limit_s * (os.cpu_count() or 1))


def out_of_memory() -> str:
    """The child's refusal of a model for which its memory was not enough."""
    return f"the model needs more than {resource.getrlimit(resource.RLIMIT_AS)[0] / 2**30:.0f} GiB of memory"


def folder_bytes(folder: Path) -> int:
    """Size of all files in the folder in bytes, a measure of the model that is in them."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def _limits(size: int, folder: Path | None, cpu_s: float) -> Confinement:
    return Confinement(
        memory_bytes=MEMORY_BYTES + MEMORY_FACTOR * size,
        cpu_s=math.ceil(cpu_s),
        file_bytes=FILE_BYTES + 8 * size,
        folder=str(folder.resolve()) if folder is not None else "",
    )
