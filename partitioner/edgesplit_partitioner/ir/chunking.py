"""Division of slice files into content-addressed chunks that stay the same when other parts of the model change.

A weight's chunk depends on that weight and its layer alone: every tensor is padded to a multiple of 64 bytes, small
tensors are grouped with their neighbours in the same layer, and weights that several layers use get chunks of their
own. A new switching table for the same model, or new weights in one layer, leaves the digest of every other chunk as it
was, so devices fetch only what differs.
"""

from __future__ import annotations

import hashlib
import mmap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from edgesplit.limits import LIMITS
from edgesplit.release.manifest import Chunk, FileName, SliceFile

ALIGNMENT = 64
"""Bytes to a multiple of which every tensor is padded in the weights file."""
GROUP_BYTES = 65_536
"""Small tensors of one layer share a chunk of at most this many bytes."""


Data: TypeAlias = bytes | mmap.mmap
"""Contents of a model file, which may be memory-mapped."""
Bytes: TypeAlias = bytes | memoryview
"""Contents of a file or tensor. A memoryview may be of a memory-mapped file, so a slice larger than the memory can be
chunked too."""


@dataclass(frozen=True, slots=True)
class WeightData:
    """A weight tensor's bytes, with the layer whose small tensors it may share a chunk with."""

    layer: str
    """Name of that layer; empty for a weight that several layers use, which is grouped with no other."""
    data: Bytes


def padded_size(size: int) -> int:
    """Bytes that a tensor of `size` bytes takes in the weights file, padding included."""
    return size + -size % ALIGNMENT


def padded(data: Bytes) -> Bytes:
    """`data` with zeros appended up to the next multiple of `ALIGNMENT`; `data` itself where it already ends there."""
    return data if not len(data) % ALIGNMENT else bytes(data) + bytes(-len(data) % ALIGNMENT)


def weight_chunks(tensors: Iterable[WeightData]) -> list[Bytes]:
    """Chunks of a weights file, in order; joined they are the file. Chunks of large tensors are views, not copies."""
    chunks: list[Bytes] = []
    group: list[Bytes] = []
    group_layer = ""

    def flush() -> None:
        if group:
            chunks.append(b"".join(group))
            group.clear()

    for tensor in tensors:
        size = padded_size(len(tensor.data))
        fits_group = tensor.layer and tensor.layer == group_layer and sum(map(len, group)) + size <= GROUP_BYTES
        if not fits_group:
            flush()
        group_layer = tensor.layer
        # A tensor above the group size is cut into chunks of its own; only its last chunk needs the padding.
        if size > GROUP_BYTES:
            *full_chunks, last = split_into_chunks(tensor.data)
            chunks.extend((*full_chunks, padded(last)))
        elif size:
            group.append(padded(tensor.data))
    flush()
    return chunks


def split_into_chunks(data: Bytes) -> list[Bytes]:
    """`data` in chunks of `LIMITS.chunk_bytes` (the last may be shorter), as views of it."""
    view = memoryview(data)
    return [view[start : start + LIMITS.chunk_bytes] for start in range(0, len(view), LIMITS.chunk_bytes)]


def slice_file(name: FileName, chunks: Sequence[Bytes]) -> SliceFile:
    """The manifest's entry for a file that consists of these chunks: its size, its SHA-256 and each chunk's SHA-256 and
    size."""
    file_digest = hashlib.sha256()
    for chunk in chunks:
        file_digest.update(chunk)
    entries = tuple(Chunk(hashlib.sha256(chunk).hexdigest(), len(chunk)) for chunk in chunks)
    return SliceFile(name, sum(map(len, chunks)), file_digest.hexdigest(), entries)
