"""What a cut gives to be kept: its chunks by name."""

from __future__ import annotations

from collections.abc import Iterable

from edgesplit_partitioner.ir.chunking import Bytes
from edgesplit_partitioner.slicing import CutSlice


def chunk_bytes(slices: Iterable[CutSlice]) -> dict[str, Bytes]:
    """Every chunk of the slices by its SHA-256, each once."""
    found: dict[str, Bytes] = {}
    for cut in slices:
        for file in cut.slice.files:
            found.update(zip((chunk.sha256 for chunk in file.chunks), cut.runs[file.name], strict=True))
    return found
