"""Bytes of slices as chunks that stay the same when something else changes.

A weight's chunk depends on that weight and its layer alone: every tensor is padded to a multiple of 64 bytes, small
ones are grouped with their neighbours in the same layer, weights that several layers use stand alone. So a new table
of cuts for the same model, or new weights in one layer, leaves every other chunk's name as it was.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from edgesplit.limits import LIMITS
from edgesplit.release.manifest import Chunk, FileName, SliceFile

ALIGNMENT = 64
GROUP_BYTES = 65_536
"""Small tensors of one layer share a chunk up to this size."""


Bytes: TypeAlias = bytes | memoryview
"""A view is of a file that is mapped: a slice larger than the memory is cut like any other."""


@dataclass(frozen=True, slots=True)
class Piece:
    """A weight tensor's bytes, and the layer it is grouped with; an empty owner: with none."""

    owner: str
    data: Bytes


def padded_bytes(size: int) -> int:
    """What a tensor of so many bytes takes in the weights file."""
    return size + -size % ALIGNMENT


def padded(data: Bytes) -> Bytes:
    """`data` with zeros up to the next multiple of the alignment; itself where it ends there."""
    return data if not len(data) % ALIGNMENT else bytes(data) + bytes(-len(data) % ALIGNMENT)


def weight_runs(pieces: Iterable[Piece]) -> list[Bytes]:
    """The chunks of a weights file, in order; joined they are the file. Views of large tensors, not copies."""
    runs: list[Bytes] = []
    group: list[Bytes] = []
    owner = ""

    def flush() -> None:
        if group:
            runs.append(b"".join(group))
            group.clear()

    for piece in pieces:
        size = padded_bytes(len(piece.data))
        fits = piece.owner and piece.owner == owner and sum(map(len, group)) + size <= GROUP_BYTES
        if not fits:
            flush()
        owner = piece.owner
        if size > GROUP_BYTES:
            *whole, last = plain_runs(piece.data)
            runs.extend((*whole, padded(last)))
        elif size:
            group.append(padded(piece.data))
    flush()
    return runs


def plain_runs(data: Bytes) -> list[Bytes]:
    """`data` in chunks of the largest size, as views of it."""
    view = memoryview(data)
    return [view[start : start + LIMITS.chunk_bytes] for start in range(0, len(view), LIMITS.chunk_bytes)]


def slice_file(name: FileName, runs: Sequence[Bytes]) -> SliceFile:
    """The manifest's entry for a file that consists of `runs`."""
    whole = hashlib.sha256()
    for run in runs:
        whole.update(run)
    listed = tuple(Chunk(hashlib.sha256(run).hexdigest(), len(run)) for run in runs)
    return SliceFile(name, sum(map(len, runs)), whole.hexdigest(), listed)
